"""What a device holds of a layer: its state, its archive, its drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ..arrays import as_float16
from ..geometry import Geometry
from ..planes import (
    ARCHIVE_PLANES,
    KV_PLANES,
    MOVING_PLANES,
    PENDING_PLANES,
    STATE_PLANES,
    STORES,
    Sizes,
    packed,
    store_bytes,
    store_ranges,
)
from ..planning import check_plane
from ..plans import plane_bytes
from .buffers import Part, Place, span
from .context import Context

FIXED_PLANES: tuple[str, ...] = tuple(name for name in STATE_PLANES if name not in MOVING_PLANES)
"""The state planes that no row changes; forks share them."""
MOST_SPARES = 4
"""Buffers of forgotten drafts that a resident keeps for later ones: a small tree of drafts needs no more."""

Buffers = dict[str, Place]
"""Planes by name, and stores whose planes lie in one buffer."""
Copy = tuple[Any, int, Any, int, int]
"""A place and an offset into it, a target and an offset into that, and how many bytes."""


@dataclass(frozen=True)
class Draft:
    """The rows of an uncommitted call, in buffers named as the planes that keep them."""

    rows: int
    buffers: Buffers


class Resident:
    """A layer's planes on a device, each with at least the room that the geometry asks for.

    `archive`: evictions that the archive holds, 0 where there is none. `shares_fixed`: whether another
    resident may have the same buffers for `FIXED_PLANES`, which then must not be written. `kv`: how its rings
    are kept, one of `planes.KV_BYTES`.
    """

    def __init__(
        self,
        geometry: Geometry,
        buffers: Buffers,
        archive: int = 0,
        shares_fixed: bool = False,
        kv: str = "f32",
    ) -> None:
        self.geometry = geometry
        self.buffers = buffers
        self.archive = archive
        self.shares_fixed = shares_fixed
        self.kv = kv
        self.drafts: dict[str, Draft] = {}
        self._spares: list[Buffers] = []

    @property
    def sizes(self) -> Sizes:
        """What the symbols of the planes' shapes stand for."""
        return self.sizes_of(self.geometry)

    def sizes_of(self, geometry: Geometry) -> Sizes:
        """The same for another geometry, whose rings are kept as this one's are."""
        return Sizes.of(geometry, archive=max(1, self.archive), kv=self.kv)

    @property
    def moving(self) -> tuple[str, ...]:
        """The planes that a committed row changes."""
        return (*MOVING_PLANES, *ARCHIVE_PLANES) if self.archive else MOVING_PLANES

    @property
    def planes(self) -> tuple[str, ...]:
        """The planes that make up the layer, scratch apart."""
        return (*STATE_PLANES, *ARCHIVE_PLANES) if self.archive else STATE_PLANES

    @property
    def nbytes(self) -> int:
        """Bytes held: state, archive, drafts, and what is kept for drafts to come."""
        return sum(buffer.size for buffer in self._held())

    def _held(self) -> Iterator[Any]:
        yield from (place for name, place in self.buffers.items() if name not in STORES)
        for buffers in self._rooms():
            yield from buffers.values()

    def _rooms(self) -> Iterator[Buffers]:
        yield from (draft.buffers for draft in self.drafts.values())
        yield from self._spares

    def forget(self) -> None:
        """Forgets all drafts."""
        # The first draft's buffers come out first again, so that a loop meets its own recordings.
        self._spare(draft.buffers for draft in reversed(self.drafts.values()))
        self.drafts.clear()

    def keep(self, name: str, draft: Draft) -> None:
        """Makes a draft the one of that name, in buffers that `room` gave."""
        self._spares = [spare for spare in self._spares if spare is not draft.buffers]
        before = self.drafts.pop(name, None)
        self.drafts[name] = draft
        if before is not None:
            self._spare([before.buffers])

    def _spare(self, rooms: Iterable[Buffers]) -> None:
        self._spares = [*self._spares, *rooms][-MOST_SPARES:]

    def room(self, context: Context, rows: int) -> Buffers:
        """Buffers for a draft of `rows` rows that no draft is in; they are the resident's from `keep` on.

        Raises:
            GeometryError: a plane does not fit one binding.
            DeviceMemoryError: the device has no room.
        """
        sizes = Sizes.of(self.geometry, rows)
        need = {name: plane_bytes(name, sizes) for name in PENDING_PLANES}
        for name in PENDING_PLANES:
            check_plane(name, sizes, context.limits)
        for spare in reversed(self._spares):
            if all(spare[name].size >= nbytes for name, nbytes in need.items()):
                return spare
        return {name: context.memory.create(name, self._grown(context, name, need[name])) for name in need}

    def _grown(self, context: Context, name: str, need: int) -> int:
        """As much as the others have, or about twice that: drafts may get longer by a row each time."""
        have = max((room[name].size for room in self._rooms()), default=0)
        return max(need, have if need <= have else min(2 * have, context.limits.binding_bytes))


def kept(name: str, array: npt.NDArray[Any], kv: str) -> npt.NDArray[Any]:
    """A plane's array as a device keeps it; raises `ArgumentError` for what has no float16."""
    return packed(as_float16(name, array)) if kv == "f16" and name in KV_PLANES else array


def allocate(context: Context, names: Iterable[str], sizes: Sizes) -> Buffers:
    """Room for planes: both of a store in one buffer where that is no larger than a binding.

    Raises `DeviceMemoryError` where there is none.
    """
    wanted = tuple(names)
    found: Buffers = {}
    for store, planes in STORES.items():
        nbytes = store_bytes(store, sizes)
        if set(planes) <= set(wanted) and nbytes <= context.limits.binding_bytes:
            found |= parts(context.memory.create(store, nbytes), store, sizes)
    for name in wanted:
        if name not in found:
            found[name] = context.memory.create(name, plane_bytes(name, sizes))
    return found


def parts(buffer: Any, store: str, sizes: Sizes, prefix: str = "") -> Buffers:
    """A store in a buffer, and each of its planes; `prefix` goes before their names."""
    found: Buffers = {prefix + store: Part(buffer, 0, store_bytes(store, sizes))}
    for name, (at, nbytes) in store_ranges(store, sizes).items():
        found[prefix + name] = Part(buffer, at, nbytes)
    return found


def copy(context: Context, copies: Iterable[Copy], step: str) -> None:
    """Makes the copies on the device, in order, in one submission."""
    encoder = context.encoder(f"o1.{step}")
    with context.translated(step):
        for source, source_at, target, target_at, nbytes in copies:
            (read, read_at, _), (write, write_at, _) = span(source), span(target)
            encoder.copy_buffer_to_buffer(read, read_at + source_at, write, write_at + target_at, nbytes)
    context.submit(encoder, step)
