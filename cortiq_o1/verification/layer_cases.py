"""Streams that take a whole layer through its corners, call by call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..geometry import Geometry
from ..sealing import seal
from ..state import Fold, LayerState
from .inputs import RANDOM_KINDS, REAL, Rows, drawer, make_rows, random_geometry, sawtooth

PARITY_ERROR = 2e-5
"""Worst error granted on the Metal kernels' own parity geometries, whatever their bounds."""


@dataclass(frozen=True)
class Call:
    """One `attend` of `rows` rows: committed, or, with `accepted`, tried and committed in part.

    Rows that are not accepted come again in the next call.
    """

    rows: int
    accepted: int | None = None


@dataclass(frozen=True)
class LayerCase:
    """A sealed prompt and the calls after it. `kind` is one of `inputs.KINDS`, or "sawtooth"."""

    name: str
    geometry: Geometry
    prompt: int
    calls: tuple[Call, ...]
    kind: str = "clustered"
    fold: Fold = "always"
    seed: int = 0
    most: float = np.inf
    """Largest absolute error to accept, beside the rows' own bounds."""

    def describe(self) -> str:
        """All that it takes to build the case again."""
        return repr(self)

    @property
    def streamed(self) -> int:
        """Rows after the prompt, without those that come twice."""
        at = end = 0
        for call in self.calls:
            end = max(end, at + call.rows)
            at += call.rows if call.accepted is None else call.accepted
        return end

    def make(self) -> tuple[LayerState, Rows]:
        """The sealed prompt, and the rows after it."""
        if self.kind == "sawtooth":
            q, k, v = sawtooth(self.geometry, self.prompt, tuple(call.rows for call in self.calls))
        else:
            q, k, v = make_rows(self.kind, self.geometry, self.prompt + self.streamed, self.seed)
        head = slice(self.prompt)
        rest = slice(self.prompt, None)
        return seal(q[head], k[head], v[head], self.geometry, fold=self.fold), (q[rest], k[rest], v[rest])


def calls(*sizes: int | tuple[int, int]) -> tuple[Call, ...]:
    """Calls from row counts; a pair is rows tried and rows accepted."""
    return tuple(Call(s) if isinstance(s, int) else Call(*s) for s in sizes)


def _parity(
    name: str, d: int, m: int, w: int, sinks: int, heads: int, prompt: int, second: int, *rows: int
) -> LayerCase:
    windows = None if second == w else (w, second)
    geometry = Geometry(2 * heads, 2, d, window=max(w, second), sinks=sinks, landmarks=m, windows=windows)
    return LayerCase(name, geometry, prompt, calls(*rows), kind="sawtooth", most=PARITY_ERROR)


def _picked() -> tuple[LayerCase, ...]:
    plain = Geometry(6, 2, 32, 16, window=40, sinks=4, landmarks=16)
    uneven = Geometry(4, 2, 8, window=40, sinks=2, landmarks=4, windows=(12, 40))
    mixed = (30, 1, (7, 3), (50, 0), 90, (64, 64), 1)
    return (
        _parity("parity-rings-full", 8, 4, 64, 2, 2, 100, 64, 70, 9),
        _parity("parity-ring-fills", 8, 4, 64, 2, 2, 100, 128, 70, 40),
        _parity("parity-wide", 256, 32, 128, 4, 6, 300, 512, 64, 64),
        _parity("parity-token", 256, 32, 128, 4, 6, 300, 128, 5, 1),
        LayerCase("clustered", plain, 180, calls(*mixed)),
        LayerCase("rotated", plain, 180, calls(*mixed), kind="rotated"),
        LayerCase("loud", plain, 180, calls(*mixed), kind="loud"),
        LayerCase("crowded", plain, 180, calls(*mixed), kind="crowded"),
        LayerCase("noise", plain, 180, calls(*mixed), kind="gaussian"),
        LayerCase("windows-differ", uneven, 40, calls(3, (5, 2), 40, 1)),
        LayerCase("fold-prompt", plain, 120, calls(30, (10, 4), 40), fold="prompt"),
        LayerCase("fold-never", plain, 120, calls(30, 1), fold="never"),
        LayerCase(
            "clamped", Geometry(6, 2, 32, 16, window=40, sinks=4, landmarks=16, rect="fm"), 180, calls(*mixed)
        ),
        LayerCase("window-1", Geometry(3, 3, 12, 20, window=1, sinks=0, landmarks=5), 60, calls(9, (3, 1))),
        LayerCase("few-landmarks", Geometry(7, 1, 20, window=24, sinks=1), 70, calls(30, (4, 4))),
        LayerCase("landmarks-64", Geometry(4, 1, 64, window=64, landmarks=64), 700, calls(64, 1, (8, 5))),
        LayerCase("wide-rows", Geometry(16, 1, 512, 256, window=20, sinks=4, landmarks=8), 80, calls(24, 1)),
        LayerCase("real-data", REAL, 600, calls(64, (8, 3), 1, 40), kind="real"),
    )  # fmt: skip


PICKED: tuple[LayerCase, ...] = _picked()

LONG: tuple[LayerCase, ...] = (
    LayerCase("real-data-long", REAL, 512, calls(256, *[(5, 3)] * 20, *[1] * 16, 180), kind="real"),
    LayerCase("levels-join", Geometry(2, 1, 16, window=16, landmarks=8), 600, calls(*[256] * 15, 60)),
    LayerCase(
        "model-size", Geometry(8, 2, 128, window=1024, sinks=4, landmarks=32), 1400, calls(64, (8, 5), 1),
        kind="rotated",
    ),
)  # fmt: skip
"""Left out of a quick run."""


def random_case(seed: int, number: int, most: int = 64) -> LayerCase:
    """The `number`-th random case of a seed: windows and landmarks up to `most`, small otherwise."""
    rng = np.random.default_rng([seed, number, 1])

    draw = drawer(rng)
    geometry = random_geometry(draw, most)
    prompt = geometry.exact_rows + draw(1, 8 * geometry.landmarks)
    sizes: list[int | tuple[int, int]] = []
    for _ in range(draw(1, 4)):
        rows = draw(1, 70)
        sizes.append((rows, draw(0, rows)) if draw(0, 1) else rows)
    fold: Fold = ("always", "always", "prompt", "never")[draw(0, 3)]
    kind = str(rng.choice(RANDOM_KINDS))
    return LayerCase(f"random-{seed}-{number}", geometry, prompt, calls(*sizes), kind, fold, draw(0, 1 << 30))
