"""Streams that run long: masses far beyond what float32 counts to, limits of the fold, a million rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import numpy as np
import pytest
from support import Rows, assert_follows, part, paths_of, random_rows, sealed

import cortiq_o1 as o1
from cortiq_o1.planes import (
    FLUSH_ROWS,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_LEN,
    MZ_MAX,
    MZ_RECENT,
    MZ_TOTAL,
    SUB_ROWS,
    T_RECENT,
    T_TOTAL,
)
from cortiq_o1.reference import ReferenceLayer, StepResult
from cortiq_o1.sealing import empty_planes
from cortiq_o1.state import Fold, SealOptions
from cortiq_o1.verification.inputs import make_rows

# A far field with a large mass, to which each row adds exactly 1.

HEAVY = o1.Geometry(4, 2, 8, 4, window=SUB_ROWS, sinks=1, landmarks=4)
BEFORE_FLUSH = 48
"""Rows from the first one on until the recent sums join the totals; chunks of 1, 3 and 16 rows end there."""


def heavy_state(total: int, recent: int) -> o1.LayerState:
    """Landmarks along the first axis, which no key has a part of: logits and maxima are 0, weights 1."""
    planes = empty_planes(HEAVY)
    planes["group_meta"][:, META_LEN] = HEAVY.window
    planes["group_meta"][:, META_FAR_LEN] = 8 * FLUSH_ROWS + recent
    planes["ring_k"][..., 1] = planes["ring_v"][...] = 1.0
    planes["q_tilde"][..., 0] = planes["k_tilde"][..., 0] = 1.0
    planes["mix"][:] = np.eye(HEAVY.landmarks)
    mz, t = planes["far_mz"], planes["t_hat"]
    mz[:, MZ_MAX] = 0.0
    mz[:, MZ_TOTAL], mz[:, MZ_RECENT] = total, recent
    t[:, T_TOTAL], t[:, T_RECENT] = total, recent
    return o1.LayerState(HEAVY, SealOptions(), 10 * FLUSH_ROWS, planes)


def heavy_rows(count: int) -> Rows:
    q = np.ones((count, HEAVY.num_heads, HEAVY.head_dim), np.float32)
    k = np.zeros((count, HEAVY.num_kv_heads, HEAVY.head_dim), np.float32)
    k[..., 1] = 1.0
    return q, k, np.ones((count, HEAVY.num_kv_heads, 4), np.float32)


def assert_mass(layer: o1.Layer, total: int, recent: int) -> None:
    planes = layer.state().planes
    mz, t = planes["far_mz"], planes["t_hat"]
    assert (mz[:, MZ_MAX] == 0.0).all()
    for name, got, want in (
        ("total mass", mz[:, MZ_TOTAL], total),
        ("recent mass", mz[:, MZ_RECENT], recent),
        ("total numerator", t[:, T_TOTAL], total),
        ("recent numerator", t[:, T_RECENT], recent),
    ):
        assert (got == want).all(), f"{name}: {got.min()} to {got.max()}, expected {want}"


# Rows a chunk, and a total so large that as many added to it leave it where it is.
CHUNKS = pytest.mark.parametrize(("size", "total"), [(1, 2**26), (3, 2**26), (16, 2**30)])


@CHUNKS
def test_a_heavy_far_field_loses_no_row(device: o1.Device, size: int, total: int) -> None:
    for way in paths_of(device):
        layer = way.load(heavy_state(total, FLUSH_ROWS - BEFORE_FLUSH))
        for at in range(size, BEFORE_FLUSH + 2 * size + 1, size):
            out = layer.attend(*heavy_rows(size))
            assert np.abs(out - 1.0).max() <= 1e-5
            if at == BEFORE_FLUSH - size:
                assert_mass(layer, total, FLUSH_ROWS - size)
            if at == BEFORE_FLUSH:
                assert_mass(layer, total + FLUSH_ROWS, 0)
        assert_mass(layer, total + FLUSH_ROWS, 2 * size)


@CHUNKS
def test_one_sum_alone_would_lose_every_row(size: int, total: int) -> None:
    heavy = np.float32(total)
    for _ in range(1000):
        heavy += np.float32(size)
    assert heavy == total
    assert heavy + np.float32(FLUSH_ROWS) == total + FLUSH_ROWS


def test_more_rows_than_the_recent_sums_hold(device: o1.Device) -> None:
    """In one call, and what is left over in another."""
    layer = device.load(heavy_state(2**26, 0))
    layer.attend(*heavy_rows(FLUSH_ROWS + SUB_ROWS))
    layer.attend(*heavy_rows(5))
    assert_mass(layer, 2**26 + FLUSH_ROWS, SUB_ROWS + 5)


def test_a_draft_that_is_committed_adds_its_rows_once(device: o1.Device) -> None:
    for way in paths_of(device):
        layer = way.load(heavy_state(2**30, FLUSH_ROWS - 16))
        layer.attend(*heavy_rows(40), commit=False)
        layer.attend(*heavy_rows(20), commit=False, draft="other")
        assert_mass(layer, 2**30, FLUSH_ROWS - 16)
        layer.commit(16, "other")
        assert_mass(layer, 2**30 + FLUSH_ROWS, 0)


# Far fields that stop taking rows.

LIMITED = o1.Geometry(6, 2, 8, 12, window=40, sinks=2, landmarks=8, windows=(40, 24))
STREAM = 64


@pytest.mark.parametrize(
    ("fold", "size"), [("prompt", 1), ("prompt", 5), ("prompt", 33), ("prompt", STREAM), ("never", 20)]
)
def test_the_far_field_closes_inside_a_chunk(
    device: o1.Device, rng: np.random.Generator, fold: Fold, size: int
) -> None:
    """With "prompt" after as many rows as the ring holds: in either group at another row."""
    state = sealed(rng, LIMITED, 100, fold=fold)
    rows = random_rows(rng, STREAM, LIMITED)
    meta = state.planes["group_meta"].astype(int)
    left = meta[:, META_FAR_LIMIT] - meta[:, META_FAR_LEN]
    assert left.tolist() == ([40, 24] if fold == "prompt" else [0, 0])
    for way in paths_of(device):
        layer = way.load(state)
        out = [layer.attend(*part(rows, slice(at, at + size))) for at in range(0, STREAM, size)]
        assert_follows(state, rows, np.concatenate(out))
        assert_closed(layer.state())


@pytest.mark.parametrize(("room", "accepted"), [(0, 0), (1, 1), (6, 3), (16, 16), (17, 18), (40, 24)])
def test_any_limit_inside_a_chunk(
    device: o1.Device, rng: np.random.Generator, room: int, accepted: int
) -> None:
    """At the first row of a chunk, at a middle one, at its last, and in a commit of a part of it."""
    state = sealed(rng, LIMITED, 100)
    meta = state.planes["group_meta"]
    meta[:, META_FAR_LIMIT] = meta[:, META_FAR_LEN] + np.array([room, room // 2], np.uint32)
    rows = random_rows(rng, 48, LIMITED)
    want = ReferenceLayer.from_planes(LIMITED, state.planes).run(*rows)
    for way in paths_of(device):
        layer = way.load(state)
        assert_within(want[:24], layer.attend(*part(rows, slice(24)), commit=False))
        layer.commit(accepted)
        assert_within(want[accepted:], layer.attend(*part(rows, slice(accepted, None))))
        assert_closed(layer.state())


def assert_closed(state: o1.LayerState) -> None:
    meta = state.planes["group_meta"]
    np.testing.assert_array_equal(meta[:, META_FAR_LEN], meta[:, META_FAR_LIMIT])


def assert_within(want: list[StepResult], out: np.ndarray) -> None:
    errors = np.array([r.error(row) for r, row in zip(want, out, strict=True)])
    bounds = np.array([r.bound for r in want])
    assert (errors <= bounds).all(), f"{(errors / bounds).max():.2f} times the bound"


# A million rows.

ENDLESS = o1.Geometry(2, 1, 8, window=SUB_ROWS, sinks=2, landmarks=8)
BLOCK = 10_000
LAST = 1000


def endless_rows(pool: Rows, count: int) -> Iterator[Rows]:
    """Blocks of rows drawn from a pool, the same for all devices."""
    for block in range(count // BLOCK):
        drawn = np.random.default_rng([7, block]).integers(0, len(pool[1]), BLOCK)
        yield tuple(x[drawn] for x in pool)  # type: ignore[misc]


def length_for(device: o1.Device) -> int:
    """A million rows where they take seconds, a hundred thousand on one software Vulkan adapter."""
    if device.backend == "cpu" and device.path == "auto":
        return 1_000_000
    if not device.software and device.backend != "cpu":
        return 1_000_000
    return 100_000 if (device.backend, device.name[:8]) == ("vulkan", "llvmpipe") else BLOCK


def in_pieces(layer: o1.Layer, rows: Rows) -> np.ndarray:
    """Outputs of calls of one row, of a few, and of many in turn."""
    out, at = [], 0
    for size in cycle((1, 1, 5, 64, 129)):
        if at >= len(rows[1]):
            return np.concatenate(out)
        out.append(layer.attend(*part(rows, slice(at, at + size))))
        at += size
    raise AssertionError


@pytest.mark.slow
def test_an_endless_stream_keeps_its_bounds(device: o1.Device) -> None:
    pool = make_rows("clustered", ENDLESS, 4096, 3)
    state = o1.seal(*part(pool, slice(None, None, 16)), ENDLESS)
    layer = device.load(state)
    reference = ReferenceLayer.from_planes(ENDLESS, state.planes)
    count = length_for(device)
    largest = 0.0
    for number, rows in enumerate(endless_rows(pool, count)):
        head = part(rows, slice(LAST if number == 0 else 0))
        tail = part(rows, slice(BLOCK - LAST if number == count // BLOCK - 1 else BLOCK, None))
        middle = part(rows, slice(len(head[1]), BLOCK - len(tail[1])))
        if len(head[1]):
            want = reference.run(*head)
            assert_within(want, in_pieces(layer, head))
            largest = max(r.bound.max() for r in want)
        layer.attend(*middle)
        reference.skip(*middle[1:])
        if len(tail[1]):
            want, out = reference.run(*tail), in_pieces(layer, tail)
            assert_within(want, out)
            worst = max(r.error(row).max() for r, row in zip(want, out, strict=True))
            assert worst <= largest, f"worst error {worst:.2e}, the first rows' bound is {largest:.2e}"
    assert layer.rows == state.rows + count
    assert reference.groups[0].far_len == layer.state().planes["group_meta"][0, META_FAR_LEN]


def test_the_reference_skips_rows_as_it_walks_over_them(rng: np.random.Generator) -> None:
    for fold in ("always", "prompt"):
        state = sealed(rng, LIMITED, 100, fold=fold)
        rows = random_rows(rng, STREAM, LIMITED)
        walked, skipped = (ReferenceLayer.from_planes(LIMITED, state.planes) for _ in range(2))
        walked.run(*rows)
        skipped.skip(*part(rows, slice(50))[1:])
        skipped.skip(*part(rows, slice(50, None))[1:])
        for a, b in zip(walked.groups, skipped.groups, strict=True):
            assert (a.far_len, len(a.ring)) == (b.far_len, len(b.ring))
            np.testing.assert_array_equal(np.array([k for k, _ in a.ring]), np.array([k for k, _ in b.ring]))
            np.testing.assert_allclose(a.far_max, b.far_max, rtol=1e-12)
            np.testing.assert_allclose(a.far_mass, b.far_mass, rtol=1e-12)
            np.testing.assert_allclose(a.far_num, b.far_num, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(a.mass_rounding, b.mass_rounding, rtol=0.3)
