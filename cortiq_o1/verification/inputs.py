"""Queries, keys and values to verify with, of several kinds, each with its own numerical trouble."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..geometry import MAX_LANDMARKS, MIN_LANDMARKS, Geometry

Rows = tuple[Float32, Float32, Float32]
"""`q (T, nh, d)`, `k (T, G, d)`, `v (T, G, dv)`."""

_SPREAD = 0.15
"""Noise around a cluster's centre, as a part of the centre's own size."""
REAL_ROWS = 1024


Draw = Callable[[int, int], int]


def drawer(rng: np.random.Generator) -> Draw:
    """Draws whole numbers from a range, both ends included."""

    def draw(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    return draw


def random_geometry(draw: Draw, most: int) -> Geometry:
    """Small heads and widths, windows and landmarks up to `most`."""
    groups = draw(1, 3)
    window = draw(1, most)
    return Geometry(
        num_heads=groups * draw(1, 5),
        num_kv_heads=groups,
        head_dim=4 * draw(1, 24),
        value_dim=4 * draw(1, 24),
        window=window,
        sinks=draw(0, 5),
        landmarks=draw(MIN_LANDMARKS, min(MAX_LANDMARKS, most)),
        windows=tuple(draw(1, window) for _ in range(groups)) if draw(0, 1) else None,
        rect="fm" if draw(0, 3) == 0 else "aggregate",
    )


def _gaussian(geometry: Geometry, rows: int, rng: np.random.Generator) -> Rows:
    """Noise: landmarks stand for nothing, and the far field is a small sum of large terms."""
    return (
        rng.standard_normal((rows, geometry.num_heads, geometry.head_dim), np.float32),
        rng.standard_normal((rows, geometry.num_kv_heads, geometry.head_dim), np.float32),
        _values(geometry, rows, rng),
    )


def _values(geometry: Geometry, rows: int, rng: np.random.Generator) -> Float32:
    return rng.standard_normal((rows, geometry.num_kv_heads, geometry.value_dim or 0), np.float32)


def _clusters(geometry: Geometry, rows: int, rng: np.random.Generator, count: int) -> Rows:
    """Runs of `rows / count` rows around one centre a run, as the landmarks' segments see them."""
    d, groups = geometry.head_dim, geometry.num_kv_heads
    centres = rng.standard_normal((count, groups, d))
    member = np.minimum(np.arange(rows) * count // max(rows, 1), count - 1)

    def around(heads: int) -> npt.NDArray[np.float64]:
        noise = _SPREAD * rng.standard_normal((rows, heads, d))
        return np.repeat(centres, heads // groups, axis=1)[member] + noise

    q, k = around(geometry.num_heads), around(groups)
    return q.astype(np.float32), k.astype(np.float32), _values(geometry, rows, rng)


def _clustered(geometry: Geometry, rows: int, rng: np.random.Generator) -> Rows:
    """As many clusters as landmarks: what the far field is made for."""
    return _clusters(geometry, rows, rng, geometry.landmarks)


def _crowded(geometry: Geometry, rows: int, rng: np.random.Generator) -> Rows:
    """Twice as many clusters as landmarks."""
    return _clusters(geometry, rows, rng, 2 * geometry.landmarks)


def _rotated(geometry: Geometry, rows: int, rng: np.random.Generator) -> Rows:
    """Clusters under a rotary embedding: keys drift away from landmarks made early."""
    q, k, v = _clustered(geometry, rows, rng)
    return _rotate(q), _rotate(k), v


def _rotate(x: Float32) -> Float32:
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angle)[:, None, :] for f in (np.cos, np.sin))
    a, b = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(np.float32)


def _loud(geometry: Geometry, rows: int, rng: np.random.Generator) -> Rows:
    """Clusters with now and then a key far above the rest: maxima jump, old weights vanish."""
    q, k, v = _clustered(geometry, rows, rng)
    k[rng.random(len(k)) < 0.03] *= np.float32(3)
    return q, k, v


def sawtooth(geometry: Geometry, prompt: int, chunks: tuple[int, ...]) -> Rows:
    """The closed formula of the Metal kernels' parity test: a prompt drawn group by group, then one
    stream for all groups. Widths of key and value must be equal."""

    def jit(count: int, start: int, b: int) -> Float32:
        a = np.arange(start, start + count, dtype=np.int64)
        return (((a * 37 + b * 13 + 3) % 83).astype(np.float32) / np.float32(83)) - np.float32(0.5)

    d, groups, heads = geometry.head_dim, geometry.num_kv_heads, geometry.heads_per_group
    size = prompt * d

    def columns(offsets: list[int]) -> Float32:
        return np.stack([jit(size, 0, b).reshape(prompt, d) for b in offsets], axis=1)

    first = (
        columns([3 + h + 20 * g for g in range(groups) for h in range(heads)]),
        columns([1 + 20 * g for g in range(groups)]),
        columns([2 + 20 * g for g in range(groups)]),
    )
    rows = sum(chunks)
    stream = tuple(
        jit(rows * n * d, 0, b).reshape(rows, n, d)
        for n, b in ((groups * heads, 5), (groups, 6), (groups, 7))
    )
    q, k, v = (np.concatenate(pair) for pair in zip(first, stream, strict=True))
    return q, k, v


REAL = Geometry(9, 3, 64, window=128, sinks=4, landmarks=32)
"""The head geometry of the real data; window, sinks and landmarks are free."""


@cache
def _real_arrays() -> Rows:
    with (
        (resources.files("cortiq_o1") / "data" / "smollm2_qkv.npz").open("rb") as file,
        np.load(file) as data,
    ):
        layer = int(data["layers"][0])
        q, k, v = (data[f"{name}_{layer}"].astype(np.float32) for name in "qkv")
    return q, k, v


def _real(geometry: Geometry, rows: int, rng: np.random.Generator) -> Rows:
    """A layer of a real model on prose; the geometry must have its heads and widths."""
    q, k, v = _real_arrays()
    wanted = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.value_dim)
    if wanted != (q.shape[1], k.shape[1], k.shape[2], v.shape[2]) or rows > len(k):
        raise ValueError(
            f"real data: {wanted} with {rows} rows, expected its own geometry and at most {len(k)}"
        )
    return q[:rows], k[:rows], v[:rows]


KINDS: MappingProxyType[str, Callable[[Geometry, int, np.random.Generator], Rows]] = MappingProxyType(
    {
        "clustered": _clustered,
        "rotated": _rotated,
        "crowded": _crowded,
        "gaussian": _gaussian,
        "loud": _loud,
        "real": _real,
    }
)
RANDOM_KINDS: tuple[str, ...] = ("clustered", "rotated", "crowded", "gaussian", "loud")


def make_rows(kind: str, geometry: Geometry, rows: int, seed: int) -> Rows:
    """Rows of one of `KINDS`, the same for the same arguments."""
    return KINDS[kind](geometry, rows, np.random.default_rng(seed))
