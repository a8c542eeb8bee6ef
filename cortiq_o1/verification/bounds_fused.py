"""Bounds of the two kernels of a fused token; see `bounds_stages.py` and `bounds_token.py`."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from ..cpu.twins_fused import Partials, counted_rows, partials
from ..cpu.twins_stages import _groups
from ..params import Params
from ..planes import LARGE, MIN_DENOMINATOR, T_RECENT, T_TOTAL
from ..reference import EPSILON
from ..tiling import fused_keys
from .bounds_stages import TINY, Array, Bound, Expected, Planes, exp_loss, sum_loss
from .bounds_token import _logits, far_part


def _read(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """Where the far mass is smaller than its own error, either sign of it is right."""
    want = after["fu_part"].copy()
    bound = np.zeros(want.shape)
    off, right, theirs = partials(p, bound), partials(p, want), partials(p, got["fu_part"])
    for group in _groups({**p, "k": 1}, before["group_meta"]):
        heads, live = group.heads, group.live
        if p["outputs"]:
            _near(p, before, group.g, heads, counted_rows(p, group), off.heads, off.values)
        for head in range(heads.start, heads.stop):
            part = far_part(p, before, head, group)
            fold = part.fold
            masses, folds = off.masses[head, live], off.folds[head, live]
            off.far_head[head, 1:3] = part.top_off, part.mass_off
            masses[:, 0], masses[:, 3] = fold.maxima_off, part.gain_off
            # Either level loses no more than both together may.
            masses[:, 1:3] = (fold.mass_off + 2.0 * EPSILON * np.abs(fold.mass))[:, None] + TINY
            folds[:, 0] = fold.kept_off
            folds[:, 1] = fold.weight_off if group.folded else 0.0
            have = float(theirs.far_head[head, 3])
            if abs(part.mass) <= part.mass_off and have in (0.0, 1.0):
                right.far_head[head, 3] = have
    return {"fu_part": Expected(want, bound)}


def _near(
    p: Params, before: Planes, g: int, heads: slice, counted: Array, off_heads: Array, off_values: Array
) -> None:
    keys, values = before["ring_k"][g], before["ring_v"][g]
    per = fused_keys(int(p["d"]), int(p["dv"]))
    for c in range(int(p["splits"])):
        rows = np.flatnonzero(counted[c * per : (c + 1) * per]) + c * per
        if not len(rows):
            continue
        found = _logits(p, before["q"][int(p["r0"]), heads], keys[rows])
        x = found.x - found.top[:, None]
        loss = exp_loss(x) + found.top_off[:, None] + found.off
        off = np.exp(x) * (loss + sum_loss(per)) + TINY
        off_heads[heads, c, 0], off_heads[heads, c, 1] = found.top_off, off.sum(axis=-1)
        off_values[heads, c] = off @ np.abs(values[rows])


def _move(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """Position, ring and far masses are copies; so is a total numerator while its maximum stands."""
    r0, hpg = int(p["r0"]), int(p["hpg"])
    out, t_hat = np.zeros(after["out"].shape), np.zeros(after["t_hat"].shape)
    found = partials(p, before["fu_part"].astype(np.float64))
    for head in range(int(p["nh"])):
        g = head // hpg
        _, landmarks, folds, flushes = found.flags[head]
        live = slice(int(landmarks))
        kept, weight = found.folds[head, live, 0, None], found.folds[head, live, 1, None]
        t = np.abs(before["t_hat"][head, :, live].astype(np.float64))
        total, recent = t[T_TOTAL] * kept, t[T_RECENT] * kept + weight * np.abs(found.evicted[head])
        if p["outputs"]:
            numerator = np.abs(found.masses[head, live, 3]) @ (total + recent)
            own = _logits(p, before["q"][r0, head][None], before["k_rows"][r0, g][None])
            value = np.abs(before["v_rows"][r0, g].astype(np.float64))
            want = np.abs(after["out"][r0, head].astype(np.float64))
            out[r0, head] = _merge(p, found, head, own.x[0, 0], own.off[0, 0], value, numerator, want)
        if p["moves"] and folds:
            off = sum_loss(2) * (total + recent) + TINY
            summed = (kept != 1.0) | bool(flushes)
            t_hat[head, T_TOTAL, live] = np.where(summed, off, 0.0)
            t_hat[head, T_RECENT, live] = 0.0 if flushes else off
    return {"out": Expected(after["out"], out), "t_hat": Expected(after["t_hat"], t_hat)}


def _merge(
    p: Params, found: Partials, head: int, own: float, own_off: float, value: Array, numerator: Array,
    want: Array,
) -> Array:  # fmt: skip
    """What a head's output may be off by: its terms' errors at one scale, over the denominator."""
    tops, masses = found.heads[head, :, 0], found.heads[head, :, 1]
    _, far_max, far_mass, have = found.far_head[head]
    largest = max(tops.max(), own, far_max if have else -LARGE)
    terms = sum_loss(int(p["splits"]) + 2 * int(p["m"]) + 3)
    x = np.where(masses > 0.0, tops - largest, 0.0)
    # A stripe's scale comes between a split's and the row's, hence a second exponential.
    off = np.where(masses > 0.0, np.exp(x), 0.0) * (exp_loss(x) + 8.0 * EPSILON + terms) + TINY
    mass = float(np.exp(x) @ masses)
    mass_off = float(off @ masses)
    sum_off = off @ np.abs(found.values[head])
    for logit, logit_off, size, sizes in (
        (own, own_off, 1.0, value),
        *(((far_max, 0.0, far_mass, numerator),) if have else ()),
    ):
        x = np.asarray(logit - largest)
        scale = float(np.exp(x))
        off_one = scale * (float(exp_loss(x)) + logit_off + terms) + TINY
        mass += scale * size
        mass_off += off_one * size
        sum_off = sum_off + off_one * sizes
    mass = max(mass, MIN_DENOMINATOR)
    return np.asarray(sum_off / mass + want * (mass_off / mass + 6.0 * EPSILON) + TINY)


FUSED_BOUNDS: MappingProxyType[str, Bound] = MappingProxyType({"o1c_fu_read": _read, "o1c_fu_move": _move})
