"""A stream too short for landmarks: attended exactly by the same kernels, over a ring that holds it all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays import Float32, Rows
from .engine import Accepted, Engine
from .geometry import Geometry
from .planes import META_FAR_LIMIT, META_LEN
from .sealed_stream import SealedStream
from .sealing import empty_planes, sealed_state
from .state import LayerState, SealOptions

CROSSING = "\0crossing"
"""The draft of a committed call that the seal falls into; no user's draft has this name."""


@dataclass
class Draft:
    """Rows of an uncommitted call: copies of those before the seal, and the sealed stream that has those
    after it as its draft."""

    before: Rows
    sealed: SealedStream | None = None


class History:
    """The rows of a stream, of which there is room for as many as the geometry seals at the latest.

    Rows are only ever added, so that who remembers a count has the rows up to it for good: a stream that
    goes back takes a `copy` first.
    """

    def __init__(self, rows: Rows, room: int) -> None:
        self.room = room
        q, k, v = (np.empty((room, *x.shape[1:]), np.float32) for x in rows)
        self._kept: Rows = (q, k, v)
        self.count = 0
        self.append(rows)

    def append(self, rows: Rows) -> None:
        """Keeps copies of rows, of which there is room for `room - count`."""
        end = self.count + len(rows[1])
        for kept, new in zip(self._kept, rows, strict=True):
            kept[self.count : end] = new
        self.count = end

    def rows(self, count: int | None = None, more: Rows | None = None) -> Rows:
        """Copies of the first `count` rows, all if None, and of `more` after them."""
        count = self.count if count is None else count
        q, k, v = (
            np.concatenate([kept[:count], *([] if more is None else [more[i]])])
            for i, kept in enumerate(self._kept)
        )
        return q, k, v

    def copy(self, count: int) -> History:
        """A history of its own with the first `count` rows."""
        return History(cut(self._kept, slice(count)), self.room)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(kept.nbytes for kept in self._kept)


def cut(rows: Rows, part: slice) -> Rows:
    """Views of some of the rows."""
    q, k, v = rows
    return q[part], k[part], v[part]


def exact_geometry(geometry: Geometry) -> Geometry:
    """A geometry whose ring holds every row until the seal, so that the same kernels attend exactly."""
    return Geometry(
        geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.value_dim,
        window=geometry.exact_rows, sinks=0, landmarks=4, rect=geometry.rect, scale=geometry.scale,
    )  # fmt: skip


@dataclass
class ExactStream:
    """All rows of a stream in one ring on the engine and, for the seal to come, on the host."""

    engine: Engine
    geometry: Geometry
    options: SealOptions
    archive: int
    resident: Any
    history: History
    drafts: dict[str, Draft] = field(default_factory=dict)

    @classmethod
    def start(cls, engine: Engine, state: LayerState, archive: int) -> ExactStream:
        """A stream with the rows of a state that is not sealed; `archive` is for after the seal."""
        assert state.history is not None
        geometry = exact_geometry(state.geometry)
        planes = empty_planes(geometry)
        rows = len(state.history[1])
        planes["group_meta"][:, META_LEN] = rows
        planes["group_meta"][:, META_FAR_LIMIT] = 0
        planes["ring_k"][:, :rows] = state.history[1].transpose(1, 0, 2)
        planes["ring_v"][:, :rows] = state.history[2].transpose(1, 0, 2)
        history = History(state.history, state.geometry.exact_rows)
        resident = engine.upload(geometry, planes)
        return cls(engine, state.geometry, state.options, archive, resident, history)

    def crosses(self, count: int) -> bool:
        """Whether so many more rows are too many to stay exact."""
        return self.history.count + count > self.history.room

    def attend(self, rows: Rows, name: str) -> Float32:
        """Outputs of uncommitted rows, which become the draft of that name."""
        room = self.history.room - self.history.count
        head, tail = cut(rows, slice(room)), cut(rows, slice(room, None))
        q, k, v = head
        draft = Draft((q.copy(), k.copy(), v.copy()))
        parts = []
        if len(tail[1]):
            state = sealed_state(*self.history.rows(more=head), self.geometry, self.options)
            draft.sealed = SealedStream.of(self.engine, state, self.archive)
            parts.append(self.engine.attend(draft.sealed.resident, *tail, False))
        if len(head[1]):
            parts.insert(0, self.engine.attend(self.resident, *head, False, name))
        self.drafts[name] = draft
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def attend_committed(self, rows: Rows, log: Any) -> Float32:
        """Outputs of rows that do not cross; the stream moves over them."""
        out = self.engine.attend(self.resident, *rows, True, log=log)
        self.history.append(rows)
        self.drafts.clear()
        return out

    def accepting(
        self, rows: int, name: str, log: Callable[[bool], Any]
    ) -> tuple[list[Accepted], Callable[[], SealedStream | None]]:
        """What the engine has to commit for the first rows of a draft, and what to call once it has: it
        returns the sealed stream if they cross. `log`: where rows go, from before the seal or after it."""
        draft = self.drafts[name]
        before = min(rows, len(draft.before[1]))
        accepted = [Accepted(self.resident, before, name, log(False) if before else None)]
        after = draft.sealed if rows > before else None
        if after is not None:
            accepted.append(Accepted(after.resident, rows - before, log=log(True)))

        def finish() -> SealedStream | None:
            self.history.append(cut(draft.before, slice(before)))
            self.drafts.clear()
            return after

        return accepted, finish

    def forget(self, name: str) -> None:
        """Forgets one draft, whose rows the engine may have lost."""
        self.drafts.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes on the engine and on the host."""
        found = self.resident.nbytes + self.history.nbytes
        for draft in self.drafts.values():
            found += sum(x.nbytes for x in draft.before)
            found += draft.sealed.nbytes if draft.sealed else 0
        return int(found)
