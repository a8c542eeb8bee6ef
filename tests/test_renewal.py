"""Far fields that renew themselves from what left the window, on every device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    ODD,
    SHORT,
    Rows,
    assert_same_planes,
    assert_same_state,
    encode,
    part,
    random_rows,
    sealed,
)

import cortiq_o1 as o1
from cortiq_o1.planes import META_EVICTED, META_HEAD, META_LEN
from cortiq_o1.resealing import from_archive


class Record:
    """What left each group's ring, kept on the host by arithmetic alone, laid out as an archive."""

    def __init__(self, state: o1.LayerState, room: int) -> None:
        meta = state.planes["group_meta"].astype(int)
        self.geometry, self.room, self.options = state.geometry, room, state.options
        self.rings = [
            [
                tuple(state.planes[n][g, (meta[g, META_HEAD] + x) % window] for n in ("ring_k", "ring_v"))
                for x in range(meta[g, META_LEN])
            ]
            for g, window in enumerate(state.geometry.group_windows)
        ]
        self.began = state.planes["group_meta"][:, META_EVICTED].copy()
        self.left = self.began.astype(int)
        nh, g = state.geometry.num_heads, state.geometry.num_kv_heads
        widths = {"q": state.geometry.head_dim, "k": state.geometry.head_dim, "v": state.geometry.value_dim}
        self.q = np.zeros((room, nh, widths["q"]), np.float32)
        self.k, self.v = (np.zeros((g, room, widths[n]), np.float32) for n in "kv")

    def add(self, rows: Rows) -> None:
        heads = self.geometry.heads_per_group
        for q, k, v in zip(*rows, strict=True):
            for g, window in enumerate(self.geometry.group_windows):
                self.rings[g].append((k[g], v[g]))
                if len(self.rings[g]) > window:
                    slot = self.left[g] % self.room
                    self.k[g, slot], self.v[g, slot] = self.rings[g].pop(0)
                    self.q[slot, g * heads : (g + 1) * heads] = q[g * heads : (g + 1) * heads]
                    self.left[g] += 1

    def renewed(self, meta: np.ndarray) -> dict[str, np.ndarray] | None:
        """The far field that the archive gives."""
        planes = {"group_meta": meta, "archive_q": self.q, "archive_k": self.k, "archive_v": self.v}
        return from_archive(self.geometry, self.options, planes, self.began)


@pytest.mark.parametrize("calls", [[1] * 84, [40, 5, 1, 30, 60, 70, 3]], ids=["row by row", "chunks"])
def test_a_far_field_renews_itself(device: o1.Device, rng: np.random.Generator, calls: list[int]) -> None:
    cache = o1.Cache(device, reseal_every=40, archive=64)
    cache[0] = state = sealed(rng, rows=19)  # the wider ring has room for 8 rows yet
    layer, record, renewed_at = cache[0], Record(state, 64), state.rows
    renewals = []
    for count in calls:
        rows, before = random_rows(rng, count, ODD), layer.state()
        planes = record.renewed(before.planes["group_meta"])
        due = layer.rows - renewed_at >= 40 and planes is not None
        out = layer.attend(*rows)
        if due:
            assert planes is not None
            before = o1.LayerState(ODD, state.options, before.rows, planes={**before.planes, **planes})
            renewed_at = before.rows
            renewals.append(renewed_at)
        assert layer.epoch == before.epoch
        other = device.load(before)
        np.testing.assert_array_equal(out, other.attend(*rows))
        assert_same_planes(layer.state().planes, other.state().planes, f"at {layer.rows}")
        record.add(rows)
    # 8 rows until the wider ring evicts and 32 until there are enough; then 40 after 59, in whole calls.
    assert renewals == ([59, 99] if len(calls) > 9 else [59, 155, 225])


def test_a_renewal_waits(device: o1.Device, rng: np.random.Generator) -> None:
    """For rows enough in the archive, for drafts to be decided; `encode` and short layers have none."""
    cache = o1.Cache(device, reseal_every=1, archive=64)
    cache[0] = state = sealed(rng)
    layer = cache[0]
    assert layer.nbytes > device.load(state).nbytes
    layer.attend(*random_rows(rng, 31, ODD))
    layer.attend(*random_rows(rng, 1, ODD))
    assert layer.epoch == state.epoch
    layer.attend(*random_rows(rng, 2, ODD), commit=False)
    assert layer.epoch != state.epoch  # before that call there were 32 rows and no draft
    with pytest.raises(o1.StateError, match="uncommitted rows"):
        layer.reseal()
    epoch = layer.epoch
    layer.attend(*random_rows(rng, 2, ODD), commit=False, draft="x")
    assert layer.epoch == epoch
    layer.commit(2, "x")
    layer.reseal()
    assert layer.epoch != epoch
    # A short layer has an archive once it has sealed itself.
    cache[1] = short = o1.seal(*random_rows(rng, 10, SHORT), SHORT)
    cache[1].attend(*random_rows(rng, 40, SHORT))
    assert cache[1].sealed
    with pytest.raises(o1.StateError, match="fewer than 32 rows have left"):
        cache[1].reseal()
    cache[1].attend(*random_rows(rng, 1, SHORT))
    cache[1].attend(*random_rows(rng, 16, SHORT))
    epoch = cache[1].epoch
    cache[1].attend(*random_rows(rng, 1, SHORT))
    assert cache[1].epoch != epoch
    with pytest.raises(o1.StateError, match="no archive"):
        device.load(state).reseal()
    with pytest.raises(o1.StateError, match="reseal: the layer has 10 rows and seals itself after 19"):
        device.load(short).reseal()


def test_a_renewal_waits_for_encoded_drafts(gpu: o1.Device, rng: np.random.Generator) -> None:
    """`encode` renews nothing, so that it may leave a draft where a renewal is due."""
    cache = o1.Cache(gpu, reseal_every=1, archive=64)
    cache[0] = sealed(rng)
    layer, rows = cache[0], random_rows(rng, 3, ODD)
    layer.attend(*random_rows(rng, 40, ODD))
    epoch, before = layer.epoch, layer.state()
    encode(gpu, layer, rows, commit=False)
    layer.attend(*random_rows(rng, 2, ODD), commit=False, draft="x")
    assert layer.drafts == {"": 3, "x": 2}
    layer.commit(2)
    other = gpu.load(before)
    other.attend(*part(rows, slice(2)))
    assert_same_state(layer.state(), other.state())
    assert layer.epoch == epoch
    encode(gpu, layer, rows)
    assert layer.epoch == epoch
    layer.attend(*rows)
    assert layer.epoch != epoch


def test_a_restore_brings_the_archive_back(device: o1.Device, rng: np.random.Generator) -> None:
    cache = o1.Cache(device, reseal_every=1000, archive=64)
    cache[0] = state = sealed(rng)
    layer, record = cache[0], Record(state, 64)
    rows = random_rows(rng, 50, ODD)
    layer.attend(*rows)
    record.add(rows)
    snapshot = layer.snapshot()
    plain = device.load(state)
    assert snapshot.nbytes == plain.snapshot().nbytes + record.q.nbytes + record.k.nbytes + record.v.nbytes
    layer.attend(*random_rows(rng, 70, ODD))
    layer.restore(snapshot)
    more = random_rows(rng, 20, ODD)
    layer.attend(*more)
    record.add(more)
    before = layer.state()
    layer.reseal()
    want = record.renewed(before.planes["group_meta"])
    assert want is not None
    assert_same_planes(layer.state().planes, {**before.planes, **want})
    plain.attend(*rows)
    # A layer loaded from a later state of that seal, where its archive began, takes over this one.
    cache[2] = plain.state()
    cache[2].restore(snapshot)
    cache[2].attend(*more)
    cache[2].reseal()
    assert cache[2].epoch == layer.epoch
    # What comes from a layer without an archive has none: it begins anew.
    cache[1] = state
    cache[1].attend(*rows)
    cache[1].restore(plain.snapshot())
    with pytest.raises(o1.StateError, match="fewer than 32 rows"):
        cache[1].reseal()


def test_a_call_that_fails_takes_its_renewal_back(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = o1.Cache(device, reseal_every=40, archive=64)
    cache[0] = sealed(rng)
    cache[0].attend(*random_rows(rng, 60, ODD))
    before, epoch = cache[0].state(), cache[0].epoch
    rows = random_rows(rng, 3, ODD)
    with monkeypatch.context() as failing:

        def out_of_memory(*args: object, **options: object) -> None:
            raise o1.DeviceMemoryError("no room")

        failing.setattr(device.engine, "attend", out_of_memory)
        for commit in (True, False):
            with pytest.raises(o1.DeviceMemoryError):
                cache[0].attend(*rows, commit=commit)
    assert cache[0].epoch == epoch
    assert_same_state(cache[0].state(), before)
    cache[0].attend(*rows)
    assert cache[0].epoch != epoch


def test_a_snapshot_from_before_the_layer_renews_in_time(
    device: o1.Device, rng: np.random.Generator, tmp_path: Path
) -> None:
    """The layer began later in the stream than the snapshot that it takes from a file."""
    state, rows = sealed(rng), random_rows(rng, 40, ODD)
    early = device.load(state)
    early.snapshot().save(tmp_path / "early")
    early.attend(*rows)
    cache = o1.Cache(device, reseal_every=50, archive=64)
    cache[0] = early.state()
    cache[0].restore(o1.Snapshot.load(tmp_path / "early"))
    epoch = cache[0].epoch
    cache[0].attend(*random_rows(rng, 50, ODD))
    assert cache[0].epoch == epoch
    cache[0].attend(*random_rows(rng, 1, ODD))
    assert cache[0].epoch != epoch


def test_an_archive_that_there_is_no_room_for(
    device: o1.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = o1.Cache(device, reseal_every=9, archive=99)

    def full(*_: Any) -> Any:
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(device.engine, "upload", full)
    with pytest.raises(o1.DeviceMemoryError, match=r"state: no room for .* with an archive of 99 rows: Un"):
        cache[0] = sealed(rng)
    assert len(cache) == 0
