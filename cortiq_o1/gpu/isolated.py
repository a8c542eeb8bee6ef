"""One kernel alone, on arrays, with canaries around every plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, DeviceError
from ..kernels import KERNELS, Grid, Params
from .buffers import COPY_DST, UNIFORM
from .context import Context

CANARY_BYTES = 256
"""Bytes before and after a plane: a binding's offset is a multiple of 256 on some devices."""
CANARY = np.uint32(0x5EADBEEF)
"""A large finite float32, so that a value read from it shows as well."""


def run_isolated(
    context: Context,
    kernel: str,
    planes: Mapping[str, npt.NDArray[Any]],
    params: Mapping[str, int | float],
    grid: Grid | None = None,
    source: str | None = None,
    canary: bool = True,
) -> dict[str, np.ndarray]:
    """Runs one kernel on `planes`, named as its bindings, and returns those it may write.

    Args:
        context: the device.
        kernel: a kernel of the table.
        planes: an array of 4-byte scalars for each binding, any shape.
        params: every field of its parameters.
        grid: workgroups; the table's grid for these parameters if None.
        source: WGSL in place of the kernel's own.
        canary: put known words before and after each plane and look at them afterwards. Those behind
            lie inside the binding: where a driver keeps accesses within bounds, a stray one would
            otherwise land on the plane's last element, or nowhere, and go unseen.

    Raises:
        ArgumentError: the planes or parameters are not the kernel's.
        DeviceError: the kernel wrote outside of a plane; names kernel, adapter and plane.
        ShaderError: the kernel does not compile.
    """
    declared = KERNELS[kernel]
    names = [b.name for b in declared.bindings]
    if set(planes) != set(names):
        raise ArgumentError(f"planes: {sorted(planes)}, expected {names} for {kernel}")
    if set(params) != {f.name for f in declared.params}:
        raise ArgumentError(
            f"params: {sorted(params)}, expected {[f.name for f in declared.params]} for {kernel}"
        )
    values: Params = {f.name: params[f.name] for f in declared.params}
    pipeline, layout = context.pipeline(kernel) if source is None else context.build(kernel, source)
    guard = CANARY_BYTES if canary else 0
    uploads, buffers, ranges = [], {}, []
    packed = np.array([tuple(values.values())], declared.params_dtype)
    uniform = context.memory.create("params", packed.nbytes, UNIFORM | COPY_DST)
    uploads.append((uniform, packed))
    ranges.append((uniform, 0, packed.nbytes))
    for name in names:
        words = _words(name, planes[name])
        padded = np.full((guard + max(16, -(-words.nbytes // 16) * 16) + guard) // 4, CANARY, np.uint32)
        padded[guard // 4 : guard // 4 + words.size] = words
        buffers[name] = context.memory.create(name, padded.nbytes)
        uploads.append((buffers[name], padded))
        ranges.append((buffers[name], guard, padded.nbytes - guard))
    context.upload(uploads, f"{kernel}: upload")
    entries = [
        {"binding": i, "resource": {"buffer": b, "offset": offset, "size": size}}
        for i, (b, offset, size) in enumerate(ranges)
    ]
    encoder = context.encoder(kernel)
    with context.translated(kernel):
        group = context.device.create_bind_group(label=kernel, layout=layout, entries=entries)
        compute_pass = encoder.begin_compute_pass(label=kernel)
        compute_pass.set_pipeline(pipeline)
        compute_pass.set_bind_group(0, group, [0])
        compute_pass.dispatch_workgroups(*(grid or declared.grid(values)))
        compute_pass.end()
    context.submit(encoder, kernel)
    found = {}
    for binding in declared.bindings:
        after = np.empty(buffers[binding.name].size // 4, np.uint32)
        context.download(buffers[binding.name], after, f"{kernel}: read of {binding.name}")
        array = planes[binding.name]
        first, last = guard // 4, guard // 4 + array.size
        overrun = np.flatnonzero(np.concatenate([after[:first], after[last:]]) != CANARY)
        if canary and overrun.size:
            at = int(overrun[0])
            where = (
                f"{first - at} words before" if at < first else f"{at - first + 1} words behind the end of"
            )
            raise DeviceError(f"{kernel} on {context.label}: wrote {where} {binding.name}")
        if binding.access == "read_write":
            found[binding.name] = after[first:last].view(array.dtype).reshape(array.shape).copy()
    return found


def _words(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    if array.dtype.itemsize != 4 or not array.size:
        raise ArgumentError(f"planes[{name!r}]: {array.dtype} {array.shape}, expected 4-byte scalars")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint32)
