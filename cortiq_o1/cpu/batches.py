"""Where the sequences of a batch lie in each array of a resident: a range of its groups, or of its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..geometry import Geometry
from ..planes import PLANES

Array = npt.NDArray[Any]

# Of each plane that a resident has: the axis that a batch lengthens, and by what.
_AXES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        plane.name: next((axis, str(size)) for axis, size in enumerate(plane.shape) if size in ("ng", "nh"))
        for plane in PLANES.values()
        if plane.role in ("state", "archive")
    }
)


def place(geometry: Geometry, plane: str, index: int) -> tuple[slice, ...]:
    """Where sequence `index` of `geometry` lies in a plane."""
    axis, size = _AXES[plane]
    each = geometry.num_kv_heads if size == "ng" else geometry.num_heads
    return (*[slice(None)] * axis, slice(index * each, (index + 1) * each))


def joined(plane: str, parts: Sequence[Array]) -> Array:
    """A plane of the sequences of all parts, one after another."""
    return np.concatenate(parts, axis=_AXES[plane][0])


def without(geometry: Geometry, plane: str, array: Array, count: int, index: int) -> Array:
    """A copy of a plane of `count` sequences in which the last has the place of sequence `index`."""
    order = list(range(count - 1))
    if index < count - 1:
        order[index] = count - 1
    return joined(plane, [array[place(geometry, plane, at)] for at in order])
