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
class Attend:
    """One `attend` of `rows` rows: committed, or, with `accepted`, tried and committed in part.

    Rows that are not accepted come again in the next call.
    """

    rows: int
    accepted: int | None = None


@dataclass(frozen=True)
class Drafts:
    """Drafts of `rows` rows each from one state, and a commit of the first `accepted` rows of number `taken`.

    Number `i` begins `i` rows later, so that no two have the same row at the same place.
    """

    rows: tuple[int, ...]
    taken: int
    accepted: int


@dataclass(frozen=True)
class TakeSnapshot:
    """One `snapshot`, kept by its name."""

    name: str


@dataclass(frozen=True)
class Restore:
    """One `restore` of the snapshot of that name; the rows that follow are new ones."""

    name: str


Call = Attend | Drafts | TakeSnapshot | Restore


def reach(call: Call) -> tuple[int, int]:
    """How many rows from the next one on a call looks at, and how many of them it leaves behind."""
    if isinstance(call, Attend):
        return call.rows, call.rows if call.accepted is None else call.accepted
    if isinstance(call, Drafts):
        return max(i + rows for i, rows in enumerate(call.rows)), call.taken + call.accepted
    return 0, 0


@dataclass(frozen=True)
class LayerCase:
    """A prompt, sealed if it is long enough, and the calls after it. `kind` is one of `inputs.KINDS`, or
    "sawtooth"."""

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
            seen, left = reach(call)
            end = max(end, at + seen)
            at += left
        return end

    def make(self) -> tuple[LayerState, Rows]:
        """The state after the prompt, and the rows after it."""
        if self.kind == "sawtooth":
            q, k, v = sawtooth(self.geometry, self.prompt, tuple(reach(call)[0] for call in self.calls))
        else:
            q, k, v = make_rows(self.kind, self.geometry, self.prompt + self.streamed, self.seed)
        head = slice(self.prompt)
        rest = slice(self.prompt, None)
        return seal(q[head], k[head], v[head], self.geometry, fold=self.fold), (q[rest], k[rest], v[rest])


def calls(*given: int | tuple[int, int] | Call) -> tuple[Call, ...]:
    """Calls, of which a row count stands for one `attend`, a pair for rows tried and rows accepted."""
    return tuple(
        Attend(c) if isinstance(c, int) else Attend(*c) if isinstance(c, tuple) else c for c in given
    )


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
        LayerCase("drafts", plain, 100, calls(
            Drafts((3, 1, 20), 1, 1), Drafts((70, 5), 0, 66), 2, Drafts((4, 4, 4, 4), 3, 2),
            Drafts((9, 2), 1, 0), 1,
        ), kind="rotated"),
        LayerCase("snapshots", uneven, 40, calls(
            TakeSnapshot("a"), 9, TakeSnapshot("b"), (20, 6), Restore("a"), 3, Drafts((5, 2), 0, 4),
            Restore("b"), 50, TakeSnapshot("a"), 1, Restore("a"), 1, Restore("b"), (2, 1), 17,
        )),
        LayerCase("crossing", uneven, 0, calls(*[1] * 24)),
        LayerCase("crossing-inside", plain, 5, calls((60, 40), (12, 7), 30, 1), kind="rotated"),
        LayerCase("crossing-drafts", plain, 45, calls(
            TakeSnapshot("short"), Drafts((1, 30, 8), 1, 25), TakeSnapshot("sealed"), 1, Restore("short"), 40,
            Restore("sealed"), Drafts((2, 18), 1, 17), Restore("short"), Drafts((9, 20), 1, 7), 1, (60, 50),
        )),
        LayerCase("crossing-back", uneven, 9, calls(
            TakeSnapshot("short"), 30, Restore("short"), (20, 3), Drafts((4, 40), 0, 2),
        )),
        LayerCase("crossing-fold-prompt", plain, 50, calls(1, 80, (3, 2)), fold="prompt"),
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
    # One in four begins short, somewhere before its seal.
    prompt = geometry.exact_rows + draw(1, 8 * geometry.landmarks)
    if draw(0, 3) == 0:
        prompt = draw(max(0, geometry.exact_rows - 40), geometry.exact_rows)
    made: list[int | tuple[int, int] | Call] = []
    for _ in range(draw(1, 4)):
        rows = draw(1, 70)
        kind_of_call = draw(0, 5)
        if kind_of_call < 2:
            made.append(rows)
        elif kind_of_call < 4:
            made.append((rows, draw(0, rows)))
        elif kind_of_call == 4:
            tried = tuple(draw(1, 12) for _ in range(draw(2, 3)))
            taken = draw(0, len(tried) - 1)
            made.append(Drafts(tried, taken, draw(0, tried[taken])))
        else:
            made += [TakeSnapshot("a"), rows, Restore("a"), draw(1, 20)]
    fold: Fold = ("always", "always", "prompt", "never")[draw(0, 3)]
    kind = str(rng.choice(RANDOM_KINDS))
    return LayerCase(f"random-{seed}-{number}", geometry, prompt, calls(*made), kind, fold, draw(0, 1 << 30))
