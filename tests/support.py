"""Inputs and comparisons that several test files share."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import cortiq_o1 as o1
from cortiq_o1.reference import ReferenceLayer, worst_error

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


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
