"""Bounds of the kernels that compute a chunk by matrix products; see `bounds_stages.py`.

A product's lane adds its terms one after another. Operands in float16: WGSL lets an adapter round to
either neighbour, while the twin takes the nearest, so each operand may differ by one unit in
float16's last place, 2^-10 of its size; and below float16's normal range it may become zero.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from types import MappingProxyType

import numpy as np

from ..cpu.twins import TWINS
from ..kernels import KERNELS, LANES
from ..kernels.gemm import TILE_K
from ..params import Params
from ..planes import HD_FAR, HD_INV, HD_MAX
from ..reference import EPSILON
from .bounds_stages import TINY, Array, Bound, Expected, Planes, _equal, _sizes, exp_loss, sum_loss

HALF_ULP = 2.0**-10
"""A unit in float16's last place, relative to a number of its normal range, at most."""
HALF_TINY = 2.0**-14
"""The smallest normal float16."""


def _sum_terms(kernel: str, p: Params) -> float:
    """Terms that a lane of a product adds."""
    if kernel.startswith("o1c_qk"):
        return p["d"]
    return ceil(p["panel"] / TILE_K / p["splits"]) * TILE_K


def _product(kernel: str, plane: str) -> Bound:
    """A sum of products in float32."""

    def bound(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
        sizes = _sizes(kernel, p, before)[plane]
        return {plane: Expected(after[plane], sum_loss(_sum_terms(kernel, p)) * sizes)}

    return bound


def _half_product(kernel: str, plane: str, left: str, right: str) -> Bound:
    """A sum in float32 of products of float16s."""

    def sizes_with(p: Params, before: Planes, change: dict[str, Callable[[Array], Array]]) -> Array:
        planes = {**before, **{name: f(before[name]) for name, f in change.items()}}
        return _sizes(kernel, p, planes)[plane]

    def bound(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
        def tiny(x: Array) -> Array:
            return np.where(x == 0.0, x, np.float32(HALF_TINY))

        sizes = _sizes(kernel, p, before)[plane]
        lost = sizes_with(p, before, {left: tiny}) + sizes_with(p, before, {right: tiny})
        loss = sum_loss(_sum_terms(kernel, p)) + 2.0 * HALF_ULP + HALF_ULP**2
        return {plane: Expected(after[plane], loss * sizes + lost)}

    return bound


def _gsoft(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    # Logits of zero under a maximum of zero turn to ones where a row looks.
    blank = {
        **before,
        "panel_scores": np.zeros_like(before["panel_scores"]),
        "row_head": np.zeros_like(before["row_head"]),
    }
    TWINS["o1c_gsoft"](p, KERNELS["o1c_gsoft"].grid(p), *blank.values())
    seen = blank["panel_scores"] > 0.5
    k = int(p["k"])
    largest = before["row_head"][:k, :, HD_MAX].T.astype(np.float64)
    x = np.where(seen, before["panel_scores"].astype(np.float64), 0.0)
    x[:, :k] -= np.where(seen[:, :k], largest[:, :, None], 0.0)
    weights = np.where(seen, after["panel_scores"].astype(np.float64), 0.0)
    off = np.where(seen, weights * exp_loss(x) + TINY, 0.0)
    total = weights[:, :k].sum(axis=-1) + before["row_head"][:k, :, HD_FAR].T
    # A lane adds every 64th vec4, its four columns apart, then a tree of six and the four.
    terms = p["panel"] / (4 * LANES) + 8
    loss = off[:, :k].sum(axis=-1) / total + sum_loss(terms) + 6.0 * EPSILON
    head_off = np.zeros(before["row_head"].shape)
    head_off[:k, :, HD_INV] = after["row_head"][:k, :, HD_INV] * loss.T
    return {
        "panel_scores": Expected(after["panel_scores"], off),
        "row_head": Expected(after["row_head"], head_off),
    }


def _gadd(p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    sizes = _sizes("o1c_gadd", p, before)["out"]
    terms = p["splits"] + 2 * p["m"] + p["k"]
    return {"out": Expected(after["out"], sum_loss(terms) * sizes)}


GEMM_BOUNDS: MappingProxyType[str, Bound] = MappingProxyType(
    {
        "o1c_gather": _equal,
        "o1c_pack": _equal,
        "o1c_qk": _product("o1c_qk", "panel_scores"),
        "o1c_qk_f16": _half_product("o1c_qk_f16", "panel_scores", "panel_q", "panel_k"),
        "o1c_gmax": _equal,
        "o1c_gsoft": _gsoft,
        "o1c_pv": _product("o1c_pv", "near_parts"),
        "o1c_pv_f16": _half_product("o1c_pv_f16", "near_parts", "panel_scores", "panel_v"),
        "o1c_gadd": _gadd,
    }
)
