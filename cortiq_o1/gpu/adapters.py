"""What wgpu sees of the machine's graphics hardware, and how a device of it is opened.

wgpu is imported when adapters are first asked for, never when this module is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

from ..errors import DeviceError
from ..kernels import KERNELS
from ..planning import Limits

# WebGPU's default limits, all of them: wgpu grants everything that the adapter has where a limit is
# not asked for, and a program that only works with that works on one machine.
DEFAULT_LIMITS: dict[str, int] = {
    "max-texture-dimension-1d": 8192,
    "max-texture-dimension-2d": 8192,
    "max-texture-dimension-3d": 2048,
    "max-texture-array-layers": 256,
    "max-bind-groups": 4,
    "max-bind-groups-plus-vertex-buffers": 24,
    "max-bindings-per-bind-group": 1000,
    "max-dynamic-uniform-buffers-per-pipeline-layout": 8,
    "max-dynamic-storage-buffers-per-pipeline-layout": 4,
    "max-sampled-textures-per-shader-stage": 16,
    "max-samplers-per-shader-stage": 16,
    "max-storage-buffers-per-shader-stage": 8,
    "max-storage-textures-per-shader-stage": 4,
    "max-uniform-buffers-per-shader-stage": 12,
    "max-uniform-buffer-binding-size": 65536,
    "max-storage-buffer-binding-size": 128 << 20,
    "min-uniform-buffer-offset-alignment": 256,
    "min-storage-buffer-offset-alignment": 256,
    "max-vertex-buffers": 8,
    "max-buffer-size": 256 << 20,
    "max-vertex-attributes": 16,
    "max-vertex-buffer-array-stride": 2048,
    "max-inter-stage-shader-variables": 16,
    "max-color-attachments": 8,
    "max-color-attachment-bytes-per-sample": 32,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroup-size-y": 256,
    "max-compute-workgroup-size-z": 64,
    "max-compute-workgroups-per-dimension": 65535,
    "max-immediate-size": 0,
}
RAISED_LIMITS: tuple[str, ...] = ("max-storage-buffer-binding-size", "max-buffer-size")
"""The limits that the library asks for beyond the defaults, so that long windows fit."""
LARGEST_BUFFER = (2 << 30) - 256  # wgpu binds at most 2 GiB - 1; planes end on 16 bytes

FEATURES: dict[str, str] = {
    "timestamp-query": "timestamp-query",
    "shader-f16": "shader-f16",
    "subgroup": "subgroups",  # wgpu's own name
    "subgroups": "subgroups",
}
"""Features worth telling, by the names that backends use for them."""
REQUESTED_FEATURES: tuple[str, ...] = ("timestamp-query", "shader-f16")

_BACKENDS = {
    "vulkan": "vulkan",
    "metal": "metal",
    "d3d12": "d3d12",
    "d3d11": "d3d11",
    "opengl": "gl",
    "opengles": "gl",
    "webgpu": "webgpu",
}
BACKENDS: tuple[str, ...] = ("vulkan", "metal", "d3d12", "gl")
"""Backends by preference, where one GPU shows up in several."""
_KINDS = {"discretegpu": "discrete", "integratedgpu": "integrated", "cpu": "cpu"}
KINDS: tuple[str, ...] = ("discrete", "integrated", "other", "cpu")
"""Kinds of adapter by preference."""
BUSY_WORKGROUPS: Mapping[str, int] = MappingProxyType({"discrete": 264, "integrated": 64, "other": 64})
"""Workgroups that keep an adapter busy, by kind: work is split into about as many.

No API tells how many a GPU runs at once. Two for each of the 132 multiprocessors of a large card are its
one full wave, and a small card is only given a second wave; a GPU beside the processor has some tens of
units. Nobody knows what "other" is; with few splits it loses less.
"""
# Some software renderers do not report themselves as a CPU on every backend.
_SOFTWARE_NAMES = ("llvmpipe", "lavapipe", "swiftshader", "softpipe", "basic render", "warp")


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter on one backend.

    `kind` is one of `KINDS`, `software` is true where no hardware is behind it, `features` and
    `limits` hold what the library uses or reports, and `problem` says why it cannot be used.
    """

    name: str
    backend: str
    kind: str
    software: bool
    vendor: str
    driver: str
    features: tuple[str, ...]
    limits: Mapping[str, int] = field(compare=False)  # a dict, and adapters are hashed
    problem: str | None = None
    ordinal: int = 0  # tells apart twins: equal cards in one machine
    handle: Any = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What stays the same between two listings."""
        return (self.backend, self.name, self.driver, self.ordinal)

    @property
    def label(self) -> str:
        """`name (backend)`, for messages."""
        return f"{self.name} ({self.backend})"


def _squeeze(text: Any) -> str:
    return str(text or "").lower().replace("-", "").replace("_", "")


def limits_problem(limits: Mapping[str, int]) -> str | None:
    """Why an adapter with these limits cannot run the kernels, if so."""
    needs = {
        "max-storage-buffers-per-shader-stage": max(len(k.bindings) for k in KERNELS.values()),
        "max-compute-invocations-per-workgroup": max(prod(k.workgroup) for k in KERNELS.values()),
        "max-compute-workgroup-size-x": max(k.workgroup[0] for k in KERNELS.values()),
        "max-compute-workgroup-storage-size": max(k.shared_bytes for k in KERNELS.values()),
        "max-compute-workgroups-per-dimension": DEFAULT_LIMITS["max-compute-workgroups-per-dimension"],
        "max-dynamic-uniform-buffers-per-pipeline-layout": 1,
        "max-storage-buffer-binding-size": 1 << 20,
    }
    short = [
        f"{name} {limits[name]}, needs {need}"
        for name, need in needs.items()
        if limits.get(name, need) < need
    ]
    return "; ".join(short) or None


def context_problem(driver: str) -> str | None:
    """Why an OpenGL context of this version string has no compute shaders, if so.

    wgpu asks for OpenGL 3.3. Mesa answers with the newest version it has, NVIDIA's driver with 3.3, and
    opening such an adapter fails late, with the device reported lost.
    """
    version = re.match(r"(\d+)\.(\d+)", driver)
    if version is None or "ES" in driver.split():
        return None
    major, minor = int(version[1]), int(version[2])
    return None if (major, minor) >= (4, 3) else f"OpenGL {major}.{minor}, needs 4.3 for compute shaders"


def describe(handle: Any, ordinal: int = 0) -> AdapterInfo:
    """The description of a wgpu or wgpudawn adapter; a probe that fails becomes its `problem`."""
    problem = None
    info: Mapping[str, Any] = {}
    limits: dict[str, int] = {}
    features: tuple[str, ...] = ()
    try:
        info = dict(handle.info)
        have = set(handle.features)
        features = tuple(dict.fromkeys(told for name, told in FEATURES.items() if name in have))
        limits = {name: int(handle.limits[name]) for name in DEFAULT_LIMITS if name in handle.limits}
        problem = limits_problem(limits)
        if problem is None and _BACKENDS.get(_squeeze(info.get("backend_type"))) == "gl":
            problem = context_problem(str(info.get("description") or ""))
    except Exception as error:  # a listing must come whatever one driver does
        problem = f"cannot be probed: {error}"
    name = str(info.get("device") or info.get("description") or "unnamed adapter")
    kind = _KINDS.get(_squeeze(info.get("adapter_type")), "other")
    lowered = name.lower()
    backend = _squeeze(info.get("backend_type"))
    return AdapterInfo(
        name=name,
        backend=_BACKENDS.get(backend, backend or "unknown"),
        kind=kind,
        software=kind == "cpu" or any(word in lowered for word in _SOFTWARE_NAMES),
        vendor=str(info.get("vendor") or ""),
        driver=str(info.get("description") or ""),
        features=features,
        limits=limits,
        problem=problem,
        ordinal=ordinal,
        handle=handle,
    )


def find_adapters() -> tuple[list[AdapterInfo], str | None]:
    """Every adapter that wgpu sees, once a backend, best first; and why there is none, if so."""
    try:
        import wgpu
    except ImportError as error:
        return [], f"wgpu cannot be imported: {error}"
    except Exception as error:  # its library may fail to load in ways of its own
        return [], f"wgpu is broken: {type(error).__name__}: {error}"
    try:
        handles = wgpu.gpu.enumerate_adapters_sync()
    except Exception as error:
        return [], f"wgpu cannot list adapters: {type(error).__name__}: {error}"
    if not handles:
        return [], "wgpu finds no adapter; a Vulkan, Metal, DX12 or OpenGL driver may be missing"
    return ranked(_with_ordinals(handles)), None


def find_dawn_adapters() -> tuple[list[AdapterInfo], str | None]:
    """What Dawn, the WebGPU of Chromium, sees through wgpudawn; and why that is nothing, if so.

    A second opinion on the same hardware, with "dawn" for its backend; no listing has it unasked.
    """
    try:
        import wgpudawn

        handles = wgpudawn.gpu.enumerate_adapters_sync()
    except ImportError as error:
        return [], f"wgpudawn cannot be imported: {error}"
    except Exception as error:
        return [], f"Dawn cannot list adapters: {type(error).__name__}: {error}"
    found = [replace(info, backend="dawn") for info in _with_ordinals(handles)]
    return ranked(found), None if found else "Dawn finds no adapter"


def _with_ordinals(handles: Iterable[Any]) -> Iterator[AdapterInfo]:
    seen: dict[tuple[str, str, str, int], int] = {}
    for handle in handles:
        info = describe(handle)
        count = seen.get(info.key, 0)
        seen[info.key] = count + 1
        yield describe(handle, count) if count else info


def ranked(adapters: Iterable[AdapterInfo]) -> list[AdapterInfo]:
    """Usable before unusable, hardware before software, then by kind, backend and order found."""

    def rank(info: AdapterInfo) -> tuple[bool, bool, int, int]:
        backend = BACKENDS.index(info.backend) if info.backend in BACKENDS else len(BACKENDS)
        return (info.problem is not None, info.software, KINDS.index(info.kind), backend)

    return sorted(adapters, key=rank)


def list_adapters() -> list[AdapterInfo]:
    """Every adapter that wgpu sees, once a backend, best first; empty where there is none."""
    return find_adapters()[0]


# A device per process and adapter: some platforms leak or crash by the dozen. The process is part of
# the key because a device does not survive a fork.
_open: dict[tuple[Any, ...], Any] = {}


def required_limits(info: AdapterInfo, default_limits: bool = False) -> dict[str, int]:
    """The limits to ask an adapter for: WebGPU's defaults (or less, where it has less), buffers raised."""
    asked = {}
    for name, default in DEFAULT_LIMITS.items():
        if name not in info.limits:
            continue
        have = info.limits[name]
        if name in RAISED_LIMITS and not default_limits:
            asked[name] = min(have, LARGEST_BUFFER)
        else:
            asked[name] = max(default, have) if name.startswith("min-") else min(default, have)
    return asked


def open_adapter(info: AdapterInfo, default_limits: bool = False) -> Any:
    """The process's device on an adapter, opened on first use.

    Args:
        info: an entry of `list_adapters`.
        default_limits: ask for exactly WebGPU's default limits and no feature.

    Raises:
        DeviceError: the adapter cannot be used or refuses; names it.
    """
    if info.problem:
        raise DeviceError(f"{info.label}: cannot be used: {info.problem}")
    key = (os.getpid(), default_limits, *info.key)
    device = _open.get(key)
    if device is None:
        wanted = [] if default_limits else [f for f in REQUESTED_FEATURES if f in info.features]
        try:
            device = info.handle.request_device_sync(
                label=f"o1 {info.name}",
                required_features=wanted,
                required_limits=required_limits(info, default_limits),
            )
        except Exception as error:
            raise DeviceError(f"{info.label}: refuses a device: {error}") from error
        _open[key] = device
    return device


def forget(device: Any) -> None:
    """Lets the next `open_adapter` open anew, after a device was lost."""
    for key in [k for k, v in _open.items() if v is device]:
        del _open[key]


def device_limits(device: Any) -> Limits:
    """What a device grants to the planner."""
    have = device.limits
    largest = min(int(have["max-storage-buffer-binding-size"]), int(have["max-buffer-size"]), LARGEST_BUFFER)
    return Limits(
        binding_bytes=largest // 16 * 16,
        workgroups=busy_workgroups(describe(device.adapter)),
        float16="shader-f16" in device.features,
    )


def busy_workgroups(info: AdapterInfo) -> int:
    """About how many workgroups keep an adapter busy: of a software renderer two a core."""
    return 2 * (os.cpu_count() or 1) if info.software else BUSY_WORKGROUPS.get(info.kind, 64)


def timestamp_period(device: Any) -> float | None:
    """Nanoseconds of one timestamp tick, None where it cannot be told.

    Dawn converts timestamps to nanoseconds itself. wgpu-native hands out ticks and tells their
    length, but not through wgpu's Python methods, hence the way past them.
    """
    if "timestamp-query" not in device.features:
        return None
    module = type(device).__module__
    if module.startswith("wgpudawn."):
        return 1.0
    try:
        from wgpu.backends.wgpu_native import lib

        period = float(lib.wgpuQueueGetTimestampPeriod(device.queue._internal))
    except Exception:  # a private way in, which another version may not have
        return None
    return period if period > 0 else None
