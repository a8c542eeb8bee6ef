"""Rows that pass, kept on the device and handed out in order; a far field made anew from them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support import (
    ODD,
    SHORT,
    Rows,
    assert_follows,
    assert_same_planes,
    assert_same_state,
    encode,
    part,
    random_rows,
    sealed,
)

import cortiq_o1 as o1
from cortiq_o1.planes import META_FAR_LEN
from cortiq_o1.resealing import MIN_ARCHIVED, RESEALED_PLANES

PLAIN = o1.Geometry(4, 2, 8, window=16, sinks=2, landmarks=6)


def assert_captured(found: o1.Captured, layer: int, rows: Rows) -> None:
    """A sealed layer's rows."""
    assert found.layer == layer
    for got, want in zip(found[1:], rows, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want)


def assert_queries(found: o1.Captured, layer: int, q: np.ndarray) -> None:
    """A short layer's."""
    assert found.layer == layer
    assert (found.k, found.v) == (None, None)
    np.testing.assert_array_equal(found.q, q)


def two_layers(device: o1.Device, rng: np.random.Generator) -> o1.Cache:
    cache = o1.Cache(device)
    cache[0], cache[5] = sealed(rng), sealed(rng, PLAIN)
    return cache


def test_halves_are_joined_in_the_order_of_the_stream(device: o1.Device, rng: np.random.Generator) -> None:
    """As a pipeline has them: the second half of layer 0 comes while layer 5 has the first."""
    cache = two_layers(device, rng)
    rows = {index: random_rows(rng, 30, cache[index].geometry) for index in cache}
    passing = [(0, 0, 17), (5, 0, 17), (0, 17, 30), (5, 17, 18), (5, 18, 30)]
    for order in (passing, [passing[i] for i in (0, 2, 1, 3, 4)], [passing[i] for i in (1, 0, 3, 2, 4)]):
        with cache.capture() as capture:
            for index, at, end in order:
                cache[index].attend(*part(rows[index], slice(at, end)))
            held = capture.nbytes
            found = capture.take()
        assert [one.layer for one in found] == list(dict.fromkeys(index for index, _, _ in order))
        for one in found:
            assert_captured(one, one.layer, rows[one.layer])
        assert held >= sum(x.nbytes for x in (*rows[0], *rows[5]))
        assert (capture.nbytes, capture.take()) == (0, [])


def test_what_is_taken_is_gone_and_what_comes_later_is_not(
    device: o1.Device, rng: np.random.Generator
) -> None:
    cache = two_layers(device, rng)
    rows = random_rows(rng, 40, ODD)
    capture = cache.capture()
    assert capture.take() == []
    cache[0].attend(*part(rows, slice(5)))  # not yet
    with capture:
        cache[0].attend(*part(rows, slice(5, 6)))
        cache[0].attend(*part(rows, slice(6, 15)))
        (first,) = capture.take()
        cache[0].attend(*part(rows, slice(15, 20)))
        (second,) = capture.take()
        cache[0].attend(*part(rows, slice(20, 30)))
    cache[0].attend(*part(rows, slice(30, 35)))  # not any more
    (third,) = capture.take()
    for one, where in zip((first, second, third), (slice(5, 15), slice(15, 20), slice(20, 30)), strict=True):
        assert_captured(one, 0, part(rows, where))
    with capture:
        cache[0].attend(*part(rows, slice(35, None)))
    assert_captured(capture.take()[0], 0, part(rows, slice(35, None)))


def test_only_what_is_wanted(device: o1.Device, rng: np.random.Generator) -> None:
    cache = two_layers(device, rng)
    cache[7] = o1.seal(*random_rows(rng, 4, SHORT), SHORT)
    rows = {index: random_rows(rng, 3, cache[index].geometry) for index in cache}
    wanted: list[tuple[dict[str, Any], list[int], bool]] = [
        ({}, [0, 5, 7], True),
        ({"layers": [5, 7]}, [5, 7], True),
        ({"layers": [0], "queries": False}, [0], False),
        ({"queries": False}, [0, 5], False),
        ({"rows": False}, [7], True),
        ({"layers": []}, [], False),
    ]
    for named, layers, wants in wanted:
        with cache.capture(**named) as capture:
            assert (capture.wants_q(7), capture.wants_q(0)) == (wants, False)
            for index in cache:
                cache[index].attend(*rows[index])
            found = capture.take()
        assert [one.layer for one in found] == layers
        for one in found:
            if one.layer == 7:
                assert_queries(one, 7, rows[7][0])
            else:
                assert_captured(one, one.layer, rows[one.layer])
    with pytest.raises(o1.ArgumentTypeError, match="layers: '0'"):
        cache.capture(layers="0")  # type: ignore[arg-type]


def test_only_accepted_rows_pass(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = two_layers(device, rng)
    rows = {index: [random_rows(rng, n, cache[index].geometry) for n in (9, 6, 3)] for index in cache}
    with cache.capture() as capture:
        for index in cache:
            cache[index].attend(*rows[index][0], commit=False)
            cache[index].attend(*rows[index][1], commit=False, draft="x")
        assert capture.take() == []
        with pytest.raises(o1.ArgumentError):
            cache.commit(7, "x")
        cache.commit(5, "x")
        cache[0].attend(*rows[0][2], commit=False)
        cache[0].commit(0)
        with pytest.raises(o1.ArgumentError):
            cache[0].attend(rows[0][0][0], rows[0][1][1], rows[0][0][2])

        def broken(*_: Any, **__: Any) -> Any:
            raise o1.DeviceError("it broke")

        with monkeypatch.context() as patch:
            patch.setattr(device.engine, "attend", broken)
            with pytest.raises(o1.DeviceError):
                cache[0].attend(*rows[0][2])
        cache[0].attend(*rows[0][2])
        first, second = capture.take()
    joined = [np.concatenate([a[:5], b]) for a, b in zip(rows[0][1], rows[0][2], strict=True)]
    assert_captured(first, 0, (joined[0], joined[1], joined[2]))
    assert_captured(second, 5, part(rows[5][1], slice(5)))


@pytest.mark.parametrize("how", ["attend", "row by row", "draft"])
def test_a_seal_inside(device: o1.Device, rng: np.random.Generator, how: str) -> None:
    """Queries up to the 19th row, then all of each row."""
    rows = random_rows(rng, 40, SHORT)
    cache = o1.Cache(device)
    cache[3] = o1.seal(*part(rows, slice(10)), SHORT)
    with cache.capture() as capture:
        if how == "draft":
            cache[3].attend(*part(rows, slice(10, None)), commit=False)
            cache.commit(24)
        else:
            cuts = [10, 34] if how == "attend" else list(range(10, 35))
            for at, end in pairwise(cuts):
                assert capture.wants_q(3) == (at <= 19)
                cache[3].attend(*part(rows, slice(at, end)))
        assert not capture.wants_q(3)
        queries, everything = capture.take()
    assert_queries(queries, 3, rows[0][10:19])
    assert_captured(everything, 3, part(rows, slice(19, 34)))


def test_one_capture_at_a_time(device: o1.Device, rng: np.random.Generator) -> None:
    cache, other = two_layers(device, rng), two_layers(device, rng)
    with cache.capture() as capture:
        with pytest.raises(o1.StateError, match="one is at work on this cache already"), cache.capture():
            pass
        with pytest.raises(o1.StateError, match="one is at work"), capture:
            pass
        with other.capture() as elsewhere:
            other[0].attend(*random_rows(rng, 2, ODD))
        cache[0].attend(*random_rows(rng, 3, ODD))
        assert [len(one.q) for one in elsewhere.take()] == [2]
    with pytest.raises(RuntimeError, match="inside"), cache.capture():
        raise RuntimeError("inside")
    with cache.capture() as again:
        cache[0].attend(*random_rows(rng, 1, ODD))
    assert ([len(one.q) for one in capture.take()], [len(one.q) for one in again.take()]) == ([3], [1])


def test_another_stream_is_another_run(device: o1.Device, rng: np.random.Generator) -> None:
    """A layer that is replaced or restored does not go on where it was."""
    cache = two_layers(device, rng)
    rows = [random_rows(rng, n, ODD) for n in (4, 5, 6, 7)]
    snapshot = cache.snapshot()
    old = cache[0]
    with cache.capture() as capture:
        old.attend(*rows[0])
        cache.restore(snapshot)
        old.attend(*rows[1])
        cache[0] = sealed(rng)
        cache[0].attend(*rows[2])
        new = cache[0]
        del cache[0]
        for layer in (old, new):
            layer.attend(*rows[3])  # the cache's no more
        found = capture.take()
    assert len(found) == 3
    for one, want in zip(found, rows, strict=False):
        assert_captured(one, 0, want)


def test_calls_of_more_rows_than_a_submission(device: o1.Device, rng: np.random.Generator) -> None:
    cache = two_layers(device, rng)
    rows = random_rows(rng, 900, PLAIN)
    with cache.capture() as capture:
        cache[5].attend(*part(rows, slice(3)))
        cache[5].attend(*part(rows, slice(3, 500)))
        cache[5].attend(*part(rows, slice(500, None)), commit=False)
        cache[5].commit(350)
        (one,) = capture.take()
    assert_captured(one, 5, part(rows, slice(850)))


def test_encoded_rows_pass_too(gpu: o1.Device, rng: np.random.Generator) -> None:
    cache = two_layers(gpu, rng)
    parts = [random_rows(rng, n, ODD) for n in (3, 70, 1, 5)]
    with cache.capture() as capture:
        for rows, commit in zip(parts, (True, True, True, False), strict=True):
            encode(gpu, cache[0], rows, commit)
        cache[0].commit(2)
        (one,) = capture.take()
    joined = [np.concatenate([*xs[:3], xs[3][:2]]) for xs in zip(*parts, strict=True)]
    assert_captured(one, 0, (joined[0], joined[1], joined[2]))


def far_only(before: o1.LayerState, after: o1.LayerState) -> None:
    """Nothing but the far field differs: sinks, ring and its place are the same bit for bit."""
    rings = ("ring_k", "ring_v")
    assert_same_planes(*({name: s.planes[name] for name in rings} for s in (before, after)))
    for name in RESEALED_PLANES:
        assert not np.array_equal(before.planes[name], after.planes[name]), name
    assert after.rows == before.rows


@pytest.mark.parametrize("evicted", [False, True])
def test_a_far_field_from_captured_rows(device: o1.Device, rng: np.random.Generator, evicted: bool) -> None:
    cache = o1.Cache(device)
    cache[0] = sealed(rng)
    layer = cache[0]
    with cache.capture() as capture:
        for count in (40, 1, 36, 23):
            layer.attend(*random_rows(rng, count, ODD))
    (found,) = capture.take()
    assert found.k is not None
    assert found.v is not None
    rows: Rows = (found.q, found.k, found.v)
    before = layer.state()
    if evicted:  # all but the widest ring's rows have left every window
        layer.reseal(*part(rows, slice(76)), evicted=True)
    else:
        layer.reseal(*rows)
    state = layer.state()
    far_only(before, state)
    held = np.array([0, 0]) if evicted else np.array([24, 7])
    assert (state.planes["group_meta"][:, 2] == (76 if evicted else 100) - held).all()
    more = random_rows(rng, 30, ODD)
    assert_follows(state, more, layer.attend(*more))
    other = device.load(before)
    other.reseal(*(part(rows, slice(76)) if evicted else rows), evicted=evicted)
    assert other.epoch == layer.epoch
    assert_same_state(other.state(), state)


def test_rows_that_cannot_be_resealed_from(device: o1.Device, rng: np.random.Generator) -> None:
    rows = random_rows(rng, 150, ODD)
    layer = device.load(o1.seal(*part(rows, slice(90)), ODD))
    layer.attend(*part(rows, slice(90, None)))
    before = layer.state()
    q, k, v = part(rows, slice(90, None))
    shifted = v.copy()
    shifted[-1, 1, 3] += 1
    refusals: list[tuple[tuple[Any, ...], bool, type[Exception], str]] = [
        ((q[:-1], k[:-1], v[:-1]), False, o1.ArgumentError, "^k: the last row is not the newest"),
        ((q, k, shifted), False, o1.ArgumentError, "^v: the last row is not the newest"),
        ((q[:0], k[:0], v[:0]), False, o1.ArgumentError, "^k: 0 rows, expected at least"),
        (random_rows(rng, 151, ODD), False, o1.ArgumentError, "^k: 151 rows, the stream has 150"),
        ((q[-31:], k[-31:], v[-31:]), False, o1.ArgumentError, f"31 rows, expected at least {MIN_ARCHIVED}"),
        ((q[:31], k[:31], v[:31]), True, o1.ArgumentError, f"31 rows, expected at least {MIN_ARCHIVED}"),
        ((q, k[:, :1], v), False, o1.ArgumentError, "^k: shape"),
        ((q, k), False, o1.ArgumentTypeError, "expected all of q, k, v, or none of them"),
        ((q, k, v), None, o1.ArgumentTypeError, "evicted: None, expected a bool"),  # type: ignore[list-item]
        ((), False, o1.StateError, "no archive"),
    ]
    for given, evicted, error, match in refusals:
        with pytest.raises(error, match=match):
            layer.reseal(*given, evicted=evicted)
    layer.attend(*random_rows(rng, 2, ODD), commit=False, draft="x")
    with pytest.raises(o1.StateError, match="uncommitted rows"):
        layer.reseal(q, k, v)
    assert layer.drafts == {"x": 2}
    assert_same_state(layer.state(), before)
    assert layer.epoch == before.epoch


def test_a_reseal_does_not_empty_a_far_field(device: o1.Device, rng: np.random.Generator) -> None:
    geometry = o1.Geometry(2, 1, 8, window=40, sinks=1, landmarks=8)
    cache = o1.Cache(device)
    cache[0] = sealed(rng, geometry, 120)
    with cache.capture() as capture:
        cache[0].attend(*random_rows(rng, 41, geometry))
    ((_, q, k, v),) = capture.take()
    before = cache[0].state()
    with pytest.raises(o1.ArgumentError, match="k: 40 rows, all still in the window of group 0"):
        cache[0].reseal(q[1:], k[1:], v[1:])
    assert_same_state(cache[0].state(), before)
    cache[0].reseal(q, k, v)
    assert cache[0].state().planes["group_meta"][0, META_FAR_LEN] == 1


def test_what_a_capture_may_be_asked(device: o1.Device, rng: np.random.Generator) -> None:
    cache = o1.Cache(device)
    cache[0] = sealed(rng)
    assert not cache.capture().wants_q(0)
    assert not cache.capture().wants_q(1)
    with pytest.raises(o1.ArgumentTypeError, match="layers: 3, expected a list of integers"):
        cache.capture(layers=3)  # type: ignore[arg-type]
    for wrong in ("a", b"\0", {0: 1}):
        with pytest.raises(o1.ArgumentTypeError, match=r"layers: .*, expected a list of integers"):
            cache.capture(layers=wrong)  # type: ignore[arg-type]
    with pytest.raises(o1.ArgumentTypeError, match="layers: 'a', expected an integer"):
        cache.capture(layers=["a"])  # type: ignore[list-item]
    for name in ("queries", "rows"):
        with pytest.raises(o1.ArgumentTypeError, match=f"{name}: 'no', expected a bool"):
            cache.capture(**{name: "no"})  # type: ignore[arg-type]
    with pytest.raises(o1.ArgumentTypeError, match=r"layer: \[0\], expected an integer"):
        cache.capture().wants_q([0])  # type: ignore[arg-type]


def test_rows_between_two_entries_are_missing_from_both_runs(
    device: o1.Device, rng: np.random.Generator
) -> None:
    """Joined across the gap they would pass for consecutive, and a reseal would take them."""
    cache = o1.Cache(device)
    cache[0] = sealed(rng, rows=100)
    rows = random_rows(rng, 125, ODD)
    capture = cache.capture()
    with capture:
        cache[0].attend(*part(rows, slice(60)))
    cache[0].attend(*part(rows, slice(60, 120)))
    with capture:
        cache[0].attend(*part(rows, slice(120, None)))
    before, after = capture.take()
    assert_captured(before, 0, part(rows, slice(60)))
    assert_captured(after, 0, part(rows, slice(120, None)))
    with pytest.raises(o1.ArgumentError, match="the last row is not the newest"):
        cache[0].reseal(*before[1:])


def test_no_more_evicted_rows_than_have_left_the_window(device: o1.Device, rng: np.random.Generator) -> None:
    rows = random_rows(rng, 150, ODD)
    layer = device.load(o1.seal(*part(rows, slice(90)), ODD))
    layer.attend(*part(rows, slice(90, None)))
    left = 150 - ODD.sinks - max(ODD.group_windows)
    gone = part(rows, slice(ODD.sinks, ODD.sinks + left + 1))
    before = layer.state()
    with pytest.raises(o1.ArgumentError, match=f"^k: {left + 1} rows, of which .* let go of {left} so far"):
        layer.reseal(*gone, evicted=True)
    assert_same_state(layer.state(), before)
    layer.reseal(*part(gone, slice(left)), evicted=True)
    assert (layer.state().planes["group_meta"][:, META_FAR_LEN] == left).all()
