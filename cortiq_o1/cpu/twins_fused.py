"""Twins of the two kernels of a fused token; see `twins_stages.py`."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

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
)
from ..tiling import fused_keys
from .twins_stages import WORDS, Array, Params, Twin, _Group, _groups

Store = tuple[Array, Array]


class Partials(NamedTuple):
    """Views of `fu_part`, `(nh, ...)` each: what shaders/shared/fused.wgsl calls by these names."""

    heads: Array
    values: Array
    flags: Array
    far_head: Array
    masses: Array
    folds: Array
    evicted: Array


def partials(p: Params, fu_part: Array) -> Partials:
    """The sections of `fu_part`; raises nothing, the plane's shape is the planner's."""
    splits, m, dv, nh = int(p["splits"]), int(p["m"]), int(p["dv"]), len(fu_part)
    near = fu_part[:, : splits * (4 + dv)].reshape(nh, splits, 4 + dv)
    record = fu_part[:, splits * (4 + dv) :]
    masses = record[:, 8 : 8 + 4 * m].reshape(nh, m, 4)
    folds = record[:, 8 + 4 * m : 8 + 8 * m].reshape(nh, m, 4)
    return Partials(
        near[..., :4], near[..., 4:], record[:, :4], record[:, 4:8], masses, folds, record[:, 8 + 8 * m :]
    )


def counted_rows(p: Params, group: _Group) -> Array:
    """Which of the group's rows, by where they lie, the window of the coming row has: not the one that it
    evicts, nor its own."""
    rows = np.arange(int(p["w"]) + int(p["ns"]))
    age = (rows - group.head) % group.window
    in_ring = (rows < group.window) & (age < group.length) & (age >= (group.length == group.window))
    return in_ring | (rows >= int(p["w"]))


def o1c_fu_read(
    p: Params,
    grid: Grid,
    group_meta: Array,
    q: Array,
    ring: Store,
    k_tilde: Array,
    q_tilde: Array,
    mix: Array,
    far_mz: Array,
    fu_part: Array,
) -> None:
    """Near part of a row over each split of the window, its far part, and what the commit needs."""
    r0, splits, scale = int(p["r0"]), int(p["splits"]), np.float32(p["scale"])
    ring_k, ring_v = ring
    to = partials(p, fu_part)
    for group in _groups({**p, "k": 1}, group_meta):
        heads, live, g = group.heads, group.live, group.g
        if p["outputs"]:
            counted = counted_rows(p, group)
            per = fused_keys(int(p["d"]), int(p["dv"]))
            logits = q[r0, heads] @ ring_k[g].T * scale
            for c in range(splits):
                part = slice(c * per, (c + 1) * per)
                x = np.where(counted[part], logits[:, part], np.float32(-LARGE))
                top = x.max(axis=-1, initial=np.float32(-LARGE))
                weights = np.where(counted[part], np.exp(x - top[:, None]), np.float32(0))
                to.heads[heads, c, 0] = top
                to.heads[heads, c, 1] = weights.sum(axis=-1)
                to.heads[heads, c, 2:] = 0
                to.values[heads, c] = weights @ ring_v[g, part]
        far_len = group.far_len + group.folded
        before, total, recent = (far_mz[heads, s, live] for s in (MZ_MAX, MZ_TOTAL, MZ_RECENT))
        maxima, kept, weight = before, np.ones_like(before), np.zeros_like(before)
        if group.folded:
            evicted = q_tilde[heads, live] @ ring_k[g, group.head] * scale - far_mz[heads, MZ_SHIFT, live]
            maxima = np.maximum(before, evicted)
            kept, weight = np.exp(before - maxima), np.exp(evicted - maxima)
        logits = q[r0, heads] @ k_tilde[g, live].T * scale
        f = logits.max(axis=-1, keepdims=True)
        u = np.matmul(np.exp(logits - f)[:, None, :], mix[heads, live, live])[:, 0]
        if p["rect"]:
            u = np.maximum(u, np.float32(0))
        largest = (f + maxima).max(axis=-1)
        gain = u * np.exp(f + maxima - largest[:, None])
        if not far_len:
            largest, gain = np.full_like(largest, -LARGE), np.zeros_like(gain)
        total, recent = total * kept, recent * kept + weight
        far = (gain * (total + recent)).sum(axis=-1)
        flushes = far_len // FLUSH_ROWS != group.far_len // FLUSH_ROWS
        flags, far_head = to.flags[heads], to.far_head[heads]
        flags[:, 0] = (group.head + group.length) % group.window
        flags[:, 1] = live.stop
        flags[:, 2], flags[:, 3] = bool(group.folded), flushes
        far_head[:, 0] = group.length == group.window
        far_head[:, 1], far_head[:, 2] = largest, far
        # A negative mass drops the far field of this head.
        far_head[:, 3] = (far >= 0) & (far_len > 0)
        masses, folds = to.masses[heads, live], to.folds[heads, live]
        masses[..., 0] = maxima
        masses[..., 1] = total + recent if flushes else total
        masses[..., 2] = 0 if flushes else recent
        masses[..., 3] = gain
        folds[..., 0], folds[..., 1], folds[..., 2:] = kept, weight, 0
        to.evicted[heads] = ring_v[g, group.head]


def o1c_fu_move(
    p: Params,
    grid: Grid,
    group_meta: Array,
    q: Array,
    k_rows: Array,
    v_rows: Array,
    fu_part: Array,
    ring: Store,
    far: Store,
    out: Array,
) -> None:
    """The output from the splits, the far numerator and the row's own key; the state after the row."""
    r0, hpg = int(p["r0"]), int(p["hpg"])
    (ring_k, ring_v), (far_mz, t_hat) = ring, far
    found = partials(p, fu_part)
    for g, words in enumerate(group_meta):
        heads = slice(g * hpg, (g + 1) * hpg)
        slot, landmarks, folds, flushes = (int(x) for x in found.flags[heads][0])
        live = slice(landmarks)
        masses, kept = found.masses[heads, live], found.folds[heads, live, 0, None]
        weight = found.folds[heads, live, 1, None]
        t = t_hat[heads, :, live]
        total = t[:, T_TOTAL] * kept
        recent = t[:, T_RECENT] * kept + weight * found.evicted[heads, None]
        if p["outputs"]:
            numerator = np.matmul(masses[:, None, :, 3], total + recent)[:, 0]
            _merge(p, found, heads, q[r0, heads] @ k_rows[r0, g], v_rows[r0, g], numerator, out[r0, heads])
        if not p["moves"]:
            continue
        if folds:
            t[:, T_TOTAL] = total + recent if flushes else total
            t[:, T_RECENT] = 0 if flushes else recent
            for section, at in ((MZ_MAX, 0), (MZ_TOTAL, 1), (MZ_RECENT, 2)):
                far_mz[heads, section, live] = masses[..., at]
        ring_k[g, slot] = k_rows[r0, g]
        ring_v[g, slot] = v_rows[r0, g]
        if found.far_head[heads][0, 0]:
            words[META_HEAD] = (words[META_HEAD] + 1) % words[META_WINDOW]
            words[META_EVICTED] = (int(words[META_EVICTED]) + 1) % WORDS
        else:
            words[META_LEN] += 1
        words[META_FAR_LEN] += bool(folds)


def _merge(
    p: Params, found: Partials, heads: slice, own: Array, own_value: Array, numerator: Array, out: Array
) -> None:
    tops, masses = found.heads[heads, :, 0], found.heads[heads, :, 1]
    _, far_max, far_mass, have = found.far_head[heads].T
    own = own * np.float32(p["scale"])
    largest = np.maximum(tops.max(axis=-1), own)
    largest = np.where(have > 0, np.maximum(largest, far_max), largest)
    weights = np.exp(tops - largest[:, None])
    own_weight = np.exp(own - largest)
    acc = np.matmul(weights[:, None], found.values[heads])[:, 0] + own_weight[:, None] * own_value
    mass = (weights * masses).sum(axis=-1) + own_weight
    with np.errstate(over="ignore"):
        far_scale = np.where(have > 0, np.exp(far_max - largest), np.float32(0))
    acc += numerator * far_scale[:, None]
    mass += np.where(have > 0, far_mass, np.float32(0)) * far_scale
    out[:] = acc * (np.float32(1) / np.maximum(mass, np.float32(MIN_DENOMINATOR)))[:, None]


FUSED_TWINS: MappingProxyType[str, Twin] = MappingProxyType(
    {twin.__name__: twin for twin in (o1c_fu_read, o1c_fu_move)}
)
"""The twins, by name."""
