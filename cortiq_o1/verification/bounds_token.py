"""Bounds of the kernels that compute a single row; see `bounds_stages.py`.

A logit's error moves with its weight; that of a maximum moves everything at its scale. A value that is
handed on is held against the twin's own, so that both errors count wherever they enter.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..cpu.twins_stages import _Group, _groups, _near_rows
from ..cpu.twins_token import section
from ..kernels.row import NEAR_KEYS
from ..params import Params
from ..planes import (
    LARGE,
    META_FAR_LEN,
    MIN_DENOMINATOR,
    MZ_MAX,
    MZ_RECENT,
    MZ_SHIFT,
    MZ_TOTAL,
    T_RECENT,
    T_TOTAL,
    TP_MASS,
    TP_MAX,
    TP_WORDS,
    TR_EVICTED,
    TR_FAR,
    TR_FLUSHES,
    TR_FOLDS,
    TR_HAVE,
    TR_MAX,
    TR_SLOT,
    TS_GAIN,
    TS_MAX,
    TS_RESCALE,
    TS_WEIGHT,
)
from ..reference import EPSILON
from .bounds_stages import TINY, Array, Bound, Expected, Planes, _live, _sizes, exp_loss, sum_loss


class _Logits(NamedTuple):
    """Logits in float64 along the last axis, what each may be off by, their maximum, the same of it."""

    x: Array
    off: Array
    top: Array
    top_off: Array


def _logits(p: Params, queries: Array, keys: Array, most: Array | None = None) -> _Logits:
    """Of rows of queries with rows of keys; `most` is a maximum they start from, exact."""
    left, right = queries.astype(np.float64), keys.astype(np.float64)
    x = left @ right.T * p["scale"]
    # A lane adds four products and every 128th of the width's after them, lanes are added as a tree.
    terms = min(p["d"], 10 + p["d"] / 128)
    off = sum_loss(terms, p["d"]) * (np.abs(left) @ np.abs(right).T) * p["scale"]
    return _tops(x, off, most)


def _tops(x: Array, off: Array, most: Array | None = None) -> _Logits:
    top = x.max(axis=-1) if most is None else np.maximum(x.max(axis=-1), most)
    # Only one that may be the largest lends its error to the maximum.
    rivals = x + off + off.max(axis=-1, keepdims=True) >= top[..., None]
    return _Logits(x, off, top, np.where(rivals, off, 0.0).max(axis=-1))


def _near(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    splits, r0 = int(p["splits"]), int(p["r0"])
    bound = np.zeros(after["tok_part"].shape)
    for group in _groups(p, before["group_meta"]):
        ((_, keys),) = _near_rows(p, group, before["ring_k"], before["k_rows"])
        ((_, values),) = _near_rows(p, group, before["ring_v"], before["v_rows"])
        per = -(-len(keys) // splits)
        for c in range(-(-len(keys) // per)):
            part = slice(c * per, (c + 1) * per)
            found = _logits(p, before["q"][r0, group.heads], keys[part])
            x = found.x - found.top[:, None]
            # A tile that raises the maximum rescales what the tiles before it gave.
            tiles = [x[:, at : at + NEAR_KEYS].max(axis=-1) for at in range(0, x.shape[1], NEAR_KEYS)]
            rises = (np.diff(np.maximum.accumulate(tiles, axis=0), axis=0) > 0.0).sum(axis=0)
            loss = exp_loss(x) + (8.0 * EPSILON * rises + found.top_off)[:, None] + found.off
            weights = np.exp(x)
            off = weights * (loss + sum_loss(x.shape[1])) + TINY
            bound[group.heads, c, TP_MAX] = found.top_off
            bound[group.heads, c, TP_MASS] = off.sum(axis=-1)
            bound[group.heads, c, TP_WORDS:] = off @ np.abs(values[part])
    return {"tok_part": Expected(after["tok_part"], bound)}


class _Fold(NamedTuple):
    """A head's landmarks in use after the row, in float64, and what each value may be off by."""

    maxima: Array
    maxima_off: Array
    kept: Array
    kept_off: Array
    weight: Array
    weight_off: Array
    mass: Array
    mass_off: Array


def _fold(p: Params, before: Planes, head: int, live: slice, evicted: Array | None) -> _Fold:
    mz = before["far_mz"][head, :, live].astype(np.float64)
    start, mass = mz[MZ_MAX], mz[MZ_TOTAL] + mz[MZ_RECENT]
    zero = np.zeros_like(start)
    if evicted is None:
        return _Fold(start, zero, zero + 1.0, zero, zero, zero, mass, 2.0 * EPSILON * np.abs(mass))
    raw, shift = _logits(p, before["q_tilde"][head, live], evicted[None]), mz[MZ_SHIFT, :, None]
    found = _tops(raw.x - shift, raw.off + 2.0 * EPSILON * np.abs(shift), start)
    logit, off = found.x[:, 0], found.off[:, 0]
    x = start - found.top
    kept = np.exp(x)
    # An empty far field keeps exactly nothing; a maximum that surely stands keeps exactly all.
    moves = (start > -0.01 * LARGE) & ((x != 0.0) | (found.top_off > 0.0))
    kept_off = np.where(moves, kept * (found.top_off + exp_loss(np.where(moves, x, 0.0))) + TINY, 0.0)
    x = logit - found.top
    weight = np.exp(x)
    weight_off = weight * (off + found.top_off + exp_loss(x)) + TINY
    after = mass * kept + weight
    after_off = np.abs(mass) * kept_off + weight_off + 4.0 * EPSILON * (np.abs(mass) * kept + weight)
    return _Fold(found.top, found.top_off, kept, kept_off, weight, weight_off, after, after_off)


class FarPart(NamedTuple):
    """A head's far part: its landmarks after the row, and at the scale of their own maximum the gains and the
    mass, with what each may be off by; all zero while the far field is empty."""

    fold: _Fold
    top_off: float
    gain: Array
    gain_off: Array
    mass: float
    mass_off: float


def far_part(p: Params, before: Planes, head: int, group: _Group) -> FarPart:
    """The far part of a head, from the planes that a token's kernels read."""
    live = group.live
    evicted = before["ring_k"][group.g, group.head] if group.folded else None
    fold = _fold(p, before, head, live, evicted)
    if not int(before["group_meta"][group.g, META_FAR_LEN]) + group.folded:
        zero = np.zeros_like(fold.maxima)
        return FarPart(fold, 0.0, zero, zero, 0.0, 0.0)
    queries = _logits(p, before["q"][int(p["r0"]), head][None], before["k_tilde"][group.g, live])
    mix = before["mix"][head, live, live].astype(np.float64)
    x = queries.x[0] - queries.top[0]
    e = np.exp(x)
    u = e @ mix
    loss = queries.off[0] + queries.top_off[0] + exp_loss(x) + sum_loss(len(e))
    u_off = (e * loss + TINY) @ np.abs(mix)
    if p["rect"]:
        u = np.maximum(u, 0.0)
    sums = _tops(queries.top[0] + fold.maxima, fold.maxima_off)
    # Both terms of the exponent hold the same maximum of the landmark logits.
    x = sums.x - sums.top
    rounding = 2.0 * EPSILON * (np.abs(sums.x) + np.abs(sums.top))
    gain = u * np.exp(x)
    gain_off = np.exp(x) * u_off + np.abs(gain) * (exp_loss(x) + fold.maxima_off + sums.top_off + rounding)
    gain_off = gain_off + TINY * (1.0 + np.abs(u))
    mass_off = gain_off @ fold.mass + np.abs(gain) @ (fold.mass_off + far_loss(len(e)) * fold.mass)
    top_off = queries.top_off[0] + sums.top_off + 2.0 * EPSILON * np.abs(sums.top)
    return FarPart(fold, float(top_off), gain, gain_off, float(gain @ fold.mass), float(mass_off))


def far_loss(landmarks: int) -> float:
    """What a sum over landmarks loses: four at a time on an adapter."""
    return sum_loss(landmarks / 4 + 3, landmarks)


def _far(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """Where the far mass is smaller than its own error, either sign of it is right."""
    want = after["tok_record"].copy()
    bound = np.zeros(want.shape)
    for group in _groups(p, before["group_meta"]):
        live = group.live
        for head in range(group.heads.start, group.heads.stop):
            part = far_part(p, before, head, group)
            fold, off = part.fold, bound[head]
            off[section(p, TS_MAX, live)] = fold.maxima_off
            off[section(p, TS_RESCALE, live)] = fold.kept_off
            off[section(p, TS_WEIGHT, live)] = fold.weight_off if group.folded else 0.0
            if not part.gain.any():
                continue
            terms = far_loss(len(part.gain))
            off[TR_MAX], off[TR_FAR] = part.top_off, part.mass_off
            off[TR_EVICTED] = part.gain_off @ fold.weight + np.abs(part.gain) @ (
                fold.weight_off + terms * fold.weight
            )
            off[section(p, TS_GAIN, live)] = (
                part.gain_off * fold.kept
                + np.abs(part.gain) * (fold.kept_off + 2.0 * EPSILON * fold.kept)
                + TINY
            )
            have = float(got["tok_record"][head, TR_HAVE])
            if abs(part.mass) <= part.mass_off and have in (0.0, 1.0):
                want[head, TR_HAVE] = have
    return {"tok_record": Expected(want, bound)}


def _merge(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    r0 = int(p["r0"])
    bound = np.zeros(after["out"].shape)
    for head in range(int(p["nh"])):
        live = slice(_live(p, before, head))
        record = before["tok_record"][head].astype(np.float64)
        parts = before["tok_part"][head].astype(np.float64)
        have = record[TR_HAVE] > 0.5
        largest = max(parts[:, TP_MAX].max(), record[TR_MAX]) if have else parts[:, TP_MAX].max()
        x = np.where(parts[:, TP_MASS] > 0.0, parts[:, TP_MAX] - largest, 0.0)
        weights = np.where(parts[:, TP_MASS] > 0.0, np.exp(x), 0.0)
        # A stripe's scale comes between a split's and the row's, hence a second exponential.
        loss = exp_loss(x) + 8.0 * EPSILON + sum_loss(p["splits"] + 2 * p["m"] + 2)
        off = weights * loss + TINY
        total, total_off = weights @ parts[:, TP_MASS], off @ parts[:, TP_MASS]
        out_off = off @ np.abs(parts[:, TP_WORDS:])
        if have:
            t = np.abs(before["t_hat"][head, :, live].astype(np.float64))
            sizes = np.abs(record[section(p, TS_GAIN, live)]) @ (t[T_TOTAL] + t[T_RECENT])
            if record[TR_FOLDS]:
                value = before["ring_v"][head // int(p["hpg"]), int(record[TR_SLOT])]
                sizes = sizes + abs(record[TR_EVICTED]) * np.abs(value)
            x = np.asarray(record[TR_MAX] - largest)
            scale = np.exp(x)
            off = scale * (exp_loss(x) + sum_loss(p["splits"] + 2 * p["m"] + 2)) + TINY
            total, total_off = total + scale * record[TR_FAR], total_off + off * record[TR_FAR]
            out_off = out_off + off * sizes
        total = max(total, MIN_DENOMINATOR)
        want = np.abs(after["out"][r0, head].astype(np.float64))
        bound[r0, head] = out_off / total + want * (total_off / total + 6.0 * EPSILON) + TINY
    return {"out": Expected(after["out"], bound)}


def _commit(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """Position and ring are copies; so is a maximum, and a total while its maximum stands."""
    moving = ("group_meta", "ring_k", "ring_v", "far_mz", "t_hat")
    sizes = _sizes("o1c_tok_commit", p, before, keep=moving)
    mz, t = np.zeros(sizes["far_mz"].shape), np.zeros(sizes["t_hat"].shape)
    for head in range(int(p["nh"])):
        record = before["tok_record"][head]
        live, flushes = slice(int(record[TR_FOLDS])), record[TR_FLUSHES] > 0.5
        rescaled = record[section(p, TS_RESCALE, live)] != 1.0
        for plane, found, total, recent in (
            ("far_mz", mz[head], MZ_TOTAL, MZ_RECENT),
            ("t_hat", t[head], T_TOTAL, T_RECENT),
        ):
            size = sizes[plane][head]
            off = sum_loss(2) * size + TINY
            summed = rescaled.reshape(-1, *[1] * (size.ndim - 2)) | flushes
            found[total, live] = np.where(summed, off[total, live], 0.0)
            found[recent, live] = 0.0 if flushes else off[recent, live]
    return {"far_mz": Expected(after["far_mz"], mz), "t_hat": Expected(after["t_hat"], t)}


TOKEN_BOUNDS: MappingProxyType[str, Bound] = MappingProxyType(
    {
        "o1c_tok_near": _near,
        "o1c_tok_far": _far,
        "o1c_tok_merge": _merge,
        "o1c_tok_commit": _commit,
    }
)
