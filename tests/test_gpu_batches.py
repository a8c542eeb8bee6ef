"""The wgpu engine's archive, forks and batches, each against what plain calls leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_sequence_support import (
    ODD,
    UNEVEN,
    everything,
    joined,
    loaded,
    sealed,
    stacked,
)
from gpu_support import GEOMETRY, assert_same_planes
from support import random_rows

import cortiq_o1 as o1
from cortiq_o1.cpu.executor import PlanEngine
from cortiq_o1.engine import Accepted
from cortiq_o1.gpu.executor import GpuEngine
from cortiq_o1.gpu.residents import FIXED_PLANES
from cortiq_o1.planes import ARCHIVE_PLANES, META_EVICTED, MOVING_PLANES, STATE_PLANES, STORES, SUB_ROWS
from cortiq_o1.planning import BLOCK_ROWS, Limits


@pytest.fixture
def engine(gpu: o1.Device) -> GpuEngine:
    """The adapter's engine."""
    return gpu.engine


@pytest.fixture
def state(rng: np.random.Generator) -> o1.LayerState:
    """A sealed layer with a far field."""
    return sealed(rng, GEOMETRY)


# The archive.


@pytest.mark.parametrize("geometry", [GEOMETRY, UNEVEN])
def test_the_archive_holds_what_was_evicted(
    engine: GpuEngine, rng: np.random.Generator, geometry: o1.Geometry
) -> None:
    """As the NumPy twins have it: it is made of copies, so bit for bit."""
    state = sealed(rng, geometry)
    plans = PlanEngine(engine.limits)
    resident, twin = loaded(engine, state, 70), plans.upload(geometry, state.planes, 70)
    for rows in (1, 20, 5, BLOCK_ROWS + 11, 1):
        new = random_rows(rng, rows, geometry)
        engine.attend(resident, *new, commit=True)
        plans.attend(twin, *new, commit=True)
        names = ("group_meta", "ring_k", *ARCHIVE_PLANES)
        assert_same_planes(engine.read(resident, names), plans.read(twin, names))


def test_an_archive_too_small_or_absent_is_told(engine: GpuEngine, state: o1.LayerState) -> None:
    with pytest.raises(o1.ArgumentError, match=f"archive: {SUB_ROWS - 1}, expected"):
        loaded(engine, state, SUB_ROWS - 1)
    resident = loaded(engine, state)
    with pytest.raises(o1.StateError, match="read: no archive_k"):
        engine.read(resident, ("group_meta", "archive_k"))
    with pytest.raises(o1.StateError, match="read: no spec_k"):
        engine.read(resident, ("spec_k",))
    found = engine.read(loaded(engine, state, 64), ("archive_q",))
    assert found["archive_q"].shape == (64, 4, 16)
    assert not found["archive_q"].any()
    with pytest.raises(o1.GeometryError, match=r"archive_q: .*lower archive"):
        loaded(engine, state, engine.limits.binding_bytes)


# Rows without outputs.


@pytest.mark.parametrize("path", ["auto", "token"])
@pytest.mark.parametrize("geometry", [GEOMETRY, UNEVEN])
def test_absorb_moves_the_state_as_attend_does(
    gpu: o1.Device, rng: np.random.Generator, path: str, geometry: o1.Geometry
) -> None:
    engine: GpuEngine = o1.open_device(gpu.gpu, path).engine
    state = sealed(rng, geometry)
    resident, twin = loaded(engine, state, 64), loaded(engine, state)
    archive = engine.read(resident, ARCHIVE_PLANES)
    q, k, v = random_rows(rng, BLOCK_ROWS + 40, geometry)
    engine.attend(resident, q[:2], k[:2], v[:2], commit=False)
    engine.absorb(resident, k, v)
    engine.attend(twin, q, k, v, commit=True)
    assert_same_planes(engine.read(resident), engine.read(twin))
    assert_same_planes(engine.read(resident, ARCHIVE_PLANES), archive)
    evicted = engine.read(resident)["group_meta"] - state.planes["group_meta"]
    assert (evicted[:, META_EVICTED] == BLOCK_ROWS + 40).all()
    assert not resident.drafts


# Forks.


def test_forks_come_back_in_any_order(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator
) -> None:
    resident = loaded(engine, state, 64)
    forks, kept = [], []
    for rows in (1, 30, 7):
        engine.attend(resident, *random_rows(rng, rows, GEOMETRY), commit=True)
        forks.append(engine.fork(resident))
        kept.append(everything(engine, resident))
    new = random_rows(rng, 3, GEOMETRY)
    for at in (2, 0, 1, 0):
        engine.attend(resident, *new, commit=False)
        engine.assign(resident, forks[at])
        assert not resident.drafts
        assert_same_planes(everything(engine, resident), kept[at])
        engine.attend(resident, *new, commit=True)
    for fork, planes in zip(forks, kept, strict=True):
        assert_same_planes(everything(engine, fork), planes)
        assert all(fork.buffers[name] is resident.buffers[name] for name in FIXED_PLANES)
        assert set(fork.buffers) == {*STATE_PLANES, *ARCHIVE_PLANES, *STORES}
    # A fork is a resident like any other, with a state of its own.
    before = everything(engine, resident)
    twin = loaded(engine, state, 64)
    fork = engine.fork(twin)
    np.testing.assert_array_equal(
        engine.attend(fork, *new, commit=True), engine.attend(loaded(engine, state), *new, commit=True)
    )
    assert_same_planes(engine.read(twin), state.planes)
    assert_same_planes(everything(engine, resident), before)


def test_a_fork_of_another_kind_is_refused(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator
) -> None:
    resident = loaded(engine, state)
    engine.attend(resident, *random_rows(rng, 2, GEOMETRY), commit=False)
    for other in (loaded(engine, state, 64), loaded(engine, sealed(rng, ODD))):
        with pytest.raises(o1.StateError, match=r"assign: a state of .*expected a state of"):
            engine.assign(resident, other)
    assert resident.drafts[""].rows == 2
    assert_same_planes(engine.read(resident), state.planes)


def test_planes_are_replaced_and_others_shared(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator
) -> None:
    other = sealed(rng, GEOMETRY)
    resident = loaded(engine, state, 64)
    engine.attend(resident, *random_rows(rng, 5, GEOMETRY), commit=True)
    before = everything(engine, resident)
    fork = engine.fork(resident)
    names = ("k_tilde", "q_tilde", "mix", "far_mz", "t_hat", "group_meta")
    given = {name: other.planes[name] for name in names}
    after = engine.replaced(resident, given)
    assert_same_planes(everything(engine, after), {**before, **given})
    shared = set(resident.planes) - set(names)
    assert all(after.buffers[name] is resident.buffers[name] for name in shared)
    given["mix"][:] = 0  # copies
    new = random_rows(rng, 30, GEOMETRY)
    engine.attend(after, *new, commit=True)
    assert_same_planes(everything(engine, fork), before)
    with pytest.raises(o1.ArgumentError, match=r"planes: \['archive_k'\]"):
        engine.replaced(loaded(engine, state), {"archive_k": before["archive_k"]})


# Batches.


@pytest.mark.parametrize("geometry", [GEOMETRY, ODD, UNEVEN])
def test_sequences_join_and_leave(
    engine: GpuEngine, rng: np.random.Generator, geometry: o1.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [sealed(rng, geometry, prompt) for prompt in (60, 45, 71, 90, 52)]
    ones = [loaded(engine, state) for state in states]

    def via_host(*given: Any) -> None:
        raise AssertionError("by way of the host")

    batch = None
    for at, one in enumerate(ones):
        with monkeypatch.context() as patch:
            patch.setattr(engine.context, "download", via_host)
            patch.setattr(engine.context, "upload", via_host)
            before, batch = batch, engine.join(batch, one, at)
        assert batch.geometry == geometry.batch(at + 1)
        assert_same_planes(engine.read(batch), stacked(states[: at + 1]))
        if at == 3:  # room for 4 since the third came
            assert all(batch.buffers[name] is before.buffers[name] for name in STATE_PLANES)
    for index, left in ((1, [0, 4, 2, 3]), (3, [0, 4, 2]), (0, [2, 4])):
        took = engine.take(batch, geometry, index)
        assert took.geometry == geometry
        engine.attend(batch, *random_rows(rng, 2, batch.geometry), commit=False)
        engine.drop(batch, geometry, len(left) + 1, index)
        assert not batch.drafts
        assert batch.geometry == geometry.batch(len(left))
        assert_same_planes(engine.read(batch), stacked([states[i] for i in left]))
    assert_same_planes(engine.read(took), states[0].planes)
    batch = engine.join(batch, took, 2)  # into the room of those that left
    assert_same_planes(engine.read(batch), stacked([states[i] for i in (2, 4, 0)]))
    for one, state in zip(ones, states, strict=True):
        assert_same_planes(engine.read(one), state.planes)


@pytest.mark.parametrize("geometry", [ODD, UNEVEN])
@pytest.mark.parametrize("path", ["auto", "token", "stages"])
def test_a_batch_attends_as_one_that_was_uploaded_whole(
    gpu: o1.Device, rng: np.random.Generator, geometry: o1.Geometry, path: str
) -> None:
    """Also where its buffers have room to spare."""
    engine: GpuEngine = o1.open_device(gpu.gpu, path).engine
    states = [sealed(rng, geometry, prompt) for prompt in (60, 45, 71)]
    batch = joined(engine, states)
    # A fourth comes, is used, and goes.
    batch = engine.join(batch, loaded(engine, states[0]), 3)
    engine.attend(batch, *random_rows(rng, 2, batch.geometry), commit=False)
    engine.drop(batch, geometry, 4, 3)
    whole = engine.upload(geometry.batch(3), stacked(states))
    for rows in (1, 30, 2):
        new = random_rows(rng, rows, batch.geometry)
        np.testing.assert_array_equal(
            engine.attend(batch, *new, commit=False), engine.attend(whole, *new, commit=True)
        )
        engine.commit([Accepted(batch, rows)])
        assert_same_planes(engine.read(batch), engine.read(whole))
    for at in range(3):
        took = engine.take(batch, geometry, at)
        alone = loaded(engine, o1.LayerState(geometry, states[at].options, 0, engine.read(took)))
        assert_same_planes(engine.read(took), engine.read(alone))
        new = random_rows(rng, 3, geometry)
        np.testing.assert_array_equal(
            engine.attend(took, *new, commit=True), engine.attend(alone, *new, commit=True)
        )


def test_what_moves_is_put_back_into_its_place(engine: GpuEngine, rng: np.random.Generator) -> None:
    states = [sealed(rng, ODD, prompt) for prompt in (60, 45, 71)]
    batch = joined(engine, states)
    forks = [engine.take(batch, ODD, at) for at in range(3)]
    engine.attend(batch, *random_rows(rng, 30, batch.geometry), commit=True)
    moved = engine.read(batch)
    engine.attend(batch, *random_rows(rng, 1, batch.geometry), commit=False)
    engine.put(batch, 1, forks[1])
    assert not batch.drafts
    heads = {name: len(states[1].planes[name]) for name in STATE_PLANES}
    expected = {name: array.copy() for name, array in moved.items()}
    for name in MOVING_PLANES:
        expected[name][heads[name] : 2 * heads[name]] = states[1].planes[name]
    assert_same_planes(engine.read(batch), expected)
    for at in (0, 2):
        engine.put(batch, at, forks[at])
    assert_same_planes(engine.read(batch), stacked(states))


def test_a_fork_of_a_batch_outlives_changes_of_its_members(
    engine: GpuEngine, rng: np.random.Generator
) -> None:
    states = [sealed(rng, ODD, prompt) for prompt in (60, 45, 71)]
    batch = joined(engine, states)
    fork = engine.fork(batch)
    engine.drop(batch, ODD, 3, 0)
    assert_same_planes(engine.read(fork), stacked(states))
    second = engine.fork(batch)
    batch = engine.join(batch, loaded(engine, states[1]), 2)
    other = engine.join(second, loaded(engine, states[0]), 2)
    assert_same_planes(engine.read(batch), stacked([states[i] for i in (2, 1, 1)]))
    assert_same_planes(engine.read(other), stacked([states[i] for i in (2, 1, 0)]))
    assert_same_planes(engine.read(fork), stacked(states))


def test_what_cannot_join_changes_nothing(
    engine: GpuEngine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [sealed(rng, ODD, prompt) for prompt in (60, 45)]
    batch = joined(engine, states)
    one = loaded(engine, states[0])
    new = random_rows(rng, 2, batch.geometry)
    engine.attend(batch, *new, commit=False)
    ring = states[0].planes["ring_k"].nbytes
    with monkeypatch.context() as patch:
        patch.setattr(engine.context, "limits", Limits(binding_bytes=2 * ring + 64))
        with pytest.raises(o1.GeometryError, match="lower"):
            engine.join(batch, one, 2)
    kept = loaded(engine, states[0], 64)
    for resident, joins, count in ((batch, kept, 2), (None, kept, 0), (kept, one, 1)):
        with pytest.raises(o1.StateError, match="keeps an archive"):
            engine.join(resident, joins, count)
    with pytest.raises(o1.StateError, match="keeps an archive"):
        engine.put(batch, 0, kept)
    for refused in (
        lambda: engine.join(batch, one, 3),
        lambda: engine.join(batch, loaded(engine, sealed(rng, UNEVEN)), 2),
        lambda: engine.join(None, one, 1),
        lambda: engine.drop(batch, ODD, 2, 2),
        lambda: engine.drop(batch, ODD, 3, 0),
        lambda: engine.take(batch, ODD, -1),
        lambda: engine.put(batch, 2, one),
    ):
        with pytest.raises(o1.ArgumentError, match="expected"):
            refused()
    assert batch.drafts[""].rows == 2
    assert_same_planes(engine.read(batch), stacked(states))
    took = engine.take(kept, ODD, 0)
    assert_same_planes(everything(engine, took), everything(engine, kept))
