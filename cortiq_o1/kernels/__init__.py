"""The one table of kernels: bindings, parameters, grids.

The planner, both executors, the shader loader, the documentation and the tests read it: what a kernel
binds and how it is launched is written here and nowhere else, a module for each path. `planes.py` has the
planes, `params.py` the parameters.
"""

from __future__ import annotations

from types import MappingProxyType

from . import flash, fused, gemm, moves, stages, token
from .row import LANES, MAX_GRID, Access, Binding, Constants, Grid, Kernel

__all__ = ["KERNELS", "LANES", "MAX_GRID", "Access", "Binding", "Constants", "Grid", "Kernel"]

KERNELS: MappingProxyType[str, Kernel] = MappingProxyType(
    {kernel.name: kernel for path in (stages, gemm, token, fused, flash, moves) for kernel in path.KERNELS}
)
