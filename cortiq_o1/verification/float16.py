"""What rounding the operands of the matrix products to float16 may add to a layer's error."""

from __future__ import annotations

import numpy as np

from ..planes import LARGE, MIN_DENOMINATOR
from ..reference import Float64, ReferenceLayer
from .deviation import Array

HALF = 2.0**-11
"""Half a unit in the last place of 1 in float16."""
LEAST = 2.0**-25
"""Half of the smallest float16: what rounding may cost a weight near zero."""
_FIVE_DEVIATIONS = 3.0


def float16_bound(layer: ReferenceLayer, q: Array, k: Array, v: Array) -> Float64:
    """For each row and head `(rows, nh)`; the layer moves over the rows.

    A logit is a sum of `d` products of two rounded factors. Each factor is off by up to 2^-11 of its
    size, as often up as down, so the standard deviation of the sum is 0.6 * 2^-11 times the root of
    the sum of the products' squares; five of them are granted to every key, all in the worst direction.
    Weights and values are rounded once more for the value sum, not for the denominator. Where the far
    field sets the row's maximum far above its own logits, its weights are tiny, and what float16 cannot
    hold of them counts.
    """
    heads = layer.geometry.heads_per_group
    bound = np.empty(q.shape[:2])
    for i, row in enumerate(zip(q, k, v, strict=True)):
        result = layer.step(*row)
        for g in range(layer.geometry.num_kv_heads):
            own = slice(g * heads, (g + 1) * heads)
            near = _near_bound(layer, g, row[0][own].astype(np.float64), result.out[own])
            # Where float32 cannot tell the far field's sign, the other branch is as good.
            unsure = (result.out[own] != result.other[own]).any(axis=-1)
            other = _near_bound(layer, g, row[0][own].astype(np.float64), result.other[own], flip=True)
            bound[i, own] = np.where(unsure, np.maximum(near, other), near)
    return bound


def _near_bound(layer: ReferenceLayer, g: int, q: Float64, out: Float64, flip: bool = False) -> Float64:
    """Of a group's heads; `flip` takes the far field's sign the other way."""
    group, geometry = layer.groups[g], layer.geometry
    scale = float(geometry.scale32)
    keys, values = (np.array(side) for side in zip(*group.sinks, *group.ring, strict=True))
    x = scale * (q @ keys.T)
    off = np.expm1(_FIVE_DEVIATIONS * HALF * scale * np.sqrt(q**2 @ (keys**2).T))
    largest, far = x.max(axis=-1), np.zeros(len(q))
    if group.far_len:
        p = scale * (q @ group.k_tilde.T)
        f = p.max(axis=-1, keepdims=True)
        u = np.matmul(np.exp(p - f)[:, None], group.mix)[:, 0]
        u = np.maximum(u, 0.0) if geometry.rect == "fm" else u
        reach = np.maximum(f + group.far_max, -LARGE)
        top = np.maximum(largest, reach.max(axis=-1))
        mass = (u * np.exp(reach - top[:, None]) * group.far_mass).sum(axis=-1)
        kept = (mass >= 0.0) != flip
        largest, far = np.where(kept, top, largest), np.where(kept, mass, 0.0)
    weights = np.exp(x - largest[:, None])
    size = np.abs(values)
    spread = np.einsum("hn,hnv->hv", weights * off, np.abs(values[None] - out[:, None]))
    spread += (2.0 * HALF * weights + LEAST) @ size
    den = np.maximum(weights.sum(axis=-1) + far, MIN_DENOMINATOR)
    return np.asarray(spread.max(axis=-1) / den)
