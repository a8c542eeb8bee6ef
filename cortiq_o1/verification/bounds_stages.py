"""How far an adapter's result may lie from the twin's, kernel by kernel, element by element.

Both compute in float32, so they differ by rounding. Each bound is a sum of what its operations may
lose, from the very values they work on:

- a sum of n terms, one after another, loses `sum_loss(n)` of the sum of the terms' sizes, whatever
  cancels in it. The twin run on absolute values gives those sizes, and zero where nothing is written;
- an exponential loses `exp_loss(x)` of its value: the rounding of its argument, and what WGSL permits
  of exp, 3 + 2|x| units in the last place;
- a bound of zero means equal: integers, copies, maxima of equal numbers, whatever the twin leaves
  alone. A value below float32's normal range may become zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, sqrt
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..cpu.twins import TWINS
from ..kernels import KERNELS, LANES
from ..params import Params
from ..planes import (
    HD_FAR,
    HD_HAVE,
    HD_INV,
    HD_MAX,
    LARGE,
    META_FAR_LEN,
    META_LANDMARKS,
    MZ_MAX,
    MZ_RECENT,
    MZ_SHIFT,
    MZ_TOTAL,
    S_LOGIT,
    S_MASS,
    S_MAX,
    S_RESCALE,
    S_WEIGHT,
)
from ..reference import EPSILON

Array = npt.NDArray[Any]
Planes = Mapping[str, Array]
TINY = 2.0**-126
"""The smallest normal float32; adapters may take anything below for zero."""


class Expected(NamedTuple):
    """A written plane's values and how far off each may be."""

    want: Array
    bound: Array


Bound = Callable[[Params, Planes, Planes, Planes], dict[str, Expected]]
"""A kernel's bounds from its parameters, the planes before, after, and as the adapter left them."""


def sum_loss(terms: float, twin_terms: float | None = None) -> float:
    """Relative to the terms' sizes: the adapter adds `terms` one after another, the twin `twin_terms`
    (as many if None). Each partial sum is rounded, as often up as down, so that errors grow with the
    root of their number; three more roundings are for products and scale."""
    return (3.0 + sqrt(terms) + sqrt(terms if twin_terms is None else twin_terms)) * EPSILON


def exp_loss(x: Array) -> Array:
    """Relative error between two `exp(x)`: WGSL's permission, NumPy's unit, two rounded arguments."""
    return np.asarray((8.0 + 6.0 * np.abs(x)) * EPSILON)


def _sizes(kernel: str, p: Params, before: Planes, keep: tuple[str, ...] = ()) -> dict[str, Array]:
    """The twin's results on absolute values, written planes zero before unless to `keep`."""
    planes = {}
    for binding in KERNELS[kernel].bindings:
        plane = before[binding.name]
        if binding.access == "read_write" and binding.name not in keep:
            planes[binding.name] = np.zeros_like(plane)
        else:
            planes[binding.name] = np.abs(plane) if plane.dtype == np.float32 else plane.copy()
    TWINS[kernel](p, KERNELS[kernel].grid(p), *planes.values())
    return {name: plane.astype(np.float64) for name, plane in planes.items()}


def _folded(far_rows: Array, p: Params) -> Array:
    """`(nh, m, k)`: whether a row's evicted key is folded; false for landmarks not in use."""
    return np.asarray(np.abs(far_rows[S_LOGIT, :, :, : int(p["k"])]) < 0.01 * LARGE)


def _live(p: Params, before: Planes, head: int) -> int:
    return int(before["group_meta"][head // int(p["hpg"]), META_LANDMARKS])


def _equal(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """Copies and maxima: nothing is rounded."""
    return {}


def _products(kernel: str, plane: str) -> Callable[..., dict[str, Expected]]:
    """Logits: a dot product in four lanes, times the scale."""

    def bound(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
        sizes = _sizes(kernel, p, before)[plane]
        return {plane: Expected(after[plane], sum_loss(p["d"] / 4, p["d"]) * sizes)}

    return bound


def _far_e(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    k = int(p["k"])
    want = after["far_rows"].astype(np.float64)
    bound = np.zeros(want.shape)
    # Columns that nobody has written yet hold anything.
    clean = {**before, "far_rows": np.full_like(before["far_rows"], -LARGE)}
    clean_after = {name: plane.copy() for name, plane in clean.items()}
    TWINS["o1c_far_e"](p, KERNELS["o1c_far_e"].grid(p), *clean_after.values())
    folded = _folded(clean_after["far_rows"], p)
    if not folded.any():
        return {"far_rows": Expected(after["far_rows"], bound)}
    # The shift comes off a logit whose terms add up to `sizes`.
    unshifted = before["far_mz"].copy()
    unshifted[:, MZ_SHIFT] = 0.0
    sizes = _sizes("o1c_far_e", p, {**before, "far_mz": unshifted})["far_rows"][S_LOGIT, :, :, :k]
    shifts = np.abs(before["far_mz"][:, MZ_SHIFT, :, None].astype(np.float64))
    rounded = sum_loss(p["d"] / 4, p["d"]) * np.abs(sizes) + 2.0 * EPSILON * shifts
    logit_off = np.where(folded, rounded, 0.0)
    logit = np.where(folded, want[S_LOGIT, :, :, :k], -np.inf)
    start = before["far_mz"][:, MZ_MAX].astype(np.float64)
    mass = np.abs(before["far_mz"][:, MZ_TOTAL].astype(np.float64) + before["far_mz"][:, MZ_RECENT])
    bound[S_LOGIT, :, :, :k] = logit_off
    seen = np.zeros_like(folded)
    for i in range(k):
        seen[:, :, i] = folded[:, :, i]
        any_seen = seen.any(axis=-1)
        top = np.where(any_seen, want[S_MAX, :, :, i], 0.0)
        # Only a logit that may be the largest lends its error to the maximum.
        rivals = seen & (logit + 2.0 * logit_off >= top[:, :, None])
        max_off = np.where(rivals, logit_off, 0.0).max(axis=-1)
        x = np.where(any_seen & (start > -0.01 * LARGE), start - top, 0.0)
        kept = want[S_RESCALE, :, :, i]
        kept_off = np.where((x == 0.0) & (max_off == 0.0), 0.0, kept * (max_off + exp_loss(x)) + TINY)
        # An empty far field keeps exactly nothing once a row is folded.
        kept_off = np.where(any_seen & (start > -0.01 * LARGE), kept_off, 0.0)
        x = np.where(seen, logit - top[:, :, None], 0.0)
        weight_off = np.where(seen, np.exp(x) * (logit_off + max_off[:, :, None] + exp_loss(x)) + TINY, 0.0)
        bound[S_MAX, :, :, i] = max_off
        bound[S_RESCALE, :, :, i] = kept_off
        in_use = any_seen | (want[S_MASS, :, :, i] != before["far_rows"][S_MASS, :, :, i])
        bound[S_MASS, :, :, i] = np.where(
            in_use,
            np.minimum(mass, 1e30) * kept_off
            + weight_off.sum(axis=-1)
            + sum_loss(i + 2) * np.abs(np.where(in_use, want[S_MASS, :, :, i], 0.0)),
            0.0,
        )
        if i == k - 1:
            bound[S_WEIGHT, :, :, :k] = weight_off
    return {"far_rows": Expected(after["far_rows"], bound)}


class _FarRow(NamedTuple):
    """The far part of one row and head in float64, and what each value may be off by."""

    largest: float
    largest_off: float
    far: float
    far_off: float
    gains: Array
    gains_off: Array
    evict: Array
    evict_off: Array


def _far_row(p: Params, before: Planes, i: int, head: int, folds: Array) -> _FarRow:
    """As if the far field counted; `folds` are the folded rows up to `i`."""
    live = slice(_live(p, before, head))
    logits = before["land_scores"][i, head, live].astype(np.float64)
    mix = before["mix"][head, live, live].astype(np.float64)
    rows = before["far_rows"][:, head, live].astype(np.float64)
    near = float(before["near_max"][i, head])
    f = logits.max()
    e = np.exp(logits - f)
    u = e @ mix
    u_off = (e * (exp_loss(logits - f) + sum_loss(len(e)))) @ np.abs(mix)
    if p["rect"]:
        u = np.maximum(u, 0.0)
    sums = f + rows[S_MAX, :, i]
    largest = max(near, sums.max())
    x = sums - largest
    reach = np.exp(x)
    gain = u * reach
    gain_off = reach * u_off + np.abs(gain) * (exp_loss(x) + 4.0 * EPSILON * np.abs(sums)) + TINY
    gain_off = gain_off + TINY * np.abs(u)
    mass = rows[S_MASS, :, i]
    far = float(gain @ mass)
    far_off = float(gain_off @ mass + sum_loss(6) * (np.abs(gain) @ mass))
    kept = rows[S_RESCALE, :, i]
    x = rows[S_LOGIT][:, folds] - rows[S_MAX, :, i, None]
    weights = np.exp(x)
    evict_off = gain_off @ weights + np.abs(gain) @ (weights * (exp_loss(x) + sum_loss(len(e))) + TINY)
    return _FarRow(
        largest,
        0.0 if largest == near else 2.0 * EPSILON * abs(largest),
        far,
        far_off,
        gain * kept,
        gain_off * kept + 2.0 * EPSILON * np.abs(gain * kept) + TINY,
        gain @ weights,
        evict_off,
    )


def _far(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """Where the far mass is smaller than its own error, either sign of it is right."""
    want = {name: after[name].copy() for name in ("row_head", "gains", "evict_weights")}
    bound = {name: np.zeros(plane.shape) for name, plane in want.items()}
    folded = _folded(before["far_rows"], p)
    for head in range(int(p["nh"])):
        live = _live(p, before, head)
        far_len = int(before["group_meta"][head // int(p["hpg"]), META_FAR_LEN])
        for i in range(int(p["k"])):
            folds = np.flatnonzero(folded[head, 0, : i + 1])
            if far_len + len(folds) == 0:
                continue
            row = _far_row(p, before, i, head, folds)
            have = want["row_head"][i, head, HD_HAVE] > 0.5
            other = got["row_head"][i, head, HD_HAVE] == (0.0 if have else 1.0)
            if other and abs(row.far) <= row.far_off:
                have = not have
                for name in ("gains", "evict_weights"):
                    want[name][i, head] = before[name][i, head]
                want["row_head"][i, head, HD_MAX] = row.largest if have else before["near_max"][i, head]
                want["row_head"][i, head, HD_FAR] = max(row.far, 0.0) if have else 0.0
                want["row_head"][i, head, HD_HAVE] = float(have)
                if have:
                    want["gains"][i, head, :live] = row.gains
                    want["evict_weights"][i, head, folds] = row.evict
            if have:
                bound["row_head"][i, head, HD_MAX] = row.largest_off
                bound["row_head"][i, head, HD_FAR] = row.far_off
                bound["gains"][i, head, :live] = row.gains_off
                bound["evict_weights"][i, head, folds] = row.evict_off
    return {name: Expected(want[name], bound[name]) for name in want}


def _soft(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    # Logits of zero under a maximum of zero turn to ones, and show which columns are written.
    blank = {
        **before,
        "scores": np.zeros_like(before["scores"]),
        "row_head": np.zeros_like(before["row_head"]),
    }
    TWINS["o1c_soft"](p, KERNELS["o1c_soft"].grid(p), *blank.values())
    written = blank["scores"] > 0.5
    k = int(p["k"])
    x = np.where(written, before["scores"].astype(np.float64), 0.0)
    x -= np.where(written, before["row_head"][:, :, HD_MAX, None], 0.0)
    weights = np.where(written, after["scores"].astype(np.float64), 0.0)
    off = np.where(written, weights * exp_loss(x) + TINY, 0.0)
    total = (weights.sum(axis=-1) + np.where(written.any(axis=-1), before["row_head"][:, :, HD_FAR], 0.0))[:k]
    loss = off.sum(axis=-1)[:k] / total + sum_loss(written.sum(axis=-1).max() / LANES + 6) + 6.0 * EPSILON
    head_off = np.zeros(before["row_head"].shape)
    head_off[:k, :, HD_INV] = after["row_head"][:k, :, HD_INV] * loss
    return {"scores": Expected(after["scores"], off), "row_head": Expected(after["row_head"], head_off)}


def _sum(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    per = ceil((p["w"] + p["ns"]) / p["pieces"])
    sizes = _sizes("o1c_sum", p, before)["sum_pieces"]
    return {"sum_pieces": Expected(after["sum_pieces"], sum_loss(per) * sizes)}


def _add(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    sizes = _sizes("o1c_add", p, before)["out"]
    terms = p["pieces"] + 2 * p["m"] + p["k"]
    return {"out": Expected(after["out"], sum_loss(terms) * sizes)}


def _far_commit(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    sizes = _sizes("o1c_far_commit", p, before, keep=("far_mz", "t_hat"))
    # Where nothing is folded nothing is written; a maximum is copied; flushed sums are zeros.
    moved: npt.NDArray[np.bool_] = np.any(_folded(before["far_rows"], p), axis=-1)
    for head in range(int(p["nh"])):
        moved[head, _live(p, before, head) :] = False
    moved = moved[:, None, :]
    loss = sum_loss(p["k"] + 2)
    mz = np.where(moved & (sizes["far_mz"] > 0.0), loss * sizes["far_mz"] + TINY, 0.0)
    mz[:, MZ_MAX] = 0.0
    t = np.where(moved[..., None] & (sizes["t_hat"] > 0.0), loss * sizes["t_hat"] + TINY, 0.0)
    return {"far_mz": Expected(after["far_mz"], mz), "t_hat": Expected(after["t_hat"], t)}


STAGE_BOUNDS: MappingProxyType[str, Bound] = MappingProxyType(
    {
        "o1c_far_e": _far_e,
        "o1c_score": _products("o1c_score", "scores"),
        "o1c_land": _products("o1c_land", "land_scores"),
        "o1c_max": _equal,
        "o1c_far": _far,
        "o1c_soft": _soft,
        "o1c_sum": _sum,
        "o1c_add": _add,
        "o1c_far_commit": _far_commit,
        "o1c_ring_commit": _equal,
        "o1c_meta": _equal,
        "o1c_archive": _equal,
        "o1c_copy": _equal,
    }
)
