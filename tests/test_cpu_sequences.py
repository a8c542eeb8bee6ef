"""What sequences ask of both NumPy engines: drafts, commits of several, forks, logs, and failures midway."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_support import (
    ARCHIVE,
    GEOMETRY,
    QKV,
    Engine,
    after,
    assert_owned,
    assert_same,
    differ,
    everything,
    failing,
    make,
    rows_of,
    sealed,
    step_of,
    stream,
)

from cortiq_o1.cpu import direct, executor
from cortiq_o1.cpu.direct import DirectEngine
from cortiq_o1.cpu.logs import RowLog
from cortiq_o1.cpu.resident import DirectResident, squares
from cortiq_o1.engine import Accepted
from cortiq_o1.errors import StateError
from cortiq_o1.paths import PATHS
from cortiq_o1.planes import (
    ARCHIVE_PLANES,
    FLUSH_ROWS,
    META_FAR_LEN,
    MOVING_PLANES,
    STATE_PLANES,
)
from cortiq_o1.planning import block_rows


@pytest.fixture(params=["direct", *PATHS])
def kind(request: pytest.FixtureRequest) -> str:
    """The fast engine, and the other one on each path."""
    return str(request.param)


@pytest.fixture
def engine(kind: str) -> Engine:
    return make(kind)


# Drafts.


@pytest.mark.parametrize("count", [0, 1, 9, 25])
def test_one_of_several_drafts_is_committed_and_all_are_forgotten(
    engine: Engine, kind: str, count: int
) -> None:
    planes = sealed()
    resident = engine.upload(GEOMETRY, planes, ARCHIVE)
    drafts = {name: stream(25, seed) for seed, name in enumerate(["", "left", "right"], 20)}
    before = everything(engine, resident)
    outs = {name: engine.attend(resident, *rows, False, name) for name, rows in drafts.items()}
    assert_same(everything(engine, resident), before)
    for name, rows in drafts.items():
        alone = engine.upload(GEOMETRY, planes)
        np.testing.assert_array_equal(outs[name], engine.attend(alone, *rows, False))
    engine.commit([Accepted(resident, count, "left")])
    calls = [count] if count else []
    assert_same(everything(engine, resident), after(kind, drafts["left"], calls))
    for name in drafts:
        with pytest.raises(StateError, match="expected 0 to the 0 rows"):
            engine.commit([Accepted(resident, 1, name)])
    engine.commit([Accepted(resident, 0, "left")])


def test_a_draft_takes_the_place_of_one_of_its_name(engine: Engine, kind: str) -> None:
    resident = engine.upload(GEOMETRY, sealed(), ARCHIVE)
    first, other, rows = stream(7, 1), stream(12, 2), stream(5, 3)
    engine.attend(resident, *first, False, "a")
    engine.attend(resident, *other, False, "b")
    given = [x.copy() for x in rows]
    engine.attend(resident, *given, False, "a")  # type: ignore[call-arg, arg-type]
    for array in given:
        array.fill(7.0)
    with pytest.raises(StateError, match="rows: 6, expected 0 to the 5 rows of draft 'a'"):
        engine.commit([Accepted(resident, 6, "a")])
    engine.commit([Accepted(resident, 5, "a")])
    assert_same(everything(engine, resident), after(kind, rows, [5]))


def test_committed_rows_and_forget_end_all_drafts(engine: Engine) -> None:
    resident = engine.upload(GEOMETRY, sealed())
    rows = stream(5)
    for end in (lambda: engine.attend(resident, *rows, True), lambda: engine.forget(resident)):
        engine.attend(resident, *rows, False, "a")
        engine.attend(resident, *rows, False)
        bare = resident.nbytes
        end()
        assert resident.nbytes == bare - 2 * sum(x.nbytes for x in rows)
        for name in ("", "a"):
            with pytest.raises(StateError):
                engine.commit([Accepted(resident, 1, name)])


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_draft_that_fails_leaves_the_one_before(
    engine: Engine, kind: str, error: type[BaseException]
) -> None:
    resident = engine.upload(GEOMETRY, sealed(), ARCHIVE)
    rows = stream(8)
    engine.attend(resident, *rows, False, "a")
    before = everything(engine, resident)
    with failing(*step_of(engine), 1, error), pytest.raises(error, match="on purpose"):
        engine.attend(resident, *stream(40, 3), False, "a")
    assert_same(everything(engine, resident), before)
    engine.commit([Accepted(resident, 8, "a")])
    assert_same(everything(engine, resident), after(kind, rows, [8]))


# Commits of several layers.


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["step", "log"])
def test_a_commit_of_several_is_all_or_none(
    engine: Engine, kind: str, where: str, error: type[BaseException]
) -> None:
    residents = [engine.upload(GEOMETRY, sealed(seed), ARCHIVE) for seed in range(3)]
    drafts = [stream(24, 30 + at) for at in range(3)]
    logs = [engine.new_log(GEOMETRY, QKV) for _ in range(3)]
    warm = stream(30, 5)
    for resident, log, rows in zip(residents, logs, drafts, strict=True):
        engine.attend(resident, *warm, True, log=log)
        engine.attend(resident, *rows, False, "a")
        engine.attend(resident, *rows_of(rows, 0, 3), False, "b")
    accepted = [Accepted(r, n, "a", log) for r, n, log in zip(residents, (24, 0, 11), logs, strict=True)]
    before = [everything(engine, r) for r in residents]
    logged = [engine.read_log(log) for log in logs]
    broken = (RowLog, "put") if where == "log" else step_of(engine)
    with failing(*broken, 10**9) as calls:
        probe = [engine.fork(r) for r in residents]
        for fork, rows in zip(probe, drafts, strict=True):
            engine.attend(fork, *rows, False, "a")
        calls[0] = 0
        spare = engine.new_log(GEOMETRY, QKV)
        engine.commit([Accepted(fork, a.rows, "a", spare) for fork, a in zip(probe, accepted, strict=True)])
        steps = calls[0]
    assert steps >= 2
    for call in range(1, steps + 1):
        with failing(*broken, call, error), pytest.raises(error, match="on purpose"):
            engine.commit(accepted)
        for resident, log, planes, rows in zip(residents, logs, before, logged, strict=True):
            assert_same(everything(engine, resident), planes)
            assert log.rows == 30
            for a, b in zip(engine.read_log(log), rows, strict=True):
                np.testing.assert_array_equal(a, b)
    engine.commit(accepted)
    for at, (one, rows) in enumerate(zip(accepted, drafts, strict=True)):
        alone = make(kind)
        resident = alone.upload(GEOMETRY, sealed(at), ARCHIVE)
        alone.attend(resident, *warm, True)
        if one.rows:
            alone.attend(resident, *rows_of(rows, 0, one.rows), True)
        assert_same(everything(engine, one.resident), everything(alone, resident))
        assert logs[at].rows == 30 + one.rows
        for have, old, new in zip(engine.read_log(logs[at]), warm, rows, strict=True):
            np.testing.assert_array_equal(have, np.concatenate([old, new[: one.rows]]))
        with pytest.raises(StateError):
            engine.commit([Accepted(one.resident, 1, "b")])


def test_a_commit_that_asks_too_much_of_one_moves_none(engine: Engine, kind: str) -> None:
    one, two = (engine.upload(GEOMETRY, sealed(), ARCHIVE) for _ in range(2))
    rows = stream(6)
    for resident in (one, two):
        engine.attend(resident, *rows, False)
    with pytest.raises(StateError, match="rows: 7, expected 0 to the 6 rows of the last uncommitted call"):
        engine.commit([Accepted(one, 6), Accepted(two, 7)])
    assert_same(everything(engine, one), after(kind, rows, []))
    engine.commit([Accepted(one, 6), Accepted(two, 6)])
    for resident in (one, two):
        assert_same(everything(engine, resident), after(kind, rows, [6]))


# Rows without outputs.


def test_absorbed_rows_move_the_state_but_no_archive(
    engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "ABSORBED_ROWS", 3 * GEOMETRY.min_window)
    most = block_rows(GEOMETRY, engine.limits, engine.path)
    monkeypatch.setattr(executor, "block_rows", lambda *_: most // 4)
    rows = stream(100)
    resident = engine.upload(GEOMETRY, sealed(), ARCHIVE)
    engine.attend(resident, *stream(3, 2), False)
    empty = engine.read(resident, ARCHIVE_PLANES)
    engine.absorb(resident, *rows[1:])
    monkeypatch.undo()
    expected = after(kind, rows, [100])
    assert_same(engine.read(resident), {name: expected[name] for name in STATE_PLANES})
    assert_same(engine.read(resident, ARCHIVE_PLANES), empty)
    with pytest.raises(StateError):
        engine.commit([Accepted(resident, 1)])


# Forks.


def test_forks_go_back_in_any_order(engine: Engine) -> None:
    """Far fields flush on the way, so that the totals are written too."""
    planes = sealed()
    planes["group_meta"][:, META_FAR_LEN] = FLUSH_ROWS - 30
    resident = engine.upload(GEOMETRY, planes, ARCHIVE)
    rows = stream(150)
    forks, states = [], []
    for at in range(5):
        forks.append(engine.fork(resident))
        states.append(everything(engine, resident))
        for step in range(6):
            engine.attend(resident, *rows_of(rows, 30 * at + 5 * step, 30 * at + 5 * step + 5), True)
    assert differ(states[0], states[-1]) == {*MOVING_PLANES, *ARCHIVE_PLANES}
    for at in (2, 4, 0, 3, 3, 1):
        engine.attend(resident, *rows_of(rows, 0, 3), False)
        engine.assign(resident, forks[at])
        assert_same(everything(engine, resident), states[at])
        with pytest.raises(StateError):
            engine.commit([Accepted(resident, 1)])
        for step in range(6):
            engine.attend(resident, *rows_of(rows, 30 * at + 5 * step, 30 * at + 5 * step + 5), True)
        if at < 4:
            assert_same(everything(engine, resident), states[at + 1])
    for fork, state in zip(forks, states, strict=True):
        assert_same(everything(engine, fork), state)


def test_a_fork_moves_on_its_own_and_has_no_drafts(engine: Engine, kind: str) -> None:
    resident = engine.upload(GEOMETRY, sealed(), ARCHIVE)
    rows = stream(60)
    engine.attend(resident, *rows_of(rows, 0, 20), True)
    engine.attend(resident, *rows_of(rows, 0, 3), False, "a")
    fork = engine.fork(resident)
    with pytest.raises(StateError):
        engine.commit([Accepted(fork, 1, "a")])
    other = stream(40, 3)
    for at in range(0, 40, 8):  # by turns
        engine.attend(fork, *rows_of(other, at, at + 8), True)
        engine.attend(resident, *rows_of(rows, 20 + at, 28 + at), True)
    assert_same(everything(engine, resident), after(kind, rows, [20, *[8] * 5]))
    both = tuple(np.concatenate([a[:20], b]) for a, b in zip(rows, other, strict=True))
    assert_same(everything(engine, fork), after(kind, both, [20, *[8] * 5]))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_no_resident_sees_what_another_does(engine: Engine, kind: str, seed: int) -> None:
    """Random calls on residents and their forks; each does what a fresh layer in that state would."""
    choose = np.random.default_rng(seed)
    residents = [engine.upload(GEOMETRY, sealed(at), ARCHIVE) for at in range(2)]
    families, states = [0, 1], [everything(engine, r) for r in residents]
    for turn in range(25):
        at = int(choose.integers(len(residents)))
        rows = stream(int(choose.choice([1, 4, 20])), 100 + turn)
        what = choose.choice(["attend", "commit", "try", "fail", "fork", "assign"])
        if what in ("attend", "commit"):
            fresh = make(kind)
            alone = fresh.upload(GEOMETRY, {n: states[at][n] for n in STATE_PLANES})
            want = fresh.attend(alone, *rows, True)
            if what == "attend":
                np.testing.assert_array_equal(engine.attend(residents[at], *rows, True), want)
            else:
                engine.attend(residents[at], *rows, False)
                engine.commit([Accepted(residents[at], len(rows[0]))])
            states[at] = everything(engine, residents[at])
            assert_same({n: states[at][n] for n in STATE_PLANES}, fresh.read(alone))
        elif what == "try":
            engine.attend(residents[at], *stream(30, turn), False)
        elif what == "fail":
            with failing(*step_of(engine), 1), pytest.raises(MemoryError):
                engine.attend(residents[at], *rows, True)
        elif what == "fork" and len(residents) < 6:
            residents.append(engine.fork(residents[at]))
            states.append(states[at])
            families.append(families[at])
        elif what == "assign":
            source = int(choose.choice([i for i, f in enumerate(families) if f == families[at]]))
            engine.assign(residents[at], residents[source])
            states[at] = states[source]
        for resident, state in zip(residents, states, strict=True):
            assert_same(everything(engine, resident), state)
        if isinstance(engine, DirectEngine):
            assert_owned(engine, residents)


@pytest.mark.parametrize("archive", [0, ARCHIVE])
def test_replaced_planes_are_copies_and_the_rest_goes_on(engine: Engine, kind: str, archive: int) -> None:
    old, new = sealed(), sealed(7, 90)
    resident = engine.upload(GEOMETRY, old, archive)
    engine.attend(resident, *stream(30), True)
    engine.attend(resident, *stream(3), False)
    before = everything(engine, resident)
    names = ("group_meta", "k_tilde", "q_tilde", "mix", "far_mz", "t_hat", "ring_k")
    given = {name: new[name].copy() for name in names}
    got = engine.replaced(resident, given)
    for array in given.values():
        array.fill(1)
    want = before | {name: new[name] for name in names}
    assert_same(everything(engine, got), want)
    with pytest.raises(StateError):
        engine.commit([Accepted(got, 1)])
    alone = make(kind)
    fresh = alone.upload(GEOMETRY, want)
    rows = stream(40, 5)
    np.testing.assert_array_equal(engine.attend(got, *rows, True), alone.attend(fresh, *rows, True))
    assert_same(engine.read(got), alone.read(fresh))
    if isinstance(got, DirectResident):
        np.testing.assert_array_equal(got.mark_norms, squares(got.k_tilde).max(axis=1))


# Logs.


@pytest.mark.parametrize("parts", [("q",), QKV])
def test_a_log_has_the_rows_that_passed_in_order(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]
) -> None:
    monkeypatch.setattr(
        executor, "block_rows", lambda *_: GEOMETRY.min_window if engine.path != "token" else 1
    )
    resident, log = engine.upload(GEOMETRY, sealed()), engine.new_log(GEOMETRY, parts)
    assert (log.parts, log.rows, log.nbytes) == (parts, 0, 0)
    assert [len(array) for array in engine.read_log(log)] == [0] * len(parts)
    rows, at = stream(120), 0
    for count, taken in ((1, None), (30, None), (20, 7), (5, 0), (9, 9), (40, None)):
        engine.attend(resident, *rows_of(rows, at, at + count), taken is None, "a", log)
        assert log.rows == at + (count if taken is None else 0)
        if taken is not None:
            engine.commit([Accepted(resident, taken, "a", log)])
        at += count if taken is None else taken
        assert log.rows == at
        got = engine.read_log(log)
        for name, array in zip(parts, got, strict=True):
            np.testing.assert_array_equal(array, rows[QKV.index(name)][:at])
            array.fill(7.0)
    size = sum(4 * int(np.prod(rows[QKV.index(name)].shape[1:])) for name in parts)
    assert at * size <= log.nbytes <= 2 * at * size


def test_two_layers_commit_into_one_log(engine: Engine) -> None:
    log = engine.new_log(GEOMETRY, ("q",))
    residents = [engine.upload(GEOMETRY, sealed(at)) for at in range(2)]
    rows = [stream(6, at) for at in range(2)]
    for resident, own in zip(residents, rows, strict=True):
        engine.attend(resident, *own, False)
    engine.commit([Accepted(residents[0], 6, log=log), Accepted(residents[1], 4, log=log)])
    (got,) = engine.read_log(log)
    np.testing.assert_array_equal(got, np.concatenate([rows[0][0], rows[1][0][:4]]))
