"""A plan: dispatches over planes, with the barriers between them; a value that knows no backend."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .arrays import as_index
from .errors import ArgumentError, CortiqError
from .geometry import Geometry
from .kernels import KERNELS, Grid
from .params import Params
from .planes import KV_BYTES, PLANES, STORES, SUB_ROWS, Plane, Sizes

FORMAT, VERSION = "cortiq-o1-plan", 1
SHADOW = "shadow."
"""Prefix of the copy of a state plane that moves in a state's stead."""


@dataclass(frozen=True)
class Dispatch:
    """One kernel over a grid of workgroups; `planes` follow the order of the kernel's bindings, and a name
    of `planes.STORES` stands for both its planes in one buffer."""

    kernel: str
    planes: tuple[str, ...]
    grid: Grid
    params: tuple[tuple[str, int | float], ...]

    def uses(self) -> Iterator[tuple[str, bool]]:
        """Each bound plane, both of a store, and whether the kernel may write it."""
        for name, binding in zip(self.planes, KERNELS[self.kernel].bindings, strict=True):
            for plane in members(name):
                yield plane, binding.access == "read_write"


@dataclass(frozen=True)
class Barrier:
    """Every dispatch before it ends before any after it starts; `planes` are why."""

    planes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A call's dispatches in order, with the barriers between them.

    `rows` rows go through in sub-chunks of at most `chunk`; `commit` says whether the state moves;
    `workgroups` is what the keys were split for; `archive` how many evictions the layer's archive holds,
    0 where it has none; `kv` how its rings are kept, "f32" or "f16".
    """

    geometry: Geometry
    rows: int
    commit: bool
    path: str
    chunk: int
    workgroups: int
    steps: tuple[Dispatch | Barrier, ...]
    archive: int = 0
    kv: str = "f32"

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
        return Sizes.of(self.geometry, self.rows, self.chunk, self.workgroups, max(1, self.archive), self.kv)

    @cached_property
    def planes(self) -> dict[str, int]:
        """Every plane the plan binds and its size in bytes, a multiple of 16."""
        names = dict.fromkeys(plane for d in self.dispatches for plane, _ in d.uses())
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
                "format": FORMAT,
                "version": VERSION,
                "geometry": self.geometry.to_dict(),
                "rows": self.rows,
                "commit": self.commit,
                "path": self.path,
                "chunk": self.chunk,
                "workgroups": self.workgroups,
                "archive": self.archive,
                "kv": self.kv,
                "planes": self.planes,
                "steps": steps,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; raises `ArgumentError` for anything else."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT or data["version"] != VERSION:
                raise ValueError(f"format {data['format']!r} version {data['version']!r}")
            sizes = {name: as_index(name, data[name], 1) for name in ("rows", "chunk", "workgroups")}
            if not isinstance(data["commit"], bool) or not isinstance(data["path"], str):
                raise ValueError(f"commit {data['commit']!r}, path {data['path']!r}")
            sizes["archive"] = check_archive(data.get("archive", 0))  # older plans have none
            kv = data.get("kv", "f32")
            if kv not in KV_BYTES:
                raise ValueError(f"kv {kv!r}")
            return cls(
                kv=kv,
                geometry=Geometry.from_dict(data["geometry"]),
                commit=data["commit"],
                path=data["path"],
                steps=tuple(_step(step) for step in data["steps"]),
                **sizes,
            )
        except (CortiqError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
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


def _plane_name(name: str) -> str:
    for plane in members(name):
        base_plane(plane)
    return name


def _step(data: dict[str, Any]) -> Dispatch | Barrier:
    """A step as `Plan.to_json` writes it; raises what is wrong with it."""
    if "barrier" in data:
        return Barrier(tuple(_plane_name(name) for name in data["barrier"]))
    kernel = KERNELS[data["kernel"]]
    planes = tuple(_plane_name(name) for name in data["planes"])
    if len(planes) != len(kernel.bindings):
        raise ValueError(f"{kernel.name}: {len(planes)} planes, expected {len(kernel.bindings)}")
    x, y, z = (as_index("grid", size, 1) for size in data["grid"])
    params = data["params"]
    if list(params) != [field.name for field in kernel.params]:
        raise ValueError(f"{kernel.name}: parameters {list(params)}")
    for name, value in params.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{kernel.name}: {name} {value!r}")
    return Dispatch(kernel.name, planes, (x, y, z), frozen(params))


def check_archive(archive: int) -> int:
    """`archive` as a plan takes it: 0 for none, else at least `SUB_ROWS`, so that the evictions of a
    sub-chunk have a slot each. Raises `ArgumentError` or `ArgumentTypeError` for anything else."""
    archive = as_index("archive", archive, 0)
    if 0 < archive < SUB_ROWS:
        raise ArgumentError(f"archive: {archive}, expected 0 or at least {SUB_ROWS}")
    return archive


def base_plane(name: str) -> Plane:
    """The declaration of a plane, also of its shadow."""
    return PLANES[name.removeprefix(SHADOW)]


def is_store(name: str) -> bool:
    """Whether a name that a dispatch binds is a store's, or a store's shadow's."""
    return name.removeprefix(SHADOW) in STORES


def members(name: str) -> tuple[str, ...]:
    """The planes of a store, also of its shadow; of a plane itself."""
    base = name.removeprefix(SHADOW)
    prefix = name.removesuffix(base)
    return tuple(prefix + plane for plane in STORES.get(base, (base,)))


def plane_bytes(name: str, sizes: Sizes) -> int:
    """Bytes to allocate for a plane: a multiple of 16, so that `o1c_copy` reaches its last word."""
    return max(16, -(-base_plane(name).nbytes(sizes) // 16) * 16)


def frozen(params: Params) -> tuple[tuple[str, int | float], ...]:
    """Parameters as a dispatch keeps them."""
    return tuple(params.items())


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
