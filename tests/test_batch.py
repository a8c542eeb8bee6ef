"""Sequences in the same dispatches: each gives what it gives alone; they come and go without each other."""

from __future__ import annotations

from collections.abc import Sequence
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
    paths_of,
    random_rows,
    record_calls,
    sealed,
)

import cortiq_o1 as o1
from cortiq_o1.planes import META_LANDMARKS, META_LEN, PLANES, STATE_PLANES, Sizes

PROMPTS = (19, 90, 27, 140, 61)
"""Rings that are not full, just full, begin anywhere; 4 to 9 landmarks."""


def states_of(rng: np.random.Generator, count: int) -> list[o1.LayerState]:
    return [sealed(rng, ODD, rows) for rows in PROMPTS[:count]]


def side_by_side(each: Sequence[Rows]) -> Rows:
    """The rows of every sequence as `Batch.attend` takes them."""
    q, k, v = (np.stack(xs) for xs in zip(*each, strict=True))
    return q, k, v


def few_to_a_binding(device: o1.Device, sequences: int) -> o1.Device:
    """The device, but with room for just so many sequences in a binding."""
    sizes = Sizes.of(ODD.batch(sequences))
    most = max(PLANES[name].nbytes(sizes) for name in STATE_PLANES)
    most = max(
        most, *(PLANES[n].nbytes(Sizes.of(ODD.batch(sequences), 2, 1)) for n in ("scores", "far_rows"))
    )
    limits = o1.Limits(**{**vars(device.limits), "binding_bytes": most})
    return type(device)(device.described, device.path, limits, device.gpu)


def test_the_first_five_differ_in_all_they_can(rng: np.random.Generator) -> None:
    metas = np.array([s.planes["group_meta"][0] for s in states_of(rng, 5)])
    assert metas[:, META_LANDMARKS].tolist() == [4, 9, 4, 9, 7]
    assert metas[:, META_LEN].tolist() == [16, 24, 24, 24, 24]


def assert_like_singles(device: o1.Device, states: Sequence[o1.LayerState], calls: list[int]) -> None:
    rng = np.random.default_rng(7)
    batch, singles = device.load(list(states)), [device.load(state) for state in states]
    assert (len(batch), batch.rows) == (len(states), tuple(s.rows for s in states))
    assert batch.geometry == ODD
    assert batch.device is device
    for count in calls:
        each = [random_rows(rng, count, ODD) for _ in states]
        before = [batch.state(i) for i in range(len(batch))]
        out = batch.attend(*side_by_side(each))
        assert out.shape == (len(states), count, 6, 20)
        assert out.dtype == np.float32
        for i, (rows, single) in enumerate(zip(each, singles, strict=True)):
            assert_follows(before[i], rows, out[i])
            np.testing.assert_array_equal(out[i], single.attend(*rows), err_msg=f"{device.path} {i}")
            assert_same_state(batch.state(i), single.state())
    assert batch.rows == tuple(s.rows + sum(calls) for s in states)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_gives_what_it_gives_alone(device: o1.Device, rng: np.random.Generator, count: int) -> None:
    assert_like_singles(device, states_of(rng, count), [1, 5, 20, 1, 70])


def test_each_gives_what_it_gives_alone_on_every_path(device: o1.Device, rng: np.random.Generator) -> None:
    for way in list(paths_of(device))[1:]:
        assert_like_singles(way, states_of(rng, 3), [1, 20])


def test_sequences_come_and_go(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are where they were, and nobody sends them up again."""
    states = states_of(rng, 5)
    batch, singles = device.load(states[:3]), [device.load(state) for state in states]
    inside = [0, 1, 2]

    def step(count: int) -> None:
        each = [random_rows(rng, count, ODD) for _ in inside]
        out = batch.attend(*side_by_side(each))
        for i, (which, rows) in enumerate(zip(inside, each, strict=True)):
            np.testing.assert_array_equal(out[i], singles[which].attend(*rows))
            assert_same_state(batch.state(i), singles[which].state())

    step(4)
    uploads = record_calls(monkeypatch, device.engine, "upload")
    writes = record_calls(monkeypatch, device.engine.context, "upload") if device.gpu is not None else uploads
    assert batch.join(singles[4]) == 3  # a layer, which is here already and stays as it is
    inside.append(4)
    assert (len(uploads), len(writes)) == (0, 0)
    before = singles[4].state()
    layer = batch.leave(1)
    inside.remove(1)
    assert (len(uploads), len(writes)) == (0, 0)
    assert_same_state(singles[4].state(), before)
    step(5)
    assert batch.join(states[3]) == 3  # a state, which goes up alone
    inside.append(3)
    assert len(uploads) == 1
    assert len(writes) == 1
    step(17)
    # What left goes on by itself, bit for bit, with all that a layer can do.
    assert layer.rows == singles[1].rows
    assert layer.epoch == states[1].epoch
    rows = random_rows(rng, 9, ODD)
    np.testing.assert_array_equal(layer.attend(*rows), singles[1].attend(*rows))
    layer.restore(singles[1].snapshot())
    assert batch.join(layer) == 4
    inside.append(1)
    layer.attend(*rows)  # apart from the copy in the batch
    for index in (4, 0, 1):
        gone = batch.leave(index)
        assert_same_state(gone.state(), singles[inside.pop(index)].state())
        step(1)
    batch.leave(1)
    batch.leave(0)
    assert (len(batch), batch.rows, batch.nbytes) == (0, (), 0)
    assert batch.join(states[2]) == 0
    inside[:] = [2]
    singles[2] = device.load(states[2])
    step(6)


def test_a_batch_larger_than_a_binding(device: o1.Device, rng: np.random.Generator) -> None:
    small = few_to_a_binding(device, 2)
    states = states_of(rng, 5)
    calls: list[int] = []
    batch, singles = small.load(states), [device.load(state) for state in states]
    attend = small.engine.attend

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(args[0].geometry.num_kv_heads // 2)
        return attend(*args, **named)

    small.engine.attend = counted
    inside = list(range(5))

    def step(count: int) -> None:
        each = [random_rows(rng, count, ODD) for _ in inside]
        calls.clear()
        out = batch.attend(*side_by_side(each))
        assert sum(calls) == len(inside)
        assert len(calls) > 1
        for i, (which, rows) in enumerate(zip(inside, each, strict=True)):
            before = singles[which].state()
            assert_follows(before, rows, out[i])
            singles[which] = device.load(batch.state(i))

    step(5)
    assert max(calls) == 2
    assert len(calls) == 3
    gone = batch.leave(2)
    assert_same_state(gone.state(), singles[inside.pop(2)].state())
    step(30)
    assert batch.join(states[0]) == 4
    inside.append(0)
    singles.append(device.load(states[0]))
    inside[-1] = 5
    step(1)
    # A run that fails takes those before it back.
    before = [batch.state(i) for i in range(5)]

    def broken(*args: Any, **named: Any) -> Any:
        if len(calls) == 2:
            raise o1.DeviceError("it broke")
        return counted(*args, **named)

    small.engine.attend = broken
    calls.clear()
    with pytest.raises(o1.DeviceError):
        batch.attend(*side_by_side([random_rows(rng, 8, ODD) for _ in inside]))
    assert len(calls) == 2
    for i, state in enumerate(before):
        assert_same_state(batch.state(i), state)


@pytest.mark.parametrize("accepted", [0, 4, 9, [9, 0, 3], [0, 8, 0], (7, 7, 7)], ids=str)
@pytest.mark.parametrize("small", [False, True], ids=["one run", "several runs"])
def test_commits(device: o1.Device, rng: np.random.Generator, accepted: Any, small: bool) -> None:
    states = states_of(rng, 3)
    batch = (few_to_a_binding(device, 2) if small else device).load(states)
    each = [random_rows(rng, 9, ODD) for _ in states]
    out = batch.attend(*side_by_side(each), commit=False)
    assert batch.pending == 9
    for i, state in enumerate(states):
        assert_same_state(batch.state(i), state)
        assert_follows(state, each[i], out[i])
    batch.commit(accepted)
    assert batch.pending is None
    assert not any(shard.resident.drafts for shard in batch._shards)
    counts = [accepted] * 3 if isinstance(accepted, int) else list(accepted)
    assert batch.rows == tuple(s.rows + n for s, n in zip(states, counts, strict=True))
    for i, (state, count) in enumerate(zip(states, counts, strict=True)):
        single = device.load(state)
        single.attend(*part(each[i], slice(count)))
        assert_same_state(batch.state(i), single.state())
    with pytest.raises(o1.StateError, match="no uncommitted rows"):
        batch.commit(0)


def test_what_a_batch_refuses(device: o1.Device, rng: np.random.Generator) -> None:
    states = states_of(rng, 2)
    batch = device.load(states)
    rows = side_by_side([random_rows(rng, 4, ODD) for _ in states])
    q, k, v = rows
    batch.attend(*rows, commit=False)
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: batch.attend(q[:1], k, v), o1.ArgumentError, "^q: shape"),
        (lambda: batch.attend(q, k[0], v), o1.ArgumentError, "^k: shape"),
        (lambda: batch.attend(q, k, v[:, :2]), o1.ArgumentError, "^v: shape"),
        (lambda: batch.attend(q, k, v * np.nan), o1.ArgumentError, "^v: .* not finite"),
        (lambda: batch.attend(q, k, v, commit=1), o1.ArgumentTypeError, "commit: 1, expected a bool"),
        (lambda: batch.commit(5), o1.ArgumentError, "rows: 5, expected 0 to 4"),
        (lambda: batch.commit([1, 5]), o1.ArgumentError, r"rows\[1\]: 5, expected 0 to 4"),
        (lambda: batch.commit([1]), o1.ArgumentError, "rows: 1 numbers, expected one for each of 2"),
        (lambda: batch.commit("11"), o1.ArgumentTypeError, "rows: '11'"),
        (lambda: batch.commit(bytearray(2)), o1.ArgumentTypeError, r"rows: bytearray"),
        (lambda: batch.commit({3, 1}), o1.ArgumentTypeError, r"rows: \{1, 3\}, expected an integer"),
        (lambda: batch.commit({0: 1, 1: 1}), o1.ArgumentTypeError, "rows: .*, expected an integer"),
        (lambda: batch.commit(np.array(5)), o1.ArgumentError, "rows: 5, expected 0 to 4"),
        (lambda: batch.commit([1, True]), o1.ArgumentTypeError, r"rows\[1\]: True"),
        (lambda: batch.leave(2), o1.ArgumentError, "index: 2, expected 0 to 1"),
        (lambda: batch.state(-1), o1.ArgumentError, "index: -1, expected 0 to 1"),
        (lambda: batch.join(rows), o1.ArgumentTypeError, "expected a LayerState or a Layer"),
        (lambda: batch.join(sealed(rng, SHORT)), o1.ArgumentError, "sequence: a state of"),
    ]
    short = o1.seal(*random_rows(rng, 3, ODD), ODD)
    renewing = o1.Cache(device, reseal_every=9, archive=64)
    renewing[0] = states[0]
    elsewhere = o1.open_device("cpu").load(states[0])
    calls += [
        (lambda: batch.join(short), o1.StateError, "sequence: 3 rows, too short to be sealed"),
        (lambda: batch.join(device.load(short)), o1.StateError, "sequence: 3 rows, too short to be sealed"),
        (lambda: batch.join(renewing[0]), o1.StateError, "archive"),
        (lambda: batch.join(elsewhere), o1.ArgumentError, "sequence: a layer of Device"),
        (lambda: device.load([]), o1.ArgumentError, "an empty list"),
        (lambda: device.load([states[0], 3]), o1.ArgumentTypeError, r"state\[1\]: int"),
        (lambda: device.load([states[0], short]), o1.StateError, r"state\[1\]: 3 rows"),
        (lambda: device.load([states[0], sealed(rng, SHORT)]), o1.ArgumentError, r"state\[1\]: a state of"),
        (lambda: device.load(rows[0]), o1.ArgumentTypeError, "expected a LayerState or a list of them"),
    ]
    for call, error, match in calls:
        with pytest.raises(error, match=match):
            call()
    assert (len(batch), batch.pending) == (2, 4)
    for i, state in enumerate(states):
        assert_same_state(batch.state(i), state)
    batch.commit([2, 3])
    for i, count in enumerate((2, 3)):
        single = device.load(states[i])
        single.attend(q[i, :count], k[i, :count], v[i, :count])
        assert_same_state(batch.state(i), single.state())


def test_what_forgets_the_rows_that_wait(device: o1.Device, rng: np.random.Generator) -> None:
    states = states_of(rng, 2)
    batch = device.load(states)
    rows, none = (side_by_side([random_rows(rng, n, ODD) for _ in states]) for n in (3, 0))
    for forget in (
        lambda: batch.attend(*rows),
        lambda: batch.attend(*none),
        lambda: batch.join(batch.leave(0)),
        lambda: batch.leave(batch.join(states[0])),
    ):
        batch.attend(*rows, commit=False)
        forget()
        assert batch.pending is None
        with pytest.raises(o1.StateError, match="no uncommitted rows"):
            batch.commit(1)
    assert batch.attend(*none, commit=False).shape == (2, 0, 6, 20)
    batch.commit(0)


def test_an_emptied_batch_says_so(device: o1.Device, rng: np.random.Generator) -> None:
    batch = device.load(states_of(rng, 1))
    batch.leave(0)
    for call in (batch.leave, batch.state):
        with pytest.raises(o1.ArgumentError, match="index: 0, the batch is empty"):
            call(0)
