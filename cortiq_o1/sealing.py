"""A prompt's queries, keys and values in, a layer's state out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Float32, as_float32
from .errors import ArgumentTypeError
from .geometry import MIN_LANDMARKS, Geometry
from .planes import (
    LARGE,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    MZ_MAX,
    MZ_SHIFT,
    MZ_TOTAL,
    NO_FAR_LIMIT,
    PLANES,
    STATE_PLANES,
    T_TOTAL,
    Sizes,
)
from .state import Fold, LayerState, SealOptions

_FOLD_ROWS = 4096  # rows folded at a time, so that a long prompt needs no matrix of its whole length


def check_rows(q: Any, k: Any, v: Any, geometry: Geometry) -> tuple[Float32, Float32, Float32]:
    """Queries, keys and values of the same rows, checked against the geometry."""
    value_dim = geometry.value_dim or geometry.head_dim
    k = as_float32("k", k, ("rows", geometry.num_kv_heads, geometry.head_dim))
    rows = len(k)
    q = as_float32("q", q, (rows, geometry.num_heads, geometry.head_dim))
    v = as_float32("v", v, (rows, geometry.num_kv_heads, value_dim))
    return q, k, v


def seal(
    q: Any,
    k: Any,
    v: Any,
    geometry: Geometry,
    method: str = "nystrom",
    ridge: float = 1e-6,
    fold: Fold = "always",
) -> LayerState:
    """The state of a layer after a prompt of `T` rows.

    A prompt of at most `geometry.exact_rows` rows (none is a prompt too) is too short for landmarks:
    the state keeps its rows, and a layer loaded from it attends exactly and seals itself later.

    Args:
        q: queries `(T, nh, d)`, as the attention sees them (after RoPE), not scaled.
        k: keys `(T, G, d)`.
        v: values `(T, G, dv)`.
        geometry: the layer's sizes.
        method: "nystrom": landmarks are means of contiguous segments, the mixing matrix a ridge
            pseudo-inverse of their kernel (Xiong et al. 2021, "Nystromformer", with a ridge).
        ridge: `lam` of that inverse, as a part of the mean diagonal; positive.
        fold: which rows the far field takes in: "always" every row that leaves the window, "prompt"
            as many as the prompt has after its sinks, "never" none after the seal itself.

    Raises:
        ArgumentError: a wrong shape, a value that is not finite or far too large, an unknown option.
        ArgumentTypeError: bool, complex, text or object arrays.
    """
    if not isinstance(geometry, Geometry):
        raise ArgumentTypeError(f"geometry: {type(geometry).__name__}, expected a Geometry")
    options = SealOptions(method, ridge, fold)
    q, k, v = check_rows(q, k, v, geometry)
    if len(k) <= geometry.exact_rows:
        return LayerState(geometry, options, rows=len(k), history=(q.copy(), k.copy(), v.copy()))
    return sealed_state(q, k, v, geometry, options)


def sealed_state(q: Float32, k: Float32, v: Float32, geometry: Geometry, options: SealOptions) -> LayerState:
    """The sealed state after rows that `check_rows` returned, at least `geometry.exact_rows` of them."""
    planes = empty_planes(geometry)
    for g, window in enumerate(geometry.group_windows):
        _seal_group(planes, g, window, q, k, v, geometry, options)
    return LayerState(geometry, options, rows=len(k), planes=planes)


def empty_planes(geometry: Geometry) -> dict[str, npt.NDArray[Any]]:
    """State planes of a layer that has seen nothing, all zero but windows and far maxima."""
    sizes = Sizes.of(geometry)
    planes = {name: np.zeros(PLANES[name].dims(sizes), PLANES[name].dtype) for name in STATE_PLANES}
    meta = planes["group_meta"]
    meta[:, META_WINDOW] = geometry.group_windows
    meta[:, META_FAR_LIMIT] = NO_FAR_LIMIT
    meta[:, META_LANDMARKS] = geometry.landmarks
    planes["far_mz"][:, MZ_MAX] = -LARGE
    return planes


def _seal_group(
    planes: dict[str, npt.NDArray[Any]],
    g: int,
    window: int,
    q: Float32,
    k: Float32,
    v: Float32,
    geometry: Geometry,
    options: SealOptions,
) -> None:
    rows, sinks, heads = len(k), geometry.sinks, geometry.heads_per_group
    m = min(max(rows // 8, MIN_LANDMARKS), geometry.landmarks)
    held = min(window, rows - sinks)
    evicted = rows - sinks - held

    meta = planes["group_meta"][g]
    meta[META_LEN], meta[META_HEAD] = held, evicted % window
    meta[META_FAR_LEN], meta[META_LANDMARKS] = evicted, m
    meta[META_FAR_LIMIT] = {"always": NO_FAR_LIMIT, "prompt": rows - sinks, "never": evicted}[options.fold]

    # Row x after the sinks took slot x mod window, the last `held` of them are still there.
    slots = np.arange(evicted, evicted + held) % window
    for plane, source in (("ring_k", k), ("ring_v", v)):
        planes[plane][g, slots] = source[rows - held :, g]
        planes[plane][g, geometry.window :] = source[:sinks, g]

    # Landmarks are rounded to float32 before the mixing matrix is made from them: the kernels see
    # the rounded ones, and the far field cancels too much to bear a matrix made for others.
    k_tilde = planes["k_tilde"][g, :m] = _segment_means(k[:, g], m)
    for h in range(g * heads, (g + 1) * heads):
        q_tilde = planes["q_tilde"][h, :m] = _segment_means(q[:, h], m)
        mix, shift = _mixing(q_tilde, k_tilde, float(geometry.scale32), options.ridge)
        planes["mix"][h, :m, :m] = mix
        planes["far_mz"][h, MZ_SHIFT] = shift
    if evicted:
        own = slice(g * heads, (g + 1) * heads)
        gone = slice(sinks, sinks + evicted)
        shifts = planes["far_mz"][own, MZ_SHIFT, 0].astype(np.float64)
        queries = float(geometry.scale32) * planes["q_tilde"][own, :m].astype(np.float64)
        mu, mass, num = _folded(queries, shifts, k[gone, g], v[gone, g])
        planes["far_mz"][own, MZ_MAX, :m] = mu
        planes["far_mz"][own, MZ_TOTAL, :m] = mass
        planes["t_hat"][own, T_TOTAL, :m] = num


def _segment_means(x: Float32, m: int) -> Float32:
    """Means of `m` contiguous segments of `x (T, d)`, `(m, d)`, summed in float64."""
    rows = len(x)
    starts = [i * rows // m for i in range(m)]
    sums = np.add.reduceat(x.astype(np.float64), starts, axis=0)
    counts = np.diff([*starts, rows])[:, None]
    return np.asarray(sums / counts, np.float32)


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
    pieces = [slice(at, at + _FOLD_ROWS) for at in range(0, len(k), _FOLD_ROWS)]

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
