"""The operator on NumPy for machines without a GPU: whole sub-chunks by BLAS, groups over threads.

It reads the ring where it lies. A call computes all its outputs and the next far field first and moves
the state last; what it overwrites before the call's end it can put back.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..errors import StateError
from ..geometry import Geometry
from ..kernels import MZ_MAX, MZ_RECENT, MZ_TOTAL, STATE_PLANES, T_RECENT, T_TOTAL
from ..planning import Limits, sub_chunks
from .far import FarStages, empty_maximum, far_gains, far_stages
from .near import Scratch, Window, add_values, attend_near, scores
from .resident import DirectResident, Journal, Run, Spares, Step, find_runs

CHUNK_ROWS = 64
"""Rows of a sub-chunk: enough for full-speed products, few enough for the far field's stages."""
BLOCK_ROWS = 64
"""Rows times heads of a near product: its logits over a window of 2,048 stay in a core's cache."""
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
        workers, tasks = self._tasks(geometry, step.runs, len(k))

        def work_off(scratch: Scratch) -> None:
            # NumPy keeps its error handling per thread: weights may underflow, they are then nothing.
            with np.errstate(under="ignore"):
                while tasks:
                    try:
                        task = tasks.popleft()
                    except IndexError:  # another thread was quicker
                        return
                    _Work(resident, step, task, scratch)(q, out)

        self._share(work_off, workers)
        return step

    def _tasks(self, geometry: Geometry, runs: list[Run], rows: int) -> tuple[int, deque[_Task]]:
        """How many threads a sub-chunk is worth, and its parts.

        The parts are the same with and without outputs: a product's bits follow its shape.
        """
        groups, hpg = geometry.num_kv_heads, geometry.heads_per_group
        near = geometry.window + geometry.sinks
        work = geometry.num_heads * rows * near * (geometry.head_dim + (geometry.value_dim or 0))
        workers = min(self.threads, geometry.num_heads) if work >= self.parallel_work else 1
        if workers > groups:
            # Each part reads its group's keys again, from a cache that the cores share.
            h_step = -(-hpg // -(-workers // groups))
            parts = [
                _Task(run, slice(g, g + 1), slice(h, min(h + h_step, hpg)))
                for run in runs
                for g in range(run.first, run.last)
                for h in range(0, hpg, h_step)
            ]
        else:
            # Small tasks keep threads evenly busy, large ones cost less of Python.
            g_step = 1 if rows * hpg >= BLOCK_ROWS else -(-groups // workers)
            parts = [
                _Task(run, slice(g, min(g + g_step, run.last)), slice(hpg))
                for run in runs
                for g in range(run.first, run.last, g_step)
            ]
        return min(workers, len(parts)), deque(parts)

    def _share(self, work_off: Callable[[Scratch], None], workers: int) -> None:
        """Runs `work_off` on this thread and on others, to the end of all of them."""
        if workers > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="cortiq-o1")
        others = [self._pool.submit(work_off, s) for s in self._scratch[1:workers]] if self._pool else []
        try:
            work_off(self._scratch[0])
        finally:
            wait(others)
        for other in others:
            other.result()


@dataclass(frozen=True)
class _Task:
    """A part of a sub-chunk: groups of one run, or some heads of one group."""

    run: Run
    groups: slice
    heads: slice


class _Work:
    """A task on its way."""

    def __init__(self, resident: DirectResident, step: Step, task: _Task, scratch: Scratch) -> None:
        self.resident, self.step, self.scratch = resident, step, scratch
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
            self._attend(q, out, stages, values)

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

    def _attend(self, q: Float32, out: Float32, stages: FarStages | None, values: Float32 | None) -> None:
        resident, run, scratch = self.resident, self.run, self.scratch
        g, h, rows = self.count, self.hpg, run.rows
        width, value_width = q.shape[2], out.shape[2]
        queries = scratch.take("queries", g, h, rows, width)
        np.multiply(
            q[:, self.heads].reshape(rows, g, h, width).transpose(1, 2, 0, 3),
            resident.geometry.scale32,
            out=queries,
        )
        numerator = scratch.take("numerator", g, h, rows, value_width)
        near_max = scratch.take("near_max", g, h, rows)
        mass = scratch.take("mass", g, h, rows)
        self._near(queries, numerator, near_max, mass)
        if stages is not None and values is not None:
            m = run.landmarks
            logits = scratch.take("marks", g, h, rows, m)
            scores(_join(queries), resident.k_tilde[self.groups, :m], _join(logits))
            far = far_gains(
                stages,
                run.after,
                run.far_len == 0,
                logits,
                self._by_group(resident.mix)[:, :, :m, :m],
                near_max,
                resident.geometry.rect == "fm",
            )
            # The near sums to the scale of the row's own maximum.
            np.subtract(near_max, far.top, out=near_max)
            np.exp(near_max, out=near_max)
            np.multiply(mass, near_max, out=mass)
            np.multiply(numerator, near_max[..., None], out=numerator)
            np.add(mass, far.mass, out=mass)
            if run.far_len:
                sums = numerator.reshape(g * h, rows, value_width)
                for level in (resident.t_total, resident.t_recent):
                    add_values(far.gains.reshape(g * h, rows, m), level[self.heads, :m], sums, scratch)
            if far.evicted is not None:
                add_values(_join(far.evicted), values, _join(numerator), scratch)
        np.maximum(mass, np.float32(1e-30), out=mass)
        np.divide(
            numerator.reshape(g * h, rows, value_width).swapaxes(0, 1),
            mass.reshape(g * h, rows, 1).swapaxes(0, 1),
            out=out[:, self.heads],
        )

    def _near(self, queries: Float32, numerator: Float32, near_max: Float32, mass: Float32) -> None:
        """The near sums of `queries (g, h, rows, d)`, in blocks whose logits fit a core's cache."""
        resident, run = self.resident, self.run
        geometry = resident.geometry
        window = Window(run.length, run.head, run.window, geometry.window, geometry.sinks, run.rows)
        g_step = max(1, BLOCK_ROWS // (self.hpg * run.rows))
        h_step = max(1, BLOCK_ROWS // run.rows) if g_step == 1 else self.hpg
        for g in range(0, self.count, g_step):
            gs = slice(g, min(g + g_step, self.count))
            plane = slice(self.groups.start + gs.start, self.groups.start + gs.stop)
            for h in range(0, self.hpg, h_step):
                part = (gs, slice(h, h + h_step))
                attend_near(
                    window,
                    _join(queries[part]),
                    (resident.ring_k[plane], resident.ring_v[plane]),
                    (self.step.k[:, plane].swapaxes(0, 1), self.step.v[:, plane].swapaxes(0, 1)),
                    _join(numerator[part]),
                    near_max[part].reshape(plane.stop - plane.start, -1),
                    mass[part].reshape(plane.stop - plane.start, -1),
                    self.scratch,
                )


def _join(array: Float32) -> Float32:
    """`(g, h, rows, width)` as a view `(g, h rows, width)`."""
    return array.reshape(array.shape[0], -1, array.shape[3])


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
