"""The operator on NumPy for machines without a GPU: whole sub-chunks by BLAS, groups over threads.

It reads the ring where it lies. A call computes all its outputs and the next far field first and moves
the state last; what it overwrites before the call's end it can put back.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from threading import Lock, RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..errors import StateError
from ..geometry import Geometry
from ..planes import STATE_PLANES, T_RECENT, T_TOTAL
from ..planning import Limits, sub_chunks
from .near import Scratch, whole_products
from .resident import DirectResident, Journal, Spares, Step, find_runs, squares
from .work import Task, Work, cut

CHUNK_ROWS = 64
"""Rows of a sub-chunk: enough for full-speed products, few enough for the far field's stages."""
PARALLEL_WORK = 2**20
"""Multiply-adds from which a sub-chunk is worth handing to other threads."""


class DirectEngine:
    """An `engine.Engine` on NumPy alone.

    Calls from several threads take turns: residents of one engine share its scratch.

    Args:
        threads: threads that share a call's groups; the CPUs this process may use if None.
        parallel_work: multiply-adds of a sub-chunk from which they do.
    """

    def __init__(self, threads: int | None = None, parallel_work: int = PARALLEL_WORK) -> None:
        self.limits = Limits(binding_bytes=2**62)
        self.path = "auto"
        self.threads = threads or _cpus()
        self.parallel_work = parallel_work
        self._scratch = [Scratch() for _ in range(self.threads)]
        self._spares = Spares()
        self._pool: ThreadPoolExecutor | None = None
        self._turn = RLock()
        self._blas = find_blas()

    def upload(self, geometry: Geometry, planes: Mapping[str, npt.NDArray[Any]]) -> DirectResident:
        """Takes copies of the state planes."""
        with self._turn:
            kept: dict[str, Any] = {name: planes[name].copy() for name in STATE_PLANES if name != "t_hat"}
            kept["t_total"], kept["t_recent"] = (planes["t_hat"][:, at].copy() for at in (T_TOTAL, T_RECENT))
            return DirectResident(geometry, **kept)

    def read(self, resident: DirectResident) -> dict[str, npt.NDArray[Any]]:
        """Copies of the state planes."""
        with self._turn:
            planes = {name: getattr(resident, name).copy() for name in STATE_PLANES if name != "t_hat"}
            levels = [resident.t_total, resident.t_recent]
            planes["t_hat"] = np.stack(levels if T_TOTAL < T_RECENT else levels[::-1], axis=1)
            return planes

    def attend(self, resident: DirectResident, q: Float32, k: Float32, v: Float32, commit: bool) -> Float32:
        """Outputs `(rows, nh, dv)`, see `engine.Engine`."""
        pending = None if commit else (k.copy(), v.copy())
        out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
        with self._turn:
            self._pass(resident, q, k, v, out, commit)
            resident.pending = pending
        return out

    def commit(self, resident: DirectResident, rows: int) -> None:
        """Moves the state over the first `rows` kept rows and forgets them all.

        Raises `StateError` where no rows are kept, or fewer.
        """
        with self._turn:
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
        with self._blas.held() if self._blas else nullcontext():
            try:
                for r0, count in sub_chunks(len(k), min(CHUNK_ROWS, resident.geometry.min_window)):
                    part = slice(r0, r0 + count)
                    moves = commit or r0 + count < len(k)
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
        step = Step(find_runs(resident.group_meta, len(k)), k, v, squares(k))
        if moves and any(run.folded for run in step.runs):
            step.far_mz = resident.far_mz.copy()
            step.t_recent = self._spares.take(resident.t_recent)
        near = geometry.window + geometry.sinks
        work = len(k) * geometry.num_heads * near * (geometry.head_dim + v.shape[2])
        workers = min(self.threads, geometry.num_heads) if work >= self.parallel_work else 1

        def job(task: Task, scratch: Scratch) -> None:
            part = Work(resident, step, task, scratch)
            part.begin()
            if q is not None and out is not None:
                part.finish(q, out)

        self._share(workers, job, cut(step.runs, geometry, workers), self._blas is not None)
        return step

    def _share(
        self, workers: int, job: Callable[[Task, Scratch], None], tasks: list[Task], whole: bool
    ) -> None:
        """Runs `job` on each task, on this thread and on others, to the end of all of them."""
        workers = min(workers, len(tasks))
        if workers > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="cortiq-o1")
        left = deque(tasks)

        def work_off(scratch: Scratch) -> None:
            # NumPy keeps its error handling per thread: weights may underflow, they are then nothing.
            with np.errstate(under="ignore"), whole_products(whole):
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


class _Blas:
    """Holds BLAS to the calling thread while any engine of the process computes, by threadpoolctl.

    The engine's own threads share a call. BLAS's would wait for each other, and spin on the CPUs that
    those need; so its products are cut into pieces too small for them, or, a seventh faster, it is told.
    `threadpool_limits` does the same, but takes a twentieth of a token and knows of no second engine.
    """

    def __init__(self, libraries: list[Any]) -> None:
        self._libraries = libraries
        self._lock = Lock()
        self._users = 0
        self._before: list[int] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """One thread from the first to come until the last to leave, then as many as before."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = [library.get_num_threads() for library in self._libraries]
                self._set([1] * len(self._libraries))
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._set(self._before)

    def _set(self, counts: list[int]) -> None:
        for library, count in zip(self._libraries, counts, strict=True):
            library.set_num_threads(count)


@lru_cache(maxsize=1)
def find_blas() -> _Blas | None:
    """The process's BLAS, None without threadpoolctl or where that knows no such library."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    return _Blas(found) if found else None


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
