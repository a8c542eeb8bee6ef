"""Every way to run a layer on a device: its paths, float16 windows, float16 products where it has them."""

from __future__ import annotations

from .device import Device, DeviceInfo
from .devices import chosen_path, open_device
from .paths import PATHS

DIRECT = "direct"
"""NumPy without a plan."""
FAST = "gemm, fast"
"""The products with float16 operands."""
HALVES = "float16 windows"
"""Keys and values kept in float16, on the path "auto"."""


def open_ways(info: DeviceInfo) -> dict[str, Device]:
    """The device once for each way, by name; only the path that `CORTIQ_O1_PATH` names, if it names one.

    On the CPU `DIRECT` stands for the path "auto".

    Raises:
        DeviceError: the device cannot be opened.
        ArgumentError: `CORTIQ_O1_PATH` names no path.
    """
    only = chosen_path()
    found = {}
    for path in PATHS if only == "auto" else (only,):
        direct = path == "auto" and info.adapter is None
        found[DIRECT if direct else path] = open_device(info, path)
    if only == "auto":
        found[HALVES] = open_device(info, kv="f16")
    if "gemm" in found:
        fast = open_device(info, "gemm", "fast")
        if fast.precision == "fast":
            found[FAST] = fast
    return found
