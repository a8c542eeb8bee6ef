"""A part of a sub-chunk as one thread works on it: its far field, its weights, its outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..arrays import Float32
from ..geometry import Geometry
from ..planes import LARGE, MIN_DENOMINATOR, MZ_MAX, MZ_RECENT, MZ_SHIFT, MZ_TOTAL
from .far import FarGains, FarStages, empty_maximum, far_gains, far_stages
from .folding import Fold, put_fold
from .near import Scratch, Window, add_values, hide_later, is_whole, scores
from .resident import DirectResident, Run, Step

BLOCK_LOGITS = 9 * 2**16
"""Logits at a time, from the scores to the values: few enough for a core's cache, and enough to read the
keys once for most of a group's heads."""
TASK_LOGITS = 9 * 2**18
"""Logits of a task: far fields come cheaper by several groups, threads stay evenly busy with many tasks."""
SAFE_LOGIT = 30.0
"""Where all maxima lie within this of zero, weights need no scale: their sums stay in float32's range,
and above the least denominator with a scale and without."""


Block = tuple[slice, slice]
"""Some of a task's groups, and some heads of each."""


@dataclass(frozen=True)
class Task:
    """A part of a sub-chunk: groups of one run, and some heads of each."""

    run: Run
    window: Window
    groups: slice
    heads: slice
    products_first: bool
    """See `Work.attend`."""


def cut(runs: list[Run], geometry: Geometry, workers: int) -> list[Task]:
    """The runs in tasks that `workers` share."""
    groups, heads = geometry.num_kv_heads, geometry.heads_per_group
    tasks = []
    for run in runs:
        window = Window(run.length, run.head, run.window, geometry.window, geometry.sinks, run.rows)
        if workers > groups:
            # Each task reads its group's keys again, from a cache that the cores share.
            g_step, h_step = 1, -(-heads // -(-workers // groups))
        else:
            most = max(1, TASK_LOGITS // (heads * run.rows * (window.columns + run.rows)))
            g_step, h_step = min(most, -(-groups // workers)), heads
        parts = [(g, h) for g in _slices(run.first, run.last, g_step) for h in _slices(0, heads, h_step)]
        tasks += [Task(run, window, g, h, at % 2 > 0) for at, (g, h) in enumerate(parts)]
    return tasks


def _slices(first: int, last: int, step: int) -> Iterator[slice]:
    for low in range(first, last, step):
        yield slice(low, min(low + step, last))


class Work:
    """A task's far field, and its outputs where there are queries.

    Shapes: `g` groups, `h` heads of each, `i` rows, `m` landmarks in use.
    """

    def __init__(self, resident: DirectResident, step: Step, task: Task, scratch: Scratch) -> None:
        self.resident, self.step, self.run, self.window = resident, step, task.run, task.window
        self.scratch, self.groups = scratch, task.groups
        self.count = task.groups.stop - task.groups.start
        self.hpg = task.heads.stop - task.heads.start
        first = task.groups.start * resident.geometry.heads_per_group + task.heads.start
        self.heads = slice(first, first + self.count * self.hpg)
        self.stages: FarStages | None = None

    def _by_group(self, plane: Float32) -> Float32:
        """The task's part of a plane of heads, `(g, h, ...)`."""
        return plane[self.heads].reshape(self.count, self.hpg, *plane.shape[1:])

    def fold(self) -> None:
        """The far field's stages, and its next sums into the step."""
        fold = None
        if self.run.far_len or self.run.folded:
            self.stages, values = self._stages()
            if self.run.folded:
                fold = Fold(self.stages.last, self.stages.weights, self.stages.rescale, values)
        put_fold(self.resident, self.step, self.run, self.heads, fold, self.scratch)

    def _stages(self) -> tuple[FarStages, Float32]:
        """The far field's stages, and the folded rows' values `(g, f, dv)`."""
        resident, run, take = self.resident, self.run, self.scratch.take
        geometry = resident.geometry
        # As the ring's keys lie in memory.
        keys = take("folded_keys", self.count, geometry.head_dim, run.folded).swapaxes(1, 2)
        values = take("folded_values", self.count, run.folded, resident.ring_v.shape[2])
        for slots, at in run.slots(run.head, run.folded):
            np.multiply(resident.ring_k[self.groups, slots], geometry.scale32, out=keys[:, at])
            values[:, at] = resident.ring_v[self.groups, slots]
        m = run.landmarks
        q_tilde = self._by_group(resident.q_tilde)[:, :, :m]
        mz = self._by_group(resident.far_mz)[..., :m]
        if run.far_len:
            maximum, mass = mz[:, :, MZ_MAX], mz[:, :, MZ_TOTAL] + mz[:, :, MZ_RECENT]
        else:
            maximum = empty_maximum((self.count, self.hpg, m))
            mass = np.zeros_like(maximum)
        return far_stages(q_tilde, keys, mz[:, :, MZ_SHIFT], maximum, mass, self.scratch), values

    def attend(self, q: Float32, out: Float32, products_first: bool) -> None:
        """`fold`, and the task's part of `out (rows, nh, dv)` for `q (rows, nh, d)`.

        The far field is many small operations, and threads that are all at them wait for each other's Python:
        with `products_first` a long product comes before them.
        """
        lanes = (self.count, self.hpg, self.run.rows)
        queries = self.scratch.take("queries", *lanes, q.shape[2])
        rows = q[:, self.heads].reshape(self.run.rows, self.count, self.hpg, -1)
        np.multiply(rows.transpose(1, 2, 0, 3), self.resident.geometry.scale32, out=queries)
        per_head = self.run.rows * (self.window.columns + self.run.rows)
        h_step = min(self.hpg, max(1, BLOCK_LOGITS // per_head))
        g_step = max(1, BLOCK_LOGITS // (per_head * self.hpg)) if h_step == self.hpg else 1
        blocks = [(g, h) for g in _slices(0, self.count, g_step) for h in _slices(0, self.hpg, h_step)]
        first = self._logits(blocks[0], queries) if products_first else None
        own_logits = self._own_logits(queries)
        self.fold()
        plain, mark_bound = self._bounded(queries)
        far = None
        if self.stages is not None:
            plain = plain and mark_bound + self.stages.last.max() <= SAFE_LOGIT and self.stages.one_scale()
            far = self._far(self.stages, queries, plain)
        sums = self._plain_sums(own_logits, far, out.shape[2]) if plain else None
        for at in blocks:
            weights = self._logits(at, queries) if first is None else first
            first = None
            if sums is None:
                self._block(at, weights, own_logits[at], far, out)
            else:
                self._plain_block(at, weights, *sums, far, out)

    def _bounded(self, queries: Float32) -> tuple[bool, float]:
        """Whether near scores and those of the landmarks are sure to lie within `SAFE_LOGIT` of zero,
        and the bound of the latter: norms of `queries (g, h, i, d)` times norms of keys."""
        resident = self.resident
        # Python's numbers, which overflow without a warning.
        largest = float(np.einsum("ghid,ghid->ghi", queries, queries).max())
        ring, own = resident.ring_norms[self.groups].max(), self.step.norms[:, self.groups].max()
        near = max(largest * float(ring), largest * float(own))
        marks = math.sqrt(largest * float(resident.mark_norms[self.groups].max()))
        return near <= SAFE_LOGIT**2 and marks <= SAFE_LOGIT, marks

    def _far(self, stages: FarStages, queries: Float32, plain: bool) -> FarGains:
        """What the far field adds for `queries (g, h, i, d)`."""
        resident, run = self.resident, self.run
        m = run.landmarks
        logits = self.scratch.take("marks", *queries.shape[:3], m)
        scores(joined(queries), resident.k_tilde[self.groups, :m], joined(logits))
        mix = self._by_group(resident.mix)[:, :, :m, :m]
        clamp = resident.geometry.rect == "fm"
        levels = [self._by_group(t)[:, :, :m] for t in (resident.t_total, resident.t_recent)]
        return far_gains(
            stages, run.after, levels if run.far_len else [], logits, mix, clamp, plain, self.scratch
        )

    def _planes(self, g: slice) -> slice:
        """Where groups `g` of the task lie in the planes."""
        return slice(self.groups.start + g.start, self.groups.start + g.stop)

    def _logits(self, at: Block, queries: Float32) -> Float32:
        """Logits over ring and sinks of a block of scaled `queries (g, h, i, d)`, hidden where a row does not
        look."""
        part = queries[at]
        logits = self.scratch.take("logits", *part.shape[:3], self.window.columns)
        self.window.scores(joined(part), self.resident.ring_k[self._planes(at[0])], joined(logits))
        self.window.hide(logits)
        return logits

    def _own_logits(self, queries: Float32) -> Float32:
        """Logits `(g, h, i, i)` of all scaled `queries (g, h, i, d)` over the sub-chunk's own rows."""
        logits = self.scratch.take("own", *queries.shape[:3], self.run.rows)
        scores(joined(queries), self.step.k[:, self.groups].swapaxes(0, 1), joined(logits))
        hide_later(logits)
        return logits

    def _block(
        self, at: Block, weights: Float32, own_logits: Float32, far: FarGains | None, out: Float32
    ) -> None:
        """Outputs of a block from its logits `weights (g, h, i, columns)`, which are overwritten, and
        `own_logits (g, h, i, i)`."""
        window, scratch = self.window, self.scratch
        groups, lanes = self._planes(at[0]), weights.shape[:3]
        far_top = None
        if far is not None:
            assert far.top is not None
            far_top = far.top[at]
        # A row's own maximum is there always, that of an empty ring is not.
        top: Float32 | None = own_logits.max(axis=3)
        assert top is not None
        if _safe(weights, top, far_top):
            top = None
        else:
            np.maximum(top, weights.max(axis=3, initial=-LARGE), out=top)
            if far_top is not None:
                np.maximum(top, far_top, out=top)
            np.subtract(weights, top[..., None], out=weights)
            own_logits = np.subtract(
                own_logits, top[..., None], out=scratch.take("own_block", *own_logits.shape)
            )
        own = np.exp(own_logits, out=scratch.take("own_block", *own_logits.shape))
        np.exp(weights, out=weights)
        # Twice as fast as np.sum, and with many partial sums as exact as the product with the values.
        mass = np.einsum("ghic->ghi", weights) + np.einsum("ghic->ghi", own)
        if far is not None and far.mass is not None and far_top is not None:
            lift = np.exp(far_top if top is None else far_top - top)
            mass += far.mass[at] * lift
            if far.evicted is not None:
                window.put(weights, far.evicted[at] * lift[..., None])
        numerator = scratch.take("numerator", *lanes, out.shape[2])
        window.sum_values(joined(weights), self.resident.ring_v[groups], joined(numerator), scratch, True)
        add_values(joined(own), self.step.v[:, groups].swapaxes(0, 1), joined(numerator), scratch)
        if far is not None and far.numerator is not None:
            numerator += far.numerator[at] * lift[..., None]
        self._put_out(at, numerator, mass, out)

    def _plain_sums(self, own_logits: Float32, far: FarGains | None, width: int) -> tuple[Float32, Float32]:
        """Numerator `(g, h, i, dv)` and mass `(g, h, i)` of all the task's own rows and of the far field from
        before, where no weight needs a scale. `own_logits (g, h, i, i)` are overwritten."""
        own = np.exp(own_logits, out=own_logits)
        mass = _row_sums(own)
        if far is not None and far.mass is not None:
            mass += far.mass
        fresh = far is None or far.numerator is None
        if far is None or far.numerator is None:
            numerator = self.scratch.take("numerator", *mass.shape, width)
        else:
            numerator = far.numerator
        values = self.step.v[:, self.groups].swapaxes(0, 1)
        add_values(joined(own), values, joined(numerator), self.scratch, fresh)
        return numerator, mass

    def _plain_block(
        self,
        at: Block,
        weights: Float32,
        numerator: Float32,
        mass: Float32,
        far: FarGains | None,
        out: Float32,
    ) -> None:
        """As `_block`, on top of `_plain_sums`."""
        np.exp(weights, out=weights)
        if far is not None and far.evicted is not None:
            self.window.put(weights, far.evicted[at], masked=True)
        total = _row_sums(weights)
        total += mass[at]
        sums = numerator[at]
        values = self.resident.ring_v[self._planes(at[0])]
        self.window.sum_values(joined(weights), values, joined(sums), self.scratch, False)
        self._put_out(at, sums, total, out)

    def _put_out(self, at: Block, numerator: Float32, mass: Float32, out: Float32) -> None:
        """The outputs of a block to where they lie."""
        g, h = at
        lanes = mass.shape
        np.maximum(mass, np.float32(MIN_DENOMINATOR), out=mass)
        first = self.heads.start + g.start * self.hpg + h.start
        to = out[:, first : first + lanes[0] * lanes[1]].reshape(-1, *lanes[:2], out.shape[2])
        np.divide(numerator, mass[..., None], out=to.transpose(1, 2, 0, 3))


def _row_sums(weights: Float32) -> Float32:
    """The sums `(g, h, i)` of `weights (g, h, i, columns)`."""
    if is_whole():
        return np.matmul(joined(weights), _ones(weights.shape[3])).reshape(weights.shape[:3])
    sums: Float32 = np.einsum("ghic->ghi", weights)
    return sums


@lru_cache(maxsize=4)
def _ones(count: int) -> Float32:
    return np.ones(count, np.float32)


def _safe(logits: Float32, own_top: Float32, far_top: Float32 | None) -> bool:
    """Whether all rows' maxima lie within `SAFE_LOGIT`. A row's own columns, of maxima `own_top`, are to show
    that its maximum is not below: one maximum over all `logits` is much faster than one of each row."""
    tops = [own_top.max(), logits.max(initial=-LARGE)]
    if far_top is not None:
        tops.append(far_top.max())
    return bool(max(tops) <= SAFE_LOGIT and own_top.min() >= -SAFE_LOGIT)


def joined(array: Float32) -> Float32:
    """`(g, h, rows, width)` as a view `(g, h rows, width)`."""
    groups, heads, rows, width = array.shape
    view = array.reshape(groups, heads * rows, width)
    assert not array.size or np.may_share_memory(view, array), "reshape made a copy, which nobody would read"
    return view
