"""All cases on all devices, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ..device import Device, DeviceInfo
from ..errors import ArgumentError, CortiqError, DeviceLostError
from ..kernels import KERNELS
from ..planning import serves
from ..ways import DIRECT, HALVES, open_ways
from . import kernel_cases, layer_cases
from .deviation import NONE, Deviation
from .kernel_cases import KernelCase
from .kernels import RunKernel, Step, check_step, trace
from .layer_cases import LayerCase
from .layers import check_layer, truth

Level = Literal["quick", "default", "full"]
# Random cases of kernels and of layers, and whether the long layers run.
_LEVELS: dict[Level, tuple[int, int, bool]] = {
    "quick": (4, 4, False),
    "default": (40, 16, True),
    "full": (250, 100, True),
}
RANDOM_ROW = "random"
HALVES_SUFFIX = ", f16 rings"
"""Behind the name of a kernel that takes rings in float16."""
Tell = Callable[[str], None]


@dataclass
class Cell:
    """One row of the matrix on one device: how many checks ran and the worst of them."""

    checks: int = 0
    failed: int = 0
    worst: Deviation = NONE

    def add(self, deviation: Deviation) -> None:
        """Takes one more check in."""
        self.checks += 1
        self.failed += not deviation.passed
        self.worst = self.worst.worse(deviation)


@dataclass(frozen=True)
class Failure:
    """A check that failed: where, on what, and the case that repeats it."""

    target: str
    row: str
    case: str
    where: str
    built_from: str


@dataclass
class Target:
    """A column of the matrix: something that computes, or the reason why it cannot.

    `argument` is what `--device` calls it. `devices` are the ways to run a layer there, by name.
    `run_kernel` is None where there are no kernels to run alone, and `unavailable` has those that need
    a feature which is not there, with its name. A `problem` known beforehand (`unusable`) is no failure,
    any other one is.
    """

    label: str
    argument: str
    devices: dict[str, Device] = field(default_factory=dict)
    run_kernel: RunKernel | None = None
    unavailable: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    unusable: bool = False
    kernels: dict[str, Cell] = field(default_factory=dict)
    layers: dict[str, Cell] = field(default_factory=dict)
    paths: dict[str, Cell] = field(default_factory=dict)
    """The same checks as `layers`, by the way that they ran."""

    @property
    def failed(self) -> bool:
        """Whether a check failed, or the device did."""
        cells = (*self.kernels.values(), *self.layers.values())
        return (self.problem is not None and not self.unusable) or any(cell.failed for cell in cells)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; an infinite ratio or error is null, as it must be equal or is no number."""
        return {
            "label": self.label,
            "device": self.info,
            "problem": self.problem,
            "failed": self.failed,
            "kernels": {row: _cell_dict(cell) for row, cell in self.kernels.items()},
            "unavailable": dict(self.unavailable),
            "layers": {row: _cell_dict(cell) for row, cell in self.layers.items()},
            "paths": {row: _cell_dict(cell) for row, cell in self.paths.items()},
        }


def _cell_dict(cell: Cell) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return float(value) if np.isfinite(value) else None

    return {
        "checks": cell.checks,
        "failed": cell.failed,
        "passed": not cell.failed,
        "worst_error": number(cell.worst.error),
        "worst_ratio": number(cell.worst.ratio),
        "where": cell.worst.where,
    }


def targets(info: DeviceInfo) -> list[Target]:
    """Opens a listed device; the CPU has two columns, the direct path and the kernels' twins.

    Layers run on every path, or only on the one that `CORTIQ_O1_PATH` names.
    """
    if info.adapter is None:
        ways = open_ways(info)
        direct = {name: ways.pop(name) for name in (DIRECT, HALVES) if name in ways}
        columns = ((direct, "NumPy"), (ways, "NumPy twins"))
        return [target_of(each, label, "cpu") for each, label in columns if each]
    # Equal cards in one machine differ in nothing but their number.
    label = info.label + (f" #{info.adapter.ordinal + 1}" if info.adapter.ordinal else "")
    target = Target(label, f"{info.backend}:{info.name}", info=info.to_dict())
    if info.problem:
        target.problem, target.unusable = info.problem, True
        return [target]
    try:
        return [target_of(open_ways(info), label, target.argument)]
    except CortiqError as error:
        target.problem = str(error)
        return [target]


def target_of(devices: dict[str, Device], label: str, argument: str) -> Target:
    """The column of a device that is open in one or several ways."""
    device = next(iter(devices.values()))
    alone = getattr(device.engine, "run_kernel", None)
    unavailable = {}
    if alone is not None:
        unavailable = {name: ", ".join(lacking) for name, lacking in _lacking(device).items()}
    return Target(label, argument, devices, alone, unavailable, device.info())


def _lacking(device: Device) -> dict[str, list[str]]:
    """The kernels that need features which the device was opened without."""
    have = device.gpu.features
    needs = {name: [f for f in kernel.features if f not in have] for name, kernel in KERNELS.items()}
    return {name: lacking for name, lacking in needs.items() if lacking}


@dataclass(frozen=True)
class Cases:
    """What runs; random cases share one row of the matrix."""

    kernels: tuple[KernelCase, ...]
    layers: tuple[LayerCase, ...]

    @classmethod
    def of(cls, level: Level, seed: int, only: str | None = None) -> Cases:
        """The cases of a level; with `only`, those of that name, random ones from their name alone.

        Raises `ArgumentError` where no case has that name.
        """
        kernels, layers, long = _LEVELS[level]
        if only is None:
            return cls(
                kernel_cases.PICKED + tuple(kernel_cases.random_case(seed, n) for n in range(kernels)),
                layer_cases.PICKED
                + (layer_cases.LONG if long else ())
                + tuple(layer_cases.random_case(seed, n) for n in range(layers)),
            )
        kind, *numbers = only.split("-")
        if kind == RANDOM_ROW and len(numbers) == 2 and all(n.isdecimal() for n in numbers):
            which = (int(numbers[0]), int(numbers[1]))
            return cls((kernel_cases.random_case(*which),), (layer_cases.random_case(*which),))
        found = cls(
            tuple(c for c in kernel_cases.PICKED if c.name == only),
            tuple(c for c in layer_cases.PICKED + layer_cases.LONG if c.name == only),
        )
        if not found.kernels and not found.layers:
            names = [c.name for c in kernel_cases.PICKED]
            names += [c.name for c in layer_cases.PICKED + layer_cases.LONG if c.name not in names]
            raise ArgumentError(f"case: {only!r}, expected one of {', '.join(names)} or random-SEED-NUMBER")
        return found

    def __len__(self) -> int:
        return len(self.kernels) + len(self.layers)


@dataclass
class Suite:
    """Runs cases on targets; `targets` and `failures` are true to what has run so far."""

    targets: Sequence[Target]
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether anything did."""
        return any(target.failed for target in self.targets)

    def run(self, cases: Cases, tell: Tell = lambda text: None) -> None:
        """Every case on every target that can still compute; tells each case's name before it runs."""
        for case in cases.kernels:
            tell(f"kernels: {case.name}")
            self._run_kernels(case)
        for stream in cases.layers:
            tell(f"layers: {stream.name}")
            self._run_layer(stream)

    def _open(self) -> Iterator[Target]:
        return (t for t in self.targets if t.problem is None and t.devices)

    def _run_kernels(self, case: KernelCase) -> None:
        able = [t for t in self._open() if t.run_kernel is not None]
        if not able:
            return
        steps = trace(case)
        if case.precision == "exact":
            steps += trace(case, "f16")
        for target in able:
            for step in steps:
                if target.problem is None and step.dispatch.kernel not in target.unavailable:
                    self._run_step(target, case, step)

    def _run_step(self, target: Target, case: KernelCase, step: Step) -> None:
        run = target.run_kernel
        assert run is not None
        row = step.dispatch.kernel + (HALVES_SUFFIX if step.kv == "f16" else "")
        found = self._guarded(target, lambda: check_step(step, run))
        target.kernels.setdefault(row, Cell()).add(found)
        self._note(target, row, found, case)

    def _run_layer(self, case: LayerCase) -> None:
        able = list(self._open())
        if not able:
            return
        known = {"f32": truth(case)}
        row = RANDOM_ROW if case.name.startswith(f"{RANDOM_ROW}-") else case.name
        for target in able:
            for way, device in target.devices.items():
                if device.kv not in known:
                    with suppress(ArgumentError):  # too large for float16: nothing is asked of it
                        known[device.kv] = truth(case, device.kv)
                right = known.get(device.kv)
                if target.problem is None and right and serves(device.path, case.geometry, device.limits):
                    found = self._guarded(target, partial(check_layer, right, device))
                    if len(target.devices) > 1:
                        found = replace(found, where=f"{way}: {found.where}")
                    target.layers.setdefault(row, Cell()).add(found)
                    target.paths.setdefault(way, Cell()).add(found)
                    self._note(target, row, found, case)

    def _guarded(self, target: Target, check: Callable[[], Deviation]) -> Deviation:
        """A check that raises has failed; a device that is lost fails all that would follow."""
        try:
            return check()
        except DeviceLostError as error:
            target.problem = str(error)
            return Deviation(np.inf, np.inf, str(error))
        except Exception as error:  # a driver may raise anything, and its column must say so
            return Deviation(np.inf, np.inf, f"{type(error).__name__}: {error}")

    def _note(self, target: Target, row: str, found: Deviation, case: KernelCase | LayerCase) -> None:
        if not found.passed:
            self.failures.append(Failure(target.label, row, case.name, found.where, case.describe()))


def rows_of(targets: Sequence[Target]) -> tuple[list[str], list[str], list[str]]:
    """The matrix's rows with anything in them: kernels in the table's order, layers in that of the
    cases, ways to run a layer in theirs."""
    ran = [t for t in targets if t.kernels]
    both = [name + suffix for name in KERNELS for suffix in ("", HALVES_SUFFIX)]
    kernels = [name for name in both if any(name in (*t.kernels, *t.unavailable) for t in ran)]
    layers = dict.fromkeys(row for t in targets for row in t.layers)
    paths = dict.fromkeys(way for t in targets for way in t.paths)
    return kernels, list(layers), list(paths)
