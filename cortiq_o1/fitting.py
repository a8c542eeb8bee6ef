"""Landmarks and mixing matrix fitted to a prompt's attention weights, in float64.

What the far field is to give is a row of attention weights, `W[t, j] = exp(s q_t k_j - lse_t)`, as a
product of rank `m`: `F M E` with `F = exp(s q K~ - lse)` and `E = exp(s Q~ k)`. So landmarks are taken where
W needs them, by pivoted Cholesky of its Gram matrix (Harbrecht, Peters, Schneider 2012, "On the low-rank
approximation by the pivoted Cholesky decomposition") and weighted k-means, and M is the ridge least-squares
solution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Float32
from .geometry import Geometry
from .planes import MZ_SHIFT
from .state import SealOptions

Float64 = npt.NDArray[np.float64]
Planes = dict[str, npt.NDArray[Any]]

TRAINING_ROWS, TRAINING_KEYS = 512, 4096
"""Rows and keys that are fitted at most, evenly spaced over those given."""
KMEANS_STEPS = 3
TURNED_QUERIES, TURNED_KEYS = 2, 1
"""Copies of each training query and key at later positions, where the rotary embedding is known."""
MOST_EXPONENT = 80.0
"""Scales are folded back into M within this range: float32 holds e^88."""
PIECE_KEYS = 4096
SEED = 12


def place_fitted(
    planes: Planes,
    g: int,
    m: int,
    q: Float32,
    k: Float32,
    geometry: Geometry,
    options: SealOptions,
    sinks: int,
    causal: bool,
) -> None:
    """`m` fitted landmarks of group `g` and what mixes them, into planes that are zero there.

    Args:
        planes: state planes.
        g, m: the group, and how many landmarks.
        q: queries `(Tq, H, d)` of the group's heads.
        k: keys `(T, d)`; where `causal` of the same rows as the queries.
        geometry, options: the layer's.
        sinks: keys first that the far field never holds.
        causal: whether row t has seen the keys up to its own alone; otherwise all of them.
    """
    scale = float(geometry.scale32)
    rows = _spread(len(q), TRAINING_ROWS)
    columns = sinks + _spread(len(k) - sinks, TRAINING_KEYS)
    queries, keys = q[rows].astype(np.float64), k[columns].astype(np.float64)
    last = rows if causal else None
    lse = np.stack([_log_mass(scale * queries[:, h], k, last) for h in range(q.shape[1])])
    if options.rope_theta is not None:
        assert options.horizon is not None
        queries, keys, lse = _turned(queries, keys, lse, rows, columns, k, scale, options)
    weights = [
        np.exp(np.minimum(scale * (queries[:, h] @ keys.T) - lse[h][:, None], 0.0)) for h in range(q.shape[1])
    ]
    stacked = np.concatenate(weights)
    # Landmarks are rounded before M is made for them: the kernels see the rounded ones.
    k_tilde = planes["k_tilde"][g, :m] = _landmarks(stacked, keys, m)
    for h in range(q.shape[1]):
        head = g * geometry.heads_per_group + h
        q_tilde = planes["q_tilde"][head, :m] = _landmarks(weights[h].T, queries[:, h], m)
        left = scale * (queries[:, h] @ k_tilde.astype(np.float64).T) - lse[h][:, None]
        right = scale * (q_tilde.astype(np.float64) @ keys.T)
        mix, shift = _solved(weights[h], left, right, options.ridge_of())
        planes["mix"][head, :m, :m] = mix
        planes["far_mz"][head, MZ_SHIFT] = shift


def _spread(count: int, most: int) -> npt.NDArray[np.intp]:
    """At most `most` of `count` indices, evenly spaced, the last one among them."""
    if count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).round().astype(np.intp)


def _log_mass(queries: Float64, k: Float32, last: npt.NDArray[np.intp] | None) -> Float64:
    """The log of each row's softmax denominator over keys `k`, up to `last` of them where it is given.

    `queries (T, d)` are scaled.
    """
    found = np.full(len(queries), -np.inf)
    for at in range(0, len(k), PIECE_KEYS):
        piece = k[at : at + PIECE_KEYS].astype(np.float64)
        logits = queries @ piece.T
        if last is not None:
            logits[np.arange(at, at + len(piece)) > last[:, None]] = -np.inf
        top = np.maximum(logits.max(axis=1), -1e300)  # a piece past all that a row has seen
        mass = np.exp(logits - top[:, None]).sum(axis=1)
        found = np.logaddexp(found, top + np.log(np.maximum(mass, 1e-300)))
    return found


def _landmarks(weights: Float64, points: Float64, m: int) -> Float32:
    """`m` points `(m, d)` that stand for the columns of `weights (rows, n)` over `points (n, d)`."""
    size = np.einsum("ij,ij->j", weights, weights)
    found = points[_pivots(weights, size, m)].copy()
    weight = np.sqrt(size)
    squares = np.einsum("nd,nd->n", points, points)
    for _ in range(KMEANS_STEPS):
        distances = squares[:, None] - 2.0 * (points @ found.T) + np.einsum("md,md->m", found, found)
        nearest = distances.argmin(axis=1)
        mass = np.bincount(nearest, weight, len(found))
        sums = np.zeros_like(found)
        np.add.at(sums, nearest, weight[:, None] * points)
        moved = mass > 0.0
        found[moved] = sums[moved] / mass[moved, None]
    return found.astype(np.float32)


def _pivots(weights: Float64, size: Float64, m: int) -> list[int]:
    """Columns that pivoted Cholesky of `weights^T weights` takes first; `size` is its diagonal."""
    left = size.copy()
    basis = np.empty((m, len(weights)))
    chosen: list[int] = []
    for i in range(m):
        pivot = int(left.argmax())
        column = weights[:, pivot] - basis[:i].T @ (basis[:i] @ weights[:, pivot])
        norm = float(np.linalg.norm(column))
        chosen.append(pivot)
        # Past the rank of W nothing is left to take: any column will do.
        basis[i] = column / norm if norm > 0.0 else 0.0
        left = np.maximum(left - (basis[i] @ weights) ** 2, 0.0)
        left[chosen] = -1.0
    return chosen


def _solved(weights: Float64, left: Float64, right: Float64, ridge: float) -> tuple[Float32, np.float32]:
    """M `(m, m)` times exp(c), and the shift c, of the logits of F `(rows, m)` and E `(m, n)`.

    `(F^T F + l I)^-1 F^T W E^T (E E^T + l I)^-1`, l `ridge` times the mean diagonal, F's columns and E's rows
    scaled to a maximum of 1 and M scaled back.
    """
    top_left, top_right = left.max(axis=0), right.max(axis=1)
    f, e = np.exp(left - top_left), np.exp(right - top_right[:, None])
    inner = _ridge_solve(f.T @ f, f.T @ (weights @ e.T), ridge)
    mix = _ridge_solve(e @ e.T, inner.T, ridge).T
    shift = np.float32(top_right.max())
    back = float(shift) - top_left[:, None] - top_right[None]
    return (mix * np.exp(np.clip(back, -MOST_EXPONENT, MOST_EXPONENT))).astype(np.float32), shift


def _ridge_solve(gram: Float64, right: Float64, ridge: float) -> Float64:
    lam = ridge * float(np.diag(gram).mean())
    return np.asarray(np.linalg.solve(gram + lam * np.eye(len(gram)), right))


def _turned(
    queries: Float64,
    keys: Float64,
    lse: Float64,
    rows: npt.NDArray[np.intp],
    columns: npt.NDArray[np.intp],
    k: Float32,
    scale: float,
    options: SealOptions,
) -> tuple[Float64, Float64, Float64]:
    """Queries, keys and log masses with copies at random later positions before the horizon."""
    theta, horizon = options.rope_theta, options.horizon
    assert theta is not None
    assert horizon is not None
    rng = np.random.default_rng(SEED)
    more = [queries]
    masses = [lse]
    for _ in range(TURNED_QUERIES):
        turned = rotate(queries, rng.integers(0, np.maximum(horizon - rows, 1)), theta)
        more.append(turned)
        # Later rows have seen all of the prompt.
        masses.append(np.stack([_log_mass(scale * turned[:, h], k, None) for h in range(turned.shape[1])]))
    copies = [keys]
    for _ in range(TURNED_KEYS):
        copies.append(rotate(keys, rng.integers(0, np.maximum(horizon - columns, 1)), theta))
    return np.concatenate(more), np.concatenate(copies), np.concatenate(masses, axis=1)


def rotate(x: Float64, by: npt.NDArray[np.integer[Any]], theta: float) -> Float64:
    """Rows `x (T, ..., d)` of rotary embeddings turned on by so many positions `(T,)`.

    Component i turns with component i + d/2, by `theta^(-2i/d)` a position (Su et al. 2021, "RoFormer", in
    the half-split order of Llama's checkpoints).
    """
    half = x.shape[-1] // 2
    angles = by[:, None] * theta ** (-np.arange(half) / half)
    angles = angles.reshape(len(x), *(1,) * (x.ndim - 2), half)
    cos, sin = np.cos(angles), np.sin(angles)
    low, high = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]], axis=-1)
