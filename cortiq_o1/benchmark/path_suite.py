"""The paths side by side: a sealed layer in every way that a device can run it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from ..device import Device, DeviceInfo
from ..errors import CortiqError, DeviceError
from ..planning import plan
from ..ways import DIRECT, open_ways
from . import measure
from .layers import sealed_state
from .path_results import KernelShare, PathCell, PathDevice, PathReport
from .results import Cell
from .suite import CELL_SECONDS, Settings, Step, reason, versions

PROFILE_REPEATS = 5


class PathSuite:
    """Runs the comparison; `report` holds whatever is finished, also after an interruption.

    Of the settings, `contexts` and `ridge` go unused: exact attention takes no part.
    """

    def __init__(self, settings: Settings, profile: bool = False) -> None:
        self.settings = settings
        self.report = PathReport(
            preset=settings.preset.name,
            model=settings.preset.model,
            geometry=settings.geometry,
            rows=settings.rows,
            budget_s=settings.budget_s,
            profile=profile,
            versions=versions(),
        )
        self._state = sealed_state(settings.geometry)

    def run(self, candidates: Sequence[DeviceInfo], step: Step) -> PathReport:
        """Measures each device in turn, all of them within the budget.

        A device that cannot be used gets its reason in the report and does not stop the others.
        """
        end = time.perf_counter() + self.settings.budget_s
        for done, info in enumerate(candidates):
            result = PathDevice(info.name, info.backend, info.software, info.driver, problem=info.problem)
            self.report.devices.append(result)
            if info.problem:
                continue
            now = time.perf_counter()
            try:
                self._device(info, result, now + (end - now) / (len(candidates) - done), step)
            except (CortiqError, MemoryError) as error:
                result.problem, result.failed = reason(error), True
        return self.report

    def _device(self, info: DeviceInfo, result: PathDevice, end: float, step: Step) -> None:
        # The twins are there to be compared with; how long they take tells nothing.
        ways = {way: d for way, d in open_ways(info).items() if info.adapter or way == DIRECT}
        if not ways:
            result.problem = "NumPy computes without a path; unset CORTIQ_O1_PATH to time it"
        left = len(self.settings.rows) * len(ways)
        for rows in self.settings.rows:
            for way, device in ways.items():
                step(f"{info.label}: {way}, rows {rows}")
                remaining = end - time.perf_counter()
                needed = (measure.MIN_REPEATS + 1) * _expected(result, way, rows)
                if remaining <= 0 or needed > remaining:
                    problem = f"left out: about {needed:.0f} s" if needed else "left out: the budget is spent"
                    cell = PathCell(way, Cell(None, rows, problem=problem, left_out_s=needed))
                else:
                    cell = self._cell(device, way, rows, min(CELL_SECONDS, remaining / left / 2))
                result.cells.append(cell)
                left -= 1

    def _cell(self, device: Device, way: str, rows: int, seconds: float) -> PathCell:
        found = PathCell(way, Cell(None, rows))
        geometry = self.settings.geometry
        try:
            if way != DIRECT:
                todo = plan(geometry, rows, True, device.path, device.limits, device.precision)
                found.dispatches, found.chunk = len(todo.dispatches), todo.chunk
            layers = self.settings.preset.layers
            found.cell = measure.measure_cell(device, self._state, rows, None, layers, seconds)
            if self.report.profile and hasattr(device.engine, "profile_plan"):
                self._profile(device, found, rows)
        except (CortiqError, MemoryError) as error:
            # A path that cannot serve leaves the others; a device that fails has no more to say.
            if isinstance(error, DeviceError) and not isinstance(error, MemoryError):
                raise
            found.cell.problem = reason(error)
        return found

    def _profile(self, device: Device, found: PathCell, rows: int) -> None:
        engine = device.engine
        resident = engine.upload(self._state.geometry, self._state.planes)
        profile = engine.profile_plan(resident, rows, True, PROFILE_REPEATS)
        found.profile_clock = profile.clock
        medians: dict[str, list[float]] = {}
        for each in profile.kernels:
            medians.setdefault(each.kernel, []).append(statistics.median(each.seconds))
        found.kernels = tuple(KernelShare(k, len(times), sum(times)) for k, times in medians.items())


def _expected(result: PathDevice, way: str, rows: int) -> float:
    """Seconds of a call, from the same way with fewer rows; 0 where none was timed."""
    timed = [c.cell for c in result.cells if c.way == way and c.cell.wall]
    if not timed:
        return 0.0
    cell = timed[-1]
    assert cell.wall
    return cell.wall.median * max(1.0, rows / cell.rows)
