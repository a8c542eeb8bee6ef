"""What is compiled ahead of the first call, and that nothing else ever is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_support import GEOMETRY, PROMPT
from support import random_rows

import cortiq_o1 as o1


def compiled(device: o1.Device) -> set[str]:
    return {kernel for kernel, *_ in device.engine.context._pipelines}


@pytest.fixture
def fresh(gpu: o1.Device) -> o1.Device:
    """A device of the adapter that has compiled nothing."""
    return o1.open_device(gpu.gpu.adapter.request_device_sync())


def test_a_call_finds_everything_compiled(fresh: o1.Device, rng: np.random.Generator) -> None:
    done = fresh.warm_up(GEOMETRY, (1, 20))
    assert set(done.kernels) == compiled(fresh)
    assert done.seconds > 0
    layer = fresh.load(o1.seal(*random_rows(rng, PROMPT, GEOMETRY), GEOMETRY))
    for rows in (1, 20):
        layer.attend(*random_rows(rng, rows, GEOMETRY))
        layer.attend(*random_rows(rng, rows, GEOMETRY), commit=False)
        layer.commit(rows)
    assert compiled(fresh) == set(done.kernels)
    assert fresh.warm_up(GEOMETRY, 20) == o1.WarmUp((), 0.0)


def test_a_token_compiles_what_it_needs_alone(fresh: o1.Device, rng: np.random.Generator) -> None:
    layer = fresh.load(o1.seal(*random_rows(rng, PROMPT, GEOMETRY), GEOMETRY))
    assert not compiled(fresh)
    layer.attend(*random_rows(rng, 1, GEOMETRY))
    assert compiled(fresh) == {"o1c_fu_read", "o1c_fu_move"}


def test_numpy_has_nothing_to_compile() -> None:
    assert o1.open_device("cpu").warm_up(GEOMETRY) == o1.WarmUp((), 0.0)


@pytest.mark.parametrize(
    ("geometry", "rows", "error", "message"),
    [
        (None, 1, o1.ArgumentTypeError, r"geometry: NoneType"),
        (GEOMETRY, 0, o1.ArgumentError, r"rows: 0"),
        (GEOMETRY, (1, "2"), o1.ArgumentTypeError, r"rows\[1\]: '2'"),
        (GEOMETRY, "12", o1.ArgumentTypeError, r"rows: '12'"),
    ],
)
def test_bad_arguments(geometry: Any, rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        o1.open_device("cpu").warm_up(geometry, rows)
