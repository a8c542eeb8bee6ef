"""States and calls that take each kernel through its corners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..geometry import MIN_LANDMARKS, Geometry
from ..paths import PATHS
from ..planes import (
    FLUSH_ROWS,
    LARGE,
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    MZ_MAX,
    MZ_RECENT,
    MZ_TOTAL,
    NO_FAR_LIMIT,
    SUB_ROWS,
    T_RECENT,
    T_TOTAL,
)
from ..planning import Limits, plan, serves
from ..plans import Plan, base_plane
from ..sealing import seal
from .inputs import RANDOM_KINDS, REAL, REAL_ROWS, drawer, make_rows, random_geometry

Planes = dict[str, npt.NDArray[Any]]

POISON = np.float32(3e18)
"""What nobody may read holds this: finite, so are products of two, and far from any result."""
_WRAP = 1 << 32  # where the words of `group_meta` do
_RECENT = np.float32(0.375)  # part of the far sums that lies in the recent level


@dataclass(frozen=True)
class Group:
    """A group's position; `length` and `landmarks` None for as many as there may be."""

    length: int | None = None
    head: int = 0
    far_len: int = 77
    far_limit: int = NO_FAR_LIMIT
    landmarks: int | None = None
    evicted: int = 0


@dataclass(frozen=True)
class KernelCase:
    """A state and a call on it: every kernel that the call's plan runs is checked.

    `groups` has one entry, or one for each KV head.
    """

    name: str
    geometry: Geometry
    rows: int
    groups: tuple[Group, ...] = (Group(),)
    kind: str = "clustered"
    commit: bool = True
    seed: int = 0
    path: str = "stages"
    precision: str = "exact"
    workgroups: int = 256
    """What the keys are split for, see `planning.Limits`."""
    archive: int = 0
    """Evictions that the layer's archive holds, see `planning.plan`."""

    def describe(self) -> str:
        """All that it takes to build the case again."""
        return repr(self)

    def plan(self) -> Plan:
        """The call's plan."""
        limits = Limits(workgroups=self.workgroups, float16=True)
        return plan(self.geometry, self.rows, self.commit, self.path, limits, self.precision, self.archive)

    def planes(self) -> Planes:
        """Every plane of the plan before the call."""
        todo = self.plan()
        planes = self._state()
        prompt = self._prompt()
        rows = make_rows(self.kind, self.geometry, prompt + self.rows, self.seed)
        planes |= {
            name: np.ascontiguousarray(array[prompt:])
            for name, array in zip(("q", "k_rows", "v_rows"), rows, strict=True)
        }
        for name in todo.planes:
            if name not in planes:
                plane = base_plane(name)
                planes[name] = np.full(plane.dims(todo.sizes), POISON, np.float32).view(plane.dtype)
        return {name: planes[name] for name in todo.planes}

    def _prompt(self) -> int:
        """Rows enough to fill every ring, to fold some and for every landmark's segment."""
        geometry = self.geometry
        wanted = max(geometry.window + geometry.sinks + 24, geometry.exact_rows + 1, 8 * geometry.landmarks)
        return min(wanted, REAL_ROWS - self.rows) if self.kind == "real" else wanted

    def _state(self) -> Planes:
        geometry, prompt = self.geometry, self._prompt()
        q, k, v = make_rows(self.kind, geometry, prompt + self.rows, self.seed)
        planes = dict(seal(q[:prompt], k[:prompt], v[:prompt], geometry).planes)
        groups = self.groups * (geometry.num_kv_heads if len(self.groups) == 1 else 1)
        heads = geometry.heads_per_group
        for g, (group, window) in enumerate(zip(groups, geometry.group_windows, strict=True)):
            own = slice(g * heads, (g + 1) * heads)
            length = window if group.length is None else group.length
            used = geometry.landmarks if group.landmarks is None else group.landmarks
            meta = planes["group_meta"][g]
            meta[META_LEN], meta[META_HEAD], meta[META_FAR_LEN] = length, group.head, group.far_len
            meta[META_FAR_LIMIT], meta[META_LANDMARKS] = group.far_limit, used
            meta[META_EVICTED] = group.evicted
            filled = (group.head + np.arange(length)) % window
            unread = np.setdiff1d(np.arange(geometry.window), filled)
            planes["ring_k"][g, unread] = POISON
            planes["ring_v"][g, unread] = POISON
            if group.far_len:
                for name, total, recent in (("far_mz", MZ_TOTAL, MZ_RECENT), ("t_hat", T_TOTAL, T_RECENT)):
                    planes[name][own, recent] = _RECENT * planes[name][own, total]
                    planes[name][own, total] *= 1 - _RECENT
            else:
                planes["far_mz"][own, MZ_TOTAL : MZ_RECENT + 1] = 0.0
                planes["far_mz"][own, MZ_MAX] = -LARGE
                planes["t_hat"][own] = 0.0
            planes["k_tilde"][g, used:] = POISON
            planes["q_tilde"][own, used:] = POISON
            planes["mix"][own, used:] = POISON
            planes["mix"][own, :, used:] = POISON
            planes["far_mz"][own, :, used:] = POISON
            planes["t_hat"][own, :, used:] = POISON
        return planes


def _picked() -> tuple[KernelCase, ...]:
    plain = Geometry(6, 2, 32, 16, window=40, sinks=4, landmarks=16)
    uneven = Geometry(4, 2, 8, window=40, sinks=2, landmarks=4, windows=(12, 40))
    fm = Geometry(6, 2, 32, 16, window=40, sinks=4, landmarks=16, rect="fm")
    return (
        KernelCase(
            "two-sub-chunks", plain, 50, (Group(head=7, evicted=62), Group(head=39, evicted=_WRAP - 2)),
            archive=64,
        ),
        KernelCase("clamped", fm, 50, (Group(head=7), Group(head=39)), kind="gaussian"),
        KernelCase(
            "ring-fills", uneven, 30, (Group(head=5, evicted=77), Group(length=31, far_len=0)), archive=70
        ),
        KernelCase(
            "far-empty", uneven, 3, (Group(length=2, far_len=0), Group(length=0, far_len=0)), archive=64
        ),
        KernelCase(
            "far-closes", plain, 40,
            (Group(head=3, far_limit=90, evicted=99), Group(far_limit=77, evicted=300)), archive=100,
        ),
        KernelCase("never-opens", plain, 9, (Group(far_len=0, far_limit=0), Group(far_len=0, far_limit=4))),
        KernelCase(
            "levels-join", plain, 40, (Group(far_len=FLUSH_ROWS - 3), Group(far_len=2 * FLUSH_ROWS - 40))
        ),
        KernelCase("window-1", Geometry(3, 3, 12, 20, window=1, sinks=0, landmarks=5), 3),
        KernelCase(
            "few-landmarks", Geometry(10, 2, 20, 24, window=24, sinks=3, landmarks=20), 20,
            (Group(head=11, landmarks=MIN_LANDMARKS), Group(head=2, landmarks=13)),
        ),
        KernelCase("landmarks-64", Geometry(5, 1, 64, 32, window=64, sinks=1, landmarks=64), 64),
        KernelCase("uncommitted", plain, 90, (Group(head=7), Group(head=39)), commit=False),
        KernelCase(
            "long-window", Geometry(4, 1, 128, window=700, sinks=4, landmarks=32), 5, (Group(head=612),)
        ),
        KernelCase("one-row", Geometry(14, 2, 64, window=100, sinks=4, landmarks=32), 1, (Group(head=99),)),
        KernelCase("wide", Geometry(16, 1, 512, 256, window=20, landmarks=8), 8, (Group(head=13),)),
        KernelCase("noise", plain, 40, (Group(head=7), Group(head=39)), kind="gaussian"),
        KernelCase("loud", plain, 40, (Group(head=7), Group(head=39)), kind="loud"),
        KernelCase("real-data", REAL, 16, (Group(head=100),), kind="real"),
    )  # fmt: skip


def _on(case: KernelCase, path: str) -> KernelCase:
    return replace(case, name=f"{case.name}-{path}", path=path)


_TOKEN_ROWS = 3
_TOKEN_GROUPS = {
    "ring-fills": (Group(head=5, evicted=77), Group(length=38, far_len=0)),
    "far-closes": (Group(head=3, far_limit=79, evicted=99), Group(far_limit=77, evicted=300)),
}
"""Positions from which so few rows still come to the point of the case."""


def _a_row_at_a_time(case: KernelCase, path: str) -> KernelCase:
    """Fewer rows: each is a sub-chunk of its own there."""
    groups = _TOKEN_GROUPS.get(case.name, case.groups)
    rows = min(case.rows, _TOKEN_ROWS)
    return replace(case, name=f"{case.name}-{path}", path=path, rows=rows, groups=groups)


def _precise() -> tuple[KernelCase, ...]:
    """The products with float16 operands: edges in every dimension, and none."""
    odd = Geometry(6, 2, 20, 12, window=40, sinks=3, landmarks=8, windows=(17, 40))
    even = Geometry(8, 2, 64, window=128, sinks=0, landmarks=8)
    return tuple(
        KernelCase(f"float16-{name}", geometry, rows, (Group(head=7),), kind, path="gemm", precision="fast")
        for name, geometry, rows, kind in (
            ("edges", odd, 17, "clustered"),
            ("tiles", even, 64, "clustered"),
            ("noise", even, 16, "gaussian"),
        )
    )


def _splits() -> tuple[KernelCase, ...]:
    """One row and many over keys in one split, in some, in more than there are keys for."""
    long = Geometry(6, 2, 16, 24, window=400, sinks=4, landmarks=8)
    return tuple(
        KernelCase(
            f"splits-{workgroups}-{path}", long, rows, (Group(head=333),), path=path, workgroups=workgroups
        )
        for workgroups in (1, 9, 4096)
        for path, rows in (("token", 1), ("gemm", 20), ("flash", 20))
    )


def _fused() -> tuple[KernelCase, ...]:
    """Widths for which other pipelines are made: wide rows, narrow ones, values of another width."""
    return tuple(
        KernelCase(
            f"widths-{d}-{dv}-fused", Geometry(6, 1, d, dv, window=70, sinks=3, landmarks=40), 2,
            (Group(head=65),), path="fused",
        )
        for d, dv in ((256, 256), (4, 4), (128, 80), (96, 256))
    )  # fmt: skip


PICKED: tuple[KernelCase, ...] = (
    _picked()
    + tuple(_on(case, path) for path in ("gemm", "flash") for case in _picked())
    + tuple(_a_row_at_a_time(case, "token") for case in _picked())
    + tuple(_a_row_at_a_time(case, "fused") for case in _picked() if serves("fused", case.geometry, Limits()))
    + _fused()
    + _precise()
    + _splits()
)


def random_case(seed: int, number: int, most: int = 64) -> KernelCase:
    """The `number`-th random case of a seed: windows and landmarks up to `most`, small otherwise."""
    rng = np.random.default_rng([seed, number])

    draw = drawer(rng)
    geometry = random_geometry(draw, most)
    positions = []
    for own in geometry.group_windows:
        far_len = int(rng.choice([0, 1, 300, FLUSH_ROWS - draw(1, 20)]))
        # A ring that has never been full has folded nothing.
        length = own if far_len else draw(0, own)
        limit = NO_FAR_LIMIT if draw(0, 1) else far_len + draw(0, 20)
        used = geometry.landmarks if draw(0, 1) else draw(MIN_LANDMARKS, geometry.landmarks)
        positions.append(Group(length, draw(0, own - 1), far_len, limit, used))
    path = str(rng.choice([path for path in PATHS if path != "auto"]))
    path = path if serves(path, geometry, Limits()) else "token"
    longest = 4 if path in ("fused", "token") else SUB_ROWS + 10
    case = KernelCase(
        f"random-{seed}-{number}",
        geometry,
        draw(1, min(longest, 2 * geometry.min_window + 2)),
        tuple(positions),
        str(rng.choice(RANDOM_KINDS)),
        bool(draw(0, 3)),
        draw(0, 1 << 30),
        path,
        "fast" if path == "gemm" and draw(0, 2) == 0 else "exact",
        int(rng.choice([1, 16, 256])),
    )
    archive = int(rng.choice([0, SUB_ROWS, 99]))
    groups = []
    for group in positions:
        # Slots of an archive that is no power of two jump where the count wraps.
        wraps = archive == SUB_ROWS and draw(0, 1)
        groups.append(replace(group, evicted=_WRAP - draw(1, 5) if wraps else draw(0, 300)))
    return replace(case, archive=archive, groups=tuple(groups))
