"""What a layer asks of the thing that computes for it; the two executors never meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .arrays import Float32
from .geometry import Geometry
from .planes import STATE_PLANES
from .planning import Limits

Planes = Mapping[str, npt.NDArray[Any]]


class Resident(Protocol):
    """A layer's state where an engine keeps it, and the rows of its drafts."""

    geometry: Geometry

    @property
    def nbytes(self) -> int:
        """Bytes held: state, archive, drafts."""


class Log(Protocol):
    """Rows that passed a layer, kept in order where the engine computes.

    `parts` is `("q",)` or `("q", "k", "v")`; `rows` how many there are.
    """

    parts: tuple[str, ...]
    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""


@dataclass(frozen=True)
class Accepted:
    """The first `rows` rows of a resident's draft, about to move its state, and to join a log if given."""

    resident: Any
    rows: int
    draft: str = ""
    log: Any = None


class Engine(Protocol):
    """Runs one layer's operator. Arguments arrive checked: float32, C-contiguous, finite, of the
    right shape; a call that raises leaves residents and logs as they were."""

    limits: Limits
    path: str
    """The planner's path, see `planning.plan`."""

    def upload(self, geometry: Geometry, planes: Planes, archive: int = 0) -> Any:
        """Takes copies of the state planes (shapes of `planes.PLANES`) and returns the resident.

        `archive`: if not zero, the resident also keeps what the last so many evictions of each group
        were, with the queries of the rows that evicted them, in the archive planes.
        """

    def attend(
        self,
        resident: Any,
        q: Float32,
        k: Float32,
        v: Float32,
        commit: bool,
        draft: str = "",
        log: Any = None,
    ) -> Float32:
        """Outputs `(rows, nh, dv)` of `q (rows, nh, d)`, `k (rows, G, d)`, `v (rows, G, dv)`.

        With `commit` the state moves over the rows, all drafts are forgotten, and the rows join the log.
        Without, the state stays, and the engine keeps the rows as the draft of that name, in place
        of one it had by that name; other drafts stay.
        """

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Moves each state over the rows accepted, in one submission, and forgets all drafts of those
        residents. An entry of 0 rows just forgets. A resident comes once."""

    def absorb(self, resident: Any, k: Float32, v: Float32) -> None:
        """Moves the state over rows `k (rows, G, d)`, `v (rows, G, dv)` without outputs, in bounded
        dispatches; the archive does not take them, drafts are forgotten. Where it raises midway, the
        resident is of no use any more: a seal in the making has no state to go back to."""

    def forget(self, resident: Any) -> None:
        """Forgets all drafts."""

    def read(self, resident: Any, names: Sequence[str] = STATE_PLANES) -> dict[str, np.ndarray]:
        """Copies of planes as they are now: the state's, or the archive's."""

    def fork(self, resident: Any) -> Any:
        """A resident of its own with copies of the planes that move, the archive's among them; what
        never moves is shared. Drafts stay behind."""

    def assign(self, resident: Any, source: Any) -> None:
        """What moves, from a fork of the same seal back into a resident; its drafts are forgotten."""

    def replaced(self, resident: Any, planes: Planes) -> Any:
        """A resident with copies of these planes, sharing all others with `resident`, which the caller
        then lets go of. Without drafts."""

    def join(self, resident: Any | None, one: Any, count: int) -> Any:
        """A resident of `count + 1` sequences, `one.geometry.batch(count + 1)`: the first `count` those of
        `resident` (None where there are none), then a copy of `one`. The caller lets go of `resident`,
        whose memory may be in use again. Drafts are forgotten."""

    def drop(self, resident: Any, geometry: Geometry, count: int, index: int) -> None:
        """Takes sequence `index` out of a resident of `count` sequences of `geometry`: the last one moves
        into its place. Drafts are forgotten."""

    def take(self, resident: Any, geometry: Geometry, index: int) -> Any:
        """A resident of its own with a copy of sequence `index`. Drafts stay behind."""

    def put(self, resident: Any, index: int, one: Any) -> None:
        """What moves of `one` into the place of sequence `index`; drafts are forgotten."""

    def new_log(self, geometry: Geometry, parts: tuple[str, ...]) -> Any:
        """An empty log of rows of a geometry."""

    def read_log(self, log: Any) -> tuple[Float32, ...]:
        """The rows of a log, an array for each of its parts: `(rows, nh, d)`, `(rows, G, d)`,
        `(rows, G, dv)`."""
