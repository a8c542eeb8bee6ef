"""Sequences of one geometry in the same dispatches, each at its own place in its stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .arrays import Float32, Rows, as_bool, as_float32, as_index
from .device import Device
from .engine import Accepted, Engine
from .errors import ArgumentError, ArgumentTypeError, GeometryError, StateError
from .exact_stream import ExactStream
from .geometry import Geometry
from .layer import Layer
from .planning import chunk_rows
from .sealed_stream import SealedStream
from .state import LayerState


@dataclass
class _Member:
    """One sequence of a batch: its stream but for the resident, its rows, and where it lies."""

    stream: SealedStream
    rows: int
    shard: _Shard
    place: int


@dataclass
class _Shard:
    """Sequences in one resident, as many as one binding of the device sees."""

    resident: Any = None
    count: int = 0


class Batch:
    """Sequences of one geometry on one device; made by `Device.load` of a list of states.

    All of them take part in every call, in the order of the list, each at its own ring position and with its
    own landmarks. `join` appends one and `leave` takes one out; the others stay where they are on the
    device. As many sequences as one binding sees share their dispatches; beyond that there are several runs.

    A call that raises leaves the batch as it was, unless the device itself is lost; with several runs,
    those that were through are taken back.
    """

    def __init__(self, device: Device, states: Sequence[LayerState]) -> None:
        if not states:
            raise ArgumentError("state: an empty list, expected at least one LayerState")
        for at, state in enumerate(states):
            if not isinstance(state, LayerState):
                raise ArgumentTypeError(f"state[{at}]: {type(state).__name__}, expected a LayerState")
        self._device = device
        self._engine: Engine = device.engine
        self._geometry = states[0].geometry
        self._members: list[_Member] = []
        self._shards: list[_Shard] = []
        self._pending: tuple[Float32, Float32, Float32] | None = None
        for at, state in enumerate(states):
            self._check_state(state, f"state[{at}]")
        chunk_rows(self._geometry, 2, device.path, device.limits)
        for state in states:
            self.join(state)

    @property
    def device(self) -> Device:
        """Where the sequences live."""
        return self._device

    @property
    def geometry(self) -> Geometry:
        """The sizes of each sequence."""
        return self._geometry

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each stream so far, committed ones only."""
        return tuple(member.rows for member in self._members)

    @property
    def pending(self) -> int | None:
        """Rows of the last uncommitted call that `commit` may accept, None if there is none."""
        return None if self._pending is None else self._pending[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes on the device, room for sequences to come among them."""
        return sum(shard.resident.nbytes for shard in self._shards)

    @property
    def residents(self) -> tuple[Any, ...]:
        """What the engine holds, a resident for each run; for measuring."""
        return tuple(shard.resident for shard in self._shards)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return (
            f"Batch({len(self)} sequences, rows={self.rows}, device={self._device.name!r}, {self._geometry})"
        )

    def join(self, sequence: LayerState | Layer) -> int:
        """Appends a sequence: a state, or a layer of this device, which stays as it is. Returns its index.

        Rows that are waiting for `commit` are forgotten.

        Raises:
            StateError: it has yet to seal itself, or has an archive.
            ArgumentError: another geometry or another device.
            ArgumentTypeError: neither a state nor a layer.
            GeometryError, DeviceMemoryError: there is no room.
        """
        if isinstance(sequence, Layer):
            stream, rows = self._stream_of(sequence), sequence.rows
        elif isinstance(sequence, LayerState):
            self._check_state(sequence, "sequence")
            kept = self._device._kept_state(sequence)
            stream, rows = SealedStream.of(self._engine, kept), sequence.rows
        else:
            raise ArgumentTypeError(f"sequence: {type(sequence).__name__}, expected a LayerState or a Layer")
        shard = self._shard_with_room()
        shard.resident = self._engine.join(shard.resident, stream.resident, shard.count)
        if not shard.count:
            self._shards.append(shard)
        self._members.append(_Member(replace(stream, resident=None), rows, shard, shard.count))
        shard.count += 1
        self._pending = None
        return len(self._members) - 1

    def leave(self, index: int) -> Layer:
        """Takes sequence `index` out, and returns it as a layer of its own; later ones move up by one.

        Rows that are waiting for `commit` are forgotten. Raises `ArgumentError` where there is no such
        sequence.
        """
        index = self._index(index)
        member = self._members[index]
        shard = member.shard
        alone = self._engine.take(shard.resident, self._geometry, member.place)
        if shard.count > 1:
            self._engine.drop(shard.resident, self._geometry, shard.count, member.place)
        else:
            self._shards.remove(shard)
        shard.count -= 1
        del self._members[index]
        for other in self._members:
            if other.shard is shard and other.place == shard.count:
                other.place = member.place
        self._pending = None
        return Layer(self._device, replace(member.stream, resident=alone), member.rows)

    def state(self, index: int) -> LayerState:
        """The state of sequence `index` on the host."""
        index = self._index(index)
        member = self._members[index]
        alone = self._engine.take(member.shard.resident, self._geometry, member.place)
        planes = self._engine.read(alone)
        return LayerState(self._geometry, member.stream.options, member.rows, planes=planes)

    def attend(self, q: Any, k: Any, v: Any, commit: bool = True) -> Float32:
        """Attention of `rows` new rows of every sequence.

        Args:
            q: queries `(batch, rows, nh, d)`, not scaled; anything NumPy can view, converted to float32.
            k: keys `(batch, rows, G, d)`.
            v: values `(batch, rows, G, dv)`.
            commit: whether the states move over the rows. If not, they are kept for `commit`.

        Returns:
            Outputs `(batch, rows, nh, dv)`, float32.

        Raises:
            ArgumentError, ArgumentTypeError: wrong shapes, types or values; nothing has changed.
            DeviceError: the device failed.
        """
        commit = as_bool("commit", commit)
        rows = self._checked(q, k, v)
        batch, count = rows[0].shape[:2]
        assert self._geometry.value_dim is not None
        out = np.empty((batch, count, self._geometry.num_heads, self._geometry.value_dim), np.float32)
        if count:
            try:
                self._run_all(rows, out, commit)
            except BaseException:
                self._pending = None  # the engine may have put these rows in the place of those
                raise
        elif commit:
            for shard in self._shards:
                self._engine.forget(shard.resident)
        self._pending = None if commit else _copied(rows)
        if commit:
            self._moved([count] * batch)
        return out

    def commit(self, rows: int | Sequence[int]) -> None:
        """Accepts the first `rows` rows of the last `attend(commit=False)`: as many in every sequence, or,
        with a list, as many in each as it says. With 0 they are forgotten.

        Equal numbers move all sequences in one submission. Otherwise each sequence moves by itself.

        Raises:
            StateError: no uncommitted rows are there.
            ArgumentError, ArgumentTypeError: `rows` is not made of integers from 0 to their number.
        """
        if self._pending is None:
            raise StateError("commit: no uncommitted rows; call attend(..., commit=False) first")
        accepted = self._accepted(rows)
        if len(set(accepted)) == 1:
            self._engine.commit([Accepted(shard.resident, accepted[0]) for shard in self._shards])
        else:
            self._commit_each(accepted, self._pending)
        self._pending = None
        self._moved(accepted)

    def _accepted(self, rows: int | Sequence[int]) -> list[int]:
        assert self._pending is not None
        most = self._pending[0].shape[1]
        listed = isinstance(rows, Sequence) and not isinstance(rows, (str, bytes, bytearray))
        if not listed and not (isinstance(rows, np.ndarray) and rows.ndim):
            return [as_index("rows", rows, 0, most)] * len(self)
        each = list(rows)  # type: ignore[arg-type]
        if len(each) != len(self):
            raise ArgumentError(f"rows: {len(each)} numbers, expected one for each of {len(self)} sequences")
        return [as_index(f"rows[{i}]", n, 0, most) for i, n in enumerate(each)]

    def _commit_each(self, accepted: Sequence[int], pending: Rows) -> None:
        """Each sequence moves on a copy of its own; they all change over at the end."""
        engine = self._engine
        after = []
        for at, (member, count) in enumerate(zip(self._members, accepted, strict=True)):
            if count:
                alone = engine.take(member.shard.resident, self._geometry, member.place)
                q, k, v = (np.ascontiguousarray(x[at, :count]) for x in pending)
                engine.attend(alone, q, k, v, False)
                engine.commit([Accepted(alone, count)])
                after.append((member, alone))
        for member, alone in after:
            engine.put(member.shard.resident, member.place, alone)
        for shard in self._shards:
            engine.forget(shard.resident)

    def _run_all(self, rows: Rows, out: Float32, commit: bool) -> None:
        done = []
        try:
            for shard in self._shards:
                before = self._engine.fork(shard.resident) if commit and len(self._shards) > 1 else None
                self._run(shard, rows, out, commit)
                done.append((shard, before))
        except BaseException:
            for shard, before in done:
                if before is not None:
                    self._engine.assign(shard.resident, before)
            raise

    def _run(self, shard: _Shard, rows: Rows, out: Float32, commit: bool) -> None:
        """One shard's part of a call, its sequences side by side as the engine has them."""
        order = np.empty(shard.count, int)
        for at, member in enumerate(self._members):
            if member.shard is shard:
                order[member.place] = at
        q, k, v = (_side_by_side(x[order]) for x in rows)
        found = self._engine.attend(shard.resident, q, k, v, commit)
        split = found.reshape(len(found), shard.count, self._geometry.num_heads, -1)
        out[order] = split.swapaxes(0, 1)

    def _index(self, index: int) -> int:
        if not self._members:
            raise ArgumentError(f"index: {index!r}, the batch is empty")
        return as_index("index", index, 0, len(self._members) - 1)

    def _moved(self, rows: Sequence[int]) -> None:
        for member, count in zip(self._members, rows, strict=True):
            member.rows += count

    def _checked(self, q: Any, k: Any, v: Any) -> Rows:
        geometry, batch = self._geometry, len(self)
        k = as_float32("k", k, (batch, "rows", geometry.num_kv_heads, geometry.head_dim))
        rows = k.shape[1]
        q = as_float32("q", q, (batch, rows, geometry.num_heads, geometry.head_dim))
        value_dim = geometry.value_dim or geometry.head_dim
        v = as_float32("v", v, (batch, rows, geometry.num_kv_heads, value_dim))
        return self._device._kept_rows((q, k, v))

    def _check_state(self, state: LayerState, name: str) -> None:
        if state.geometry != self._geometry:
            raise ArgumentError(f"{name}: a state of {state.geometry}, expected {self._geometry}")
        if not state.sealed:
            raise StateError(
                f"{name}: {state.rows} rows, too short to be sealed; a batch takes sealed sequences, "
                f"those of more than {self._geometry.exact_rows} rows"
            )

    def _stream_of(self, layer: Layer) -> SealedStream:
        if layer.device is not self._device:
            raise ArgumentError(f"sequence: a layer of {layer.device}, expected one of {self._device}")
        if layer.geometry != self._geometry:
            raise ArgumentError(f"sequence: a layer of {layer.geometry}, expected {self._geometry}")
        held = layer._held
        if isinstance(held, ExactStream):
            raise StateError(
                f"sequence: {layer.rows} rows, too short to be sealed; a batch takes sealed sequences, "
                f"those of more than {self._geometry.exact_rows} rows"
            )
        if held.archive:
            raise StateError("sequence: a layer that keeps an archive, expected one without")
        return held

    def _shard_with_room(self) -> _Shard:
        for shard in self._shards:
            try:
                geometry = self._geometry.batch(shard.count + 1)
                chunk_rows(geometry, 2, self._device.path, self._device.limits)
            except GeometryError:
                continue
            return shard
        return _Shard()


def _side_by_side(x: Float32) -> Float32:
    """`(batch, rows, heads, width)` as the rows of one layer with the heads of all, `(rows, batch * heads,
    width)`."""
    batch, rows, heads, width = x.shape
    return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(rows, batch * heads, width)


def _copied(rows: Rows) -> Rows:
    q, k, v = rows
    return q.copy(), k.copy(), v.copy()
