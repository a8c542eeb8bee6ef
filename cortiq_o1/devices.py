"""What there is to compute on, how one is chosen, and how it is opened."""

from __future__ import annotations

import os
import platform
import warnings
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np

from .device import Device, DeviceInfo
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
from .paths import PATHS
from .planes import KV_BYTES
from .planning import PRECISIONS, Limits

VARIABLE = "CORTIQ_O1_DEVICE"
"""Environment variable that stands in for the device "auto"."""
PATH_VARIABLE = "CORTIQ_O1_PATH"
"""Environment variable that stands in for the path "auto"."""
CPU_LIMITS = Limits(binding_bytes=1 << 62, float16=True)  # the twins round as float16 does
_ALIASES = {"dx12": "d3d12", "opengl": "gl", "numpy": "cpu"}


class FallbackWarning(RuntimeWarning):
    """`open_device("auto")` found no GPU that works and computes on the CPU; the message says why."""


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
    name: str | DeviceInfo | AdapterInfo | Any = "auto",
    path: str = "auto",
    precision: str = "exact",
    kv: str = "f32",
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
        kv: how keys and values of window and sinks are kept. "f32", or "f16" to round every key and value
            to float16 as it comes in: a layer takes little more than half the memory, and a GPU reads
            half as much a row. Far field, sums and outputs stay float32. Values beyond 65,504 are
            refused. No feature of the adapter is needed; NumPy rounds likewise, and keeps float32.

    Raises:
        DeviceError: nothing answers to `name`, with a list of what there is; or it cannot be opened.
        ArgumentError: no such path, precision or kv.
    """
    mode = _Mode(chosen_path(path), precision, kv)
    if precision not in PRECISIONS:
        raise ArgumentError(f"precision: {precision!r}, expected one of {', '.join(map(repr, PRECISIONS))}")
    if kv not in KV_BYTES:
        raise ArgumentError(f"kv: {kv!r}, expected one of {', '.join(map(repr, KV_BYTES))}")
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
    kv: str


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
    return Device(cpu_info(), mode.path, CPU_LIMITS, None, mode.precision, mode.kv)


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
    return Device(info, mode.path, device_limits(device), device, mode.precision, mode.kv)
