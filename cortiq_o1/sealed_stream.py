"""A stream after its seal: the resident state, which seal it is of, and how that is renewed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Rows
from .engine import Engine
from .errors import ArgumentError, DeviceMemoryError
from .geometry import Geometry
from .planes import ARCHIVE_PLANES, META_EVICTED, META_HEAD, META_LEN
from .resealing import MIN_ARCHIVED, RESEALED_PLANES, from_archive, resealed
from .state import LayerState, SealOptions, epoch_of

Planes = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class SealedStream:
    """A sealed state on an engine.

    `archive`: rows that the resident's archive holds, 0 if it has none; `epoch` names the seal, see
    `LayerState.epoch`; `archived_from (G,)`: how many rows each group had evicted when the archive began;
    `renewed_at`: rows of the stream at the seal, or at its last renewal.
    """

    engine: Engine
    geometry: Geometry
    options: SealOptions
    archive: int
    resident: Any
    epoch: str
    archived_from: npt.NDArray[np.uint32]
    renewed_at: int

    @classmethod
    def of(cls, engine: Engine, state: LayerState, archive: int = 0) -> SealedStream:
        """The stream of a state, which is uploaded; raises `DeviceMemoryError` where there is no room."""
        assert state.epoch is not None
        try:
            resident = engine.upload(state.geometry, state.planes, archive)
        except DeviceMemoryError:
            raise
        except MemoryError as error:
            kept = f" with an archive of {archive} rows" if archive else ""
            raise DeviceMemoryError(
                f"state: no room for a layer of {state.geometry}{kept}: {error}"
            ) from error
        evicted = state.planes["group_meta"][:, META_EVICTED].copy()
        return cls(engine, state.geometry, state.options, archive, resident, state.epoch, evicted, state.rows)

    @classmethod
    def around(
        cls,
        engine: Engine,
        geometry: Geometry,
        options: SealOptions,
        resident: Any,
        archive: int,
        rows: int,
    ) -> SealedStream:
        """The stream of a resident that came about on the engine, `rows` rows after its beginning."""
        planes = engine.read(resident, RESEALED_PLANES)
        evicted = planes["group_meta"][:, META_EVICTED].copy()
        epoch = epoch_of(geometry, planes)
        return cls(engine, geometry, options, archive, resident, epoch, evicted, rows)

    @property
    def nbytes(self) -> int:
        """Bytes on the engine."""
        return int(self.resident.nbytes)

    def renewed(self, planes: Planes, rows: int) -> SealedStream:
        """The stream with the far field of `from_archive` or `from_rows`, after `rows` rows."""
        resident = self.engine.replaced(self.resident, planes)
        return replace(self, resident=resident, epoch=epoch_of(self.geometry, planes), renewed_at=rows)

    def from_archive(self) -> Planes | None:
        """A far field from the resident's own archive, None where too little is in it."""
        planes = self.engine.read(self.resident, ("group_meta", *ARCHIVE_PLANES))
        return from_archive(self.geometry, self.options, planes, self.archived_from)

    def from_rows(self, rows: Rows, evicted: bool, seen: int) -> Planes:
        """A far field from rows of the stream, which has `seen`; see `Layer.reseal`."""
        count, sinks = len(rows[1]), self.geometry.sinks
        if count < MIN_ARCHIVED:
            raise ArgumentError(f"k: {count} rows, expected at least {MIN_ARCHIVED} to reseal from")
        planes = self.engine.read(self.resident, ("group_meta", "ring_k", "ring_v"))
        meta = planes["group_meta"]
        held = meta[:, META_LEN].astype(int)
        if evicted:
            left = seen - sinks - int(held.max())
            if count > left:
                raise ArgumentError(
                    f"k: {count} rows, of which every group's window has let go of {left} so far; expected "
                    "no more of them"
                )
            return resealed(self.geometry, self.options, meta, *rows, skip=np.zeros(len(meta), int))
        if count > seen:
            raise ArgumentError(f"k: {count} rows, the stream has {seen}")
        # Rows that reach back to the sinks, which stay where they are, must not be folded too.
        q, k, v = (x[max(0, count + sinks - seen) :] for x in rows)
        slots = (meta[:, META_HEAD].astype(int) + held - 1) % np.array(self.geometry.group_windows)
        for name, new in (("k", k), ("v", v)):
            newest = planes["ring_" + name][np.arange(len(meta)), slots]
            if not np.array_equal(newest, new[-1]):
                raise ArgumentError(
                    f"{name}: the last row is not the newest of the layer's window; give rows up to the "
                    "newest, or evicted=True for rows that have all left the window"
                )
        return resealed(self.geometry, self.options, meta, q, k, v, skip=held)
