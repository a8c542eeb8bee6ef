"""The prototype's kernels compiled, its planes, and what runs over them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cortiq_o1 as o1
from cortiq_o1.gpu.timing import Stopwatch
from cortiq_o1.params import STAGE_PARAMS, params_dtype, stage_params
from cortiq_o1.planes import PLANES, STATE_PLANES, Sizes
from cortiq_o1.planning import chunk_rows, plan, sub_chunks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from flash_text import VALUE_QUADS, Shape, wgsl  # noqa: E402
from token_path import PROBE, PROBE_FLOP, PROBE_GROUPS  # noqa: E402

Params = dict[str, int | float]
Grid = tuple[int, int, int]
BINDINGS = {
    "o1f_evict": "group_meta ring_k q_tilde far_mz q k_tilde far_rows!",
    "o1f_far": "group_meta mix far_rows far_out!",
    "o1f_near": "group_meta q ring_k ring_v k_rows v_rows parts! far_rows",
    "o1f_merge": "group_meta far_out parts t_hat ring_v out!",
    "o1f_commit": "group_meta! k_rows v_rows far_rows ring_k! ring_v! far_mz! t_hat!",
}
OWN = ("far_rows", "far_out")
"""Scratch that may be each layer's own, so that the near part need not wait for the evictions."""
MOST_SLOTS = 32
RECORD_WORDS = 8
FAR_WORDS = 132


_PIPELINES: dict[tuple[int, str, Shape | None], tuple[Any, Any]] = {}


def text(name: str, shape: Shape) -> str:
    """A kernel's WGSL with its includes in place."""
    done: set[str] = set()

    def put(source: str) -> str:
        lines = []
        for line in source.splitlines():
            if line.startswith("//#include "):
                file = line.split()[1]
                if file not in done:
                    done.add(file)
                    folder = HERE if (HERE / file).is_file() else HERE.parents[1] / "shaders"
                    lines.append(put((folder / file).read_text()))
            else:
                lines.append(line)
        return "\n".join(lines) + "\n"

    return put(wgsl(shape) if name == "o1f_near" else (HERE / f"{name}.wgsl").read_text())


@dataclass(frozen=True)
class Step:
    """A dispatch: kernel, pipeline, layout, planes, parameters, grid."""

    kernel: str
    pipeline: Any
    layout: Any
    planes: tuple[str, ...]
    params: tuple[tuple[str, int | float], ...]
    grid: Grid


@dataclass(frozen=True)
class Cut:
    """How a sub-chunk's tiles are shared out: tiles of a pair of group and row tile, tiles of a workgroup,
    workgroups, parts that a row has at most."""

    per_pair: int
    per: int
    workgroups: int
    slots: int

    @classmethod
    def of(cls, geometry: o1.Geometry, shape: Shape, k: int, columns: int) -> Cut:
        """So that a workgroup takes about `columns` columns of the keys."""
        hpg = geometry.heads_per_group
        tiles = -(-hpg * k // shape.rows)
        span = 0
        for tile in range(tiles):
            low, high = tile * shape.rows, min((tile + 1) * shape.rows, hpg * k) - 1
            span = max(span, high // hpg - low // hpg)
        per_pair = -(-(geometry.sinks + geometry.window + span) // shape.keys)
        total = geometry.num_kv_heads * tiles * per_pair
        # A row's parts are those of the workgroups that its pair's tiles fall to.
        per = max(1, columns // shape.keys, -(-per_pair // (MOST_SLOTS - 1)))
        return cls(per_pair, per, -(-total // per), -(-per_pair // per) + 1)


class Bench:
    """The planes of several layers on one device, and what runs over them."""

    def __init__(
        self, device: o1.Device, geometry: o1.Geometry, rows: int, arrays: dict[str, np.ndarray],
        layers: int = 1, slots: int = MOST_SLOTS,
    ) -> None:  # fmt: skip
        self.device = device
        self.context = device.engine.context
        self.geometry, self.rows, self.layers = geometry, rows, layers
        self.chunk = chunk_rows(geometry, rows, "stages", self.context.limits)
        self.sizes = Sizes.of(geometry, rows, self.chunk, self.context.limits.workgroups)
        self.slots = slots
        self.arrays = arrays
        """State and rows; everything else is scratch."""
        self._groups: dict[Any, Any] = {}
        create = self.context.memory.create
        self.buffers: dict[str, list[Any]] = {
            name: [create(name, array.nbytes) for _ in range(layers if name in STATE_PLANES else 1)]
            for name, array in arrays.items()
        }
        s = self.sizes
        scratch = {
            "far_rows": (
                PLANES["far_rows"].nbytes(s) + 4 * RECORD_WORDS * s.ng + PLANES["land_scores"].nbytes(s)
            ),
            "far_out": 4 * FAR_WORDS * s.kcap * s.nh,
            "parts": 4 * slots * s.kcap * s.nh * (s.dv + 4),
            "out": PLANES["out"].nbytes(s),
        }
        for name, nbytes in scratch.items():
            self.buffers[name] = [create(name, nbytes) for _ in range(layers if name in OWN else 1)]
            poison = np.full(nbytes // 4, 3e18, np.float32)
            self.context.upload([(b, poison) for b in self.buffers[name]], "poison")
        self.restore()
        self.probe = None if device.software else self.context.build("o1c_copy", PROBE)
        self.probe_buffers = [create(f"probe.{side}", 1024) for side in ("src", "dst")]

    def restore(self) -> None:
        """Every layer as it was."""
        self.context.upload(
            [(b, array) for name, array in self.arrays.items() for b in self.buffers[name]], "upload"
        )

    def restore_first(self) -> None:
        """The first layer as it was."""
        self.context.upload([(self.buffers[name][0], array) for name, array in self.arrays.items()], "upload")

    def _compile(self, name: str, shape: Shape) -> tuple[Any, Any]:
        key = (id(self.context.device), name, shape if name == "o1f_near" else None)
        if key not in _PIPELINES:
            device = self.context.device
            entries: list[dict[str, Any]] = [
                {
                    "binding": 0, "visibility": 4,
                    "buffer": {"type": "uniform", "has_dynamic_offset": True, "min_binding_size": 64},
                }
            ]  # fmt: skip
            for n, word in enumerate(BINDINGS[name].split(), 1):
                kind = "storage" if word.endswith("!") else "read-only-storage"
                entries.append({"binding": n, "visibility": 4, "buffer": {"type": kind}})
            layout = device.create_bind_group_layout(label=name, entries=entries)
            module = device.create_shader_module(label=name, code=text(name, shape))
            pipeline = device.create_compute_pipeline(
                label=name,
                layout=device.create_pipeline_layout(label=name, bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": "main"},
            )
            _PIPELINES[key] = pipeline, layout
        return _PIPELINES[key]

    def steps(self, shape: Shape, columns: int, kernels: Iterable[str] = tuple(BINDINGS)) -> list[Step]:
        """The dispatches of a call, a workgroup of the near part `columns` columns of the keys."""
        found = []
        dv_tiles = -(-self.sizes.dv // (4 * VALUE_QUADS))
        for r0, k in sub_chunks(self.rows, self.chunk):
            cut = Cut.of(self.geometry, shape, k, columns)
            assert cut.slots <= self.slots, f"{cut.slots} parts a row, room for {self.slots}"
            p = stage_params(self.geometry, self.sizes, k, r0)
            p |= {"panel": cut.per_pair, "pieces": cut.per, "splits": shape.rows}
            grids: dict[str, Grid] = {
                "o1f_evict": (-(-self.sizes.m // 4), self.sizes.nh, 1),
                "o1f_far": (-(-k // 8), self.sizes.nh, 1),
                "o1f_near": (cut.workgroups, dv_tiles, 1),
                "o1f_merge": (dv_tiles, -(-k // 8), self.sizes.nh),
                "o1f_commit": (-(-max(self.sizes.d, self.sizes.dv) // 8), self.sizes.ng, 1),
            }
            for name in kernels:
                planes = tuple(word.rstrip("!") for word in BINDINGS[name].split())
                found.append(Step(name, *self._compile(name, shape), planes, tuple(p.items()), grids[name]))
        return found

    def shipped(self, path: str) -> list[Step]:
        """The dispatches of a path of the library."""
        todo = plan(self.geometry, self.rows, True, path, self.context.limits)
        found = []
        for d in todo.dispatches:
            for name in d.planes:
                if name not in self.buffers:
                    size = todo.planes[name]
                    self.buffers[name] = [self.context.memory.create(name, size)]
            found.append(Step(d.kernel, *self.context.pipeline(d.kernel), d.planes, d.params, d.grid))
        return found

    def _bound(self, step: Step, layer: int, own: bool) -> Any:
        ranges = [(self.context.parameters.buffer, 0, params_dtype(STAGE_PARAMS).itemsize)]
        for name in step.planes:
            buffers = self.buffers[name]
            buffer = buffers[0 if name in OWN and not own else layer % len(buffers)]
            ranges.append((buffer, 0, buffer.size))
        key = (id(step.layout), *(id(b) for b, _, _ in ranges))
        if key not in self._groups:
            entries = [
                {"binding": n, "resource": {"buffer": b, "offset": offset, "size": size}}
                for n, (b, offset, size) in enumerate(ranges)
            ]
            self._groups[key] = self.context.device.create_bind_group(
                label=step.kernel, layout=step.layout, entries=entries
            )
        return self._groups[key]

    def run(self, steps: Sequence[Step], own: bool, layers: int, passes: int) -> tuple[float, ...] | None:
        """Nanoseconds of each of several passes over the layers, in one submission, if they can be told."""
        context, dtype = self.context, params_dtype(STAGE_PARAMS)
        blocks = []
        for step in steps:
            block = np.zeros(1, dtype)
            for name, value in step.params:
                block[name] = value
            blocks.append(block.tobytes())
        offsets = context.parameters.place(blocks)
        groups = [[self._bound(step, layer, own) for step in steps] for layer in range(layers)]
        watch = Stopwatch(context, passes)
        encoder = context.encoder("flash")
        for number in range(passes):
            writes = watch.writes(number)
            compute_pass = encoder.begin_compute_pass(label="flash", timestamp_writes=writes)
            for layer in range(layers):
                for step, group, offset in zip(steps, groups[layer], offsets, strict=True):
                    compute_pass.set_pipeline(step.pipeline)
                    compute_pass.set_bind_group(0, group, [offset])
                    compute_pass.dispatch_workgroups(*step.grid)
            compute_pass.end()
        watch.resolve(encoder)
        context.submit(encoder, "flash")
        context.flush("flash")
        return watch.nanoseconds()

    def read(self, name: str, like: np.ndarray) -> np.ndarray:
        """A plane of the first layer."""
        got = np.empty_like(like)
        self.context.download(self.buffers[name][0], got, "read")
        return got

    def tflops(self, dispatches: int) -> float:
        """The GPU's arithmetic now, by a loop of multiply-adds: its clock, so to speak."""
        if self.probe is None:
            return 0.0
        context, (pipeline, layout) = self.context, self.probe
        (offset,) = context.parameters.place([np.array([1, 0, 0, 0], np.uint32).tobytes()])
        ranges = [(context.parameters.buffer, 0, 16), *((b, 0, b.size) for b in self.probe_buffers)]
        group = context.groups.get("probe", layout, ranges)
        watch = Stopwatch(context, 1)
        encoder = context.encoder("probe")
        compute_pass = encoder.begin_compute_pass(label="probe", timestamp_writes=watch.writes(0))
        compute_pass.set_pipeline(pipeline)
        compute_pass.set_bind_group(0, group, [offset])
        for _ in range(dispatches):
            compute_pass.dispatch_workgroups(PROBE_GROUPS)
        compute_pass.end()
        watch.resolve(encoder)
        context.submit(encoder, "probe")
        context.flush("probe")
        (spent,) = watch.nanoseconds() or (float("inf"),)
        return dispatches * PROBE_FLOP / spent / 1e3

    def time(self, steps: Sequence[Step], own: bool, passes: int, warm: int) -> dict[str, float]:
        """Microseconds of a layer, and the probe's reading before and after.

        wgpu remembers a buffer's last use within a submission: with scratch of its own a layer would wait
        in the second pass for what it did in the first, so each pass is then submitted alone.
        """
        self.run(steps, own, self.layers, 1)
        self.tflops(warm)
        before = self.tflops(8)
        if own:
            runs = [self.run(steps, own, self.layers, 1) for _ in range(passes + 2)]
            spent = [t for found in runs for t in found or (float("nan"),)]
        else:
            spent = list(self.run(steps, own, self.layers, passes + 2) or [float("nan")] * 3)
        after = self.tflops(8)
        each = [t / self.layers / 1e3 for t in spent[2:]]
        return {
            "us": statistics.median(each), "least": min(each), "most": max(each),
            "tflops_before": before, "tflops_after": after,
        }  # fmt: skip
