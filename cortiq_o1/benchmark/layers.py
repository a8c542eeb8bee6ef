"""The layers that are timed: a sealed one, and exact attention by the same kernels."""

from __future__ import annotations

import numpy as np

from ..arrays import Float32
from ..geometry import MIN_LANDMARKS, Geometry
from ..planes import META_FAR_LIMIT, META_LEN, Sizes
from ..plans import plane_bytes
from ..sealing import empty_planes, seal
from ..state import LayerState, SealOptions

SEED = 20_260
_BLOCK = 1 << 20  # random floats before they repeat: what lies in memory does not change the time


def random_rows(geometry: Geometry, rows: int) -> tuple[Float32, Float32, Float32]:
    """Queries, keys and values of `rows` rows, Gaussian, the same in every run."""
    rng = np.random.default_rng(SEED)
    value_dim = geometry.value_dim or geometry.head_dim

    def draw(heads: int, width: int) -> Float32:
        return rng.standard_normal((rows, heads, width), dtype=np.float32)

    return (
        draw(geometry.num_heads, geometry.head_dim),
        draw(geometry.num_kv_heads, geometry.head_dim),
        draw(geometry.num_kv_heads, value_dim),
    )


def sealed_state(geometry: Geometry) -> LayerState:
    """A layer sealed over random rows, its ring full, its far field in use."""
    state = seal(*random_rows(geometry, geometry.exact_rows + geometry.landmarks), geometry)
    return state


def exact_geometry(geometry: Geometry, context: int) -> Geometry:
    """Exact attention over `context` rows: a window that holds them all and nothing behind it."""
    return Geometry(
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.value_dim,
        window=context,
        sinks=0,
        landmarks=MIN_LANDMARKS,
        scale=geometry.scale,
    )


def exact_state(geometry: Geometry) -> LayerState:
    """A layer of `exact_geometry` whose ring is full and whose far field stays empty."""
    planes = empty_planes(geometry)
    planes["group_meta"][:, META_LEN] = geometry.window
    planes["group_meta"][:, META_FAR_LIMIT] = 0
    block = np.random.default_rng(SEED).standard_normal(_BLOCK, dtype=np.float32)
    for name in ("ring_k", "ring_v"):
        planes[name] = np.resize(block, planes[name].shape)
    return LayerState(geometry, SealOptions(fold="never"), rows=geometry.window, planes=planes)


def moved_bytes(geometry: Geometry, rows: int, far: bool, kv: str) -> int:
    """The least that a call has to move: the state read once, what changes of it written once,
    the rows in and out. Without `far` only the near part of the state counts. `kv`: how rings are kept."""
    sizes = Sizes.of(geometry, rows, kv=kv)
    read = ["ring_k", "ring_v"]
    written = []
    if far:
        read += ["k_tilde", "q_tilde", "mix", "far_mz", "t_hat"]
        written += ["far_mz", "t_hat"]
    passing = ["q", "out", "k_rows", "v_rows", "k_rows", "v_rows"]  # a row's key and value go into the ring
    return sum(plane_bytes(name, sizes) for name in read + written + passing)
