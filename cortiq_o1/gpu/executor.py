"""Runs plans on a device of wgpu or Dawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..engine import Accepted, Planes
from ..errors import ArgumentError, DeviceLostError, StateError
from ..geometry import Geometry
from ..kernels import KERNELS
from ..paths import KEPT_ROWS
from ..planes import KV_PLANES, PENDING_PLANES, PLANES, STATE_PLANES, Sizes, unpacked
from ..planning import Limits, block_rows, check_precision, check_state_fits, commit_plan, plan
from ..plans import Plan, check_archive, plane_bytes
from . import moves
from .context import Context, context_of
from .isolated import run_isolated
from .logs import Log
from .measuring import copy_steps, profile_steps, random_steps, time_steps
from .recording import INPUTS, Again, Recorder, Step, blocks, check_lent, check_pass, record, submit_steps
from .residents import Buffers, Draft, Resident, allocate, kept
from .timing import Clock, Profile, Stopwatch, Timing


class GpuEngine:
    """An `engine.Engine` on one device; every call holds the device's lock.

    Args:
        device: an open device of wgpu, or of wgpudawn, which has the same interface.
        path: the planner's path, see `planning.plan`.
        precision: "fast" rounds the operands of the matrix products to float16 where the device has
            such numbers; `precision` afterwards says what is in force.
        kv: how the rings of what is uploaded are kept, "f32" or "f16"; what comes in is rounded already.
    """

    def __init__(self, device: Any, path: str = "auto", precision: str = "exact", kv: str = "f32") -> None:
        self.context: Context = context_of(device)
        self.path = path
        self.limits: Limits = replace(self.context.limits, kv=kv)
        self.precision = check_precision(precision) if self.limits.float16 else "exact"
        self._recorder = Recorder(self.context)

    def upload(self, geometry: Geometry, planes: Planes, archive: int = 0) -> Resident:
        """Takes copies of the state planes and returns the resident, its archive empty.

        Raises:
            GeometryError: a plane does not fit one binding; nothing has been allocated.
            ArgumentError: an archive too small for a sub-chunk.
            DeviceMemoryError: the device has no room; names the plane and its size.
        """
        check_state_fits(geometry, self.limits, check_archive(archive))
        context = self.context
        with context.lock:
            context.groups.tidy()
            kv = self.limits.kv
            resident = Resident(geometry, {}, archive, kv=kv)
            resident.buffers = allocate(context, resident.planes, resident.sizes)
            uploads = [(resident.buffers[name], kept(name, planes[name], kv)) for name in STATE_PLANES]
            context.upload(uploads, "upload of a state")
            return resident

    def read(self, resident: Resident, names: Sequence[str] = STATE_PLANES) -> dict[str, np.ndarray]:
        """Copies of planes as they are now, in the shapes of `planes.PLANES`.

        Raises `StateError` for a plane that the resident has not, such as an archive's.
        """
        absent = [name for name in names if name not in resident.planes]
        if absent:
            raise StateError(f"read: no {', '.join(absent)}; the layer has {', '.join(resident.planes)}")
        found: dict[str, np.ndarray] = {}
        with self.context.lock:
            for name in names:
                dims, dtype = PLANES[name].dims(resident.sizes), PLANES[name].dtype
                halves = resident.kv == "f16" and name in KV_PLANES
                if halves:
                    dims, dtype = (*dims[:-1], dims[-1] // 2), np.dtype(np.uint32)
                array = np.empty(dims, dtype)
                self.context.download(resident.buffers[name], array, f"read of {name}")
                found[name] = unpacked(array) if halves else array
        return found

    def attend(
        self, resident: Resident, q: Float32, k: Float32, v: Float32, commit: bool,
        draft: str = "", log: Log | None = None,
    ) -> Float32:  # fmt: skip
        """Outputs of the rows, see `engine.Engine.attend`; one submission, or one each `block_rows`."""
        with self.context.lock:
            return self._attend(resident, (q, k, v), commit, draft, log, None)

    def attend_timed(
        self, resident: Resident, q: Float32, k: Float32, v: Float32, commit: bool
    ) -> tuple[Float32, float | None]:
        """`attend`, and the GPU's nanoseconds in its compute passes, None where they cannot be told."""
        with self.context.lock:
            watch = Stopwatch(
                self.context, -(-len(q) // block_rows(resident.geometry, self.limits, self.path))
            )
            out = self._attend(resident, (q, k, v), commit, "", None, watch)
            spent = watch.nanoseconds()
            return out, None if spent is None else sum(spent)

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Moves each state over the rows accepted, see `engine.Engine.commit`: one compute pass in one
        submission, and one more for each further `BLOCK_ROWS` or so of the longest draft.

        Raises:
            StateError: a draft that is not there or has fewer rows.
            ArgumentError: a resident that comes twice.
        """
        if len({id(entry.resident) for entry in accepted}) < len(accepted):
            raise ArgumentError("accepted: a resident comes twice, expected each once")
        with self.context.lock:
            for entry in accepted:
                kept = entry.resident.drafts.get(entry.draft)
                have = kept.rows if kept else 0
                if not 0 <= entry.rows <= have:
                    raise StateError(f"commit: {entry.rows} rows of draft {entry.draft!r}, {have} are kept")
            passes: list[list[Step]] = []
            joined: dict[int, tuple[Log, int]] = {}
            for entry in accepted:
                if entry.rows:
                    self._accept(entry, passes, joined)
            for steps in passes:
                submit_steps(self.context, steps, "commit")
            for log, rows in joined.values():
                log.rows += rows
            for entry in accepted:
                entry.resident.forget()

    def absorb(self, resident: Resident, k: Float32, v: Float32) -> None:
        """Moves the state over rows without outputs, see `engine.Engine.absorb`; a submission for each
        `block_rows`, which is done before the next begins."""
        context, geometry = self.context, resident.geometry
        most = block_rows(geometry, self.limits, self.path)
        with context.lock:
            resident.forget()
            for at in range(0, len(k), most):
                rows = min(most, len(k) - at)
                todo = commit_plan(geometry, rows, self.path, self.limits)
                sizes = Sizes.of(geometry, rows)
                # What a commit takes from `o1c_tok_far` follows from no query: any rows do for them.
                sources = {name: context.pool.get(name, name, plane_bytes(name, sizes)) for name in INPUTS}
                kept = {KEPT_ROWS[name]: buffer for name, buffer in sources.items()}
                steps = self._recorder.steps(todo, resident, kept)
                for name, array in (("k_rows", k), ("v_rows", v)):
                    context.write(sources[name], array[at : at + rows], f"upload of {name}")
                submit_steps(context, steps, "absorb", context.fence)
                context.arrive("absorb")

    def forget(self, resident: Resident) -> None:
        """Forgets all drafts."""
        with self.context.lock:
            resident.forget()

    def encode(
        self, resident: Resident, compute_pass: Any,
        q_buffer: Any, k_buffer: Any, v_buffer: Any, out_buffer: Any, rows: int, commit: bool,
        draft: str = "", log: Log | None = None,
    ) -> Again | None:  # fmt: skip
        """Records `rows` rows into the caller's compute pass, over the caller's buffers; what `attend`
        does with drafts and the log counts from here on. What is returned records the same call again, in
        a fraction of the time; hold it weakly.

        Raises:
            ArgumentError: a buffer is foreign, too small, no storage buffer, or shared with the
                output; nothing has been recorded.
            ArgumentTypeError: `compute_pass` is none.
            GeometryError: so many rows pass the device's limits.
        """
        context = self.context
        buffers = (q_buffer, k_buffer, v_buffer, out_buffer)
        with context.lock:
            check_pass(context, compute_pass)
            todo = self._plan(resident, rows, commit)
            given = dict(zip((*INPUTS, "out"), buffers, strict=True))
            check_lent(context, todo, given)
            room = {} if commit else resident.room(context, rows)
            steps = self._recorder.steps(todo, resident, room, given)
            if commit and log is not None:
                sources = {part: (given[name], todo.planes[name]) for name, part in INPUTS.items()}
                steps = [*steps, *log.steps(sources, rows)]
            with context.translated("encode"):
                record(context, steps, compute_pass)
            self._settle(resident, rows, commit, draft, room, log)
            if not commit or log is not None:
                return None
            return self._recorder.again(resident, rows, buffers, steps)

    # State from one resident into another, see `moves.py`.

    def fork(self, resident: Resident) -> Resident:
        """See `engine.Engine.fork`."""
        with self.context.lock:
            return moves.fork(self.context, resident)

    def assign(self, resident: Resident, source: Resident) -> None:
        """See `engine.Engine.assign`; raises `StateError` where the two do not match."""
        with self.context.lock:
            moves.assign(self.context, resident, source)

    def replaced(self, resident: Resident, planes: Planes) -> Resident:
        """See `engine.Engine.replaced`; raises `ArgumentError` for a plane that the resident has not."""
        with self.context.lock:
            return moves.replaced(self.context, resident, planes)

    def join(self, resident: Resident | None, one: Resident, count: int) -> Resident:
        """See `engine.Engine.join`, and `moves.join` for what it raises."""
        with self.context.lock:
            return moves.join(self.context, resident, one, count)

    def drop(self, resident: Resident, geometry: Geometry, count: int, index: int) -> None:
        """See `engine.Engine.drop`; raises `ArgumentError` for a sequence that is not there."""
        with self.context.lock:
            moves.drop(self.context, resident, geometry, count, index)

    def take(self, resident: Resident, geometry: Geometry, index: int) -> Resident:
        """See `engine.Engine.take`; raises `ArgumentError` for a sequence that is not there."""
        with self.context.lock:
            return moves.take(self.context, resident, geometry, index)

    def put(self, resident: Resident, index: int, one: Resident) -> None:
        """See `engine.Engine.put`; raises `ArgumentError` for a sequence that is not there, `StateError`
        where one of the two keeps an archive."""
        with self.context.lock:
            moves.put(self.context, resident, index, one)

    def new_log(self, geometry: Geometry, parts: tuple[str, ...]) -> Log:
        """An empty log; raises `ArgumentError` for parts that no row has."""
        return Log(self.context, geometry, parts)

    def read_log(self, log: Log) -> tuple[Float32, ...]:
        """The rows of a log, see `engine.Engine.read_log`."""
        with self.context.lock:
            return log.read()

    # For tests and measurements.

    def steps(self, todo: Plan, resident: Resident) -> list[Step]:
        """What `attend` or `commit` records for a plan: each kernel with the buffers it binds, and how."""
        with self.context.lock:
            drafts = not set(PENDING_PLANES).isdisjoint(todo.planes)
            return self._recorder.steps(
                todo, resident, resident.room(self.context, todo.rows) if drafts else None
            )

    def compile(self, plans: Iterable[Plan]) -> list[str]:
        """Compiles what the plans' dispatches need and has not been compiled; the kernels' names, one for
        each pipeline.

        Raises `ShaderError` for what does not compile.
        """
        with self.context.lock:
            wanted = ((d, plan.kv) for plan in plans for d in plan.dispatches)
            compiled = []
            for d, kv in wanted:
                each = d.kernel, KERNELS[d.kernel].constants(dict(d.params)), kv
                if not self.context.has_pipeline(*each):
                    self.context.pipeline(*each)
                    compiled.append(d.kernel)
            return compiled

    def run_kernel(
        self, kernel: str, planes: Mapping[str, npt.NDArray[Any]], params: Mapping[str, int | float],
        grid: tuple[int, int, int] | None = None, source: str | None = None, canary: bool = True,
        kv: str = "f32",
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Runs one kernel alone on arrays, see `isolated.run_isolated`."""
        with self.context.lock:
            return run_isolated(self.context, kernel, planes, params, grid, source, canary, kv)

    def time_plan(
        self, resident: Resident | Sequence[Resident], rows: int, commit: bool = True, repeats: int = 10
    ) -> Timing:
        """Times `rows` rows on the device, without upload and readback; the state moves.

        Random inputs go up once. A sequence of residents of one geometry runs in one compute pass, as
        the layers of a model would, and each repeat's time is theirs together.
        """
        residents = [resident] if isinstance(resident, Resident) else list(resident)
        with self.context.lock:
            steps = random_steps(self._recorder, self._plan(residents[0], rows, commit), residents)
            return time_steps(self.context, steps, repeats)

    def profile_plan(self, resident: Resident, rows: int, commit: bool = True, repeats: int = 5) -> Profile:
        """Times each dispatch of `rows` rows alone, one compute pass a dispatch; the state moves.

        A pass has a beginning and an end of its own, so the sum is more than `time_plan` tells.
        """
        with self.context.lock:
            steps = random_steps(self._recorder, self._plan(resident, rows, commit), [resident])
            return profile_steps(self.context, steps, max(1, repeats))

    def copy_bandwidth(self, nbytes: int = 64 << 20, repeats: int = 5) -> tuple[float, Clock]:
        """Bytes read plus bytes written a second by `o1c_copy` between two buffers, and the clock."""
        size = min(nbytes, self.limits.binding_bytes) // 16 * 16
        with self.context.lock:
            timing = time_steps(self.context, copy_steps(self.context, size), repeats)
        return 2 * size / float(np.median(timing.seconds)), timing.clock

    # What follows is called under the lock.

    def _plan(self, resident: Resident, rows: int, commit: bool) -> Plan:
        return plan(
            resident.geometry, rows, commit, self.path, self.limits, self.precision,
            resident.archive if commit else 0,
        )  # fmt: skip

    def _attend(
        self, resident: Resident, inputs: tuple[Float32, ...], commit: bool, draft: str,
        log: Log | None, watch: Stopwatch | None,
    ) -> Float32:  # fmt: skip
        geometry, rows = resident.geometry, len(inputs[0])
        most = block_rows(geometry, self.limits, self.path)
        out = np.empty((rows, geometry.num_heads, geometry.value_dim or 0), np.float32)
        log = log if commit else None
        room = {} if commit else resident.room(self.context, rows)
        if rows <= most:
            self._attend_block(resident, inputs, out, commit, room, log, watch, 0, 0)
        elif commit:
            before = moves.shadow(self.context, resident, archive=True)
            try:
                self._attend_blocks(resident, inputs, out, most, log, watch)
            except DeviceLostError:
                raise
            except BaseException:
                # Blocks that are done have moved the state: put it back.
                moves.put_back(self.context, resident, before)
                raise
        else:
            # Longer than one submission should be: the blocks commit, but to a copy of the state.
            shadow = moves.shadow(self.context, resident, archive=False)
            self._attend_blocks(shadow, inputs, out, most, None, watch)
            kept = [(room[KEPT_ROWS[n]], a) for n, a in zip(INPUTS, inputs, strict=True)]
            self.context.upload(kept, "upload of rows")
        self._settle(resident, rows, commit, draft, room, log)
        return out

    def _settle(
        self, resident: Resident, rows: int, commit: bool, draft: str, room: Buffers, log: Log | None
    ) -> None:
        """What a call leaves behind, once nothing of it can fail any more."""
        if not commit:
            resident.keep(draft, Draft(rows, room))
            return
        resident.forget()
        if log is not None:
            log.rows += rows

    def _attend_blocks(
        self, resident: Resident, inputs: tuple[Float32, ...], out: Float32, most: int,
        log: Log | None, watch: Stopwatch | None,
    ) -> None:  # fmt: skip
        for number, at in enumerate(range(0, len(out), most)):
            part = slice(at, at + most)
            rows = tuple(a[part] for a in inputs)
            self._attend_block(resident, rows, out[part], True, {}, log, watch, number, at)

    def _attend_block(
        self, resident: Resident, inputs: tuple[Float32, ...], out: Float32, commit: bool, room: Buffers,
        log: Log | None, watch: Stopwatch | None, number: int, at: int,
    ) -> None:  # fmt: skip
        """One submission over the rows from `at` on of a call."""
        context = self.context
        todo = self._plan(resident, len(out), commit)
        # All that may fail for want of memory or of a compiler comes before the state moves.
        steps = self._recorder.steps(todo, resident, room)
        rows = {name: context.pool.get(name, name, todo.planes[name]) for name in (*INPUTS, "out")}
        if log is not None:
            sources = {part: (rows[name], self._bindable(rows[name])) for name, part in INPUTS.items()}
            steps = [*steps, *log.steps(sources, len(out), at)]
        target = context.readback.target(out.nbytes)
        for name, array in zip(INPUTS, inputs, strict=True):
            context.write(rows[name], array, f"upload of {name}")

        def back(encoder: Any) -> None:
            encoder.copy_buffer_to_buffer(rows["out"], 0, target, 0, out.nbytes)
            if watch is not None and number == watch.passes - 1:
                watch.resolve(encoder)

        submit_steps(context, steps, "attend", back, watch.writes(number) if watch else None)
        context.readback.take(out, "read of the outputs")

    def _accept(self, entry: Accepted, passes: list[list[Step]], joined: dict[int, tuple[Log, int]]) -> None:
        """Adds an entry's steps to the passes, and its rows to those that join its log."""
        resident: Resident = entry.resident
        kept = resident.drafts[entry.draft].buffers
        todo = commit_plan(resident.geometry, entry.rows, self.path, self.limits, resident.archive)
        parts = [self._recorder.steps(todo, resident, kept)[part] for part in blocks(todo)]
        if entry.log is not None:
            log, before = joined.get(id(entry.log), (entry.log, 0))
            buffers = {part: kept[KEPT_ROWS[name]] for name, part in INPUTS.items()}
            sources = {part: (buffer, self._bindable(buffer)) for part, buffer in buffers.items()}
            parts[0] = [*log.steps(sources, entry.rows, before), *parts[0]]
            joined[id(log)] = (log, before + entry.rows)
        for number, steps in enumerate(parts):
            if number == len(passes):
                passes.append([])
            passes[number] += steps

    def _bindable(self, buffer: Any) -> int:
        return min(buffer.size, self.limits.binding_bytes)
