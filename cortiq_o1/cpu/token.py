"""A sub-chunk of one row: near part and far field each on their own, then both under one denominator.

Python's threads take turns, and a turn that changes hands costs as much as a small array operation. So one
thread is at long products over the ring while another has the far field, and what is small is done once, for
all heads.

Shapes: `g` groups, `h` heads of each, `m` landmarks in use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..arrays import Float32
from ..geometry import Geometry
from ..planes import LARGE, MIN_DENOMINATOR, MZ_MAX, MZ_RECENT, MZ_SHIFT, MZ_TOTAL
from .far import empty_maximum
from .folding import Fold, put_fold
from .near import Scratch, Window, add_values, is_whole, scores
from .resident import DirectResident, Run, Step

NEAR, FAR, OWN = range(3)
"""The parts of an output: sinks and ring; far field and the row that leaves for it; the row itself."""
NEAR_LOGITS = 2**16
"""Logits of a near task at most: few enough for a core's cache beside a piece of the keys."""
FAR_HEADS = 32
"""Heads of a far task: enough to hide Python's part, few enough for a core's cache."""
FAR_SHARE = 1.2
"""Time of near part and far field over that of the near part."""


class TokenTask(NamedTuple):
    """One part of some groups of one run, and of some heads of each."""

    part: int
    run: int
    """Which of the step's; for the rows themselves, all groups are one."""
    groups: slice
    heads: slice
    window: Window | None = None
    """Of the near part."""


def cut_token(
    runs: list[Run], geometry: Geometry, workers: int, outputs: bool, moves: bool
) -> tuple[TokenTask, ...]:
    """The runs in tasks, for outputs and for a far field that moves: the calling thread is to take them from
    the front, the others of `workers` from the back."""
    found = []
    for run in runs:
        head = 0 if run.length == run.window else run.head
        window = _window(run.length, head, run.window, geometry.window, geometry.sinks) if outputs else None
        has_far = moves or (outputs and bool(run.far_len or run.folded))
        found.append((run.first, run.last, window, has_far))
    return _cut(tuple(found), geometry.num_kv_heads, geometry.heads_per_group, workers)


@lru_cache(maxsize=16)
def _cut(
    runs: tuple[tuple[int, int, Window | None, bool], ...], groups: int, hpg: int, workers: int
) -> tuple[TokenTask, ...]:
    # Cached: once the rings are full, the next token's tasks are the same.
    every = slice(0, hpg)
    # One near task for each of the others, as large as its share is.
    share = max(1, round(FAR_SHARE * groups / workers))
    # More threads than groups read a group's keys again, from a cache that the cores share.
    parts = _slices(0, hpg, -(-hpg // min(hpg, -(-workers // groups))))
    far, near = [], []
    for at, (first, last, window, has_far) in enumerate(runs):
        if has_far:
            step = max(1, FAR_HEADS // hpg)
            far += [TokenTask(FAR, at, g, every) for g in _slices(first, last, step)]
        if window is not None and window.columns:
            step = max(1, min(share, NEAR_LOGITS // (hpg * window.columns)))
            rest = first + (last - first) % step
            cuts = _slices(first, rest, step) + _slices(rest, last, step)
            near += [TokenTask(NEAR, at, g, h, window) for g in cuts for h in parts]
    if any(window is not None for _, _, window, _ in runs):
        far.append(TokenTask(OWN, 0, slice(0, groups), every))
    # The others wake up while this thread is in a long product, and find Python free.
    own = max(0, len(near) - (workers - 1))
    return (*near[:own], *far, *near[own:])


def _slices(first: int, last: int, step: int) -> list[slice]:
    return [slice(low, min(low + step, last)) for low in range(first, last, step)]


@lru_cache(maxsize=64)
def _window(length: int, head: int, window: int, capacity: int, sinks: int) -> Window:
    """What lies in the ring before the row: the row itself has a part of its own."""
    return Window(length, head, window, capacity, sinks, 0)


class TokenWork:
    """One row of a step, `q (nh, d)` or none: `run` all tasks, then `join` where there are queries."""

    def __init__(self, resident: DirectResident, step: Step, q: Float32 | None, out: Float32 | None) -> None:
        self.resident, self.step, self.out = resident, step, out
        geometry = resident.geometry
        self.hpg = geometry.heads_per_group
        lanes = (geometry.num_kv_heads, self.hpg)
        self.queries: Float32 | None = None
        if q is not None:
            self.queries = (q * geometry.scale32).reshape(*lanes, -1)
            # At scale `exp(-top)` each, as long as a part has something to give.
            self.tops = np.full((3, *lanes), -LARGE, np.float32)
            self.masses = np.zeros((3, *lanes), np.float32)
            self.sums = np.zeros((3, *lanes, step.v.shape[2]), np.float32)

    def run(self, task: TokenTask, scratch: Scratch) -> None:
        """One task, on any thread."""
        (self._near, self._far, self._own)[task.part](task, scratch)

    def _own(self, task: TokenTask, scratch: Scratch) -> None:
        """The row as a key of its own window."""
        assert self.queries is not None
        groups = task.groups
        keys = self.step.k[0, groups]
        np.einsum("ghd,gd->gh", self.queries[groups], keys, out=self.tops[OWN, groups])
        self.masses[OWN, groups] = 1.0
        self.sums[OWN, groups] = self.step.v[0, groups, None]

    def _near(self, task: TokenTask, scratch: Scratch) -> None:
        window = task.window
        assert window is not None
        assert self.queries is not None
        resident, run, at = self.resident, self.step.runs[task.run], (task.groups, task.heads)
        queries = self.queries[at]
        groups, heads, _ = queries.shape
        weights = scratch.take("logits", groups, heads, window.columns)
        window.scores(queries, resident.ring_k[task.groups], weights)
        if run.evicted:
            weights[..., run.head] = -LARGE  # a full ring lies in its order of slots
        top = weights.max(axis=2, out=self.tops[(NEAR, *at)])
        np.subtract(weights, top[..., None], out=weights)
        np.exp(weights, out=weights)
        if is_whole():
            self.masses[(NEAR, *at)] = np.matmul(weights, _ones(window.columns))
        else:
            np.einsum("ghc->gh", weights, out=self.masses[(NEAR, *at)])
        window.sum_values(weights, resident.ring_v[task.groups], self.sums[(NEAR, *at)], scratch, True)

    def _far(self, task: TokenTask, scratch: Scratch) -> None:
        """The far field of whole groups: what the row sees of it, and the next one into the step."""
        resident, run, groups = self.resident, self.step.runs[task.run], task.groups
        m = run.landmarks
        lanes = (groups.stop - groups.start, self.hpg)
        heads = slice(groups.start * self.hpg, groups.stop * self.hpg)
        mz = resident.far_mz[heads, :, :m].reshape(*lanes, -1, m)
        if run.far_len:
            last, mass = mz[:, :, MZ_MAX], mz[:, :, MZ_TOTAL] + mz[:, :, MZ_RECENT]
        else:
            last, mass = empty_maximum((*lanes, m)), np.zeros((*lanes, m), np.float32)
        fold = None
        if run.folded:
            logits = scratch.take("far_logits", *lanes, 1, m)
            keys = resident.ring_k[groups, run.head] * resident.geometry.scale32
            scores(keys[:, None, None], resident.q_tilde[heads, :m].reshape(*lanes, m, -1), logits)
            weights = logits[:, :, 0]
            np.subtract(weights, mz[:, :, MZ_SHIFT], out=weights)
            before, last = last, np.maximum(last, weights)
            np.subtract(weights, last, out=weights)
            np.exp(weights, out=weights)
            rescale = np.exp(before - last)
            mass = mass * rescale + weights
            fold = Fold(last, logits, rescale, resident.ring_v[groups, run.head, None])
        if self.queries is not None and (run.far_len or fold):
            gains = self._gains(task, last, mass, scratch)
            sums = self.sums[FAR, groups]
            if run.far_len:
                seen = (gains if fold is None else gains * fold.rescale)[:, :, None]
                for level, fresh in ((resident.t_total, True), (resident.t_recent, False)):
                    values = level[heads, :m].reshape(*lanes, m, -1)
                    add_values(seen, values, sums[:, :, None], scratch, fresh)
            if fold is not None:
                sums += np.einsum("ghm,ghm->gh", gains, fold.weights[:, :, 0])[..., None] * fold.values
        put_fold(resident, self.step, run, heads, fold, scratch)

    def _gains(self, task: TokenTask, last: Float32, mass: Float32, scratch: Scratch) -> Float32:
        """What each landmark gives, `(g, h, m)`, of a far field of maximum `last` and that mass; their sum
        and its scale to the other parts'. All zero where the sum is negative."""
        assert self.queries is not None
        resident, m, groups = self.resident, last.shape[2], task.groups
        queries = self.queries[groups]
        logits = scratch.take("marks", *last.shape)
        scores(queries, resident.k_tilde[groups, :m], logits)
        best = logits.max(axis=2, keepdims=True)
        np.subtract(logits, best, out=logits)
        np.exp(logits, out=logits)
        gains = scratch.take("far_gains", *last.shape)
        heads = slice(groups.start * self.hpg, groups.stop * self.hpg)
        mix = resident.mix[heads, :m, :m].reshape(*last.shape, m)
        add_values(logits[:, :, None], mix, gains[:, :, None], scratch, fresh=True)
        if resident.geometry.rect == "fm":
            np.maximum(gains, 0.0, out=gains)
        reach = np.add(last, best, out=logits)
        top = reach.max(axis=2)
        np.subtract(reach, top[..., None], out=reach)
        np.exp(reach, out=reach)
        np.multiply(gains, reach, out=gains)
        total = np.einsum("ghm,ghm->gh", gains, mass)
        dropped = total < 0.0
        if dropped.any():
            total[dropped] = 0.0
            gains[dropped] = 0.0
            top[dropped] = -LARGE
        self.tops[FAR, groups], self.masses[FAR, groups] = top, total
        return gains

    def join(self) -> None:
        """The output, after all tasks."""
        assert self.queries is not None
        assert self.out is not None
        lifts = np.exp(self.tops - self.tops.max(axis=0))
        mass = np.einsum("pgh,pgh->gh", lifts, self.masses)
        np.maximum(mass, np.float32(MIN_DENOMINATOR), out=mass)
        self.sums *= lifts[..., None]
        out = np.add.reduce(self.sums, axis=0, out=self.out.reshape(self.sums.shape[1:]))
        out /= mass[..., None]


@lru_cache(maxsize=4)
def _ones(count: int) -> Float32:
    return np.ones(count, np.float32)
