"""Runs plans on a device of wgpu or Dawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..errors import ArgumentError, ArgumentTypeError, DeviceLostError, StateError
from ..geometry import Geometry
from ..kernels import KERNELS, Params
from ..paths import ATTEND, COMMIT, EVICT
from ..planes import MOVING_PLANES, OWN_PLANES, PLANES, STATE_PLANES, Sizes
from ..planning import (
    Limits,
    block_rows,
    check_plane,
    check_precision,
    check_state_fits,
    commit_plan,
    plan,
)
from ..plans import SHADOW, Plan, plane_bytes
from .buffers import STORAGE
from .context import Context, context_of
from .isolated import run_isolated
from .recording import Recorder, Resident, Step, blocks, record
from .timing import MOST_PASSES, Clock, KernelTime, Profile, Stopwatch, Timing

_INPUTS = ("q", "k_rows", "v_rows")
_KEPT = {"q": "spec_q", "k_rows": "spec_k", "v_rows": "spec_v"}


def _kept_rows(path: str) -> dict[str, str]:
    """The row planes that an uncommitted call keeps, and where: those that a commit reads."""
    taken = ATTEND if path == "auto" else (path,)
    kernels = [kernel for p in taken for kernel in (EVICT[p], *COMMIT[p])]
    read = {binding.name for kernel in kernels for binding in KERNELS[kernel].bindings}
    return {row: kept for row, kept in _KEPT.items() if row in read}


class GpuEngine:
    """An `engine.Engine` on one device.

    Args:
        device: an open device of wgpu, or of wgpudawn, which has the same interface.
        path: the planner's path, see `planning.plan`.
        precision: "fast" rounds the operands of the matrix products to float16 where the device has
            such numbers; `precision` afterwards says what is in force.
    """

    def __init__(self, device: Any, path: str = "auto", precision: str = "exact") -> None:
        self.context: Context = context_of(device)
        self.path = path
        self.limits: Limits = self.context.limits
        self.precision = check_precision(precision) if self.limits.float16 else "exact"
        self._pending = _kept_rows(path)
        self._recorder = Recorder(self.context)

    def upload(self, geometry: Geometry, planes: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Takes copies of the state planes and returns the resident.

        Raises:
            GeometryError: a plane does not fit one binding; nothing has been allocated.
            DeviceMemoryError: the device has no room; names the plane and its size.
        """
        check_state_fits(geometry, self.limits)
        context = self.context
        with context.lock:
            context.groups.tidy()
            sizes = Sizes.of(geometry)
            buffers = {name: context.memory.create(name, plane_bytes(name, sizes)) for name in STATE_PLANES}
            context.upload([(buffers[name], planes[name]) for name in STATE_PLANES], "upload of a state")
            return Resident(geometry, buffers)

    def read(self, resident: Resident) -> dict[str, np.ndarray]:
        """Copies of the state planes as they are now, in the shapes of `planes.PLANES`."""
        sizes = Sizes.of(resident.geometry)
        found = {name: np.empty(PLANES[name].dims(sizes), PLANES[name].dtype) for name in STATE_PLANES}
        with self.context.lock:
            for name, array in found.items():
                self.context.download(resident.buffers[name], array, f"read of {name}")
        return found

    def attend(self, resident: Resident, q: Float32, k: Float32, v: Float32, commit: bool) -> Float32:
        """Outputs of the rows, see `engine.Engine.attend`; one submission, or one each `block_rows`."""
        with self.context.lock:
            return self._attend(resident, (q, k, v), commit, None)

    def attend_timed(
        self, resident: Resident, q: Float32, k: Float32, v: Float32, commit: bool
    ) -> tuple[Float32, float | None]:
        """`attend`, and the GPU's nanoseconds in its compute passes, None where they cannot be told."""
        with self.context.lock:
            watch = Stopwatch(
                self.context, -(-len(q) // block_rows(resident.geometry, self.limits, self.path))
            )
            out = self._attend(resident, (q, k, v), commit, watch)
            spent = watch.nanoseconds()
            return out, None if spent is None else sum(spent)

    def commit(self, resident: Resident, rows: int) -> None:
        """Moves the state over the first `rows` of the rows kept, then forgets them."""
        if not 0 <= rows <= resident.pending:
            raise StateError(f"commit: {rows} rows, {resident.pending} are kept")
        with self.context.lock:
            if rows:
                todo = commit_plan(resident.geometry, rows, self.path, self.limits)
                steps = self._recorder.steps(todo, resident, {})
                for part in blocks(todo):
                    self._run(steps[part], "commit")
            resident.pending = 0

    def encode(
        self, resident: Resident, compute_pass: Any,
        q_buffer: Any, k_buffer: Any, v_buffer: Any, out_buffer: Any, rows: int, commit: bool,
    ) -> None:  # fmt: skip
        """Records `rows` rows into the caller's compute pass, over the caller's buffers.

        Raises:
            ArgumentError: a buffer is foreign, too small, no storage buffer, or shared with the
                output; nothing has been recorded.
            ArgumentTypeError: `compute_pass` is none.
            GeometryError: so many rows pass the device's limits.
        """
        with self.context.lock:
            todo = plan(resident.geometry, rows, commit, self.path, self.limits, self.precision)
            given = {"q": q_buffer, "k_rows": k_buffer, "v_rows": v_buffer, "out": out_buffer}
            self._check_buffers(todo, compute_pass, given)
            if not commit:
                self._keep_room(resident, rows)
            steps = self._recorder.steps(todo, resident, given)
            with self.context.translated("encode"):
                record(steps, compute_pass)
            resident.pending = 0 if commit else rows

    def steps(self, todo: Plan, resident: Resident) -> list[Step]:
        """What `attend` records for a plan: each kernel with the buffers it binds, and how."""
        with self.context.lock:
            if not todo.commit:
                self._keep_room(resident, todo.rows)
            return self._recorder.steps(todo, resident, {})

    def warm_up(self) -> None:
        """Compiles every kernel now instead of at its first use."""
        self.context.warm_up()

    def run_kernel(
        self, kernel: str, planes: Mapping[str, npt.NDArray[Any]], params: Mapping[str, int | float],
        grid: tuple[int, int, int] | None = None, source: str | None = None, canary: bool = True,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Runs one kernel alone on arrays, see `isolated.run_isolated`."""
        with self.context.lock:
            return run_isolated(self.context, kernel, planes, params, grid, source, canary)

    def time_plan(
        self, resident: Resident | Sequence[Resident], rows: int, commit: bool = True, repeats: int = 10
    ) -> Timing:
        """Times `rows` rows on the device, without upload and readback; the state moves.

        Random inputs go up once. A sequence of residents of one geometry runs in one compute pass, as
        the layers of a model would, and each repeat's time is theirs together.
        """
        residents = [resident] if isinstance(resident, Resident) else list(resident)
        with self.context.lock:
            return self._time(self._timed_steps(residents, rows, commit), repeats)

    def profile_plan(self, resident: Resident, rows: int, commit: bool = True, repeats: int = 5) -> Profile:
        """Times each dispatch of `rows` rows alone, one compute pass a dispatch; the state moves.

        A pass has a beginning and an end of its own, so the sum is more than `time_plan` tells.
        """
        with self.context.lock:
            return self._profile(self._timed_steps([resident], rows, commit), max(1, repeats))

    def copy_bandwidth(self, nbytes: int = 64 << 20, repeats: int = 5) -> tuple[float, Clock]:
        """Bytes read plus bytes written a second by `o1c_copy` between two buffers, and the clock."""
        context = self.context
        size = min(nbytes, self.limits.binding_bytes) // 16 * 16
        params: Params = {"count": size // 16, "src_at": 0, "dst_at": 0, "pad0": 0}
        kernel = KERNELS["o1c_copy"]
        with context.lock:
            pipeline, layout = context.pipeline(kernel.name)
            buffers = [context.memory.create(f"bandwidth.{side}", size) for side in ("src", "dst")]
            packed = np.array([tuple(params.values())], kernel.params_dtype).tobytes()
            (offset,) = context.parameters.place([packed])
            ranges = [(context.parameters.buffer, 0, len(packed)), *((b, 0, size) for b in buffers)]
            with context.translated("o1c_copy: bind group"):
                group = context.groups.get(kernel.name, layout, ranges)
            step = Step(kernel.name, pipeline, group, [offset], kernel.grid(params), ())
            timing = self._time([step], repeats)
        return 2 * size / float(np.median(timing.seconds)), timing.clock

    # What follows is called under the lock.

    def _attend(
        self, resident: Resident, inputs: tuple[Float32, ...], commit: bool, watch: Stopwatch | None
    ) -> Float32:
        geometry, rows = resident.geometry, len(inputs[0])
        most = block_rows(geometry, self.limits, self.path)
        out = np.empty((rows, geometry.num_heads, geometry.value_dim or 0), np.float32)
        if rows <= most:
            self._attend_block(resident, inputs, out, commit, watch, 0)
        elif commit:
            before = self._fork(resident)
            try:
                self._attend_blocks(resident, inputs, out, most, watch)
            except DeviceLostError:
                raise
            except BaseException:
                # Blocks that are done have moved the state: put it back.
                self._copy_state(before, resident)
                raise
        else:
            # Longer than one submission should be: the blocks commit, but to a copy of the state.
            self._keep_room(resident, rows)
            fork = self._fork(resident)
            self._attend_blocks(fork, inputs, out, most, watch)
            kept = [
                (resident.buffers[self._pending[n]], a)
                for n, a in zip(_INPUTS, inputs, strict=True)
                if n in self._pending
            ]
            self.context.upload(kept, "upload of rows")
        resident.pending = 0 if commit else rows
        return out

    def _attend_blocks(
        self,
        resident: Resident,
        inputs: tuple[Float32, ...],
        out: Float32,
        most: int,
        watch: Stopwatch | None,
    ) -> None:
        for number, at in enumerate(range(0, len(out), most)):
            part = slice(at, at + most)
            self._attend_block(resident, tuple(a[part] for a in inputs), out[part], True, watch, number)

    def _attend_block(
        self, resident: Resident, inputs: tuple[Float32, ...], out: Float32, commit: bool,
        watch: Stopwatch | None, number: int,
    ) -> None:  # fmt: skip
        context = self.context
        todo = plan(resident.geometry, len(out), commit, self.path, self.limits, self.precision)
        if not commit:
            self._keep_room(resident, len(out))
        # All that may fail for want of memory or of a compiler comes before the state moves.
        steps = self._recorder.steps(todo, resident, {})
        target = context.readback.target(out.nbytes)
        for name, array in zip(_INPUTS, inputs, strict=True):
            context.write(self._row_buffer(todo, name), array, f"upload of {name}")
        outputs = self._row_buffer(todo, "out")

        def back(encoder: Any) -> None:
            encoder.copy_buffer_to_buffer(outputs, 0, target, 0, out.nbytes)
            if watch is not None and number == watch.passes - 1:
                watch.resolve(encoder)

        self._run(steps, "attend", back, watch.writes(number) if watch else None)
        context.readback.take(out, "read of the outputs")

    def _run(
        self, steps: list[Step], what: str,
        after: Callable[[Any], None] | None = None, timestamps: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """One compute pass in one submission."""
        context = self.context
        encoder = context.encoder(f"o1.{what}")
        with context.translated(what):
            compute_pass = encoder.begin_compute_pass(label=f"o1.{what}", timestamp_writes=timestamps)
            record(steps, compute_pass)
            compute_pass.end()
            if after is not None:
                after(encoder)
        context.submit(encoder, what)

    def _time(self, steps: list[Step], repeats: int) -> Timing:
        context = self.context
        repeats = max(1, min(repeats, MOST_PASSES))
        watch = Stopwatch(context, repeats)
        self._run(steps, "warm-up")
        context.flush("warm-up")
        begin = time.perf_counter()
        for i in range(repeats):
            self._run(steps, "timing", watch.resolve if i == repeats - 1 else None, watch.writes(i))
        context.flush("timing")
        elapsed = time.perf_counter() - begin
        spent = watch.nanoseconds()
        # A GPU that was busy longer than the clock on the wall ran does not know its own period.
        if spent is not None and sum(spent) <= 1.1e9 * elapsed:
            return Timing("gpu", tuple(t * 1e-9 for t in spent))
        return Timing("wall", tuple(self._walled(steps, "timing") for _ in range(repeats)))

    def _timed_steps(self, residents: Sequence[Resident], rows: int, commit: bool) -> list[Step]:
        """The steps of a call on each resident, over random rows that are on the device already."""
        todo = plan(residents[0].geometry, rows, commit, self.path, self.limits, self.precision)
        rng = np.random.default_rng(0)
        for one in residents:
            if not commit:
                self._keep_room(one, rows)
            self._recorder.steps(todo, one, {})
        inputs = {n: rng.standard_normal(PLANES[n].dims(todo.sizes), np.float32) for n in _INPUTS}
        self.context.upload([(self._row_buffer(todo, n), a) for n, a in inputs.items()], "upload of rows")
        return [step for one in residents for step in self._recorder.steps(todo, one, {})]

    def _profile(self, steps: list[Step], repeats: int) -> Profile:
        self._run(steps, "warm-up")
        self.context.flush("warm-up")
        clock: Clock = "gpu"
        rounds = [self._stamped_each(steps) for _ in range(repeats)]
        if not all(rounds):
            clock, rounds = "wall", [self._walled_each(steps) for _ in range(repeats)]
        each = zip(*(r for r in rounds if r), strict=True)
        return Profile(clock, tuple(KernelTime(s.kernel, t) for s, t in zip(steps, each, strict=True)))

    def _stamped_each(self, steps: list[Step]) -> tuple[float, ...] | None:
        """GPU seconds of each step in a pass of its own, None where timestamps do not work."""
        context = self.context
        found: list[float] = []
        for at in range(0, len(steps), MOST_PASSES):
            part = steps[at : at + MOST_PASSES]
            watch = Stopwatch(context, len(part))
            encoder = context.encoder("o1.profile")
            begin = time.perf_counter()
            with context.translated("profile"):
                for number, step in enumerate(part):
                    compute_pass = encoder.begin_compute_pass(
                        label=f"o1.{step.kernel}", timestamp_writes=watch.writes(number)
                    )
                    record([step], compute_pass)
                    compute_pass.end()
                watch.resolve(encoder)
            context.submit(encoder, "profile")
            context.flush("profile")
            elapsed = time.perf_counter() - begin
            spent = watch.nanoseconds()
            if spent is None or sum(spent) > 1.1e9 * elapsed:
                return None
            found += [t * 1e-9 for t in spent]
        return tuple(found)

    def _walled_each(self, steps: list[Step]) -> tuple[float, ...]:
        """Wall seconds of each step in a submission of its own."""
        return tuple(self._walled([step], "profile") for step in steps)

    def _walled(self, steps: list[Step], what: str) -> float:
        begin = time.perf_counter()
        self._run(steps, what, self.context.fence)
        self.context.arrive(what)
        return time.perf_counter() - begin

    def _row_buffer(self, todo: Plan, name: str) -> Any:
        return self.context.pool.get((name,), name, todo.planes[name])

    def _keep_room(self, resident: Resident, rows: int) -> None:
        """Room for the rows of an uncommitted call, in buffers of the layer's own; forgets earlier ones."""
        sizes = Sizes.of(resident.geometry, rows)
        for name in self._pending.values():
            check_plane(name, sizes, self.limits)
        grown = {}
        for name in self._pending.values():
            have, need = resident.buffers.get(name), plane_bytes(name, sizes)
            if have is None or have.size < need:
                room = need if have is None else max(need, min(2 * have.size, self.limits.binding_bytes))
                grown[name] = self.context.memory.create(name, room)
        resident.pending = 0
        resident.buffers.update(grown)

    def _fork(self, resident: Resident) -> Resident:
        """A resident that moves in the other's stead, over copies of the planes that change."""
        context = self.context
        geometry = resident.geometry
        kept = (*STATE_PLANES, *OWN_PLANES)
        buffers = {name: resident.buffers[name] for name in kept if name in resident.buffers}
        for name in MOVING_PLANES:
            shadow = SHADOW + name
            buffers[name] = context.pool.get((geometry, shadow), shadow, resident.buffers[name].size)
        fork = Resident(geometry, buffers)
        self._copy_state(resident, fork)
        return fork

    def _copy_state(self, source: Resident, target: Resident) -> None:
        """The planes that move, from one resident into another."""
        context = self.context
        encoder = context.encoder("o1.fork")
        for name in MOVING_PLANES:
            size = min(source.buffers[name].size, target.buffers[name].size)
            with context.translated("fork"):
                encoder.copy_buffer_to_buffer(source.buffers[name], 0, target.buffers[name], 0, size)
        context.submit(encoder, "fork")

    def _check_buffers(self, todo: Plan, compute_pass: Any, given: Mapping[str, Any]) -> None:
        device = self.context.device
        if not hasattr(compute_pass, "dispatch_workgroups"):
            raise ArgumentTypeError(f"compute_pass: {type(compute_pass).__name__}, expected a compute pass")
        if getattr(compute_pass, "_device", device) is not device:
            raise ArgumentError(f"compute_pass: of another device, expected one of {self.context.label}")
        for plane, buffer in given.items():
            name = {"k_rows": "k", "v_rows": "v"}.get(plane, plane) + "_buffer"
            if not (hasattr(buffer, "usage") and hasattr(buffer, "size")):
                raise ArgumentError(f"{name}: {type(buffer).__name__}, expected a buffer of the device")
            if getattr(buffer, "_device", device) is not device:
                raise ArgumentError(f"{name}: of another device, expected one of {self.context.label}")
            if not buffer.usage & STORAGE:
                raise ArgumentError(f"{name}: usage {buffer.usage:#x}, expected a storage buffer")
            if buffer.size < todo.planes[plane]:
                raise ArgumentError(f"{name}: {buffer.size} bytes, expected at least {todo.planes[plane]}")
            if plane != "out" and buffer is given["out"]:
                raise ArgumentError(f"out_buffer: the same buffer as {name}, expected one of its own")
