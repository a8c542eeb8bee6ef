"""The paths: which kernels a sub-chunk takes, in what order, on which planes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from .errors import GeometryError
from .geometry import Geometry
from .kernels import KERNELS, MAX_GRID
from .params import Params, archive_params, stage_params
from .planes import MOVING_PLANES, PLANES, Sizes
from .plans import SHADOW, Dispatch, frozen, plane_bytes

# Each path in two parts: the outputs, and the state after them. `EVICT` names the kernel
# that leaves in scratch what the commit needs.
ATTEND: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "token": ("o1c_tok_near", "o1c_tok_far", "o1c_tok_merge"),
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
    {"token": ("o1c_tok_commit",), "gemm": _STAGES_COMMIT, "stages": _STAGES_COMMIT}
)
EVICT: Mapping[str, str] = MappingProxyType(
    {"token": "o1c_tok_far", "gemm": "o1c_far_e", "stages": "o1c_far_e"}
)
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
                if PLANES[b.name].role in ("scratch", "own")
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

    `names`: planes bound in the place of others; `fast`: the products' float16 variants.
    """

    def __init__(
        self, geometry: Geometry, sizes: Sizes, fast: bool = False, names: Mapping[str, str] | None = None
    ) -> None:
        self.geometry = geometry
        self.sizes = sizes
        self.fast = fast
        self.names = dict(names or {})

    def emit(self, kernel: str, k: int, r0: int) -> Dispatch:
        """A kernel of a sub-chunk of `k` rows from `r0` on."""
        if kernel == ARCHIVE:
            params = archive_params(self.geometry, self.sizes, k, r0)
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

    def evict(self, path: str, k: int, r0: int) -> Iterator[Dispatch]:
        """What `commit` needs where no outputs are wanted."""
        yield self.emit(EVICT[path], k, r0)

    def attend(self, path: str, k: int, r0: int) -> Iterator[Dispatch]:
        """The outputs of a sub-chunk."""
        for kernel in ATTEND[path]:
            yield self.emit(kernel, k, r0)

    def archive(self, k: int, r0: int) -> Iterator[Dispatch]:
        """What a sub-chunk is about to evict, into the archive: before `commit`, which overwrites it."""
        yield self.emit(ARCHIVE, k, r0)

    def commit(self, path: str, k: int, r0: int) -> Iterator[Dispatch]:
        """The state after a sub-chunk."""
        for kernel in COMMIT[path]:
            yield self.emit(kernel, k, r0)
