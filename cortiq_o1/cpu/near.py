"""The near part: scores and values of sinks, ring and own rows, by BLAS on views of the ring plane."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..arrays import Float32
from ..kernels import LARGE

PRODUCT_WORK = 2**19 - 1
VECTOR_WORK = 9 * 2**10 - 1
"""Multiply-adds up to which OpenBLAS keeps a matrix product, a matrix times a vector, on the calling
thread. With larger ones the engine's threads would wait for each other's turn at BLAS's own."""
VECTOR_ROWS = 4
"""Up to so many query rows, a product with each is faster than one with all: it packs no keys."""
WHOLE_ROWS = 32
"""From so many query rows on, cutting a product costs more than BLAS's own threads: it stays whole, and
none of the engine's threads may run beside it."""


class Scratch:
    """Named float32 buffers that grow and are reused; one for each thread."""

    def __init__(self) -> None:
        self._buffers: dict[str, Float32] = {}

    def take(self, name: str, *shape: int) -> Float32:
        """A C-contiguous array of `shape` with any content, valid until the next `take` of `name`."""
        count = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < count:
            buffer = self._buffers[name] = np.empty(count, np.float32)
        return buffer[:count].reshape(shape)


def _pieces(count: int, cost: int, limit: int) -> tuple[int, int]:
    """`count` keys as `(pieces, keys of a piece)`, of at most `limit` multiply-adds at `cost` a key.

    What the pieces leave over is shorter than one of them and a few dozen keys.
    """
    most = max(1, limit // cost)
    size = count // -(-count // most)
    if size >= 32:
        size -= size % 16
    return count // size, size


def scores(q: Float32, keys: Float32, out: Float32) -> None:
    """`out (g, r, n) = q (g, r, d) keys (g, n, d)^T`, in products that BLAS runs on this thread."""
    groups, rows, width = q.shape
    count = keys.shape[1]
    if not count:
        return
    single = rows <= VECTOR_ROWS
    pieces, size = (
        _pieces(count, width, VECTOR_WORK) if single else _pieces(count, rows * width, PRODUCT_WORK)
    )
    at = pieces * size
    cut = keys[:, :at].reshape(groups, pieces, size, width)
    to = out[:, :, :at].reshape(groups, rows, pieces, size).swapaxes(1, 2)
    if single:
        np.matmul(cut[:, :, None], q[:, None, :, :, None], out=to[..., None])
    else:
        np.matmul(q[:, None], cut.swapaxes(2, 3), out=to)
    scores(q, keys[:, at:], out[:, :, at:])


def add_values(weights: Float32, values: Float32, out: Float32, scratch: Scratch) -> None:
    """`out (g, r, dv) += weights (g, r, n) values (g, n, dv)`, cut as `scores` is."""
    groups, rows, count = weights.shape
    width = values.shape[2]
    if not count:
        return
    single = rows <= VECTOR_ROWS
    pieces, size = (
        _pieces(count, width, VECTOR_WORK) if single else _pieces(count, rows * width, PRODUCT_WORK)
    )
    at = pieces * size
    sums = scratch.take("sums", groups, pieces, rows, width)
    cut = weights[:, :, :at].reshape(groups, rows, pieces, size).swapaxes(1, 2)
    of = values[:, :at].reshape(groups, pieces, size, width)
    if single:
        np.matmul(cut[:, :, :, None], of[:, :, None], out=sums[:, :, :, None])
    else:
        np.matmul(cut, of, out=sums)
    out += sums[:, 0] if pieces == 1 else sums.sum(axis=1)
    add_values(weights[:, :, at:], values[:, at:], out, scratch)


class Window:
    """Where the keys of groups of equal `group_meta` lie, and which of them each new row sees.

    Columns: the ring's rows, the sinks, then the sub-chunk's own rows.
    """

    def __init__(self, length: int, head: int, window: int, capacity: int, sinks: int, rows: int) -> None:
        full = length == window
        # A full ring is one range whatever its head: the order of keys does not matter.
        end = head + length
        ranges = [(0, window)] if full else [(head, min(end, window)), (0, max(0, end - window))]
        ranges.append((capacity, capacity + sinks))
        self.ranges: list[tuple[int, int]] = []
        for low, high in ranges:
            if low == high:
                continue
            if self.ranges and self.ranges[-1][1] == low:
                self.ranges[-1] = (self.ranges[-1][0], high)
            else:
                self.ranges.append((low, high))
        self.rows = rows
        self.held = length + sinks
        self.columns = self.held + rows
        self.first = window - length
        """The first row that evicts."""
        evicted = max(0, rows - self.first)
        start = head if full else 0
        cut = min(evicted, window - start)
        self._masks = []
        self._evicted = []
        for columns, age in ((slice(start, start + cut), 0), (slice(0, evicted - cut), cut)):
            ages = np.arange(age, age + columns.stop - columns.start)
            if len(ages):
                self._evicted.append((columns.start, age, len(ages)))
                self._masks.append((columns, ages <= np.arange(rows)[:, None] - self.first))
        if rows > 1:
            own = slice(self.held, self.held + rows)
            self._masks.append((own, ~np.tri(rows, dtype=bool)))

    def hide(self, logits: Float32) -> None:
        """Takes what a row does not see out of `logits (..., rows, columns)`."""
        for columns, mask in self._masks:
            np.copyto(logits[..., columns], np.float32(-LARGE), where=mask)

    def put(self, weights: Float32, evicted: Float32) -> None:
        """Gives the rows that left the window their far weights `evicted (..., rows, f)`, oldest first,
        where `weights (..., rows, columns)` hold nothing for them."""
        folded = evicted.shape[-1]
        for column, age, count in self._evicted:
            count = min(count, folded - age)
            if count > 0:
                weights[..., column : column + count] += evicted[..., age : age + count]

    def scores(self, q: Float32, keys: Float32, own: Float32, out: Float32) -> None:
        """`out (g, r, columns)` of scaled `q (g, r, d)`, r = heads times rows, rows the inner one.

        `keys`: the groups' part of the ring plane; `own (g, rows, d)`: the sub-chunk's.
        """
        for part, columns in self._parts(keys, own):
            if q.shape[1] >= WHOLE_ROWS:
                np.matmul(q, part.swapaxes(1, 2), out=out[:, :, columns])
            else:
                scores(q, part, out[:, :, columns])

    def sum_values(
        self, weights: Float32, values: Float32, own: Float32, out: Float32, scratch: Scratch
    ) -> None:
        """`out (g, r, dv)`: the values under `weights (g, r, columns)`; they lie as keys do."""
        whole = out.shape[1] >= WHOLE_ROWS
        if not whole:
            out.fill(0.0)
        for part, columns in self._parts(values, own):
            if not whole:
                add_values(weights[:, :, columns], part, out, scratch)
            elif columns.start:
                out += np.matmul(weights[:, :, columns], part, out=scratch.take("sums", *out.shape))
            else:
                np.matmul(weights[:, :, columns], part, out=out)

    def _parts(self, plane: Float32, own: Float32) -> Iterator[tuple[Float32, slice]]:
        """What lies together in a plane of keys or values, and its columns."""
        at = 0
        for low, high in self.ranges:
            yield plane[:, low:high], slice(at, at + high - low)
            at += high - low
        yield own, slice(at, self.columns)
