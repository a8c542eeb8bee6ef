"""A plan tied to buffers: what a compute pass is told, worked out once and replayed."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..kernels import KERNELS, Grid
from ..planes import store_bytes
from ..planning import BLOCK_ROWS
from ..plans import SHADOW, Dispatch, Plan, base_plane, is_store, members
from .buffers import STORAGE, Part, Place, span
from .context import Context
from .raw import RawCalls
from .residents import Resident, parts

MOST_RECORDINGS, MOST_STEPS = 512, 1 << 16
"""What a recorder keeps: a long call a row at a time has a thousand steps, most calls a dozen."""
INPUTS = {"q": "q", "k_rows": "k", "v_rows": "v"}
"""The row planes that a call brings, and what a log and a caller call them."""


class Bound(NamedTuple):
    """A plane as a dispatch binds it: `buffer` is a number that no other buffer of the device has; the
    planes of a store share one."""

    plane: str
    buffer: int
    access: str


@dataclass(frozen=True)
class Step:
    """One dispatch, ready to be recorded."""

    kernel: str
    pipeline: Any
    group: Any
    offsets: list[int]  # a list, as wgpu wants it
    grid: Grid
    bound: tuple[Bound, ...]
    call: Any
    """What `raw.RawCalls` makes of it, None where only the methods of a pass serve."""


class Again:
    """A committed call over the caller's buffers, told to a pass anew for as long as nothing has changed."""

    __slots__ = (
        "__weakref__",
        "_buffers",
        "_calls",
        "_context",
        "_generation",
        "_raw",
        "_resident",
        "_steps",
        "rows",
    )

    def __init__(
        self, context: Context, raw: RawCalls, resident: Resident, rows: int, buffers: Sequence[Any],
        steps: Sequence[Step],
    ) -> None:  # fmt: skip
        self.rows = rows
        self._context, self._raw, self._resident = context, raw, resident
        self._generation = context.generation
        # Weak, since who holds the caller's buffers is not the recorder's business.
        self._buffers = tuple(weakref.ref(buffer) for buffer in buffers)
        self._steps = steps  # whose objects the calls point at
        self._calls = [step.call for step in steps]

    def record(self, resident: Any, compute_pass: Any, q: Any, k: Any, v: Any, out: Any) -> bool:
        """Whether the call was the same as before, and has been recorded; otherwise nothing has happened.

        Raises what `GpuEngine.encode` raises.
        """
        context = self._context
        old_q, old_k, old_v, old_out = self._buffers
        with context.lock:
            if (
                resident is not self._resident
                or resident.drafts
                or context.groups.untidy
                or context.generation != self._generation
                or q is not old_q()
                or k is not old_k()
                or v is not old_v()
                or out is not old_out()
                or not self._raw.takes(compute_pass)
                or compute_pass._device is not context.device
            ):
                return False
            try:
                self._raw.record(self._calls, compute_pass)
            except Exception as error:
                with context.translated("encode"):
                    raise error
            return True


def make_step(
    context: Context, kernel: str, pipeline: Any, group: Any, offset: int, grid: Grid,
    bound: tuple[Bound, ...] = (),
) -> Step:  # fmt: skip
    """A dispatch of a pipeline over a bind group, its parameters at an offset."""
    offsets = [offset]
    call = None if context.raw is None else context.raw.call(pipeline, group, offsets, grid)
    return Step(kernel, pipeline, group, offsets, grid, bound, call)


def pack(kernel: str, params: Iterable[tuple[str, int | float]]) -> bytes:
    """A kernel's parameters as its WGSL struct lays them out."""
    return np.array([tuple(value for _, value in params)], KERNELS[kernel].params_dtype).tobytes()


def blocks(plan: Plan) -> Iterator[slice]:
    """The dispatches in runs of at most `BLOCK_ROWS` rows or so, cut between sub-chunks.

    A driver gives up on a device that is busy for seconds without an answer.
    """
    start, first = 0, 0
    for at, dispatch in enumerate(plan.dispatches):
        row = dict(dispatch.params).get("r0", first)
        if row >= first + BLOCK_ROWS:
            yield slice(start, at)
            start, first = at, int(row)
    yield slice(start, len(plan.dispatches))


class Recorder:
    """Turns plans into steps and keeps them while the buffers stay the same."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._kept: OrderedDict[tuple[int, ...], tuple[Plan, list[Step]]] = OrderedDict()
        self._steps = 0
        self._generation = -1
        self._again: dict[int, Again] = {}

    def steps(
        self,
        plan: Plan,
        resident: Resident,
        kept: Mapping[str, Any] | None = None,
        rows: Mapping[str, Any] | None = None,
    ) -> list[Step]:
        """The plan's dispatches over a resident.

        `kept` are buffers that stand for other planes, a draft's for one; `rows` the caller's own, of
        which no more is bound than the plan needs. Planes that are in none come from the device's
        shared pool. Everything is allocated, compiled and checked here, before anything is recorded.
        """
        context = self.context
        context.groups.tidy()
        for name, nbytes in plan.planes.items():
            if base_plane(name).role == "own":
                have: Any = resident.buffers.get(name)
                if have is None or have.size < nbytes:  # a batch may have grown
                    resident.buffers[name] = context.memory.create(name, nbytes)
                self._again.pop(id(resident), None)
        given = {**resident.buffers, **(kept or {}), **(rows or {})}
        key = (id(plan), *(context.groups.serial(span(place).buffer) for place in given.values()))
        if context.generation == self._generation:
            found = self._kept.get(key)
            # The plan is kept along with its steps, so that its id stays its own.
            if found is not None:
                self._kept.move_to_end(key)
                return found[1]
        steps = self._resolve(plan, given, set(rows or ()))
        self._follow()
        self._kept[key] = (plan, steps)
        self._steps += len(steps)
        while len(self._kept) > 1 and (len(self._kept) > MOST_RECORDINGS or self._steps > MOST_STEPS):
            _, (_, oldest) = self._kept.popitem(last=False)
            self._steps -= len(oldest)
        return steps

    def again(
        self, resident: Resident, rows: int, buffers: Sequence[Any], steps: Sequence[Step]
    ) -> Again | None:
        """For the same call over the same buffers of the caller's once more; the recorder holds it, until
        something changes, and the caller a weak reference. None where passes are told by methods."""
        raw = self.context.raw
        if raw is None:
            return None
        self._follow()
        found = self._again[id(resident)] = Again(self.context, raw, resident, rows, buffers, steps)
        return found

    def _follow(self) -> None:
        """Drops what an earlier generation left."""
        if self.context.generation != self._generation:
            self._kept.clear()
            self._again.clear()
            self._steps = 0
            self._generation = self.context.generation

    def _resolve(self, plan: Plan, given: Mapping[str, Any], exact: set[str]) -> list[Step]:
        context = self.context
        places = dict(given)
        for store in dict.fromkeys(n for d in plan.dispatches for n in d.planes if is_store(n)):
            if store not in places:  # a shadow's
                base = store.removeprefix(SHADOW)
                buffer = context.pool.get(store, store, store_bytes(base, plan.sizes))
                places |= parts(buffer, base, plan.sizes, SHADOW)
        for name, nbytes in plan.planes.items():
            if name not in places:
                places[name] = context.pool.get(name, name, nbytes)
        offsets = context.parameters.place([pack(d.kernel, d.params) for d in plan.dispatches])
        return [
            self._step(d, {n: self._range(n, places[n], plan, n in exact) for n in d.planes}, offset, plan.kv)
            for d, offset in zip(plan.dispatches, offsets, strict=True)
        ]

    def _range(self, name: str, place: Place, plan: Plan, exact: bool) -> tuple[Any, int, int]:
        # Others are bound whole, so that calls of other lengths, and batches, share the bind group; a
        # store's length tells where its second plane begins.
        if isinstance(place, Part):
            return place
        return (place, 0, plan.planes[name] if exact else min(place.size, self.context.limits.binding_bytes))

    def _step(
        self, dispatch: Dispatch, ranges: Mapping[str, tuple[Any, int, int]], offset: int, kv: str
    ) -> Step:
        context = self.context
        kernel = KERNELS[dispatch.kernel]
        pipeline, layout = context.pipeline(dispatch.kernel, kernel.constants(dict(dispatch.params)), kv)
        params = (context.parameters.buffer, 0, kernel.params_dtype.itemsize)
        with context.translated(f"{dispatch.kernel}: bind group"):
            group = context.groups.get(
                dispatch.kernel, layout, [params, *(ranges[p] for p in dispatch.planes)]
            )
        bound = tuple(
            Bound(plane, context.groups.serial(ranges[name][0]), binding.access)
            for name, binding in zip(dispatch.planes, kernel.bindings, strict=True)
            for plane in members(name)
        )
        return make_step(context, dispatch.kernel, pipeline, group, offset, dispatch.grid, bound)


def record(context: Context, steps: list[Step], compute_pass: Any) -> None:
    """Tells a compute pass the steps, in order."""
    raw = context.raw
    if raw is not None and raw.takes(compute_pass):
        raw.record([step.call for step in steps], compute_pass)
        return
    pipeline = None
    for step in steps:
        if step.pipeline is not pipeline:
            pipeline = step.pipeline
            compute_pass.set_pipeline(pipeline)
        compute_pass.set_bind_group(0, step.group, step.offsets)
        compute_pass.dispatch_workgroups(*step.grid)


def submit_steps(
    context: Context, steps: list[Step], what: str,
    after: Callable[[Any], None] | None = None, timestamps: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """One compute pass in one submission; `after` records what follows the pass."""
    encoder = context.encoder(f"o1.{what}")
    with context.translated(what):
        compute_pass = encoder.begin_compute_pass(label=f"o1.{what}", timestamp_writes=timestamps)
        record(context, steps, compute_pass)
        compute_pass.end()
        if after is not None:
            after(encoder)
    context.submit(encoder, what)


def check_pass(context: Context, compute_pass: Any) -> None:
    """Raises `ArgumentTypeError` for a pass that is none, `ArgumentError` for another device's."""
    if not hasattr(compute_pass, "dispatch_workgroups"):
        raise ArgumentTypeError(f"compute_pass: {type(compute_pass).__name__}, expected a compute pass")
    if getattr(compute_pass, "_device", context.device) is not context.device:
        raise ArgumentError(f"compute_pass: of another device, expected one of {context.label}")


def check_lent(context: Context, todo: Plan, given: Mapping[str, Any]) -> None:
    """Raises `ArgumentError` for a caller's buffer that cannot stand for the row plane it is given for."""
    device = context.device
    for plane, buffer in given.items():
        name = INPUTS.get(plane, plane) + "_buffer"
        if not (hasattr(buffer, "usage") and hasattr(buffer, "size")):
            raise ArgumentError(f"{name}: {type(buffer).__name__}, expected a buffer of the device")
        if getattr(buffer, "_device", device) is not device:
            raise ArgumentError(f"{name}: of another device, expected one of {context.label}")
        if not buffer.usage & STORAGE:
            raise ArgumentError(f"{name}: usage {buffer.usage:#x}, expected a storage buffer")
        if buffer.size < todo.planes[plane]:
            raise ArgumentError(f"{name}: {buffer.size} bytes, expected at least {todo.planes[plane]}")
        if plane != "out" and buffer is given["out"]:
            raise ArgumentError(f"out_buffer: the same buffer as {name}, expected one of its own")
