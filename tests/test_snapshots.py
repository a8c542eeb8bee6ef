"""Snapshots: what moves of a layer, taken back in any order, kept in files, refused where they do not fit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    ODD,
    SHORT,
    assert_same_planes,
    assert_same_state,
    moving,
    part,
    random_rows,
    sealed,
)

import cortiq_o1 as o1
from cortiq_o1.files import read_arrays, sealed_bytes, write_arrays
from cortiq_o1.planes import (
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_LANDMARKS,
    META_LEN,
    MOVING_PLANES,
)

FORMAT = ("cortiq-o1-snapshot", 1)


def test_several_are_restored_in_any_order(device: o1.Device, rng: np.random.Generator) -> None:
    layer = device.load(sealed(rng, rows=24))
    rows = random_rows(rng, 60, ODD)
    cuts = (0, 1, 4, 21, 50)
    snapshots, states, outs = [], [], []
    for at, end in zip(cuts, (*cuts[1:], 60), strict=True):
        snapshots.append(layer.snapshot(f"at {at}"))
        states.append(layer.state())
        outs.append(layer.attend(*part(rows, slice(at, end))))
    for i in (3, 0, 4, 4, 1, 2, 0):
        layer.restore(snapshots[i])
        assert snapshots[i].name == f"at {cuts[i]}"
        assert layer.rows == snapshots[i].rows == 24 + cuts[i]
        assert_same_state(layer.state(), states[i])
        again = layer.attend(*part(rows, slice(cuts[i], (*cuts, 60)[i + 1])))
        np.testing.assert_array_equal(again, outs[i])


def test_a_snapshot_is_as_large_as_what_moves(device: o1.Device, rng: np.random.Generator) -> None:
    marks = o1.Geometry(8, 4, 128, 4, window=8, sinks=2, landmarks=64)
    for geometry in (ODD, marks):
        state = sealed(rng, geometry, 600)
        layer = device.load(state)
        snapshot = layer.snapshot()
        assert snapshot.nbytes == sum(state.planes[name].nbytes for name in MOVING_PLANES)
        assert snapshot.geometry == geometry
        assert snapshot.epoch == layer.epoch == state.epoch
    assert snapshot.nbytes < state.nbytes / 8


def test_a_restore_forgets_drafts_and_a_snapshot_has_none(
    device: o1.Device, rng: np.random.Generator
) -> None:
    state = sealed(rng)
    layer = device.load(state)
    rows = random_rows(rng, 9, ODD)
    layer.attend(*rows, commit=False)
    snapshot = layer.snapshot()
    assert layer.drafts == {"": 9}  # a snapshot keeps them where they are
    layer.attend(*rows, commit=False, draft="x")
    layer.restore(snapshot)
    assert layer.drafts == {}
    assert_same_state(layer.state(), state)
    with pytest.raises(o1.StateError, match="no uncommitted rows"):
        layer.commit(1)


def test_a_snapshot_fits_every_layer_of_its_seal(device: o1.Device, rng: np.random.Generator) -> None:
    state = sealed(rng)
    first, second = device.load(state), device.load(state)
    rows = random_rows(rng, 12, ODD)
    first.attend(*rows)
    second.restore(first.snapshot())
    assert second.rows == first.rows
    assert_same_state(second.state(), first.state())
    second.attend(*rows)  # each moves on its own from here
    snapshot, want = first.snapshot(), first.state()
    np.testing.assert_array_equal(second.attend(*rows).shape, (12, 6, 20))
    assert_same_state(first.state(), want)
    del first
    gc.collect()
    second.restore(snapshot)  # which outlives the layer it was taken of
    assert_same_state(second.state(), want)


def test_files_go_from_any_device_to_any_other(
    device: o1.Device, rng: np.random.Generator, tmp_path: Path
) -> None:
    state = sealed(rng)
    layer, numpy = device.load(state), o1.open_device("cpu").load(state)
    there, back = tmp_path / "there.npz", tmp_path / "back.npz"
    rows = random_rows(rng, 30, ODD)
    layer.attend(*part(rows, slice(20)))
    layer.snapshot("twenty rows on").save(there)
    loaded = o1.Snapshot.load(there)
    assert (loaded.name, loaded.rows, loaded.epoch) == ("twenty rows on", state.rows + 20, state.epoch)
    assert loaded.geometry == ODD
    assert loaded.nbytes == layer.snapshot().nbytes
    numpy.restore(loaded)
    assert numpy.rows == layer.rows
    assert_same_planes(moving(numpy), moving(layer))
    numpy.attend(*part(rows, slice(20, None)))
    numpy.snapshot().save(back)
    layer.attend(*rows, commit=False)
    layer.restore(o1.Snapshot.load(back))
    assert layer.drafts == {}
    assert_same_planes(moving(layer), moving(numpy))
    layer.restore(loaded)  # a loaded one too is there to be taken back more than once
    layer.attend(*part(rows, slice(20, None)))
    assert layer.rows == numpy.rows


def test_a_layer_that_the_device_sealed_has_the_hosts_epoch(
    device: o1.Device, rng: np.random.Generator, tmp_path: Path
) -> None:
    rows = random_rows(rng, 90, ODD)
    layer = device.seal(*rows, ODD)
    state = o1.seal(*rows, ODD)
    assert layer.epoch == state.epoch
    layer.snapshot().save(tmp_path / "s")
    host = o1.open_device("cpu").load(state)
    host.restore(o1.Snapshot.load(tmp_path / "s"))
    assert_same_planes(moving(host), moving(layer))


@pytest.mark.parametrize("short", [False, True], ids=["sealed", "short"])
def test_bad_files_are_refused(rng: np.random.Generator, tmp_path: Path, short: bool) -> None:
    layer = o1.open_device("cpu").load(o1.seal(*random_rows(rng, 10 if short else 60, SHORT), SHORT))
    good, bad = tmp_path / "good", tmp_path / "bad"
    layer.snapshot().save(good)
    raw = good.read_bytes()
    middle = len(raw) // 2
    cut_off = "foreign, truncated or altered"
    contents = [
        (b"PK" + bytes(2000), cut_off),
        (b"", "not a state file"),
        (raw[:-50], cut_off),
        (raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :], "altered: its content"),
        (sealed_bytes(raw[:100]), "not a state file"),
    ]
    layer.state().save(tmp_path / "state")
    contents.append(((tmp_path / "state").read_bytes(), "a file of format 'cortiq-o1-state'"))
    for content, match in contents:
        bad.write_bytes(content)
        with pytest.raises(o1.StateFileError, match=match):
            o1.Snapshot.load(bad)
    header, arrays = read_arrays(good, *FORMAT)
    name = "k" if short else "far_mz"
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"rows": -1}, {}),
        ({"rows": "9"}, {}),
        ({"name": 7}, {}),
        ({"epoch": 7}, {}),
        ({"epoch": "0123456789abcdef" if short else None}, {}),
        ({"version": 2}, {}),
        ({"geometry": {**header["geometry"], "window": 17}}, {}) if not short else ({"rows": 9}, {}),
        ({"rows": 0 if short else 2**70}, {}),
        ({"rows": 10**9}, {}),
        ({}, {"extra": np.zeros(3, np.float32)}),
        ({}, {name: arrays[name][:1]}),
        ({}, {name: arrays[name].astype(np.float64)}),
        ({}, {name: np.where(arrays[name] == arrays[name].flat[5], np.nan, arrays[name]).astype("f4")}),
    ]
    if short:
        changes.append(({}, {name: np.full_like(arrays[name], 1e20)}))
    else:
        for word in (META_LEN, META_EVICTED, META_FAR_LEN):
            meta = arrays["group_meta"].copy()
            meta[0, word] += 1 if word == META_EVICTED else 2**20
            changes.append(({}, {"group_meta": meta}))
    for head, planes in changes:
        write_arrays(bad, {**header, **head}, {**arrays, **planes})
        problem = "reads version 1" if "version" in head else "no layer can have this snapshot"
        with pytest.raises(o1.StateFileError, match=problem):
            o1.Snapshot.load(bad)
    with pytest.raises(OSError, match="absent"):
        o1.Snapshot.load(tmp_path / "absent")
    with pytest.raises(OSError, match="nowhere"):
        layer.snapshot().save(tmp_path / "nowhere" / "s")


@pytest.mark.parametrize("word", [META_FAR_LIMIT, META_LANDMARKS])
def test_a_file_of_another_far_limit_is_refused(
    device: o1.Device, rng: np.random.Generator, tmp_path: Path, word: int
) -> None:
    """`epoch` names these words too, and a file's own word for it is not enough."""
    cache = o1.Cache(device)
    cache[3] = o1.seal(*random_rows(rng, 60, ODD), ODD, fold="prompt")
    cache[3].snapshot("s").save(tmp_path / "good")
    header, arrays = read_arrays(tmp_path / "good", *FORMAT)
    arrays["group_meta"][1, word] -= 1
    write_arrays(tmp_path / "bad", header, arrays)
    before = cache[3].state()
    bad = o1.CacheSnapshot("all", {3: o1.Snapshot.load(tmp_path / "bad")})
    with pytest.raises(o1.StateError, match="layer 3: snapshot 's': its far limit, landmarks in use"):
        cache.restore(bad)
    assert_same_state(cache[3].state(), before)
    cache.restore(o1.CacheSnapshot("all", {3: o1.Snapshot.load(tmp_path / "good")}))


def test_snapshots_are_told_apart_by_identity(device: o1.Device, rng: np.random.Generator) -> None:
    cache = o1.Cache(device)
    cache[0] = sealed(rng)
    first, second = cache.snapshot(), cache.snapshot()
    assert first != second
    assert first in [second, first]  # compares, and finds what is the same
    assert first[0] != second[0]
    assert len({first, second, first[0], second[0]}) == 4
    with pytest.raises(KeyError, match=r"layer 5: not in the snapshot, which has \[0\]"):
        first[5]


def test_what_does_not_fit_is_refused(device: o1.Device, rng: np.random.Generator) -> None:
    layer = device.load(sealed(rng))
    layer.attend(*random_rows(rng, 5, ODD), commit=False)
    before = layer.state()
    other = o1.Geometry(**{**ODD.to_dict(), "landmarks": 8})
    short = o1.seal(*random_rows(rng, 5, ODD), ODD)
    for state, match in (
        (sealed(rng, other), "of a layer of Geometry"),
        (sealed(rng), f"the layer is of {layer.epoch}"),
        (short, "of epoch none"),
    ):
        with pytest.raises(o1.StateError, match=f"snapshot 'x': .*{match}"):
            layer.restore(device.load(state).snapshot("x"))
    for wrong in (before, None):
        with pytest.raises(o1.ArgumentTypeError, match="expected a Snapshot"):
            layer.restore(wrong)  # type: ignore[arg-type]
    with pytest.raises(o1.ArgumentTypeError, match="name: 3, expected a string"):
        layer.snapshot(3)  # type: ignore[arg-type]
    assert_same_state(layer.state(), before)
    assert layer.drafts == {"": 5}


def test_a_reseal_begins_a_new_epoch(device: o1.Device, rng: np.random.Generator) -> None:
    rows = random_rows(rng, 130, ODD)
    layer = device.load(o1.seal(*part(rows, slice(90)), ODD))
    layer.attend(*part(rows, slice(90, None)))
    before = layer.snapshot("before")
    layer.reseal(*part(rows, slice(30, None)))
    after, want = layer.snapshot(), layer.state()
    assert before.epoch != after.epoch == layer.epoch == want.epoch
    with pytest.raises(o1.StateError, match=r"'before': of epoch .* the layer is of"):
        layer.restore(before)
    layer.attend(*part(rows, slice(20)))
    layer.restore(after)
    assert_same_state(layer.state(), want)


def test_a_failing_restore_changes_nothing(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layer = device.load(sealed(rng))
    here = layer.snapshot()
    here.save(tmp_path / "s")
    layer.attend(*random_rows(rng, 8, ODD))
    layer.attend(*random_rows(rng, 8, ODD), commit=False)
    before = layer.state()

    def broken(*_: Any) -> Any:
        raise o1.DeviceMemoryError("no room")

    for name in ("assign", "replaced"):
        monkeypatch.setattr(device.engine, name, broken)
    for snapshot in (here, o1.Snapshot.load(tmp_path / "s")):
        with pytest.raises(o1.DeviceMemoryError):
            layer.restore(snapshot)
        assert_same_state(layer.state(), before)
        assert layer.drafts == {"": 8}


def test_snapshots_on_both_sides_of_the_seal(device: o1.Device, rng: np.random.Generator) -> None:
    rows, other = random_rows(rng, 60, SHORT), random_rows(rng, 60, SHORT)
    layer = device.load(o1.seal(*part(rows, slice(10)), SHORT))
    ten = layer.snapshot("ten")
    assert (ten.epoch, ten.sealed) == (None, False)
    layer.attend(*part(rows, slice(10, 15)))
    fifteen, at_fifteen = layer.snapshot("fifteen"), layer.state()
    layer.attend(*part(rows, slice(15, 40)))
    forty, at_forty = layer.snapshot("forty"), layer.state()
    out = layer.attend(*part(rows, slice(40, None)))
    # Back over the seal, and over it again with other rows: another seal, which the line still knows.
    layer.restore(ten)
    assert (layer.sealed, layer.rows, layer.epoch) == (False, 10, None)
    layer.attend(*part(other, slice(10, 40)))
    elsewhere, at_elsewhere = layer.snapshot(), layer.state()
    assert elsewhere.epoch not in (None, forty.epoch)
    for snapshot, state in ((fifteen, at_fifteen), (forty, at_forty), (elsewhere, at_elsewhere)) * 2:
        layer.restore(snapshot)
        assert_same_state(layer.state(), state)
    layer.restore(forty)
    np.testing.assert_array_equal(layer.attend(*part(rows, slice(40, None))), out)
    layer.restore(fifteen)
    layer.attend(*part(rows, slice(15, 40)))
    assert_same_state(layer.state(), at_forty)


def test_a_short_snapshot_is_its_rows(device: o1.Device, rng: np.random.Generator, tmp_path: Path) -> None:
    rows = random_rows(rng, 30, SHORT)
    layer = device.load(o1.seal(*part(rows, slice(10)), SHORT))
    snapshot = layer.snapshot()
    assert snapshot.nbytes > sum(x[:10].nbytes for x in rows)
    layer.attend(*part(rows, slice(10, 17)))
    snapshot.save(tmp_path / "s")
    loaded = o1.Snapshot.load(tmp_path / "s")
    # A short layer of another stream, on another device and sealed in another way, goes on with those rows.
    host = o1.open_device("cpu").load(o1.seal(*random_rows(rng, 3, SHORT), SHORT, ridge=1e-3))
    host.restore(loaded)
    assert_same_state(host.state(), o1.seal(*part(rows, slice(10)), SHORT, ridge=1e-3))
    near = device.load(o1.seal(*random_rows(rng, 3, SHORT), SHORT, ridge=1e-3))
    near.restore(snapshot)
    for held in (host, near):
        held.attend(*part(rows, slice(10, None)))
    assert near.epoch == host.epoch
    layer.restore(loaded)
    assert_same_state(layer.state(), o1.seal(*part(rows, slice(10)), SHORT))
    sealed_one = device.load(o1.seal(*rows, SHORT))
    for one in (snapshot, loaded):
        with pytest.raises(o1.StateError, match="of epoch none"):
            sealed_one.restore(one)
    with pytest.raises(o1.StateError, match="the layer is of none"):
        layer.restore(sealed_one.snapshot())
