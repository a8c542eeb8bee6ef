"""Bounds of the kernels of a chunk without score planes; see `bounds_stages.py` and `bounds_token.py`."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from ..cpu.twins_flash import NOTHING, far_rows, folded_before, parts_of, tiles
from ..cpu.twins_stages import _groups
from ..kernels import KERNELS
from ..params import Params
from ..planes import (
    FF_GAINS,
    FF_HAVE,
    FF_MASS,
    FF_MAX,
    FF_WEIGHTS,
    MIN_DENOMINATOR,
    S_LOGIT,
    S_MASS,
    S_MAX,
    S_RESCALE,
    T_RECENT,
    T_TOTAL,
    TP_MASS,
    TP_MAX,
    TP_WORDS,
)
from ..reference import EPSILON
from .bounds_stages import STAGE_BOUNDS, TINY, Bound, Expected, Planes, exp_loss, sum_loss
from .bounds_token import _logits, far_loss


def _evict(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """As the two stages that it is; records are copies."""
    bound = np.zeros(after["fl_rows"].shape)
    want = after["fl_rows"].copy()
    off, right = far_rows(p, bound), far_rows(p, want)
    for kernel, plane in (("o1c_far_e", "rows"), ("o1c_land", "land")):
        name = {"rows": "far_rows", "land": "land_scores"}[plane]
        sides = [
            {**side, name: getattr(far_rows(p, side["fl_rows"]), plane)} for side in (before, after, got)
        ]
        needed = {b.name for b in KERNELS[kernel].bindings}
        sides = [{n: a for n, a in side.items() if n in needed} for side in sides]
        found = STAGE_BOUNDS[kernel](p, *sides)[name]
        getattr(off, plane)[:] = found.bound
        getattr(right, plane)[:] = found.want
    # Rows join by fours, by sixteens and all, each time at a new scale: three products more than in the
    # stage, and three exponentials, of which WGSL permits each three units in the last place.
    sums = np.abs(right.rows[S_MASS])
    off.rows[S_MASS] += np.where(off.rows[S_MASS] > 0, 3 * (6.0 + 1.0) * EPSILON * sums, 0.0)
    return {"fl_rows": Expected(want, bound)}


def _near(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    bound = np.zeros(after["fl_parts"].shape)
    rows = [before[name] for name in ("ring_k", "ring_v", "k_rows", "v_rows")]
    for tile in tiles(p, before["group_meta"], *rows):
        for slot, span in tile.parts:
            for n, (i, head) in enumerate(zip(tile.row, tile.head, strict=True)):
                seen = np.flatnonzero(tile.sees[n, span]) + span.start
                if not len(seen):
                    continue
                found = _logits(p, before["q"][int(p["r0"]) + i, head][None], tile.keys[seen])
                x = found.x[0] - found.top[0]
                # Every tile that raises the maximum rescales what the tiles before it gave.
                loss = exp_loss(x) + found.top_off[0] + found.off[0] + 8.0 * EPSILON * int(p["tiles"])
                off = np.exp(x) * (loss + sum_loss(len(seen))) + TINY
                to = bound[slot, i, head]
                to[TP_MAX], to[TP_MASS] = found.top_off[0], off.sum()
                to[TP_WORDS:] = off @ np.abs(tile.values[seen])
    return {"fl_parts": Expected(after["fl_parts"], bound)}


def _far(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """Where the far mass is smaller than its own error, either sign of it is right."""
    want, bound = after["fl_far"].copy(), np.zeros(after["fl_far"].shape)
    found = far_rows(p, before["fl_rows"].astype(np.float64))
    for group in _groups(p, before["group_meta"]):
        live = group.live
        for head in range(group.heads.start, group.heads.stop):
            mix = before["mix"][head, live, live].astype(np.float64)
            rows = found.rows[:, head, live]
            for i in range(int(p["k"])):
                folded = folded_before(group, i)
                if not group.far_len + folded.stop - folded.start:
                    continue
                land, mu, mass = found.land[i, head, live], rows[S_MAX, :, i], rows[S_MASS, :, i]
                x = land - land.max()
                e = np.exp(x)
                u, u_off = e @ mix, (e * (exp_loss(x) + sum_loss(len(e))) + TINY) @ np.abs(mix)
                if p["rect"]:
                    u = np.maximum(u, 0.0)
                sums = land.max() + mu
                x = sums - sums.max()
                rounding = 2.0 * EPSILON * (np.abs(sums) + abs(sums.max()))
                gain = u * np.exp(x)
                gain_off = (
                    np.exp(x) * u_off + np.abs(gain) * (exp_loss(x) + rounding) + TINY * (1 + np.abs(u))
                )
                terms = far_loss(len(e))
                far, far_off = float(gain @ mass), gain_off @ mass + terms * (np.abs(gain) @ mass)
                off, right = bound[i, head], want[i, head]
                off[FF_MAX], off[FF_MASS] = 2.0 * EPSILON * abs(sums.max()), far_off
                kept = rows[S_RESCALE, :, i]
                x = rows[S_LOGIT][:, folded] - mu[:, None]
                shares = np.exp(x)
                gains_off = gain_off * kept + 2.0 * EPSILON * np.abs(gain) * kept + TINY
                weights_off = gain_off @ shares + np.abs(gain) @ (shares * (exp_loss(x) + terms)) + TINY
                gains, weights = gain * kept, gain @ shares
                to_weights = slice(FF_WEIGHTS + folded.start, FF_WEIGHTS + folded.stop)
                to_gains = slice(FF_GAINS, FF_GAINS + (live.stop if group.far_len else 0))
                have = float(got["fl_far"][i, head, FF_HAVE])
                if abs(far) <= far_off and have in (0.0, 1.0) and have != right[FF_HAVE]:
                    right[FF_HAVE] = have
                    right[to_weights] = weights * have
                    right[to_gains] = (gains * have)[: to_gains.stop - to_gains.start]
                if right[FF_HAVE]:
                    off[to_weights] = weights_off
                    off[to_gains] = gains_off[: to_gains.stop - to_gains.start]
    return {"fl_far": Expected(want, bound)}


def _merge(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    r0, bound = int(p["r0"]), np.zeros(after["out"].shape)
    for group in _groups(p, before["group_meta"]):
        for i in range(int(p["k"])):
            folded = folded_before(group, i)
            slots = (group.head + np.arange(folded.stop - folded.start)) % group.window
            evicted = np.abs(before["ring_v"][group.g, slots].astype(np.float64))
            for head in range(group.heads.start, group.heads.stop):
                far = before["fl_far"][i, head].astype(np.float64)
                parts = before["fl_parts"][: parts_of(p, group.g, head, i), i, head].astype(np.float64)
                have = far[FF_HAVE] > 0.5
                largest = max(parts[:, TP_MAX].max(), far[FF_MAX]) if have else parts[:, TP_MAX].max()
                x = parts[:, TP_MAX] - largest
                some = parts[:, TP_MAX] > NOTHING
                terms = sum_loss(len(parts) + 2 * int(p["m"]) + int(p["k"]))
                off = np.where(some, np.exp(x) * (exp_loss(np.where(some, x, 0.0)) + terms), 0.0) + TINY
                mass, mass_off = np.exp(x) @ parts[:, TP_MASS], off @ parts[:, TP_MASS]
                out_off = off @ np.abs(parts[:, TP_WORDS:])
                if have:
                    sizes = np.abs(far[FF_WEIGHTS + folded.start : FF_WEIGHTS + folded.stop]) @ evicted
                    if group.far_len:
                        t = np.abs(before["t_hat"][head, :, group.live].astype(np.float64))
                        gains = np.abs(far[FF_GAINS : FF_GAINS + group.live.stop])
                        sizes = sizes + gains @ (t[T_TOTAL] + t[T_RECENT])
                    x = np.asarray(far[FF_MAX] - largest)
                    scale = np.exp(x)
                    off_far = scale * (exp_loss(x) + terms) + TINY
                    mass, mass_off = mass + scale * far[FF_MASS], mass_off + off_far * far[FF_MASS]
                    out_off = out_off + off_far * sizes
                mass = max(mass, MIN_DENOMINATOR)
                want = np.abs(after["out"][r0 + i, head].astype(np.float64))
                bound[r0 + i, head] = out_off / mass + want * (mass_off / mass + 6.0 * EPSILON) + TINY
    return {"out": Expected(after["out"], bound)}


def _commit(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """As `o1c_far_commit`; ring and position are copies."""
    needed = {b.name for b in KERNELS["o1c_far_commit"].bindings}
    sides = [
        {n: a for n, a in {**side, "far_rows": far_rows(p, before["fl_rows"]).rows}.items() if n in needed}
        for side in (before, after, got)
    ]
    return STAGE_BOUNDS["o1c_far_commit"](p, *sides)


FLASH_BOUNDS: MappingProxyType[str, Bound] = MappingProxyType(
    {
        "o1c_fl_evict": _evict,
        "o1c_fl_near": _near,
        "o1c_fl_far": _far,
        "o1c_fl_merge": _merge,
        "o1c_fl_commit": _commit,
    }
)
