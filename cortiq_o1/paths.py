"""The paths: which kernels a sub-chunk takes, in what order, on which planes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from .errors import GeometryError
from .geometry import Geometry
from .kernels import KERNELS, MAX_GRID
from .params import Params, archive_params, flash_params, fused_params, stage_params
from .planes import MOVING_PLANES, PLANES, STORES, Sizes
from .plans import SHADOW, Dispatch, frozen, plane_bytes

# Each path in two parts: the outputs, and the state after them, which "fused" has in one. `EVICT` names
# the kernel that leaves in scratch what the commit needs.
ATTEND: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fused": ("o1c_fu_read", "o1c_fu_move"),
        "token": ("o1c_tok_near", "o1c_tok_far", "o1c_tok_merge"),
        "flash": ("o1c_fl_evict", "o1c_fl_near", "o1c_fl_far", "o1c_fl_merge"),
        "gemm": (
            "o1c_far_e", "o1c_gather", "o1c_pack", "o1c_land", "o1c_qk", "o1c_gmax", "o1c_far", "o1c_gsoft",
            "o1c_pv", "o1c_gadd",
        ),
        "stages": (
            "o1c_far_e", "o1c_score", "o1c_land", "o1c_max", "o1c_far", "o1c_soft", "o1c_sum", "o1c_add",
        ),
    }
)  # fmt: skip
_STAGES_COMMIT = ("o1c_far_commit", "o1c_ring_commit", "o1c_meta")
COMMIT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fused": (),
        "token": ("o1c_tok_commit",),
        "flash": ("o1c_fl_commit",),
        "gemm": _STAGES_COMMIT,
        "stages": _STAGES_COMMIT,
    }
)
EVICT: Mapping[str, str] = MappingProxyType(
    {
        "fused": "o1c_fu_read",
        "token": "o1c_tok_far",
        "flash": "o1c_fl_evict",
        "gemm": "o1c_far_e",
        "stages": "o1c_far_e",
    }
)
_FLASH = (*ATTEND["flash"], *COMMIT["flash"])
ARCHIVE = "o1c_archive"
"""The kernel that archives what a committed sub-chunk evicts, on every path."""
PATHS: tuple[str, ...] = ("auto", *ATTEND)
KEPT_ROWS: Mapping[str, str] = MappingProxyType({"q": "spec_q", "k_rows": "spec_k", "v_rows": "spec_v"})
"""The row planes that an uncommitted call keeps, and where a later commit finds them."""
PRODUCTS = ("o1c_qk", "o1c_pv")
"""The kernels that have a float16 variant."""

SCRATCH: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        path: tuple(
            dict.fromkeys(
                b.name
                for kernel in (*kernels, *COMMIT[path])
                for b in KERNELS[kernel].bindings
                if b.name in PLANES and PLANES[b.name].role in ("scratch", "own")
            )
        )
        for path, kernels in ATTEND.items()
    }
)
"""The scratch planes of each path."""


def make_dispatch(kernel: str, planes: Iterable[str], params: Params) -> Dispatch:
    """A dispatch over the table's grid; raises `GeometryError` where WebGPU's does not reach so far."""
    grid = KERNELS[kernel].grid(params)
    for size in grid:
        if size > MAX_GRID:
            raise GeometryError(
                f"num_heads: {kernel} needs a grid of {grid}, WebGPU grants {MAX_GRID} workgroups a "
                "dimension; lower num_heads or split the batch"
            )
    return Dispatch(kernel, tuple(planes), grid, frozen(params))


class Emitter:
    """Emits one sub-chunk after another on the state, or on its shadow.

    `workgroups`: see `planning.Limits`; `names`: planes bound in the place of others; `fast`: the products'
    float16 variants.
    """

    def __init__(
        self,
        geometry: Geometry,
        sizes: Sizes,
        workgroups: int,
        fast: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.geometry = geometry
        self.sizes = sizes
        self.workgroups = workgroups
        self.fast = fast
        self.names = dict(names or {})

    def emit(self, kernel: str, k: int, r0: int, outputs: bool = True, moves: bool = True) -> Dispatch:
        """A kernel of a sub-chunk of `k` rows from `r0` on; `outputs` and `moves` tell those that both
        attend and commit what is wanted of them."""
        if kernel == ARCHIVE:
            params = archive_params(self.geometry, self.sizes, k, r0)
        elif kernel in ATTEND["fused"]:
            params = fused_params(self.geometry, self.sizes, r0, outputs, moves)
        elif kernel in _FLASH:
            params = flash_params(self.geometry, self.sizes, k, r0, self.workgroups)
        else:
            splits = self.sizes.splits if kernel.startswith("o1c_tok") else self.sizes.psplits
            params = stage_params(self.geometry, self.sizes, k, r0, splits)
        planes = [self.names.get(b.name, b.name) for b in KERNELS[kernel].bindings]
        name = kernel + "_f16" if self.fast and kernel in PRODUCTS else kernel
        return make_dispatch(name, planes, params)

    def copy(self, source: str, target: str) -> Dispatch:
        """The whole of a plane into another."""
        count = plane_bytes(source, self.sizes) // 16
        return make_dispatch(
            "o1c_copy", (source, target), {"count": count, "src_at": 0, "dst_at": 0, "pad0": 0}
        )

    def fork(self) -> Iterator[Dispatch]:
        """Copies what moves, and lets everything after run on the copy."""
        for name in MOVING_PLANES:
            yield self.copy(name, SHADOW + name)
            self.names[name] = SHADOW + name
        for store in STORES:
            self.names[store] = SHADOW + store

    def sub_chunk(
        self, path: str, k: int, r0: int, outputs: bool = True, moves: bool = True, archive: bool = False
    ) -> Iterator[Dispatch]:
        """The outputs of a sub-chunk, the state after it, or both; what it evicts goes to the archive before
        the commit overwrites it."""
        kernels: list[str] = []
        if path == "fused":
            first, second = ATTEND[path]
            kernels = [first, *([ARCHIVE] if archive else []), second]
        else:
            kernels += ATTEND[path] if outputs else [EVICT[path]]
            kernels += [ARCHIVE] if archive else []
            kernels += COMMIT[path] if moves else []
        for kernel in kernels:
            yield self.emit(kernel, k, r0, outputs, moves)
