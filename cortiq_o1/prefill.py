"""A prompt sealed where its layer will live, block by block, in memory that does not grow with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import Float32
from .engine import Engine
from .geometry import Geometry
from .planning import block_rows
from .sealing import sealed_planes
from .state import SealOptions

Progress = Callable[[int, int], object]
"""Called with the rows of the prompt that are done, and with all of them."""


def seal_on(
    engine: Engine,
    q: Float32,
    k: Float32,
    v: Float32,
    geometry: Geometry,
    options: SealOptions,
    archive: int = 0,
    progress: Progress | None = None,
) -> Any:
    """The resident of `sealing.sealed_state`, whose far field the engine has folded itself.

    Landmarks and mixing matrix are made on the host, in float64, and the rows that no ring has room for
    then pass through the engine in blocks, of which one at a time is on its way.

    Args:
        engine: where the state will live.
        q: queries `(T, nh, d)` that `sealing.check_rows` returned, more than `geometry.exact_rows`.
        k: keys `(T, G, d)`.
        v: values `(T, G, dv)`.
        geometry: the layer's sizes.
        options: how to seal.
        archive: of the resident, see `Engine.upload`; it does not take the prompt's rows.
        progress: called first with 0 rows done, then after each block. What it raises ends the seal:
            nothing is left of it.

    Raises:
        GeometryError: the layer does not fit the device; nothing has been allocated.
        DeviceError: the device failed.
    """
    rows = len(k)
    if progress is not None:
        progress(0, rows)
    # Up to here no ring is full, not the narrowest one, and no row has been folded.
    done = geometry.sinks + geometry.min_window
    resident = engine.upload(geometry, sealed_planes(q, k, v, geometry, options, done), archive)
    most = block_rows(geometry, engine.limits, engine.path)
    while done < rows:
        block = slice(done, min(done + most, rows))
        engine.absorb(resident, np.ascontiguousarray(k[block]), np.ascontiguousarray(v[block]))
        done = block.stop
        if progress is not None:
            progress(done, rows)
    return resident
