"""Landmarks and mixing matrix of a group's rows, and the far field that rows fold into, in float64.

Rows are never copied whole: a prompt may be longer than the memory that its copy would take.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Float32
from .geometry import MIN_LANDMARKS, Geometry
from .planes import MZ_MAX, MZ_SHIFT, MZ_TOTAL, T_TOTAL
from .state import SealOptions

LANDMARK_ROWS = 8
"""Rows that a landmark stands for, at least."""
PIECE_ROWS = 4096
"""Rows that are summed or folded at a time."""

Planes = dict[str, npt.NDArray[Any]]


def landmarks_of(rows: int, geometry: Geometry) -> int:
    """How many landmarks `rows` rows are worth."""
    return min(max(rows // LANDMARK_ROWS, MIN_LANDMARKS), geometry.landmarks)


def place_landmarks(
    planes: Planes, g: int, m: int, q: Float32, k: Float32, geometry: Geometry, options: SealOptions,
    sinks: int = 0, causal: bool = False,
) -> None:  # fmt: skip
    """`m` landmarks of group `g` and what mixes them, by the options' method, from queries `q (Tq, H, d)` and
    keys `k (T, d)`, each of at least `m` rows, into planes that are zero there.

    `sinks`: keys first that the far field never holds; `causal`: whether queries and keys are of the same
    rows.
    """
    if options.method == "fitted":
        from .fitting import place_fitted

        place_fitted(planes, g, m, q, k, geometry, options, sinks, causal)
    else:
        place_means(planes, g, m, q, k, geometry, options.ridge_of())


def place_means(
    planes: Planes, g: int, m: int, q: Float32, k: Float32, geometry: Geometry, ridge: float
) -> None:
    """Means of `m` segments of queries `q (Tq, H, d)` and of keys `k (T, d)`, and their kernel's inverse,
    into planes that are zero there."""
    # Landmarks are rounded to float32 before the mixing matrix is made from them: the kernels see
    # the rounded ones, and the far field cancels too much to bear a matrix made for others.
    k_tilde = planes["k_tilde"][g, :m] = _segment_means(k, m)
    q_tilde = _segment_means(q, m)
    for h in range(geometry.heads_per_group):
        head = g * geometry.heads_per_group + h
        mix, shift = _mixing(q_tilde[:, h], k_tilde, float(geometry.scale32), ridge)
        planes["q_tilde"][head, :m] = q_tilde[:, h]
        planes["mix"][head, :m, :m] = mix
        planes["far_mz"][head, MZ_SHIFT] = shift


def place_far(planes: Planes, g: int, m: int, k: Float32, v: Float32, geometry: Geometry) -> None:
    """Rows `k (n, d)`, `v (n, dv)`, at least one, as all that group `g` has folded."""
    own = slice(g * geometry.heads_per_group, (g + 1) * geometry.heads_per_group)
    shifts = planes["far_mz"][own, MZ_SHIFT, 0].astype(np.float64)
    queries = float(geometry.scale32) * planes["q_tilde"][own, :m].astype(np.float64)
    mu, mass, num = _folded(queries, shifts, k, v)
    planes["far_mz"][own, MZ_MAX, :m] = mu
    planes["far_mz"][own, MZ_TOTAL, :m] = mass
    planes["t_hat"][own, T_TOTAL, :m] = num


def _segment_means(x: Float32, m: int) -> Float32:
    """Means of `m` contiguous segments of `x (T, ...)`, `(m, ...)`, summed in float64."""
    rows = len(x)
    means = np.empty((m, *x.shape[1:]), np.float32)
    for i in range(m):
        start, end = i * rows // m, (i + 1) * rows // m
        total = np.zeros(x.shape[1:])
        for at in range(start, end, PIECE_ROWS):
            total += x[at : min(at + PIECE_ROWS, end)].sum(axis=0, dtype=np.float64)
        means[i] = total / (end - start)
    return means


def _mixing(q_tilde: Float32, k_tilde: Float32, scale: float, ridge: float) -> tuple[Float32, np.float32]:
    """`M = (A^T A + lam I)^-1 A^T`, `lam = ridge mean diag(A^T A)`, `(m, m)`, and the shift `c`.

    `A = exp(s Q~ K~^T - c)`, `c` the largest logit: M scales as 1 / A, so the operator's own M is this
    one times `exp(-c)`. By Cholesky in float64, `lam` times ten when that fails.
    """
    logits = scale * (q_tilde.astype(np.float64) @ k_tilde.astype(np.float64).T)
    shift = np.float32(logits.max())
    a = np.exp(logits - shift)
    gram = a.T @ a
    lam = ridge * float(np.diag(gram).mean())
    eye = np.eye(len(gram))
    while True:
        try:
            lower = np.linalg.cholesky(gram + lam * eye)
            break
        except np.linalg.LinAlgError:
            lam *= 10.0
    return np.linalg.solve(lower.T, np.linalg.solve(lower, a.T)).astype(np.float32), shift


def _folded(
    queries: npt.NDArray[np.float64], shift: npt.NDArray[np.float64], k: Float32, v: Float32
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Far maximum `(H, m)`, mass `(H, m)` and numerator `(H, m, dv)` of rows `k (n, d)`, `v (n, dv)`.

    `queries (H, m, d)` are scaled query landmarks, `shift (H,)` is taken from every logit.
    """
    heads, m, d = queries.shape
    queries, less = queries.reshape(heads * m, d), np.repeat(shift, m)[:, None]
    pieces = [slice(at, at + PIECE_ROWS) for at in range(0, len(k), PIECE_ROWS)]

    def logits(piece: slice) -> npt.NDArray[np.float64]:
        return queries @ k[piece].astype(np.float64).T - less

    mu = np.full(heads * m, -np.inf)
    for piece in pieces:
        np.maximum(mu, logits(piece).max(axis=1), out=mu)
    # Mass and numerator stand at the scale of the maximum as it is stored, rounded.
    mu32 = mu.astype(np.float32)
    mass = np.zeros(heads * m)
    num = np.zeros((heads * m, v.shape[1]))
    for piece in pieces:
        # A rounded maximum of huge logits may lie far below the largest of them.
        weights = np.exp(np.minimum(logits(piece) - mu32[:, None], 0.0))
        mass += weights.sum(axis=1)
        num += weights @ v[piece].astype(np.float64)
    return mu32.reshape(heads, m), mass.reshape(heads, m), num.reshape(heads, m, -1)
