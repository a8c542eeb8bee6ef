"""What a user holds: one layer's attention on one device. Knows no backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Float32, as_index
from .engine import Engine
from .errors import ArgumentError, ArgumentTypeError, DeviceError, StateError
from .geometry import Geometry
from .planes import META_FAR_LIMIT, META_LEN
from .sealing import check_rows, empty_planes, sealed_state
from .state import LayerState, SealOptions

if TYPE_CHECKING:
    from .devices import Device

Rows = tuple[Float32, Float32, Float32]
"""Queries, keys and values of the same rows."""


@dataclass
class _Sealed:
    """A sealed state on an engine."""

    resident: Any


class _Exact:
    """A stream too short for landmarks: all its rows in one ring on the engine, and on the host what
    sealing needs, in room for as many as there may be. `pending`: the rows of an uncommitted call."""

    def __init__(self, resident: Any, geometry: Geometry, history: Rows) -> None:
        self.resident = resident
        self.room = geometry.exact_rows
        q, k, v = (np.empty((self.room, *x.shape[1:]), np.float32) for x in history)
        self._kept: Rows = (q, k, v)
        self.count = 0
        self.pending: Rows | None = None
        self.append(history)

    def append(self, rows: Rows) -> None:
        """Keeps copies of rows, of which there is room for `room - count`."""
        end = self.count + len(rows[1])
        for kept, new in zip(self._kept, rows, strict=True):
            kept[self.count : end] = new
        self.count = end

    def history(self, more: Rows | None = None) -> Rows:
        """Copies of the rows so far, and of `more` after them."""
        q, k, v = (
            np.concatenate([kept[: self.count], *([] if more is None else [more[i]])])
            for i, kept in enumerate(self._kept)
        )
        return q, k, v


def _exact_geometry(geometry: Geometry) -> Geometry:
    """A geometry whose ring holds every row until the seal, so that the same kernels attend exactly."""
    return Geometry(
        geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.value_dim,
        window=geometry.exact_rows, sinks=0, landmarks=4, rect=geometry.rect, scale=geometry.scale,
    )  # fmt: skip


def _cut(rows: Rows, part: slice) -> Rows:
    q, k, v = rows
    return q[part], k[part], v[part]


def _copied(rows: Rows) -> Rows:
    q, k, v = rows
    return q.copy(), k.copy(), v.copy()


class Layer:
    """One layer's attention on one device; made by `Device.load`.

    A call that raises leaves the layer as it was, bit for bit, unless the device itself is lost. Layers of
    one device may be used from several threads, one call at a time in each layer.
    """

    def __init__(self, device: Device, engine: Engine, state: LayerState) -> None:
        self._device = device
        self._engine = engine
        self._geometry = state.geometry
        self._options: SealOptions = state.options
        self._rows = state.rows
        self._pending: int | None = None
        self._held = self._upload(state)

    def _upload(self, state: LayerState) -> _Sealed | _Exact:
        if state.history is None:
            return _Sealed(self._engine.upload(state.geometry, state.planes))
        geometry = _exact_geometry(state.geometry)
        planes = empty_planes(geometry)
        rows = len(state.history[1])
        planes["group_meta"][:, META_LEN] = rows
        planes["group_meta"][:, META_FAR_LIMIT] = 0
        planes["ring_k"][:, :rows] = state.history[1].transpose(1, 0, 2)
        planes["ring_v"][:, :rows] = state.history[2].transpose(1, 0, 2)
        return _Exact(self._engine.upload(geometry, planes), state.geometry, state.history)

    @property
    def device(self) -> Device:
        """Where the layer lives."""
        return self._device

    @property
    def geometry(self) -> Geometry:
        """The layer's sizes."""
        return self._geometry

    @property
    def rows(self) -> int:
        """Rows of the stream so far, committed ones only."""
        return self._rows

    @property
    def sealed(self) -> bool:
        """Whether the layer has its far field, or still attends exactly over a short stream."""
        return isinstance(self._held, _Sealed)

    @property
    def pending(self) -> int | None:
        """Rows of the last uncommitted call that `commit` may accept, None if there is none."""
        return self._pending

    def __repr__(self) -> str:
        kind = "sealed" if self.sealed else "exact"
        return f"Layer({kind}, rows={self._rows}, device={self._device.name!r}, {self._geometry})"

    def attend(self, q: Any, k: Any, v: Any, commit: bool = True) -> Float32:
        """Attention of `rows` new rows of the stream.

        Args:
            q: queries `(rows, nh, d)`, not scaled; anything NumPy can view, converted to float32.
            k: keys `(rows, G, d)`.
            v: values `(rows, G, dv)`.
            commit: whether the state moves over the rows. If not, the layer keeps them for `commit`.

        Returns:
            Outputs `(rows, nh, dv)`, float32.

        Raises:
            ArgumentError, ArgumentTypeError: wrong shapes, types or values; nothing has changed.
            DeviceError: the device failed; names adapter and kernel or step.
        """
        if not isinstance(commit, (bool, np.bool_)):
            raise ArgumentTypeError(f"commit: {commit!r}, expected a bool")
        rows = check_rows(q, k, v, self._geometry)
        count = len(rows[1])
        try:
            if count == 0:
                out = np.zeros((0, self._geometry.num_heads, self._geometry.value_dim or 0), np.float32)
            else:
                out = self._attend(rows, bool(commit))
        except ArgumentError:
            raise  # refused: the rows of an earlier uncommitted call are still there
        except BaseException:
            # The engine may have put this call's rows in their place.
            self._pending = self._pending if commit else None
            raise
        self._pending = None if commit else count
        if commit:
            self._rows += count
        return out

    def _attend(self, rows: Rows, commit: bool) -> Float32:
        held = self._held
        if isinstance(held, _Sealed):
            return self._engine.attend(held.resident, *rows, commit)
        room = held.room - held.count
        head, tail = _cut(rows, slice(room)), _cut(rows, slice(room, None))
        if len(tail[1]) == 0:
            out = self._engine.attend(held.resident, *rows, commit)
            if commit:
                held.append(rows)
            held.pending = None if commit else _copied(rows)
            return out
        # The seal falls inside the call. The exact part runs without a commit and the layer changes
        # over in one step at the end, so that a failure on the way leaves it as it was.
        kept = None if commit else _copied(rows)
        parts = [self._engine.attend(held.resident, *head, False)] if room else []
        sealed = sealed_state(*held.history(head), self._geometry, self._options)
        after = _Sealed(self._engine.upload(sealed.geometry, sealed.planes))
        parts.append(self._engine.attend(after.resident, *tail, commit))
        if commit:
            self._held = after
        else:
            held.pending = kept
        return np.concatenate(parts)

    def commit(self, rows: int) -> None:
        """Accepts the first `rows` rows of the last `attend(commit=False)`; 0 forgets them all.

        The state then is, bit for bit, what `attend` with `commit=True` over those rows leaves.

        Raises:
            StateError: no uncommitted rows are there.
            ArgumentError, ArgumentTypeError: `rows` is not an integer from 0 to their number.
        """
        if self._pending is None:
            raise StateError("commit: no uncommitted rows; call attend(..., commit=False) first")
        rows = as_index("rows", rows, 0, self._pending)
        held = self._held
        if rows:
            if isinstance(held, _Sealed):
                self._engine.commit(held.resident, rows)
            else:
                assert held.pending is not None
                self._attend(_cut(held.pending, slice(rows)), commit=True)
        if isinstance(held, _Exact):
            held.pending = None
        self._pending = None
        self._rows += rows

    def state(self) -> LayerState:
        """The state on the host, for `LayerState.save`, or `Device.load` elsewhere."""
        held = self._held
        if isinstance(held, _Exact):
            return LayerState(self._geometry, self._options, self._rows, history=held.history())
        planes = self._engine.read(held.resident)
        return LayerState(self._geometry, self._options, self._rows, planes=planes)

    def encode(
        self,
        compute_pass: Any,
        q_buffer: Any,
        k_buffer: Any,
        v_buffer: Any,
        out_buffer: Any,
        rows: int,
        commit: bool = True,
    ) -> None:
        """Records the attention of `rows` rows into the caller's compute pass; GPU devices only.

        The buffers are float32 storage buffers of the layer's device, laid out as the arrays of
        `attend`; the outputs are there once the caller's submission is done. The caller submits, and
        before any other call on a layer of this device: calls share scratch and run in the order in
        which they are submitted. `rows` counts what was recorded; should a recorded pass never be
        submitted, load the layer anew from its last saved state.

        Raises:
            StateError: the layer has yet to seal itself.
            DeviceError: the device has no compute passes.
            ArgumentError, ArgumentTypeError: a buffer too small, shared with the output, or `rows` no
                positive integer; nothing has been recorded.
        """
        encode = getattr(self._engine, "encode", None)
        if encode is None:
            raise DeviceError(f"encode: {self._device.name} has no compute passes; use attend")
        if not isinstance(self._held, _Sealed):
            raise StateError(
                f"encode: the layer has {self._rows} rows and seals itself after "
                f"{self._geometry.exact_rows}; use attend"
            )
        if not isinstance(commit, (bool, np.bool_)):
            raise ArgumentTypeError(f"commit: {commit!r}, expected a bool")
        rows = as_index("rows", rows, 1)
        if any(out_buffer is other for other in (q_buffer, k_buffer, v_buffer)):
            raise ArgumentError("out_buffer: the same buffer as an input, expected one of its own")
        encode(
            self._held.resident, compute_pass, q_buffer, k_buffer, v_buffer, out_buffer, rows, bool(commit)
        )
        self._pending = None if commit else rows
        if commit:
            self._rows += rows
