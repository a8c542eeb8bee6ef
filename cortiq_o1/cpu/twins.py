"""Every kernel's NumPy twin, by name."""

from __future__ import annotations

from types import MappingProxyType

from .twins_flash import FLASH_TWINS
from .twins_fused import FUSED_TWINS
from .twins_gemm import GEMM_TWINS
from .twins_stages import STAGE_TWINS, Twin
from .twins_token import TOKEN_TWINS

TWINS: MappingProxyType[str, Twin] = MappingProxyType(
    {**STAGE_TWINS, **GEMM_TWINS, **TOKEN_TWINS, **FUSED_TWINS, **FLASH_TWINS}
)
