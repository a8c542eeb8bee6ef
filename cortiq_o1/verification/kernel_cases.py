"""States and calls that take each kernel through its corners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..geometry import MIN_LANDMARKS, Geometry
from ..kernels import (
    FLUSH_ROWS,
    LARGE,
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
from ..planning import Plan, base_plane, plan
from ..sealing import seal
from .inputs import RANDOM_KINDS, REAL, REAL_ROWS, make_rows

Planes = dict[str, npt.NDArray[Any]]

POISON = np.float32(3e18)
"""What nobody may read holds this: finite, so are products of two, and far from any result."""
_RECENT = np.float32(0.375)  # part of the far sums that lies in the recent level


@dataclass(frozen=True)
class Group:
    """A group's position; `length` and `landmarks` None for as many as there may be."""

    length: int | None = None
    head: int = 0
    far_len: int = 77
    far_limit: int = NO_FAR_LIMIT
    landmarks: int | None = None


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

    def describe(self) -> str:
        """All that it takes to build the case again."""
        return repr(self)

    def plan(self) -> Plan:
        """The call's plan."""
        return plan(self.geometry, self.rows, self.commit)

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
        KernelCase("two-sub-chunks", plain, 50, (Group(head=7), Group(head=39))),
        KernelCase("clamped", fm, 50, (Group(head=7), Group(head=39)), kind="gaussian"),
        KernelCase("ring-fills", uneven, 30, (Group(head=5), Group(length=31, far_len=0))),
        KernelCase("far-empty", uneven, 3, (Group(length=2, far_len=0), Group(length=0, far_len=0))),
        KernelCase("far-closes", plain, 40, (Group(head=3, far_limit=90), Group(far_limit=77))),
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


PICKED: tuple[KernelCase, ...] = _picked()


def random_case(seed: int, number: int, most: int = 64) -> KernelCase:
    """The `number`-th random case of a seed: windows and landmarks up to `most`, small otherwise."""
    rng = np.random.default_rng([seed, number])

    def draw(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    groups = draw(1, 3)
    window = draw(1, most)
    geometry = Geometry(
        num_heads=groups * draw(1, 5),
        num_kv_heads=groups,
        head_dim=4 * draw(1, 20),
        value_dim=4 * draw(1, 20),
        window=window,
        sinks=draw(0, 5),
        landmarks=draw(MIN_LANDMARKS, min(64, most)),
        windows=tuple(draw(1, window) for _ in range(groups)) if draw(0, 1) else None,
        rect="fm" if draw(0, 3) == 0 else "aggregate",
    )
    positions = []
    for own in geometry.group_windows:
        far_len = int(rng.choice([0, 1, 300, FLUSH_ROWS - draw(1, 20)]))
        # A ring that has never been full has folded nothing.
        length = own if far_len else draw(0, own)
        limit = NO_FAR_LIMIT if draw(0, 1) else far_len + draw(0, 20)
        used = geometry.landmarks if draw(0, 1) else draw(MIN_LANDMARKS, geometry.landmarks)
        positions.append(Group(length, draw(0, own - 1), far_len, limit, used))
    rows = draw(1, min(SUB_ROWS + 10, 2 * geometry.min_window + 2))
    kind = str(rng.choice(RANDOM_KINDS))
    return KernelCase(
        f"random-{seed}-{number}", geometry, rows, tuple(positions), kind, bool(draw(0, 3)), draw(0, 1 << 30)
    )
