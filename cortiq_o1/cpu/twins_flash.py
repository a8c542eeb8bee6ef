"""Twins of the kernels of a chunk without score planes; see `twins_stages.py`."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..kernels import Grid
from ..planes import (
    FF_GAINS,
    FF_HAVE,
    FF_MASS,
    FF_MAX,
    FF_WEIGHTS,
    FLUSH_ROWS,
    FR_END,
    FR_FIRST,
    FR_FLUSHES,
    FR_HEAD,
    FR_LANDMARKS,
    FR_LEN,
    FR_WINDOW,
    FR_WORDS,
    LARGE,
    MIN_DENOMINATOR,
    S_LOGIT,
    S_MASS,
    S_MAX,
    S_RESCALE,
    S_SECTIONS,
    SUB_ROWS,
    T_RECENT,
    T_TOTAL,
    TP_MASS,
    TP_MAX,
    TP_WORDS,
)
from ..tiling import TILE_KEYS, TILE_ROWS
from .twins_stages import STAGE_TWINS, Array, Params, Twin, _Group, _groups

NOTHING = np.float32(-1e38)
"""The largest of no logits: above -LARGE, so that a masked one weighs nothing."""


class FarRows(NamedTuple):
    """Views of `fl_rows`: `far_rows (5, nh, m, kcap)`, the groups' records `(ng, 8)`, the landmark logits
    `(kcap, nh, m)`."""

    rows: Array
    records: Array
    land: Array


def far_rows(p: Params, fl_rows: Array) -> FarRows:
    """The parts of the plane."""
    nh, m, kcap, ng = (int(p[name]) for name in ("nh", "m", "kcap", "ng"))
    first, second = S_SECTIONS * nh * m * kcap, FR_WORDS * ng
    return FarRows(
        fl_rows[:first].reshape(S_SECTIONS, nh, m, kcap),
        fl_rows[first : first + second].reshape(ng, FR_WORDS),
        fl_rows[first + second :].reshape(kcap, nh, m),
    )


def o1c_fl_evict(
    p: Params, grid: Grid, group_meta: Array, ring_k: Array, q_tilde: Array, far_mz: Array, q: Array,
    k_tilde: Array, fl_rows: Array,
) -> None:  # fmt: skip
    """What the sub-chunk evicts, the landmark logits, and what the commit must know of `group_meta`."""
    to = far_rows(p, fl_rows)
    STAGE_TWINS["o1c_far_e"](p, grid, group_meta, ring_k, q_tilde, far_mz, to.rows)
    STAGE_TWINS["o1c_land"](p, grid, group_meta, q, k_tilde, to.land)
    for group in _groups(p, group_meta):
        record = to.records[group.g]
        record[FR_LEN], record[FR_HEAD], record[FR_WINDOW] = group.length, group.head, group.window
        record[FR_FIRST], record[FR_END] = group.first, group.first + group.folded
        record[FR_LANDMARKS] = group.live.stop
        after = group.far_len + group.folded
        record[FR_FLUSHES] = after // FLUSH_ROWS != group.far_len // FLUSH_ROWS


class Tile(NamedTuple):
    """A row tile of a group over all of its columns: keys and values `(columns, width)` of them, for each
    row of the tile its row of the sub-chunk, its head and the columns that it sees `(rows, columns)`; and
    each part's slot and columns."""

    g: int
    keys: Array
    values: Array
    row: Array
    head: Array
    sees: Array
    parts: tuple[tuple[int, slice], ...]


def tiles(
    p: Params, group_meta: Array, ring_k: Array, ring_v: Array, k_rows: Array, v_rows: Array
) -> Iterator[Tile]:
    """The row tiles of all groups, as `o1c_fl_near` cuts them."""
    k, hpg, ns, r0, w = (int(p[name]) for name in ("k", "hpg", "ns", "r0", "w"))
    pair_tiles, per = int(p["pair_tiles"]), int(p["tiles"])
    of_group = -(-hpg * k // TILE_ROWS)
    for group in _groups(p, group_meta):
        first_x = np.array([group.length + i + 1 - group.near(i) for i in range(k)])
        for tile in range(of_group):
            rows = np.arange(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, hpg * k))
            i = rows // hpg
            x = np.arange(first_x[i[0]], group.length + i[-1] + 1)
            own = x >= group.length
            at = np.where(own, 0, (group.head + x) % group.window)
            mine = np.where(own, r0 + x - group.length, r0)
            keys, values = (
                np.concatenate([ring[w : w + ns], np.where(own[:, None], new[mine], ring[at])])
                for ring, new in (
                    (ring_k[group.g], k_rows[:, group.g]), (ring_v[group.g], v_rows[:, group.g])
                )
            )  # fmt: skip
            sees = np.ones((len(rows), ns + len(x)), bool)
            sees[:, ns:] = (x >= first_x[i][:, None]) & (x <= group.length + i[:, None])
            number = group.g * of_group + tile
            begin, end = number * pair_tiles, (number + 1) * pair_tiles
            parts = []
            for workgroup in range(begin // per, (end - 1) // per + 1):
                low, high = max(begin, workgroup * per), min(end, (workgroup + 1) * per)
                span = slice((low - begin) * TILE_KEYS, (high - begin) * TILE_KEYS)
                parts.append((workgroup - begin // per, span))
            heads = group.heads.start + rows % hpg
            yield Tile(group.g, keys, values, i, heads, sees, tuple(parts))


def o1c_fl_near(
    p: Params, grid: Grid, group_meta: Array, q: Array, ring_k: Array, ring_v: Array, k_rows: Array,
    v_rows: Array, fl_parts: Array, fl_rows: Array,
) -> None:  # fmt: skip
    """Near part of every row over each of its parts."""
    scale, r0 = np.float32(p["scale"]), int(p["r0"])
    for tile in tiles(p, group_meta, ring_k, ring_v, k_rows, v_rows):
        logits = q[r0 + tile.row, tile.head] @ tile.keys.T * scale
        logits = np.where(tile.sees, logits, np.float32(-LARGE))
        for slot, span in tile.parts:
            x = logits[:, span]
            top = x.max(axis=-1, initial=NOTHING)
            weights = np.exp(x - top[:, None])
            found = np.zeros((len(x), fl_parts.shape[-1]), np.float32)
            found[:, TP_MAX], found[:, TP_MASS] = top, weights.sum(axis=-1)
            found[:, TP_WORDS:] = weights @ tile.values[span]
            fl_parts[slot, tile.row, tile.head] = found


def folded_before(group: _Group, i: int) -> slice:
    """The rows of the sub-chunk, up to row `i`, whose evicted row is folded."""
    return slice(group.first, min(group.first + group.folded, max(i + 1, group.first)))


def o1c_fl_far(p: Params, grid: Grid, group_meta: Array, mix: Array, fl_rows: Array, fl_far: Array) -> None:
    """The far part of every row at its own maximum."""
    found = far_rows(p, fl_rows)
    for group in _groups(p, group_meta):
        heads, live = group.heads, group.live
        rows = found.rows[:, heads, live]
        for i in range(int(p["k"])):
            folded = folded_before(group, i)
            far_len = group.far_len + folded.stop - folded.start
            land, mu, mass = found.land[i, heads, live], rows[S_MAX, ..., i], rows[S_MASS, ..., i]
            f = land.max(axis=-1, keepdims=True)
            u = np.matmul(np.exp(land - f)[:, None], mix[heads, live, live])[:, 0]
            if p["rect"]:
                u = np.maximum(u, np.float32(0))
            far_max = (f + mu).max(axis=-1)
            gain = u * np.exp(f + mu - far_max[:, None]) if far_len else np.zeros_like(u)
            far = (gain * mass).sum(axis=-1) if far_len else np.zeros_like(far_max)
            have = (far >= 0) & (far_len > 0)
            to = fl_far[i, heads]
            to[:, FF_MAX], to[:, FF_MASS], to[:, FF_HAVE] = far_max, far, have
            to[:, FF_GAINS:] = 0
            # A numerator of nothing may hold anything.
            if group.far_len:
                kept = np.where(have[:, None], gain * rows[S_RESCALE, ..., i], np.float32(0))
                to[:, FF_GAINS : FF_GAINS + live.stop] = kept
            shares = np.exp(rows[S_LOGIT, ..., folded] - mu[..., None]) * gain[..., None]
            weights = np.where(have[:, None], shares.sum(axis=1), np.float32(0))
            to[:, FF_WEIGHTS + folded.start : FF_WEIGHTS + folded.stop] = weights


def parts_of(p: Params, g: int, head: int, i: int) -> int:
    """How many parts a row of a head has."""
    hpg, pair_tiles, per = int(p["hpg"]), int(p["pair_tiles"]), int(p["tiles"])
    of_group = -(-hpg * int(p["k"]) // TILE_ROWS)
    begin = (g * of_group + (i * hpg + head % hpg) // TILE_ROWS) * pair_tiles
    return (begin + pair_tiles - 1) // per - begin // per + 1


def o1c_fl_merge(
    p: Params, grid: Grid, group_meta: Array, fl_far: Array, fl_parts: Array, t_hat: Array, ring_v: Array,
    out: Array,
) -> None:  # fmt: skip
    """The output: near parts, far numerator and the rows folded so far at one scale."""
    r0 = int(p["r0"])
    for group in _groups(p, group_meta):
        for i in range(int(p["k"])):
            folded = folded_before(group, i)
            evicted = ring_v[group.g, (group.head + np.arange(folded.stop - folded.start)) % group.window]
            for head in range(group.heads.start, group.heads.stop):
                far = fl_far[i, head]
                parts = fl_parts[: parts_of(p, group.g, head, i), i, head]
                have = far[FF_HAVE] > 0.5
                largest = parts[:, TP_MAX].max()
                if have:
                    largest = np.maximum(largest, far[FF_MAX])
                weights = np.exp(parts[:, TP_MAX] - largest)
                acc, mass = weights @ parts[:, TP_WORDS:], weights @ parts[:, TP_MASS]
                if have:
                    scale = np.exp(far[FF_MAX] - largest)
                    mass += far[FF_MASS] * scale
                    numerator = far[FF_WEIGHTS + folded.start : FF_WEIGHTS + folded.stop] @ evicted
                    if group.far_len:
                        t = t_hat[head, T_TOTAL, group.live] + t_hat[head, T_RECENT, group.live]
                        numerator += far[FF_GAINS : FF_GAINS + group.live.stop] @ t
                    acc += numerator * scale
                out[r0 + i, head] = acc * (np.float32(1) / np.maximum(mass, np.float32(MIN_DENOMINATOR)))


def o1c_fl_commit(
    p: Params, grid: Grid, group_meta: Array, k_rows: Array, v_rows: Array, fl_rows: Array, ring_k: Array,
    ring_v: Array, far_mz: Array, t_hat: Array,
) -> None:  # fmt: skip
    """The state after the sub-chunk."""
    rows = far_rows(p, fl_rows).rows
    STAGE_TWINS["o1c_far_commit"](p, grid, group_meta, ring_v, rows, far_mz, t_hat)
    STAGE_TWINS["o1c_ring_commit"](p, grid, group_meta, k_rows, v_rows, ring_k, ring_v)
    STAGE_TWINS["o1c_meta"](p, grid, group_meta)


assert FF_WEIGHTS - FF_GAINS == SUB_ROWS  # a weight for each row of a sub-chunk, and each landmark

FLASH_TWINS: MappingProxyType[str, Twin] = MappingProxyType(
    {twin.__name__: twin for twin in (o1c_fl_evict, o1c_fl_near, o1c_fl_far, o1c_fl_merge, o1c_fl_commit)}
)
"""The twins, by name."""
