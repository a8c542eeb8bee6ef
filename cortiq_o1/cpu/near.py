"""The near part: softmax over sinks, ring and own rows, by BLAS on views of the ring plane."""

from __future__ import annotations

import math

import numpy as np

from ..arrays import Float32
from ..kernels import LARGE

PRODUCT_WORK = 2**19 - 1
VECTOR_WORK = 9 * 2**10 - 1
"""Multiply-adds up to which OpenBLAS keeps a matrix product, a matrix times a vector, on the calling
thread. With larger ones the engine's threads would wait for each other's turn at BLAS's own, which also
take no notice of a busy machine."""
VECTOR_ROWS = 4
"""Up to so many query rows, a product with each is faster than one with all: it packs no keys."""
VALUE_COLUMNS = 32
"""Columns of a value product that is cut, so that its inner dimension stays long."""


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
    columns = width
    if rows > 16:
        columns = max(c for c in range(4, min(width, VALUE_COLUMNS) + 1, 4) if width % c == 0)
    pieces, size = (
        _pieces(count, width, VECTOR_WORK) if single else _pieces(count, rows * columns, PRODUCT_WORK)
    )
    at = pieces * size
    sums = scratch.take("sums", groups, pieces, rows, width)
    cut = weights[:, :, :at].reshape(groups, rows, pieces, size).swapaxes(1, 2)
    if single:
        of = values[:, :at].reshape(groups, pieces, 1, size, width)
        np.matmul(cut[:, :, :, None], of, out=sums[:, :, :, None])
    else:
        blocks = width // columns
        of = values[:, :at].reshape(groups, pieces, size, blocks, columns).swapaxes(2, 3)
        to = sums.reshape(groups, pieces, rows, blocks, columns).swapaxes(2, 3)
        np.matmul(cut[:, :, None], of, out=to)
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
        self.first = window - length
        """The first row that evicts."""
        evicted = max(0, rows - self.first)
        start = head if full else 0
        cut = min(evicted, window - start)
        self._masks = []
        for columns, age in ((slice(start, start + cut), 0), (slice(0, evicted - cut), cut)):
            ages = np.arange(age, age + columns.stop - columns.start)
            if len(ages):
                self._masks.append((columns, ages <= np.arange(rows)[:, None] - self.first))
        if rows > 1:
            own = slice(self.held, self.held + rows)
            self._masks.append((own, ~np.tri(rows, dtype=bool)))

    def hide(self, logits: Float32) -> None:
        """Takes what a row does not see out of `logits (..., rows, columns)`."""
        for columns, mask in self._masks:
            np.copyto(logits[..., columns], np.float32(-LARGE), where=mask)


def attend_near(
    window: Window,
    q: Float32,
    planes: tuple[Float32, Float32],
    own: tuple[Float32, Float32],
    out: Float32,
    largest: Float32,
    mass: Float32,
    scratch: Scratch,
) -> None:
    """Near maximum `largest (g, r)`, and at scale `exp(-largest)` the mass `(g, r)` and values
    `out (g, r, dv)`, for scaled queries `q (g, r, d)`, r = heads times rows, rows the inner one.

    `planes`: keys and values of the groups, sinks behind the ring; `own`: those of the sub-chunk's rows.
    """
    groups, count, _ = q.shape
    logits = scratch.take("logits", groups, count, window.held + window.rows)
    at = 0
    for low, high in window.ranges:
        scores(q, planes[0][:, low:high], logits[:, :, at : at + high - low])
        at += high - low
    scores(q, own[0], logits[:, :, at:])
    window.hide(logits.reshape(groups, -1, window.rows, window.held + window.rows))
    np.max(logits, axis=2, out=largest)
    np.subtract(logits, largest[:, :, None], out=logits)
    np.exp(logits, out=logits)
    np.sum(logits, axis=2, out=mass)
    out.fill(0.0)
    at = 0
    for low, high in window.ranges:
        add_values(logits[:, :, at : at + high - low], planes[1][:, low:high], out, scratch)
        at += high - low
    add_values(logits[:, :, at:], own[1], out, scratch)
