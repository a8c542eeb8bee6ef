"""Twins of the kernels that take a single row in few dispatches; see `twins_stages.py`."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from ..kernels import Grid
from ..planes import (
    FLUSH_ROWS,
    LARGE,
    META_EVICTED,
    META_FAR_LEN,
    META_HEAD,
    META_LEN,
    META_WINDOW,
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
    TR_EVICTS,
    TR_FAR,
    TR_FLUSHES,
    TR_FOLDS,
    TR_HAVE,
    TR_MAX,
    TR_SLOT,
    TR_WORDS,
    TS_GAIN,
    TS_MAX,
    TS_RESCALE,
    TS_WEIGHT,
)
from .twins_stages import WORDS, Array, Params, Twin, _groups, _near_rows


def section(p: Params, which: int, landmarks: slice) -> slice:
    """Where a head's record holds a section of those landmarks."""
    start = TR_WORDS + which * int(p["m"])
    return slice(start, start + landmarks.stop)


def o1c_tok_near(
    p: Params,
    grid: Grid,
    group_meta: Array,
    q: Array,
    ring_k: Array,
    k_rows: Array,
    ring_v: Array,
    v_rows: Array,
    tok_part: Array,
) -> None:
    """Near part of a row over each split of the keys: largest logit, mass, value sum."""
    r0, splits, scale = int(p["r0"]), int(p["splits"]), np.float32(p["scale"])
    for group in _groups(p, group_meta):
        ((_, keys),) = _near_rows(p, group, ring_k, k_rows)
        ((_, values),) = _near_rows(p, group, ring_v, v_rows)
        logits = q[r0, group.heads] @ keys.T * scale
        per = -(-len(keys) // splits)
        for c in range(splits):
            part = slice(c * per, (c + 1) * per)
            found = tok_part[group.heads, c]
            found[:] = 0
            top = logits[:, part].max(axis=-1, initial=np.float32(-LARGE))
            weights = np.exp(logits[:, part] - top[:, None])
            found[:, TP_MAX] = top
            found[:, TP_MASS] = weights.sum(axis=-1)
            found[:, TP_WORDS:] = weights @ values[part]


def o1c_tok_far(
    p: Params,
    grid: Grid,
    group_meta: Array,
    q: Array,
    k_tilde: Array,
    ring_k: Array,
    q_tilde: Array,
    far_mz: Array,
    mix: Array,
    tok_record: Array,
) -> None:
    """Far part of a row, at its own maximum's scale, and what the commit needs."""
    r0, scale = int(p["r0"]), np.float32(p["scale"])
    for group in _groups(p, group_meta):
        heads, live = group.heads, group.live
        record = tok_record[heads]
        before = far_mz[heads, MZ_MAX, live]
        mass = far_mz[heads, MZ_TOTAL, live] + far_mz[heads, MZ_RECENT, live]
        maxima, kept, weight = before, np.ones_like(before), np.zeros_like(before)
        if group.folded:
            evicted = q_tilde[heads, live] @ ring_k[group.g, group.head] * scale
            evicted = evicted - far_mz[heads, MZ_SHIFT, live]
            maxima = np.maximum(before, evicted)
            # exp(0) is exactly 1, and an empty far field's maximum, -LARGE, gives 0 at the first fold.
            kept = np.exp(before - maxima)
            weight = np.exp(evicted - maxima)
        far_len = group.far_len + group.folded
        logits = q[r0, heads] @ k_tilde[group.g, live].T * scale
        f = logits.max(axis=-1, keepdims=True)
        u = np.matmul(np.exp(logits - f)[:, None, :], mix[heads, live, live])[:, 0]
        if p["rect"]:
            u = np.maximum(u, np.float32(0))
        largest = (f + maxima).max(axis=-1)
        gain = u * np.exp(f + maxima - largest[:, None])
        if not far_len:
            largest, gain = np.full_like(largest, -LARGE), np.zeros_like(gain)
        far = (gain * (mass * kept + weight)).sum(axis=-1)
        record[:, TR_MAX] = largest
        record[:, TR_FAR] = far
        # A negative mass drops the far field of this head.
        record[:, TR_HAVE] = (far >= 0) & (far_len > 0)
        record[:, TR_EVICTED] = (gain * weight).sum(axis=-1)
        record[:, TR_SLOT] = (group.head + group.length) % group.window
        record[:, TR_FOLDS] = live.stop if group.folded else 0
        record[:, TR_FLUSHES] = far_len // FLUSH_ROWS != group.far_len // FLUSH_ROWS
        record[:, TR_EVICTS] = group.length == group.window
        record[:, section(p, TS_GAIN, live)] = gain * kept
        record[:, section(p, TS_MAX, live)] = maxima
        record[:, section(p, TS_RESCALE, live)] = kept
        record[:, section(p, TS_WEIGHT, live)] = weight


def o1c_tok_merge(
    p: Params,
    grid: Grid,
    group_meta: Array,
    tok_part: Array,
    tok_record: Array,
    t_hat: Array,
    ring_v: Array,
    out: Array,
) -> None:
    """The output: the splits, the far numerator and the evicted row at one scale."""
    r0 = int(p["r0"])
    for group in _groups(p, group_meta):
        for head in range(group.heads.start, group.heads.stop):
            record, parts = tok_record[head], tok_part[head]
            have = record[TR_HAVE] > 0.5
            largest = parts[:, TP_MAX].max()
            if have:
                largest = np.maximum(largest, record[TR_MAX])
            weights = np.exp(parts[:, TP_MAX] - largest)
            acc = weights @ parts[:, TP_WORDS:]
            total = weights @ parts[:, TP_MASS]
            if have:
                gain = record[section(p, TS_GAIN, group.live)]
                far = gain @ (t_hat[head, T_TOTAL, group.live] + t_hat[head, T_RECENT, group.live])
                if record[TR_FOLDS]:
                    far += record[TR_EVICTED] * ring_v[group.g, int(record[TR_SLOT])]
                scale = np.exp(record[TR_MAX] - largest)
                acc += far * scale
                total += record[TR_FAR] * scale
            out[r0, head] = acc * (np.float32(1) / np.maximum(total, np.float32(MIN_DENOMINATOR)))


def o1c_tok_commit(
    p: Params,
    grid: Grid,
    tok_record: Array,
    k_rows: Array,
    v_rows: Array,
    group_meta: Array,
    ring_k: Array,
    ring_v: Array,
    far_mz: Array,
    t_hat: Array,
) -> None:
    """The state after the row: far field, ring, position."""
    r0, hpg = int(p["r0"]), int(p["hpg"])
    for g, words in enumerate(group_meta):
        heads = slice(g * hpg, (g + 1) * hpg)
        record = tok_record[heads]
        slot, live = int(record[0, TR_SLOT]), slice(int(record[0, TR_FOLDS]))
        if live.stop:
            kept = record[:, section(p, TS_RESCALE, live)]
            weight = record[:, section(p, TS_WEIGHT, live)]
            mz, t = far_mz[heads, :, live], t_hat[heads, :, live]
            mz[:, MZ_MAX] = record[:, section(p, TS_MAX, live)]
            mz[:, MZ_TOTAL] *= kept
            mz[:, MZ_RECENT] = mz[:, MZ_RECENT] * kept + weight
            t[:, T_TOTAL] *= kept[..., None]
            t[:, T_RECENT] = t[:, T_RECENT] * kept[..., None] + weight[..., None] * ring_v[g, slot]
            if record[0, TR_FLUSHES]:
                mz[:, MZ_TOTAL] += mz[:, MZ_RECENT]
                mz[:, MZ_RECENT] = 0
                t[:, T_TOTAL] += t[:, T_RECENT]
                t[:, T_RECENT] = 0
        ring_k[g, slot] = k_rows[r0, g]
        ring_v[g, slot] = v_rows[r0, g]
        if record[0, TR_EVICTS]:
            words[META_HEAD] = (words[META_HEAD] + 1) % words[META_WINDOW]
            words[META_EVICTED] = (int(words[META_EVICTED]) + 1) % WORDS
        else:
            words[META_LEN] += 1
        words[META_FAR_LEN] += live.stop > 0


TOKEN_TWINS: MappingProxyType[str, Twin] = MappingProxyType(
    {twin.__name__: twin for twin in (o1c_tok_near, o1c_tok_far, o1c_tok_merge, o1c_tok_commit)}
)
"""The twins, by name."""
