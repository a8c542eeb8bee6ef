"""Twins of the kernels that take a chunk's window as matrix products; see `twins_stages.py`.

A panel has a column for each sink, each row of the ring from the oldest on, each row of the
sub-chunk, and zeros up to its end.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from ..kernels import Grid
from ..kernels.gemm import TILE_K
from ..planes import HD_FAR, HD_HAVE, HD_INV, HD_MAX, MIN_DENOMINATOR, T_RECENT, T_TOTAL
from .twins_stages import Array, Params, Twin, _Group, _groups

_HALF_LARGEST = np.float32(65504)


def _half(x: Array) -> Array:
    """Rounded to float16 and back; what is larger becomes float16's largest number."""
    return np.clip(x, -_HALF_LARGEST, _HALF_LARGEST).astype(np.float16).astype(np.float32)


def _seen(p: Params, group: _Group) -> Array:
    """`(k, panel)`: the columns that each row sees: the sinks and its window."""
    ns, column = int(p["ns"]), np.arange(int(p["panel"]))
    last = ns + group.length + np.arange(int(p["k"]))
    first = last + 1 - np.minimum(group.window, last + 1 - ns)
    window = (column >= first[:, None]) & (column <= last[:, None])
    return np.asarray(window | (column < ns))


def _heads(p: Params, g: int) -> slice:
    hpg = int(p["hpg"])
    return slice(g * hpg, (g + 1) * hpg)


def o1c_gather(
    p: Params,
    grid: Grid,
    group_meta: Array,
    ring_k: Array,
    ring_v: Array,
    k_rows: Array,
    v_rows: Array,
    panel_k: Array,
    panel_v: Array,
) -> None:
    """The window's keys and values as one panel for each group."""
    k, r0, w = int(p["k"]), int(p["r0"]), int(p["w"])
    for group in _groups(p, group_meta):
        slots = group.slots(group.length)
        for ring, rows, panel in ((ring_k, k_rows, panel_k), (ring_v, v_rows, panel_v)):
            own = ring[group.g]
            filled = np.concatenate([own[w:], own[slots], rows[r0 : r0 + k, group.g]])
            panel[group.g, : len(filled)] = filled
            panel[group.g, len(filled) :] = 0


def o1c_pack(p: Params, grid: Grid, q: Array, panel_q: Array) -> None:
    """The sub-chunk's queries, a head's rows together."""
    k, r0 = int(p["k"]), int(p["r0"])
    panel_q[:, :k] = q[r0 : r0 + k].swapaxes(0, 1)


def o1c_qk(p: Params, grid: Grid, panel_q: Array, panel_k: Array, panel_scores: Array) -> None:
    """Near logits of all rows over all columns."""
    k, scale = int(p["k"]), np.float32(p["scale"])
    for g in range(int(p["ng"])):
        heads = _heads(p, g)
        panel_scores[heads, :k] = panel_q[heads, :k] @ panel_k[g].T * scale


def o1c_qk_f16(p: Params, grid: Grid, panel_q: Array, panel_k: Array, panel_scores: Array) -> None:
    """The same with queries and keys rounded to float16."""
    k = int(p["k"])
    # Rows past the sub-chunk are nobody's and may hold anything.
    queries = np.zeros_like(panel_q)
    queries[:, :k] = _half(panel_q[:, :k])
    o1c_qk(p, grid, queries, _half(panel_k), panel_scores)


def o1c_gmax(p: Params, grid: Grid, group_meta: Array, panel_scores: Array, near_max: Array) -> None:
    """The largest near logit of a row, over the columns it sees."""
    k = int(p["k"])
    for group in _groups(p, group_meta):
        logits = np.where(_seen(p, group), panel_scores[group.heads, :k], -np.inf)
        near_max[:k, group.heads] = logits.max(axis=-1).T


def o1c_gsoft(p: Params, grid: Grid, group_meta: Array, panel_scores: Array, row_head: Array) -> None:
    """Near weights in place of the logits, zero where a row does not look; one over the denominator."""
    k = int(p["k"])
    for group in _groups(p, group_meta):
        head = row_head[:k, group.heads].swapaxes(0, 1)
        x = panel_scores[group.heads, :k] - head[:, :, HD_MAX, None]
        weights = np.exp(np.where(_seen(p, group), x, -np.inf))
        panel_scores[group.heads, :k] = weights
        total = weights.sum(axis=-1) + head[:, :, HD_FAR]
        head[:, :, HD_INV] = np.float32(1) / np.maximum(total, np.float32(MIN_DENOMINATOR))


def o1c_pv(p: Params, grid: Grid, panel_scores: Array, panel_v: Array, near_parts: Array) -> None:
    """Near value sums of all rows, a split of the columns each: equal runs of whole steps."""
    k, panel, splits = int(p["k"]), int(p["panel"]), int(p["splits"])
    per = -(-(panel // TILE_K) // splits) * TILE_K
    for g in range(int(p["ng"])):
        heads = _heads(p, g)
        for split in range(splits):
            run = slice(split * per, (split + 1) * per)
            near_parts[split, heads, :k] = panel_scores[heads, :k, run] @ panel_v[g, run]


def o1c_pv_f16(p: Params, grid: Grid, panel_scores: Array, panel_v: Array, near_parts: Array) -> None:
    """The same with weights and values rounded to float16."""
    k = int(p["k"])
    weights = np.zeros_like(panel_scores)
    weights[:, :k] = _half(panel_scores[:, :k])
    o1c_pv(p, grid, weights, _half(panel_v), near_parts)


def o1c_gadd(
    p: Params,
    grid: Grid,
    group_meta: Array,
    near_parts: Array,
    row_head: Array,
    gains: Array,
    t_hat: Array,
    evict_weights: Array,
    ring_v: Array,
    out: Array,
) -> None:
    """The output: the splits, the far numerator, the rows evicted so far, over the denominator."""
    k, r0, splits = int(p["k"]), int(p["r0"]), int(p["splits"])
    for group in _groups(p, group_meta):
        heads, live, folds = group.heads, group.live, group.folds(k - 1)
        head = row_head[:k, heads].swapaxes(0, 1)
        counts = head[:, :, HD_HAVE, None] > 0.5
        rows = np.arange(k)
        # Neither gains nor weights are written where the far field does not count, nor the weight of a
        # row that is not yet evicted.
        gain = np.where(counts, gains[:k, heads, live].swapaxes(0, 1), np.float32(0))
        evicted = counts & (rows[folds] <= rows[:, None])
        weight = np.where(evicted, evict_weights[:k, heads, folds].swapaxes(0, 1), np.float32(0))
        far = gain @ (t_hat[heads, T_TOTAL, live] + t_hat[heads, T_RECENT, live])
        far += weight @ ring_v[group.g, group.slots(group.folded)]
        acc = near_parts[:splits, heads, :k].sum(axis=0) + far
        out[r0 : r0 + k, heads] = (acc * head[:, :, HD_INV, None]).swapaxes(0, 1)


GEMM_TWINS: MappingProxyType[str, Twin] = MappingProxyType(
    {
        twin.__name__: twin
        for twin in (
            o1c_gather,
            o1c_pack,
            o1c_qk,
            o1c_qk_f16,
            o1c_gmax,
            o1c_gsoft,
            o1c_pv,
            o1c_pv_f16,
            o1c_gadd,
        )
    }
)
"""The twins, by name."""
