"""The operator on NumPy for machines without a GPU: whole sub-chunks by BLAS, groups over threads.

It reads the ring where it lies. A call computes all its outputs and the next far field first and moves
the state last; what it overwrites before the call's end it can put back.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..errors import StateError
from ..geometry import Geometry
from ..kernels import MZ_MAX, MZ_RECENT, MZ_TOTAL, STATE_PLANES, T_RECENT, T_TOTAL
from ..planning import Limits, sub_chunks
from .far import FarGains, FarStages, empty_maximum, far_gains, far_stages
from .near import WHOLE_ROWS, Scratch, Window, add_values, scores
from .resident import DirectResident, Journal, Run, Spares, Step, find_runs

CHUNK_ROWS = 64
"""Rows of a sub-chunk: enough for full-speed products, few enough for the far field's stages."""
BLOCK_ROWS = 64
"""Rows times heads whose logits over a window of 2,048 stay in a core's cache."""
WHOLE_LOGITS = 2**23
"""Most logits at a time where products are whole."""
PARALLEL_WORK = 2**20
"""Multiply-adds from which a sub-chunk is worth handing to other threads."""


class DirectEngine:
    """An `engine.Engine` on NumPy alone.

    Not for concurrent calls: residents of one engine share its scratch.

    Args:
        threads: threads that share a call's groups; the CPUs this process may use if None.
        parallel_work: multiply-adds of a sub-chunk from which they do.
    """

    def __init__(self, threads: int | None = None, parallel_work: int = PARALLEL_WORK) -> None:
        self.limits = Limits(binding_bytes=2**62)
        self.threads = threads or _cpus()
        self.parallel_work = parallel_work
        self._scratch = [Scratch() for _ in range(self.threads)]
        self._spares = Spares()
        self._pool: ThreadPoolExecutor | None = None

    def upload(self, geometry: Geometry, planes: Mapping[str, npt.NDArray[Any]]) -> DirectResident:
        """Takes copies of the state planes."""
        kept: dict[str, Any] = {name: planes[name].copy() for name in STATE_PLANES if name != "t_hat"}
        kept["t_total"], kept["t_recent"] = (planes["t_hat"][:, at].copy() for at in (T_TOTAL, T_RECENT))
        return DirectResident(geometry, **kept)

    def read(self, resident: DirectResident) -> dict[str, npt.NDArray[Any]]:
        """Copies of the state planes."""
        planes = {name: getattr(resident, name).copy() for name in STATE_PLANES if name != "t_hat"}
        levels = [resident.t_total, resident.t_recent]
        planes["t_hat"] = np.stack(levels if T_TOTAL < T_RECENT else levels[::-1], axis=1)
        return planes

    def attend(self, resident: DirectResident, q: Float32, k: Float32, v: Float32, commit: bool) -> Float32:
        """Outputs `(rows, nh, dv)`, see `engine.Engine`."""
        pending = None if commit else (k.copy(), v.copy())
        out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
        self._pass(resident, q, k, v, out, commit)
        resident.pending = pending
        return out

    def commit(self, resident: DirectResident, rows: int) -> None:
        """Moves the state over the first `rows` kept rows and forgets them all.

        Raises `StateError` where no rows are kept, or fewer.
        """
        kept = len(resident.pending[0]) if resident.pending else 0
        if resident.pending is None or not 0 <= rows <= kept:
            raise StateError(f"rows: {rows}, expected 0 to the {kept} rows of the last uncommitted call")
        k, v = resident.pending
        self._pass(resident, None, k[:rows], v[:rows], None, True)
        resident.pending = None

    def _pass(
        self,
        resident: DirectResident,
        q: Float32 | None,
        k: Float32,
        v: Float32,
        out: Float32 | None,
        commit: bool,
    ) -> None:
        """All sub-chunks of a call; without `commit` the state ends as it began."""
        journal = Journal(resident, self._spares)
        rows = len(k)
        try:
            for r0, count in sub_chunks(rows, min(CHUNK_ROWS, resident.geometry.min_window)):
                part = slice(r0, r0 + count)
                moves = commit or r0 + count < rows
                step = self._sub_chunk(
                    resident,
                    None if q is None else q[part],
                    k[part],
                    v[part],
                    None if out is None else out[part],
                    moves,
                )
                if moves:
                    journal.move(step)
        except BaseException:
            journal.roll_back()
            raise
        if commit:
            journal.close()
        else:
            journal.roll_back()

    def _sub_chunk(
        self,
        resident: DirectResident,
        q: Float32 | None,
        k: Float32,
        v: Float32,
        out: Float32 | None,
        moves: bool,
    ) -> Step:
        geometry = resident.geometry
        step = Step(find_runs(resident.group_meta, len(k)), k, v)
        if moves and any(run.folded for run in step.runs):
            step.far_mz = resident.far_mz.copy()
            step.t_recent = self._spares.take(resident.t_recent)
        lanes = len(k) * geometry.heads_per_group
        near = geometry.window + geometry.sinks
        work = geometry.num_kv_heads * lanes * near * (geometry.head_dim + v.shape[2])
        workers = self.threads if work >= self.parallel_work else 1

        def work_off(tasks: Iterable[_Task], share: Share, scratch: Scratch) -> None:
            for task in tasks:
                _Work(resident, step, task, scratch, share)(q, out)

        # BLAS has threads of its own: they and the engine's take turns. Which product is whole follows
        # from the rows alone, so that its bits are the same with and without outputs.
        with np.errstate(under="ignore"):
            if lanes >= WHOLE_ROWS:
                most = max(1, WHOLE_LOGITS // (lanes * (near + len(k))))
                tasks = _cut(geometry, step.runs, most, 1)
                work_off(tasks, partial(self._share, workers), self._scratch[0])
            else:
                workers = min(workers, geometry.num_heads)
                tasks = _cut(geometry, step.runs, max(1, BLOCK_ROWS // lanes), workers)
                self._share(workers, lambda scratch, some: work_off(some, _alone, scratch), tasks)
        return step

    def _share(self, workers: int, job: Callable[[Scratch, Iterable[Any]], None], parts: list[Any]) -> None:
        """Runs `job` on `parts`, on this thread and on others, to the end of all of them."""
        workers = min(workers, len(parts))
        if workers > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="cortiq-o1")
        left = deque(parts)

        def rest() -> Iterator[Any]:
            while left:
                try:
                    part = left.popleft()
                except IndexError:  # another thread was quicker
                    return
                yield part

        def elsewhere(scratch: Scratch) -> None:
            # NumPy keeps its error handling per thread: weights may underflow, they are then nothing.
            with np.errstate(under="ignore"):
                job(scratch, rest())

        others = [self._pool.submit(elsewhere, s) for s in self._scratch[1:workers]] if self._pool else []
        try:
            job(self._scratch[0], rest())
        finally:
            wait(others)
        for other in others:
            other.result()


Share = Callable[[Callable[[Scratch, Iterable[Any]], None], list[Any]], None]
"""Runs a job on parts of something, perhaps on several threads."""


def _alone(job: Callable[[Scratch, Iterable[Any]], None], parts: list[Any]) -> None:
    job(Scratch(), parts)


def _cut(geometry: Geometry, runs: list[Run], most: int, workers: int) -> list[_Task]:
    """The parts of a sub-chunk, of at most `most` groups each, for `workers` to share."""
    groups, hpg = geometry.num_kv_heads, geometry.heads_per_group
    g_step, h_step = min(most, -(-groups // workers)), hpg
    if workers > groups:
        # Each part reads its group's keys again, from a cache that the cores share.
        h_step = -(-hpg // -(-workers // groups))
    return [
        _Task(run, slice(g, min(g + g_step, run.last)), slice(h, min(h + h_step, hpg)))
        for run in runs
        for g in range(run.first, run.last, g_step)
        for h in range(0, hpg, h_step)
    ]


@dataclass(frozen=True)
class _Task:
    """A part of a sub-chunk: groups of one run, or some heads of one group."""

    run: Run
    groups: slice
    heads: slice


class _Work:
    """A task on its way."""

    def __init__(
        self, resident: DirectResident, step: Step, task: _Task, scratch: Scratch, share: Share
    ) -> None:
        self.resident, self.step, self.scratch, self.share = resident, step, scratch, share
        self.run, self.groups = task.run, task.groups
        self.count = task.groups.stop - task.groups.start
        self.hpg = len(range(*task.heads.indices(resident.geometry.heads_per_group)))
        start = task.groups.start * resident.geometry.heads_per_group + (task.heads.start or 0)
        self.heads = slice(start, start + self.count * self.hpg)

    def _by_group(self, plane: Float32) -> Float32:
        """The groups' part of a plane of heads, `(groups, heads of a group, ...)`."""
        return plane[self.heads].reshape(self.count, self.hpg, *plane.shape[1:])

    def __call__(self, q: Float32 | None, out: Float32 | None) -> None:
        run = self.run
        stages = values = None
        if run.far_len or run.folded:
            stages, values = self._fold()
            if self.step.far_mz is not None:
                self._next_far(stages, values)
        elif self.step.t_recent is not None:
            self.step.t_recent[self.heads] = self.resident.t_recent[self.heads]
        if q is not None and out is not None:
            self._attend(q, out, stages)

    def _fold(self) -> tuple[FarStages, Float32]:
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
        if run.far_len:
            mz = self._by_group(resident.far_mz)[..., :m]
            maximum, mass = mz[:, :, MZ_MAX], mz[:, :, MZ_TOTAL] + mz[:, :, MZ_RECENT]
        else:
            maximum = empty_maximum((self.count, self.hpg, m))
            mass = np.zeros_like(maximum)
        return far_stages(q_tilde, keys, maximum, mass), values

    def _next_far(self, stages: FarStages, values: Float32) -> None:
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
            sums = self.scratch.take("folded", self.count, self.hpg * m, values.shape[2])
            sums.fill(0.0)
            add_values(columns, values, sums, self.scratch)
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

    def _attend(self, q: Float32, out: Float32, stages: FarStages | None) -> None:
        resident, run, scratch, step = self.resident, self.run, self.scratch, self.step
        geometry = resident.geometry
        g, h, rows = self.count, self.hpg, run.rows
        width, value_width = q.shape[2], out.shape[2]
        queries = scratch.take("queries", g, h, rows, width)
        by_group = q[:, self.heads].reshape(rows, g, h, width).transpose(1, 2, 0, 3)
        np.multiply(by_group, geometry.scale32, out=queries)
        window = Window(run.length, run.head, run.window, geometry.window, geometry.sinks, rows)
        logits = scratch.take("logits", g, h, rows, window.columns)
        own_k, own_v = (rows_of[:, self.groups].swapaxes(0, 1) for rows_of in (step.k, step.v))
        window.scores(_join(queries), resident.ring_k[self.groups], own_k, _join(logits))
        top = scratch.take("top", g, h, rows)
        mass = scratch.take("mass", g, h, rows)

        def find_largest(_: Scratch, parts: Iterable[Any]) -> None:
            for part in parts:
                window.hide(logits[part])
                np.max(logits[part], axis=3, out=top[part])

        blocks = self._blocks()
        self.share(find_largest, blocks)
        far = None if stages is None else self._far(queries, stages, top)
        top = top if far is None else far.top

        def weigh(_: Scratch, parts: Iterable[Any]) -> None:
            for part in parts:
                weights = logits[part]
                np.subtract(weights, top[part][..., None], out=weights)
                np.exp(weights, out=weights)
                np.sum(weights, axis=3, out=mass[part])
                if far is not None and far.evicted is not None:
                    window.put(weights, far.evicted[part])

        self.share(weigh, blocks)
        numerator = scratch.take("numerator", g, h * rows, value_width)
        numerator.fill(0.0)
        window.add_values(_join(logits), resident.ring_v[self.groups], own_v, numerator, scratch)
        numerator = numerator.reshape(g * h, rows, value_width)
        if far is not None:
            np.add(mass, far.mass, out=mass)
            if run.far_len:
                m = run.landmarks
                before = resident.t_total[self.heads, :m] + resident.t_recent[self.heads, :m]
                add_values(far.gains.reshape(g * h, rows, m), before, numerator, scratch)
        np.maximum(mass, np.float32(1e-30), out=mass)
        divisor = mass.reshape(g * h, rows, 1).swapaxes(0, 1)
        np.divide(numerator.swapaxes(0, 1), divisor, out=out[:, self.heads])

    def _far(self, queries: Float32, stages: FarStages, near_max: Float32) -> FarGains:
        """What the far field adds to rows of near maximum `near_max (g, h, rows)`."""
        resident, run = self.resident, self.run
        m = run.landmarks
        logits = self.scratch.take("marks", *queries.shape[:3], m)
        scores(_join(queries), resident.k_tilde[self.groups, :m], _join(logits))
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


def _join(array: Float32) -> Float32:
    """`(g, h, rows, width)` as a view `(g, h rows, width)`."""
    return array.reshape(array.shape[0], -1, array.shape[3])


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
