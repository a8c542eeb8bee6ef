"""Barriers: the planner against the naive checker, and both against what wgpu derives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import geometries

from cortiq_o1 import hazards
from cortiq_o1.errors import ArgumentError, GeometryError
from cortiq_o1.geometry import Geometry
from cortiq_o1.paths import PATHS
from cortiq_o1.planes import ARCHIVE_PLANES, PENDING_PLANES, PLANES, SUB_ROWS, Sizes
from cortiq_o1.planning import (
    Limits,
    block_rows,
    check_state_fits,
    chunk_rows,
    commit_plan,
    plan,
    serves,
    sub_chunks,
)
from cortiq_o1.plans import Barrier, Dispatch, Plan, plane_bytes

SMALL = Geometry(4, 2, 8, window=16, sinks=2, landmarks=4)
GEOMETRIES = {
    "small": SMALL,
    "one-head-window-1": Geometry(1, 1, 4, window=1, sinks=0, landmarks=5),
    "windows-differ": Geometry(6, 2, 16, 8, window=40, sinks=1, landmarks=7, windows=(40, 9), rect="fm"),
    "llama": Geometry(32, 8, 128),
    "width-256": Geometry(12, 2, 256, window=512, sinks=4),
}


def all_plans(geometry: Geometry, rows: int, path: str = "auto", archive: int = 0) -> list[Plan]:
    return [
        plan(geometry, rows, True, path, archive=archive),
        plan(geometry, rows, False, path, archive=archive),
        commit_plan(geometry, rows, path, archive=archive),
    ]


LONGEST = {"auto": 144, "stages": 130, "gemm": 130, "flash": 130, "fused": 9, "token": 9}
"""Rows of the longest picked plan: pairs of dispatches are looked at one by one."""
# Of auto's, 65 rows end in a sub-chunk of one row, 71 in one of seven, 144 in one of sixteen.
PICKED = [
    pytest.param(p, id=f"{name}-{path}-{rows}-{kind}")
    for name, geometry in GEOMETRIES.items()
    for path in PATHS
    for rows in (1, 2, 9, 65, 71, 130, 144)
    if rows <= min(5 * geometry.min_window, LONGEST[path]) and serves(path, geometry, Limits())
    for p, kind in zip(all_plans(geometry, rows, path), ("commit", "verify", "accept"), strict=True)
]


PICKED += [
    pytest.param(p, id=f"{name}-{path}-{rows}-{kind}-archive")
    for name in ("small", "windows-differ")
    for path in PATHS
    for rows in (1, 9, 28)
    if rows <= LONGEST[path]
    for p, kind in zip(
        all_plans(GEOMETRIES[name], rows, path, 100), ("commit", "verify", "accept"), strict=True
    )
]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    geometry = draw(geometries(80))
    path = draw(st.sampled_from([p for p in PATHS if serves(p, geometry, Limits())]))
    a_row_at_a_time = path in ("fused", "token")
    rows = draw(st.integers(1, 12 if a_row_at_a_time else 4 * min(SUB_ROWS, geometry.min_window)))
    archive = draw(st.sampled_from([0, SUB_ROWS, 99]))
    return draw(st.sampled_from(all_plans(geometry, rows, path, archive)))


def assert_sound(p: Plan) -> None:
    assert hazards.conflicts(p), "a plan without hazards proves nothing"
    assert hazards.missing(p) == []
    assert hazards.needless(p) == []
    assert hazards.check(p) == []
    assert Plan.from_json(p.to_json()) == p


def assert_objects(p: Plan) -> None:
    """The checker sees every single barrier go missing."""
    for b, barrier in enumerate(p.barriers):
        less = hazards.without_barrier(p, b)
        assert len(less.barriers) == len(p.barriers) - 1
        assert {c.plane for c in hazards.missing(less)} >= set(barrier.planes)
        if b % 8 == 0:
            assert any(problem.startswith("no barrier between") for problem in hazards.check(less))


@pytest.mark.parametrize("p", PICKED)
def test_picked_plan(p: Plan) -> None:
    assert_sound(p)
    assert_objects(p)


@given(plans())
@settings(max_examples=40, deadline=None)
def test_any_plan(p: Plan) -> None:
    assert_sound(p)
    if len(p.barriers) < 20:
        assert_objects(p)


def test_conflicts_of_one_row() -> None:
    """Counted by hand for the stages that share scores and row_head."""
    p = plan(SMALL, 1, path="stages")
    names = [d.kernel for d in p.dispatches]
    shared = [
        (names[c.first], names[c.second]) for c in hazards.conflicts(p) if c.plane in ("scores", "row_head")
    ]
    assert sorted(shared) == sorted(
        [
            ("o1c_score", "o1c_max"),
            ("o1c_score", "o1c_soft"),
            ("o1c_score", "o1c_sum"),
            ("o1c_max", "o1c_soft"),
            ("o1c_soft", "o1c_sum"),
            ("o1c_far", "o1c_soft"),
            ("o1c_far", "o1c_add"),
            ("o1c_soft", "o1c_add"),
        ]
    )


def test_implied_of_one_row() -> None:
    """What wgpu waits for, dispatch by dispatch, as its tracker goes through the bindings."""
    p = plan(SMALL, 1, path="stages")
    waits = dict(zip((d.kernel for d in p.dispatches), map(set, hazards.implied(p)), strict=True))
    assert waits == {
        "o1c_far_e": set(),
        "o1c_score": set(),
        "o1c_land": set(),
        "o1c_max": {"scores"},
        "o1c_far": {"far_rows", "land_scores", "near_max"},
        "o1c_soft": {"scores", "row_head"},
        "o1c_sum": {"scores"},
        "o1c_add": {"sum_pieces", "row_head", "gains", "evict_weights"},
        "o1c_far_commit": {"far"},
        "o1c_ring_commit": {"ring"},
        "o1c_meta": {"group_meta"},
    }


@pytest.mark.parametrize("commit", [True, False])
def test_near_and_far_of_one_row_do_not_wait_for_each_other(commit: bool) -> None:
    p = plan(SMALL, 1, commit, path="token")
    (stage,) = (s for s in p.stages() if any(d.kernel == "o1c_tok_near" for d in s))
    assert "o1c_tok_far" in {d.kernel for d in stage}
    waits = dict(zip((d.kernel for d in p.dispatches), hazards.implied(p), strict=True))
    assert not waits["o1c_tok_near"]
    assert not waits["o1c_tok_far"]
    merge = {"tok_part", "tok_record"}
    assert set(waits["o1c_tok_merge"]) == merge
    # group_meta, ring and far field turn from read to written; tok_record stays read.
    if commit:
        assert set(waits["o1c_tok_commit"]) == {"group_meta", "ring", "far"}


@pytest.mark.parametrize("commit", [True, False])
def test_near_and_far_of_a_chunk_do_not_wait_for_each_other(commit: bool) -> None:
    p = plan(SMALL, 16, commit, path="flash")
    (stage,) = (s for s in p.stages() if any(d.kernel == "o1c_fl_near" for d in s))
    assert [d.kernel for d in stage] == ["o1c_fl_near", "o1c_fl_far"]
    waits = dict(zip((d.kernel for d in p.dispatches), hazards.implied(p), strict=True))
    # The near part binds what the far part waits for, and so waits for it first.
    assert set(waits["o1c_fl_near"]) == {"fl_rows"}
    assert not waits["o1c_fl_far"]
    assert set(waits["o1c_fl_merge"]) == {"fl_far", "fl_parts"}


@pytest.mark.parametrize("commit", [True, False])
def test_a_fused_token_is_two_dispatches(commit: bool) -> None:
    p = plan(SMALL, 1, commit, path="fused")
    row = [d.kernel for d in p.dispatches if d.kernel != "o1c_copy"]
    assert row == ["o1c_fu_read", "o1c_fu_move"]
    waits = dict(zip((d.kernel for d in p.dispatches), hazards.implied(p), strict=True))
    assert not waits["o1c_fu_read"]
    assert set(waits["o1c_fu_move"]) == {"group_meta", "fu_part", "ring", "far"}
    assert [dict(d.params)["moves"] for d in p.dispatches if d.kernel in row] == [int(commit)] * 2


# The archive.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 2, 20, 33])
def test_an_archive_takes_each_committed_sub_chunk_and_waits_for_nothing(path: str, rows: int) -> None:
    limits, archive = Limits(), SUB_ROWS
    pairs = [
        (plan(SMALL, rows, True, path), plan(SMALL, rows, True, path, archive=archive)),
        (commit_plan(SMALL, rows, path), commit_plan(SMALL, rows, path, archive=archive)),
    ]
    for without, with_archive in pairs:
        rest = [[d for d in stage if d.kernel != "o1c_archive"] for stage in with_archive.stages()]
        assert rest == without.stages()
        chunk = chunk_rows(SMALL, rows, path, limits)
        taken = [dict(d.params) for d in with_archive.dispatches if d.kernel == "o1c_archive"]
        assert [(p["r0"], p["k"]) for p in taken] == list(sub_chunks(rows, chunk))
        assert all(p["archive"] == archive for p in taken)
        last = [stage[-1].kernel for stage in with_archive.stages()[:-1]]
        assert last.count("o1c_archive") == len(taken), "it is the last before the commit's barrier"
        each = zip(with_archive.dispatches, hazards.implied(with_archive), strict=True)
        waits = [set(planes) for d, planes in each if d.kernel == "o1c_archive"]
        # Nor does wgpu wait, but for what the sub-chunk before in the same submission wrote.
        assert not waits[0]
        assert all(planes <= {*ARCHIVE_PLANES, "ring_v"} for planes in waits)
    queries = {d.planes[1] for d in pairs[1][1].dispatches if d.kernel == "o1c_archive"}
    assert queries == {"spec_q"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 33])
def test_an_uncommitted_call_keeps_all_rows_and_archives_nothing(path: str, rows: int) -> None:
    p = plan(SMALL, rows, False, path, archive=SUB_ROWS)
    assert p.dispatches == plan(SMALL, rows, False, path).dispatches
    assert not any(d.kernel == "o1c_archive" for d in p.dispatches)
    copies = {d.planes for d in p.dispatches if d.kernel == "o1c_copy"}
    assert copies >= {("q", "spec_q"), ("k_rows", "spec_k"), ("v_rows", "spec_v")}
    assert set(PENDING_PLANES) <= set(p.planes)


def test_an_archive_written_without_a_commit_is_found() -> None:
    p = replace(plan(SMALL, 3, path="stages", archive=SUB_ROWS), commit=False)
    for plane in ARCHIVE_PLANES:
        assert any(f"writes {plane}, though the state must stay" in problem for problem in hazards.check(p))


@pytest.mark.parametrize("archive", [-1, 1, SUB_ROWS - 1])
def test_an_archive_too_short_for_a_sub_chunk_is_refused(archive: int) -> None:
    data = json.loads(plan(SMALL, 3, archive=SUB_ROWS).to_json())
    with pytest.raises(ArgumentError, match=f"archive: {archive}, expected"):
        plan(SMALL, 3, archive=archive)
    with pytest.raises(ArgumentError, match=f"archive: {archive}, expected"):
        commit_plan(SMALL, 3, archive=archive)
    with pytest.raises(ArgumentError, match=f"archive: {archive}, expected"):
        Plan.from_json(json.dumps(data | {"archive": archive}))


@pytest.mark.parametrize("commit", [True, False])
def test_an_archive_past_a_binding_is_refused(commit: bool) -> None:
    message = r"archive_q: \d+ bytes, .*; lower archive, head_dim or num_heads"
    fits = Limits().binding_bytes // (4 * 4 * 8)
    assert plan(SMALL, 1, commit, archive=fits).archive == fits
    with pytest.raises(GeometryError, match=message):
        plan(SMALL, 1, commit, archive=fits + 1)
    with pytest.raises(GeometryError, match=message):
        commit_plan(SMALL, 1, archive=fits + 1)
    check_state_fits(SMALL, Limits(), fits)
    with pytest.raises(GeometryError, match=message):
        check_state_fits(SMALL, Limits(), fits + 1)


def test_a_plan_written_before_there_were_archives_still_loads() -> None:
    p = plan(SMALL, 3)
    data = json.loads(p.to_json())
    assert data.pop("archive") == 0
    assert Plan.from_json(json.dumps(data)) == p


def test_auto_takes_each_sub_chunk_on_the_path_of_its_rows() -> None:
    geometry = GEOMETRIES["llama"]
    for rows, expected in ((64 + 1, ["flash", "fused"]), (64 + 7, ["flash", "flash"])):
        marks = {"o1c_fl_near": "flash", "o1c_score": "stages", "o1c_fu_move": "fused"}
        for commit in (True, False):
            found = [marks[d.kernel] for d in plan(geometry, rows, commit).dispatches if d.kernel in marks]
            assert found == expected
        accept = {d.kernel for d in commit_plan(geometry, rows).dispatches}
        commits = {"flash": "o1c_fl_commit", "fused": "o1c_fu_move"}
        assert accept & set(commits.values()) == {commits[path] for path in expected}


def test_redundant_waits_are_the_reused_planes() -> None:
    """One sub-chunk has few; the next one overwrites scratch that earlier barriers have ordered."""
    one, two = plan(SMALL, 16, path="stages"), plan(SMALL, 32, path="stages")
    per_chunk = len(one.dispatches)
    for p in (one, two):
        waits = hazards.redundant_waits(p)
        barrier_at = {d for d in range(len(p.dispatches)) if d and not _same_stage(p, d - 1, d)}
        assert all(planes and d not in barrier_at for d, planes in waits)
        # Nothing but the plan's own barriers and these makes wgpu wait.
        assert barrier_at | {d for d, _ in waits} == {d for d, w in enumerate(hazards.implied(p)) if w}
    later = {plane for d, planes in hazards.redundant_waits(two) if d >= per_chunk for plane in planes}
    assert later & {"scores", "land_scores"}


def _same_stage(p: Plan, a: int, b: int) -> bool:
    return any(p.dispatches[a] in stage and p.dispatches[b] in stage for stage in p.stages())


def test_needless_barrier_is_found() -> None:
    p = plan(SMALL, 3, path="stages")
    extra = replace(p, steps=(p.steps[0], Barrier(("scores",)), *p.steps[1:]))
    assert hazards.missing(extra) == []
    assert hazards.needless(extra) == [0]
    assert "barrier 0 orders nothing" in hazards.check(extra)
    doubled = replace(p, steps=(*p.steps, Barrier(("out",))))
    assert hazards.needless(doubled) == [len(p.barriers)]


def test_barrier_with_the_wrong_reason_is_found() -> None:
    p = plan(SMALL, 3, path="stages")
    at = next(n for n, step in enumerate(p.steps) if isinstance(step, Barrier))
    wrong = replace(p, steps=(*p.steps[:at], Barrier(("out",)), *p.steps[at + 1 :]))
    assert hazards.missing(wrong) == []
    assert any("barrier 0 names ['out']" in problem for problem in hazards.check(wrong))


def test_plan_that_does_not_fit_the_table_is_found() -> None:
    p = plan(SMALL, 3, path="stages")
    at, first = next((n, s) for n, s in enumerate(p.steps) if isinstance(s, Dispatch))
    grid = replace(p, steps=(*p.steps[:at], replace(first, grid=(1, 1, 1)), *p.steps[at + 1 :]))
    assert any("has grid (1, 1, 1)" in problem for problem in hazards.check(grid))
    params = replace(p, steps=(*p.steps[:at], replace(first, params=first.params[1:]), *p.steps[at + 1 :]))
    assert any("has parameters" in problem for problem in hazards.check(params))
    gone = replace(p, steps=p.steps[:at] + p.steps[at + 1 :])
    assert any("reads far_rows, which nothing has written" in problem for problem in hazards.check(gone))
    assert any("the state must stay" in problem for problem in hazards.check(replace(p, commit=False)))


@given(geometries(80), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_sub_chunks(geometry: Geometry, rows: int) -> None:
    p = plan(geometry, rows)
    assert 1 <= p.chunk <= min(SUB_ROWS, geometry.min_window, rows)
    seen = [r for r0, k in sub_chunks(rows, p.chunk) for r in range(r0, r0 + k)]
    assert seen == list(range(rows))
    last = ("o1c_add", "o1c_gadd", "o1c_tok_merge", "o1c_fu_move", "o1c_fl_merge")
    found = [dict(s.params) for s in p.dispatches if s.kernel in last]
    assert [(d["r0"], d.get("k", 1)) for d in found] == list(sub_chunks(rows, p.chunk))


def test_scratch_that_does_not_fit_shortens_the_sub_chunk() -> None:
    geometry = Geometry(64, 4, 64, window=16384, sinks=4)
    limits = Limits()
    chunk = chunk_rows(geometry, 64, "auto", limits)
    assert 1 < chunk < SUB_ROWS

    def fits(kcap: int) -> bool:
        sizes = Sizes.of(geometry, 64, kcap)
        scratch = (p.name for p in PLANES.values() if p.role in ("scratch", "own"))
        return all(plane_bytes(name, sizes) <= limits.binding_bytes for name in scratch)

    assert fits(chunk)
    assert not fits(chunk + 1)
    p = plan(geometry, 64)
    assert all(size <= limits.binding_bytes for size in p.planes.values())
    assert (
        block_rows(geometry, limits) % chunk_rows(geometry, block_rows(geometry, limits), "auto", limits) == 0
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 8, "num_kv_heads": 8, "head_dim": 512, "window": 16384}, r"ring_k: .*lower window"),
        (
            {"num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "value_dim": 512, "window": 16384},
            r"ring_v: .*lower window, value_dim",
        ),
        (
            {"num_heads": 2048, "num_kv_heads": 1, "head_dim": 512, "landmarks": 64, "window": 1},
            r"q_tilde: .*lower landmarks, head_dim or num_heads",
        ),
    ],
)
def test_planes_past_a_binding_raise(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        plan(Geometry(**sizes), 1)


def test_rows_past_a_binding_raise() -> None:
    with pytest.raises(GeometryError, match=r"q: .*lower rows"):
        plan(Geometry(32, 8, 512, window=64), 4096)


def test_grid_past_the_limit_raises() -> None:
    with pytest.raises(GeometryError, match=r"num_heads: o1c_.* needs a grid"):
        plan(Geometry(70_000, 1, 4, landmarks=4, window=1, sinks=0), 1)


def test_json_of_something_else_raises() -> None:
    for text in ("", "[]", "{}", '{"format": "cortiq-o1-plan", "version": 2}'):
        with pytest.raises(ArgumentError, match="not a plan"):
            Plan.from_json(text)
