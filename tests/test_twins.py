"""The kernels' twins: whole plans on NumPy against the float64 reference, and their manners alone."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import CASES, PLAIN, Array, Planes, assert_close, cut, run, sealed, stream
from support import Rows, geometries

from cortiq_o1.cpu.executor import POISON, run_plan
from cortiq_o1.cpu.twins import TWINS
from cortiq_o1.cpu.twins_flash import far_rows
from cortiq_o1.geometry import Geometry
from cortiq_o1.kernels import KERNELS
from cortiq_o1.paths import ATTEND, COMMIT, PATHS
from cortiq_o1.planes import (
    ARCHIVE_PLANES,
    FLUSH_ROWS,
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    MZ_MAX,
    MZ_RECENT,
    MZ_TOTAL,
    PLANES,
    T_RECENT,
    T_TOTAL,
    TR_WORDS,
    TS_SECTIONS,
    Sizes,
)
from cortiq_o1.planning import commit_plan, plan
from cortiq_o1.plans import Dispatch, base_plane
from cortiq_o1.reference import ReferenceLayer, worst_error
from cortiq_o1.sealing import seal


def test_every_kernel_has_a_twin_of_its_name_and_bindings() -> None:
    assert set(TWINS) == set(KERNELS)
    for name, kernel in KERNELS.items():
        parameters = list(inspect.signature(TWINS[name]).parameters)
        assert parameters == ["p", "grid", *(b.name for b in kernel.bindings)]


each_path = pytest.mark.parametrize("path", PATHS)


@each_path
@pytest.mark.parametrize("case", CASES)
def test_plan_against_the_reference(case: str, path: str) -> None:
    geometry, prompt, fold, calls = CASES[case]
    planes = sealed(geometry, prompt, fold)
    rows = stream(geometry, sum(calls), seed=2)
    got, _ = run(planes, geometry, rows, calls, path=path)
    assert_close(planes, geometry, rows, got)


def _jit(count: int, b: int, start: int = 0) -> Array:
    at = np.arange(start, start + count)
    return (((at * 37 + b * 13 + 3) % 83) / np.float32(83) - np.float32(0.5)).astype(np.float32)


@pytest.mark.parametrize(
    ("d", "m", "w", "sinks", "heads", "prompt", "second_window", "calls"),
    [
        (8, 4, 64, 2, 2, 100, 64, (70, 9)),
        (8, 4, 64, 2, 2, 100, 128, (70, 40)),
        (256, 32, 128, 4, 6, 300, 512, (64, 64)),
        (256, 32, 128, 4, 6, 300, 128, (5, 1)),
    ],
)
def test_geometries_of_the_metal_kernels(
    d: int, m: int, w: int, sinks: int, heads: int, prompt: int, second_window: int, calls: tuple[int, ...]
) -> None:
    """The inputs on which the Metal kernels are held against serial steps."""
    geometry = Geometry(
        2 * heads, 2, d, window=max(w, second_window), sinks=sinks, landmarks=m, windows=(w, second_window)
    )

    def columns(count: int, first: int) -> Array:
        each = [
            _jit(prompt * d, first + h + 20 * g).reshape(prompt, d) for g in range(2) for h in range(count)
        ]
        return np.stack(each, axis=1)

    planes = seal(columns(heads, 3), columns(1, 1), columns(1, 2), geometry).planes
    n = sum(calls)
    rows = (
        _jit(n * 2 * heads * d, 5).reshape(n, 2 * heads, d),
        _jit(n * 2 * d, 6).reshape(n, 2, d),
        _jit(n * 2 * d, 7).reshape(n, 2, d),
    )
    got, _ = run(planes, geometry, rows, list(calls))
    error, part = worst_error(ReferenceLayer.from_planes(geometry, planes).run(*rows), got)
    assert error < 2e-5
    assert part <= 1.0


@pytest.mark.parametrize("case", ["plain", "fm", "windows-differ", "ring-fills", "widths-differ"])
@each_path
def test_any_cut_into_calls_gives_the_same(case: str, path: str) -> None:
    geometry, prompt, fold, _ = CASES[case]
    planes = sealed(geometry, prompt, fold)
    rows = stream(geometry, 45, seed=3)
    ends = []
    for calls in ([45], [1] * 45, [7, 38], [38, 7], [16, 1, 28]):
        got, end = run(planes, geometry, rows, calls, path=path)
        assert_close(planes, geometry, rows, got)
        ends.append(end)
    for end in ends[1:]:
        for name in ("group_meta", "ring_k", "ring_v"):
            assert end[name].tobytes() == ends[0][name].tobytes()
        np.testing.assert_allclose(end["far_mz"], ends[0]["far_mz"], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(end["t_hat"], ends[0]["t_hat"], rtol=2e-5, atol=1e-4)


@each_path
def test_landmarks_and_slots_out_of_use_are_never_read(path: str) -> None:
    geometry = Geometry(4, 2, 8, window=40, sinks=2, landmarks=32, windows=(16, 40))
    planes = sealed(geometry, 34)
    rows = stream(geometry, 30, seed=8)
    want, _ = run(planes, geometry, rows, [30], path=path)
    assert_close(planes, geometry, rows, want)
    spoilt = {name: array.copy() for name, array in planes.items()}
    for g in range(2):
        meta = spoilt["group_meta"][g]
        m, own = int(meta[META_LANDMARKS]), slice(2 * g, 2 * g + 2)
        assert m < 32
        spoilt["k_tilde"][g, m:] = POISON
        for name, at in (
            ("q_tilde", np.s_[own, m:]), ("mix", np.s_[own, m:]), ("mix", np.s_[own, :, m:]),
            ("far_mz", np.s_[own, :, m:]), ("t_hat", np.s_[own, :, m:]),
        ):  # fmt: skip
            spoilt[name][at] = POISON
        held = (meta[META_HEAD] + np.arange(meta[META_LEN])) % geometry.group_windows[g]
        idle = np.setdiff1d(np.arange(geometry.window), held)
        assert len(idle)
        spoilt["ring_k"][g, idle] = POISON
        spoilt["ring_v"][g, idle] = POISON
    got, end = run(spoilt, geometry, rows, [30], path=path)
    assert got.tobytes() == want.tobytes()
    for name in ("far_mz", "t_hat"):  # what is out of use also stays as it was
        m = int(spoilt["group_meta"][0, META_LANDMARKS])
        assert (end[name][:, :, m:] == POISON).all()


@each_path
def test_the_far_limit_closes_within_a_sub_chunk(path: str) -> None:
    planes = sealed(PLAIN, 60)
    far_len = planes["group_meta"][:, META_FAR_LEN].copy()
    planes["group_meta"][:, META_FAR_LIMIT] = far_len + np.array([5, 0])
    rows = stream(PLAIN, 40, seed=9)
    got, end = run(planes, PLAIN, rows, [3, 16, 21], path=path)
    assert_close(planes, PLAIN, rows, got)
    np.testing.assert_array_equal(end["group_meta"][:, META_FAR_LEN], far_len + np.array([5, 0]))
    # The second group folded nothing, so its far field has not moved by a bit.
    assert end["t_hat"][2:].tobytes() == planes["t_hat"][2:].tobytes()
    assert end["far_mz"][2:].tobytes() == planes["far_mz"][2:].tobytes()
    assert end["t_hat"][:2].tobytes() != planes["t_hat"][:2].tobytes()


@each_path
def test_a_late_large_key_leaves_earlier_rows_their_far_field(path: str) -> None:
    planes = sealed(PLAIN, 60)
    rows = stream(PLAIN, 40, seed=10)
    # It leaves the window 16 rows later, in the middle of a sub-chunk, far above the rest.
    rows[1][6] = (
        60.0 * planes["q_tilde"][::2, 0] / np.linalg.norm(planes["q_tilde"][::2, 0], axis=-1)[:, None]
    )
    got, end = run(planes, PLAIN, rows, [40], path=path)
    assert end["far_mz"][:, MZ_MAX].max() > planes["far_mz"][:, MZ_MAX].max() + 30
    assert_close(planes, PLAIN, rows, got)


def unit_masses(far_len: int, total: float, window: int = 16) -> tuple[Geometry, Planes]:
    """A layer on which every row folds with logit 0, hence with weight 1 and value 1."""
    geometry = Geometry(2, 1, 4, window=window, sinks=0, landmarks=4)
    planes = sealed(geometry, 60)
    planes["q_tilde"][:] = 0
    planes["group_meta"][:, META_FAR_LEN] = far_len
    planes["far_mz"][:] = 0
    planes["far_mz"][:, MZ_TOTAL] = total
    planes["t_hat"][:] = 0
    planes["t_hat"][:, T_TOTAL] = total
    planes["ring_v"][:] = 1
    return geometry, planes


def ones(geometry: Geometry, rows: int) -> Rows:
    q, k, v = stream(geometry, rows, seed=11)
    return q, k, np.ones_like(v)


@each_path
def test_small_rows_count_beside_a_large_total(path: str) -> None:
    """Each row is 2^-26 of the total, far below half a unit in its last place."""
    geometry, planes = unit_masses(far_len=FLUSH_ROWS, total=2.0**26)
    got, end = run(planes, geometry, ones(geometry, 300), [1, 2, 297], path=path)
    assert (end["far_mz"][:, MZ_TOTAL] == 2.0**26).all()
    assert (end["far_mz"][:, MZ_RECENT] == 300).all()
    assert (end["t_hat"][:, T_RECENT] == 300).all()
    assert (end["group_meta"][:, META_FAR_LEN] == FLUSH_ROWS + 300).all()
    assert np.float32(2.0**26) + np.float32(1) == np.float32(2.0**26)
    assert_close(planes, geometry, ones(geometry, 300), got)


@each_path
def test_recent_sums_join_the_totals_each_4096_rows(path: str) -> None:
    geometry, planes = unit_masses(far_len=2 * FLUSH_ROWS - 10, total=2.0**26)
    planes["far_mz"][:, MZ_RECENT] = FLUSH_ROWS - 10
    planes["t_hat"][:, T_RECENT] = FLUSH_ROWS - 10
    rows = ones(geometry, 20)
    before = run(planes, geometry, cut(rows, 0, 9), [9], path=path)[1]
    assert (before["far_mz"][:, MZ_RECENT] == FLUSH_ROWS - 1).all()
    assert (before["far_mz"][:, MZ_TOTAL] == 2.0**26).all()
    for calls in ([10], [9, 1], [16]):  # at the very row, and within a sub-chunk
        n = sum(calls)
        got, end = run(planes, geometry, cut(rows, 0, n), calls, path=path)
        # A row that is a sub-chunk of its own joins alone; those after it are recent again.
        later = n - 10 if path in ("fused", "token") else 0
        sums = np.float32(2.0**26) + np.float32(FLUSH_ROWS + n - 10 - later)
        for name, total, recent in (("far_mz", MZ_TOTAL, MZ_RECENT), ("t_hat", T_TOTAL, T_RECENT)):
            assert (end[name][:, total] == sums).all()
            assert (end[name][:, recent] == later).all()
        assert_close(planes, geometry, cut(rows, 0, n), got)


@pytest.mark.parametrize("rows", [1, 20])
@each_path
def test_a_dropped_far_field_takes_no_part_in_the_maximum(rows: int, path: str) -> None:
    """Its maximum is so far above the near logits that their weights would all be zero beside it."""
    planes = sealed(PLAIN, 60)
    planes["mix"] = -np.abs(planes["mix"])
    planes["far_mz"][:, MZ_MAX] += 150
    new = stream(PLAIN, rows, seed=15)
    got, _ = run(planes, PLAIN, new, [rows], path=path)
    assert np.abs(got).max(axis=-1).min() > 0.01
    assert_close(planes, PLAIN, new, got)


@each_path
def test_the_first_fold_meets_an_empty_far_field(path: str) -> None:
    """Its maximum, -LARGE, goes to the first logit without an overflow, and its zero mass stays zero."""
    geometry = Geometry(2, 1, 8, window=40, sinks=0, landmarks=4, windows=None)
    planes = sealed(geometry, 60)
    planes["group_meta"][:, META_FAR_LEN] = 0
    planes["far_mz"][:] = 0
    planes["far_mz"][:, MZ_MAX] = np.float32(-1.7e38)
    planes["t_hat"][:] = 0
    rows = stream(geometry, 41, seed=12)
    got, end = run(planes, geometry, rows, [1, 40], path=path)
    assert_close(planes, geometry, rows, got)
    assert (end["group_meta"][:, META_FAR_LEN] == 41).all()


@each_path
def test_twins_write_only_what_is_theirs(path: str) -> None:
    """On planes with room to spare: what lies past the sub-chunk or the window keeps its bits."""
    geometry, prompt, fold, _ = CASES["ring-fills"]
    planes = sealed(geometry, prompt, fold)
    seen: dict[str, int] = {}

    def hook(dispatch: Dispatch, before: Planes, after: Planes) -> None:
        p = dict(dispatch.params)
        for name, writes in dispatch.uses():
            changed = before[name] != after[name]
            if not writes:
                assert not changed.any()
            elif dispatch.kernel != "o1c_copy":
                seen[dispatch.kernel] = seen.get(dispatch.kernel, 0) + int(changed.sum())
                assert not (changed & ~allowed(name, changed.shape, p, meta)).any(), (dispatch.kernel, name)
        if "group_meta" in after:
            meta[:] = after["group_meta"]

    def allowed(name: str, shape: tuple[int, ...], p: dict[str, Any], meta: Array) -> Array:
        mask = np.zeros(shape, bool)
        k, r0, ns = p.get("k", 1), p["r0"], p["ns"]
        for g in range(p["ng"]):
            length, head, _, window = (int(x) for x in meta[g, :4])
            own, m, j0 = (
                slice(g * p["hpg"], (g + 1) * p["hpg"]),
                int(meta[g, META_LANDMARKS]),
                window - length,
            )
            if name == "far_rows":
                mask[:, own, :m, :k] = True
            elif name == "out":
                mask[r0 : r0 + k, own] = True
            elif name in ("land_scores", "gains"):
                mask[:k, own, :m] = True
            elif name in ("near_max", "row_head", "sum_pieces"):
                mask[:k, own] = True
            elif name in ("panel_k", "panel_v"):
                mask[g] = True  # zeros past the sub-chunk's rows
            elif name in ("panel_q", "panel_scores"):
                mask[own, :k] = True
            elif name == "near_parts":
                mask[:, own, :k] = True
            elif name in ("tok_part", "fu_part"):
                mask[own] = True
            elif name == "fl_rows":
                found = far_rows(p, mask)
                found.rows[:, own, :m, :k] = True
                found.records[g] = True
                found.land[:k, own, :m] = True
            elif name == "fl_far":
                mask[:k, own] = True
            elif name == "fl_parts":
                mask[:, :k, own] = True
            elif name == "tok_record":
                mask[own, :TR_WORDS] = True
                mask[own, TR_WORDS:].reshape(p["hpg"], TS_SECTIONS, p["m"])[:, :, :m] = True
            elif name in ("scores", "evict_weights"):
                for i in range(k):
                    if name == "scores":
                        mask[i, own, : ns + min(window, length + i + 1)] = True
                    else:
                        mask[i, own, j0 : i + 1] = True
            elif name in ("far_mz", "t_hat"):
                mask[own, :, :m] = True
            elif name in ("ring_k", "ring_v"):
                mask[g, (head + length + np.arange(k)) % window] = True
            else:
                assert name == "group_meta"
                mask[g, [META_LEN, META_HEAD, META_FAR_LEN, META_EVICTED]] = True
        return mask

    meta = planes["group_meta"].copy()
    run(planes, geometry, stream(geometry, 40, seed=13), [30, 10], on_dispatch=hook, path=path)
    taken = ATTEND if path == "auto" else (path,)
    taken = [p for p in taken if p == ("flash" if path == "auto" else path)]
    assert set(seen) == {k for p in taken for k in (*ATTEND[p], *COMMIT[p])}
    assert all(seen.values())


@st.composite
def archived(draw: st.DrawFn) -> tuple[Geometry, int, str, list[int], int]:
    geometry = draw(geometries(24))
    longest = 6 if draw(st.booleans()) else 90
    calls = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    fold = draw(st.sampled_from(["always", "prompt", "never"]))
    return geometry, draw(st.sampled_from([64, 71, 200])), fold, calls, draw(st.integers(0, 2**20))


@given(archived(), st.booleans())
@settings(max_examples=25, deadline=None)
@each_path
def test_the_archive_holds_what_left_the_ring_last(
    path: str, layer: tuple[Geometry, int, str, list[int], int], verified: bool
) -> None:
    """Keys and values as the stream had them, the queries of the rows that pushed them out, no more."""
    geometry, archive, fold, calls, seed = layer
    prompt = geometry.exact_rows + 5
    old, new = stream(geometry, prompt, seed), stream(geometry, sum(calls), seed + 1)
    state = dict(seal(*old, geometry, fold=fold).planes)
    planes = {name: array.copy() for name, array in state.items()}
    sizes = Sizes.of(geometry, archive=archive)
    for name in ARCHIVE_PLANES:
        planes[name] = np.full(PLANES[name].dims(sizes), POISON)
    at = 0
    for n in calls:
        archive_rows(planes, geometry, cut(new, at, at + n), path, archive, verified)
        at += n
    _, k, v = (np.concatenate(pair) for pair in zip(old, new, strict=True))
    for g, window in enumerate(geometry.group_windows):
        heads = slice(g * geometry.heads_per_group, (g + 1) * geometry.heads_per_group)
        held, total = (max(0, rows - geometry.sinks - window) for rows in (prompt, len(k)))
        assert state["group_meta"][g, META_EVICTED] == held
        assert planes["group_meta"][g, META_EVICTED] == total
        seen = np.zeros(archive, bool)
        for eviction in range(max(held, total - archive), total):
            slot, row = eviction % archive, geometry.sinks + eviction
            seen[slot] = True
            np.testing.assert_array_equal(planes["archive_k"][g, slot], k[row, g])
            np.testing.assert_array_equal(planes["archive_v"][g, slot], v[row, g])
            np.testing.assert_array_equal(
                planes["archive_q"][slot, heads], new[0][row + window - prompt, heads]
            )
        assert (planes["archive_k"][g, ~seen] == POISON).all()
        assert (planes["archive_v"][g, ~seen] == POISON).all()
        assert (planes["archive_q"][~seen, heads] == POISON).all()


def archive_rows(
    planes: Planes, geometry: Geometry, rows: Rows, path: str, archive: int, verified: bool
) -> None:
    """The rows through a committed plan, or through a commit of what an uncommitted call keeps."""
    n = len(rows[0])
    if verified:
        todo, names = commit_plan(geometry, n, path, archive=archive), ("spec_q", "spec_k", "spec_v")
    else:
        todo, names = plan(geometry, n, path=path, archive=archive), ("q", "k_rows", "v_rows")
    bound = planes | dict(zip(names, rows, strict=True))
    for name in todo.planes:
        if name not in bound:
            bound[name] = np.full(base_plane(name).dims(todo.sizes), POISON, np.float32)
    run_plan(todo, bound)


def test_copy_moves_bits_of_the_range_alone() -> None:
    source = np.frombuffer(np.arange(0x7F800001, 0x7F800001 + 24, dtype=np.uint32), np.float32)  # all NaN
    target = np.zeros(24, np.float32)
    TWINS["o1c_copy"]({"count": 2, "src_at": 1, "dst_at": 3, "pad0": 0}, (1, 1, 1), source, target)
    bits = target.view(np.uint32)
    np.testing.assert_array_equal(bits[12:20], source.view(np.uint32)[4:12])
    assert not bits[:12].any()
    assert not bits[20:].any()


def test_copy_ends_with_a_plane_that_is_no_whole_vec4() -> None:
    source, target = np.arange(15, dtype=np.float32).reshape(1, 3, 5), np.zeros((1, 3, 5), np.float32)
    TWINS["o1c_copy"]({"count": 4, "src_at": 0, "dst_at": 0, "pad0": 0}, (1, 1, 1), source, target)
    np.testing.assert_array_equal(target, source)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Geometry, int, str, list[int], int]:
    geometry = draw(geometries(24))
    prompt = geometry.exact_rows + draw(st.integers(1, 40))
    fold = draw(st.sampled_from(["always", "prompt", "never"]))
    calls = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    return geometry, prompt, fold, calls, draw(st.integers(0, 2**20))


@given(layers())
@settings(max_examples=40, deadline=None)
@each_path
def test_any_layer(path: str, layer: tuple[Geometry, int, str, list[int], int]) -> None:
    geometry, prompt, fold, calls, seed = layer
    planes = sealed(geometry, prompt, fold, seed)
    rows = stream(geometry, sum(calls), seed + 1)
    got, _ = run(planes, geometry, rows, calls, path=path, shuffle=np.random.default_rng(seed))
    assert_close(planes, geometry, rows, got)
