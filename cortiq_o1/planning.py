"""Geometry and rows in, a plan out: which kernels run on which planes, in what order, where to wait.

The planner knows no backend. A plan is a value: frozen, hashable, printable, cached, and it goes
through JSON unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from .arrays import as_index
from .errors import ArgumentError, GeometryError
from .geometry import Geometry
from .kernels import (
    KERNELS,
    MAX_GRID,
    MAX_LOOP_STEPS,
    MAX_PIECES,
    MOVING_PLANES,
    PLANES,
    SUB_ROWS,
    Grid,
    Params,
    Plane,
    Sizes,
    stage_params,
)

Path = Literal["auto", "stages"]
PATHS: tuple[str, ...] = ("auto", "stages")

SHADOW = "shadow."
"""Prefix of the copy of a state plane that moves in a state's stead."""

BLOCK_ROWS = 256
"""Rows of one submit: bounds the time a device is busy without an answer, and the row planes."""


@dataclass(frozen=True)
class Limits:
    """What a device grants, WebGPU's defaults unless said.

    `binding_bytes`: the largest range one binding may see.
    """

    binding_bytes: int = 128 << 20


@dataclass(frozen=True)
class Dispatch:
    """One kernel over a grid of workgroups; `planes` follow the order of the kernel's bindings."""

    kernel: str
    planes: tuple[str, ...]
    grid: Grid
    params: tuple[tuple[str, int | float], ...]

    def uses(self) -> Iterator[tuple[str, bool]]:
        """Each bound plane, and whether the kernel may write it."""
        for plane, binding in zip(self.planes, KERNELS[self.kernel].bindings, strict=True):
            yield plane, binding.access == "read_write"


@dataclass(frozen=True)
class Barrier:
    """Every dispatch before it ends before any after it starts; `planes` are why."""

    planes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A call's dispatches in order, with the barriers between them.

    `rows` rows go through in sub-chunks of at most `chunk`; `commit` says whether the state moves.
    """

    geometry: Geometry
    rows: int
    commit: bool
    path: str
    chunk: int
    steps: tuple[Dispatch | Barrier, ...]

    @cached_property
    def dispatches(self) -> tuple[Dispatch, ...]:
        """The dispatches alone."""
        return tuple(s for s in self.steps if isinstance(s, Dispatch))

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """The barriers alone."""
        return tuple(s for s in self.steps if isinstance(s, Barrier))

    @cached_property
    def sizes(self) -> Sizes:
        """What the symbols of the planes' shapes stand for."""
        return Sizes.of(self.geometry, self.rows, self.chunk)

    @cached_property
    def planes(self) -> dict[str, int]:
        """Every plane the plan binds and its size in bytes, a multiple of 16."""
        names = dict.fromkeys(name for d in self.dispatches for name in d.planes)
        return {name: plane_bytes(name, self.sizes) for name in names}

    def stages(self) -> list[list[Dispatch]]:
        """The dispatches between two barriers, in groups that may run in any order."""
        found: list[list[Dispatch]] = [[]]
        for step in self.steps:
            if isinstance(step, Barrier):
                found.append([])
            else:
                found[-1].append(step)
        return found

    def to_json(self) -> str:
        """The plan as text that `from_json` reads back to an equal plan, and a browser can run."""
        steps: list[dict[str, Any]] = []
        for step in self.steps:
            if isinstance(step, Barrier):
                steps.append({"barrier": list(step.planes)})
            else:
                steps.append(
                    {
                        "kernel": step.kernel,
                        "planes": list(step.planes),
                        "grid": list(step.grid),
                        "params": dict(step.params),
                    }
                )
        return json.dumps(
            {
                "format": "cortiq-o1-plan",
                "version": 1,
                "geometry": self.geometry.to_dict(),
                "rows": self.rows,
                "commit": self.commit,
                "path": self.path,
                "chunk": self.chunk,
                "planes": self.planes,
                "steps": steps,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; raises `ArgumentError` for anything else."""
        try:
            data = json.loads(text)
            if data["format"] != "cortiq-o1-plan" or data["version"] != 1:
                raise ValueError(f"format {data['format']!r} version {data['version']!r}")
            steps = tuple(
                Barrier(tuple(s["barrier"]))
                if "barrier" in s
                else Dispatch(
                    s["kernel"],
                    tuple(s["planes"]),
                    (s["grid"][0], s["grid"][1], s["grid"][2]),
                    _frozen(s["params"]),
                )
                for s in data["steps"]
            )
            geometry = Geometry.from_dict(data["geometry"])
            return cls(geometry, data["rows"], data["commit"], data["path"], data["chunk"], steps)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ArgumentError(f"plan: not a plan of this version: {error}") from error

    def __str__(self) -> str:
        lines = [
            f"{self.rows} rows in sub-chunks of {self.chunk}, path {self.path}, "
            f"{'commits' if self.commit else 'leaves the state'}: "
            f"{len(self.dispatches)} dispatches, {len(self.barriers)} barriers"
        ]
        for step in self.steps:
            if isinstance(step, Barrier):
                lines.append(f"-- barrier: {', '.join(step.planes)}")
            else:
                uses = " ".join(name + ("!" if writes else "") for name, writes in step.uses())
                lines.append(f"{step.kernel:<16} {'x'.join(map(str, step.grid)):<12} {uses}")
        return "\n".join(lines)


def base_plane(name: str) -> Plane:
    """The declaration of a plane, also of its shadow."""
    return PLANES[name.removeprefix(SHADOW)]


def plane_bytes(name: str, sizes: Sizes) -> int:
    """Bytes to allocate for a plane: a multiple of 16, so that `o1c_copy` reaches its last word."""
    return max(16, -(-base_plane(name).nbytes(sizes) // 16) * 16)


def _frozen(params: Params) -> tuple[tuple[str, int | float], ...]:
    return tuple(params.items())


def _dispatch(kernel: str, planes: Iterable[str], params: Params) -> Dispatch:
    grid = KERNELS[kernel].grid(params)
    for size in grid:
        if size > MAX_GRID:
            raise GeometryError(
                f"num_heads: {kernel} needs a grid of {grid}, WebGPU grants {MAX_GRID} workgroups a "
                "dimension; lower num_heads or split the batch"
            )
    return Dispatch(kernel, tuple(planes), grid, _frozen(params))


def with_barriers(dispatches: Iterable[Dispatch]) -> tuple[Dispatch | Barrier, ...]:
    """The dispatches with a barrier wherever one reads or overwrites what an earlier one wrote, or
    writes what an earlier one reads, unless a barrier already stands between the two."""
    steps: list[Dispatch | Barrier] = []
    read: set[str] = set()
    written: set[str] = set()
    for dispatch in dispatches:
        uses = list(dispatch.uses())
        conflicts = tuple(p for p, writes in uses if p in written or (writes and p in read))
        if conflicts:
            steps.append(Barrier(conflicts))
            read.clear()
            written.clear()
        steps.append(dispatch)
        for plane, writes in uses:
            (written if writes else read).add(plane)
    return tuple(steps)


class _Stages:
    """Emits the stages of one sub-chunk after another on the state, or on its shadow."""

    def __init__(self, geometry: Geometry, sizes: Sizes, rows_from: dict[str, str] | None = None) -> None:
        self.geometry = geometry
        self.sizes = sizes
        self.names = dict(rows_from or {})

    def emit(self, kernel: str, k: int, r0: int) -> Dispatch:
        planes = [self.names.get(b.name, b.name) for b in KERNELS[kernel].bindings]
        return _dispatch(kernel, planes, stage_params(self.geometry, self.sizes, k, r0))

    def copy(self, source: str, target: str) -> Dispatch:
        count = plane_bytes(source, self.sizes) // 16
        return _dispatch("o1c_copy", (source, target), {"count": count, "src_at": 0, "dst_at": 0, "pad0": 0})

    def fork(self) -> Iterator[Dispatch]:
        """Copies what moves, and lets everything after run on the copy."""
        for name in MOVING_PLANES:
            yield self.copy(name, SHADOW + name)
            self.names[name] = SHADOW + name

    def attend(self, k: int, r0: int) -> Iterator[Dispatch]:
        for kernel in (
            "o1c_far_e", "o1c_score", "o1c_land", "o1c_max", "o1c_far", "o1c_soft", "o1c_sum", "o1c_add",
        ):  # fmt: skip
            yield self.emit(kernel, k, r0)

    def commit(self, k: int, r0: int) -> Iterator[Dispatch]:
        for kernel in ("o1c_far_commit", "o1c_ring_commit", "o1c_meta"):
            yield self.emit(kernel, k, r0)


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


def check_state_fits(geometry: Geometry, limits: Limits) -> None:
    """Raises `GeometryError` where a layer of this geometry cannot live on a device."""
    sizes = Sizes.of(geometry)
    if sizes.near > MAX_PIECES * MAX_LOOP_STEPS:
        raise GeometryError(
            f"window: {geometry.window} and {geometry.sinks} sinks, a kernel sums at most "
            f"{MAX_PIECES * MAX_LOOP_STEPS} keys; lower window"
        )
    for plane in PLANES.values():
        if plane.role in ("state", "scratch"):
            check_plane(plane.name, sizes, limits)


def chunk_rows(geometry: Geometry, rows: int, limits: Limits) -> int:
    """Rows of a sub-chunk: each needs a ring slot of its own in every group, a lane of `o1c_far_e`,
    and room in the scratch planes."""
    check_state_fits(geometry, limits)
    chunk = min(SUB_ROWS, geometry.min_window, rows)
    scratch = [p.name for p in PLANES.values() if p.role == "scratch"]
    while chunk > 1 and any(
        plane_bytes(name, Sizes.of(geometry, rows, chunk)) > limits.binding_bytes for name in scratch
    ):
        chunk -= 1
    return chunk


@lru_cache(maxsize=256)
def block_rows(geometry: Geometry, limits: Limits) -> int:
    """Most rows of one submit: about `BLOCK_ROWS`, or what one binding holds of queries and outputs.

    Whole sub-chunks, so that a long call is cut where one plan over all its rows would be.
    """
    sizes = Sizes.of(geometry)
    widest = max(plane_bytes(name, sizes) for name in ("q", "out", "k_rows", "v_rows"))
    rows = max(1, min(BLOCK_ROWS, limits.binding_bytes // widest))
    chunk = chunk_rows(geometry, rows, limits)
    return rows // chunk * chunk


def _resolve(path: str) -> str:
    if path not in PATHS:
        raise GeometryError(f"path: {path!r}, expected one of {', '.join(map(repr, PATHS))}")
    return "stages" if path == "auto" else path


def _build(
    geometry: Geometry,
    rows: int,
    commit: bool,
    path: str,
    limits: Limits,
    chunk: int,
    dispatches: list[Dispatch],
) -> Plan:
    plan = Plan(geometry, rows, commit, path, chunk, with_barriers(dispatches))
    for name in plan.planes:
        check_plane(name, plan.sizes, limits)
    return plan


@lru_cache(maxsize=256)
def _plan(geometry: Geometry, rows: int, commit: bool, path: str, limits: Limits) -> Plan:
    chunk = chunk_rows(geometry, rows, limits)
    stages = _Stages(geometry, Sizes.of(geometry, rows, chunk))
    found: list[Dispatch] = []
    if not commit:
        # A later commit needs the rows; the caller's buffers may be gone by then.
        found += [stages.copy("k_rows", "spec_k"), stages.copy("v_rows", "spec_v")]
        if rows > chunk:
            found += stages.fork()
    for r0, k in sub_chunks(rows, chunk):
        found += stages.attend(k, r0)
        # Without a commit the last sub-chunk's state is nobody's.
        if commit or r0 + k < rows:
            found += stages.commit(k, r0)
    return _build(geometry, rows, commit, path, limits, chunk, found)


@lru_cache(maxsize=256)
def commit_plan(geometry: Geometry, rows: int, limits: Limits = Limits()) -> Plan:
    """The plan that moves the state over the first `rows` rows kept by an uncommitted call."""
    chunk = chunk_rows(geometry, rows, limits)
    stages = _Stages(geometry, Sizes.of(geometry, rows, chunk), {"k_rows": "spec_k", "v_rows": "spec_v"})
    found: list[Dispatch] = []
    for r0, k in sub_chunks(rows, chunk):
        found.append(stages.emit("o1c_far_e", k, r0))
        found += stages.commit(k, r0)
    return _build(geometry, rows, True, "stages", limits, chunk, found)


def plan(
    geometry: Geometry, rows: int, commit: bool = True, path: str = "auto", limits: Limits | None = None
) -> Plan:
    """The dispatches of a call over `rows` rows.

    Args:
        geometry: the layer's sizes.
        rows: rows of the call, at least 1.
        commit: whether the state moves over the rows.
        path: "stages", or "auto" to let the planner choose.
        limits: what the device grants; WebGPU's default limits if None.

    Raises:
        GeometryError: a plane or a grid passes the limits; names the field to lower.
        ArgumentError, ArgumentTypeError: `rows` is not a positive integer.
    """
    rows = as_index("rows", rows, 1)
    return _plan(geometry, rows, bool(commit), _resolve(path), limits or Limits())
