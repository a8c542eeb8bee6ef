"""One NumPy function a kernel, of the kernel's name, on the same planes with the same parameters.

A twin takes `(p, grid, *planes)`: the kernel's parameters by name, the grid, and the planes in the
order of the kernel's bindings, each in its shape of `planes.PLANES`. It computes in float32, in the
kernel's order of stages, and writes what the kernel writes and nothing else: rows past the
sub-chunk, columns past a row's window and landmarks past those in use stay as they were. What a
kernel does for speed (lanes, trees, the fold of a grid) is left out, so `grid` goes unused.

Sums inside a dot product run in whatever order NumPy likes; all else follows the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..kernels import Grid
from ..planes import (
    FLUSH_ROWS,
    HD_FAR,
    HD_HAVE,
    HD_INV,
    HD_MAX,
    LARGE,
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    MIN_DENOMINATOR,
    MZ_MAX,
    MZ_RECENT,
    MZ_SHIFT,
    MZ_TOTAL,
    S_LOGIT,
    S_MASS,
    S_MAX,
    S_RESCALE,
    S_WEIGHT,
    T_RECENT,
    T_TOTAL,
)

Params = Mapping[str, int | float]
WORDS = 1 << 32
"""Where a word of `group_meta` wraps."""
Array = npt.NDArray[Any]
Twin = Callable[..., None]


class _Group(NamedTuple):
    """A group's row of `group_meta`, and what follows from it for one sub-chunk."""

    g: int
    heads: slice
    length: int
    head: int
    far_len: int
    window: int
    live: slice
    """The landmarks in use."""
    first: int
    """The first row of the sub-chunk that evicts one: `j0`."""
    folded: int
    """Rows folded over the whole sub-chunk; those evicted past the far limit are not."""
    evicted: int
    """Rows evicted before the sub-chunk, modulo 2^32."""

    def near(self, i: int) -> int:
        """Rows in the window of row `i`, itself included."""
        return min(self.window, self.length + i + 1)

    def slots(self, count: int) -> Array:
        """The ring slots of the `count` oldest rows, oldest first."""
        return (self.head + np.arange(count)) % self.window

    def folds(self, i: int) -> slice:
        """The rows of the sub-chunk, up to row `i`, whose evicted row is folded."""
        return slice(self.first, self.first + max(0, min(i + 1 - self.first, self.folded)))


def _groups(p: Params, group_meta: Array) -> Iterator[_Group]:
    hpg, k = int(p["hpg"]), int(p["k"])
    for g, words in enumerate(group_meta.tolist()):
        first = words[META_WINDOW] - words[META_LEN]
        room = max(0, words[META_FAR_LIMIT] - words[META_FAR_LEN])
        yield _Group(
            g=g,
            heads=slice(g * hpg, (g + 1) * hpg),
            length=words[META_LEN],
            head=words[META_HEAD],
            far_len=words[META_FAR_LEN],
            window=words[META_WINDOW],
            live=slice(words[META_LANDMARKS]),
            first=first,
            folded=min(max(0, k - first), room),
            evicted=words[META_EVICTED],
        )


def _near_rows(p: Params, group: _Group, ring: Array, rows: Array) -> Iterator[tuple[int, Array]]:
    """For each row of the sub-chunk the keys or values it sees: sinks, then its window by age."""
    k, r0, w = int(p["k"]), int(p["r0"]), int(p["w"])
    plane = ring[group.g]
    sinks = plane[w:]
    stream = np.concatenate([plane[group.slots(group.length)], rows[r0 : r0 + k, group.g]])
    for i in range(k):
        end = group.length + i + 1
        yield i, np.concatenate([sinks, stream[end - group.near(i) : end]])


def o1c_far_e(
    p: Params, grid: Grid, group_meta: Array, ring_k: Array, q_tilde: Array, far_mz: Array, far_rows: Array
) -> None:
    """Evicted keys against the query landmarks: logits, and the far maximum and mass after each row."""
    k, scale = int(p["k"]), np.float32(p["scale"])
    for group in _groups(p, group_meta):
        heads, live, folds = group.heads, group.live, group.folds(k - 1)
        keys = ring_k[group.g, group.slots(group.folded)]
        before = far_mz[heads, MZ_MAX, live, None]
        mass = far_mz[heads, MZ_TOTAL, live] + far_mz[heads, MZ_RECENT, live]
        logits = np.full((*mass.shape, k), -LARGE, np.float32)
        logits[..., folds] = q_tilde[heads, live] @ keys.T * scale - far_mz[heads, MZ_SHIFT, live, None]
        maxima = np.maximum(before, np.maximum.accumulate(logits, axis=-1))
        # exp(0) is exactly 1, and an empty far field's maximum, -LARGE, gives 0 at the first fold.
        rescale = np.exp(before - maxima)
        weights = np.zeros_like(logits)
        weights[..., folds] = np.exp(logits[..., folds] - maxima[..., -1:])
        far_rows[S_LOGIT, heads, live, :k] = logits
        far_rows[S_MAX, heads, live, :k] = maxima
        far_rows[S_RESCALE, heads, live, :k] = rescale
        far_rows[S_WEIGHT, heads, live, :k] = weights
        for i in range(k):
            seen = np.exp(logits[..., group.folds(i)] - maxima[..., i, None])
            far_rows[S_MASS, heads, live, i] = mass * rescale[..., i] + seen.sum(axis=-1)


def o1c_score(
    p: Params, grid: Grid, group_meta: Array, q: Array, ring_k: Array, k_rows: Array, scores: Array
) -> None:
    """Near logits of every row over the sinks and its own window."""
    r0, scale = int(p["r0"]), np.float32(p["scale"])
    for group in _groups(p, group_meta):
        for i, keys in _near_rows(p, group, ring_k, k_rows):
            scores[i, group.heads, : len(keys)] = q[r0 + i, group.heads] @ keys.T * scale


def o1c_land(p: Params, grid: Grid, group_meta: Array, q: Array, k_tilde: Array, land_scores: Array) -> None:
    """Landmark logits of every row."""
    k, r0, scale = int(p["k"]), int(p["r0"]), np.float32(p["scale"])
    for group in _groups(p, group_meta):
        keys = k_tilde[group.g, group.live]
        land_scores[:k, group.heads, group.live] = q[r0 : r0 + k, group.heads] @ keys.T * scale


def o1c_max(p: Params, grid: Grid, group_meta: Array, scores: Array, near_max: Array) -> None:
    """The largest near logit of a row."""
    for group in _groups(p, group_meta):
        for i in range(int(p["k"])):
            n = int(p["ns"]) + group.near(i)
            near_max[i, group.heads] = scores[i, group.heads, :n].max(axis=-1)


def o1c_far(
    p: Params,
    grid: Grid,
    group_meta: Array,
    land_scores: Array,
    near_max: Array,
    mix: Array,
    far_rows: Array,
    row_head: Array,
    gains: Array,
    evict_weights: Array,
) -> None:
    """The far part of a row with the far field as of that row."""
    for group in _groups(p, group_meta):
        heads, live = group.heads, group.live
        for i in range(int(p["k"])):
            near, folds = near_max[i, heads], group.folds(i)
            row_head[i, heads, HD_MAX] = near
            row_head[i, heads, HD_FAR] = 0
            row_head[i, heads, HD_HAVE] = 0
            if group.far_len + folds.stop - folds.start == 0:
                continue
            logits = land_scores[i, heads, live]
            f = logits.max(axis=-1, keepdims=True)
            u = np.matmul(np.exp(logits - f)[:, None, :], mix[heads, live, live])[:, 0]
            if p["rect"]:
                u = np.maximum(u, np.float32(0))
            maxima = far_rows[S_MAX, heads, live, i]
            c = np.maximum(near, (f + maxima).max(axis=-1))
            gain = u * np.exp(f + maxima - c[:, None])
            far = (gain * far_rows[S_MASS, heads, live, i]).sum(axis=-1)
            # A negative mass drops the far field of this row and head, its part in C included.
            kept = np.flatnonzero(far >= 0)
            at = heads.start + kept
            row_head[i, at, HD_MAX] = c[kept]
            row_head[i, at, HD_FAR] = far[kept]
            row_head[i, at, HD_HAVE] = 1
            gains[i, at, live] = (gain * far_rows[S_RESCALE, heads, live, i])[kept]
            evicted = np.exp(far_rows[S_LOGIT, heads, live, folds] - maxima[..., None])
            evict_weights[i, at, folds] = (gain[..., None] * evicted).sum(axis=1)[kept]


def o1c_soft(p: Params, grid: Grid, group_meta: Array, scores: Array, row_head: Array) -> None:
    """Near weights in place of the logits, and one over the denominator."""
    for group in _groups(p, group_meta):
        for i in range(int(p["k"])):
            n = int(p["ns"]) + group.near(i)
            head = row_head[i, group.heads]
            weights = np.exp(scores[i, group.heads, :n] - head[:, HD_MAX, None])
            scores[i, group.heads, :n] = weights
            total = weights.sum(axis=-1) + head[:, HD_FAR]
            head[:, HD_INV] = np.float32(1) / np.maximum(total, np.float32(MIN_DENOMINATOR))


def o1c_sum(
    p: Params, grid: Grid, group_meta: Array, scores: Array, ring_v: Array, v_rows: Array, sum_pieces: Array
) -> None:
    """The near value sum in pieces of the keys."""
    pieces = int(p["pieces"])
    for group in _groups(p, group_meta):
        for i, values in _near_rows(p, group, ring_v, v_rows):
            n = len(values)
            per = -(-n // pieces)
            weights = scores[i, group.heads, :n]
            for c in range(pieces):
                part = slice(c * per, (c + 1) * per)
                sum_pieces[i, group.heads, c] = weights[:, part] @ values[part]


def o1c_add(
    p: Params,
    grid: Grid,
    group_meta: Array,
    sum_pieces: Array,
    row_head: Array,
    gains: Array,
    t_hat: Array,
    evict_weights: Array,
    ring_v: Array,
    out: Array,
) -> None:
    """The output: the pieces, the far numerator, the rows evicted so far, over the denominator."""
    r0 = int(p["r0"])
    for group in _groups(p, group_meta):
        evicted = ring_v[group.g, group.slots(group.folded)]
        for i in range(int(p["k"])):
            folds = group.folds(i)
            acc = sum_pieces[i, group.heads].sum(axis=1)
            for h, head in enumerate(range(group.heads.start, group.heads.stop)):
                # Neither gains nor weights are written where the far field does not count.
                if row_head[i, head, HD_HAVE] > 0.5:
                    gain = gains[i, head, group.live]
                    acc[h] += gain @ t_hat[head, T_TOTAL, group.live]
                    acc[h] += gain @ t_hat[head, T_RECENT, group.live]
                    acc[h] += evict_weights[i, head, folds] @ evicted[: folds.stop - folds.start]
            out[r0 + i, group.heads] = acc * row_head[i, group.heads, HD_INV, None]


def o1c_far_commit(
    p: Params, grid: Grid, group_meta: Array, ring_v: Array, far_rows: Array, far_mz: Array, t_hat: Array
) -> None:
    """The far field after the sub-chunk: rescaled to its maximum, plus every folded row."""
    last = int(p["k"]) - 1
    for group in _groups(p, group_meta):
        if not group.folded:
            continue
        heads, live = group.heads, group.live
        values = ring_v[group.g, group.slots(group.folded)]
        rescale = far_rows[S_RESCALE, heads, live, last]
        weights = far_rows[S_WEIGHT, heads, live, group.folds(last)]
        mz, t = far_mz[heads, :, live], t_hat[heads, :, live]
        mz[:, MZ_MAX] = far_rows[S_MAX, heads, live, last]
        mz[:, MZ_TOTAL] *= rescale
        mz[:, MZ_RECENT] = mz[:, MZ_RECENT] * rescale + weights.sum(axis=-1)
        t[:, T_TOTAL] *= rescale[..., None]
        t[:, T_RECENT] = t[:, T_RECENT] * rescale[..., None] + weights @ values
        if group.far_len // FLUSH_ROWS != (group.far_len + group.folded) // FLUSH_ROWS:
            mz[:, MZ_TOTAL] += mz[:, MZ_RECENT]
            mz[:, MZ_RECENT] = 0
            t[:, T_TOTAL] += t[:, T_RECENT]
            t[:, T_RECENT] = 0


def o1c_ring_commit(
    p: Params, grid: Grid, group_meta: Array, k_rows: Array, v_rows: Array, ring_k: Array, ring_v: Array
) -> None:
    """The sub-chunk's keys and values into the ring; a row lands where the one it evicts was."""
    k, r0 = int(p["k"]), int(p["r0"])
    for group in _groups(p, group_meta):
        slots = (group.head + group.length + np.arange(k)) % group.window
        ring_k[group.g, slots] = k_rows[r0 : r0 + k, group.g]
        ring_v[group.g, slots] = v_rows[r0 : r0 + k, group.g]


def o1c_meta(p: Params, grid: Grid, group_meta: Array) -> None:
    """Ring length, head, far count and evictions after the sub-chunk."""
    k = int(p["k"])
    for group in _groups(p, group_meta):
        words = group_meta[group.g]
        words[META_LEN] = min(group.window, group.length + k)
        evicted = max(0, k - group.first)
        words[META_HEAD] = (group.head + evicted) % group.window
        words[META_FAR_LEN] = group.far_len + group.folded
        words[META_EVICTED] = (group.evicted + evicted) % WORDS


def o1c_archive(
    p: Params,
    grid: Grid,
    group_meta: Array,
    q: Array,
    ring_k: Array,
    ring_v: Array,
    archive_q: Array,
    archive_k: Array,
    archive_v: Array,
) -> None:
    """Every key and value that the sub-chunk evicts, and the queries of the evicting row."""
    k, r0 = int(p["k"]), int(p["r0"])
    for group in _groups(p, group_meta):
        count = max(0, k - group.first)
        slots = (group.evicted + np.arange(count)) % WORDS % int(p["archive"])
        gone = group.slots(count)
        archive_q[slots, group.heads] = q[r0 + k - count : r0 + k, group.heads]
        archive_k[group.g, slots] = ring_k[group.g, gone]
        archive_v[group.g, slots] = ring_v[group.g, gone]


def o1c_copy(p: Params, grid: Grid, src: Array, dst: Array) -> None:
    """A range of one plane into another, in vec4s of bits."""
    src_at, dst_at, count = 4 * int(p["src_at"]), 4 * int(p["dst_at"]), 4 * int(p["count"])
    source, target = src.reshape(-1).view(np.uint32), dst.reshape(-1).view(np.uint32)
    # A device pads a plane to whole vec4s; here the last one may be short.
    count = min(count, len(source) - src_at, len(target) - dst_at)
    target[dst_at : dst_at + count] = source[src_at : src_at + count]


STAGE_TWINS: MappingProxyType[str, Twin] = MappingProxyType(
    {
        twin.__name__: twin
        for twin in (
            o1c_far_e,
            o1c_score,
            o1c_land,
            o1c_max,
            o1c_far,
            o1c_soft,
            o1c_sum,
            o1c_add,
            o1c_far_commit,
            o1c_ring_commit,
            o1c_meta,
            o1c_archive,
            o1c_copy,
        )
    }
)
"""The stages' twins, by name."""
