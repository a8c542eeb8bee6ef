"""Archives and batches on both NumPy engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_support import (
    ARCHIVE,
    GEOMETRY,
    QKV,
    Engine,
    Model,
    Planes,
    assert_owned,
    assert_same,
    everything,
    failing,
    make,
    rows_of,
    sealed,
    step_of,
    stream,
)

from cortiq_o1.cpu import executor
from cortiq_o1.cpu.direct import DirectEngine
from cortiq_o1.cpu.executor import PlanEngine
from cortiq_o1.cpu.resident import SPARES
from cortiq_o1.engine import Accepted
from cortiq_o1.errors import GeometryError, StateError
from cortiq_o1.paths import PATHS
from cortiq_o1.planes import (
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_LEN,
    META_WINDOW,
    STATE_PLANES,
)
from cortiq_o1.reference import ReferenceLayer, worst_error


@pytest.fixture(params=["direct", *PATHS])
def kind(request: pytest.FixtureRequest) -> str:
    """The fast engine, and the other one on each path."""
    return str(request.param)


@pytest.fixture
def engine(kind: str) -> Engine:
    return make(kind)


# The archive.


@pytest.mark.parametrize("evictions", [None, 2**32 - 90], ids=["seal", "wrap"])
@pytest.mark.parametrize("limit", [None, 3], ids=["open", "closed"])
@pytest.mark.parametrize("rows", [20, 60], ids=["ring-fills", "ring-full"])
def test_the_archive_is_what_left_the_ring_and_the_queries_that_pushed(
    engine: Engine, rows: int, limit: int | None, evictions: int | None
) -> None:
    planes = sealed(rows=rows)
    meta = planes["group_meta"]
    if limit is not None:
        meta[:, META_FAR_LIMIT] = meta[:, META_FAR_LEN] + limit
    if evictions is not None:
        meta[:, META_EVICTED] = evictions
    assert (meta[0, META_LEN] < meta[0, META_WINDOW]) == (rows == 20)
    resident, model = engine.upload(GEOMETRY, planes, ARCHIVE), Model(planes, ARCHIVE)
    model.assert_is(everything(engine, resident))
    given = stream(200)
    at = 0
    for count in (1, 5, 30, 1, 63):
        new = rows_of(given, at, at + count)
        engine.attend(resident, *new, True)
        model.pass_rows(new)
        model.assert_is(everything(engine, resident))
        at += count
    new = rows_of(given, at, at + 50)
    engine.attend(resident, *new, False)
    model.assert_is(everything(engine, resident))
    engine.commit([Accepted(resident, 37)])
    model.pass_rows(rows_of(new, 0, 37))
    model.assert_is(everything(engine, resident))


def test_evictions_are_counted_without_an_archive(engine: Engine) -> None:
    planes = sealed()
    resident = engine.upload(GEOMETRY, planes)
    before = planes["group_meta"][:, META_EVICTED].copy()
    engine.attend(resident, *stream(31), True)
    np.testing.assert_array_equal(engine.read(resident)["group_meta"][:, META_EVICTED], before + 31)
    with pytest.raises(StateError, match="archive_k of a layer without an archive"):
        engine.read(resident, ["archive_k"])


def test_an_archive_changes_nothing_else(engine: Engine) -> None:
    planes, rows = sealed(), stream(50)
    plain, archived = engine.upload(GEOMETRY, planes), engine.upload(GEOMETRY, planes, ARCHIVE)
    outs = [engine.attend(resident, *rows, True) for resident in (plain, archived)]
    np.testing.assert_array_equal(*outs)
    assert_same(engine.read(plain), engine.read(archived))
    assert archived.nbytes - plain.nbytes == ARCHIVE * 4 * (6 * 8 + 2 * (8 + 12))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_a_failed_call_archived_is_taken_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    if isinstance(engine, PlanEngine):  # so that a call takes several plans
        chunk = 1 if engine.path == "token" else GEOMETRY.min_window
        monkeypatch.setattr(executor, "block_rows", lambda *_: chunk)
    resident = engine.upload(GEOMETRY, sealed(), ARCHIVE)
    log = engine.new_log(GEOMETRY, QKV)
    engine.attend(resident, *stream(30, 3), True, log=log)
    engine.attend(resident, *stream(4, 4), False, "kept")
    before, logged = everything(engine, resident), engine.read_log(log)
    with failing(*step_of(engine), 3, error), pytest.raises(error, match="on purpose"):
        engine.attend(resident, *stream(45, 5), True, log=log)
    assert_same(everything(engine, resident), before)
    assert log.rows == 30
    for a, b in zip(engine.read_log(log), logged, strict=True):
        np.testing.assert_array_equal(a, b)
    engine.commit([Accepted(resident, 4, "kept", log)])
    assert log.rows == 34


# Batches.


def batch_of(engine: Engine, states: list[Planes], archive: int = ARCHIVE) -> Any:
    resident = None
    for count, planes in enumerate(states):
        resident = engine.join(resident, engine.upload(GEOMETRY, planes, archive), count)
    return resident


def positions() -> list[Planes]:
    """Sequences of one seal each, at different places in their rings."""
    return [sealed(seed, rows) for seed, rows in ((0, 60), (1, 20), (2, 75), (3, 140))]


def test_a_batch_attends_as_its_sequences_would(engine: Engine, kind: str) -> None:
    states, wide = positions(), GEOMETRY.batch(4)
    batch = batch_of(engine, states)
    assert batch.geometry == wide
    rows = stream(45, 3, wide)
    start = {name: np.concatenate([s[name] for s in states]) for name in STATE_PLANES}
    assert_same(engine.read(batch), start)
    alone = make(kind)
    fresh = alone.upload(wide, start, ARCHIVE)
    out = engine.attend(batch, *rows, True)
    np.testing.assert_array_equal(out, alone.attend(fresh, *rows, True))
    assert_same(everything(engine, batch), everything(alone, fresh))
    error, share = worst_error(ReferenceLayer.from_planes(wide, start).run(*rows), out)
    assert share <= 1.0, f"worst error {error:.2e}, {share:.2f} of its bound"
    for at, planes in enumerate(states):
        model = Model(planes, ARCHIVE)
        q, k, v = rows
        model.pass_rows((q[:, 6 * at : 6 * at + 6], k[:, 2 * at : 2 * at + 2], v[:, 2 * at : 2 * at + 2]))
        model.assert_is(everything(engine, engine.take(batch, GEOMETRY, at)))


@pytest.mark.parametrize("index", range(4))
def test_sequences_leave_a_batch_and_the_last_takes_the_place(engine: Engine, index: int) -> None:
    states, wide = positions(), GEOMETRY.batch(4)
    batch = batch_of(engine, states)
    engine.attend(batch, *stream(30, 3, wide), True)
    moved = [everything(engine, engine.take(batch, GEOMETRY, at)) for at in range(4)]
    engine.attend(batch, *stream(2, 3, wide), False)
    bytes_before = batch.nbytes
    engine.drop(batch, GEOMETRY, 4, index)
    assert batch.geometry == GEOMETRY.batch(3)
    assert batch.nbytes < bytes_before * 3 / 4 + 1
    with pytest.raises(StateError):
        engine.commit([Accepted(batch, 1)])
    if index < 3:
        moved[index] = moved[3]
    for at in range(3):
        assert_same(everything(engine, engine.take(batch, GEOMETRY, at)), moved[at])
    engine.attend(batch, *stream(8, 4, GEOMETRY.batch(3)), True)
    engine.drop(batch, GEOMETRY, 3, 1)
    engine.drop(batch, GEOMETRY, 2, 0)
    assert batch.geometry == GEOMETRY
    before = everything(engine, batch)
    with pytest.raises(GeometryError):
        engine.drop(batch, GEOMETRY, 1, 0)
    assert_same(everything(engine, batch), before)


def test_a_sequence_taken_out_is_apart_and_goes_back(engine: Engine, kind: str) -> None:
    states, wide = positions()[:3], GEOMETRY.batch(3)
    batch = batch_of(engine, states)
    engine.attend(batch, *stream(15, 3, wide), True)
    rows = stream(40, 5)
    one = engine.take(batch, GEOMETRY, 1)
    old = everything(engine, batch)
    before = everything(engine, one)
    engine.attend(one, *rows, True)
    moved = everything(engine, one)
    assert_same(everything(engine, batch), old)
    alone = make(kind)
    fresh = alone.upload(GEOMETRY, before)
    alone.attend(fresh, *rows, True)
    assert_same({n: moved[n] for n in STATE_PLANES}, alone.read(fresh))
    engine.attend(batch, *stream(2, 3, wide), False)
    engine.put(batch, 1, one)
    with pytest.raises(StateError):
        engine.commit([Accepted(batch, 1)])
    engine.attend(one, *rows, True)  # does not reach the batch
    assert_same(everything(engine, engine.take(batch, GEOMETRY, 1)), moved)
    for at in (0, 2):
        was = batch_part(old, at, 3)
        assert_same(everything(engine, engine.take(batch, GEOMETRY, at)), was)
    if isinstance(engine, DirectEngine):
        assert_owned(engine, [batch, one])


def batch_part(planes: Planes, at: int, count: int) -> Planes:
    """Sequence `at` of the planes of a batch."""
    found = {}
    for name, array in planes.items():
        axis = 1 if name == "archive_q" else 0
        found[name] = np.split(array, count, axis=axis)[at]
    return found


def test_a_sequence_that_does_not_fit_its_place_changes_nothing(engine: Engine) -> None:
    batch = batch_of(engine, positions()[:2])
    engine.attend(batch, *stream(9, 3, GEOMETRY.batch(2)), False)
    before = everything(engine, batch)
    with pytest.raises(ValueError, match="broadcast"):
        engine.put(batch, 0, engine.upload(GEOMETRY, sealed(5), 64))
    assert_same(everything(engine, batch), before)
    engine.commit([Accepted(batch, 9)])


def test_spares_of_many_shapes_do_not_pile_up() -> None:
    engine = DirectEngine(threads=1)
    batch = None
    for count in range(2 * SPARES):
        batch = engine.join(batch, engine.upload(GEOMETRY, sealed()), count)
        engine.attend(batch, *stream(12, 3, GEOMETRY.batch(count + 1)), True)
    assert len(engine._spares._arrays) == SPARES
