"""Landmarks, mixing matrix and far field from archived rows, against the float64 reference's arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import geometries, random_rows

import cortiq_o1 as o1
from cortiq_o1.planes import (
    ARCHIVE_PLANES,
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_LANDMARKS,
    META_LEN,
    NO_FAR_LIMIT,
    PLANES,
    Sizes,
)
from cortiq_o1.reference import ReferenceLayer, _Group, _mixing
from cortiq_o1.resealing import MIN_ARCHIVED, RESEALED_PLANES, from_archive, resealed
from cortiq_o1.state import SealOptions

FOLDS: tuple[Any, ...] = ("always", "prompt", "never")
GEOMETRY = o1.Geometry(6, 3, 8, 12, window=20, sinks=2, landmarks=9, windows=(20, 7, 12))


def means(x: np.ndarray, m: int) -> np.ndarray:
    """Means of `m` segments, each taken on its own, in float64."""
    cuts = [i * len(x) // m for i in range(m + 1)]
    return np.array([x[a:b].astype(np.float64).mean(axis=0) for a, b in pairwise(cuts)])


def expected_group(
    geometry: o1.Geometry, q: np.ndarray, k: np.ndarray, v: np.ndarray, skip: int, ridge: float = 1e-6
) -> _Group:
    """The reference's group with landmarks of `q (T, H, d)`, `k (T, d)`, all but `skip` rows folded."""
    group = _Group(geometry, 1, NO_FAR_LIMIT)
    m = min(max(len(k) // 8, 4), geometry.landmarks)
    q_tilde, k_tilde = means(q, m).transpose(1, 0, 2), means(k, m)
    logits = geometry.scale32 * (q_tilde @ k_tilde.T)
    shift = logits.max(axis=(1, 2))
    mix = np.array([_mixing(a, ridge) for a in np.exp(logits - shift[:, None, None])])
    group.set_landmarks(q_tilde, k_tilde, mix, shift)
    for t in range(len(k) - skip):
        group.fold(k[t].astype(np.float64), v[t].astype(np.float64))
    return group


def assert_group(geometry: o1.Geometry, planes: dict[str, np.ndarray], g: int, want: _Group) -> None:
    got = ReferenceLayer.from_planes(geometry, planes).groups[g]
    np.testing.assert_allclose(got.k_tilde, want.k_tilde, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got.q_tilde, want.q_tilde, rtol=0, atol=1e-6)
    assert got.far_len == want.far_len
    if want.far_len:
        # At one scale: the stored maximum is rounded, and mass and numerator stand at that.
        at = np.exp(got.far_max + got.shift[:, None] - want.far_max - want.shift[:, None])
        np.testing.assert_allclose(got.far_mass * at, want.far_mass, rtol=1e-5)
        np.testing.assert_allclose(got.far_num * at[..., None], want.far_num, rtol=1e-5, atol=1e-4)
    # M inverts A up to the ridge, however its rounding falls out.
    m = len(got.k_tilde)
    a = np.exp(geometry.scale32 * (got.q_tilde @ got.k_tilde.T) - got.shift[:, None, None])
    gram = a.swapaxes(1, 2) @ a
    lam = 1e-6 * np.trace(gram, axis1=1, axis2=2)[:, None, None] / m
    off = (gram + lam * np.eye(m)) @ got.mix - a.swapaxes(1, 2)
    size = (np.abs(gram) + lam * np.eye(m)) @ np.abs(got.mix)
    assert (np.abs(off) <= 2.0**-23 * m * size + 1e-12).all()


def layer_planes(geometry: o1.Geometry, rng: np.random.Generator, rows: int = 90) -> dict[str, np.ndarray]:
    return o1.seal(*random_rows(rng, rows, geometry), geometry).planes


@given(
    geometry=geometries(max_window=30),
    extra=st.integers(0, 200),
    fold=st.sampled_from(FOLDS),
    seed=st.integers(0, 999),
)
def test_resealed_holds_exactly_the_rows_that_left(
    geometry: o1.Geometry, extra: int, fold: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before = layer_planes(geometry, rng)
    q, k, v = random_rows(rng, MIN_ARCHIVED + extra, geometry)
    meta = before["group_meta"]
    skip = np.minimum(meta[:, META_LEN].astype(int), len(k))
    planes = resealed(geometry, SealOptions(fold=fold), meta, q, k, v, skip)
    assert set(planes) == set(RESEALED_PLANES)
    after = o1.LayerState(geometry, SealOptions(), 0, planes={**before, **planes})  # which checks them
    heads = geometry.heads_per_group
    for g, newest in enumerate(skip):
        own = slice(g * heads, (g + 1) * heads)
        assert_group(geometry, after.planes, g, expected_group(geometry, q[:, own], k[:, g], v[:, g], newest))
        row, folded = planes["group_meta"][g], len(k) - newest
        limits = {"always": NO_FAR_LIMIT, "prompt": folded + meta[g, META_LEN], "never": folded}
        assert (row[META_FAR_LEN], row[META_FAR_LIMIT]) == (folded, limits[fold])
        others = [w for w in range(8) if w not in (META_FAR_LEN, META_FAR_LIMIT, META_LANDMARKS)]
        np.testing.assert_array_equal(row[others], meta[g, others])


def test_nothing_given_is_written(rng: np.random.Generator) -> None:
    meta = layer_planes(GEOMETRY, rng)["group_meta"]
    rows = random_rows(rng, 64, GEOMETRY)
    before = [x.copy() for x in (meta, *rows)]
    resealed(GEOMETRY, SealOptions(), meta, *rows, skip=[3, 0, 63])
    for old, new in zip(before, (meta, *rows), strict=True):
        np.testing.assert_array_equal(old, new)


def test_fewer_landmarks_than_before_leave_none_behind(rng: np.random.Generator) -> None:
    before = layer_planes(GEOMETRY, rng)
    assert before["group_meta"][0, META_LANDMARKS] == 9
    planes = resealed(
        GEOMETRY, SealOptions(), before["group_meta"], *random_rows(rng, MIN_ARCHIVED, GEOMETRY), skip=[0] * 3
    )
    assert (planes["group_meta"][:, META_LANDMARKS] == 4).all()
    for name in ("k_tilde", "q_tilde"):
        assert not planes[name][:, 4:].any()
    assert not planes["t_hat"][:, :, 4:].any()


@pytest.mark.parametrize(
    ("rows", "skip", "message"),
    [
        (31, [0, 0, 0], "q: 31 rows, expected at least 32 to reseal from"),
        (32, [0, 33, 0], "k: 32 rows, expected at least the 33 that are still in the window of group 1"),
    ],
)
def test_too_few_rows_are_refused(rng: np.random.Generator, rows: int, skip: list[int], message: str) -> None:
    meta = layer_planes(GEOMETRY, rng)["group_meta"]
    with pytest.raises(o1.ArgumentError, match=message):
        resealed(GEOMETRY, SealOptions(), meta, *random_rows(rng, rows, GEOMETRY), skip=skip)


def archived(
    geometry: o1.Geometry, room: int, counts: tuple[int, ...], start: int, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], list[tuple[np.ndarray, ...]]]:
    """An archive after `counts[g]` evictions of each group from count `start` on, row by row, and what
    each group then holds, oldest first."""
    sizes = Sizes.of(geometry, archive=room)
    planes = {name: np.full(PLANES[name].dims(sizes), 7e6, np.float32) for name in ARCHIVE_PLANES}
    planes["group_meta"] = layer_planes(geometry, rng)["group_meta"]
    heads, held = geometry.heads_per_group, []
    for g, count in enumerate(counts):
        q, k, v = random_rows(rng, count, geometry)
        own = slice(g * heads, (g + 1) * heads)
        for i in range(count):
            slot = (start + i) % 2**32 % room
            planes["archive_q"][slot, own] = q[i, own]
            planes["archive_k"][g, slot], planes["archive_v"][g, slot] = k[i, g], v[i, g]
        planes["group_meta"][g, META_EVICTED] = (start + count) % 2**32
        held.append((q[-room:, own], k[-room:, g], v[-room:, g]))
    return planes, held


@pytest.mark.parametrize(
    ("room", "counts", "start"),
    [
        (256, (40, 33, 32), 0),  # not yet round
        (64, (64, 65, 200), 17),  # just round, and more than once
        (64, (500, 32, 63), 2**32 - 40),  # the count wraps on the way
        (100, (150, 40, 99), 123_456_789),
    ],
)
def test_an_archive_is_unrolled_group_by_group(
    room: int, counts: tuple[int, ...], start: int, rng: np.random.Generator
) -> None:
    planes, held = archived(GEOMETRY, room, counts, start, rng)
    state = layer_planes(GEOMETRY, rng)
    found = from_archive(GEOMETRY, SealOptions(), planes, np.full(3, start, np.uint32))
    assert found is not None
    for g, rows in enumerate(held):
        assert_group(GEOMETRY, {**state, **found}, g, expected_group(GEOMETRY, *rows, skip=0))
    assert found["group_meta"][:, META_FAR_LEN].tolist() == [min(room, n) for n in counts]


def test_an_archive_of_too_few_rows_waits(rng: np.random.Generator) -> None:
    planes, _ = archived(GEOMETRY, 64, (40, MIN_ARCHIVED - 1, 40), 5, rng)
    assert from_archive(GEOMETRY, SealOptions(), planes, np.full(3, 5, np.uint32)) is None
