"""Geometry and rows in, a plan out: which path, which sub-chunks, what the device's limits allow.

The planner knows no backend. `paths.py` has the kernels of each path, `plans.py` the plan itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .arrays import as_index
from .errors import ArgumentTypeError, GeometryError
from .geometry import Geometry
from .paths import KEPT_ROWS, PATHS, SCRATCH, Emitter
from .planes import (
    ARCHIVE_PLANES,
    MAX_LOOP_STEPS,
    MAX_PIECES,
    PLANES,
    STORES,
    SUB_ROWS,
    Sizes,
    store_bytes,
)
from .plans import SHADOW, Dispatch, Plan, base_plane, check_archive, members, plane_bytes, with_barriers
from .tiling import FUSED_WIDTH

BLOCK_ROWS = 256
"""Rows of one submit: bounds the time a device is busy without an answer, and the row planes."""
FLASH_ROWS, FEW_WORKGROUPS, FLASH_ROWS_OF_FEW = 2, 64, 16
"""Rows from which a sub-chunk is worth the tiles of the path "flash", and those for a device that fewer
workgroups than that keep busy: a software renderer, which has no lanes to waste."""


@dataclass(frozen=True)
class Limits:
    """What a device grants and what the planner must know of it, WebGPU's defaults unless said.

    `binding_bytes`: the largest range one binding may see; `workgroups`: how many it takes to keep the
    device busy, about; `float16`: whether kernels may compute with 16-bit floats; `kv`: how rings are kept,
    "f32" or "f16", see `open_device`.
    """

    binding_bytes: int = 128 << 20
    workgroups: int = 256
    float16: bool = False
    kv: str = "f32"


def sub_chunks(rows: int, chunk: int) -> Iterator[tuple[int, int]]:
    """`(first row, rows)` of each sub-chunk."""
    for r0 in range(0, rows, chunk):
        yield r0, min(chunk, rows - r0)


_CURES = {
    "ring_k": "window, head_dim or num_kv_heads",
    "ring_v": "window, value_dim or num_kv_heads",
    "k_tilde": "landmarks, head_dim or num_kv_heads",
    "q_tilde": "landmarks, head_dim or num_heads",
    "mix": "landmarks or num_heads",
    "t_hat": "landmarks, value_dim or num_heads",
    "archive_q": "archive, head_dim or num_heads",
    "archive_k": "archive, head_dim or num_kv_heads",
    "archive_v": "archive, value_dim or num_kv_heads",
}


def check_plane(name: str, sizes: Sizes, limits: Limits) -> None:
    """Raises `GeometryError` where a plane does not fit one binding, and names what to lower."""
    size = plane_bytes(name, sizes)
    if size > limits.binding_bytes:
        base = name.removeprefix(SHADOW)
        cure = _CURES.get(
            base, "rows" if base_plane(name).role in ("rows", "pending") else "window or num_heads"
        )
        raise GeometryError(
            f"{base}: {size} bytes, the device binds at most {limits.binding_bytes}; lower {cure}"
        )


def check_state_fits(geometry: Geometry, limits: Limits, archive: int = 0) -> None:
    """Raises `GeometryError` where a layer of this geometry, with an archive of so many evictions, cannot
    live on a device."""
    sizes = Sizes.of(geometry, archive=max(1, archive), kv=limits.kv)
    if sizes.near > MAX_PIECES * MAX_LOOP_STEPS:
        raise GeometryError(
            f"window: {geometry.window} and {geometry.sinks} sinks, a kernel sums at most "
            f"{MAX_PIECES * MAX_LOOP_STEPS} keys; lower window"
        )
    for plane in PLANES.values():
        if plane.role in ("state", "archive") or plane.name in SCRATCH["stages"]:
            check_plane(plane.name, sizes, limits)


def _fitting(geometry: Geometry, rows: int, path: str, limits: Limits) -> int:
    """The longest sub-chunk of at most `rows` rows whose scratch fits the limits, 0 if none does."""

    def fits(chunk: int) -> bool:
        sizes = Sizes.of(geometry, rows, chunk, limits.workgroups, kv=limits.kv)
        return all(plane_bytes(name, sizes) <= limits.binding_bytes for name in SCRATCH[path])

    chunk = rows
    while chunk and not fits(chunk):
        chunk -= 1
    return chunk


def fused_problem(geometry: Geometry, limits: Limits) -> str | None:
    """Why the path "fused" cannot serve a geometry on a device, None if it can."""
    for field, width in (("head_dim", geometry.head_dim), ("value_dim", geometry.value_dim or 0)):
        if width > FUSED_WIDTH:
            return f"{field}: {width}, expected at most {FUSED_WIDTH}"
    sizes = Sizes.of(geometry, kv=limits.kv)
    for name in (*STORES, "fu_part"):
        nbytes = store_bytes(name, sizes) if name in STORES else plane_bytes(name, sizes)
        if nbytes > limits.binding_bytes:
            return (
                f"{' and '.join(members(name))}: {nbytes} bytes together, the device binds at most "
                f"{limits.binding_bytes}; lower window or num_heads"
            )
    return None


def serves(path: str, geometry: Geometry, limits: Limits) -> bool:
    """Whether a path takes a geometry on a device; where scratch is short it may still raise."""
    return path != "fused" or fused_problem(geometry, limits) is None


def flash_rows(limits: Limits) -> int:
    """Rows from which "auto" takes the path "flash" for a sub-chunk."""
    return FLASH_ROWS if limits.workgroups >= FEW_WORKGROUPS else FLASH_ROWS_OF_FEW


def chunk_rows(geometry: Geometry, rows: int, path: str, limits: Limits) -> int:
    """Rows of a sub-chunk: each needs a ring slot of its own in every group, a lane of `o1c_far_e`,
    and room in the scratch planes.

    Raises `GeometryError` where the path cannot serve, with the reason.
    """
    check_state_fits(geometry, limits)
    most = min(SUB_ROWS, geometry.min_window, rows)
    if path == "fused":
        problem = fused_problem(geometry, limits)
        if problem:
            raise GeometryError(f"path {path!r} cannot serve: {problem}")
        return 1
    if path == "token" or most == 1 == rows:
        return 1
    if path in ("flash", "gemm"):
        chunk = _fitting(geometry, most, path, limits)
        if not chunk:
            sizes = Sizes.of(geometry, rows, 1, limits.workgroups, kv=limits.kv)
            try:
                for name in SCRATCH[path]:
                    check_plane(name, sizes, limits)
            except GeometryError as error:
                raise GeometryError(f"path {path!r} cannot serve: {error}") from None
        return chunk
    chunk = _fitting(geometry, most, "stages", limits)
    if path == "auto" and chunk >= flash_rows(limits):
        flash = _fitting(geometry, chunk, "flash", limits)
        # A plan has one length of sub-chunk, and its last one may be too short for tiles.
        return flash if flash >= flash_rows(limits) else chunk
    return chunk


def path_of(k: int, path: str, geometry: Geometry, chunk: int, limits: Limits) -> str:
    """The path of a sub-chunk of `k` rows, the same for its outputs and for a later commit."""
    if path != "auto":
        return path
    if k == 1:
        return "token" if fused_problem(geometry, limits) else "fused"
    fits = _fitting(geometry, chunk, "flash", limits) == chunk
    return "flash" if k >= flash_rows(limits) and fits else "stages"


@lru_cache(maxsize=256)
def block_rows(geometry: Geometry, limits: Limits, path: str = "auto") -> int:
    """Most rows of one submit: about `BLOCK_ROWS`, or what one binding holds of queries and outputs.

    Whole sub-chunks, so that a long call is cut where one plan over all its rows would be.
    """
    sizes = Sizes.of(geometry, kv=limits.kv)
    widest = max(plane_bytes(name, sizes) for name in ("q", "out", "k_rows", "v_rows"))
    rows = max(1, min(BLOCK_ROWS, limits.binding_bytes // widest))
    chunk = chunk_rows(geometry, rows, path, limits)
    return rows // chunk * chunk


def check_path(path: str) -> str:
    """`path`, or a `GeometryError` with the paths that there are."""
    if path not in PATHS:
        raise GeometryError(f"path: {path!r}, expected one of {', '.join(map(repr, PATHS))}")
    return path


def _build(
    geometry: Geometry, rows: int, commit: bool, path: str, limits: Limits, sizes: Sizes, archive: int,
    found: list[Dispatch],
) -> Plan:  # fmt: skip
    steps = with_barriers(found)
    plan = Plan(geometry, rows, commit, path, sizes.kcap, limits.workgroups, steps, archive, limits.kv)
    for name in plan.planes:
        check_plane(name, plan.sizes, limits)
    return plan


def _checked_sizes(geometry: Geometry, rows: int, path: str, limits: Limits, archive: int) -> Sizes:
    """Sizes with `chunk_rows`, once rows and archive are known to fit: before a plan of a million
    dispatches is made."""
    chunk = chunk_rows(geometry, rows, path, limits)
    sizes = Sizes.of(geometry, rows, chunk, limits.workgroups, max(1, archive), limits.kv)
    for name in ("q", "out", "k_rows", "v_rows", *ARCHIVE_PLANES):
        check_plane(name, sizes, limits)
    return sizes


@lru_cache(maxsize=256)
def _plan(
    geometry: Geometry, rows: int, commit: bool, path: str, limits: Limits, fast: bool, archive: int
) -> Plan:
    sizes = _checked_sizes(geometry, rows, path, limits, archive)
    chunk = sizes.kcap
    emit = Emitter(geometry, sizes, limits.workgroups, fast)
    found: list[Dispatch] = []
    if not commit:
        # A later commit needs the rows; the caller's buffers may be gone by then.
        found += [emit.copy(row, kept) for row, kept in KEPT_ROWS.items()]
        if rows > chunk:
            found += emit.fork()
    for r0, k in sub_chunks(rows, chunk):
        taken = path_of(k, path, geometry, chunk, limits)
        # Without a commit the last sub-chunk's state is nobody's.
        moves = commit or r0 + k < rows
        found += emit.sub_chunk(taken, k, r0, True, moves, commit and archive > 0)
    return _build(geometry, rows, commit, path, limits, sizes, archive, found)


@lru_cache(maxsize=256)
def commit_plan(
    geometry: Geometry, rows: int, path: str = "auto", limits: Limits = Limits(), archive: int = 0
) -> Plan:
    """The plan that moves the state over the first `rows` rows kept by an uncommitted call, and the
    archive with it, see `plan`."""
    archive = check_archive(archive)
    sizes = _checked_sizes(geometry, rows, path, limits, archive)
    chunk = sizes.kcap
    emit = Emitter(geometry, sizes, limits.workgroups, names=KEPT_ROWS)
    found: list[Dispatch] = []
    for r0, k in sub_chunks(rows, chunk):
        taken = path_of(k, path, geometry, chunk, limits)
        found += emit.sub_chunk(taken, k, r0, False, True, archive > 0)
    return _build(geometry, rows, True, path, limits, sizes, archive, found)


def plan(
    geometry: Geometry,
    rows: int,
    commit: bool = True,
    path: str = "auto",
    limits: Limits | None = None,
    precision: str = "exact",
    archive: int = 0,
) -> Plan:
    """The dispatches of a call over `rows` rows.

    Args:
        geometry: the layer's sizes.
        rows: rows of the call, at least 1.
        commit: whether the state moves over the rows.
        path: "fused" (a row at a time in two dispatches), "token" (in four), "flash" (chunks in tiles,
            without planes of scores), "gemm" (matrix products over the window), "stages", or "auto": each
            sub-chunk takes the one that suits its rows.
        limits: what the device grants; WebGPU's default limits if None.
        precision: "exact", or "fast" to round the products' operands to float16 where the device can.
        archive: evictions that the layer's archive holds, at least `planes.SUB_ROWS`; 0 where it has none.
            What a committed row evicts goes there, with the row's queries.

    Raises:
        GeometryError: a plane or a grid passes the limits, or the path cannot serve; names the field
            to lower.
        ArgumentError, ArgumentTypeError: `rows` is not a positive integer, `archive` none of the above.
    """
    if not isinstance(geometry, Geometry):
        raise ArgumentTypeError(f"geometry: {type(geometry).__name__}, expected a Geometry")
    rows = as_index("rows", rows, 1)
    limits = limits or Limits()
    fast = check_precision(precision) == "fast" and limits.float16
    return _plan(geometry, rows, bool(commit), check_path(path), limits, fast, check_archive(archive))


PRECISIONS: tuple[str, ...] = ("exact", "fast")


def check_precision(precision: str) -> str:
    """`precision`, or a `GeometryError` with those that there are."""
    if precision not in PRECISIONS:
        raise GeometryError(f"precision: {precision!r}, expected one of {', '.join(map(repr, PRECISIONS))}")
    return precision
