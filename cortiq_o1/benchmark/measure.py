"""One measurement at a time: calls, copies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..device import Device
from ..planning import block_rows
from ..state import LayerState
from .layers import moved_bytes, random_rows
from .results import Cell, Clock, Timing

MIN_REPEATS, MAX_REPEATS = 3, 50
COPY_BYTES = 256 << 20  # past the caches of processors
GPU_COPY_BYTES = 1 << 30  # and so much that a GPU's start and end of a dispatch do not count
SOFTWARE_COPY_BYTES = 64 << 20
COPY_SECONDS = 0.5
CACHE_BYTES = 256 << 20
"""A GPU runs through so many bytes of layers, or all layers of the model, before one comes again: a
single small layer would stay in its cache, as no layer of a model does."""


def sample(run: Callable[[], Any], seconds: float) -> tuple[float, ...]:
    """Seconds of each of at least three calls, more while they take less than `seconds` together.

    One call goes before them: it compiles pipelines and fills caches.
    """
    run()
    times: list[float] = []
    while len(times) < MIN_REPEATS or (len(times) < MAX_REPEATS and math.fsum(times) < seconds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return tuple(times)


def measure_cell(
    device: Device, state: LayerState, rows: int, context: int | None, layers: int, seconds: float
) -> Cell:
    """Times `rows` rows through a layer of that state, for about `seconds` with each clock.

    Wall time always; GPU time where the device's timestamps work, over up to `layers` layers in turn.
    """
    cell = Cell(
        context=context,
        rows=rows,
        state_bytes=state.nbytes,
        moved_bytes=moved_bytes(state.geometry, rows, context is None, device.limits.kv),
    )
    if device.software and hasattr(device.engine, "attend_timed"):
        _time_software(device, state, cell, seconds)
        return cell
    # The layer goes with this line, before the GPU gets others of the same size.
    q, k, v = random_rows(state.geometry, rows)
    cell.wall = Timing("wall", sample(partial(device.load(state).attend, q, k, v), seconds))
    layers = max(1, min(layers, -(-CACHE_BYTES // state.nbytes)))
    cell.gpu = _gpu_timing(device, state, rows, layers, seconds / cell.wall.median)
    cell.gpu_layers = layers
    return cell


def _time_software(device: Device, state: LayerState, cell: Cell, seconds: float) -> None:
    """Both clocks over the same calls: a software renderer is slow, and its caches are the CPU's."""
    engine = device.engine
    resident = engine.upload(state.geometry, state.planes)
    rows = random_rows(state.geometry, cell.rows)
    spent: list[float | None] = []
    walls = sample(lambda: spent.append(engine.attend_timed(resident, *rows, True)[1]), seconds)
    cell.wall = Timing("wall", walls)
    timed = [t * 1e-9 for t in spent[1:] if t is not None]  # the first is `sample`'s own
    if len(timed) == len(walls):
        cell.gpu = Timing("gpu", tuple(timed))


def _gpu_timing(device: Device, state: LayerState, rows: int, layers: int, calls: float) -> Timing | None:
    """GPU time of a layer; None without timestamps, or where the rows need several submissions."""
    engine = device.engine
    if not hasattr(engine, "time_plan") or rows > block_rows(state.geometry, engine.limits, engine.path):
        return None
    residents = [engine.upload(state.geometry, state.planes) for _ in range(layers)]
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(calls / layers)))
    timing = engine.time_plan(residents, rows, True, repeats)
    # Without timestamps the engine falls back to the clock on the wall, which `measure_cell` has read.
    return Timing("gpu", tuple(t / layers for t in timing.seconds)) if timing.clock == "gpu" else None


def copy_bandwidth(device: Device) -> tuple[float, Clock]:
    """Bytes read plus bytes written a second by a plain copy on the device, and the clock used."""
    engine = device.engine
    if hasattr(engine, "copy_bandwidth"):
        found: tuple[float, Clock] = engine.copy_bandwidth(
            SOFTWARE_COPY_BYTES if device.software else GPU_COPY_BYTES
        )
        return found
    source = np.ones(COPY_BYTES // 8, np.float64)
    target = np.empty_like(source)
    times = sample(partial(np.copyto, target, source), COPY_SECONDS)
    return 2 * source.nbytes / float(np.median(times)), "wall"
