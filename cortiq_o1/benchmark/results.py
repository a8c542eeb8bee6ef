"""What a benchmark found: plain values, ready for JSON, for a table and for a drawing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..geometry import Geometry
from ..planes import KV_BYTES, PLANES, STATE_PLANES, Sizes

FORMAT, VERSION = "cortiq-o1-bench", 1

Clock = Literal["gpu", "wall"]
CLOCK_TEXT: dict[Clock, str] = {
    "gpu": "GPU time by timestamps",
    "wall": "wall time, with transfers and synchronisation",
}


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, measured at least three times."""

    clock: Clock
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle measurement, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The range of the middle half of the measurements, as a part of the median."""
        if len(self.seconds) < 2 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def to_dict(self) -> dict[str, Any]:
        return {
            "clock": self.clock,
            "median_s": self.median,
            "spread": self.spread,
            "repeats": len(self.seconds),
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
        }


@dataclass
class Cell:
    """One layer and one number of rows on one device.

    `context` is None for the sealed layer, whose time does not depend on it. `moved_bytes` is the
    least that the call has to read and write. `gpu` is one layer's share of `gpu_layers` of them. Either
    `wall` is there or `problem` says why not; `left_out_s` is what the budget did not have for it.
    """

    context: int | None
    rows: int
    state_bytes: int | None = None
    moved_bytes: int | None = None
    wall: Timing | None = None
    gpu: Timing | None = None
    gpu_layers: int = 1
    problem: str | None = None
    left_out_s: float | None = None

    def timing(self, clock: Clock) -> Timing | None:
        return self.gpu if clock == "gpu" else self.wall

    def to_dict(self, clock: Clock) -> dict[str, Any]:
        timing = self.timing(clock)
        return {
            "layer": "sealed" if self.context is None else "exact",
            "context": self.context,
            "rows": self.rows,
            "state_bytes": self.state_bytes,
            "moved_bytes": self.moved_bytes,
            "wall": self.wall.to_dict() if self.wall else None,
            "gpu": {**self.gpu.to_dict(), "layers": self.gpu_layers} if self.gpu else None,
            "rows_per_s": self.rows / timing.median if timing else None,
            "bytes_per_s": self.moved_bytes / timing.median if timing and self.moved_bytes else None,
            "problem": self.problem,
            "left_out_s": self.left_out_s,
        }


@dataclass(frozen=True)
class Errors:
    """Outputs against exact causal attention in float64.

    `rms`: root mean square of the difference over that of the exact outputs. `median`, `worst`: of all
    rows and heads, the length of the difference over the length of the exact output.
    """

    rms: float
    median: float
    worst: float

    def to_dict(self) -> dict[str, float]:
        return {"rms": self.rms, "median": self.median, "worst": self.worst}


@dataclass(frozen=True)
class Quality:
    """The error of a sealed layer on real data, beside its window and sinks alone."""

    source: str
    geometry: Geometry
    ridge: float
    prompt_rows: int
    streamed_rows: int
    sealed: Errors
    window_only: Errors

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "geometry": self.geometry.to_dict(),
            "ridge": self.ridge,
            "prompt_rows": self.prompt_rows,
            "streamed_rows": self.streamed_rows,
            "sealed": self.sealed.to_dict(),
            "window_only": self.window_only.to_dict(),
        }


@dataclass(frozen=True)
class Crossover:
    """The context from which the sealed layer is the faster one.

    `relation`: "at" a context between two measured ones, "below" the smallest, "above" the largest.
    """

    relation: Literal["at", "below", "above"]
    context: int

    def __str__(self) -> str:
        if self.relation == "at":
            # Two figures: it comes from two times that each vary by some per cent.
            return f"about {round(self.context, 2 - len(str(self.context))):,}"
        return {"below": "under ", "above": "over "}[self.relation] + f"{self.context:,}"

    def to_dict(self) -> dict[str, Any]:
        return {"relation": self.relation, "context": self.context}


@dataclass
class DeviceResult:
    """All that was measured on one device; `problem` says why no more was.

    `sealed_from` is the smallest context that a sealed layer can have.
    """

    name: str
    backend: str
    software: bool
    driver: str = ""
    sealed_from: int = 1
    copy_bytes_per_s: float | None = None
    copy_clock: Clock | None = None
    cells: list[Cell] = field(default_factory=list)
    quality: Quality | None = None
    problem: str | None = None
    failed: bool = False

    @property
    def clock(self) -> Clock:
        """The clock of this device's figures: GPU time only if every cell that was timed has it."""
        timed = [cell for cell in self.cells if cell.wall]
        return "gpu" if timed and all(cell.gpu for cell in timed) else "wall"

    def sealed(self, rows: int) -> Cell | None:
        """The sealed layer's cell."""
        return next((c for c in self.cells if c.context is None and c.rows == rows), None)

    def exact(self, context: int, rows: int) -> Cell | None:
        """The cell of exact attention over `context` rows."""
        return next((c for c in self.cells if c.context == context and c.rows == rows), None)

    def exact_points(self, rows: int) -> list[tuple[int, float]]:
        """`(context, seconds)` of exact attention where it was timed, in ascending order."""
        found = []
        for cell in self.cells:
            timing = cell.timing(self.clock)
            if cell.context is not None and cell.rows == rows and timing:
                found.append((cell.context, timing.median))
        return sorted(found)

    def crossover(self, rows: int) -> Crossover | None:
        """Where exact attention begins to take longer than the sealed layer; None if either lacks."""
        cell = self.sealed(rows)
        timing = cell.timing(self.clock) if cell else None
        return find_crossover(self.exact_points(rows), timing.median, self.sealed_from) if timing else None

    def to_dict(self) -> dict[str, Any]:
        rows = sorted({cell.rows for cell in self.cells})
        crossings = {r: self.crossover(r) for r in rows}
        return {
            "name": self.name,
            "backend": self.backend,
            "software": self.software,
            "driver": self.driver,
            "clock": self.clock,
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "copy_clock": self.copy_clock,
            "cells": [cell.to_dict(self.clock) for cell in self.cells],
            "crossover": {str(r): c.to_dict() if c else None for r, c in crossings.items()},
            "quality": self.quality.to_dict() if self.quality else None,
            "problem": self.problem,
        }


def find_crossover(points: Iterable[tuple[int, float]], level: float, first: int = 1) -> Crossover | None:
    """Where the rising curve through `points` passes `level`, by straight lines in both logarithms.

    The last such place counts: from there on the curve stays above as far as it is known. One before
    `first` counts as `first`.
    """
    curve = list(points)
    if not curve:
        return None
    if curve[-1][1] <= level:
        return Crossover("above", curve[-1][0])
    for (c0, t0), (c1, t1) in zip(curve[-2::-1], curve[:0:-1], strict=True):
        if t0 <= level < t1:
            part = math.log(level / t0) / math.log(t1 / t0)
            return Crossover("at", max(first, round(c0 * (c1 / c0) ** part)))
    return Crossover("below", curve[0][0]) if curve[0][0] > first else Crossover("at", first)


@dataclass
class Report:
    """A whole run. `interrupted` where it was stopped before its end."""

    preset: str
    model: str
    layers: int
    geometry: Geometry
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    budget_s: float
    versions: dict[str, str]
    devices: list[DeviceResult] = field(default_factory=list)
    interrupted: bool = False
    kv: str = "f32"

    @property
    def state_bytes(self) -> int:
        """The sealed state of one layer, as a GPU keeps it."""
        sizes = Sizes.of(self.geometry, kv=self.kv)
        return sum(PLANES[name].nbytes(sizes) for name in STATE_PLANES)

    def cache_bytes(self, context: int) -> int:
        """Keys and values of one layer over `context` rows, kept as the sealed one's."""
        value_dim = self.geometry.value_dim or self.geometry.head_dim
        return KV_BYTES[self.kv] * context * self.geometry.num_kv_heads * (self.geometry.head_dim + value_dim)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "preset": self.preset,
            "model": self.model,
            "layers": self.layers,
            "geometry": self.geometry.to_dict(),
            "contexts": list(self.contexts),
            "rows": list(self.rows),
            "budget_s": self.budget_s,
            "kv": self.kv,
            "versions": self.versions,
            "state_bytes": self.state_bytes,
            "cache_bytes": {str(c): self.cache_bytes(c) for c in self.contexts},
            "devices": [device.to_dict() for device in self.devices],
            "interrupted": self.interrupted,
        }
