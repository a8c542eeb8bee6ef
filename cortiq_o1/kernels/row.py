"""What a row of the table of kernels is, and what the paths' rows are made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..params import STAGE_PARAMS, Field, Params, params_dtype
from ..planes import KV_PLANES, PLANES, STORES, Element

Access = Literal["read", "read_write"]
Grid = tuple[int, int, int]
Constants = tuple[tuple[str, int], ...]
"""Names of a shader's `override`s, and what they are."""


@dataclass(frozen=True)
class Binding:
    """A kernel's storage binding: a plane or a store; `element` is how the kernel takes it."""

    name: str
    access: Access
    element: Element


def no_constants(params: Params) -> Constants:
    """Of a shader without any."""
    return ()


@dataclass(frozen=True)
class Kernel:
    """One kernel: `shaders/<name>.wgsl`, its twin `<name>` in `cpu/twins.py`.

    Binding 0 is the parameter uniform, bindings 1.. are `bindings` in order, all in group 0.
    """

    name: str
    text: str
    thread: str
    bindings: tuple[Binding, ...]
    params: tuple[Field, ...]
    workgroup: Grid
    shared_bytes: int
    grid: Callable[[Params], Grid]
    deviation: str
    features: tuple[str, ...] = ()
    constants: Callable[[Params], Constants] = no_constants
    """Values of the shader's `override`s for some parameters: a pipeline for each."""

    @property
    def binds_ring(self) -> bool:
        """Whether it reads or writes a ring, hence has a form for each way that rings are kept."""
        return any(b.name == "ring" or b.name in KV_PLANES for b in self.bindings)

    @property
    def params_dtype(self) -> np.dtype:
        """The NumPy struct of the parameters."""
        return params_dtype(self.params)


def bind(spec: str) -> tuple[Binding, ...]:
    """Bindings from names of planes or stores; a trailing `!` marks what the kernel writes, `:f32` before
    it a plane of vec4s that it takes for floats."""
    found = []
    for word in spec.split():
        name, _, element = word.rstrip("!").partition(":")
        plane = PLANES.get(name) or PLANES[STORES[name][1]]
        access: Access = "read_write" if word.endswith("!") else "read"
        found.append(Binding(name, access, "f32" if element == "f32" else plane.element))
    return tuple(found)


def up(count: float, per: int) -> int:
    """Workgroups of `per` for `count`, at least one."""
    return max(1, -(-int(count) // per))


LANES = 64
"""Invocations of a workgroup: at least 64 wherever there is a barrier, at most 256."""
MAX_GRID = 65_535
NEAR_LANES, NEAR_HEADS, NEAR_KEYS, KEY_LANES = 128, 4, 32, 16
"""A workgroup of `o1c_tok_near`: lanes, heads, keys of a tile, and the lanes that share a key."""
PRODUCT_LANES = 128
FAR_LANES, DOT_LANES = 256, 8
"""A workgroup of `o1c_tok_far`: lanes, and those that share a landmark, or a row in `o1c_fl_evict`."""
DOT_STRIDE = LANES + 4
DOT_PARTS = DOT_LANES * DOT_STRIDE
COMMIT_LANES, COMMIT_COLUMNS = 256, 2
"""A workgroup of `o1c_tok_commit`: lanes, and vec4s of the width."""

SINKS = "Sinks lie behind the ring in one plane, which frees two bindings. "
META = "`meta` is a reserved word of WGSL: `group_meta`, eight words a group instead of four. "


def stage(
    name: str,
    spec: str,
    grid: Callable[[Params], Grid],
    shared_words: int,
    text: str,
    thread: str,
    deviation: str,
    lanes: int = LANES,
) -> Kernel:
    """A kernel with the sub-chunk's parameters."""
    return Kernel(
        name,
        text,
        thread,
        bind(spec),
        STAGE_PARAMS,
        (lanes, 1, 1),
        4 * shared_words,
        grid,
        deviation.strip(),
    )


def folded(lanes: float) -> tuple[int, int]:
    """Workgroups for so many lanes, in two dimensions, since one holds no more than `MAX_GRID`."""
    groups = up(lanes, LANES)
    x = min(groups, MAX_GRID)
    return x, up(groups, x)
