"""What a device compiles ahead of the calls that need it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .arrays import as_index
from .errors import ArgumentTypeError
from .geometry import Geometry
from .planning import Limits, commit_plan, plan
from .plans import Plan


@dataclass(frozen=True)
class WarmUp:
    """What `Device.warm_up` did: the kernels that it compiled, a name for each pipeline, and how long that
    took in seconds. What had been compiled before is not in it; on NumPy there never is anything."""

    kernels: tuple[str, ...]
    seconds: float


def warm_up(engine: Any, geometry: Geometry, rows: int | Iterable[int], path: str, limits: Limits) -> WarmUp:
    """See `Device.warm_up`."""
    if not isinstance(geometry, Geometry):
        raise ArgumentTypeError(f"geometry: {type(geometry).__name__}, expected a Geometry")
    if isinstance(rows, Iterable) and not isinstance(rows, (str, bytes)):
        counts = tuple(as_index(f"rows[{i}]", count, 1) for i, count in enumerate(rows))
    else:
        counts = (as_index("rows", rows, 1),)
    plans = list(_plans(geometry, counts, path, limits, getattr(engine, "precision", "exact")))
    begin = time.perf_counter()
    compiled = engine.compile(plans) if hasattr(engine, "compile") else ()
    return WarmUp(tuple(compiled), time.perf_counter() - begin if compiled else 0.0)


def _plans(
    geometry: Geometry, counts: tuple[int, ...], path: str, limits: Limits, precision: str
) -> Iterator[Plan]:
    """Those of a call that commits, of one that does not, and of a commit later."""
    for rows in dict.fromkeys(counts):
        for commit in (True, False):
            yield plan(geometry, rows, commit, path, limits, precision)
        yield commit_plan(geometry, rows, path, limits)
