"""The operator on NumPy for machines without a GPU: whole sub-chunks by BLAS, groups over threads.

It reads the ring where it lies. A sub-chunk computes its outputs and the next far field first and moves the
state last; what a call overwrites before its end it can put back, in all states that it moves.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from threading import Lock, RLock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..engine import Accepted
from ..errors import StateError
from ..geometry import Geometry
from ..planes import ARCHIVE_PLANES, STATE_PLANES
from ..planning import Limits, sub_chunks
from ..plans import check_archive
from .crew import Crew
from .logs import Joining, RowLog
from .near import Scratch, whole_products
from .resident import RINGS, DirectResident, Journal, Rows, Spares, Step, find_runs, squares
from .token import TokenWork, cut_token
from .work import Task, Work, cut

_T = TypeVar("_T")

CHUNK_ROWS = 64
"""Rows of a sub-chunk: enough for full-speed products, few enough for the far field's stages."""
ABSORBED_ROWS = 4096
"""Rows absorbed at a time: bounds what can still be put back."""
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
        self._crew = Crew(self.threads - 1)
        self._turn = RLock()
        self._blas = find_blas()

    def upload(
        self, geometry: Geometry, planes: Mapping[str, npt.NDArray[Any]], archive: int = 0
    ) -> DirectResident:
        """Takes copies of the state planes, see `engine.Engine`."""
        return DirectResident.of(geometry, planes, check_archive(archive))

    def read(
        self, resident: DirectResident, names: Sequence[str] = STATE_PLANES
    ) -> dict[str, npt.NDArray[Any]]:
        """Copies of planes; raises `StateError` for those of an archive that is not there."""
        with self._turn:
            if not resident.archive and not set(ARCHIVE_PLANES).isdisjoint(names):
                raise StateError(f"read: {', '.join(names)} of a layer without an archive")
            return {name: resident.plane(name) for name in names}

    def attend(
        self,
        resident: DirectResident,
        q: Float32,
        k: Float32,
        v: Float32,
        commit: bool,
        draft: str = "",
        log: RowLog | None = None,
    ) -> Float32:
        """Outputs `(rows, nh, dv)`, see `engine.Engine`."""
        out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
        with self._turn:
            if commit:
                with self._moving() as (journal, joining):
                    joining.add(log, q, k, v)
                    self._pass(journal(resident), (q, k, v), out)
                resident.drafts.clear()
            else:
                kept = (q.copy(), k.copy(), v.copy())
                self._try(resident, (q, k, v), out)
                resident.drafts[draft] = kept
        return out

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Moves each state over the rows accepted and forgets the drafts, all or none.

        Raises `StateError` where a draft has fewer rows.
        """
        with self._turn:
            drafts = [_accepted_rows(one) for one in accepted]
            with self._moving() as (journal, joining):
                for one, rows in zip(accepted, drafts, strict=True):
                    if one.rows:
                        joining.add(one.log, *rows)
                        self._pass(journal(one.resident), rows, None)
            for one in accepted:
                one.resident.drafts.clear()

    def absorb(self, resident: DirectResident, k: Float32, v: Float32) -> None:
        """Moves the state over rows without outputs, see `engine.Engine`."""
        with self._turn:
            for at in range(0, len(k), ABSORBED_ROWS):
                rows = slice(at, at + ABSORBED_ROWS)
                with self._moving() as (journal, _):
                    self._pass(journal(resident), (None, k[rows], v[rows]), None)
            resident.drafts.clear()

    def forget(self, resident: DirectResident) -> None:
        """Forgets all drafts."""
        with self._turn:
            resident.drafts.clear()

    def fork(self, resident: DirectResident) -> DirectResident:
        """A resident of its own, see `engine.Engine`."""
        with self._turn:
            return resident.fork()

    def assign(self, resident: DirectResident, source: DirectResident) -> None:
        """What moves, from a fork of the same seal; drafts are forgotten."""
        with self._turn:
            resident.assign(source)

    def replaced(self, resident: DirectResident, planes: Mapping[str, npt.NDArray[Any]]) -> DirectResident:
        """A resident with copies of these planes, in the place of `resident`."""
        with self._turn:
            return resident.replaced(planes)

    def join(self, resident: DirectResident | None, one: DirectResident, count: int) -> DirectResident:
        """A resident of `count + 1` sequences, see `engine.Engine`."""
        with self._turn:
            geometry = one.geometry.batch(count + 1)
            return one.take(one.geometry, 0) if resident is None else resident.joined(one, geometry)

    def drop(self, resident: DirectResident, geometry: Geometry, count: int, index: int) -> None:
        """Takes sequence `index` out, see `engine.Engine`."""
        with self._turn:
            resident.drop(geometry, count, index)

    def take(self, resident: DirectResident, geometry: Geometry, index: int) -> DirectResident:
        """A resident of its own with a copy of sequence `index`."""
        with self._turn:
            return resident.take(geometry, index)

    def put(self, resident: DirectResident, index: int, one: DirectResident) -> None:
        """What moves of `one` into the place of sequence `index`; drafts are forgotten."""
        with self._turn:
            with self._moving() as (journal, _):
                journal(resident).put(one, index)
            resident.drafts.clear()

    def new_log(self, geometry: Geometry, parts: tuple[str, ...]) -> RowLog:
        """An empty log of rows of a geometry."""
        return RowLog(geometry, parts)

    def read_log(self, log: RowLog) -> tuple[Float32, ...]:
        """Copies of a log's rows, an array a part."""
        with self._turn:
            return log.read()

    @contextmanager
    def _moving(self) -> Iterator[tuple[Callable[[DirectResident], Journal], Joining]]:
        """Opens journals of residents that move together, and logs that grow with them, all or none."""
        journals: list[Journal] = []
        joining = Joining()

        def journal(resident: DirectResident) -> Journal:
            journals.append(Journal(resident, self._spares))
            return journals[-1]

        with self._blas.held() if self._blas else nullcontext():
            try:
                yield journal, joining
            except BaseException:
                for each in reversed(journals):
                    each.roll_back()
                raise
        for each in journals:
            each.close()
        joining.finish()

    def _try(self, resident: DirectResident, rows: Rows, out: Float32) -> None:
        """Outputs alone: the state ends as it began."""
        with self._blas.held() if self._blas else nullcontext():
            journal = Journal(resident, self._spares)
            try:
                self._pass(journal, rows, out, moves_last=False)
            finally:
                journal.roll_back()

    def _pass(
        self,
        journal: Journal,
        rows: tuple[Float32 | None, Float32, Float32],
        out: Float32 | None,
        moves_last: bool = True,
    ) -> None:
        """All sub-chunks of a call: outputs where there is room for them, and the state after each, but
        after the last one only where `moves_last`. Without queries the archive takes nothing in.
        """
        q, k, v = rows
        for r0, count in sub_chunks(len(k), min(CHUNK_ROWS, journal.resident.geometry.min_window)):
            part = slice(r0, r0 + count)
            moves = moves_last or r0 + count < len(k)
            queries = None if q is None else q[part]
            with np.errstate(under="ignore"):
                step = self._sub_chunk(
                    journal, queries, k[part], v[part], None if out is None else out[part], moves
                )
            if moves:
                journal.move(step)

    def _sub_chunk(
        self,
        journal: Journal,
        q: Float32 | None,
        k: Float32,
        v: Float32,
        out: Float32 | None,
        moves: bool,
    ) -> Step:
        resident = journal.resident
        geometry = resident.geometry
        step = Step(find_runs(resident.group_meta, len(k)), q, k, v, squares(k))
        if moves and any(run.folded for run in step.runs):
            step.far_mz = np.empty_like(resident.far_mz)
            step.t_recent = self._spares.take(resident.t_recent)
        near = geometry.window + geometry.sinks
        work = len(k) * geometry.num_heads * near * (geometry.head_dim + v.shape[2])
        workers = min(self.threads, geometry.num_heads) if work >= self.parallel_work else 1

        if len(k) == 1:
            token = TokenWork(resident, step, q, out)
            token_tasks = cut_token(step.runs, geometry, workers, out is not None, step.far_mz is not None)
            self._share(workers, token.run, token_tasks, self._blas is not None)
            if out is not None:
                token.join()
            for ring in RINGS if moves else ():
                journal.prepare(step, ring)
            return step

        def job(task: Task | str, scratch: Scratch) -> None:
            if isinstance(task, str):
                journal.prepare(step, task)
                return
            part = Work(resident, step, task, scratch)
            if q is None or out is None:
                part.fold()
            else:
                part.attend(q, out, task.products_first)

        tasks: list[Task | str] = [*cut(step.runs, geometry, workers)]
        if moves:
            # In the middle, so that they come last: for whoever would wait for the others.
            middle = (len(tasks) + 1) // 2
            tasks[middle:middle] = RINGS
        self._share(workers, job, tasks, self._blas is not None)
        return step

    def _share(
        self, workers: int, job: Callable[[_T, Scratch], None], tasks: Sequence[_T], whole: bool
    ) -> None:
        """Runs `job` on each task, on this thread and on others, to the end of all of them."""
        left = deque(tasks)

        def work_off(scratch: Scratch, take: Callable[[], _T]) -> None:
            # NumPy keeps its error handling per thread: weights may underflow, they are then nothing.
            with np.errstate(under="ignore"), whole_products(whole):
                while left:
                    try:
                        task = take()
                    except IndexError:  # another thread was quicker
                        return
                    job(task, scratch)

        # This thread is awake before the others: what comes first is its.
        own, *others = self._scratch[: max(1, min(workers, len(tasks)))]
        self._crew.run(
            partial(work_off, own, left.popleft), [partial(work_off, each, left.pop) for each in others]
        )


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


def _accepted_rows(one: Accepted) -> Rows:
    """The rows accepted; raises `StateError` where the draft has fewer."""
    q, k, v = one.resident.drafts.get(one.draft) or (np.empty(0, np.float32),) * 3
    if not 0 <= one.rows <= len(q):
        which = f"draft {one.draft!r}" if one.draft else "the last uncommitted call"
        raise StateError(f"rows: {one.rows}, expected 0 to the {len(q)} rows of {which}")
    return q[: one.rows], k[: one.rows], v[: one.rows]


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
