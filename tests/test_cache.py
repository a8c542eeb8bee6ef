"""The layers of a sequence: what is uploaded when, one commit for all, snapshots of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import (
    ODD,
    SHORT,
    Rows,
    assert_follows,
    assert_same_state,
    part,
    random_rows,
    record_calls,
    sealed,
)

import cortiq_o1 as o1

PLAIN = o1.Geometry(4, 2, 8, window=16, sinks=2, landmarks=6)


def attend_all(cache: o1.Cache, rows: int, rng: np.random.Generator, **named: Any) -> dict[int, Rows]:
    """A call on each layer; the rows by layer."""
    given = {}
    for index in cache:
        given[index] = random_rows(rng, rows, cache[index].geometry)
        cache[index].attend(*given[index], **named)
    return given


def submissions(monkeypatch: pytest.MonkeyPatch, device: o1.Device) -> list[tuple[Any, ...]]:
    """Every later submission: of commands on a GPU, of a commit on NumPy."""
    if device.gpu is None:
        return record_calls(monkeypatch, device.engine, "commit")
    return record_calls(monkeypatch, device.engine.context, "submit")


def test_it_is_a_mapping_of_layers(device: o1.Device, rng: np.random.Generator) -> None:
    cache = o1.Cache(device)
    assert (len(cache), list(cache), cache.nbytes, cache.device) == (0, [], 0, device)
    states = {3: sealed(rng), 0: sealed(rng, PLAIN), 7: o1.seal(*random_rows(rng, 4, SHORT), SHORT)}
    for index, state in states.items():
        cache[np.int64(index)] = state
    assert list(cache) == [3, 0, 7]
    assert 3 in cache
    assert 1 not in cache
    for index, state in states.items():
        assert_same_state(cache[index].state(), state)
    assert cache.nbytes == sum(cache[index].nbytes for index in states)
    layer, before = cache[3], cache.nbytes
    del cache[3]
    assert list(cache) == [0, 7]
    assert cache.nbytes == before - layer.nbytes
    for missing in (3, "0", None, [0], False):
        with pytest.raises(KeyError, match=r"not in the cache, which has \[0, 7\]"):
            cache[missing]  # type: ignore[index]
    with pytest.raises(KeyError):
        del cache[3]
    layer.attend(*random_rows(rng, 3, ODD))  # goes on for whoever holds it


def test_what_it_refuses(device: o1.Device, rng: np.random.Generator) -> None:
    cache = o1.Cache(device)
    state = sealed(rng)
    with pytest.raises(o1.StateError, match="the cache is empty"):
        cache.commit(0)
    for index, error in ((-1, o1.ArgumentError), (True, o1.ArgumentTypeError), ("0", o1.ArgumentTypeError)):
        with pytest.raises(error, match=r"^index"):
            cache[index] = state  # type: ignore[index]
    with pytest.raises(o1.ArgumentTypeError, match="expected a LayerState"):
        cache[0] = cache  # type: ignore[assignment]
    with pytest.raises(o1.ArgumentTypeError, match="expected a Device"):
        o1.Cache("cpu")  # type: ignore[arg-type]
    for named, match in (
        ({"reseal_every": 0}, "reseal_every: 0, expected at least 1"),
        ({"reseal_every": 9, "archive": 63}, "archive: 63, expected 64 to 16777216"),
        ({"reseal_every": 9, "archive": 2**40}, "archive: 1099511627776, expected 64 to"),
        ({"archive": 9}, "archive: 9, expected 64 to"),
    ):
        with pytest.raises(o1.ArgumentError, match=match):
            o1.Cache(device, **named)
    with pytest.raises(o1.ArgumentTypeError, match="name: 3, expected a string"):
        cache.snapshot(3)  # type: ignore[arg-type]
    assert len(cache) == 0


def test_only_what_is_new_is_uploaded(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = record_calls(monkeypatch, device.engine, "upload")
    cache, rows = o1.Cache(device), random_rows(rng, 90, ODD)
    state = o1.seal(*rows, ODD)
    for index in (0, 1):
        cache[index] = state
    assert len(uploads) == 2
    attend_all(cache, 5, rng)
    layer, moved = cache[0], cache[0].state()
    cache[0] = state
    cache[0] = o1.seal(*rows, ODD)  # the same again
    assert cache[0] is layer
    assert_same_state(layer.state(), moved)
    assert len(uploads) == 2
    cache[0] = fresh = sealed(rng)
    assert cache[0] is not layer
    assert_same_state(cache[0].state(), fresh)
    cache[0] = state  # that layer came from another one
    assert_same_state(cache[0].state(), state)
    assert len(uploads) == 4
    # A state that has moved is another one too, though of the same seal.
    cache[0] = moved
    assert (cache[0].rows, len(uploads)) == (moved.rows, 5)
    del cache[0]
    cache[0] = moved
    assert len(uploads) == 6


def test_a_refused_layer_leaves_the_old_one(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = o1.Cache(device)
    cache[0] = state = sealed(rng)

    def broken(*_: Any) -> Any:
        raise o1.DeviceMemoryError("no room")

    other = sealed(rng)
    with monkeypatch.context() as patch:
        patch.setattr(device.engine, "upload", broken)
        with pytest.raises(o1.DeviceMemoryError):
            cache[0] = other
    assert_same_state(cache[0].state(), state)
    cache[0] = other
    assert_same_state(cache[0].state(), other)


def test_a_cache_seals_on_its_device(device: o1.Device, rng: np.random.Generator) -> None:
    cache, rows, calls = o1.Cache(device), random_rows(rng, 70, ODD), []
    layer = cache.seal(2, *rows, ODD, progress=lambda done, total: calls.append((done, total)))
    assert cache[2] is layer
    assert layer.epoch == o1.seal(*rows, ODD).epoch
    assert calls[0] == (0, 70)
    assert calls[-1] == (70, 70)
    more = random_rows(rng, 9, ODD)
    state = layer.state()
    assert_follows(state, more, layer.attend(*more))


def test_one_commit_moves_all_layers_in_one_submission(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, single = o1.Cache(device), []
    short = o1.seal(*random_rows(rng, 6, SHORT), SHORT)
    crossing = o1.seal(*random_rows(rng, 15, SHORT), SHORT)
    for index, state in enumerate((sealed(rng), sealed(rng, PLAIN), short, crossing, sealed(rng))):
        cache[index] = state
        single.append(device.load(state))
    given = attend_all(cache, 9, rng, commit=False, draft="x")
    attend_all(cache, 4, rng, commit=False)
    with monkeypatch.context() as patch:
        calls = submissions(patch, device)
        cache.commit(7, "x")
        assert len(calls) == 1
    for index, layer in enumerate(single):
        layer.attend(*part(given[index], slice(7)))
        assert_same_state(cache[index].state(), layer.state())
        assert cache[index].drafts == {}
        assert cache[index].sealed == (index != 2)


def test_a_commit_that_one_layer_refuses_moves_none(device: o1.Device, rng: np.random.Generator) -> None:
    cache = o1.Cache(device)
    states = [sealed(rng), o1.seal(*random_rows(rng, 15, SHORT), SHORT), sealed(rng)]
    for index, state in enumerate(states):
        cache[index] = state
    attend_all(cache, 6, rng, commit=False)
    cache[2].attend(*random_rows(rng, 3, ODD), commit=False)
    cache[0].attend(*random_rows(rng, 3, ODD), commit=False, draft="x")
    with pytest.raises(o1.ArgumentError, match="layer 2: rows: 5, expected 0 to 3"):
        cache.commit(5)
    with pytest.raises(o1.StateError, match="layer 1: commit: no uncommitted rows of draft 'x'"):
        cache.commit(1, "x")
    with pytest.raises(o1.ArgumentTypeError, match="rows: True"):
        cache.commit(True)
    for index, state in enumerate(states):
        assert_same_state(cache[index].state(), state)
    assert [cache[i].drafts for i in cache] == [{"": 6, "x": 3}, {"": 6}, {"": 3}]
    cache.commit(0)
    assert [cache[i].drafts for i in cache] == [{}, {}, {}]
    for index, state in enumerate(states):
        assert_same_state(cache[index].state(), state)


def test_a_cache_goes_back_as_a_whole(device: o1.Device, rng: np.random.Generator) -> None:
    cache = o1.Cache(device)
    states = {0: sealed(rng), 4: o1.seal(*random_rows(rng, 15, SHORT), SHORT)}
    for index, state in states.items():
        cache[index] = state
    snapshot = cache.snapshot("start")
    assert (snapshot.name, list(snapshot), len(snapshot)) == ("start", [0, 4], 2)
    assert snapshot.nbytes == sum(cache[i].snapshot().nbytes for i in cache)
    assert snapshot[4].name == "start"
    attend_all(cache, 9, rng)
    attend_all(cache, 2, rng, commit=False)
    later, moved = cache.snapshot(), {i: cache[i].state() for i in cache}
    cache.restore(snapshot)
    for index, state in states.items():
        assert_same_state(cache[index].state(), state)
        assert cache[index].drafts == {}
    cache.restore(later)
    for index, state in moved.items():
        assert_same_state(cache[index].state(), state)
    cache[0] = sealed(rng)
    before = cache[4].state()
    with pytest.raises(o1.StateError, match="layer 0: snapshot 'start': of epoch"):
        cache.restore(snapshot)
    del cache[0]
    with pytest.raises(o1.StateError, match=r"of layers \[0, 4\], expected \[4\]"):
        cache.restore(snapshot)
    with pytest.raises(o1.ArgumentTypeError, match="expected a CacheSnapshot"):
        cache.restore(snapshot[4])  # type: ignore[arg-type]
    assert_same_state(cache[4].state(), before)


def test_a_restore_that_one_layer_has_no_memory_for_changes_none(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = o1.Cache(device)
    cache[0], cache[1] = sealed(rng), o1.seal(*random_rows(rng, 15, SHORT), SHORT)
    snapshot = cache.snapshot()
    attend_all(cache, 9, rng)
    moved = {i: cache[i].state() for i in cache}
    with monkeypatch.context() as failing:

        def out_of_memory(resident: object) -> None:
            raise o1.DeviceMemoryError("no room")

        failing.setattr(device.engine, "fork", out_of_memory)
        with pytest.raises(o1.DeviceMemoryError):
            cache.restore(snapshot)
    for index, state in moved.items():
        assert_same_state(cache[index].state(), state)
    cache.restore(snapshot)
    assert [cache[i].rows for i in cache] == [layer.rows for layer in snapshot.values()]


def test_rows_are_the_next_position(device: o1.Device, rng: np.random.Generator) -> None:
    cache = o1.Cache(device)
    assert cache.rows == 0
    state = sealed(rng)
    cache[0], cache[1] = state, state
    assert cache.rows == state.rows
    cache[0].attend(*random_rows(rng, 2, ODD))
    with pytest.raises(o1.StateError, match=f"rows: .*{state.rows + 2}, 1: {state.rows}"):
        _ = cache.rows
    cache[1].attend(*random_rows(rng, 2, ODD))
    assert cache.rows == state.rows + 2
