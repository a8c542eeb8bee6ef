"""Layers, failures and the archive by the book, for the tests of both NumPy engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support import Rows, part, random_rows

from cortiq_o1.cpu import executor
from cortiq_o1.cpu.direct import DirectEngine
from cortiq_o1.cpu.executor import PlanEngine
from cortiq_o1.cpu.resident import OWNED, DirectResident, Journal, squares
from cortiq_o1.geometry import Geometry
from cortiq_o1.planes import (
    ARCHIVE_PLANES,
    META_EVICTED,
    META_HEAD,
    META_LEN,
    META_WINDOW,
    STATE_PLANES,
)
from cortiq_o1.sealing import seal

Engine = DirectEngine | PlanEngine
Planes = dict[str, np.ndarray]

GEOMETRY = Geometry(6, 2, 8, 12, window=20, sinks=2, landmarks=8, windows=(20, 9))
ARCHIVE = 70  # no power of two, no multiple of anything here
ALL = (*STATE_PLANES, *ARCHIVE_PLANES)
QKV = ("q", "k", "v")


def make(kind: str) -> Engine:
    """An engine of a kind, with nothing left from another test."""
    return DirectEngine(threads=2, parallel_work=0) if kind == "direct" else PlanEngine(path=kind)


def sealed(seed: int = 0, rows: int = 60, geometry: Geometry = GEOMETRY) -> Planes:
    return seal(*random_rows(np.random.default_rng(seed), rows, geometry), geometry).planes


def stream(rows: int, seed: int = 9, geometry: Geometry = GEOMETRY) -> Rows:
    return random_rows(np.random.default_rng(seed), rows, geometry)


def rows_of(rows: Rows, first: int, last: int) -> Rows:
    return part(rows, slice(first, last))


def everything(engine: Engine, resident: Any) -> Planes:
    """State and archive."""
    return engine.read(resident, ALL if resident.archive else STATE_PLANES)


def assert_same(a: Planes, b: Planes) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name].view(np.uint32), b[name].view(np.uint32), err_msg=name)


def differ(a: Planes, b: Planes) -> set[str]:
    return {name for name in a if a[name].tobytes() != b[name].tobytes()}


def after(kind: str, rows: Rows, calls: list[int], archive: int = ARCHIVE, seed: int = 0) -> Planes:
    """State and archive of a new layer after committed calls of so many rows each."""
    engine = make(kind)
    resident = engine.upload(GEOMETRY, sealed(seed), archive)
    at = 0
    for count in calls:
        engine.attend(resident, *rows_of(rows, at, at + count), True)
        at += count
    return everything(engine, resident)


@contextmanager
def failing(
    owner: Any, name: str, call: int, error: type[BaseException] = MemoryError
) -> Iterator[list[int]]:
    """A function that raises the `call`-th time, from 1 on; the list counts its calls."""
    plain, calls = getattr(owner, name), [0]

    def broken(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise error("on purpose")
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, broken)
        yield calls


def step_of(engine: Engine) -> tuple[Any, str]:
    """Where a call goes through several times: a sub-chunk's move, a plan."""
    return (Journal, "move") if isinstance(engine, DirectEngine) else (executor, "run_plan")


class Model:
    """Rings and archive by the book, one row after another."""

    def __init__(self, planes: Planes, archive: int) -> None:
        self.meta = planes["group_meta"].astype(np.int64)
        self.rings = [planes["ring_k"].copy(), planes["ring_v"].copy()]
        nh, hpg = GEOMETRY.num_heads, GEOMETRY.heads_per_group
        self.hpg, self.archive = hpg, archive
        self.q = np.zeros((archive, nh, 8), np.float32)
        self.kv = [np.zeros((2, archive, width), np.float32) for width in (8, 12)]

    def pass_rows(self, rows: Rows) -> None:
        q, *kv = rows
        for i in range(len(q)):
            for g, meta in enumerate(self.meta):
                slot = (meta[META_HEAD] + meta[META_LEN]) % meta[META_WINDOW]
                if meta[META_LEN] == meta[META_WINDOW]:
                    to = meta[META_EVICTED] % 2**32 % self.archive
                    heads = slice(g * self.hpg, (g + 1) * self.hpg)
                    self.q[to, heads] = q[i, heads]
                    for archive, ring in zip(self.kv, self.rings, strict=True):
                        archive[g, to] = ring[g, slot]
                    meta[META_HEAD] = (meta[META_HEAD] + 1) % meta[META_WINDOW]
                    meta[META_EVICTED] += 1
                else:
                    meta[META_LEN] += 1
                for ring, new in zip(self.rings, kv, strict=True):
                    ring[g, slot] = new[i, g]

    def assert_is(self, planes: Planes) -> None:
        np.testing.assert_array_equal(planes["archive_q"], self.q)
        np.testing.assert_array_equal(planes["archive_k"], self.kv[0])
        np.testing.assert_array_equal(planes["archive_v"], self.kv[1])
        evicted = self.meta[:, META_EVICTED] % 2**32
        np.testing.assert_array_equal(planes["group_meta"][:, META_EVICTED], evicted)


def assert_owned(engine: DirectEngine, residents: list[DirectResident]) -> None:
    """No array that is written is another's, or a spare; and norms are those of the ring."""
    arrays = [getattr(r, name) for r in residents for name in OWNED]
    arrays += engine._spares._arrays.values()
    starts = [a.__array_interface__["data"][0] for a in arrays]
    assert len(set(starts)) == len(arrays)
    for resident in residents:
        np.testing.assert_array_equal(resident.ring_norms, squares(resident.ring_k))
