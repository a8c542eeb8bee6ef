"""What there is to compute on, how one is chosen, and how it is opened."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .engine import Engine
from .errors import ArgumentError, ArgumentTypeError, DeviceError
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
from .paths import PATHS
from .planning import PRECISIONS, Limits, chunk_rows

if TYPE_CHECKING:
    from .layer import Layer
    from .state import LayerState

VARIABLE = "CORTIQ_O1_DEVICE"
"""Environment variable that stands in for the device "auto"."""
PATH_VARIABLE = "CORTIQ_O1_PATH"
"""Environment variable that stands in for the path "auto"."""
CPU_LIMITS = Limits(binding_bytes=1 << 62, float16=True)  # the twins round as float16 does
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

    def __init__(
        self, info: DeviceInfo, path: str, limits: Limits, gpu: Any = None, precision: str = "exact"
    ) -> None:
        self._info = info
        self._path = path
        self._limits = limits
        products = gpu is not None or path != "auto"  # NumPy without a plan has none to round for
        self._precision = precision if products and limits.float16 else "exact"
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
    def precision(self) -> str:
        """The precision in force: "fast" only where the device has 16-bit floats."""
        return self._precision

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

            return GpuEngine(self._gpu, self._path, self._precision)
        if self._path != "auto":
            from .cpu.executor import PlanEngine

            return PlanEngine(self._limits, poison=False, path=self._path, precision=self._precision)
        from .cpu.direct import DirectEngine

        return DirectEngine()

    def load(self, state: LayerState) -> Layer:
        """A layer of its own with a copy of the state on this device.

        Raises:
            ArgumentTypeError: `state` is no `LayerState`.
            GeometryError: a plane passes the device's limits, or the device's path cannot serve; names
                the field to lower. Nothing has been allocated.
            DeviceMemoryError: the device has no room.
        """
        from .layer import Layer
        from .state import LayerState

        if not isinstance(state, LayerState):
            raise ArgumentTypeError(f"state: {type(state).__name__}, expected a LayerState")
        # Of two rows: one row alone may take a path of its own.
        chunk_rows(state.geometry, 2, self._path, self._limits)
        return Layer(self, self.engine, state)

    def info(self) -> dict[str, Any]:
        """What reports say of the device, ready for JSON."""
        return {
            **self._info.to_dict(),
            "path": self._path,
            "precision": self._precision,
            "binding_bytes": self._limits.binding_bytes,
            "workgroups": self._limits.workgroups,
        }

    def __repr__(self) -> str:
        fast = f", precision={self._precision!r}" if self._precision != "exact" else ""
        return f"Device({self.name!r}, {self.backend!r}, path={self._path!r}{fast})"


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


def chosen_path(path: str = "auto") -> str:
    """`path`, or what the environment variable `CORTIQ_O1_PATH` says in place of "auto".

    Raises `ArgumentError`, with the paths that there are, where either names no path.
    """
    source = "path"
    if path == "auto" and os.environ.get(PATH_VARIABLE, "").strip():
        path, source = os.environ[PATH_VARIABLE].strip().lower(), PATH_VARIABLE
    if path not in PATHS:
        raise ArgumentError(f"{source}: {path!r}, expected one of {', '.join(map(repr, PATHS))}")
    return path


def open_device(
    name: str | DeviceInfo | AdapterInfo | Any = "auto", path: str = "auto", precision: str = "exact"
) -> Device:
    """Opens a device.

    Args:
        name: "auto" for the best GPU that is no software renderer, else the CPU with a
            `FallbackWarning`; the environment variable `CORTIQ_O1_DEVICE` stands in for it. "cpu" for
            NumPy. "vulkan", "metal", "d3d12" or "gl" for that backend's best adapter, a part of an
            adapter's name, or both as "gl:llvmpipe"; "dawn" for wgpudawn's best. An entry of `devices`.
            An open `GPUDevice` of wgpu or of wgpudawn.
        path: how plans are made, see `planning.plan`; the environment variable `CORTIQ_O1_PATH`
            stands in for "auto". On the CPU "auto" computes without a plan, and any other path runs
            the NumPy twins of its kernels, which is there to be compared with, not to be fast.
        precision: "exact" for float32 throughout. "fast" rounds the operands of the matrix products
            to float16 where the adapter has `shader-f16`; elsewhere it is "exact" too, as
            `Device.precision` says.

    Raises:
        DeviceError: nothing answers to `name`, with a list of what there is; or it cannot be opened.
        ArgumentError: no such path or precision.
    """
    mode = _Mode(chosen_path(path), precision)
    if precision not in PRECISIONS:
        raise ArgumentError(f"precision: {precision!r}, expected one of {', '.join(map(repr, PRECISIONS))}")
    if isinstance(name, DeviceInfo):
        return _open_cpu(mode) if name.adapter is None else _open_adapter(name.adapter, mode)
    if isinstance(name, AdapterInfo):
        return _open_adapter(name, mode)
    if not isinstance(name, str):
        return _open_foreign(name, mode)
    source = ""
    if name == "auto" and os.environ.get(VARIABLE, "").strip():
        name, source = os.environ[VARIABLE].strip(), f"{VARIABLE}: "
    wanted = _ALIASES.get(name.lower(), name.lower())
    if wanted == "auto":
        return _open_auto(mode)
    if wanted == "cpu":
        return _open_cpu(mode)
    return _open_adapter(_choose(wanted, name, source), mode)


class _Mode(NamedTuple):
    """How a device computes, whichever it is."""

    path: str
    precision: str


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


def _open_auto(mode: _Mode) -> Device:
    adapters, why = find_adapters()
    failures = []
    for adapter in adapters:
        if adapter.software:
            continue
        try:
            device = _open_adapter(adapter, mode)
            _prove(device)
            return device
        except DeviceError as error:
            failures.append(str(error))
    if why is None and not failures:
        names = ", ".join(f"{a.backend}:{a.name}" for a in adapters)
        why = f"there are only software renderers, which are slower than NumPy ({names})"
    reason = "; ".join(failures) or why
    warnings.warn(f"no GPU, computing with NumPy: {reason}", FallbackWarning, stacklevel=3)
    return _open_cpu(mode)


def _prove(device: Device) -> None:
    """Raises `DeviceError` unless the device compiles a kernel and brings back what it computed."""
    words = np.arange(4, dtype=np.uint32)
    params = {"count": 1, "src_at": 0, "dst_at": 0, "pad0": 0}
    found = device.engine.run_kernel("o1c_copy", {"src": words, "dst": np.zeros_like(words)}, params)
    if not np.array_equal(found["dst"], words):
        raise DeviceError(f"{device.name} ({device.backend}): o1c_copy does not copy")


def _open_cpu(mode: _Mode) -> Device:
    return Device(cpu_info(), mode.path, CPU_LIMITS, None, mode.precision)


def _open_adapter(adapter: AdapterInfo, mode: _Mode) -> Device:
    return _open_gpu(open_adapter(adapter), DeviceInfo.of(adapter), mode)


def _open_foreign(device: Any, mode: _Mode) -> Device:
    if not all(hasattr(device, a) for a in ("queue", "adapter", "limits", "create_compute_pipeline")):
        raise DeviceError(
            f"device: {type(device).__name__}, expected a name or a GPUDevice of wgpu or wgpudawn"
        )
    info = DeviceInfo.of(describe(device.adapter))
    problem = limits_problem(device.limits)
    if problem:
        raise DeviceError(f"{info.label}: the device was opened with too little: {problem}")
    return _open_gpu(device, info, mode)


def _open_gpu(device: Any, info: DeviceInfo, mode: _Mode) -> Device:
    return Device(info, mode.path, device_limits(device), device, mode.precision)
