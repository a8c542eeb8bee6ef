"""The near part: scores and values of sinks and ring by BLAS on views of the ring plane, and which keys a row
sees."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from ..arrays import Float32
from ..planes import LARGE

PRODUCT_WORK = 2**19 - 1
VECTOR_WORK = 9 * 2**10 - 1
"""Multiply-adds up to which OpenBLAS keeps a matrix product, a matrix times a vector, on the calling
thread. With larger ones the engine's threads would wait for each other's turn at BLAS's own."""
WHOLE_VECTOR_WORK = 2**17
"""A matrix times several vectors, in pieces that stay in the cache for all of them, where BLAS is told."""
_THREAD = threading.local()
VECTOR_ROWS = 4
"""Up to so many query rows, a product with each is faster than one with all: it packs no keys. Not where keys
lie with the width outside, as the ring's do: those are packed as fast as they are read."""
SCORE_ROWS, VALUE_ROWS = 64, 32
"""Least query rows of a product where they are cut: with these its sides are about equal, and BLAS packs
least for what it multiplies."""


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


@contextmanager
def whole_products(whole: bool) -> Iterator[None]:
    """On this thread, matrix products in one piece: BLAS is held to the calling thread by other means."""
    _THREAD.whole = whole
    try:
        yield
    finally:
        _THREAD.whole = False


def is_whole() -> bool:
    """Whether products of this thread are in one piece."""
    return getattr(_THREAD, "whole", False)


def _product_work() -> int:
    return 2**62 if is_whole() else PRODUCT_WORK


def _pieces(count: int, cost: int, limit: int) -> tuple[int, int]:
    """`count` keys as `(pieces, keys of a piece)`, of at most `limit` multiply-adds at `cost` a key.

    What the pieces leave over is shorter than one of them and a few dozen keys.
    """
    most = max(1, limit // cost)
    size = count // -(-count // most)
    if size >= 32 and size < count:
        size -= size % 8
    return count // size, size


def _row_blocks(rows: int, least: int, work: int) -> int:
    """Equal blocks of at least `least` rows, one if all are of one product."""
    if work <= _product_work():
        return 1
    return next((n for n in range(rows // least, 1, -1) if rows % n == 0), 1)


def _pieces_first(array: Float32) -> Float32:
    """`(..., blocks, rows, pieces, size)` as a view `(..., pieces, blocks, rows, size)`."""
    return array.swapaxes(-2, -3).swapaxes(-3, -4)


def scores(q: Float32, keys: Float32, out: Float32) -> None:
    """`out (..., r, n) = q (..., r, d) keys (..., n, d)^T`, in products that BLAS runs on this thread."""
    rows, width = q.shape[-2:]
    count = keys.shape[-2]
    if not count:
        return
    single = rows <= VECTOR_ROWS and keys.strides[-1] <= keys.strides[-2]
    if single:
        pieces, size = _pieces(count, width, WHOLE_VECTOR_WORK if is_whole() else VECTOR_WORK)
    else:
        blocks = _row_blocks(rows, SCORE_ROWS, rows * count * width)
        rows //= blocks
        pieces, size = _pieces(count, rows * width, _product_work())
    at = pieces * size
    # Pieces outside, rows inside: a piece of keys is in the cache for all of them.
    cut = keys[..., :at, :].reshape(*keys.shape[:-2], pieces, 1, size, width)
    if single:
        to = out[..., :at].reshape(*out.shape[:-1], pieces, size).swapaxes(-2, -3)
        np.matmul(cut, q[..., None, :, :, None], out=to[..., None])
    else:
        to = out[..., :at].reshape(*out.shape[:-2], blocks, rows, pieces, size)
        of = q.reshape(*q.shape[:-2], 1, blocks, rows, width)
        np.matmul(of, cut.swapaxes(-1, -2), out=_pieces_first(to))
    if at < count:
        scores(q, keys[..., at:, :], out[..., at:])


def add_values(
    weights: Float32, values: Float32, out: Float32, scratch: Scratch, fresh: bool = False
) -> None:
    """`out (..., r, dv) += weights (..., r, n) values (..., n, dv)`, cut as `scores` is.

    Where `fresh`, `out` holds nothing yet.
    """
    rows, count = weights.shape[-2:]
    width = values.shape[-1]
    if not count:
        if fresh:
            out.fill(0.0)
        return
    if is_whole():
        # Few rows too: values are not packed.
        if fresh:
            np.matmul(weights, values, out=out)
        else:
            out += np.matmul(weights, values, out=scratch.take("sums", *out.shape))
        return
    if fresh:
        out.fill(0.0)
    if rows <= VECTOR_ROWS:
        blocks, rows = rows, 1
        pieces, size = _pieces(count, width, VECTOR_WORK)
    else:
        blocks = _row_blocks(rows, VALUE_ROWS, rows * count * width)
        rows //= blocks
        pieces, size = _pieces(count, rows * width, _product_work())
    at = pieces * size
    sums = scratch.take("sums", *out.shape[:-2], pieces, blocks, rows, width)
    cut = _pieces_first(weights[..., :at].reshape(*weights.shape[:-2], blocks, rows, pieces, size))
    np.matmul(cut, values[..., :at, :].reshape(*values.shape[:-2], pieces, 1, size, width), out=sums)
    to = out.reshape(*out.shape[:-2], blocks, rows, width)
    to += sums[..., 0, :, :, :] if pieces == 1 else sums.sum(axis=-4)
    if at < count:
        add_values(weights[..., at:], values[..., at:, :], out, scratch)


class Window:
    """Where the keys of groups of equal `group_meta` lie, and which of them each of `rows` new rows sees.

    Columns: the ring's rows, then the sinks.
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
        self.columns = length + sinks
        first = window - length  # the first row that evicts
        evicted = max(0, rows - first)
        start = head if full else 0
        cut = min(evicted, window - start)
        self._bounds = []
        self._evicted = []
        for columns, age in ((slice(start, start + cut), 0), (slice(0, evicted - cut), cut)):
            ages = columns.stop - columns.start
            if ages:
                self._evicted.append((columns.start, age, _gone(age, ages, first, rows)))
                self._bounds.append((columns, _gone_bound(age, ages, first, rows)))

    def hide(self, logits: Float32) -> None:
        """Takes the rows that have left a row's window out of `logits (..., rows, columns)`."""
        for columns, bound in self._bounds:
            part = logits[..., columns]
            np.minimum(part, bound, out=part)

    def put(self, weights: Float32, evicted: Float32, masked: bool = False) -> None:
        """Gives the rows that left a row's window their far weights `evicted (..., rows, f)`, oldest
        first, where `weights (..., rows, columns)` hold nothing for them. Where `masked`, they are 0 for
        the rows that are still inside."""
        folded = evicted.shape[-1]
        for column, age, gone in self._evicted:
            count = min(gone.shape[1], folded - age)
            if count > 0:
                part = evicted[..., age : age + count]
                weights[..., column : column + count] += part if masked else part * gone[:, :count]

    def scores(self, q: Float32, keys: Float32, out: Float32) -> None:
        """`out (g, r, columns)` of scaled `q (g, r, d)`, r = heads times rows, rows the inner one, and
        `keys`, the groups' part of the ring plane."""
        for part, columns in self._parts(keys):
            scores(q, part, out[:, :, columns])

    def sum_values(
        self, weights: Float32, values: Float32, out: Float32, scratch: Scratch, fresh: bool
    ) -> None:
        """`out (g, r, dv) +=` the values under `weights (g, r, columns)`; they lie as keys do.

        Where `fresh`, `out` holds nothing yet.
        """
        for part, columns in self._parts(values):
            add_values(weights[:, :, columns], part, out, scratch, fresh)
            fresh = False
        if fresh:
            out.fill(0.0)

    def _parts(self, plane: Float32) -> Iterator[tuple[Float32, slice]]:
        """What lies together in a plane of keys or values, and its columns."""
        at = 0
        for low, high in self.ranges:
            yield plane[:, low:high], slice(at, at + high - low)
            at += high - low


def hide_later(logits: Float32) -> None:
    """Takes the rows after a row out of `logits (..., rows, rows)` of a sub-chunk's rows with each other."""
    rows = logits.shape[-1]
    # One long operation for all heads: with rows inside it would begin anew at each.
    flat = logits.reshape(-1, rows * rows)
    assert np.may_share_memory(flat, logits), "reshape made a copy, which nobody would read"
    np.minimum(flat, _later_bound(rows), out=flat)


@lru_cache(maxsize=16)
def _gone(age: int, ages: int, first: int, rows: int) -> Float32:
    """`(rows, ages)`: 1 where one of the `ages` ring rows from the `age`-th oldest on has left by then,
    if the row `first` is the first to evict; 0 elsewhere. Not to be written."""
    gone = np.arange(age, age + ages) <= np.arange(rows)[:, None] - first
    return gone.astype(np.float32)


@lru_cache(maxsize=16)
def _gone_bound(age: int, ages: int, first: int, rows: int) -> Float32:
    return _bound(_gone(age, ages, first, rows) > 0)


@lru_cache(maxsize=16)
def _later_bound(rows: int) -> Float32:
    return _bound(~np.tri(rows, dtype=bool)).reshape(-1)


def _bound(hidden: np.ndarray) -> Float32:
    """The most a logit may be: a minimum is faster than a masked copy."""
    return np.where(hidden, np.float32(-LARGE), np.float32(np.inf))
