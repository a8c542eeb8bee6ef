"""Rows that passed a layer, on NumPy: the log of both engines, and how several logs grow as one."""

from __future__ import annotations

import numpy as np

from ..arrays import Float32
from ..geometry import Geometry


class RowLog:
    """An `engine.Log` in arrays that grow by doubling. Only the first `rows` rows of them count."""

    def __init__(self, geometry: Geometry, parts: tuple[str, ...]) -> None:
        groups, width = geometry.num_kv_heads, geometry.head_dim
        shapes = {
            "q": (geometry.num_heads, width),
            "k": (groups, width),
            "v": (groups, geometry.value_dim or width),
        }
        self.parts = parts
        self.rows = 0
        self._arrays = [np.empty((0, *shapes[part]), np.float32) for part in parts]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self._arrays)

    def put(self, at: int, q: Float32, k: Float32, v: Float32) -> int:
        """Copies rows to `at` and on, behind those that count; returns where they end."""
        end = at + len(q)
        if end > len(self._arrays[0]):
            room = max(end, 2 * len(self._arrays[0]))
            grown = [np.empty((room, *old.shape[1:]), np.float32) for old in self._arrays]
            for new, old in zip(grown, self._arrays, strict=True):
                new[:at] = old[:at]
            self._arrays = grown
        given = {"q": q, "k": k, "v": v}
        for part, array in zip(self.parts, self._arrays, strict=True):
            array[at:end] = given[part]
        return end

    def read(self) -> tuple[Float32, ...]:
        """Copies of the rows that count, an array a part."""
        return tuple(array[: self.rows].copy() for array in self._arrays)


class Joining:
    """Rows on their way into logs: all that may fail is in `add`, and before `finish` none of them counts."""

    def __init__(self) -> None:
        self._ends: dict[RowLog, int] = {}

    def add(self, log: RowLog | None, q: Float32, k: Float32, v: Float32) -> None:
        """Copies rows behind those of a log, if there is one."""
        if log is not None:
            self._ends[log] = log.put(self._ends.get(log, log.rows), q, k, v)

    def finish(self) -> None:
        """Makes all of them count."""
        for log, end in self._ends.items():
            log.rows = end
