"""What of a layer moves, as it was at one moment: kept on its device, or in a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy.typing as npt

from .arrays import Rows, as_index
from .errors import ArgumentTypeError, CortiqError, StateError, StateFileError
from .exact_stream import ExactStream
from .files import read_arrays, write_arrays
from .geometry import Geometry
from .planes import ARCHIVE_PLANES, META_EVICTED, MOVING_PLANES, PLANES, STILL_PLANES, Sizes
from .sealed_stream import SealedStream
from .state import HISTORY, LayerState, epoch_of, history_problem, planes_problem, rows_problem

FORMAT, VERSION = "cortiq-o1-snapshot", 1

Planes = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class OnEngine:
    """A snapshot where its layer lives: `held` is the stream as it was, `fork` a copy of what moves of its
    resident, `line` says which layers can take it back."""

    held: SealedStream | ExactStream
    fork: Any
    line: object


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A layer at one moment; made by `Layer.snapshot`, taken back by `Layer.restore`.

    It stays on the layer's device and holds copies of only what moves: ring, far field, position. Landmarks
    and mixing matrix are the layer's own, so it fits the layers of its seal (`epoch`) alone.

    Attributes:
        name: whatever the caller called it.
        geometry: of the layer.
        rows: rows of the stream at that moment.
        epoch: the seal's name, see `LayerState.epoch`; None for a layer that had yet to seal itself.
        nbytes: bytes held.
    """

    name: str
    geometry: Geometry
    rows: int
    epoch: str | None
    nbytes: int
    _held: OnEngine | Planes = field(repr=False)

    @property
    def sealed(self) -> bool:
        """Whether the layer had sealed itself, or been sealed."""
        return self.epoch is not None

    @property
    def on_engine(self) -> OnEngine | None:
        """Where it is kept, None for one that came from a file."""
        return self._held if isinstance(self._held, OnEngine) else None

    def planes(self) -> Planes:
        """What moves, on the host: the planes of `planes.MOVING_PLANES`; of an exact stream its rows as
        `q (rows, nh, d)`, `k (rows, G, d)`, `v (rows, G, dv)`."""
        if not isinstance(self._held, OnEngine):
            return self._held
        held = self._held.held
        if isinstance(held, ExactStream):
            return dict(zip(HISTORY, held.history.rows(self.rows), strict=True))
        return held.engine.read(self._held.fork, MOVING_PLANES)

    def rows_kept(self) -> Rows:
        """The rows of an exact stream's snapshot."""
        planes = self.planes()
        return planes["q"], planes["k"], planes["v"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the snapshot to one file, whole or not at all; `load` reads it, for any device.

        The layer's landmarks are not in it: keep `layer.state()` once, and snapshots as they come.
        Raises `OSError` where it cannot be written, `DeviceError` where it cannot be read back.
        """
        header = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "geometry": self.geometry.to_dict(),
            "rows": self.rows,
            "epoch": self.epoch,
        }
        write_arrays(path, header, self.planes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Snapshot:
        """The snapshot that `save` wrote, on the host until a layer takes it.

        Raises `StateFileError` (a `ValueError`) for a foreign, truncated or altered file, `OSError` where
        it cannot be read.
        """
        header, arrays = read_arrays(path, FORMAT, VERSION)
        try:
            geometry = Geometry.from_dict(header["geometry"])
            rows = as_index("rows", header["rows"], 0)
            name, epoch = header["name"], header["epoch"]
            if not isinstance(name, str) or not (epoch is None or isinstance(epoch, str)):
                raise ValueError(f"name {name!r}, epoch {epoch!r}")
            problem = (
                history_problem(geometry, rows, arrays)
                if epoch is None
                else planes_problem(geometry, arrays, MOVING_PLANES)
                or rows_problem(geometry, rows, arrays["group_meta"])
            )
            if problem:
                raise ValueError(problem)
            nbytes = sum(a.nbytes for a in arrays.values())
            return cls(name, geometry, rows, epoch, nbytes, arrays)
        except (CortiqError, KeyError, TypeError, ValueError) as error:
            raise StateFileError(f"{path}: no layer can have this snapshot: {error}") from error


def moving_bytes(geometry: Geometry, archive: int, kv: str) -> int:
    """Bytes of the planes that a snapshot copies, on a device that keeps rings so."""
    sizes = Sizes.of(geometry, archive=archive or 1, kv=kv)
    names = (*MOVING_PLANES, *(ARCHIVE_PLANES if archive else ()))
    return sum(PLANES[name].nbytes(sizes) for name in names)


def check_fits(snapshot: Any, geometry: Geometry, epoch: str | None, line: object) -> Snapshot:
    """The snapshot, if a layer of that geometry, epoch and line can take it; else raises why not."""
    if not isinstance(snapshot, Snapshot):
        raise ArgumentTypeError(f"snapshot: {type(snapshot).__name__}, expected a Snapshot")
    what = _what(snapshot)
    if snapshot.geometry != geometry:
        raise StateError(f"{what}: of a layer of {snapshot.geometry}, expected {geometry}")
    held = snapshot.on_engine
    # The seal that a layer made of its own rows divides no line: both sides of it are at hand.
    if snapshot.epoch != epoch and not (held is not None and held.line is line):
        raise StateError(
            f"{what}: of epoch {_told(snapshot.epoch)}, the layer is of {_told(epoch)}; landmarks are not in "
            "a snapshot, so load the state that it was taken from (into a cache after `del cache[i]`)"
        )
    return snapshot


def restored(
    snapshot: Snapshot, held: SealedStream | ExactStream
) -> tuple[SealedStream | ExactStream, Callable[[], None]]:
    """The stream that a layer with `held` has once it has taken the snapshot back, and what is left to do for
    it, which takes no memory any more. The stream keeps the layer's own options. Raises `StateError` where
    what the snapshot moves belongs to no stream of the layer's seal."""
    engine, here = held.engine, snapshot.on_engine
    if here is not None and (here.held.engine is not engine or here.held.archive != held.archive):
        here = None
    if not snapshot.sealed:
        # A stream of other options would seal itself by them.
        if here is None or here.held.options != held.options:
            rows = snapshot.rows_kept()
            state = LayerState(held.geometry, held.options, snapshot.rows, history=rows)
            return ExactStream.start(engine, state, held.archive), _nothing
        assert isinstance(here.held, ExactStream)
        history = here.held.history.copy(snapshot.rows)
        fork = engine.fork(here.fork)
        return replace(here.held, resident=fork, history=history, drafts={}), _nothing
    if here is None:
        # From a file, another device or another kind of layer: what it had archived is not known here.
        assert isinstance(held, SealedStream)
        planes = snapshot.planes()
        evicted = planes["group_meta"][:, META_EVICTED].copy()
        still = engine.read(held.resident, STILL_PLANES)
        if epoch_of(held.geometry, {**still, **planes}) != held.epoch:
            raise StateError(
                f"{_what(snapshot)}: its far limit, landmarks in use or shift are not those of epoch "
                f"{held.epoch}"
            )
        resident = engine.replaced(held.resident, planes)
        renewed_at = min(held.renewed_at, snapshot.rows)
        return replace(held, resident=resident, archived_from=evicted, renewed_at=renewed_at), _nothing
    assert isinstance(here.held, SealedStream)
    if isinstance(held, SealedStream) and held.epoch == snapshot.epoch:
        after = replace(here.held, options=held.options, resident=held.resident)
        return after, partial(engine.assign, held.resident, here.fork)
    return replace(here.held, options=held.options, resident=engine.fork(here.fork)), _nothing


def _nothing() -> None:
    """What is left to do where the stream is a new one."""


def _what(snapshot: Snapshot) -> str:
    return f"snapshot {snapshot.name!r}" if snapshot.name else "snapshot"


def _told(epoch: str | None) -> str:
    return "none (not sealed yet)" if epoch is None else epoch
