"""A whole benchmark: which cells, in what order, within what time."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from .._version import __version__
from ..device import Device, DeviceInfo
from ..devices import open_device
from ..errors import ArgumentError, CortiqError, DeviceError
from ..geometry import Geometry
from ..planning import chunk_rows
from ..state import LayerState
from . import measure
from .layers import exact_geometry, exact_state, sealed_state
from .presets import Preset
from .quality import QualityProbe
from .results import Cell, DeviceResult, Report

CELL_SECONDS = 1.0
"""Most time of one figure, where the budget does not ask for less and three calls take no longer."""

Step = Callable[[str], None]
"""Told what comes next, once a step."""


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        preset: the model.
        geometry: the sealed layer, `preset.geometry()` or one with another window.
        contexts: rows that exact attention reads, ascending.
        rows: rows of a call.
        budget_s: seconds for all devices together, preparations included.
        ridge: of the seal over real data, see `seal`.
        kv: how devices keep keys and values, see `open_device`; those of exact attention too.
    """

    preset: Preset
    geometry: Geometry
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    budget_s: float
    ridge: float = 1e-6
    kv: str = "f32"

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise ArgumentError(f"budget: {self.budget_s:g} s, expected more than 0")
        for name, values in (("contexts", self.contexts), ("rows", self.rows)):
            if not values or min(values) < 1:
                raise ArgumentError(f"{name}: {list(values)}, expected integers of at least 1")
            if list(values) != sorted(set(values)):
                raise ArgumentError(f"{name}: {list(values)}, expected ascending numbers, each once")

    @property
    def steps(self) -> int:
        """Steps of one device: preparation, the error, a cell for each layer and number of rows."""
        return 2 + len(self.rows) * (1 + len(self.contexts))


def versions() -> dict[str, str]:
    """What the figures depend on besides the adapter."""
    found = {
        "cortiq-o1": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in ("numpy", "wgpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


class Suite:
    """Runs a benchmark; `report` holds whatever is finished, also after an interruption."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.report = Report(
            preset=settings.preset.name,
            model=settings.preset.model,
            layers=settings.preset.layers,
            geometry=settings.geometry,
            contexts=settings.contexts,
            rows=settings.rows,
            budget_s=settings.budget_s,
            kv=settings.kv,
            versions=versions(),
        )
        self._sealed = sealed_state(settings.geometry)
        self._probe = QualityProbe(settings.ridge)

    def run(self, candidates: Sequence[DeviceInfo], step: Step) -> Report:
        """Measures each device in turn, all of them within the budget.

        A device that cannot be used gets its reason in the report and does not stop the others.
        """
        end = time.perf_counter() + self.settings.budget_s
        for done, candidate in enumerate(candidates):
            result = DeviceResult(
                candidate.name,
                candidate.backend,
                candidate.software,
                candidate.driver,
                sealed_from=self.settings.geometry.exact_rows + 1,
                problem=candidate.problem,
            )
            self.report.devices.append(result)
            if candidate.problem:
                continue
            now = time.perf_counter()
            share = (end - now) / (len(candidates) - done)
            try:
                _DeviceRun(self, result, now + share, step).run(open_device(candidate, kv=self.settings.kv))
            except (CortiqError, MemoryError) as error:
                result.problem, result.failed = reason(error), True
        return self.report


class _DeviceRun:
    """The cells of one device until `end`."""

    def __init__(self, suite: Suite, result: DeviceResult, end: float, step: Step) -> None:
        self.settings, self.result, self.end = suite.settings, result, end
        self.sealed, self.probe = suite._sealed, suite._probe
        self.left = suite.settings.steps
        self.step = step

    def run(self, device: Device) -> None:
        label = f"{self.result.name} ({self.result.backend})"
        self._next(f"{label}: copy bandwidth")
        self.result.copy_bytes_per_s, self.result.copy_clock = measure.copy_bandwidth(device)
        self._next(f"{label}: error on real data")
        self.result.quality = self.probe.run(device)
        states: dict[int, LayerState] = {}

        def exact(geometry: Geometry) -> LayerState:
            if geometry.window not in states:
                states.clear()  # one at a time: they are as large as the contexts
                states[geometry.window] = exact_state(geometry)
            return states[geometry.window]

        # One number of rows after another, so that a short budget gives whole curves of the first.
        for rows in self.settings.rows:
            self._next(f"{label}: sealed, rows {rows}")
            self._cell(device, lambda _: self.sealed, self.settings.geometry, rows, None)
            for context in self.settings.contexts:
                self._next(f"{label}: exact over {context:,}, rows {rows}")
                geometry = exact_geometry(self.settings.geometry, context)
                self._cell(device, exact, geometry, rows, context)

    def _next(self, text: str) -> None:
        self.left -= 1
        self.step(text)

    def _cell(
        self,
        device: Device,
        state: Callable[[Geometry], LayerState],
        geometry: Geometry,
        rows: int,
        context: int | None,
    ) -> None:
        cell = Cell(context, rows)
        try:
            # Before the state is made: the host may have no room for what the device refuses.
            chunk_rows(geometry, rows, device.path, device.engine.limits)
            remaining = self.end - time.perf_counter()
            needed = (measure.MIN_REPEATS + 1) * self._expected(geometry, rows)
            if remaining <= 0 or needed > remaining:
                cell.left_out_s = needed
                cell.problem = (
                    f"left out: about {needed:.0f} s, {max(0.0, remaining):.0f} s of the budget left"
                    if needed
                    else "left out: the budget is spent"
                )
            else:
                seconds = min(CELL_SECONDS, remaining / (self.left + 1) / 2)
                cell = measure.measure_cell(
                    device, state(geometry), rows, context, self.settings.preset.layers, seconds
                )
        except (CortiqError, MemoryError) as error:
            # Without room for one context others still fit; a device that fails has no more to say.
            if isinstance(error, DeviceError) and not isinstance(error, MemoryError):
                raise
            cell.problem = reason(error)
        self.result.cells.append(cell)

    def _expected(self, geometry: Geometry, rows: int) -> float:
        """Seconds of a call, from the timed cell that is most like it; 0 where nothing is timed yet.

        Time grows with the rows of a call and the keys that each reads, or more slowly.
        """
        timed = [(c.context or self.settings.geometry.window, c) for c in self.result.cells if c.wall]
        if not timed:
            return 0.0
        keys, cell = min(timed, key=lambda item: (item[1].rows != rows, abs(geometry.window - item[0])))
        assert cell.wall
        return cell.wall.median * max(1.0, geometry.window / keys) * max(1.0, rows / cell.rows)


def reason(error: BaseException) -> str:
    """What an exception says, or what it is called if it says nothing."""
    return str(error) or type(error).__name__
