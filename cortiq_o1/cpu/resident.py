"""A layer's state on NumPy, and the one way it moves: after a call's outputs are there, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..geometry import Geometry
from ..planes import (
    FLUSH_ROWS,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
)

Meta = npt.NDArray[np.uint32]


@dataclass
class DirectResident:
    """A layer's state: the planes of `planes.PLANES`, the numerator's two levels apart."""

    geometry: Geometry
    ring_k: Float32
    ring_v: Float32
    k_tilde: Float32
    q_tilde: Float32
    mix: Float32
    group_meta: Meta
    far_mz: Float32
    t_total: Float32
    t_recent: Float32
    pending: tuple[Float32, Float32] | None = None
    ring_norms: Float32 = field(init=False)
    """The squares of the ring keys' norms, `(g, slots)`."""
    mark_norms: Float32 = field(init=False)
    """The largest square of a key landmark's norm, `(g,)`."""

    def __post_init__(self) -> None:
        self.ring_norms = squares(self.ring_k)
        self.mark_norms = squares(self.k_tilde).max(axis=1, initial=0.0)


def squares(rows: Float32) -> Float32:
    """The squares of the norms of `rows (a, b, d)`."""
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
        found.append(Run(first, g, length, head, window, far_len, landmarks, rows, evicted, folded))
        first = g
    return found


@dataclass
class Step:
    """What a sub-chunk makes of the state, until `Journal.move` puts it there."""

    runs: list[Run]
    k: Float32
    v: Float32
    norms: Float32
    """The squares of the norms of `k`, `(rows, g)`."""
    far_mz: Float32 | None = None
    t_recent: Float32 | None = None
    totals: list[tuple[tuple[Any, ...], Float32]] = field(default_factory=list)
    """`(index, values)` of what changes in the numerator's total."""


class Journal:
    """Moves a resident's state within one call, and can take all of it back."""

    def __init__(self, resident: DirectResident, spares: Spares) -> None:
        self._resident = resident
        self._spares = spares
        self._before = (resident.group_meta, resident.far_mz, resident.t_recent)
        self._undo: list[tuple[Float32, tuple[Any, ...], Float32]] = []

    def move(self, step: Step) -> None:
        """The state after the step's rows."""
        resident = self._resident
        meta = resident.group_meta.copy()
        writes: list[tuple[Float32, tuple[Any, ...], Float32]] = []
        for run in step.runs:
            groups = slice(run.first, run.last)
            for slots, rows in run.slots(run.head + run.length, run.rows):
                for ring, new in (
                    (resident.ring_k, step.k),
                    (resident.ring_v, step.v),
                    (resident.ring_norms, step.norms),
                ):
                    writes.append((ring, (groups, slots), new[rows, groups].swapaxes(0, 1)))
            meta[groups, META_LEN] = run.length + run.rows - run.evicted
            meta[groups, META_HEAD] = (run.head + run.evicted) % run.window
            meta[groups, META_FAR_LEN] = run.far_len + run.folded
        writes += [(resident.t_total, index, values) for index, values in step.totals]
        self._undo += [(array, index, array[index].copy()) for array, index, _ in writes]
        # All that can run out of memory is behind us.
        for array, index, values in writes:
            array[index] = values
        resident.group_meta = meta
        if step.far_mz is not None:
            resident.far_mz = step.far_mz
        if step.t_recent is not None:
            self._keep(resident.t_recent)
            resident.t_recent = step.t_recent

    def roll_back(self) -> None:
        """The state as it was when the journal began."""
        resident = self._resident
        for array, index, old in reversed(self._undo):
            array[index] = old
        self._undo.clear()
        self._keep(resident.t_recent)
        resident.group_meta, resident.far_mz, resident.t_recent = self._before

    def close(self) -> None:
        """The state stays as it is now."""
        if self._before[2] is not self._resident.t_recent:
            self._spares.give(self._before[2])

    def _keep(self, array: Float32) -> None:
        if array is not self._before[2]:
            self._spares.give(array)


class Spares:
    """A numerator that a step writes comes from here, the one it replaces goes here."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, ...], Float32] = {}

    def take(self, like: Float32) -> Float32:
        array = self._arrays.pop(like.shape, None)
        return np.empty_like(like) if array is None else array

    def give(self, array: Float32) -> None:
        self._arrays[array.shape] = array
