"""Landmarks, mixing matrix and far field made anew from rows that left the window; sinks and ring stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Float32
from .errors import ArgumentError
from .geometry import MIN_LANDMARKS, Geometry
from .landmarks import LANDMARK_ROWS, landmarks_of, place_far, place_landmarks
from .planes import (
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_LANDMARKS,
    META_LEN,
    NO_FAR_LIMIT,
)
from .sealing import empty_planes
from .state import SealOptions

MIN_ARCHIVED = LANDMARK_ROWS * MIN_LANDMARKS
"""Rows that a group must have archived to be resealed: enough for the fewest landmarks."""
RESEALED_PLANES: tuple[str, ...] = ("group_meta", "k_tilde", "q_tilde", "mix", "far_mz", "t_hat")

Planes = Mapping[str, npt.NDArray[Any]]
_GroupRows = tuple[Float32, Float32, Float32]
"""A group's archived rows, oldest first: `q (Tq, H, d)` of its heads, `k (T, d)`, `v (T, dv)`."""


def resealed(
    geometry: Geometry,
    options: SealOptions,
    meta: npt.NDArray[np.uint32],
    q: Float32,
    k: Float32,
    v: Float32,
    skip: Sequence[int] | npt.NDArray[np.intp],
) -> dict[str, npt.NDArray[Any]]:
    """`RESEALED_PLANES` of a layer whose far field is to be made of archived rows.

    Landmarks are means over all rows given, the far field holds all but the newest that are in the window
    yet. What the far field held before is gone, unless the rows given have it.

    Args:
        geometry: the layer's sizes.
        options: how it was sealed; `fold` sets the far field's new limit: none, what it now holds and
            the ring with it ("prompt"), or what it now holds ("never").
        meta: the layer's `group_meta` now.
        q: queries `(Tq, nh, d)`, at least `MIN_ARCHIVED`.
        k: keys `(T, G, d)`, at least `MIN_ARCHIVED`, the newest last.
        v: values `(T, G, dv)`.
        skip: for each group how many of the newest rows are still in its window.

    Raises:
        ArgumentError: too few rows, fewer than a group skips, or none to fold where a far field is.
    """
    for name, rows in (("q", len(q)), ("k", len(k))):
        if rows < MIN_ARCHIVED:
            raise ArgumentError(f"{name}: {rows} rows, expected at least {MIN_ARCHIVED} to reseal from")
    for g, newest in enumerate(skip):
        if newest > len(k):
            raise ArgumentError(
                f"k: {len(k)} rows, expected at least the {newest} that are still in the window of group {g}"
            )
        if newest == len(k) and meta[g, META_FAR_LEN]:
            raise ArgumentError(
                f"k: {len(k)} rows, all still in the window of group {g}, whose far field would be emptied; "
                "expected rows that have left it too"
            )
    heads = geometry.heads_per_group
    groups = [(q[:, g * heads : (g + 1) * heads], k[:, g], v[:, g]) for g in range(geometry.num_kv_heads)]
    return _resealed(geometry, options, meta, groups, skip)


def _resealed(
    geometry: Geometry,
    options: SealOptions,
    meta: npt.NDArray[np.uint32],
    groups: Sequence[_GroupRows],
    skip: Sequence[int] | npt.NDArray[np.intp],
) -> dict[str, npt.NDArray[Any]]:
    """`resealed` of groups that may have archived rows of their own."""
    found = empty_planes(geometry)
    planes = {name: found[name] for name in RESEALED_PLANES}
    planes["group_meta"][:] = meta
    for g, ((q, k, v), newest) in enumerate(zip(groups, skip, strict=True)):
        # Queries and keys may differ in number; no segment of either is empty.
        m, folded = landmarks_of(min(len(k), len(q)), geometry), len(k) - int(newest)
        row = planes["group_meta"][g]
        limits = {"always": NO_FAR_LIMIT, "prompt": folded + int(row[META_LEN]), "never": folded}
        fold = options.fold_of(len(k), geometry.group_windows[g])
        row[META_FAR_LEN], row[META_FAR_LIMIT], row[META_LANDMARKS] = folded, limits[fold], m
        place_landmarks(planes, g, m, q, k, geometry, options)
        if folded:
            place_far(planes, g, m, k[:folded], v[:folded], geometry)
    return planes


def from_archive(
    geometry: Geometry, options: SealOptions, planes: Planes, evicted_before: npt.NDArray[np.uint32]
) -> dict[str, npt.NDArray[Any]] | None:
    """`resealed` from the archive that an engine keeps: its far field then holds just the archived rows.

    Args:
        geometry: the layer's sizes.
        options: how it was sealed.
        planes: `group_meta` and the archive planes, as `Engine.read` gives them.
        evicted_before: `META_EVICTED` of each group, `(G,)`, when the archive was empty.

    Returns:
        `RESEALED_PLANES`, or None while a group has archived fewer than `MIN_ARCHIVED` rows.
    """
    meta, q, k, v = (planes[name] for name in ("group_meta", "archive_q", "archive_k", "archive_v"))
    room, heads = len(q), geometry.heads_per_group
    evicted = meta[:, META_EVICTED]
    since = evicted - np.asarray(evicted_before, np.uint32)  # both wrap at 2^32, and so does this
    groups = []
    for g, (end, count) in enumerate(zip(evicted.tolist(), since.tolist(), strict=True)):
        kept = min(room, count)
        if kept < MIN_ARCHIVED:
            return None
        slots = np.arange(end - kept, end) % 2**32 % room  # oldest first
        groups.append((q[slots, g * heads : (g + 1) * heads], k[g, slots], v[g, slots]))
    return _resealed(geometry, options, meta, groups, [0] * len(groups))
