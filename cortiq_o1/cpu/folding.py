"""The far field after a sub-chunk: sums and maxima of what it folds, into the step that moves the state.

Shapes: `g` groups, `h` heads of each, `f` folded rows, `m` landmarks in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Float32
from ..planes import MZ_MAX, MZ_RECENT, MZ_TOTAL
from .near import Scratch, add_values
from .resident import DirectResident, Run, Step


@dataclass(frozen=True)
class Fold:
    """Rows on their way into a far field.

    `last (g, h, m)`: its maximum afterwards; `weights (g, h, f, m)`: each row's at scale `exp(-last)`;
    `rescale (g, h, m)`: from the field's scale to that; `values (g, f, dv)`.
    """

    last: Float32
    weights: Float32
    rescale: Float32
    values: Float32


def put_fold(
    resident: DirectResident, step: Step, run: Run, heads: slice, fold: Fold | None, scratch: Scratch
) -> None:
    """The far field of `heads`, those of some groups of a run, after the sub-chunk; as it is without a fold.

    Into the step, where that has room for it.
    """
    if step.far_mz is None or step.t_recent is None:
        return
    step.far_mz[heads] = resident.far_mz[heads]
    old, new = resident.t_recent[heads], step.t_recent[heads]
    if fold is None:
        new[...] = old
        return
    m = run.landmarks
    new[:, m:] = old[:, m:]
    lanes = (*fold.last.shape[:2], m, new.shape[2])
    old, new = old[:, :m], new[:, :m]
    weights, rescale = fold.weights, fold.rescale
    flat = rescale.reshape(-1, m)
    moved = flat != 1.0
    rises = bool(moved.any())
    sums = new.reshape(lanes)
    assert np.may_share_memory(sums, new), "reshape made a copy, which nobody would read"
    if weights.shape[2] == 1:
        np.multiply(weights[:, :, 0, :, None], fold.values[:, None], out=sums)
        new += old * flat[..., None] if rises else old
    else:
        np.multiply(old, flat[..., None], out=new)
        add_values(weights.swapaxes(2, 3), fold.values[:, None], sums, scratch)
    mz = step.far_mz[heads, :, :m]
    mz[:, MZ_MAX] = fold.last.reshape(-1, m)
    if rises:
        mz[:, MZ_TOTAL] *= flat
        mz[:, MZ_RECENT] *= flat
    mz[:, MZ_RECENT] += weights.sum(axis=2).reshape(-1, m)
    total = resident.t_total[heads, :m]
    if run.flushes:
        mz[:, MZ_TOTAL] += mz[:, MZ_RECENT]
        mz[:, MZ_RECENT] = 0.0
        step.totals.append(((heads, slice(m)), total * flat[..., None] + new))
        new[...] = 0.0
    elif rises:
        at, marks = np.nonzero(moved)
        index = (at + heads.start, marks)
        step.totals.append((index, resident.t_total[index] * flat[at, marks, None]))
