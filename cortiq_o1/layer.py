"""What a user holds: one layer's attention on one device. Knows no backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .arrays import Float32, Rows, as_bool, as_index
from .engine import Accepted, Engine
from .errors import ArgumentError, ArgumentTypeError, DeviceError, StateError
from .exact_stream import CROSSING, ExactStream
from .geometry import Geometry
from .prefill import Progress, seal_on
from .resealing import MIN_ARCHIVED
from .sealed_stream import SealedStream
from .sealing import check_rows
from .snapshots import OnEngine, Snapshot, check_fits, moving_bytes, restored
from .state import LayerState, SealOptions

if TYPE_CHECKING:
    from .device import Device


class Logs(Protocol):
    """Says what of the rows that pass is kept, see `capture.Capture`."""

    def log(self, sealed: bool) -> Any:
        """Where rows of the layer go, before the seal or after it; None if nowhere."""

    def begin(self) -> None:
        """Rows from here on do not follow those that passed before."""


class Layer:
    """One layer's attention on one device; made by `Device.load`.

    A call that raises leaves the layer as it was, bit for bit, unless the device itself is lost. Layers of
    one device may be used from several threads, one call at a time in each layer.
    """

    def __init__(
        self, device: Device, held: SealedStream | ExactStream, rows: int, reseal_every: int | None = None
    ) -> None:
        self._device = device
        self._engine: Engine = held.engine
        self._held = held
        self._geometry: Geometry = held.geometry
        self._options: SealOptions = held.options
        self._rows = rows
        self._reseal_every = reseal_every
        self._drafts: dict[str, int] = {}
        self._line: object = object()
        self._logs: Logs | None = None
        self._again: weakref.ref[Any] | None = None
        """The engine's for the last call of `encode`."""

    @classmethod
    def _of(
        cls, device: Device, state: LayerState, archive: int = 0, reseal_every: int | None = None
    ) -> Layer:
        """A layer with a copy of the state."""
        engine: Engine = device.engine
        held: SealedStream | ExactStream
        if state.sealed:
            held = SealedStream.of(engine, state, archive)
        else:
            held = ExactStream.start(engine, state, archive)
        return cls(device, held, state.rows, reseal_every)

    @classmethod
    def _of_prompt(
        cls,
        device: Device,
        rows: Rows,
        geometry: Geometry,
        options: SealOptions,
        progress: Progress | None,
        archive: int = 0,
        reseal_every: int | None = None,
    ) -> Layer:
        """A layer that the device seals, see `Device.seal`."""
        count = len(rows[1])
        if count <= geometry.exact_rows:
            q, k, v = (x.copy() for x in rows)
            return cls._of(
                device, LayerState(geometry, options, count, history=(q, k, v)), archive, reseal_every
            )
        engine: Engine = device.engine
        resident = seal_on(engine, *rows, geometry, options, archive, progress)
        held = SealedStream.around(engine, geometry, options, resident, archive, count)
        return cls(device, held, count, reseal_every)

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
        return isinstance(self._held, SealedStream)

    @property
    def epoch(self) -> str | None:
        """Names the layer's seal, see `LayerState.epoch`; None if it has yet to seal itself."""
        return self._held.epoch if isinstance(self._held, SealedStream) else None

    @property
    def pending(self) -> int | None:
        """Rows of the draft "" that `commit` may accept, None if there is none."""
        return self._drafts.get("")

    @property
    def drafts(self) -> dict[str, int]:
        """The rows of every draft that `commit` may accept, by name."""
        return dict(self._drafts)

    @property
    def nbytes(self) -> int:
        """Bytes that the layer holds: state, archive, drafts and, before the seal, its rows on the host."""
        return self._held.nbytes

    def __repr__(self) -> str:
        kind = "sealed" if self.sealed else "exact"
        return f"Layer({kind}, rows={self._rows}, device={self._device.name!r}, {self._geometry})"

    def attend(self, q: Any, k: Any, v: Any, commit: bool = True, draft: str = "") -> Float32:
        """Attention of `rows` new rows of the stream.

        Args:
            q: queries `(rows, nh, d)`, not scaled; anything NumPy can view, converted to float32.
            k: keys `(rows, G, d)`.
            v: values `(rows, G, dv)`.
            commit: whether the state moves over the rows; all drafts are forgotten then. If not, the layer
                keeps them for `commit`.
            draft: the name under which rows that are not committed are kept. A draft of that name is
                replaced, others stay: several continuations of one state, of which `commit` takes one.

        Returns:
            Outputs `(rows, nh, dv)`, float32.

        Raises:
            ArgumentError, ArgumentTypeError: wrong shapes, types or values; nothing has changed.
            DeviceError: the device failed; names adapter and kernel or step.
        """
        commit = as_bool("commit", commit)
        draft = _as_draft(draft, commit)
        rows = self._device._kept_rows(check_rows(q, k, v, self._geometry))
        count = len(rows[1])
        if count == 0:
            out = np.zeros((0, self._geometry.num_heads, self._geometry.value_dim or 0), np.float32)
            if commit:
                self._forget_all()
            else:
                self._forget(draft)
                self._drafts[draft] = 0
            return out
        before = self._held, self._line
        try:
            self._renew_if_due()
            out = self._attend(rows, commit, draft)
        except ArgumentError:
            self._held, self._line = before
            raise  # refused: the drafts are still there
        except BaseException:
            self._held, self._line = before
            # The engine may have put this call's rows in the place of the draft's.
            if not commit:
                self._forget(draft)
            raise
        if commit:
            self._moved(count)
        else:
            self._drafts[draft] = count
        return out

    def _attend(self, rows: Rows, commit: bool, draft: str) -> Float32:
        held = self._held
        if isinstance(held, SealedStream):
            log = self._log(True) if commit else None
            return self._engine.attend(held.resident, *rows, commit, draft, log)
        if not commit:
            return held.attend(rows, draft)
        if not held.crosses(len(rows[1])):
            return held.attend_committed(rows, self._log(False))
        # The seal falls inside the call: tried first, so that a failure on the way leaves all as it was.
        try:
            out = held.attend(rows, CROSSING)
            accepted, finish = self._accepting_exact(held, len(rows[1]), CROSSING)
            self._engine.commit(accepted)
        except BaseException:
            held.forget(CROSSING)
            raise
        finish()
        return out

    def _forget(self, draft: str) -> None:
        self._drafts.pop(draft, None)
        if isinstance(self._held, ExactStream):
            self._held.forget(draft)

    def _forget_all(self) -> None:
        self._engine.forget(self._held.resident)
        self._drafts.clear()
        if isinstance(self._held, ExactStream):
            self._held.drafts.clear()

    def _log(self, sealed: bool) -> Any:
        return None if self._logs is None else self._logs.log(sealed)

    def _moved(self, rows: int) -> None:
        self._drafts.clear()
        self._rows += rows

    def commit(self, rows: int, draft: str = "") -> None:
        """Accepts the first `rows` rows of a draft, and forgets all drafts; with 0 it just forgets.

        The state then is, bit for bit, what `attend` with `commit=True` over those rows leaves.

        Args:
            rows: how many, from 0 to those of the draft.
            draft: the name given to `attend`.

        Raises:
            StateError: no uncommitted rows of that name are there.
            ArgumentError, ArgumentTypeError: `rows` is not an integer from 0 to their number.
        """
        accepted, finish = self._accepting(rows, draft)
        self._engine.commit(accepted)
        finish()

    def _accepting(self, rows: int, draft: str) -> tuple[list[Accepted], Callable[[], None]]:
        """What the engine is to commit, and what to call once it has."""
        draft = _as_draft(draft)
        if draft not in self._drafts:
            which = f" of draft {draft!r}" if draft or self._drafts else ""
            there = f"; there are {self._drafts}" if self._drafts else ""
            raise StateError(
                f"commit: no uncommitted rows{which}{there}; call attend(..., commit=False) first"
            )
        rows = as_index("rows", rows, 0, self._drafts[draft])
        held = self._held
        finish: Callable[[], None] = _nothing
        if isinstance(held, SealedStream):
            accepted = [Accepted(held.resident, rows, draft, self._log(True) if rows else None)]
        elif rows:
            accepted, finish = self._accepting_exact(held, rows, draft)
        else:
            accepted, finish = [Accepted(held.resident, 0)], held.drafts.clear

        def done() -> None:
            finish()
            self._moved(rows)

        return accepted, done

    def _accepting_exact(
        self, held: ExactStream, rows: int, draft: str
    ) -> tuple[list[Accepted], Callable[[], None]]:
        accepted, finish = held.accepting(rows, draft, self._log)

        def done() -> None:
            self._held = finish() or held

        return accepted, done

    def snapshot(self, name: str = "") -> Snapshot:
        """The layer as it is now, for `restore`: a copy on the device of what moves. Drafts are not in it.

        There may be several, taken back in any order.

        Raises:
            ArgumentTypeError: `name` is no string.
            DeviceMemoryError: the device has no room.
        """
        if not isinstance(name, str):
            raise ArgumentTypeError(f"name: {name!r}, expected a string")
        held, engine = self._held, self._engine
        fork = engine.fork(held.resident)
        nbytes = moving_bytes(
            held.resident.geometry, held.archive if self.sealed else 0, self._device.limits.kv
        )
        if isinstance(held, ExactStream):
            nbytes += held.history.nbytes
        return Snapshot(
            name, self._geometry, self._rows, self.epoch, nbytes, OnEngine(held, fork, self._line)
        )

    def restore(self, snapshot: Snapshot) -> None:
        """The layer as the snapshot found it; drafts are forgotten. The snapshot can be taken back again.

        Raises:
            StateError: the snapshot is of another geometry, or of another seal (`epoch`).
            ArgumentTypeError: not a snapshot.
        """
        self._check(snapshot)
        self._restoring(snapshot)()

    def _check(self, snapshot: Any) -> None:
        """Raises what `restore` raises before it does anything."""
        check_fits(snapshot, self._geometry, self.epoch, self._line)

    def _restoring(self, snapshot: Snapshot) -> Callable[[], None]:
        """Does what takes memory of a restore that `_check` let pass; what is returned does the rest."""
        after, change_over = restored(snapshot, self._held)

        def finish() -> None:
            change_over()
            self._held = after
            if self._logs is not None:
                self._logs.begin()
            self._drafts.clear()
            self._rows = snapshot.rows

        return finish

    def reseal(self, q: Any = None, k: Any = None, v: Any = None, *, evicted: bool = False) -> None:
        """Renews the far field: landmarks and mixing matrix from archived rows, and in it just those of
        them that have left the window. Sinks and window stay as they are.

        Args:
            q: queries `(T, nh, d)` of the newest rows of the stream, as `Cache.capture` hands them out.
            k: keys `(T, G, d)` of the same rows; those still in a group's window are not folded.
            v: values `(T, G, dv)`.
            evicted: `k` and `v` are rows that have left every group's window, oldest first, all of which
                are folded.

        Without arguments the rows are those of the layer's own archive, see `Cache(reseal_every=...)`.

        Raises:
            StateError: the layer has yet to seal itself, has uncommitted rows, or has no archive.
            ArgumentError, ArgumentTypeError: wrong shapes, types or values, or too few rows; the last row
                is not the stream's newest. Nothing has changed.
        """
        evicted = as_bool("evicted", evicted)
        held = self._held
        if not isinstance(held, SealedStream):
            raise StateError(
                f"reseal: the layer has {self._rows} rows and seals itself after {self._geometry.exact_rows}"
            )
        if self._drafts:
            raise StateError(f"reseal: uncommitted rows {self._drafts}; commit them first, or commit(0)")
        given = [x is not None for x in (q, k, v)]
        if any(given) and not all(given):
            raise ArgumentTypeError("reseal: expected all of q, k, v, or none of them")
        if any(given):
            planes = held.from_rows(check_rows(q, k, v, self._geometry), evicted, self._rows)
        else:
            if not held.archive:
                raise StateError("reseal: the layer has no archive; give q, k and v")
            found = held.from_archive()
            if found is None:
                raise StateError(
                    f"reseal: fewer than {MIN_ARCHIVED} rows have left some group's window since the archive "
                    "began"
                )
            planes = found
        self._held = held.renewed(planes, self._rows)
        self._line = object()

    def _renew_if_due(self) -> None:
        held = self._held
        if self._reseal_every is None or self._drafts or not isinstance(held, SealedStream):
            return
        if self._rows - held.renewed_at < self._reseal_every:
            return
        planes = held.from_archive()
        if planes is not None:
            self._held = held.renewed(planes, self._rows)
            self._line = object()

    def state(self) -> LayerState:
        """The state on the host, for `LayerState.save`, or `Device.load` elsewhere."""
        held = self._held
        if isinstance(held, ExactStream):
            return LayerState(self._geometry, self._options, self._rows, history=held.history.rows())
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
        draft: str = "",
    ) -> None:
        """Records the attention of `rows` rows into the caller's compute pass; GPU devices only.

        The buffers are float32 storage buffers of the layer's device, laid out as the arrays of
        `attend`; the outputs are there once the caller's submission is done. The caller submits, and
        before any other call on a layer of this device: calls share scratch and run in the order in
        which they are submitted. `rows` counts what was recorded; should a recorded pass never be
        submitted, load the layer anew from its last saved state. A far field that is due for renewal is
        not renewed here: call `reseal()` between submissions.

        Raises:
            StateError: the layer has yet to seal itself.
            DeviceError: the device has no compute passes.
            ArgumentError, ArgumentTypeError: a buffer too small, shared with the output, or `rows` no
                positive integer; nothing has been recorded.
        """
        # A decoder's next token is over the same buffers: there is nothing left to find out or to check.
        again = None if self._again is None else self._again()
        if (
            again is not None
            and commit is True
            and type(rows) is int
            and rows == again.rows
            and not draft
            and self._logs is None
            and again.record(self._held.resident, compute_pass, q_buffer, k_buffer, v_buffer, out_buffer)
        ):
            self._moved(rows)
            return
        encode = getattr(self._engine, "encode", None)
        if encode is None:
            raise DeviceError(f"encode: {self._device.name} has no compute passes; use attend")
        if not isinstance(self._held, SealedStream):
            raise StateError(
                f"encode: the layer has {self._rows} rows and seals itself after "
                f"{self._geometry.exact_rows}; use attend"
            )
        commit = as_bool("commit", commit)
        draft = _as_draft(draft, commit)
        rows = as_index("rows", rows, 1)
        if out_buffer is not None and (
            out_buffer is q_buffer or out_buffer is k_buffer or out_buffer is v_buffer
        ):
            raise ArgumentError("out_buffer: the same buffer as an input, expected one of its own")
        log = self._log(True) if commit else None
        buffers = (q_buffer, k_buffer, v_buffer, out_buffer)
        again = encode(self._held.resident, compute_pass, *buffers, rows, commit, draft, log)
        self._again = None if again is None else weakref.ref(again)
        if commit:
            self._moved(rows)
        else:
            self._drafts[draft] = rows


def _nothing() -> None:
    """What there is to do after a commit that changes nothing on the host."""


def _as_draft(value: Any, commit: bool = False) -> str:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"draft: {value!r}, expected a string")
    if value and commit:
        raise ArgumentError(f"draft: {value!r} of a committed call, expected commit=False with it")
    if value == CROSSING:
        raise ArgumentError(f"draft: {value!r}, a name that the layer keeps for itself")
    return value
