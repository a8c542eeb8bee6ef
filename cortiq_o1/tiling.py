"""How the kernels for one row and for chunks cut a layer's window into workgroups' shares."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .geometry import Geometry

FUSED_WIDTH = 256
"""Widest rows, in floats, that the fused token's kernels take."""
TILE_ROWS, TILE_KEYS = 64, 64
"""A tile of `o1c_fl_near`: rows, a row and a head each, and keys."""
MOST_SLOTS = 32
"""Parts that a row of a chunk may have at most: `o1c_fl_merge` gives each a lane."""


def fused_keys(head_dim: int, value_dim: int) -> int:
    """Keys that a workgroup of a fused token takes: as many as its lanes have registers for."""
    return 32 if max(head_dim, value_dim) <= 128 else 16


def fused_splits(geometry: Geometry) -> int:
    """Workgroups of a fused token that share a group's window."""
    keys = fused_keys(geometry.head_dim, geometry.value_dim or 0)
    return -(-(geometry.window + geometry.sinks) // keys)


def fused_words(geometry: Geometry) -> int:
    """Floats of a head's partials and record in `fu_part`, see shaders/shared/fused.wgsl."""
    values = geometry.value_dim or 0
    return fused_splits(geometry) * (4 + values) + 8 + 8 * geometry.landmarks + values


class Cut(NamedTuple):
    """A chunk's key tiles: how many a group's row tile has, how many a workgroup takes, and how many parts
    a row then has at most."""

    pair_tiles: int
    tiles: int
    slots: int


@lru_cache(maxsize=1024)
def flash_cut(geometry: Geometry, rows: int, workgroups: int) -> Cut:
    """The cut of a sub-chunk of `rows` rows: into about `workgroups` equal runs of tiles, but no more parts
    of a row than `MOST_SLOTS`."""
    heads = geometry.heads_per_group
    row_tiles = -(-heads * rows // TILE_ROWS)
    # Rows of the stream that a row tile spans beyond its first.
    span = max(
        (min((tile + 1) * TILE_ROWS, heads * rows) - 1) // heads - tile * TILE_ROWS // heads
        for tile in range(row_tiles)
    )
    pair_tiles = -(-(geometry.sinks + geometry.window + span) // TILE_KEYS)
    total = geometry.num_kv_heads * row_tiles * pair_tiles
    tiles = max(1, total // workgroups, -(-pair_tiles // (MOST_SLOTS - 1)))
    return Cut(pair_tiles, tiles, -(-pair_tiles // tiles) + 1)


@lru_cache(maxsize=1024)
def flash_slots(geometry: Geometry, kcap: int, workgroups: int) -> int:
    """Parts that a row has at most in a sub-chunk of at most `kcap` rows."""
    return max(flash_cut(geometry, rows, workgroups).slots for rows in range(1, kcap + 1))
