"""What there is to compute on, how one is chosen, and how it is opened."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np

from .engine import Engine
from .errors import ArgumentError, DeviceError
from .gpu.adapters import (
    BACKENDS,
    AdapterInfo,
    describe,
    device_limits,
    find_adapters,
    find_dawn_adapters,
    limits_problem,
    open_adapter,
)
from .planning import PATHS, Limits, check_state_fits

if TYPE_CHECKING:
    from .layer import Layer
    from .state import LayerState

VARIABLE = "CORTIQ_O1_DEVICE"
"""Environment variable that stands in for "auto"."""
CPU_LIMITS = Limits(binding_bytes=1 << 62)
_ALIASES = {"dx12": "d3d12", "opengl": "gl", "numpy": "cpu"}


class FallbackWarning(RuntimeWarning):
    """`open_device("auto")` found no GPU that works and computes on the CPU; the message says why."""


@dataclass(frozen=True)
class DeviceInfo:
    """One thing to compute on; `open_device` takes it.

    `backend` is "vulkan", "metal", "d3d12", "gl" or "cpu"; `kind` "discrete", "integrated", "other" or
    "cpu"; `software` is true for a renderer without hardware; `problem` says why it cannot be used.
    """

    name: str
    backend: str
    kind: str
    software: bool
    vendor: str = ""
    driver: str = ""
    features: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict, compare=False)
    problem: str | None = None
    adapter: AdapterInfo | None = field(default=None, repr=False)

    @classmethod
    def of(cls, adapter: AdapterInfo) -> DeviceInfo:
        """The description of an adapter."""
        return cls(
            adapter.name, adapter.backend, adapter.kind, adapter.software, adapter.vendor, adapter.driver,
            adapter.features, adapter.limits, adapter.problem, adapter,
        )  # fmt: skip

    @property
    def label(self) -> str:
        """`name (backend)`, for messages."""
        return f"{self.name} ({self.backend})"

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {
            "name": self.name,
            "backend": self.backend,
            "kind": self.kind,
            "software": self.software,
            "vendor": self.vendor,
            "driver": self.driver,
            "features": list(self.features),
            "limits": dict(self.limits),
            "problem": self.problem,
        }


class Device:
    """Where layers live: a GPU, a software renderer, or NumPy. Made by `open_device`."""

    def __init__(self, info: DeviceInfo, path: str, limits: Limits, gpu: Any = None) -> None:
        self._info = info
        self._path = path
        self._limits = limits
        self._gpu = gpu
        self._engine: Engine | None = None

    @property
    def name(self) -> str:
        """The adapter's name, or the processor's."""
        return self._info.name

    @property
    def described(self) -> DeviceInfo:
        """The device as `devices` lists it; `open_device` takes it."""
        return self._info

    @property
    def backend(self) -> str:
        """ "vulkan", "metal", "d3d12", "gl" or "cpu"."""
        return self._info.backend

    @property
    def kind(self) -> str:
        """ "discrete", "integrated", "other" or "cpu"."""
        return self._info.kind

    @property
    def software(self) -> bool:
        """Whether it is a renderer without hardware."""
        return self._info.software

    @property
    def limits(self) -> Limits:
        """What the device grants to the planner."""
        return self._limits

    @property
    def path(self) -> str:
        """The planner's path."""
        return self._path

    @property
    def gpu(self) -> Any:
        """The device object of wgpu or wgpudawn, None for the CPU."""
        return self._gpu

    @property
    def engine(self) -> Any:
        """What computes, made on first use; the `cortiq_o1.engine.Engine` protocol."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def _make_engine(self) -> Engine:
        # Each of these is only needed by those who come here.
        if self._gpu is not None:
            from .gpu.executor import GpuEngine

            return GpuEngine(self._gpu, self._path)
        if self._path == "stages":
            from .cpu.executor import PlanEngine

            return PlanEngine(self._limits, poison=False)
        from .cpu.direct import DirectEngine

        return DirectEngine()

    def load(self, state: LayerState) -> Layer:
        """A layer of its own with a copy of the state on this device.

        Raises:
            GeometryError: a plane passes the device's limits; names the field to lower. Nothing has
                been allocated.
            DeviceMemoryError: the device has no room.
        """
        from .layer import Layer

        check_state_fits(state.geometry, self._limits)
        return Layer(self, self.engine, state)

    def info(self) -> dict[str, Any]:
        """What reports say of the device, ready for JSON."""
        return {**self._info.to_dict(), "path": self._path, "binding_bytes": self._limits.binding_bytes}

    def __repr__(self) -> str:
        return f"Device({self.name!r}, {self.backend!r}, path={self._path!r})"


@lru_cache(maxsize=1)
def cpu_info() -> DeviceInfo:
    """The CPU, as `devices` lists it."""
    name = platform.processor() or platform.machine()
    try:
        lines = FilePath("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        pass  # only Linux has it
    return DeviceInfo(name or "CPU", "cpu", "cpu", False, driver=f"NumPy {np.__version__}")


def devices() -> list[DeviceInfo]:
    """Every adapter that wgpu sees, each once a backend and best first, then the CPU.

    Adapters that cannot be used are in the list too, with their `problem`.
    """
    return [*(DeviceInfo.of(a) for a in find_adapters()[0]), cpu_info()]


def open_device(name: str | DeviceInfo | AdapterInfo | Any = "auto", path: str = "auto") -> Device:
    """Opens a device.

    Args:
        name: "auto" for the best GPU that is no software renderer, else the CPU with a
            `FallbackWarning`; the environment variable `CORTIQ_O1_DEVICE` stands in for it. "cpu" for
            NumPy. "vulkan", "metal", "d3d12" or "gl" for that backend's best adapter, a part of an
            adapter's name, or both as "gl:llvmpipe"; "dawn" for wgpudawn's best. An entry of `devices`.
            An open `GPUDevice` of wgpu or of wgpudawn.
        path: how plans are made, see `planning.plan`; on the CPU "auto" computes without a plan and
            "stages" runs the kernels' NumPy twins.

    Raises:
        DeviceError: nothing answers to `name`, with a list of what there is; or it cannot be opened.
        ArgumentError: no such path.
    """
    if path not in PATHS:
        raise ArgumentError(f"path: {path!r}, expected one of {', '.join(map(repr, PATHS))}")
    if isinstance(name, DeviceInfo):
        return _open_cpu(path) if name.adapter is None else _open_adapter(name.adapter, path)
    if isinstance(name, AdapterInfo):
        return _open_adapter(name, path)
    if not isinstance(name, str):
        return _open_foreign(name, path)
    source = ""
    if name == "auto" and os.environ.get(VARIABLE, "").strip():
        name, source = os.environ[VARIABLE].strip(), f"{VARIABLE}: "
    wanted = _ALIASES.get(name.lower(), name.lower())
    if wanted == "auto":
        return _open_auto(path)
    if wanted == "cpu":
        return _open_cpu(path)
    return _open_adapter(_choose(wanted, name, source), path)


def _choose(wanted: str, given: str, source: str) -> AdapterInfo:
    """The best adapter that a lower-case name stands for."""
    backend, colon, part = wanted.partition(":")
    backend = _ALIASES.get(backend, backend)
    adapters, why = find_dawn_adapters() if backend == "dawn" else find_adapters()
    if wanted == "dawn":
        matches = adapters
    elif wanted in BACKENDS:
        matches = [a for a in adapters if a.backend == wanted]
    elif colon and backend in (*BACKENDS, "dawn"):
        matches = [a for a in adapters if a.backend == backend and part.strip() in a.name.lower()]
    else:
        matches = [a for a in adapters if wanted and wanted in a.name.lower()]
    if not matches:
        there = ", ".join(f"{a.backend}:{a.name}" for a in adapters) or f"no adapter ({why})"
        raise DeviceError(f"{source}no device answers to {given!r}; there is: {there}, cpu")
    return matches[0]


def _open_auto(path: str) -> Device:
    adapters, why = find_adapters()
    failures = []
    for adapter in adapters:
        if adapter.software:
            continue
        try:
            device = _open_adapter(adapter, path)
            _prove(device)
            return device
        except DeviceError as error:
            failures.append(str(error))
    if why is None and not failures:
        names = ", ".join(f"{a.backend}:{a.name}" for a in adapters)
        why = f"there are only software renderers, which are slower than NumPy ({names})"
    reason = "; ".join(failures) or why
    warnings.warn(f"no GPU, computing with NumPy: {reason}", FallbackWarning, stacklevel=3)
    return _open_cpu(path)


def _prove(device: Device) -> None:
    """Raises `DeviceError` unless the device compiles a kernel and brings back what it computed."""
    words = np.arange(4, dtype=np.uint32)
    params = {"count": 1, "src_at": 0, "dst_at": 0, "pad0": 0}
    found = device.engine.run_kernel("o1c_copy", {"src": words, "dst": np.zeros_like(words)}, params)
    if not np.array_equal(found["dst"], words):
        raise DeviceError(f"{device.name} ({device.backend}): o1c_copy does not copy")


def _open_cpu(path: str) -> Device:
    return Device(cpu_info(), path, CPU_LIMITS)


def _open_adapter(adapter: AdapterInfo, path: str) -> Device:
    return _open_gpu(open_adapter(adapter), DeviceInfo.of(adapter), path)


def _open_foreign(device: Any, path: str) -> Device:
    if not all(hasattr(device, a) for a in ("queue", "adapter", "limits", "create_compute_pipeline")):
        raise DeviceError(
            f"device: {type(device).__name__}, expected a name or a GPUDevice of wgpu or wgpudawn"
        )
    info = DeviceInfo.of(describe(device.adapter))
    problem = limits_problem(device.limits)
    if problem:
        raise DeviceError(f"{info.label}: the device was opened with too little: {problem}")
    return _open_gpu(device, info, path)


def _open_gpu(device: Any, info: DeviceInfo, path: str) -> Device:
    return Device(info, path, device_limits(device), device)
