"""What the tests of the wgpu executor share."""

from __future__ import annotations

import numpy as np

import cortiq_o1 as o1

GEOMETRY = o1.Geometry(
    num_heads=4, num_kv_heads=2, head_dim=16, value_dim=12, window=24, sinks=2, landmarks=8
)
PROMPT = 60
COPY = {"count": 1, "src_at": 0, "dst_at": 0, "pad0": 0}


def assert_same_planes(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
