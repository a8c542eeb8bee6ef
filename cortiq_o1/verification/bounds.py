"""What each plane that a kernel wrote should hold, and how far off it may be."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from ..kernels import KERNELS
from ..params import Params
from ..plans import members
from .bounds_flash import FLASH_BOUNDS
from .bounds_fused import FUSED_BOUNDS
from .bounds_gemm import GEMM_BOUNDS
from .bounds_stages import STAGE_BOUNDS, Bound, Expected, Planes
from .bounds_token import TOKEN_BOUNDS

_BOUNDS: MappingProxyType[str, Bound] = MappingProxyType(
    {**STAGE_BOUNDS, **GEMM_BOUNDS, **TOKEN_BOUNDS, **FUSED_BOUNDS, **FLASH_BOUNDS}
)


def expected(kernel: str, p: Params, before: Planes, after: Planes, got: Planes) -> dict[str, Expected]:
    """What each written plane should hold.

    Args:
        kernel: its name.
        p: its parameters.
        before: the bound planes by binding name, as both sides found them.
        after: the same as the twin left them.
        got: the written planes as the adapter left them; only consulted where float32 cannot tell
            which of two results is right.
    """
    bindings = KERNELS[kernel].bindings
    written = [plane for b in bindings if b.access == "read_write" for plane in members(b.name)]
    found = {name: Expected(after[name], np.zeros(after[name].shape)) for name in written}
    found.update(_BOUNDS[kernel](p, before, after, got))
    return found
