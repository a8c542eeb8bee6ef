"""States, residents and logs for the tests of the wgpu engine's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu_support import PROMPT
from support import Rows, random_rows

import cortiq_o1 as o1
from cortiq_o1.gpu.buffers import COPY_DST, COPY_SRC, STORAGE
from cortiq_o1.gpu.executor import GpuEngine
from cortiq_o1.gpu.residents import Resident
from cortiq_o1.planes import STATE_PLANES

ODD = o1.Geometry(num_heads=3, num_kv_heads=1, head_dim=8, value_dim=12, window=20, sinks=2, landmarks=5)
"""A sequence of which a plane, `mix`, is no multiple of 16 bytes."""
UNEVEN = o1.Geometry(
    num_heads=4, num_kv_heads=2, head_dim=8, window=24, sinks=1, landmarks=6, windows=(9, 24)
)
ALL = ("q", "k", "v")


def sealed(rng: np.random.Generator, geometry: o1.Geometry, prompt: int = PROMPT) -> o1.LayerState:
    return o1.seal(*random_rows(rng, prompt, geometry), geometry)


def loaded(engine: GpuEngine, state: o1.LayerState, archive: int = 0) -> Resident:
    return engine.upload(state.geometry, state.planes, archive)


def everything(engine: GpuEngine, resident: Resident) -> dict[str, np.ndarray]:
    """The state and, where there is one, the archive."""
    return engine.read(resident, resident.planes)


def stacked(states: Sequence[o1.LayerState]) -> dict[str, np.ndarray]:
    """The planes of a batch of them."""
    return {name: np.concatenate([s.planes[name] for s in states]) for name in STATE_PLANES}


def assert_rows(found: Sequence[np.ndarray], *expected: Rows) -> None:
    """A log of all parts holds those rows, one after another, bit for bit."""
    for got, parts in zip(found, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(parts))


def own_buffers(engine: GpuEngine, rows: Rows) -> list[Any]:
    """The caller's own for `encode`, the output last."""
    device = engine.context.device
    made = []
    for array in rows:
        made.append(device.create_buffer(size=array.nbytes, usage=STORAGE | COPY_DST))
        device.queue.write_buffer(made[-1], 0, array)
    return [*made, device.create_buffer(size=4 * rows[0].size * 4, usage=STORAGE | COPY_SRC)]


def joined(engine: GpuEngine, states: Sequence[o1.LayerState]) -> Resident:
    batch = None
    for at, state in enumerate(states):
        batch = engine.join(batch, loaded(engine, state), at)
    assert batch is not None
    return batch
