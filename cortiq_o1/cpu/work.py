"""A part of a sub-chunk as one thread works on it: its far field, its weights, its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays import Float32
from ..kernels import MZ_MAX, MZ_RECENT, MZ_SHIFT, MZ_TOTAL
from .far import FarGains, FarStages, empty_maximum, far_gains, far_stages
from .near import Scratch, Window, add_values, scores
from .resident import DirectResident, Run, Step

BLOCK_ROWS = 64
"""Rows times heads whose logits over a window of 2,048 stay in a core's cache."""
SAFE_LOGIT = 30.0
"""Where all maxima lie within this of zero, weights need no scale: their sums stay in float32's range,
and above the least denominator with a scale and without."""


@dataclass(frozen=True)
class Task:
    """A part of a sub-chunk: groups of one run, and some heads of each."""

    run: Run
    groups: slice
    heads: slice


def task_steps(groups: int, heads: int, workers: int, most: int) -> tuple[int, int]:
    """Groups, at most `most`, and heads of each, of a task, for `workers` to share all tasks."""
    if workers > groups:
        # Each task reads its group's keys again, from a cache that the cores share.
        return 1, -(-heads // -(-workers // groups))
    # Small tasks keep threads evenly busy, large ones cost less of Python.
    return max(1, min(most, -(-groups // workers))), heads


def cut(tasks: list[Task], g_step: int, h_step: int) -> list[Task]:
    """The tasks in tasks of at most so many groups and heads of each."""
    return [
        Task(task.run, groups, heads)
        for task in tasks
        for groups in _slices(task.groups, g_step)
        for heads in _slices(task.heads, h_step)
    ]


def _slices(whole: slice, step: int) -> Iterator[slice]:
    for low in range(whole.start, whole.stop, step):
        yield slice(low, min(low + step, whole.stop))


class Bundle:
    """Groups, or heads of a group, whose near products are made together.

    `queries (g, h, rows, d)`, scaled; `logits (g, h, rows, columns)`, then weights; `numerator (g, h,
    rows, dv)`; `mass (g, h, rows)`. Without `q (rows, nh, d)` and `out (rows, nh, dv)` there are none.
    """

    def __init__(
        self,
        resident: DirectResident,
        step: Step,
        task: Task,
        q: Float32 | None,
        out: Float32 | None,
        scratch: Scratch,
    ) -> None:
        self.resident, self.step, self.task, self.q, self.out = resident, step, task, q, out
        self.scratch = scratch
        if q is None or out is None:
            return
        run, geometry = task.run, resident.geometry
        self.window = Window(run.length, run.head, run.window, geometry.window, geometry.sinks, run.rows)
        lanes = (task.groups.stop - task.groups.start, task.heads.stop - task.heads.start, run.rows)
        self.queries = scratch.take("queries", *lanes, q.shape[2])
        self.logits = scratch.take("logits", *lanes, self.window.columns)
        self.numerator = scratch.take("numerator", *lanes, out.shape[2])
        self.mass = scratch.take("mass", *lanes)

    def score(self) -> None:
        """Queries against keys."""
        groups = self.task.groups
        own = self.step.k[:, groups].swapaxes(0, 1)
        self.window.scores(joined(self.queries), self.resident.ring_k[groups], own, joined(self.logits))

    def sum_values(self) -> None:
        """Weights times values."""
        groups = self.task.groups
        own = self.step.v[:, groups].swapaxes(0, 1)
        weights, numerator = joined(self.logits), joined(self.numerator)
        self.window.sum_values(weights, self.resident.ring_v[groups], own, numerator, self.scratch)


class Work:
    """A part of a bundle on its way: `begin`, `weigh` once there are logits, `finish` after the values."""

    def __init__(self, bundle: Bundle, task: Task) -> None:
        self.bundle, self.resident, self.step = bundle, bundle.resident, bundle.step
        self.run, self.groups = task.run, task.groups
        self.count = task.groups.stop - task.groups.start
        self.hpg = task.heads.stop - task.heads.start
        first = task.groups.start * bundle.resident.geometry.heads_per_group + task.heads.start
        self.heads = slice(first, first + self.count * self.hpg)
        g, h = task.groups.start - bundle.task.groups.start, task.heads.start - bundle.task.heads.start
        self.at = (slice(g, g + self.count), slice(h, h + self.hpg))
        self.stages: FarStages | None = None
        self.far: FarGains | None = None

    def _by_group(self, plane: Float32) -> Float32:
        """The groups' part of a plane of heads, `(groups, heads of a group, ...)`."""
        return plane[self.heads].reshape(self.count, self.hpg, *plane.shape[1:])

    def begin(self, scratch: Scratch) -> None:
        """The far field's stages, its next sums into the step, and scaled queries."""
        if self.run.far_len or self.run.folded:
            self.stages, values = self._stages()
            if self.step.far_mz is not None:
                self._next_far(self.stages, values, scratch)
        elif self.step.t_recent is not None:
            self.step.t_recent[self.heads] = self.resident.t_recent[self.heads]
        if self.bundle.q is not None:
            own = self.bundle.q[:, self.heads].reshape(self.run.rows, self.count, self.hpg, -1)
            queries = self.bundle.queries[self.at]
            np.multiply(own.transpose(1, 2, 0, 3), self.resident.geometry.scale32, out=queries)

    def _stages(self) -> tuple[FarStages, Float32]:
        """The far field's stages, and the folded rows' values `(g, f, dv)`."""
        resident, run = self.resident, self.run
        geometry = resident.geometry
        keys = np.empty((self.count, run.folded, geometry.head_dim), np.float32)
        values = np.empty((self.count, run.folded, resident.ring_v.shape[2]), np.float32)
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
        return far_stages(q_tilde, keys, mz[:, :, MZ_SHIFT], maximum, mass), values

    def _next_far(self, stages: FarStages, values: Float32, scratch: Scratch) -> None:
        """The far field after the sub-chunk, into the step."""
        resident, step, run = self.resident, self.step, self.run
        assert step.far_mz is not None
        assert step.t_recent is not None
        m = run.landmarks
        old, new = self._by_group(resident.t_recent), self._by_group(step.t_recent)
        if not run.folded:
            new[...] = old
            return
        new[:, :, m:] = old[:, :, m:]
        old, new = old[:, :, :m], new[:, :, :m]
        weights, rescale = stages.weights, stages.rescale
        moved = rescale != 1.0
        if run.folded == 1:
            np.multiply(weights[:, :, 0, :, None], values[:, None], out=new)
        else:
            columns = weights.swapaxes(2, 3).reshape(self.count, -1, run.folded)
            sums = scratch.take("folded", self.count, self.hpg * m, values.shape[2])
            sums.fill(0.0)
            add_values(columns, values, sums, scratch)
            new[...] = sums.reshape(new.shape)
        if moved.any():
            new += old * rescale[..., None]
        else:
            new += old
        mz = self._by_group(step.far_mz)[..., :m]
        mz[:, :, MZ_MAX] = stages.maximum[:, :, -1]
        mz[:, :, MZ_TOTAL] *= rescale
        mz[:, :, MZ_RECENT] *= rescale
        mz[:, :, MZ_RECENT] += weights.sum(axis=2)
        total = resident.t_total[self.heads, :m]
        flat = rescale.reshape(-1, m)
        if run.flushes:
            mz[:, :, MZ_TOTAL] += mz[:, :, MZ_RECENT]
            mz[:, :, MZ_RECENT] = 0.0
            step.totals.append(((self.heads, slice(m)), total * flat[..., None] + new.reshape(total.shape)))
            new[...] = 0.0
        elif moved.any():
            heads, marks = np.nonzero(flat != 1.0)
            index = (heads + self.heads.start, marks)
            step.totals.append((index, resident.t_total[index] * flat[heads, marks, None]))

    def weigh(self, scratch: Scratch) -> None:
        """Turns logits into weights, those of newly evicted rows included, and sums up the mass."""
        window, logits, mass = self.bundle.window, self.bundle.logits[self.at], self.bundle.mass[self.at]
        near_max = scratch.take("near_max", *mass.shape)
        blocks = self._blocks()
        for i in blocks:
            window.hide(logits[i])
            np.max(logits[i], axis=3, out=near_max[i])
        far = None if self.stages is None else self._far(self.stages, near_max, scratch)
        top = near_max if far is None else far.top
        shifts = top.max() > SAFE_LOGIT or near_max.min() < -SAFE_LOGIT
        if far is not None and not shifts:
            far = far.unshifted()
        for i in blocks:
            weights = logits[i]
            if shifts:
                np.subtract(weights, top[i][..., None], out=weights)
            np.exp(weights, out=weights)
            # Twice as fast as np.sum, and with many partial sums as exact as the product with the values.
            np.einsum("ghic->ghi", weights, out=mass[i])
            if far is not None and far.evicted is not None:
                window.put(weights, far.evicted[i])
        if far is not None:
            mass += far.mass
        self.far = far

    def finish(self, scratch: Scratch) -> None:
        """The outputs, the far field's old sums included."""
        numerator, mass, far = self.bundle.numerator[self.at], self.bundle.mass[self.at], self.far
        assert self.bundle.out is not None
        m, rows = self.run.landmarks, self.run.rows
        flat = (self.count * self.hpg, rows, -1)
        if far is not None and self.run.far_len:
            before = self.resident.t_total[self.heads, :m] + self.resident.t_recent[self.heads, :m]
            add_values(far.gains.reshape(flat), before, numerator.reshape(flat), scratch)
        np.maximum(mass, np.float32(1e-30), out=mass)
        own, divisor = (array.reshape(flat).swapaxes(0, 1) for array in (numerator, mass))
        np.divide(own, divisor, out=self.bundle.out[:, self.heads])

    def _far(self, stages: FarStages, near_max: Float32, scratch: Scratch) -> FarGains:
        """What the far field adds to rows of near maximum `near_max (g, h, rows)`."""
        resident, run = self.resident, self.run
        m = run.landmarks
        queries = self.bundle.queries[self.at]
        logits = scratch.take("marks", *queries.shape[:3], m)
        scores(joined(queries), resident.k_tilde[self.groups, :m], joined(logits))
        mix = self._by_group(resident.mix)[:, :, :m, :m]
        clamp = resident.geometry.rect == "fm"
        return far_gains(stages, run.after, run.far_len == 0, logits, mix, near_max, clamp)

    def _blocks(self) -> list[tuple[slice, slice]]:
        """The part's groups and heads in blocks of about `BLOCK_ROWS`."""
        g_step = max(1, BLOCK_ROWS // (self.hpg * self.run.rows))
        h_step = max(1, BLOCK_ROWS // self.run.rows) if g_step == 1 else self.hpg
        return [
            (slice(g, g + g_step), slice(h, h + h_step))
            for g in range(0, self.count, g_step)
            for h in range(0, self.hpg, h_step)
        ]


def joined(array: Float32) -> Float32:
    """`(g, h, rows, width)` as a view `(g, h rows, width)`."""
    return array.reshape(array.shape[0], -1, array.shape[3])
