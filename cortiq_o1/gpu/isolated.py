"""One kernel alone, on arrays, with canaries around every plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, DeviceError
from ..kernels import KERNELS, Grid
from ..params import Params
from ..planes import store_room, store_rows
from ..plans import is_store, members
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
    kv: str = "f32",
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
        kv: how the kernel takes rings; as "f16" they come and go as `planes.packed` makes them.

    Raises:
        ArgumentError: the planes or parameters are not the kernel's.
        DeviceError: the kernel wrote outside of a plane; names kernel, adapter and plane.
        ShaderError: the kernel does not compile.
    """
    declared = KERNELS[kernel]
    names = [plane for b in declared.bindings for plane in members(b.name)]
    if set(planes) != set(names):
        raise ArgumentError(f"planes: {sorted(planes)}, expected {names} for {kernel}")
    if set(params) != {f.name for f in declared.params}:
        raise ArgumentError(
            f"params: {sorted(params)}, expected {[f.name for f in declared.params]} for {kernel}"
        )
    values: Params = {f.name: params[f.name] for f in declared.params}
    constants = declared.constants(values)
    pipeline, layout = (
        context.pipeline(kernel, constants, kv)
        if source is None
        else context.build(kernel, constants, source, kv)
    )
    guard = CANARY_BYTES if canary else 0
    uploads, ranges = [], []
    where: dict[str, tuple[Any, int, int]] = {}
    packed = np.array([tuple(values.values())], declared.params_dtype)
    uniform = context.memory.create("params", packed.nbytes, UNIFORM | COPY_DST)
    uploads.append((uniform, packed))
    ranges.append((uniform, 0, packed.nbytes))
    for binding in declared.bindings:
        blocks, behind = _blocks(binding.name, planes, values, guard)
        at = guard // 4
        padded = np.full(at + sum(room for _, _, room in blocks) + guard // 4, CANARY, np.uint32)
        buffer = context.memory.create(binding.name, padded.nbytes)
        for name, words, room in blocks:
            padded[at : at + words.size] = words
            where[name] = (buffer, at, room)
            at += room
        uploads.append((buffer, padded))
        ranges.append((buffer, guard, 4 * at - guard + behind))
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
        for name in members(binding.name):
            buffer, first, room = where[name]
            planes_here = members(binding.name)
            low = first - (guard // 4 if name == planes_here[0] else 0)
            high = first + room + (guard // 4 if name == planes_here[-1] else 0)
            after = np.empty(buffer.size // 4, np.uint32)
            context.download(buffer, after, f"{kernel}: read of {name}")
            array = planes[name]
            last = first + array.size
            if canary:
                _check_canaries(f"{kernel} on {context.label}", name, after, (low, first), (last, high))
            if binding.access == "read_write":
                found[name] = after[first:last].view(array.dtype).reshape(array.shape).copy()
    return found


def _blocks(
    name: str, planes: Mapping[str, npt.NDArray[Any]], values: Params, guard: int
) -> tuple[list[tuple[str, npt.NDArray[np.uint32], int]], int]:
    """The planes of a binding one behind the other: name, words, and how many words have room; and how many
    bytes behind them the binding sees."""
    found = [(plane, _words(plane, planes[plane])) for plane in members(name)]
    if not is_store(name):
        return [(plane, words, max(4, -(-words.size // 4) * 4)) for plane, words in found], guard
    near = int(values["w"]) + int(values["ns"])
    rows = store_rows(name, int(values["ng"]), near, int(values["nh"]), int(values["m"]))
    # No more: by its length the kernel knows where the second plane begins.
    return [(plane, words, words.size // rows * store_room(rows)) for plane, words in found], 0


def _check_canaries(
    who: str, name: str, words: npt.NDArray[np.uint32], before: tuple[int, int], behind: tuple[int, int]
) -> None:
    for (begin, end), ahead in ((before, True), (behind, False)):
        overrun = np.flatnonzero(words[begin:end] != CANARY)
        if overrun.size:
            at = int(overrun[0])
            told = f"{end - begin - at} words before" if ahead else f"{at + 1} words behind the end of"
            raise DeviceError(f"{who}: wrote {told} {name}")


def _words(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    if array.dtype.itemsize != 4 or not array.size:
        raise ArgumentError(f"planes[{name!r}]: {array.dtype} {array.shape}, expected 4-byte scalars")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint32)
