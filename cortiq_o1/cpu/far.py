"""The far field of a sub-chunk in closed form: every row's view of it, and its sums afterwards.

Shapes here: `g` groups of equal `group_meta`, `h` heads a group, `m` landmarks in use, `f` folded rows,
`i` rows of the sub-chunk. Stage `x` of `f + 1` is the far field after `x` folded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..arrays import Float32
from ..planes import LARGE
from .near import Scratch, add_values, scores

SAFE_RISE = 40.0
"""How far a maximum may rise over the stages for one scale to serve them all in float32."""


@dataclass(frozen=True)
class FarStages:
    """A sub-chunk's rows folded into a far field of `before (g, h, m)`, its maximum and its mass over both
    levels.

    `logits (g, h, f, m)`; `last (g, h, m)`: the maximum afterwards; `weights (g, h, f, m)`: each folded
    row's at scale `exp(-last)`; `rescale (g, h, m)`: from the field's scale to that. `scratch` is for the
    stages in between.
    """

    before: tuple[Float32, Float32]
    logits: Float32
    last: Float32
    weights: Float32
    rescale: Float32
    scratch: Scratch

    @property
    def folded(self) -> int:
        return self.logits.shape[2]

    def one_scale(self) -> bool:
        """Whether `last` serves every stage that holds something: the maxima rise little."""
        if not self.folded:
            return True
        return bool((self.last - np.maximum(self.before[0], self.logits[:, :, 0])).max() <= SAFE_RISE)

    @property
    def maximum(self) -> Float32:
        """Every stage's maximum, `(g, h, f + 1, m)`."""
        return self.each[0]

    @property
    def mass(self) -> Float32:
        """Every stage's mass, `(g, h, f + 1, m)`, at scale `exp(-maximum)`."""
        return self.each[1]

    @cached_property
    def each(self) -> tuple[Float32, Float32, Float32 | None]:
        """Maximum, mass and lift of every stage: the lift `(g, h, f, m)` leads from the last stage's scale
        to that of stages 1 and on, None where the maxima rise too far for that."""
        return _each_stage(self)


def far_stages(
    q_tilde: Float32, keys: Float32, shift: Float32, maximum: Float32, mass: Float32, scratch: Scratch
) -> FarStages:
    """The stages of folding `keys (g, f, d)`, scaled, into a field of `maximum`, `mass (g, h, m)`.

    `q_tilde` is `(g, h, m, d)`; `shift (g, h, m)` is taken from every logit. The arrays are of `scratch`.
    """
    groups, heads, m, _ = q_tilde.shape
    folded = keys.shape[1]
    logits = scratch.take("far_logits", groups, heads, folded, m)
    scores(keys[:, None], q_tilde, logits)
    np.subtract(logits, shift[:, :, None], out=logits)
    # Differences to an empty field's maximum must stay finite, so a logit counts from -LARGE on.
    last = np.maximum(maximum, logits.max(axis=2)) if folded else maximum
    rescale = np.exp(maximum - last)
    weights = np.subtract(logits, last[:, :, None], out=scratch.take("far_weights", *logits.shape))
    np.exp(weights, out=weights)
    return FarStages((maximum, mass), logits, last, weights, rescale, scratch)


def _each_stage(fold: FarStages) -> tuple[Float32, Float32, Float32 | None]:
    logits, weights, rescale, scratch = fold.logits, fold.weights, fold.rescale, fold.scratch
    maximum, mass = fold.before
    groups, heads, folded, m = logits.shape
    stages = scratch.take("far_maximum", groups, heads, folded + 1, m)
    stages[:, :, 0] = maximum
    stages[:, :, 1:] = logits
    np.maximum.accumulate(stages, axis=2, out=stages)
    last = stages[:, :, -1:]
    lift = None
    masses = scratch.take("far_masses", *stages.shape)
    masses[:, :, 0] = mass
    if folded:
        rise = np.subtract(last, stages[:, :, 1:], out=scratch.take("far_lift", *logits.shape))
        if rise[:, :, 0].max() <= SAFE_RISE:
            lift = np.exp(rise, out=rise)
            later = masses[:, :, 1:]
            later[...] = (mass * rescale)[:, :, None]
            # Faster than a cumulative sum along the rows.
            add_values(np.tri(folded, dtype=np.float32), weights, later, scratch)
            later *= lift
        else:
            _scan(masses, logits, stages)
    return stages, masses, lift


def _scan(masses: Float32, logits: Float32, stages: Float32) -> None:
    """`Z_x = r_x Z_(x-1) + e_x` for all stages x at once, by doubling, each at its own scale."""
    np.exp(logits - stages[:, :, 1:], out=masses[:, :, 1:])
    count, reach = stages.shape[2], 1
    while reach < count:
        # An entry takes in as many stages before it as it already holds.
        shift = np.exp(stages[:, :, :-reach] - stages[:, :, reach:])
        np.multiply(shift, masses[:, :, :-reach], out=shift)
        masses[:, :, reach:] += shift
        reach *= 2


@dataclass(frozen=True)
class FarGains:
    """What the far field gives each row, at scale `exp(-top)`.

    `top (g, h, i)`: its own maximum, -LARGE where it gives nothing, None for zero everywhere;
    `mass (g, h, i)`: its part of the denominator, without a top only what was there before the sub-chunk,
    None if nothing was; `evicted (g, h, i, f)`: weights of the folded rows' values, for one not yet folded
    any with a top and 0 without, None if there are none; `numerator (g, h, i, dv)`: from before the
    sub-chunk, None if there was nothing.
    """

    top: Float32 | None
    mass: Float32 | None
    evicted: Float32 | None
    numerator: Float32 | None


def far_gains(
    stages: FarStages,
    after: np.ndarray,
    levels: Sequence[Float32],
    logits: Float32,
    mix: Float32,
    clamp: bool,
    plain: bool,
    scratch: Scratch,
) -> FarGains:
    """The far part of rows that each see stage `after[i]`.

    `levels (g, h, m, dv)`: the numerator's before the sub-chunk, none if nothing was folded by then;
    `logits (g, h, i, m)`: queries against key landmarks, overwritten; `mix (g, h, m, m)`; `clamp`: the
    "fm" rectifier; `plain`: logits and maxima are small and `stages.one_scale()`, so nothing needs a
    top. The arrays are of `scratch`.
    """
    if plain:
        return _plain_gains(stages, after, levels, logits, mix, clamp, scratch)
    before = None
    if levels:
        before = scratch.take("before", *levels[0].shape)
        np.add(levels[0], levels[1], out=before)
    best = logits.max(axis=3, keepdims=True)
    np.subtract(logits, best, out=logits)
    np.exp(logits, out=logits)
    weights = scratch.take("far_gains", *logits.shape)
    weights.fill(0.0)
    add_values(logits, mix, weights, scratch)
    if clamp:
        np.maximum(weights, 0.0, out=weights)
    # Rows of a full ring see one stage after another: no copies then.
    seen = slice(after[0], after[-1] + 1) if after[-1] - after[0] == len(after) - 1 else after
    maximum, mass, _ = stages.each
    first = maximum[:, :, :1]
    maximum, mass = maximum[:, :, seen], mass[:, :, seen]
    reach = np.add(maximum, best, out=logits)
    top = reach.max(axis=3)
    np.subtract(reach, top[..., None], out=reach)
    np.exp(reach, out=reach)
    np.multiply(weights, reach, out=weights)
    total = np.einsum("ghim,ghim->ghi", weights, mass)
    dropped = total < 0.0
    if before is None:
        dropped |= after == 0
    if dropped.any():
        total[dropped] = 0.0
        weights[dropped] = 0.0
        top[dropped] = -LARGE
    numerator = None
    if before is not None:
        gains = weights
        if stages.folded:
            gains = np.subtract(first, maximum, out=logits)
            np.exp(gains, out=gains)
            np.multiply(gains, weights, out=gains)
        numerator = scratch.take("far_numerator", *total.shape, before.shape[3])
        numerator.fill(0.0)
        add_values(gains, before, numerator, scratch)
    evicted = _evicted_weights(stages, after, weights, scratch) if stages.folded else None
    return FarGains(top, total, evicted, numerator)


def _plain_gains(
    stages: FarStages,
    after: np.ndarray,
    levels: Sequence[Float32],
    logits: Float32,
    mix: Float32,
    clamp: bool,
    scratch: Scratch,
) -> FarGains:
    """`far_gains` at the scale of the last stage for all rows: then the mass that the folded rows bring is
    the sum of their values' weights, and no stage in between is needed."""
    np.exp(logits, out=logits)
    weights = scratch.take("far_gains", *logits.shape)
    add_values(logits, mix, weights, scratch, fresh=True)
    if clamp:
        np.maximum(weights, 0.0, out=weights)
    np.multiply(weights, np.exp(stages.last)[:, :, None], out=weights)
    evicted = None
    total: Float32 | None = None
    if stages.folded:
        evicted = scratch.take("far_evicted", *weights.shape[:3], stages.folded)
        scores(weights, stages.weights, evicted)
        if after[0] < stages.folded:
            gone = (np.arange(stages.folded) < after[:, None]).astype(np.float32)
            np.multiply(evicted, gone, out=evicted)
        total = np.einsum("ghif->ghi", evicted)
    mass: Float32 | None = None
    if levels:
        if stages.folded:
            np.multiply(weights, stages.rescale[:, :, None], out=weights)
        mass = np.einsum("ghim,ghm->ghi", weights, stages.before[1])
        total = mass if total is None else mass + total
    assert total is not None
    if total.min() < 0.0:
        # Products: with many rows dropped they are faster than masked writes.
        kept = (total >= 0.0).astype(np.float32)
        weights *= kept[..., None]
        if mass is not None:
            mass *= kept
        if evicted is not None:
            evicted *= kept[..., None]
    numerator = None
    if levels:
        numerator = scratch.take("far_numerator", *total.shape, levels[0].shape[3])
        if len(after) > 1:
            before = scratch.take("before", *levels[0].shape)
            np.add(levels[0], levels[1], out=before)
            levels = [before]
        for level, values in enumerate(levels):
            add_values(weights, values, numerator, scratch, fresh=not level)
    return FarGains(None, mass, evicted, numerator)


def _evicted_weights(stages: FarStages, after: np.ndarray, weights: Float32, scratch: Scratch) -> Float32:
    """`sum_b weights_ib exp(l_yb - mu_ib)` of each row i and each row y folded by then; else any."""
    logits, maximum = stages.logits, stages.maximum
    folded = logits.shape[2]
    evicted = scratch.take("far_evicted", *weights.shape[:3], folded)
    lift = stages.each[2]
    if lift is not None:
        # One scale for all rows makes it a matrix product. A row before the first fold takes nothing.
        at = np.maximum(after, 1) - 1
        lift = lift if len(at) == folded and after[0] else lift[:, :, at]
        np.multiply(lift, weights, out=weights)
        scores(weights, stages.weights, evicted)
        return evicted
    evicted.fill(0.0)
    for i, count in enumerate(after):
        if count:
            each = np.exp(logits[:, :, :count] - maximum[:, :, count, None])
            evicted[:, :, i, :count] = np.matmul(each, weights[:, :, i, :, None])[..., 0]
    return evicted


def empty_maximum(shape: tuple[int, ...]) -> Float32:
    """The maxima of a far field that holds nothing."""
    return np.full(shape, -LARGE, np.float32)
