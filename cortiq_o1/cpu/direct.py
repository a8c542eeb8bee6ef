"""The operator on NumPy for machines without a GPU: whole sub-chunks by BLAS, groups over threads.

It reads the ring where it lies. A call computes all its outputs and the next far field first and moves
the state last; what it overwrites before the call's end it can put back.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..errors import StateError
from ..geometry import Geometry
from ..kernels import STATE_PLANES, T_RECENT, T_TOTAL
from ..planning import Limits, sub_chunks
from .near import WHOLE_ROWS, Scratch
from .resident import DirectResident, Journal, Spares, Step, find_runs
from .work import BLOCK_ROWS, Bundle, Task, Work, cut, task_steps

T = TypeVar("T")
Share = Callable[[Callable[[Work, Scratch], None], list[Work]], None]
"""Runs a job on each of a list, perhaps on several threads."""

CHUNK_ROWS = 64
"""Rows of a sub-chunk: enough for full-speed products, few enough for the far field's stages."""
WHOLE_LOGITS = 2**23
"""Most logits at a time where products are whole: memory for them, and few turns between threads."""
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
                with np.errstate(under="ignore"):
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
        hpg = geometry.heads_per_group
        lanes = len(k) * hpg
        near = geometry.window + geometry.sinks
        work = geometry.num_kv_heads * lanes * near * (geometry.head_dim + v.shape[2])
        workers = self.threads if work >= self.parallel_work else 1
        tasks = [Task(run, slice(run.first, run.last), slice(0, hpg)) for run in step.runs]
        # BLAS has threads of its own: they and the engine's take turns. Which products are whole follows
        # from the rows alone, for their bits to be the same with and without outputs.
        if lanes >= WHOLE_ROWS:
            share = partial(self._share, workers)
            most = WHOLE_LOGITS // (len(k) * (near + len(k)))  # heads
            for task in cut(tasks, max(1, most // hpg), min(hpg, max(1, most))):
                groups, heads = (of.stop - of.start for of in (task.groups, task.heads))
                parts = cut([task], *task_steps(groups, heads, workers, groups // (2 * workers)))
                _run(Bundle(resident, step, task, q, out, self._scratch[0]), parts, share)
        else:

            def run(task: Task, scratch: Scratch) -> None:
                _run(Bundle(resident, step, task, q, out, scratch), [task], partial(_alone, scratch))

            most = BLOCK_ROWS // lanes
            workers = min(workers, geometry.num_heads)
            self._share(workers, run, cut(tasks, *task_steps(geometry.num_kv_heads, hpg, workers, most)))
        return step

    def _share(self, workers: int, job: Callable[[T, Scratch], None], tasks: list[T]) -> None:
        """Runs `job` on each task, on this thread and on others, to the end of all of them."""
        workers = min(workers, len(tasks))
        if workers > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="cortiq-o1")
        left = deque(tasks)

        def work_off(scratch: Scratch) -> None:
            # NumPy keeps its error handling per thread: weights may underflow, they are then nothing.
            with np.errstate(under="ignore"):
                while left:
                    try:
                        task = left.popleft()
                    except IndexError:  # another thread was quicker
                        return
                    job(task, scratch)

        others = [self._pool.submit(work_off, s) for s in self._scratch[1:workers]] if self._pool else []
        try:
            work_off(self._scratch[0])
        finally:
            wait(others)
        for other in others:
            other.result()


def _alone(scratch: Scratch, job: Callable[[T, Scratch], None], tasks: list[T]) -> None:
    for task in tasks:
        job(task, scratch)


def _run(bundle: Bundle, parts: list[Task], share: Share) -> None:
    """The outputs of a bundle, and its next far field: the products at once, the rest by its parts."""
    works = [Work(bundle, part) for part in parts]
    share(Work.begin, works)
    if bundle.q is not None:
        bundle.score()
        share(Work.weigh, works)
        bundle.sum_values()
        share(Work.finish, works)


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
