"""A prompt's queries, keys and values in, a layer's state out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Float32, as_float32
from .errors import ArgumentTypeError
from .geometry import Geometry
from .landmarks import landmarks_of, place_far, place_landmarks
from .planes import (
    LARGE,
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    MZ_MAX,
    NO_FAR_LIMIT,
    PLANES,
    STATE_PLANES,
    Sizes,
)
from .state import Fold, LayerState, SealOptions


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
    ridge: float | None = None,
    fold: Fold | None = None,
    rope_theta: float | None = None,
    horizon: int | None = None,
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
            "fitted": both are fitted to the prompt's attention weights, see `fitting.py`; about a second
            for nine heads.
        ridge: `lam` of those inverses, as a part of the mean diagonal; positive. 1e-6 for "nystrom", 1e-3
            for "fitted" unless given.
        fold: which rows the far field takes in: "always" every row that leaves the window, "prompt"
            as many as the prompt has after its sinks, "never" none after the seal itself. Unless given,
            "always" for "nystrom"; for "fitted" "never" from a prompt of four windows on, "prompt" below.
        rope_theta: base of the rotary embedding, half-split, with which "fitted" expects later rows too.
        horizon: positions up to which it does; given with `rope_theta`.

    Raises:
        ArgumentError: a wrong shape, a value that is not finite or far too large, an unknown option.
        ArgumentTypeError: bool, complex, text or object arrays.
    """
    if not isinstance(geometry, Geometry):
        raise ArgumentTypeError(f"geometry: {type(geometry).__name__}, expected a Geometry")
    options = SealOptions(method, ridge, fold, rope_theta, horizon)
    q, k, v = check_rows(q, k, v, geometry)
    if len(k) <= geometry.exact_rows:
        return LayerState(geometry, options, rows=len(k), history=(q.copy(), k.copy(), v.copy()))
    return sealed_state(q, k, v, geometry, options)


def sealed_state(q: Float32, k: Float32, v: Float32, geometry: Geometry, options: SealOptions) -> LayerState:
    """The sealed state after rows that `check_rows` returned, at least `geometry.exact_rows` of them."""
    return LayerState(geometry, options, rows=len(k), planes=sealed_planes(q, k, v, geometry, options))


def sealed_planes(
    q: Float32, k: Float32, v: Float32, geometry: Geometry, options: SealOptions, seen: int | None = None
) -> dict[str, npt.NDArray[Any]]:
    """The planes of `sealed_state`, or with `seen` those after the first `seen` rows alone, at least the
    sinks: landmarks, mixing matrix and far limit are those of all rows even then."""
    planes = empty_planes(geometry)
    for g in range(geometry.num_kv_heads):
        _seal_group(planes, g, q, k, v, geometry, options, len(k) if seen is None else seen)
    return planes


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
    q: Float32,
    k: Float32,
    v: Float32,
    geometry: Geometry,
    options: SealOptions,
    seen: int,
) -> None:
    rows, sinks, window = len(k), geometry.sinks, geometry.group_windows[g]
    m = landmarks_of(rows, geometry)
    held = min(window, seen - sinks)
    evicted = seen - sinks - held
    limits = {"always": NO_FAR_LIMIT, "prompt": rows - sinks, "never": max(0, rows - sinks - window)}

    meta = planes["group_meta"][g]
    meta[META_LEN], meta[META_HEAD] = held, evicted % window
    meta[META_FAR_LEN], meta[META_LANDMARKS] = evicted, m
    meta[META_EVICTED] = evicted
    meta[META_FAR_LIMIT] = limits[options.fold_of(rows, window)]

    # Row x after the sinks took slot x mod window, the last `held` of them are still there.
    slots = np.arange(evicted, evicted + held) % window
    for plane, source in (("ring_k", k), ("ring_v", v)):
        planes[plane][g, slots] = source[seen - held : seen, g]
        planes[plane][g, geometry.window :] = source[:sinks, g]

    heads = slice(g * geometry.heads_per_group, (g + 1) * geometry.heads_per_group)
    place_landmarks(planes, g, m, q[:, heads], k[:, g], geometry, options, sinks, causal=True)
    if evicted:
        gone = slice(sinks, sinks + evicted)
        place_far(planes, g, m, k[gone, g], v[gone, g], geometry)
