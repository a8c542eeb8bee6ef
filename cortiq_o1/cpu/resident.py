"""A layer's state on NumPy, and the one way it moves: after a call's outputs are there, and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..geometry import Geometry
from ..planes import (
    ARCHIVE_PLANES,
    FLUSH_ROWS,
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    PLANES,
    STATE_PLANES,
    T_RECENT,
    T_TOTAL,
    Sizes,
)
from .batches import joined, place, without

Array = npt.NDArray[Any]
Meta = npt.NDArray[np.uint32]
Rows = tuple[Float32, Float32, Float32]
"""Queries, keys and values of the same rows."""

OWNED = ("ring_k", "ring_v", "ring_norms", "t_total", "t_recent", *ARCHIVE_PLANES)
"""Arrays that a call writes, or gives away to be written: no two residents in use have the same one."""
REPLACED = ("group_meta", "far_mz")
"""Arrays that move as well, but never by a write: a call puts others in their place."""
STILL = ("k_tilde", "q_tilde", "mix", "mark_norms")
_OF = {"ring_norms": "ring_k", "t_total": "t_hat", "t_recent": "t_hat", "mark_norms": "k_tilde"}
# Arrays that are no plane, and the plane whose groups or heads they have.
SPARES = 8
"""Numerators kept for the next call: as many as layers of different shapes may take turns."""


@dataclass
class DirectResident:
    """A layer's state: the planes of `planes.PLANES`, the numerator's two levels apart."""

    geometry: Geometry
    ring_k: Float32
    """A view `(g, slots, d)` of memory `(g, d, slots)`: so laid, few queries times keys are faster."""
    ring_v: Float32
    k_tilde: Float32
    q_tilde: Float32
    mix: Float32
    group_meta: Meta
    far_mz: Float32
    t_total: Float32
    t_recent: Float32
    archive_q: Float32
    archive_k: Float32
    archive_v: Float32
    ring_norms: Float32
    """The squares of the ring keys' norms, `(g, slots)`."""
    mark_norms: Float32
    """The largest square of a key landmark's norm, `(g,)`."""
    drafts: dict[str, Rows] = field(default_factory=dict)

    @classmethod
    def of(cls, geometry: Geometry, planes: Mapping[str, Array], archive: int) -> DirectResident:
        """A resident of copies of the state planes, with an empty archive of so many evictions."""
        sizes = Sizes.of(geometry, archive=archive)
        empty: dict[str, Any] = {
            name: np.zeros(PLANES[name].dims(sizes), np.float32) for name in ARCHIVE_PLANES
        }
        return cls(geometry, **_arrays({name: planes[name] for name in STATE_PLANES}), **empty)

    @property
    def archive(self) -> int:
        """Evictions that the archive holds."""
        return len(self.archive_q)

    @property
    def nbytes(self) -> int:
        """Bytes of state, archive and drafts."""
        held: list[Array] = [getattr(self, name) for name in (*OWNED, *REPLACED, *STILL)]
        held += [rows for draft in self.drafts.values() for rows in draft]
        return sum(array.nbytes for array in held)

    def plane(self, name: str) -> Array:
        """A copy of a plane."""
        if name == "t_hat":
            levels = [self.t_total, self.t_recent]
            return np.stack(levels if T_TOTAL < T_RECENT else levels[::-1], axis=1)
        copied: Array = getattr(self, name).copy()
        return copied

    def moving(self) -> dict[str, Any]:
        """What a committed row changes, as another resident may have it."""
        moving: dict[str, Any] = {name: getattr(self, name).copy(order="K") for name in OWNED}
        return moving | {name: getattr(self, name) for name in REPLACED}

    def fork(self) -> DirectResident:
        """One that moves on its own."""
        return replace(self, **self.moving(), drafts={})

    def assign(self, source: DirectResident) -> None:
        """What moves, from a fork of the same seal."""
        # By other arrays, not by writes: a call that is broken off leaves all or nothing.
        vars(self).update(source.moving(), drafts={})

    def replaced(self, planes: Mapping[str, Array]) -> DirectResident:
        """One with copies of these planes, in the place of this one."""
        return replace(self, **_arrays(planes), drafts={})

    def joined(self, other: DirectResident, geometry: Geometry) -> DirectResident:
        """One of `geometry`, with copies of the sequences of both."""
        return self._each(
            geometry, lambda plane, name: joined(plane, [getattr(self, name), getattr(other, name)])
        )

    def drop(self, geometry: Geometry, count: int, index: int) -> None:
        """Sequence `index` of `count` of `geometry` goes, the last takes its place."""
        left = self._each(
            geometry.batch(count - 1),
            lambda plane, name: without(geometry, plane, getattr(self, name), count, index),
        )
        vars(self).update(vars(left))

    def take(self, geometry: Geometry, index: int) -> DirectResident:
        """One of `geometry`, with copies of what sequence `index` has."""
        return self._each(
            geometry, lambda plane, name: getattr(self, name)[place(geometry, plane, index)].copy()
        )

    def _each(self, geometry: Geometry, make: Callable[[str, str], Array]) -> DirectResident:
        """A resident of `geometry`: `make(plane, name)` makes array `name`, which lies as `plane` does."""
        names = (*OWNED, *REPLACED, *STILL)
        made: dict[str, Any] = {name: _laid(name, make(_OF.get(name, name), name)) for name in names}
        return DirectResident(geometry, **made)


def _arrays(planes: Mapping[str, Array]) -> dict[str, Any]:
    """Copies of planes, and what is kept of them besides, as a resident names them."""
    found = {name: _laid(name, array.copy()) for name, array in planes.items() if name != "t_hat"}
    if "t_hat" in planes:
        found["t_total"], found["t_recent"] = (planes["t_hat"][:, at].copy() for at in (T_TOTAL, T_RECENT))
    if "ring_k" in found:
        found["ring_norms"] = squares(found["ring_k"])
    if "k_tilde" in found:
        found["mark_norms"] = squares(found["k_tilde"]).max(axis=1, initial=0.0)
    return found


def _laid(name: str, array: Array) -> Array:
    """An array as a resident lays it out in memory."""
    if name == "ring_k":
        return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
    return array


def squares(rows: Float32) -> Float32:
    """The squares of the norms of `rows (a, b, d)`, by the same sums however they lie."""
    rows = np.ascontiguousarray(rows)
    found: Float32 = np.einsum("abd,abd->ab", rows, rows)
    return found


@dataclass(frozen=True)
class Run:
    """Neighbouring groups `first..last` of equal `group_meta`, before a sub-chunk of `rows` rows."""

    first: int
    last: int
    length: int
    head: int
    window: int
    far_len: int
    landmarks: int
    rows: int
    evicted: int
    folded: int
    evictions: int
    """Rows that have left the ring before the sub-chunk, modulo 2^32."""

    @property
    def flushes(self) -> bool:
        """Whether the recent sums join the totals after this sub-chunk."""
        return (self.far_len + self.folded) // FLUSH_ROWS != self.far_len // FLUSH_ROWS

    @property
    def after(self) -> npt.NDArray[np.intp]:
        """Rows folded once each row has entered, `(rows,)`."""
        since = np.arange(1, self.rows + 1) - (self.window - self.length)
        return np.clip(since, 0, self.folded)

    def slots(self, start: int, count: int) -> Iterator[tuple[slice, slice]]:
        """`count` ring slots from `start` on, as `(slots, positions)` of at most two ranges."""
        start %= self.window
        cut = min(count, self.window - start)
        yield slice(start, start + cut), slice(cut)
        if cut < count:
            yield slice(count - cut), slice(cut, count)


def find_runs(meta: Meta, rows: int) -> list[Run]:
    """The groups in runs of equal meta."""
    found = []
    words = [tuple(row) for row in meta.tolist()]
    first = 0
    for g in range(1, len(words) + 1):
        if g < len(words) and words[g] == words[first]:
            continue
        row = words[first]
        length, window, far_len = row[META_LEN], row[META_WINDOW], row[META_FAR_LEN]
        evicted = max(0, rows - (window - length))
        folded = min(evicted, max(0, row[META_FAR_LIMIT] - far_len))
        head, landmarks = row[META_HEAD], row[META_LANDMARKS]
        found.append(
            Run(
                first, g, length, head, window, far_len, landmarks, rows, evicted, folded, row[META_EVICTED]
            )
        )  # fmt: skip
        first = g
    return found


Write = tuple[Array, tuple[Any, ...], Array]
"""An array, where in it, what is to be there."""
Change = tuple[Array, tuple[Any, ...], Array, Array]
"""A write, and a copy of what was there before."""


@dataclass
class Step:
    """What a sub-chunk makes of the state, until `Journal.move` puts it there."""

    runs: list[Run]
    q: Float32 | None
    """The rows' queries; without them the archive does not take in what the rows evict."""
    k: Float32
    v: Float32
    norms: Float32
    """The squares of the norms of `k`, `(rows, g)`."""
    far_mz: Float32 | None = None
    t_recent: Float32 | None = None
    totals: list[tuple[tuple[Any, ...], Float32]] = field(default_factory=list)
    """`(index, values)` of what changes in the numerator's total."""
    changes: list[Change] = field(default_factory=list)
    """What `Journal.prepare` has laid ready."""


RINGS = {"ring_k": "k", "ring_v": "v", "ring_norms": "norms"}
"""Arrays of a resident, and what of a step goes into their slots."""


def archive_writes(resident: DirectResident, run: Run, q: Float32) -> Iterator[Write]:
    """What the rows of a run with queries `q (rows, nh, d)` evict, into the archive."""
    groups, hpg = slice(run.first, run.last), resident.geometry.heads_per_group
    heads = slice(run.first * hpg, run.last * hpg)
    each = np.arange(run.evicted)
    slots = (run.evictions + each) % 2**32 % resident.archive
    ring = (run.head + each) % run.window
    yield resident.archive_q, (slots, heads), q[run.rows - run.evicted :, heads]
    # Copies: the ring is overwritten in the same move.
    yield resident.archive_k, (groups, slots), resident.ring_k[groups, ring]
    yield resident.archive_v, (groups, slots), resident.ring_v[groups, ring]


class Journal:
    """Moves a resident's state within one call, and can take all of it back."""

    def __init__(self, resident: DirectResident, spares: Spares) -> None:
        self.resident = resident
        self._spares = spares
        self._before = (resident.group_meta, resident.far_mz, resident.t_recent)
        self._undo: list[Write] = []

    def prepare(self, step: Step, ring: str) -> None:
        """Lays ready what goes into one of `RINGS`, before `move`.

        It only reads the state: threads may do it beside each other, and beside the work on the outputs.
        """
        array, new = getattr(self.resident, ring), getattr(step, RINGS[ring])
        writes: list[Write] = []
        for run in step.runs:
            groups = slice(run.first, run.last)
            for slots, rows in run.slots(run.head + run.length, run.rows):
                # Two copies, each along what lies together, are faster than one across both.
                part = np.ascontiguousarray(new[rows, groups].swapaxes(0, 1))
                writes.append((array, (groups, slots), part))
        step.changes.extend(_changes(writes))

    def move(self, step: Step) -> None:
        """The state after the step's rows, of which all rings are prepared."""
        resident = self.resident
        meta = resident.group_meta.copy()
        writes: list[Write] = [(resident.t_total, index, values) for index, values in step.totals]
        for run in step.runs:
            groups = slice(run.first, run.last)
            if step.q is not None and resident.archive and run.evicted:
                writes += archive_writes(resident, run, step.q)
            meta[groups, META_LEN] = run.length + run.rows - run.evicted
            meta[groups, META_HEAD] = (run.head + run.evicted) % run.window
            meta[groups, META_FAR_LEN] = run.far_len + run.folded
            meta[groups, META_EVICTED] = (run.evictions + run.evicted) % 2**32
        self._write(step.changes + _changes(writes))
        resident.group_meta = meta
        if step.far_mz is not None:
            resident.far_mz = step.far_mz
        if step.t_recent is not None:
            self._keep(resident.t_recent)
            resident.t_recent = step.t_recent

    def put(self, one: DirectResident, index: int) -> None:
        """What moves of `one` in the place of sequence `index`."""
        resident, geometry = self.resident, one.geometry
        others = {}
        for name in REPLACED:
            others[name] = getattr(resident, name).copy()
            others[name][place(geometry, name, index)] = getattr(one, name)
        self._write(
            _changes(
                (getattr(resident, name), place(geometry, _OF.get(name, name), index), getattr(one, name))
                for name in OWNED
            )
        )
        vars(resident).update(others)

    def _write(self, changes: list[Change]) -> None:
        self._undo += [(array, index, old) for array, index, _, old in changes]
        # All that can run out of memory is behind us.
        for array, index, values, _ in changes:
            array[index] = values

    def roll_back(self) -> None:
        """The state as it was when the journal began."""
        resident = self.resident
        for array, index, old in reversed(self._undo):
            array[index] = old
        self._undo.clear()
        self._keep(resident.t_recent)
        resident.group_meta, resident.far_mz, resident.t_recent = self._before

    def close(self) -> None:
        """The state stays as it is now."""
        if self._before[2] is not self.resident.t_recent:
            self._spares.give(self._before[2])

    def _keep(self, array: Float32) -> None:
        if array is not self._before[2]:
            self._spares.give(array)


def _changes(writes: Iterable[Write]) -> list[Change]:
    return [(array, index, values, array[index].copy(order="K")) for array, index, values in writes]


class Spares:
    """A numerator that a step writes comes from here, the one it replaces goes here.

    What is here is nobody's: who gives an array away must have had it alone. One a shape is enough, and of
    shapes only the latest are kept, for batches come in many.
    """

    def __init__(self) -> None:
        self._arrays: OrderedDict[tuple[int, ...], Float32] = OrderedDict()

    def take(self, like: Float32) -> Float32:
        """An array of that shape, with any content."""
        array = self._arrays.pop(like.shape, None)
        return np.empty_like(like) if array is None else array

    def give(self, array: Float32) -> None:
        """Takes an array that its owner lets go of."""
        self._arrays[array.shape] = array
        self._arrays.move_to_end(array.shape)
        if len(self._arrays) > SPARES:
            self._arrays.popitem(last=False)
