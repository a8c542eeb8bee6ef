"""The far field of a sub-chunk in closed form: every row's view of it, and its sums afterwards.

Shapes here: `g` groups of equal `group_meta`, `h` heads a group, `m` landmarks in use, `f` folded rows,
`i` rows of the sub-chunk. Stage `x` of `f + 1` is the far field after `x` folded rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Float32
from ..kernels import LARGE
from .near import scores

SAFE_RISE = 40.0
"""How far a maximum may rise over the stages for one scale to serve them all in float32."""


@dataclass(frozen=True)
class FarStages:
    """The far field over a sub-chunk's folded rows.

    `logits (g, h, f, m)`; `maximum`, `mass (g, h, f + 1, m)`, the mass at scale `exp(-maximum)` and over
    both levels; `weights (g, h, f, m)`: each folded row's at the scale of the last stage; `rescale
    (g, h, m)`: from the first stage's scale to the last's; `lift (g, h, f, m)`: from the last stage's scale
    to that of stages 1 and on, None where the maxima rise too far for that.
    """

    logits: Float32
    maximum: Float32
    mass: Float32
    weights: Float32
    rescale: Float32
    lift: Float32 | None


def far_stages(q_tilde: Float32, keys: Float32, shift: Float32, maximum: Float32, mass: Float32) -> FarStages:
    """The stages of folding `keys (g, f, d)`, scaled, into a field of `maximum`, `mass (g, h, m)`.

    `q_tilde` is `(g, h, m, d)`; `shift (g, h, m)` is taken from every logit.
    """
    groups, heads, m, width = q_tilde.shape
    folded = keys.shape[1]
    flat = np.empty((groups, folded, heads * m), np.float32)
    scores(keys, q_tilde.reshape(groups, heads * m, width), flat)
    logits = flat.reshape(groups, folded, heads, m).swapaxes(1, 2)
    logits = np.subtract(logits, shift[:, :, None], order="C")
    # Differences to an empty field's maximum must stay finite, so a logit counts from -LARGE on.
    stages = np.concatenate((maximum[:, :, None], logits), axis=2)
    np.maximum.accumulate(stages, axis=2, out=stages)
    last = stages[:, :, -1:]
    rescale = np.exp(maximum - last[:, :, 0])
    weights = np.exp(logits - last)
    lift = None
    masses = np.empty_like(stages)
    masses[:, :, 0] = mass
    if logits.shape[2]:
        rise = last - stages[:, :, 1:]
        if rise[:, :, 0].max() <= SAFE_RISE:
            lift = np.exp(rise, out=rise)
            np.cumsum(weights, axis=2, out=masses[:, :, 1:])
            masses[:, :, 1:] += (mass * rescale)[:, :, None]
            masses[:, :, 1:] *= lift
        else:
            _scan(masses, logits, stages)
    return FarStages(logits, stages, masses, weights, rescale, lift)


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
    """What the far field gives each row.

    `top (g, h, i)`: the row's maximum C; `mass (g, h, i)`: its part of the denominator; `gains
    (g, h, i, m)`: weights of the numerator from before the sub-chunk; `evicted (g, h, i, f)`: weights of
    the folded rows' values, None if there are none.
    """

    top: Float32
    mass: Float32
    gains: Float32
    evicted: Float32 | None

    def unshifted(self) -> FarGains:
        """The same to the scale of a maximum of zero."""
        lift = np.exp(self.top)
        by_row = lift[..., None]
        evicted = None if self.evicted is None else self.evicted * by_row
        return FarGains(np.zeros_like(lift), self.mass * lift, self.gains * by_row, evicted)


def far_gains(
    stages: FarStages,
    after: np.ndarray,
    empty: bool,
    logits: Float32,
    mix: Float32,
    near_max: Float32,
    clamp: bool,
) -> FarGains:
    """The far part of rows that each see stage `after[i]`.

    `empty`: nothing was folded before the sub-chunk; `logits (g, h, i, m)`: queries against key
    landmarks, overwritten; `mix (g, h, m, m)`; `near_max (g, h, i)`; `clamp`: the "fm" rectifier.
    """
    best = logits.max(axis=3, keepdims=True)
    np.subtract(logits, best, out=logits)
    np.exp(logits, out=logits)
    weights = np.matmul(logits, mix)
    if clamp:
        np.maximum(weights, 0.0, out=weights)
    maximum, mass = stages.maximum[:, :, after], stages.mass[:, :, after]
    reach = best + maximum
    top = np.maximum(near_max, reach.max(axis=3))
    np.subtract(reach, top[..., None], out=reach)
    np.exp(reach, out=reach)
    np.multiply(weights, reach, out=weights)
    total = np.einsum("ghim,ghim->ghi", weights, mass)
    dropped = total < 0.0
    if empty:
        dropped |= after == 0
    if dropped.any():
        total[dropped] = 0.0
        weights[dropped] = 0.0
        top[dropped] = near_max[dropped]
    evicted = _evicted_weights(stages, after, weights) if stages.logits.shape[2] else None
    if not stages.logits.shape[2]:
        return FarGains(top, total, weights, evicted)
    gains = np.exp(stages.maximum[:, :, :1] - maximum)
    np.multiply(gains, weights, out=gains)
    return FarGains(top, total, gains, evicted)


def _evicted_weights(stages: FarStages, after: np.ndarray, weights: Float32) -> Float32:
    """`sum_b weights_ib exp(l_yb - mu_ib)` of each row i and each row y folded by then, else 0."""
    logits, maximum = stages.logits, stages.maximum
    folded = logits.shape[2]
    if stages.lift is not None:
        # One scale for all rows makes it a matrix product. A row before the first fold takes nothing.
        lifted = stages.lift[:, :, np.maximum(after, 1) - 1]
        np.multiply(lifted, weights, out=lifted)
        evicted = np.matmul(lifted, stages.weights.swapaxes(2, 3))
        evicted *= np.arange(folded) < after[:, None]
        return evicted
    evicted = np.zeros((*weights.shape[:3], folded), np.float32)
    for i, count in enumerate(after):
        if count:
            each = np.exp(logits[:, :, :count] - maximum[:, :, count, None])
            evicted[:, :, i, :count] = np.matmul(each, weights[:, :, i, :, None])[..., 0]
    return evicted


def empty_maximum(shape: tuple[int, ...]) -> Float32:
    """The maxima of a far field that holds nothing."""
    return np.full(shape, -LARGE, np.float32)
