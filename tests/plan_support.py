"""Layers, streams and runs for the tests of whole plans on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from support import Rows, part, random_rows

from cortiq_o1.cpu.executor import PlanEngine
from cortiq_o1.geometry import Geometry
from cortiq_o1.reference import ReferenceLayer, worst_error
from cortiq_o1.sealing import seal

Array = npt.NDArray[Any]
Planes = dict[str, Array]


def stream(geometry: Geometry, rows: int, seed: int = 0) -> Rows:
    """`rows` rows that depend on the seed alone."""
    return random_rows(np.random.default_rng(seed), rows, geometry)


def cut(rows: Rows, start: int, stop: int) -> Rows:
    """Those rows of all three."""
    return part(rows, slice(start, stop))


def sealed(geometry: Geometry, prompt: int, fold: str = "always", seed: int = 1) -> Planes:
    state = seal(*stream(geometry, prompt, seed), geometry, fold=fold)  # type: ignore[arg-type]
    assert state.sealed
    return state.planes


def same_bits(a: Planes, b: Planes) -> bool:
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def run(
    planes: Planes, geometry: Geometry, rows: Rows, chunks: list[int], **options: Any
) -> tuple[Array, Planes]:
    """Outputs of all rows in calls of the given lengths, and the state after them."""
    engine = PlanEngine(**options)
    resident = engine.upload(geometry, planes)
    outs, at = [], 0
    for n in chunks:
        outs.append(engine.attend(resident, *cut(rows, at, at + n), commit=True))
        at += n
    assert at == len(rows[0])
    return np.concatenate(outs), engine.read(resident)


def assert_close(planes: Planes, geometry: Geometry, rows: Rows, got: Array) -> None:
    error, share = worst_error(ReferenceLayer.from_planes(geometry, planes).run(*rows), got)
    assert share <= 1.0, f"worst error {error:.2e}, {share:.2f} of its bound"


PLAIN = Geometry(4, 2, 8, window=16, sinks=2, landmarks=4)
CASES = {
    # geometry, prompt rows, fold, calls
    "plain": (PLAIN, 60, "always", [1, 20, 5]),
    "fm": (Geometry(4, 2, 8, window=16, sinks=2, landmarks=4, rect="fm"), 60, "always", [1, 20, 5]),
    "widths-differ": (Geometry(6, 2, 12, 20, window=12, sinks=3, landmarks=8), 90, "always", [30, 1]),
    "wide-value": (Geometry(5, 1, 4, 64, window=9, sinks=1, landmarks=8), 90, "always", [30, 1]),
    "window-1": (Geometry(4, 2, 8, window=1, sinks=0, landmarks=4), 60, "always", [9, 1]),
    "no-sinks": (Geometry(3, 3, 8, window=8, sinks=0, landmarks=4), 60, "always", [20]),
    "windows-differ": (
        Geometry(4, 2, 8, window=24, sinks=2, landmarks=4, windows=(7, 24)), 60, "always", [1, 30]
    ),
    "ring-fills": (
        Geometry(4, 2, 8, window=40, sinks=2, landmarks=4, windows=(16, 40)), 30, "always", [16, 30, 3]
    ),
    "few-landmarks": (Geometry(4, 2, 8, window=16, sinks=2, landmarks=32), 60, "always", [20, 1]),
    "fold-prompt": (PLAIN, 30, "prompt", [40, 1]),
    "fold-never": (PLAIN, 60, "never", [20, 1]),
    "pieces": (Geometry(2, 1, 8, window=300, sinks=4, landmarks=8), 400, "always", [70, 1]),
    "more-landmarks": (Geometry(2, 1, 16, window=20, sinks=4, landmarks=64), 700, "always", [50]),
}  # fmt: skip
