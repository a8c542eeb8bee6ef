"""Rows that passed a layer, copied on the device into buffers that outlive the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Float32
from ..errors import ArgumentError
from ..geometry import Geometry
from ..kernels import KERNELS
from ..params import Params
from .context import Context, GroupKey
from .recording import Step, make_step, pack

FIRST_ROWS = 256
"""Rows of a log's first segment."""
WINDOW_ROWS = 64
"""A copy binds its segment from a multiple of so many rows on, which is one of 256 bytes for any width.

A row's place then takes few values, and so do a copy's parameters, however long the log gets.
"""
_COPY = KERNELS["o1c_copy"]


class _Segment(NamedTuple):
    """Rows `first .. first + rows` of a log, a buffer for each part."""

    first: int
    rows: int
    buffers: dict[str, Any]


class Log:
    """An `engine.Log` on one device; it grows by segments, and what it holds is never copied again.

    Raises `ArgumentError` for parts that no row has.
    """

    def __init__(self, context: Context, geometry: Geometry, parts: tuple[str, ...]) -> None:
        shapes = {
            "q": (geometry.num_heads, geometry.head_dim),
            "k": (geometry.num_kv_heads, geometry.head_dim),
            "v": (geometry.num_kv_heads, geometry.value_dim or 0),
        }
        if not parts or not set(parts) <= set(shapes):
            raise ArgumentError(f"parts: {parts!r}, expected some of {tuple(shapes)}")
        self.context = context
        self.parts = parts
        self.rows = 0
        self.shapes = {part: shapes[part] for part in parts}
        self._row_bytes = {part: 4 * heads * width for part, (heads, width) in self.shapes.items()}
        self._segments: list[_Segment] = []
        self._window: tuple[int, int] | None = None
        self._bound: set[GroupKey] = set()

    @property
    def nbytes(self) -> int:
        """Bytes held, with the room for rows to come."""
        return sum(buffer.size for segment in self._segments for buffer in segment.buffers.values())

    def steps(self, sources: Mapping[str, tuple[Any, int]], rows: int, after: int = 0) -> list[Step]:
        """The copies of the first `rows` rows of `sources` behind the log's rows and `after` more.

        Everything that can fail does so here. `rows` of the log is for the caller to move, once the
        steps have been submitted.

        Args:
            sources: a buffer for each part, and how many of its bytes to bind.
            rows: rows to copy.
            after: rows whose copies go in before.
        """
        begin = self.rows + after
        self._reserve(begin + rows)
        steps: list[Step] = []
        for segment in self._segments:
            low, high = max(begin, segment.first), min(begin + rows, segment.first + segment.rows)
            if low < high:
                for part in self.parts:
                    steps.append(self._copy(part, sources[part], low - begin, segment, low, high - low))
        return steps

    def _reserve(self, rows: int) -> None:
        most = self.context.limits.binding_bytes // max(self._row_bytes.values())
        have = sum(segment.rows for segment in self._segments)
        while have < rows:
            last = self._segments[-1].rows if self._segments else FIRST_ROWS // 2
            size = min(most, max(2 * last, rows - have))
            buffers = {
                part: self.context.memory.create(f"log.{part}", size * nbytes)
                for part, nbytes in self._row_bytes.items()
            }
            self._segments.append(_Segment(have, size, buffers))
            have += size

    def _copy(
        self, part: str, source: tuple[Any, int], skip: int, segment: _Segment, row: int, rows: int
    ) -> Step:
        context, nbytes = self.context, self._row_bytes[part]
        window, inside = divmod(row - segment.first, WINDOW_ROWS)
        offset = window * WINDOW_ROWS * nbytes
        params: Params = {
            "count": rows * nbytes // 16,
            "src_at": skip * nbytes // 16,
            "dst_at": inside * nbytes // 16,
            "pad0": 0,
        }
        pipeline, layout = context.pipeline(_COPY.name)
        (slot,) = context.parameters.place([pack(_COPY.name, params.items())])
        target = segment.buffers[part]
        ranges = [
            (context.parameters.buffer, 0, _COPY.params_dtype.itemsize),
            (source[0], 0, source[1]),
            (target, offset, target.size - offset),
        ]
        if self._window != (segment.first, window):
            # No window comes back: its groups would pile up.
            for key in self._bound:
                context.groups.discard(key)
            self._bound.clear()
            self._window = (segment.first, window)
        self._bound.add(context.groups.key(_COPY.name, ranges))
        with context.translated(f"{_COPY.name}: bind group"):
            group = context.groups.get(_COPY.name, layout, ranges)
        return make_step(context, _COPY.name, pipeline, group, slot, _COPY.grid(params))

    def read(self) -> tuple[Float32, ...]:
        """The rows, an array `(rows, heads, width)` for each part."""
        found = []
        for part in self.parts:
            array = np.empty((self.rows, *self.shapes[part]), np.float32)
            for segment in self._segments:
                piece = array[segment.first : segment.first + segment.rows]
                if len(piece):
                    self.context.download(segment.buffers[part], piece, f"read of log.{part}")
            found.append(array)
        return tuple(found)
