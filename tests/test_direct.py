"""The fast NumPy path against the float64 reference; what a call moves, keeps and puts back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier, Thread, current_thread
from time import sleep
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import Rows, geometries, part, random_rows

from cortiq_o1.cpu import near, work
from cortiq_o1.cpu.crew import Crew
from cortiq_o1.cpu.direct import CHUNK_ROWS, DirectEngine, _Blas
from cortiq_o1.cpu.far import SAFE_RISE, far_stages
from cortiq_o1.cpu.near import Scratch, add_values, scores
from cortiq_o1.cpu.resident import DirectResident, Journal, find_runs, squares
from cortiq_o1.cpu.token import FAR, NEAR, OWN, cut_token
from cortiq_o1.engine import Accepted
from cortiq_o1.errors import StateError
from cortiq_o1.geometry import Geometry
from cortiq_o1.planes import (
    FLUSH_ROWS,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    MZ_MAX,
    MZ_RECENT,
    MZ_TOTAL,
    NO_FAR_LIMIT,
    T_RECENT,
    T_TOTAL,
)
from cortiq_o1.reference import ReferenceLayer, worst_error
from cortiq_o1.sealing import seal

Planes = dict[str, np.ndarray]

ODD = Geometry(18, 2, 20, 12, window=40, sinks=3, landmarks=9, windows=(40, 23))


def sealed(rng: np.random.Generator, geometry: Geometry, rows: int) -> Planes:
    return dict(seal(*random_rows(rng, rows, geometry), geometry).planes)


def engines() -> list[DirectEngine]:
    """One thread; and more than there are groups, so that they share heads."""
    return [DirectEngine(threads=1), DirectEngine(threads=3, parallel_work=0)]


def run(engine: DirectEngine, resident: DirectResident, rows: Rows, calls: list[int]) -> np.ndarray:
    ends = np.cumsum([0, *calls])
    return np.concatenate(
        [engine.attend(resident, *part(rows, slice(a, b)), True) for a, b in pairwise(ends)]
    )


def assert_same(a: Planes, b: Planes) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name].view(np.uint32), b[name].view(np.uint32), err_msg=name)


def assert_state_follows(planes: Planes, reference: ReferenceLayer) -> None:
    """Ring, counters and far field are the reference's; sums to float32's precision over few rows."""
    heads = reference.geometry.heads_per_group
    for g, (meta, group) in enumerate(zip(planes["group_meta"].astype(int), reference.groups, strict=True)):
        assert (meta[META_LEN], meta[META_FAR_LEN]) == (len(group.ring), group.far_len)
        slots = (meta[META_HEAD] + np.arange(len(group.ring))) % group.window
        for at, name in enumerate(("ring_k", "ring_v")):
            np.testing.assert_array_equal(planes[name][g, slots], np.array([row[at] for row in group.ring]))
        if group.far_len:
            m = meta[META_LANDMARKS]
            own = slice(g * heads, (g + 1) * heads)
            mz, t = planes["far_mz"][own, :, :m], planes["t_hat"][own, :, :m]
            np.testing.assert_allclose(mz[:, MZ_MAX], group.far_max, rtol=2e-6, atol=2e-6)
            mass = mz[:, MZ_TOTAL].astype(float) + mz[:, MZ_RECENT]
            np.testing.assert_allclose(mass, group.far_mass, rtol=2e-5)
            numerator = t[:, T_TOTAL].astype(float) + t[:, T_RECENT]
            error = np.abs(numerator - group.far_num).max(axis=2)
            assert (error <= 2e-5 * group.far_mass * np.abs(planes["ring_v"]).max()).all()


def assert_follows(
    engine: DirectEngine, geometry: Geometry, planes: Planes, rows: Rows, calls: list[int]
) -> None:
    resident = engine.upload(geometry, planes)
    out = run(engine, resident, rows, calls)
    reference = ReferenceLayer.from_planes(geometry, planes)
    error, ratio = worst_error(reference.run(*rows), out)
    assert ratio <= 1.0, f"worst error {error:.2e}, {ratio:.2f} times its bound"
    assert_state_follows(engine.read(resident), reference)


@given(geometry=geometries(), more=st.integers(1, 60), count=st.integers(1, 200), data=st.data())
def test_random_layers_follow_the_reference(geometry: Geometry, more: int, count: int, data: Any) -> None:
    heads = geometry.num_kv_heads * data.draw(st.integers(1, 9))
    geometry = Geometry(**{**geometry.to_dict(), "num_heads": heads})
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    planes = sealed(rng, geometry, geometry.exact_rows + more)
    reach = data.draw(st.sampled_from([None, 0, 1, 30]))
    if reach is not None:
        meta = planes["group_meta"]
        meta[:, META_FAR_LIMIT] = meta[:, META_FAR_LEN] + reach
    rows = random_rows(rng, count, geometry)
    cut = data.draw(st.integers(0, count))
    for engine in engines():
        assert_follows(engine, geometry, planes, rows, [n for n in (cut, count - cut) if n])


@pytest.mark.parametrize("rect", ["aggregate", "fm"])
def test_groups_of_different_prompts_keep_their_own_landmarks(rng: np.random.Generator, rect: Any) -> None:
    geometry = Geometry(**{**ODD.to_dict(), "rect": rect})
    parts = [sealed(rng, geometry, rows) for rows in (geometry.exact_rows + 1, 140)]
    both = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    used = both["group_meta"][:, META_LANDMARKS]
    assert len(set(used)) == 2
    assert used.min() < geometry.landmarks
    for g, m in enumerate(used):
        own = slice(9 * g, 9 * g + 9)
        for name in ("q_tilde", "k_tilde", "mix"):
            both[name][slice(g, g + 1) if name == "k_tilde" else own, m:] = 1e37
        both["mix"][own, :, m:] = 1e37
        both["far_mz"][own, :, m:] = 1e37
        both["t_hat"][own, :, m:] = 1e37
    wide = geometry.batch(2)
    rows = random_rows(rng, 70, wide)
    for engine in engines():
        assert_follows(engine, wide, both, rows, [1, 69])
        resident = engine.upload(wide, both)
        run(engine, resident, rows, [70])
        after = engine.read(resident)
        for g, m in enumerate(used):
            for name in ("far_mz", "t_hat"):
                assert (after[name][9 * g : 9 * g + 9, :, m:] == np.float32(1e37)).all()


@pytest.mark.parametrize("calls", [[1] * 60, [60], [17, 43]], ids=str)
@pytest.mark.parametrize("sinks", [0, 3])
def test_a_window_of_one(rng: np.random.Generator, calls: list[int], sinks: int) -> None:
    geometry = Geometry(4, 2, 8, window=1, sinks=sinks, landmarks=4)
    planes = sealed(rng, geometry, 40)
    for engine in engines():
        assert_follows(engine, geometry, planes, random_rows(rng, 60, geometry), calls)


@pytest.mark.parametrize("calls", [[1] * 50, [50], [3, 40, 7]], ids=str)
def test_rings_that_fill_on_the_way_and_start_anywhere(rng: np.random.Generator, calls: list[int]) -> None:
    geometry = Geometry(6, 2, 12, window=40, sinks=2, landmarks=5, windows=(40, 9))
    planes = sealed(rng, geometry, geometry.exact_rows + 4)
    meta = planes["group_meta"]
    assert meta[0, META_LEN] < 40
    assert meta[0, META_FAR_LEN] == 0
    for name, sections in (("far_mz", [MZ_MAX, MZ_TOTAL, MZ_RECENT]), ("t_hat", [T_TOTAL, T_RECENT])):
        planes[name][:3, sections] = 1e37  # an empty far field is one of no rows, whatever its sums say
    for shift in (0, 11, 33):
        moved = {name: a.copy() for name, a in planes.items()}
        moved["group_meta"][0, META_HEAD] = shift
        for name in ("ring_k", "ring_v"):
            moved[name][0, :40] = np.roll(planes[name][0, :40], shift, axis=0)
        for engine in engines():
            assert_follows(engine, geometry, moved, random_rows(rng, 50, geometry), calls)


@pytest.mark.parametrize("limit", [0, 1, 7, 23, 64, NO_FAR_LIMIT])
def test_the_far_field_closes_at_its_limit(rng: np.random.Generator, limit: int) -> None:
    planes = sealed(rng, ODD, 100)
    meta = planes["group_meta"]
    room = min(limit, 1000)
    meta[:, META_FAR_LIMIT] = meta[:, META_FAR_LEN] + room if limit != NO_FAR_LIMIT else NO_FAR_LIMIT
    rows = random_rows(rng, 70, ODD)
    for engine in engines():
        assert_follows(engine, ODD, planes, rows, [5, 65])
        resident = engine.upload(ODD, planes)
        run(engine, resident, rows, [70])
        folded = engine.read(resident)["group_meta"][:, META_FAR_LEN] - meta[:, META_FAR_LEN]
        assert (folded == min(room, 70)).all()


@pytest.mark.parametrize("before", [1, 20, 70])
def test_recent_sums_join_the_total(rng: np.random.Generator, before: int) -> None:
    planes = sealed(rng, ODD, 100)
    planes["group_meta"][:, META_FAR_LEN] = FLUSH_ROWS - before
    for name, recent, total in (("far_mz", MZ_RECENT, MZ_TOTAL), ("t_hat", T_RECENT, T_TOTAL)):
        planes[name][:, recent] = planes[name][:, total] * 0.25
        planes[name][:, total] *= 0.75
    rows = random_rows(rng, 90, ODD)
    for engine in engines():
        assert_follows(engine, ODD, planes, rows, [30, 60])
        resident = engine.upload(ODD, planes)
        states = []
        for t in range(before + 1):
            states.append(engine.read(resident))
            engine.attend(resident, *part(rows, slice(t, t + 1)), True)
        states.append(engine.read(resident))
        *_, held, flushed, after = states
        still = after["far_mz"][:, MZ_MAX] == flushed["far_mz"][:, MZ_MAX]
        assert still.any()
        for name, recent, total in (("far_mz", MZ_RECENT, MZ_TOTAL), ("t_hat", T_RECENT, T_TOTAL)):
            assert held[name][:, recent].all()
            assert not flushed[name][:, recent].any()
            assert after[name][:, recent].all()
            np.testing.assert_array_equal(after[name][:, total][still], flushed[name][:, total][still])


@pytest.mark.parametrize("at", [0, 9, 30])
def test_a_large_key_leaves_earlier_rows_their_far_field(rng: np.random.Generator, at: int) -> None:
    geometry = Geometry(4, 2, 16, window=24, sinks=1, landmarks=6)
    planes = sealed(rng, geometry, 90)
    rows = random_rows(rng, 60, geometry)
    # Far above anything before it, and evicted 24 rows later, inside the same call.
    rows[1][at] *= np.float32(60.0)
    reference = ReferenceLayer.from_planes(geometry, planes)
    before = [group.far_max.copy() for group in reference.groups]
    reference.run(*rows)
    rise = max((group.far_max - old).max() for group, old in zip(reference.groups, before, strict=True))
    assert rise > SAFE_RISE
    for engine in engines():
        for calls in ([60], [1] * 60):
            assert_follows(engine, geometry, planes, rows, calls)


@pytest.mark.parametrize("calls", [[1] * 12, [70]], ids=str)
@pytest.mark.parametrize("reach", [1.0, 8.0, 60.0])
@pytest.mark.parametrize("safe", [-1.0, work.SAFE_LOGIT])
def test_weights_without_a_scale_are_weights(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, safe: float, reach: float, calls: list[int]
) -> None:
    """Logits within `SAFE_LOGIT`, near it, far past it; and none of them is safe."""
    monkeypatch.setattr(work, "SAFE_LOGIT", safe)
    q, k, v = random_rows(rng, sum(calls), ODD)
    rows = (q * np.float32(reach), k, v)
    for engine in engines():
        assert_follows(engine, ODD, sealed(rng, ODD, 100), rows, calls)


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 24])
@pytest.mark.parametrize("name", ["BLOCK_LOGITS", "TASK_LOGITS"])
def test_many_heads_go_in_blocks_and_tasks(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str, heads: int
) -> None:
    geometry = Geometry(24, 8, 12, window=40, sinks=2, landmarks=5)
    monkeypatch.setattr(work, name, heads * 40 * (42 + 40))
    planes = sealed(rng, geometry, 100)
    for engine in engines():
        assert_follows(engine, geometry, planes, random_rows(rng, 80, geometry), [40, 40])


def test_stages_after_a_large_key_are_those_of_row_by_row(rng: np.random.Generator) -> None:
    q_tilde = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    keys = rng.standard_normal((2, 37, 8)).astype(np.float32)
    keys[:, 20] *= 100
    maximum, mass = np.zeros((2, 3, 5), np.float32), np.ones((2, 3, 5), np.float32)
    shift = rng.standard_normal((2, 3, 5)).astype(np.float32)
    got = far_stages(q_tilde, keys, shift, maximum, mass, Scratch())
    mu, z = maximum.astype(float), mass.astype(float)
    for x in range(37):
        logit = np.einsum("ghmd,gd->ghm", q_tilde.astype(float), keys[:, x].astype(float)) - shift
        new = np.maximum(mu, logit)
        z = z * np.exp(mu - new) + np.exp(logit - new)
        mu = new
        np.testing.assert_allclose(got.maximum[:, :, x + 1], mu, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got.mass[:, :, x + 1], z, rtol=2e-4)


@pytest.mark.parametrize("count", [1, 7, CHUNK_ROWS, CHUNK_ROWS + 30])
def test_commit_moves_the_state_as_attend_does(rng: np.random.Generator, count: int) -> None:
    geometry = Geometry(8, 2, 16, window=80, sinks=3, landmarks=9, windows=(80, 70))
    planes = sealed(rng, geometry, 100)
    rows = random_rows(rng, CHUNK_ROWS + 40, geometry)
    for engine in engines():
        tried, moved = engine.upload(geometry, planes), engine.upload(geometry, planes)
        out = engine.attend(tried, *rows, False)
        assert_same(engine.read(tried), planes)
        engine.commit([Accepted(tried, count)])
        got = engine.attend(moved, *part(rows, slice(count)), True)
        assert_same(engine.read(tried), engine.read(moved))
        reference = ReferenceLayer.from_planes(geometry, planes)
        assert worst_error(reference.run(*rows), out)[1] <= 1.0
        np.testing.assert_allclose(got, out[:count], rtol=0, atol=2e-4)
        with pytest.raises(StateError):
            engine.commit([Accepted(tried, 1)])


def test_commit_keeps_its_own_copy_of_the_latest_rows(rng: np.random.Generator) -> None:
    planes = sealed(rng, ODD, 100)
    first, rows = random_rows(rng, 3, ODD), random_rows(rng, 5, ODD)
    engine = DirectEngine(threads=1)
    tried, moved = engine.upload(ODD, planes), engine.upload(ODD, planes)
    engine.attend(moved, *rows, True)
    given = [a.copy() for a in rows]
    engine.attend(tried, *first, False)
    engine.attend(tried, *given, False)
    for array in given:
        array.fill(7.0)
    with pytest.raises(StateError, match="5 rows"):
        engine.commit([Accepted(tried, 6)])
    engine.commit([Accepted(tried, 5)])
    assert_same(engine.read(tried), engine.read(moved))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["Window", "far_gains", "far_stages", "move", "keep"])
def test_a_call_that_fails_on_the_way_has_moved_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    planes = sealed(rng, ODD, 100)
    rows = random_rows(rng, 90, ODD)
    engine = DirectEngine(threads=2, parallel_work=0)
    resident, untouched = engine.upload(ODD, planes), engine.upload(ODD, planes)
    for each in (resident, untouched):
        engine.attend(each, *part(rows, slice(10)), True)
        engine.attend(each, *part(rows, slice(10, 20)), False)
    before = engine.read(resident)
    calls = 0
    target, name = {
        "move": (Journal, "move"),
        "keep": (Journal, "_keep"),
    }.get(where, (work, where))
    plain = getattr(target, name)

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error("on purpose")
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, failing)
        with pytest.raises(error, match="on purpose"):
            engine.attend(resident, *part(rows, slice(20, 90)), True)
    assert_same(engine.read(resident), before)
    for each in (resident, untouched):
        engine.commit([Accepted(each, 10)])
    got, want = (engine.attend(each, *part(rows, slice(20, 90)), True) for each in (resident, untouched))
    np.testing.assert_array_equal(got, want)
    assert_same(engine.read(resident), engine.read(untouched))


def test_layers_of_one_engine_keep_apart(rng: np.random.Generator) -> None:
    engine = DirectEngine(threads=2, parallel_work=0)
    states = [sealed(rng, ODD, rows) for rows in (90, 120, 150)]
    streams = [random_rows(rng, 40, ODD) for _ in states]
    together = [engine.upload(ODD, planes) for planes in states]
    got = [
        [
            engine.attend(r, *part(rows, slice(i, i + 8)), True)
            for r, rows in zip(together, streams, strict=True)
        ]
        for i in range(0, 40, 8)
    ]
    for at, (planes, rows) in enumerate(zip(states, streams, strict=True)):
        alone = DirectEngine(threads=2, parallel_work=0)
        resident = alone.upload(ODD, planes)
        want = run(alone, resident, rows, [8] * 5)
        np.testing.assert_array_equal(np.concatenate([turn[at] for turn in got]), want)
        assert_same(engine.read(together[at]), alone.read(resident))


def test_calls_from_several_threads_take_turns(rng: np.random.Generator) -> None:
    geometry = Geometry(8, 2, 32, window=300, sinks=3, landmarks=9)
    states = [sealed(rng, geometry, rows) for rows in (330, 350)]
    streams = [random_rows(rng, 200, geometry) for _ in states]

    def stream(engine: DirectEngine, at: int) -> tuple[np.ndarray, Planes]:
        resident = engine.upload(geometry, states[at])
        outs = []
        for i in range(0, 200, 8):
            outs.append(engine.attend(resident, *part(streams[at], slice(i, i + 8)), False))
            engine.commit([Accepted(resident, 8)])
        return np.concatenate(outs), engine.read(resident)

    wanted = [stream(DirectEngine(threads=2, parallel_work=0), at) for at in range(2)]
    shared = DirectEngine(threads=2, parallel_work=0)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(stream, [shared, shared], range(2)))
    for (out, planes), (want, want_planes) in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(out, want)
        assert_same(planes, want_planes)


def test_upload_and_read_copy(rng: np.random.Generator) -> None:
    planes = sealed(rng, ODD, 100)
    kept = {name: a.copy() for name, a in planes.items()}
    engine = DirectEngine(threads=1)
    resident = engine.upload(ODD, planes)
    for array in (*planes.values(), *engine.read(resident).values()):
        array.fill(1)
    assert_same(engine.read(resident), kept)


@pytest.mark.parametrize("laid", [False, True])
@pytest.mark.parametrize("work", [1, 300, 5000, 60_000])
@pytest.mark.parametrize(("rows", "count", "width"), [(1, 1, 4), (4, 95, 20), (36, 131, 44), (64, 40, 128)])
def test_cut_products(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    work: int,
    rows: int,
    count: int,
    width: int,
    laid: bool,
) -> None:
    monkeypatch.setattr(near, "PRODUCT_WORK", work)
    monkeypatch.setattr(near, "VECTOR_WORK", work)
    plane = rng.standard_normal((3, count + 9, width)).astype(np.float32)
    if laid:
        plane = np.ascontiguousarray(plane.swapaxes(1, 2)).swapaxes(1, 2)
    keys = plane[:, 5 : 5 + count]
    q = rng.standard_normal((3, rows, width)).astype(np.float32)
    logits = np.full((3, rows, count + 2), 7, np.float32)
    scores(q, keys, logits[:, :, 1:-1])
    exact = q.astype(float) @ keys.astype(float).swapaxes(1, 2)
    np.testing.assert_allclose(logits[:, :, 1:-1], exact, atol=1e-5 * width**0.5)
    assert (logits[:, :, [0, -1]] == 7).all()
    sums = np.ones((3, rows, width), np.float32)
    weights = logits[:, :, 1:-1]
    add_values(weights, keys, sums, Scratch())
    want = 1 + weights.astype(float) @ keys.astype(float)
    size = np.abs(weights.astype(float)) @ np.abs(keys.astype(float))
    assert (np.abs(sums - want) <= 1e-6 * (1 + size)).all()


@pytest.mark.parametrize("held", [True, False])
def test_products_whole_and_cut_both_follow_the_reference(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, held: bool
) -> None:
    """With threadpoolctl products stay whole, without it they are cut."""
    if held:
        pytest.importorskip("threadpoolctl")
    else:
        monkeypatch.setattr("cortiq_o1.cpu.direct.find_blas", lambda: None)
    geometry = Geometry(8, 2, 32, window=300, sinks=2, landmarks=16)
    state = seal(*random_rows(rng, 400, geometry), geometry)
    engine = DirectEngine()
    assert (engine._blas is not None) is held
    rows = random_rows(rng, 70, geometry)
    assert_follows(engine, geometry, state.planes, rows, [64, 1, 5])


def test_blas_gets_its_threads_back_after_the_last_engine() -> None:
    class Library:
        threads = 7

        def get_num_threads(self) -> int:
            return self.threads

        def set_num_threads(self, count: int) -> None:
            self.threads = count

    library = Library()
    blas = _Blas([library])
    first, second = blas.held(), blas.held()
    first.__enter__()
    second.__enter__()
    assert library.threads == 1
    first.__exit__(None, None, None)
    assert library.threads == 1
    second.__exit__(None, None, None)
    assert library.threads == 7
    with pytest.raises(KeyError), blas.held():
        raise KeyError
    assert library.threads == 7


def test_a_crew_ends_all_jobs_before_it_raises() -> None:
    crew = Crew(2)
    ended: list[str] = []

    def fails() -> None:
        raise KeyError("on purpose")

    def slow() -> None:
        sleep(0.02)
        ended.append("slow")

    for own, others in ((fails, [slow, slow]), (slow, [fails, slow])):
        ended.clear()
        with pytest.raises(KeyError, match="on purpose"):
            crew.run(own, others)
        assert ended == ["slow"] * 2
    crew.run(lambda: ended.append("own"), [slow, slow])
    assert sorted(ended) == ["own"] + ["slow"] * 4


def test_a_crew_takes_its_threads_along() -> None:
    crew = Crew(2)
    found: list[Thread] = []
    both = Barrier(2)

    def job() -> None:
        both.wait()
        found.append(current_thread())

    crew.run(lambda: None, [job, job])
    assert len(set(found)) == 2
    del crew
    for thread in found:
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("outputs", [True, False])
def test_tasks_of_a_token_are_each_part_of_each_head_once(workers: int, outputs: bool) -> None:
    geometry = Geometry(40, 8, 8, window=6000, sinks=4, landmarks=8, windows=(6000,) * 5 + (9,) * 3)
    meta = np.zeros((8, 8), np.uint32)
    meta[:, META_LEN] = meta[:, META_WINDOW] = geometry.group_windows
    meta[2:, META_FAR_LEN] = 7
    meta[:, META_LANDMARKS] = 8
    runs = find_runs(meta, 1)
    assert len(runs) == 3
    tasks = cut_token(runs, geometry, workers, outputs, True)
    seen = np.zeros((3, 8, 5), int)
    for task in tasks:
        if task.part != OWN:
            run = runs[task.run]
            assert run.first <= task.groups.start < task.groups.stop <= run.last
        seen[task.part, task.groups, task.heads] += 1
    assert (seen[FAR] == 1).all()
    assert (seen[[NEAR, OWN]] == int(outputs)).all()
    if workers > 1 and outputs:
        # The calling thread begins with what the others may wake up in; the last of all is theirs.
        assert [tasks[at].part for at in (0, -1)] == [NEAR, NEAR]


def test_keys_lie_alike_whatever_made_the_resident(rng: np.random.Generator) -> None:
    """Bits depend on how BLAS is called, and so on how keys lie."""
    engine = DirectEngine(threads=1)
    one, two = (engine.upload(ODD, sealed(rng, ODD, rows), archive=64) for rows in (90, 100))
    both = engine.join(engine.join(None, one, 0), two, 1)
    residents = [
        one,
        both,
        engine.fork(one),
        engine.take(both, ODD, 1),
        engine.replaced(two, engine.read(one)),
    ]
    engine.assign(two, engine.fork(two))
    engine.drop(engine.join(both, one, 2), ODD, 3, 0)
    engine.drop(both, ODD, 2, 0)
    engine.put(both, 0, one)
    for resident in (*residents, two):
        engine.attend(resident, *random_rows(rng, 7, resident.geometry), True)
        assert resident.ring_k.swapaxes(1, 2).flags.c_contiguous
        assert resident.ring_v.flags.c_contiguous


def test_norms_follow_the_ring(rng: np.random.Generator) -> None:
    """The bound that spares a pass over the logits must hold after commits and after what is undone."""
    geometry = Geometry(4, 2, 8, window=20, sinks=2, landmarks=8)
    state = seal(*random_rows(rng, 60, geometry), geometry)
    engine = DirectEngine()
    resident = engine.upload(geometry, state.planes)
    for rows, commit in ((7, True), (30, False), (25, True), (3, False)):
        engine.attend(resident, *random_rows(rng, rows, geometry), commit)
        np.testing.assert_array_equal(resident.ring_norms, squares(resident.ring_k))
