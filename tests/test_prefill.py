"""Prompts sealed on every engine, block by block, against the host's seal and the float64 reference."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import geometries, random_rows

import cortiq_o1 as o1
from cortiq_o1.cpu.direct import DirectEngine
from cortiq_o1.planes import ARCHIVE_PLANES, MAX_LOOP_STEPS, SUB_ROWS
from cortiq_o1.planning import BLOCK_ROWS, Limits, block_rows, commit_plan
from cortiq_o1.prefill import seal_on
from cortiq_o1.reference import ReferenceLayer
from cortiq_o1.sealing import sealed_planes
from cortiq_o1.state import SealOptions
from cortiq_o1.verification.layers import _check_state

EVEN = o1.Geometry(4, 2, 16, 12, window=70, sinks=3, landmarks=8)
UNEVEN = o1.Geometry(6, 3, 8, 20, window=150, sinks=0, landmarks=12, windows=(90, 150, 33))
NARROW = o1.Geometry(3, 1, 8, window=1, sinks=1, landmarks=4)
LONG = o1.Geometry(2, 1, 16, window=64, sinks=4, landmarks=16)
EXACT_PLANES = ("group_meta", "ring_k", "ring_v", "k_tilde", "q_tilde", "mix")


def sealed_on(engine: Any, rows: Any, geometry: o1.Geometry, fold: Any = "always", **more: Any) -> Any:
    return engine.read(seal_on(engine, *rows, geometry, SealOptions(fold=fold), **more))


def assert_sealed(planes: dict[str, np.ndarray], rows: Any, geometry: o1.Geometry, fold: Any) -> None:
    """As the host seals: all but the far sums bit for bit, those within float32's rounding of the truth."""
    options = SealOptions(fold=fold)
    host = sealed_planes(*rows, geometry, options)
    for name in EXACT_PLANES:
        np.testing.assert_array_equal(planes[name], host[name], err_msg=name)
    state = o1.LayerState(geometry, options, len(rows[1]), planes=planes)
    for found in _check_state(ReferenceLayer.seal(*rows, geometry, fold=fold), state):
        assert found.ratio <= 1.0, found.where


@pytest.mark.parametrize("fold", ["always", "prompt", "never"])
@pytest.mark.parametrize(
    ("geometry", "rows"),
    [(EVEN, 82), (EVEN, 700), (UNEVEN, 42), (UNEVEN, 160), (UNEVEN, 421), (NARROW, 30)],
    ids=["shortest", "even", "uneven-shortest", "one-ring-fills", "uneven", "window-1"],
)
def test_a_prompt_sealed_on_a_device(
    device: o1.Device, geometry: o1.Geometry, rows: int, fold: Any, rng: np.random.Generator
) -> None:
    prompt = random_rows(rng, rows, geometry)
    assert_sealed(sealed_on(device.engine, prompt, geometry, fold), prompt, geometry, fold)


@given(geometry=geometries(), extra=st.integers(1, 300), seed=st.integers(0, 999))
def test_any_geometry_on_numpy(geometry: o1.Geometry, extra: int, seed: int) -> None:
    prompt = random_rows(np.random.default_rng(seed), geometry.exact_rows + extra, geometry)
    assert_sealed(sealed_on(DirectEngine(1), prompt, geometry), prompt, geometry, "always")


def test_the_first_rows_alone_have_folded_nothing(rng: np.random.Generator) -> None:
    prompt = random_rows(rng, 300, UNEVEN)
    seen = UNEVEN.sinks + UNEVEN.min_window
    planes = sealed_planes(*prompt, UNEVEN, SealOptions(fold="never"), seen)
    state = o1.LayerState(UNEVEN, SealOptions(), seen, planes=planes)  # which checks them
    reference = ReferenceLayer.from_planes(UNEVEN, state.planes)
    for g, group in enumerate(reference.groups):
        assert group.far_len == 0
        assert group.far_limit == 300 - UNEVEN.group_windows[g]
        np.testing.assert_array_equal([k for k, _ in group.ring], prompt[1][:seen, g])


def test_progress_counts_the_rows(device: o1.Device, rng: np.random.Generator) -> None:
    prompt = random_rows(rng, 800, EVEN)
    seen: list[tuple[int, int]] = []
    sealed_on(device.engine, prompt, EVEN, progress=lambda done, rows: seen.append((done, rows)))
    done = [d for d, _ in seen]
    assert {rows for _, rows in seen} == {800}
    assert done[0] == 0
    assert done[-1] == 800
    steps = np.diff(done)
    assert (steps > 0).all()
    assert (steps[1:] <= BLOCK_ROWS).all()


def test_progress_may_end_the_seal(device: o1.Device, rng: np.random.Generator) -> None:
    class Enough(Exception):
        pass

    def stop(done: int, rows: int) -> None:
        if done > rows // 2:
            raise Enough

    prompt = random_rows(rng, 800, EVEN)
    with pytest.raises(Enough):
        sealed_on(device.engine, prompt, EVEN, progress=stop)
    # The engine serves on, from the same buffers.
    assert_sealed(sealed_on(device.engine, prompt, EVEN), prompt, EVEN, "always")


def test_the_archive_takes_none_of_the_prompt(device: o1.Device, rng: np.random.Generator) -> None:
    prompt = random_rows(rng, 400, EVEN)
    resident = seal_on(device.engine, *prompt, EVEN, SealOptions(), archive=64)
    planes = device.engine.read(resident, ARCHIVE_PLANES)
    assert all(len(plane) and not plane.any() for plane in planes.values())
    assert_sealed(device.engine.read(resident), prompt, EVEN, "always")


@pytest.mark.parametrize(
    "geometry",
    [EVEN, UNEVEN, NARROW, LONG, o1.Geometry(32, 8, 128, window=2048), o1.Geometry(8, 1, 512, landmarks=64)],
    ids=["even", "uneven", "window-1", "long", "model-size", "widest"],
)
@pytest.mark.parametrize("path", ["auto", "token", "flash", "stages", "gemm"])
def test_what_a_device_does_at_a_time_is_bounded(geometry: o1.Geometry, path: str) -> None:
    """Whatever the prompt's length: a block's rows, a sub-chunk's, and an invocation's steps."""
    most = block_rows(geometry, Limits(), path)
    assert most <= BLOCK_ROWS
    for rows in {1, 17, most} & set(range(1, most + 1)):
        for dispatch in commit_plan(geometry, rows, path).dispatches:
            params = dict(dispatch.params)
            k = params.get("k", 1)  # "fused" has no other
            assert params["r0"] + k <= rows
            assert k <= SUB_ROWS
            # `o1c_far_e` dots one key and goes thrice over the rows, `o1c_tok_far` at most dots every
            # landmark and goes over the mixing matrix.
            steps = 3 * k + params["d"] // 4
            if dispatch.kernel.startswith("o1c_tok"):
                steps += params["m"] * (params["d"] // 4 + params["m"])
            assert steps <= MAX_LOOP_STEPS, dispatch


@pytest.mark.slow
def test_a_prompt_of_64k_rows(gpu: o1.Device, rng: np.random.Generator) -> None:
    prompt = random_rows(rng, 1 << 16, LONG)
    done: list[int] = []
    planes = sealed_on(gpu.engine, prompt, LONG, progress=lambda rows, _: done.append(rows))
    assert max(np.diff(done)[1:]) <= BLOCK_ROWS
    assert_sealed(planes, prompt, LONG, "always")


def test_the_host_copies_no_prompt(rng: np.random.Generator) -> None:
    """The host's part needs no memory that grows with the prompt."""

    def peak(rows: int) -> int:
        prompt = random_rows(rng, rows, LONG)
        tracemalloc.start()
        try:
            sealed_planes(*prompt, LONG, SealOptions())
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(1 << 16) <= 1.05 * peak(1 << 14)
