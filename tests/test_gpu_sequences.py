"""The wgpu engine's drafts and commits, each against what plain calls leave; and long use of it all."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from gpu_sequence_support import (
    ALL,
    ODD,
    UNEVEN,
    assert_rows,
    everything,
    joined,
    loaded,
    sealed,
    stacked,
)
from gpu_support import GEOMETRY, assert_same_planes
from support import assert_follows, part, random_rows
from test_gpu_executor import open_dawn

import cortiq_o1 as o1
from cortiq_o1.engine import Accepted
from cortiq_o1.gpu import residents as gpu_residents
from cortiq_o1.gpu.executor import GpuEngine
from cortiq_o1.planning import BLOCK_ROWS


@pytest.fixture
def engine(gpu: o1.Device) -> GpuEngine:
    """The adapter's engine."""
    return gpu.engine


@pytest.fixture
def state(rng: np.random.Generator) -> o1.LayerState:
    """A sealed layer with a far field."""
    return sealed(rng, GEOMETRY)


# Drafts.


@pytest.mark.parametrize("path", ["auto", "stages", "token", "gemm"])
@pytest.mark.parametrize("name", ["left", "right", ""])
def test_one_of_several_drafts_moves_the_state(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator, name: str, path: str
) -> None:
    engine: GpuEngine = o1.open_device(gpu.gpu, path).engine
    resident = loaded(engine, state)
    drafts = {n: random_rows(rng, r, GEOMETRY) for n, r in (("left", 3), ("right", 30), ("", 1))}
    for n, rows in drafts.items():
        assert_follows(state, rows, engine.attend(resident, *rows, commit=False, draft=n))
    assert_same_planes(engine.read(resident), state.planes)
    accepted = part(drafts[name], slice(max(1, len(drafts[name][0]) - 1)))
    engine.commit([Accepted(resident, len(accepted[0]), name)])
    twin = loaded(engine, state)
    engine.attend(twin, *accepted, commit=True)
    assert_same_planes(engine.read(resident), engine.read(twin))
    assert not resident.drafts


def test_a_draft_takes_the_place_of_one_by_its_name_alone(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator
) -> None:
    resident, twin = loaded(engine, state), loaded(engine, state)
    first, second, other = (random_rows(rng, n, GEOMETRY) for n in (4, 2, 3))
    engine.attend(resident, *first, commit=False, draft="a")
    engine.attend(resident, *other, commit=False, draft="b")
    engine.attend(resident, *second, commit=False, draft="a")
    assert {n: d.rows for n, d in resident.drafts.items()} == {"a": 2, "b": 3}
    engine.commit([Accepted(resident, 3, "b")])
    engine.attend(twin, *other, commit=True)
    assert_same_planes(engine.read(resident), engine.read(twin))
    engine.attend(resident, *first, commit=False)
    engine.forget(resident)
    assert not resident.drafts
    engine.attend(resident, *first, commit=False)
    engine.commit([Accepted(resident, 0)])
    assert not resident.drafts
    assert_same_planes(engine.read(resident), engine.read(twin))


def test_a_failed_call_leaves_the_draft_that_was_there(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, twin = loaded(engine, state), loaded(engine, state)
    kept = random_rows(rng, 4, GEOMETRY)
    engine.attend(resident, *kept, commit=False)

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.context.readback, "take", interrupted)
    for commit in (False, True):
        with pytest.raises(KeyboardInterrupt):
            engine.attend(resident if not commit else loaded(engine, state), *kept, commit=commit)
    with pytest.raises(KeyboardInterrupt):
        engine.attend(resident, *random_rows(rng, 4, GEOMETRY), commit=False)
    monkeypatch.undo()
    engine.commit([Accepted(resident, 4)])
    engine.attend(twin, *kept, commit=True)
    assert_same_planes(engine.read(resident), engine.read(twin))


def test_verify_and_commit_make_nothing_new(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, new = loaded(engine, state), random_rows(rng, 4, GEOMETRY)

    def once() -> None:
        for draft in ("a", "b"):
            engine.attend(resident, *new, commit=False, draft=draft)
        engine.commit([Accepted(resident, 2, "b")])
        engine.attend(resident, *part(new, slice(3)), commit=False)
        engine.commit([Accepted(resident, 3)])

    def counts() -> tuple[Any, ...]:
        return len(engine.context.groups), resident.nbytes, engine.context.generation

    once()
    before = counts()

    def create(plane: str, *given: Any) -> None:
        raise AssertionError(f"a buffer of {plane}")

    monkeypatch.setattr(engine.context.memory, "create", create)
    for _ in range(20):
        once()
    assert counts() == before


def test_few_buffers_of_drafts_are_kept(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator
) -> None:
    resident, new = loaded(engine, state), random_rows(rng, 3, GEOMETRY)
    bare = resident.nbytes
    for n in range(gpu_residents.MOST_SPARES + 3):
        engine.attend(resident, *new, commit=False, draft=str(n))
    full = resident.nbytes
    engine.forget(resident)
    kept = resident.nbytes
    each = sum(array.nbytes for array in new)
    own = kept - bare - gpu_residents.MOST_SPARES * each  # scratch that the layer does not share
    assert own >= 0
    assert full - kept == 3 * each


@pytest.mark.parametrize("path", ["auto", "token"])
def test_a_long_draft_leaves_the_archive_until_it_is_committed(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator, path: str
) -> None:
    engine: GpuEngine = o1.open_device(gpu.gpu, path).engine
    resident, twin = loaded(engine, state, 80), loaded(engine, state, 80)
    new = random_rows(rng, BLOCK_ROWS + 30, GEOMETRY)
    before = everything(engine, resident)
    speculative = engine.attend(resident, *new, commit=False)
    assert_same_planes(everything(engine, resident), before)
    accepted = BLOCK_ROWS + 20
    engine.commit([Accepted(resident, accepted)])
    np.testing.assert_array_equal(
        engine.attend(twin, *part(new, slice(accepted)), commit=True)[:BLOCK_ROWS], speculative[:BLOCK_ROWS]
    )
    assert_same_planes(everything(engine, resident), everything(engine, twin))


# One commit for many.


def submissions(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps submitted from here on."""
    seen: list[str] = []
    submit = engine.context.submit

    def counted(encoder: Any, step: str) -> None:
        seen.append(step)
        submit(encoder, step)

    monkeypatch.setattr(engine.context, "submit", counted)
    return seen


def test_a_commit_moves_many_residents_in_one_submission(
    engine: GpuEngine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, twins = [], []
    log = engine.new_log(GEOMETRY, ALL)
    joined = []
    for at, geometry in enumerate((GEOMETRY, ODD, UNEVEN, GEOMETRY, GEOMETRY)):
        state = sealed(rng, geometry)
        archive = 70 * (at % 2)
        resident, twin = loaded(engine, state, archive), loaded(engine, state, archive)
        new = random_rows(rng, 3 + 9 * at, geometry)
        engine.attend(resident, *new, commit=False, draft="d")
        rows = (2, 12, 20, 25, 0)[at]
        entries.append(Accepted(resident, rows, "d", log if geometry is GEOMETRY else None))
        if rows:
            engine.attend(twin, *part(new, slice(rows)), commit=True)
            joined += [part(new, slice(rows))] if geometry is GEOMETRY else []
        twins.append(twin)
    seen = submissions(engine, monkeypatch)
    engine.commit(entries)
    assert seen == ["commit"]
    for entry, twin in zip(entries, twins, strict=True):
        assert_same_planes(everything(engine, entry.resident), everything(engine, twin))
        assert not entry.resident.drafts
    # A log that several join takes them in the order of the list.
    assert log.rows == sum(len(rows[0]) for rows in joined)
    assert_rows(engine.read_log(log), *joined)


def test_a_commit_of_many_blocks_takes_a_submission_each(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = loaded(engine, state), loaded(engine, state)
    new = random_rows(rng, 2 * BLOCK_ROWS + 30, GEOMETRY)
    engine.attend(long, *new, commit=False)
    engine.attend(short, *part(new, slice(2)), commit=False)
    log = engine.new_log(GEOMETRY, ALL)
    seen = submissions(engine, monkeypatch)
    engine.commit([Accepted(short, 2), Accepted(long, len(new[0]), log=log)])
    assert seen == ["commit"] * 3
    assert_rows(engine.read_log(log), new)
    twin = loaded(engine, state)
    engine.attend(twin, *new, commit=True)
    assert_same_planes(engine.read(long), engine.read(twin))


def test_a_commit_that_fails_moves_nothing(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = loaded(engine, state), loaded(engine, state)
    log = engine.new_log(GEOMETRY, ALL)
    new = random_rows(rng, 3, GEOMETRY)
    for resident in (one, two):
        engine.attend(resident, *new, commit=False)
    with pytest.raises(o1.StateError, match="1 rows of draft 'b', 0 are kept"):
        engine.commit([Accepted(one, 3), Accepted(two, 1, "b")])

    def full(**given: Any) -> Any:
        raise MemoryError("out of memory")

    monkeypatch.setattr(engine.context.device, "create_buffer", full)
    with pytest.raises(o1.DeviceMemoryError, match=r"buffer of log\.q"):
        engine.commit([Accepted(one, 3), Accepted(two, 3, log=log)])
    monkeypatch.undo()
    assert log.rows == 0
    for resident in (one, two):
        assert_same_planes(engine.read(resident), state.planes)
        assert resident.drafts[""].rows == 3
    engine.commit([Accepted(one, 3), Accepted(two, 3, log=log)])
    assert_same_planes(engine.read(one), engine.read(two))
    assert log.rows == 3


# All of it, for long and at once.


def test_threads_take_turns(engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator) -> None:
    calls = [random_rows(rng, 1 + n % 4, GEOMETRY) for n in range(12)]

    def stream(seed: int) -> tuple[list[np.ndarray], dict[str, np.ndarray], tuple[np.ndarray, ...]]:
        resident, log = loaded(engine, state, 64), engine.new_log(GEOMETRY, ALL)
        outs = []
        for rows in calls[seed:] + calls[:seed]:
            outs.append(engine.attend(resident, *rows, commit=False))
            fork = engine.fork(resident)
            engine.commit([Accepted(resident, len(rows[0]), log=log)])
            engine.assign(fork, resident)
        return outs, everything(engine, fork), engine.read_log(log)

    alone = [stream(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(stream, range(3)))
    for a, b in zip(alone, together, strict=True):
        for x, y in zip(a[0], b[0], strict=True):
            np.testing.assert_array_equal(x, y)
        assert_same_planes(a[1], b[1])
        assert_rows(b[2], a[2])  # type: ignore[arg-type]


@pytest.mark.slow
def test_long_use_leaves_memory_flat(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator
) -> None:
    import wgpu

    context = engine.context
    new = random_rows(rng, 4, GEOMETRY)
    resident = loaded(engine, state, 64)

    def use(calls: int, loads: int) -> None:
        log = engine.new_log(GEOMETRY, ALL)
        for n in range(calls):
            rows = 1 + n % 4
            if n % 3 == 0:
                engine.attend(resident, *part(new, slice(rows)), commit=False, draft=str(n % 2))
                engine.commit([Accepted(resident, rows, str(n % 2), log)])
            elif n % 50 == 1:
                fork = engine.fork(resident)
                engine.attend(fork, *part(new, slice(rows)), commit=True)
                engine.assign(resident, fork)
            else:
                engine.attend(resident, *part(new, slice(rows)), commit=n % 3 == 1, log=log)
            if n % 300 == 299:
                log = engine.new_log(GEOMETRY, ALL)
        engine.forget(resident)
        for _ in range(loads):
            other = loaded(engine, state)
            engine.attend(other, *part(new, slice(1)), commit=True)
            engine.join(engine.join(None, other, 0), other, 1)

    def counts() -> tuple[Any, ...]:
        gc.collect()
        context.groups.tidy()
        engine.attend(resident, *part(new, slice(1)), commit=True)
        gc.collect()
        native = wgpu.diagnostics.get_dict()["wgpu_native_counts"]
        ours = sum(isinstance(o, wgpu.GPUBuffer) and o._device is context.device for o in gc.get_objects())
        users = sum(len(keys) for keys in context.groups._users.values())
        objects = {name: native[name]["count"] for name in ("Buffer", "BindGroup", "CommandBuffer")}
        return ours, len(context.groups), users, context.pool.nbytes, resident.nbytes, objects

    use(700, 2)  # until every buffer of a draft has met every kernel
    before = counts()
    use(2000, 30)
    assert counts() == before


@pytest.mark.dawn
def test_dawn_keeps_drafts_logs_and_batches_as_well(rng: np.random.Generator) -> None:
    engine: GpuEngine = open_dawn().engine
    states = [sealed(rng, ODD, prompt) for prompt in (60, 45, 71)]
    batch = joined(engine, states)
    engine.drop(batch, ODD, 3, 0)
    log = engine.new_log(batch.geometry, ALL)
    assert_same_planes(engine.read(batch), stacked([states[2], states[1]]))
    new = random_rows(rng, 70, batch.geometry)
    engine.attend(batch, *part(new, slice(5)), commit=False, draft="d")
    fork = engine.fork(batch)
    engine.commit([Accepted(batch, 5, "d", log)])
    engine.attend(batch, *part(new, slice(5, 70)), commit=True, log=log)
    assert_rows(engine.read_log(log), new)
    twin = engine.upload(batch.geometry, stacked([states[2], states[1]]))
    engine.attend(twin, *part(new, slice(5)), commit=True)
    engine.attend(twin, *part(new, slice(5, 70)), commit=True)
    assert_same_planes(engine.read(batch), engine.read(twin))
    engine.assign(batch, fork)
    engine.absorb(batch, *new[1:])
    engine.assign(twin, fork)
    engine.attend(twin, *new, commit=True)
    assert_same_planes(engine.read(batch), engine.read(twin))
