"""Plans and kernels timed on the device, without upload and readback."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..kernels import KERNELS
from ..params import Params
from ..planes import PLANES
from ..plans import Plan
from .context import Context
from .recording import Recorder, Step, make_step, pack, record, submit_steps
from .residents import Resident
from .timing import MOST_PASSES, Clock, KernelTime, Profile, Stopwatch, Timing


def random_steps(recorder: Recorder, todo: Plan, residents: Sequence[Resident]) -> list[Step]:
    """The steps of a plan on each resident, over random rows that are on the device already."""
    context = recorder.context
    kept = [{} if todo.commit else one.room(context, todo.rows) for one in residents]
    pairs = list(zip(residents, kept, strict=True))
    for one, room in pairs:
        recorder.steps(todo, one, room)
    rng = np.random.default_rng(0)
    uploads = []
    for name in ("q", "k_rows", "v_rows"):
        rows = rng.standard_normal(PLANES[name].dims(todo.sizes), np.float32)
        uploads.append((context.pool.get(name, name, todo.planes[name]), rows))
    context.upload(uploads, "upload of rows")
    # Only now, when the shared buffers have all grown, do the steps of all residents bind the same.
    return [step for one, room in pairs for step in recorder.steps(todo, one, room)]


def time_steps(context: Context, steps: list[Step], repeats: int) -> Timing:
    """Times the steps together, one compute pass a repeat."""
    repeats = max(1, min(repeats, MOST_PASSES))
    watch = Stopwatch(context, repeats)
    submit_steps(context, steps, "warm-up")
    context.flush("warm-up")
    begin = time.perf_counter()
    for i in range(repeats):
        submit_steps(context, steps, "timing", watch.resolve if i == repeats - 1 else None, watch.writes(i))
    context.flush("timing")
    elapsed = time.perf_counter() - begin
    spent = watch.nanoseconds()
    # A GPU that was busy longer than the clock on the wall ran does not know its own period.
    if spent is not None and sum(spent) <= 1.1e9 * elapsed:
        return Timing("gpu", tuple(t * 1e-9 for t in spent))
    return Timing("wall", tuple(_walled(context, steps, "timing") for _ in range(repeats)))


def profile_steps(context: Context, steps: list[Step], repeats: int) -> Profile:
    """Times each step alone, one compute pass a step."""
    submit_steps(context, steps, "warm-up")
    context.flush("warm-up")
    clock: Clock = "gpu"
    rounds = [_stamped_each(context, steps) for _ in range(repeats)]
    if not all(rounds):
        clock = "wall"
        rounds = [tuple(_walled(context, [step], "profile") for step in steps) for _ in range(repeats)]
    each = zip(*(r for r in rounds if r), strict=True)
    return Profile(clock, tuple(KernelTime(s.kernel, t) for s, t in zip(steps, each, strict=True)))


def copy_steps(context: Context, size: int) -> list[Step]:
    """One `o1c_copy` of `size` bytes, a multiple of 16, between two buffers of its own."""
    kernel = KERNELS["o1c_copy"]
    params: Params = {"count": size // 16, "src_at": 0, "dst_at": 0, "pad0": 0}
    pipeline, layout = context.pipeline(kernel.name)
    buffers = [context.memory.create(f"bandwidth.{side}", size) for side in ("src", "dst")]
    packed = pack(kernel.name, params.items())
    (offset,) = context.parameters.place([packed])
    ranges = [(context.parameters.buffer, 0, len(packed)), *((b, 0, size) for b in buffers)]
    with context.translated("o1c_copy: bind group"):
        group = context.groups.get(kernel.name, layout, ranges)
    return [make_step(context, kernel.name, pipeline, group, offset, kernel.grid(params))]


def _stamped_each(context: Context, steps: list[Step]) -> tuple[float, ...] | None:
    """GPU seconds of each step in a pass of its own, None where timestamps do not work."""
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
                record(context, [step], compute_pass)
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


def _walled(context: Context, steps: list[Step], what: str) -> float:
    """Wall seconds of the steps in a submission of their own."""
    begin = time.perf_counter()
    submit_steps(context, steps, what, context.fence)
    context.arrive(what)
    return time.perf_counter() - begin
