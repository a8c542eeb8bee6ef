"""Uncommitted calls: a commit of any part of any draft does what `attend` of those rows would have done."""

from __future__ import annotations

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
    moving,
    part,
    paths_of,
    random_rows,
    sealed,
)

import cortiq_o1 as o1
from cortiq_o1.planes import META_LEN

WRAPS = {"ring not full": 19, "ring just full": 27, "ring wrapped": 90}
"""Prompts after which the wider ring has room, has none and begins at its first slot, or begins elsewhere."""


def straight(device: o1.Device, state: o1.LayerState, rows: Rows, count: int, more: Rows) -> Any:
    """The moving planes after `count` of the rows, and what comes out of `more` then."""
    layer = device.load(state)
    layer.attend(*part(rows, slice(count)))
    return moving(layer), layer.attend(*more)


def tried(device: o1.Device, state: o1.LayerState, rows: Rows, count: int, more: Rows) -> Any:
    """The same by way of a draft."""
    layer = device.load(state)
    layer.attend(*rows, commit=False)
    layer.commit(count)
    assert layer.rows == state.rows + count
    return moving(layer), layer.attend(*more)


def assert_any_commit(device: o1.Device, state: o1.LayerState, rows: Rows, counts: Any, more: Rows) -> None:
    for count in counts:
        what = f"after {count} of {len(rows[0])} rows on {device.path!r}"
        (planes, out), (want, want_out) = (how(device, state, rows, count, more) for how in (tried, straight))
        assert_same_planes(planes, want, what)
        np.testing.assert_array_equal(out, want_out, err_msg=what)


@pytest.mark.parametrize("prompt", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("count", [1, 2, 5, 17])
def test_any_part_of_a_draft(device: o1.Device, rng: np.random.Generator, count: int, prompt: int) -> None:
    state = sealed(rng, rows=prompt)
    assert (state.planes["group_meta"][:, META_LEN] == (min(prompt - 3, 24), 7)).all()
    rows, more = random_rows(rng, count, ODD), random_rows(rng, 3, ODD)
    assert_any_commit(device, state, rows, range(count + 1), more)


@pytest.mark.parametrize("count", [64, 70])
def test_parts_of_a_draft_of_several_sub_chunks(
    device: o1.Device, rng: np.random.Generator, count: int
) -> None:
    wide = o1.Geometry(4, 2, 8, 12, window=80, sinks=2, landmarks=6, windows=(80, 66))
    for geometry, counts in ((ODD, (1, 7, 8, 24, 25, 63)), (wide, (1, 16, 62, count))):
        rows = random_rows(rng, count, geometry)
        more = random_rows(rng, 3, geometry)
        assert_any_commit(device, sealed(rng, geometry, 95), rows, counts, more)


@pytest.mark.parametrize("prompt", WRAPS.values(), ids=WRAPS)
def test_any_part_of_a_draft_on_every_path(device: o1.Device, rng: np.random.Generator, prompt: int) -> None:
    state = sealed(rng, rows=prompt)
    rows, more = random_rows(rng, 40, ODD), random_rows(rng, 2, ODD)
    ways = list(paths_of(device))[1:]
    assert {way.path for way in ways} in (set(), {"fused", "token", "flash", "stages", "gemm"})
    for way in ways:
        assert_any_commit(way, state, rows, (1, 5, 8, 23, 40), more)


def test_a_draft_longer_than_a_submission(device: o1.Device, rng: np.random.Generator) -> None:
    state = sealed(rng)
    rows, more = random_rows(rng, 600, ODD), random_rows(rng, 2, ODD)
    layer = device.load(state)
    assert_follows(state, rows, layer.attend(*rows, commit=False))
    assert_same_state(layer.state(), state)
    assert_any_commit(device, state, rows, (255, 600), more)


def test_a_tree_of_drafts(device: o1.Device, rng: np.random.Generator) -> None:
    state = sealed(rng)
    layer, other = device.load(state), device.load(state)
    for step, (taken, accepted) in enumerate([("b", 9), ("", 1), ("d", 30), ("a", 5)]):
        lengths = {"a": 5, "b": 17, "c": 1, "d": 30, "e": 8, "": 2}
        branches = {name: random_rows(rng, rows, ODD) for name, rows in lengths.items()}
        before = layer.state()
        for name, rows in branches.items():
            out = layer.attend(*rows, commit=False, draft=name)
            if step == 0:
                assert_follows(before, rows, out)
        assert layer.drafts == lengths
        assert layer.pending == 2
        assert_same_state(layer.state(), before)
        layer.commit(accepted, taken)
        assert layer.drafts == {}
        other.attend(*part(branches[taken], slice(accepted)))
        assert_same_state(layer.state(), other.state())
        for name in lengths:
            with pytest.raises(o1.StateError, match="no uncommitted rows"):
                layer.commit(1, name)


def test_a_name_used_again_is_the_later_draft(device: o1.Device, rng: np.random.Generator) -> None:
    state = sealed(rng)
    layer, other = device.load(state), device.load(state)
    first, second, third = (random_rows(rng, rows, ODD) for rows in (9, 4, 6))
    layer.attend(*first, commit=False, draft="x")
    layer.attend(*third, commit=False, draft="y")
    layer.attend(*second, commit=False, draft="x")
    assert layer.drafts == {"x": 4, "y": 6}
    with pytest.raises(o1.ArgumentError, match="rows: 5, expected 0 to 4"):
        layer.commit(5, "x")
    layer.commit(3, "x")
    other.attend(*part(second, slice(3)))
    assert_same_state(layer.state(), other.state())


def test_a_refused_call_keeps_all_drafts(device: o1.Device, rng: np.random.Generator) -> None:
    state = sealed(rng)
    layer = device.load(state)
    branches = {name: random_rows(rng, 3, ODD) for name in ("", "x")}
    for name, rows in branches.items():
        layer.attend(*rows, commit=False, draft=name)
    q, k, v = branches["x"]
    for commit in (True, False):
        with pytest.raises(o1.ArgumentError, match=r"^k: shape"):
            layer.attend(q, k[:, :1], v, commit=commit, draft="" if commit else "x")
    refusals: list[tuple[Any, Any, type[Exception], str]] = [
        (1, "z", o1.StateError, "no uncommitted rows of draft 'z'"),
        (4, "x", o1.ArgumentError, "rows: 4, expected 0 to 3"),
        (-1, "x", o1.ArgumentError, "rows: -1, expected 0 to 3"),
        (1.0, "x", o1.ArgumentTypeError, "rows: 1.0"),
        (1, None, o1.ArgumentTypeError, "draft: None, expected a string"),
        (1, "\0crossing", o1.ArgumentError, "a name that the layer keeps for itself"),
    ]
    for rows_, name_, error, match in refusals:
        with pytest.raises(error, match=match):
            layer.commit(rows_, name_)
    with pytest.raises(o1.ArgumentTypeError, match="draft: 3, expected a string"):
        layer.attend(q, k, v, commit=False, draft=3)  # type: ignore[arg-type]
    assert layer.drafts == {"": 3, "x": 3}
    assert_same_state(layer.state(), state)
    layer.commit(2, "x")
    other = device.load(state)
    other.attend(q[:2], k[:2], v[:2])
    assert_same_state(layer.state(), other.state())


def test_what_forgets_drafts(device: o1.Device, rng: np.random.Generator) -> None:
    layer = device.load(sealed(rng))
    rows, none = random_rows(rng, 3, ODD), random_rows(rng, 0, ODD)
    snapshot = layer.snapshot()
    for forget in (
        lambda: layer.commit(0),
        lambda: layer.attend(*rows),
        lambda: layer.attend(*none),
        lambda: layer.restore(snapshot),
    ):
        for name in ("", "x"):
            layer.attend(*rows, commit=False, draft=name)
        forget()
        assert layer.drafts == {}
        for name in ("", "x"):
            with pytest.raises(o1.StateError, match="no uncommitted rows"):
                layer.commit(1, name)


def test_drafts_are_counted(device: o1.Device, rng: np.random.Generator) -> None:
    layer = device.load(sealed(rng))
    before = layer.nbytes
    rows = random_rows(rng, 10, ODD)
    layer.attend(*rows, commit=False)
    one = layer.nbytes
    assert one >= before + sum(x.nbytes for x in rows)
    layer.attend(*rows, commit=False, draft="x")
    assert layer.nbytes >= one + sum(x.nbytes for x in rows)
    layer.attend(*random_rows(rng, 0, ODD), commit=False, draft="y")
    assert layer.drafts == {"": 10, "x": 10, "y": 0}
    # A short layer's are on the host as well.
    layer = device.load(o1.seal(*random_rows(rng, 5, SHORT), SHORT))
    for rows in (0, 2):
        given = random_rows(rng, 30, SHORT)
        for name in ("", "x"):
            layer.attend(*given, commit=False, draft=name)
        held = layer.nbytes
        layer.commit(rows)
        assert layer.nbytes <= held - 2 * sum(x[:12].nbytes for x in given)


@pytest.mark.parametrize("taken", ["stays", "edge", "over", "far over"])
def test_drafts_on_both_sides_of_the_seal(device: o1.Device, rng: np.random.Generator, taken: str) -> None:
    """From 10 rows on the seal falls due after 9 more."""
    prompt = random_rows(rng, 10, SHORT)
    state = o1.seal(*prompt, SHORT)
    lengths = {"stays": 5, "edge": 9, "over": 10, "far over": 40}
    branches = {name: random_rows(rng, rows, SHORT) for name, rows in lengths.items()}
    more = random_rows(rng, 12, SHORT)
    for accepted in sorted({1, 5, 9, 10, lengths[taken]} & set(range(lengths[taken] + 1))):
        layer, other = device.load(state), device.load(state)
        outs = {name: layer.attend(*rows, commit=False, draft=name) for name, rows in branches.items()}
        assert (layer.rows, layer.sealed, layer.drafts) == (10, False, lengths)
        layer.commit(accepted, taken)
        assert layer.sealed == (accepted > 9)
        assert layer.drafts == {}
        want = other.attend(*part(branches[taken], slice(accepted)))
        if accepted == lengths[taken]:
            np.testing.assert_array_equal(outs[taken], want)
        assert_same_state(layer.state(), other.state())
        np.testing.assert_array_equal(layer.attend(*more), other.attend(*more))


def test_a_failed_draft_is_gone_and_the_others_stay(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for state in (sealed(rng, SHORT), o1.seal(*random_rows(rng, 10, SHORT), SHORT)):
        layer, other = device.load(state), device.load(state)
        rows = random_rows(rng, 15, SHORT)
        for name in ("x", "y"):
            layer.attend(*rows, commit=False, draft=name)

        def broken(*_: Any) -> Any:
            raise o1.DeviceError("attend: it broke")

        with monkeypatch.context() as patch:
            patch.setattr(device.engine, "attend", broken)
            with pytest.raises(o1.DeviceError, match="it broke"):
                layer.attend(*rows, commit=False, draft="x")
            with pytest.raises(o1.DeviceError, match="it broke"):
                layer.attend(*rows)
        assert layer.drafts == {"y": 15}
        layer.commit(11, "y")
        other.attend(*part(rows, slice(11)))
        assert_same_state(layer.state(), other.state())


def test_names_that_are_wrong_are_told(device: o1.Device, rng: np.random.Generator) -> None:
    layer = device.load(sealed(rng))
    rows = random_rows(rng, 2, ODD)
    layer.attend(*rows, commit=False, draft="left")
    with pytest.raises(o1.StateError, match=r"no uncommitted rows of draft 'right'; there are \{'left': 2\}"):
        layer.commit(1, "right")
    with pytest.raises(o1.StateError, match=r"no uncommitted rows of draft ''; there are \{'left': 2\}"):
        layer.commit(1)
    with pytest.raises(o1.ArgumentError, match="draft: 'left' of a committed call, expected commit=False"):
        layer.attend(*rows, draft="left")
    assert layer.drafts == {"left": 2}


def test_a_committed_call_of_no_rows_frees_the_drafts_memory(
    device: o1.Device, rng: np.random.Generator
) -> None:
    none = random_rows(rng, 0, SHORT)
    for state in (sealed(rng, SHORT), o1.seal(*random_rows(rng, 10, SHORT), SHORT)):
        layer = device.load(state)
        layer.attend(*random_rows(rng, 12, SHORT), commit=False, draft="x")
        layer.attend(*none)
        assert layer.drafts == {}
        # Buffers of an engine's own may stay for the next draft, rows on the host do not.
        fresh = device.load(state)
        fresh.attend(*random_rows(rng, 12, SHORT), commit=False, draft="x")
        fresh.commit(0, "x")
        assert layer.nbytes == fresh.nbytes
