"""GPU time by timestamps, where they work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .adapters import timestamp_period
from .buffers import COPY_SRC, QUERY_RESOLVE
from .context import Context

Clock = Literal["gpu", "wall"]
MOST_PASSES = 2048
"""WebGPU's query sets hold 4,096 timestamps, two a pass."""


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, and the clock that measured them: GPU timestamps, or wall time from
    submission to completion."""

    clock: Clock
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class KernelTime:
    """Seconds of one dispatch of a plan in each repeat."""

    kernel: str
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Profile:
    """A plan's dispatches in order, each timed alone, and the clock that measured them.

    "gpu" is the time of a compute pass that holds the one dispatch; "wall" that of a submission of
    its own, from its recording to its completion, which for a short kernel is mostly not the kernel.
    """

    clock: Clock
    kernels: tuple[KernelTime, ...]


class Stopwatch:
    """The beginning and the end of up to `passes` compute passes by the GPU's own clock."""

    def __init__(self, context: Context, passes: int) -> None:
        self.context = context
        self.passes = passes
        self.period = timestamp_period(context.device)
        self._queries: Any = None
        if self.period is not None:
            with context.translated("timestamp queries"):
                self._queries = context.device.create_query_set(
                    label="o1.time", type="timestamp", count=2 * passes
                )
            self._resolved = context.memory.create("time", 16 * passes, QUERY_RESOLVE | COPY_SRC)

    def writes(self, number: int) -> dict[str, Any] | None:
        """What `begin_compute_pass` is to be given as `timestamp_writes` for a pass."""
        if self._queries is None:
            return None
        return {
            "query_set": self._queries,
            "beginning_of_pass_write_index": 2 * number,
            "end_of_pass_write_index": 2 * number + 1,
        }

    def resolve(self, encoder: Any) -> None:
        """Records the transfer of the timestamps out of the query set, after the last pass."""
        if self._queries is not None:
            encoder.resolve_query_set(self._queries, 0, 2 * self.passes, self._resolved, 0)

    def nanoseconds(self) -> tuple[float, ...] | None:
        """Each pass's duration; None where a timestamp is missing, zero or out of order.

        Some drivers leave zeros, some write the end before the beginning.
        """
        if self._queries is None or self.period is None:
            return None
        ticks = np.empty((self.passes, 2), np.uint64)
        self.context.download(self._resolved, ticks, "read of timestamps")
        begin, end = ticks[:, 0], ticks[:, 1]
        if (begin == 0).any() or (end <= begin).any():
            return None
        return tuple(float(t) * self.period for t in end - begin)
