"""`cortiq-o1 adapters`: what the library can compute on."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

from ..device import DeviceInfo
from ..devices import devices
from ..gpu.adapters import REQUESTED_FEATURES, find_adapters, required_limits
from .report import Column, byte_size, err_console, out_console, print_table, write_json

_RAISED = {"max-storage-buffer-binding-size": "bindings", "max-buffer-size": "buffers"}
_THREADS = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "OMP_NUM_THREADS",
)


def register(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "adapters",
        help="every adapter on every backend, and the CPU",
        description="Lists every adapter, once a backend, then the CPU; and why one cannot be used.",
    )
    parser.add_argument("--json", action="store_true", help="the list as JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the list."""
    listed = devices()
    if all(info.adapter is None for info in listed):
        err_console().print(f"note: {find_adapters()[1]}", style="yellow", soft_wrap=True)
    if args.json:
        write_json(
            {"format": "cortiq-o1-adapters", "version": 1, "devices": [to_dict(info) for info in listed]}
        )
        return 0
    columns = (
        Column("adapter", wraps=True),
        Column("backend"),
        Column("kind"),
        Column("details", wraps=True),
    )
    rows = [(info.name, info.backend, _kind(info), "\n".join(_details(info))) for info in listed]
    print_table(out_console(), columns, rows, styles=["dim" if info.problem else "" for info in listed])
    return 0


def to_dict(info: DeviceInfo) -> dict[str, Any]:
    """A device for JSON: its description, what the library uses of it, the CPU's BLAS."""
    adapter = info.adapter
    return {
        **info.to_dict(),
        "used_features": [name for name in REQUESTED_FEATURES if name in info.features],
        "used_limits": required_limits(adapter) if adapter and not info.problem else {},
        "blas": blas() if adapter is None else None,
    }


def _kind(info: DeviceInfo) -> str:
    return "software" if info.software else info.kind


def _details(info: DeviceInfo) -> list[str]:
    lines = [info.driver] if info.driver else []
    if info.problem:
        return [*lines, f"cannot be used: {info.problem}"]
    if info.adapter is None:
        return [*lines, blas()]
    used = [name for name in REQUESTED_FEATURES if name in info.features]
    other = [name for name in info.features if name not in used]
    lines.append(f"uses {', '.join(used) or 'no optional feature'}")
    if other:
        lines.append(f"has {', '.join(other)}, not used")
    asked = required_limits(info.adapter)
    for name, text in _RAISED.items():
        have = info.limits.get(name)
        if have is not None:
            part, whole = byte_size(asked[name]), byte_size(have)
            lines.append(f"{text} up to {part}" + (f" of {whole}" if whole != part else ""))
    return [*lines, "other limits: WebGPU's defaults"]


def blas() -> str:
    """The library behind NumPy's matrix products, and its threads."""
    try:
        config: Any = np.show_config(mode="dicts")
    except TypeError:  # before NumPy 1.26 it can only print
        config = {}
    found = config.get("Build Dependencies", {}).get("blas", {})
    name = " ".join(str(found[key]) for key in ("name", "version") if found.get(key)) or "unknown"
    limits = [f"{name}={os.environ[name]}" for name in _THREADS if os.environ.get(name)]
    return f"BLAS {name}, {os.cpu_count()} processors" + (f", {', '.join(limits)}" if limits else "")
