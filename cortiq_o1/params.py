"""What a kernel's uniform holds: its fields in order, and their values for a sub-chunk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .geometry import Geometry
from .planes import Sizes
from .tiling import flash_cut


@dataclass(frozen=True)
class Field:
    """One parameter of a kernel, as its WGSL struct declares it."""

    name: str
    type: Literal["u32", "f32"]
    text: str


STAGE_PARAMS: tuple[Field, ...] = (
    Field("hpg", "u32", "query heads a group"),
    Field("m", "u32", "landmarks, capacity"),
    Field("w", "u32", "ring capacity"),
    Field("ns", "u32", "sinks"),
    Field("d", "u32", "key width in floats"),
    Field("dv", "u32", "value width in floats"),
    Field("nh", "u32", "query heads of all groups"),
    Field("ng", "u32", "groups"),
    Field("k", "u32", "rows of this sub-chunk"),
    Field("r0", "u32", "its first row within the call"),
    Field("kcap", "u32", "row stride of far_rows and evict_weights"),
    Field("pieces", "u32", "pieces of the value sum"),
    Field("rect", "u32", "0 aggregate, 1 fm"),
    Field("scale", "f32", "factor of every logit"),
    Field("panel", "u32", "columns of a panel"),
    Field("splits", "u32", "splits of the keys"),
)
_ARCHIVE_FIELDS = ("hpg", "m", "w", "ns", "d", "dv", "nh", "ng", "k", "r0")
ARCHIVE_PARAMS: tuple[Field, ...] = (
    *(f for f in STAGE_PARAMS if f.name in _ARCHIVE_FIELDS),
    Field("archive", "u32", "evictions that the archive holds"),
    Field("pad0", "u32", "unused"),
)
FUSED_PARAMS: tuple[Field, ...] = (
    *(f for f in STAGE_PARAMS if f.name in ("hpg", "m", "w", "ns", "d", "dv", "nh", "ng")),
    *(f for f in STAGE_PARAMS if f.name in ("r0", "rect", "scale")),
    Field("splits", "u32", "tiles of a group's window, a workgroup each"),
    Field("outputs", "u32", "1 where the output is wanted"),
    Field("moves", "u32", "1 where the state moves"),
    Field("pad0", "u32", "unused"),
    Field("pad1", "u32", "unused"),
)
FLASH_PARAMS: tuple[Field, ...] = (
    *(f for f in STAGE_PARAMS if f.name in ("hpg", "m", "w", "ns", "d", "dv", "nh", "ng", "k", "r0", "kcap")),
    *(f for f in STAGE_PARAMS if f.name in ("rect", "scale")),
    Field("pair_tiles", "u32", "key tiles that a group's row tile has"),
    Field("tiles", "u32", "key tiles of a workgroup"),
    Field("pad0", "u32", "unused"),
)
COPY_PARAMS: tuple[Field, ...] = (
    Field("count", "u32", "vec4s to copy"),
    Field("src_at", "u32", "first vec4 read"),
    Field("dst_at", "u32", "first vec4 written"),
    Field("pad0", "u32", "unused"),
)

Params = dict[str, int | float]


def params_dtype(fields: Iterable[Field]) -> np.dtype:
    """The NumPy struct of a kernel's parameters; all fields are four bytes, so WGSL adds no gaps."""
    return np.dtype([(f.name, "<f4" if f.type == "f32" else "<u4") for f in fields])


def stage_params(geometry: Geometry, sizes: Sizes, k: int, r0: int, splits: int = 1) -> Params:
    """The parameters of a stage over rows `r0 .. r0 + k` of a call, its keys in `splits` parts."""
    return {
        "hpg": geometry.heads_per_group,
        "m": sizes.m,
        "w": sizes.w,
        "ns": geometry.sinks,
        "d": sizes.d,
        "dv": sizes.dv,
        "nh": sizes.nh,
        "ng": sizes.ng,
        "k": k,
        "r0": r0,
        "kcap": sizes.kcap,
        "pieces": sizes.pieces,
        "rect": 1 if geometry.rect == "fm" else 0,
        "scale": float(geometry.scale32),
        "panel": sizes.panel,
        "splits": splits,
    }


def archive_params(geometry: Geometry, sizes: Sizes, k: int, r0: int) -> Params:
    """The parameters of `o1c_archive` over rows `r0 .. r0 + k` of a call."""
    stage = stage_params(geometry, sizes, k, r0)
    own: Params = {"archive": sizes.archive, "pad0": 0}
    return {f.name: own[f.name] if f.name in own else stage[f.name] for f in ARCHIVE_PARAMS}


def fused_params(geometry: Geometry, sizes: Sizes, r0: int, outputs: bool, moves: bool) -> Params:
    """The parameters of a fused token's kernels for row `r0` of a call."""
    stage = stage_params(geometry, sizes, 1, r0)
    own: Params = {"splits": sizes.fsplits, "outputs": outputs, "moves": moves, "pad0": 0, "pad1": 0}
    own = {name: int(value) for name, value in own.items()}
    return {f.name: own[f.name] if f.name in own else stage[f.name] for f in FUSED_PARAMS}


def flash_params(geometry: Geometry, sizes: Sizes, k: int, r0: int, workgroups: int) -> Params:
    """The parameters of a chunk without score planes, rows `r0 .. r0 + k` of a call."""
    stage = stage_params(geometry, sizes, k, r0)
    cut = flash_cut(geometry, k, workgroups)
    own: Params = {"pair_tiles": cut.pair_tiles, "tiles": cut.tiles, "pad0": 0}
    return {f.name: own[f.name] if f.name in own else stage[f.name] for f in FLASH_PARAMS}
