"""What a layer asks of the thing that computes for it; the two executors never meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .arrays import Float32
from .geometry import Geometry
from .planning import Limits

Planes = Mapping[str, npt.NDArray[Any]]


class Resident(Protocol):
    """A layer's state where an engine keeps it."""

    geometry: Geometry


class Engine(Protocol):
    """Runs one layer's operator. Arguments arrive checked: float32, C-contiguous, finite, of the
    right shape; a call that raises leaves the resident state as it was."""

    limits: Limits
    path: str
    """The planner's path, see `planning.plan`."""

    def upload(self, geometry: Geometry, planes: Planes) -> Any:
        """Takes copies of the state planes (shapes of `planes.PLANES`) and returns the resident."""

    def attend(self, resident: Any, q: Float32, k: Float32, v: Float32, commit: bool) -> Float32:
        """Outputs `(rows, nh, dv)` of `q (rows, nh, d)`, `k (rows, G, d)`, `v (rows, G, dv)`.

        With `commit` the state moves over the rows. Without, it stays, and the engine keeps the
        rows for `commit`, in place of any it kept before.
        """

    def commit(self, resident: Any, rows: int) -> None:
        """Moves the state over the first `rows` of the rows kept, then forgets them."""

    def read(self, resident: Any) -> dict[str, np.ndarray]:
        """Copies of the state planes as they are now."""
