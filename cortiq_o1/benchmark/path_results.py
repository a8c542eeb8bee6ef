"""What a comparison of the paths found: plain values, ready for JSON and for tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..geometry import Geometry
from .results import VERSION, Cell, Clock

FORMAT = "cortiq-o1-bench-paths"


@dataclass(frozen=True)
class KernelShare:
    """A kernel's part of a call: its dispatches, and the seconds of all of them together."""

    kernel: str
    dispatches: int
    seconds: float


@dataclass
class PathCell:
    """One way to run a call of `rows` rows on one device: how long it took, and where the time went.

    `cell` is the sealed layer's, as in a `Report`. `kernels` is there if a profile was asked for,
    each dispatch timed alone by `profile_clock`, in the order in which the kernels first run.
    """

    way: str
    cell: Cell
    dispatches: int = 0
    chunk: int = 0
    kernels: tuple[KernelShare, ...] = ()
    profile_clock: Clock | None = None

    def to_dict(self, clock: Clock) -> dict[str, Any]:
        return {
            "way": self.way,
            "dispatches": self.dispatches,
            "chunk": self.chunk,
            **self.cell.to_dict(clock),
            "profile_clock": self.profile_clock,
            "kernels": [
                {"kernel": k.kernel, "dispatches": k.dispatches, "seconds": k.seconds} for k in self.kernels
            ],
        }


@dataclass
class PathDevice:
    """All ways on one device; `problem` says why there are no more."""

    name: str
    backend: str
    software: bool
    driver: str = ""
    cells: list[PathCell] = field(default_factory=list)
    problem: str | None = None
    failed: bool = False

    @property
    def clock(self) -> Clock:
        """The clock of this device's figures: GPU time only if every cell that was timed has it."""
        timed = [c.cell for c in self.cells if c.cell.wall]
        return "gpu" if timed and all(cell.gpu for cell in timed) else "wall"

    def best(self, rows: int) -> float | None:
        """The shortest median of any way with so many rows, None where none was timed."""
        timings = [c.cell.timing(self.clock) for c in self.cells if c.cell.rows == rows]
        return min((t.median for t in timings if t), default=None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "backend": self.backend,
            "software": self.software,
            "driver": self.driver,
            "clock": self.clock,
            "cells": [c.to_dict(self.clock) for c in self.cells],
            "problem": self.problem,
        }


@dataclass
class PathReport:
    """A whole run. `interrupted` where it was stopped before its end."""

    preset: str
    model: str
    geometry: Geometry
    rows: tuple[int, ...]
    budget_s: float
    profile: bool
    versions: dict[str, str]
    devices: list[PathDevice] = field(default_factory=list)
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "preset": self.preset,
            "model": self.model,
            "geometry": self.geometry.to_dict(),
            "rows": list(self.rows),
            "budget_s": self.budget_s,
            "profile": self.profile,
            "versions": self.versions,
            "devices": [device.to_dict() for device in self.devices],
            "interrupted": self.interrupted,
        }
