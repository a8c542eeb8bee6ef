"""Inputs and comparisons that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import cortiq_o1 as o1
from cortiq_o1.paths import PATHS
from cortiq_o1.planes import MOVING_PLANES
from cortiq_o1.reference import ReferenceLayer, worst_error

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]

ODD = o1.Geometry(6, 2, 12, 20, window=24, sinks=3, landmarks=9, windows=(24, 7))
"""Different widths, uneven windows; sealed from 19 rows on."""
SHORT = o1.Geometry(4, 2, 8, 12, window=16, sinks=2, landmarks=8, windows=(16, 9))
"""Seals itself once more than 19 rows are there."""


def random_rows(rng: np.random.Generator, rows: int, geometry: o1.Geometry, spread: float = 1.0) -> Rows:
    """Queries, keys and values around a few centres, as a model's are, float32."""
    g, nh, d = geometry.num_kv_heads, geometry.num_heads, geometry.head_dim
    centres = spread * rng.standard_normal((g, 4, d))
    which = rng.integers(0, 4, rows)
    k = centres[:, which].transpose(1, 0, 2) + 0.3 * rng.standard_normal((rows, g, d))
    q = np.repeat(centres[:, which].transpose(1, 0, 2), nh // g, axis=1) + 0.3 * rng.standard_normal(
        (rows, nh, d)
    )
    v = rng.standard_normal((rows, g, geometry.value_dim or d))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def part(rows: Rows, where: slice) -> Rows:
    """Those rows of all three."""
    q, k, v = rows
    return q[where], k[where], v[where]


def sealed(
    rng: np.random.Generator, geometry: o1.Geometry = ODD, rows: int = 90, **options: Any
) -> o1.LayerState:
    """The state of a prompt of so many rows, or of as many as a seal needs."""
    return o1.seal(*random_rows(rng, max(rows, geometry.exact_rows + 1), geometry), geometry, **options)


def paths_of(device: o1.Device) -> Iterator[o1.Device]:
    """The device as it is, then once for each path that can be forced on it."""
    yield device
    if device.path == "auto":
        for path in PATHS:
            if path != "auto":
                # On a GPU the same open device, so that its pipelines are there already.
                yield o1.open_device(device.described if device.gpu is None else device.gpu, path=path)


def record_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The positional arguments of every later call of a method, which goes through as ever."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(owner, name)

    def recorded(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return method(*args, **named)

    monkeypatch.setattr(owner, name, recorded)
    return calls


def encode(gpu: o1.Device, layer: o1.Layer, rows: Rows, commit: bool = True) -> None:
    """`Layer.encode` of the rows, submitted; the outputs stay where they are."""
    import wgpu

    geometry, device = layer.geometry, gpu.gpu
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
    buffers = [device.create_buffer_with_data(data=x, usage=usage) for x in rows]
    size = 4 * len(rows[0]) * geometry.num_heads * (geometry.value_dim or 0)
    buffers.append(device.create_buffer(size=size, usage=usage))
    encoder = device.create_command_encoder()
    compute_pass = encoder.begin_compute_pass()
    layer.encode(compute_pass, *buffers, len(rows[0]), commit)
    compute_pass.end()
    device.queue.submit([encoder.finish()])


def moving(layer: o1.Layer) -> dict[str, np.ndarray]:
    """The planes of a sealed layer that rows move."""
    planes = layer.state().planes
    return {name: planes[name] for name in MOVING_PLANES}


def assert_same_planes(a: dict[str, np.ndarray], b: dict[str, np.ndarray], what: str = "") -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), f"{name} {what}"


def assert_same_state(a: o1.LayerState, b: o1.LayerState) -> None:
    """Bit for bit, whatever a slot that nobody reads holds."""
    assert (a.geometry, a.options, a.rows, a.sealed) == (b.geometry, b.options, b.rows, b.sealed)
    for name in a.planes:
        np.testing.assert_array_equal(a.planes[name], b.planes[name], err_msg=name)
    for x, y in zip(a.history or (), b.history or (), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_follows(state: o1.LayerState, rows: Rows, out: np.ndarray) -> None:
    """`out` is what the float64 reference, started from `state`, gives for `rows`, within its bounds."""
    reference = ReferenceLayer.from_planes(state.geometry, state.planes)
    error, ratio = worst_error(reference.run(*rows), out)
    assert ratio <= 1.0, f"worst error {error:.2e}, {ratio:.2f} times its bound"


@st.composite
def geometries(draw: Any, max_window: int = 48) -> o1.Geometry:
    """Small layers of every kind."""
    groups = draw(st.integers(1, 3))
    window = draw(st.integers(1, max_window))
    windows = draw(st.none() | st.tuples(*[st.integers(1, window)] * groups))
    return o1.Geometry(
        num_heads=groups * draw(st.integers(1, 5)),
        num_kv_heads=groups,
        head_dim=4 * draw(st.integers(1, 12)),
        value_dim=4 * draw(st.integers(1, 12)),
        window=window,
        sinks=draw(st.integers(0, 6)),
        landmarks=draw(st.integers(4, 20)),
        windows=windows,
        rect=draw(st.sampled_from(["aggregate", "fm"])),
    )
