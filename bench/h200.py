"""Every GPU figure of docs/performance.md that no command prints: floors, a token, chunks, shapes, batches.

    python bench/h200.py --device vulkan                 prints the tables as Markdown
    python bench/h200.py --device vulkan --only token shapes --json FILE

GPU time by timestamps, one layer's share of a compute pass over several layers with states of their own, so
that no cache hides memory. Contestants take turns; before each turn the GPU is loaded until its clock stands,
for an idle one reads two to five times slow. Peers run where PyTorch finds the GPU. Outputs are held against
the float64 reference before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import batches
import numpy as np
from rich.console import Console
from rich.progress import Progress
from token_path import PROBE, PROBE_FLOP, PROBE_GROUPS

import cortiq_o1 as o1
from cortiq_o1.gpu.timing import Stopwatch
from cortiq_o1.planes import (
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    MZ_MAX,
    MZ_RECENT,
    MZ_SHIFT,
    MZ_TOTAL,
    NO_FAR_LIMIT,
    PLANES,
    STATE_PLANES,
    Sizes,
)
from cortiq_o1.reference import ReferenceLayer

LLAMA = o1.Geometry(32, 8, 128, window=2048, sinks=4, landmarks=32)
MOST_BYTES = 2 << 30
"""Bytes of all layers of one contestant at most; as many layers as were asked for where they fit."""
FAR_ROWS, ROUNDS, REPEATS = 3000, 5, 5
CLOCK_STANDS = 0.98
"""Of the best reading of the probe so far: what it must read before a turn."""
TABLES = ("floors", "token", "chunks", "shapes", "batches", "peers")
READ = """
struct Params { count: u32, src_at: u32, dst_at: u32, pad0: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> src: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> dst: array<vec4<u32>>;
@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let at = (wid.y * grid.x + wid.x) * 1024u + lane;
    var x = vec4<u32>(0u);
    x += (src[at] ^ src[at + 64u]) + (src[at + 128u] ^ src[at + 192u]);
    x += (src[at + 256u] ^ src[at + 320u]) + (src[at + 384u] ^ src[at + 448u]);
    x += (src[at + 512u] ^ src[at + 576u]) + (src[at + 640u] ^ src[at + 704u]);
    x += (src[at + 768u] ^ src[at + 832u]) + (src[at + 896u] ^ src[at + 960u]);
    if (x.x == params.count && x.y == 12345u) { dst[lane] = x; }
}
"""


@dataclass(frozen=True)
class Figure:
    """Microseconds a layer: least, median and most of the turns."""

    table: str
    name: str
    least: float
    median: float
    most: float
    error: float | None = None
    bytes_read: int | None = None


class Bench:
    """One device, its clock, and what has been measured."""

    def __init__(self, device: o1.Device, progress: Progress, layers: int) -> None:
        self.device, self.context, self.progress = device, device.engine.context, progress
        self.layers = layers
        self.best = 0.0
        self.probes: list[float] = []
        self.figures: list[Figure] = []
        create = self.context.memory.create
        self._small = [create(f"probe.{side}", 1 << 20) for side in ("src", "dst")]
        self._probe = self.context.build("o1c_copy", (), PROBE)
        self._read = self.context.build("o1c_copy", (), READ)

    def group(self, built: tuple[Any, Any], src: Any, dst: Any, size: int) -> tuple[Any, Any, list[int]]:
        """Pipeline, bind group and offset of a kernel of `o1c_copy`'s bindings."""
        context, (pipeline, layout) = self.context, built
        (offset,) = context.parameters.place([np.array([1, 0, 0, 0], np.uint32).tobytes()])
        ranges = [(context.parameters.buffer, 0, 16), (src, 0, size), (dst, 0, dst.size)]
        entries = [
            {"binding": n, "resource": {"buffer": b, "offset": at, "size": nbytes}}
            for n, (b, at, nbytes) in enumerate(ranges)
        ]
        return pipeline, context.device.create_bind_group(layout=layout, entries=entries), [offset]

    def passes(self, dispatches: Sequence[tuple[Any, Any, list[int], int]], count: int) -> list[float]:
        """Seconds of each of several passes over plain dispatches `(pipeline, group, offset, workgroups)`."""
        watch = Stopwatch(self.context, count)
        encoder = self.context.encoder("bench")
        for number in range(count):
            compute_pass = encoder.begin_compute_pass(timestamp_writes=watch.writes(number))
            for pipeline, group, offset, workgroups in dispatches:
                compute_pass.set_pipeline(pipeline)
                compute_pass.set_bind_group(0, group, offset)
                # A dimension holds 65,535 at most; what lies past the buffer's end reads its last words.
                folds = -(-workgroups // 32_768)
                compute_pass.dispatch_workgroups(-(-workgroups // folds), folds)
            compute_pass.end()
        watch.resolve(encoder)
        self.context.submit(encoder, "bench")
        self.context.flush("bench")
        spent = watch.nanoseconds()
        if spent is None:
            raise SystemExit("h200: this adapter's timestamps do not work")
        return [t * 1e-9 for t in spent]

    def clock(self) -> None:
        """Loads the GPU until the probe reads what it has read at best, a second at most."""
        if self.device.software:
            return
        one = (*self.group(self._probe, *self._small, 1 << 20), PROBE_GROUPS)
        for _ in range(100):
            (spent,) = self.passes([one] * 40, 1)
            found = 40 * PROBE_FLOP / spent / 1e12
            self.best = max(self.best, found)
            if found >= CLOCK_STANDS * self.best:
                break
        self.probes.append(found)

    def turns(self, table: str, contestants: dict[str, Callable[[], float]], **more: Any) -> None:
        """Lets contestants, each of which gives its seconds a layer, take turns."""
        times: dict[str, list[float]] = {name: [] for name in contestants}
        task = self.progress.add_task(table, total=ROUNDS * len(contestants))
        for _ in range(ROUNDS):
            for name, run in contestants.items():
                self.clock()
                times[name].append(1e6 * run())
                self.progress.advance(task)
        for name, found in times.items():
            own = {key: values.get(name) for key, values in more.items()}
            self.figures.append(Figure(table, name, min(found), statistics.median(found), max(found), **own))

    def plan(self, residents: Sequence[Any], rows: int, path: str = "auto") -> Callable[[], float]:
        """Seconds a layer of a call on these residents."""
        engine = o1.open_device(self.device.gpu, path, kv=residents[0].kv).engine
        for one in residents:
            one.forget()

        def run() -> float:
            timing = engine.time_plan(list(residents), rows, True, REPEATS)
            return statistics.median(timing.seconds) / len(residents)

        return run


def filled(geometry: o1.Geometry, seed: int) -> dict[str, np.ndarray]:
    """State planes of a layer with a full ring and a far field in use; numbers of the right size."""
    rng = np.random.default_rng(seed)
    sizes = Sizes.of(geometry)
    planes = {
        name: rng.standard_normal(PLANES[name].dims(sizes), np.float32)
        if PLANES[name].dtype == np.float32
        else np.zeros(PLANES[name].dims(sizes), np.uint32)
        for name in STATE_PLANES
    }
    meta = planes["group_meta"]
    meta[:, META_LEN] = meta[:, META_WINDOW] = geometry.group_windows
    meta[:, META_HEAD] = geometry.window // 3
    meta[:, META_FAR_LEN], meta[:, META_FAR_LIMIT] = FAR_ROWS, NO_FAR_LIMIT
    meta[:, META_LANDMARKS] = geometry.landmarks
    planes["mix"] *= 0.1
    planes["far_mz"][:, MZ_MAX] = (2 * np.log(FAR_ROWS)) ** 0.5
    planes["far_mz"][:, MZ_TOTAL] = FAR_ROWS * np.exp(0.5 - planes["far_mz"][:, MZ_MAX])
    planes["far_mz"][:, MZ_RECENT] = 0
    planes["far_mz"][:, MZ_SHIFT] = planes["far_mz"][:, MZ_SHIFT, :1]
    return planes


def layers_of(bench: Bench, geometry: o1.Geometry, kv: str = "f32") -> list[Any]:
    """Residents with states of their own, of the same numbers."""
    planes = filled(geometry, 0)
    nbytes = sum(plane.nbytes for plane in planes.values())
    count = max(2, min(bench.layers, MOST_BYTES // nbytes))
    engine = o1.open_device(bench.device.gpu, kv=kv).engine
    return [engine.upload(geometry, planes) for _ in range(count)]


def worst_error(bench: Bench, geometry: o1.Geometry, rows: int, path: str, kv: str = "f32") -> float:
    """The largest difference from the float64 reference, which rounds nothing, over a layer's outputs."""
    rng = np.random.default_rng(1)
    planes = filled(geometry, 0)
    new = [
        rng.standard_normal((rows, heads, width), np.float32)
        for heads, width in (
            (geometry.num_heads, geometry.head_dim), (geometry.num_kv_heads, geometry.head_dim),
            (geometry.num_kv_heads, geometry.value_dim or 0),
        )
    ]  # fmt: skip
    engine = o1.open_device(bench.device.gpu, path, kv=kv).engine
    got = engine.attend(engine.upload(geometry, planes), *new, True)
    want = ReferenceLayer.from_planes(geometry, planes).run(*new)
    return max(float(np.abs(out - row.out).max()) for out, row in zip(got, want, strict=True))


def window_bytes(geometry: o1.Geometry) -> int:
    """Bytes of a layer's sinks and ring."""
    sizes = Sizes.of(geometry)
    return PLANES["ring_k"].nbytes(sizes) + PLANES["ring_v"].nbytes(sizes)


def floors(bench: Bench, geometry: o1.Geometry, layers: int) -> dict[str, Callable[[], float]]:
    """A dispatch that only reads so many bytes, one that does next to nothing, and both in turn."""
    size = window_bytes(geometry) // 16384 * 16384
    buffers = [bench.context.memory.create("floor", size) for _ in range(layers)]
    small = bench.context.memory.create("floor.out", 1 << 20)
    reads = [(*bench.group(bench._read, b, small, size), size // 16384) for b in buffers]
    tiny = (*bench.group(bench._read, bench._small[0], small, 1 << 20), 32)

    def run(each: Sequence[Sequence[Any]]) -> Callable[[], float]:
        flat = [dispatch for one in each for dispatch in one]
        return lambda: statistics.median(bench.passes(flat, REPEATS)) / layers

    return {
        "read the window": run([[read] for read in reads]),
        "a dependent dispatch that does next to nothing": run([[tiny]] * layers),
        "read the window, then such a one": run([[read, tiny] for read in reads]),
    }


def measure(bench: Bench, tables: Sequence[str]) -> dict[str, Any]:
    """All tables asked for; returns what is no figure."""
    more: dict[str, Any] = {}
    if "floors" in tables:
        bench.turns("floors", floors(bench, LLAMA, bench.layers))
    if "token" in tables:
        own, shared = layers_of(bench, LLAMA), layers_of(bench, LLAMA)
        run = bench.plan(shared, 1)
        run()
        for one in shared[1:]:  # each layer then waits for the one before
            one.buffers["fu_part"] = shared[0].buffers["fu_part"]
        halves = layers_of(bench, LLAMA, "f16")
        errors = {name: worst_error(bench, LLAMA, 1, name) for name in ("auto", "token")}
        f16 = worst_error(bench, LLAMA, 1, "auto", "f16")
        bench.turns(
            "token",
            {
                "fused": bench.plan(own, 1),
                "fused, each layer waits for the one before": bench.plan(shared, 1),
                "token": bench.plan(own, 1, "token"),
                "fused, windows in float16": bench.plan(halves, 1),
            },
            error={"fused": errors["auto"], "token": errors["token"], "fused, windows in float16": f16},
        )
    if "chunks" in tables:
        own, halves = layers_of(bench, LLAMA), layers_of(bench, LLAMA, "f16")
        paths = {f"{path}, {rows} rows": (rows, path) for rows in (16, 64, 128) for path in ("flash", "gemm")}
        runs = {name: bench.plan(own, *which) for name, which in paths.items()}
        runs["flash, 64 rows, windows in float16"] = bench.plan(halves, 64)
        bench.turns("chunks", runs)
    if "shapes" in tables:
        for geometry, name in shapes():
            own = layers_of(bench, geometry)
            both = floors(bench, geometry, len(own))
            label = "read the window, then such a one"
            read = {name: window_bytes(geometry), f"{name}: floor": window_bytes(geometry)}
            runs = {name: bench.plan(own, 1), f"{name}: floor": both[label]}
            bench.turns("shapes", runs, bytes_read=read)
    if "batches" in tables:
        for count in (1, 2, 4, 8, 16, 32, 64):
            residents = batches.residents_of(bench.device, LLAMA, count)
            nbytes = count * batches.token_bytes(LLAMA)
            name = f"{count} sequence" + ("s" if count > 1 else "")
            reads = floors(bench, LLAMA.batch(count), len(residents))["read the window"]
            runs = {name: bench.plan(residents, 1), f"{name}: floor": reads}
            read = {name: nbytes, f"{name}: floor": window_bytes(LLAMA.batch(count))}
            bench.turns("batches", runs, bytes_read=read)
    if "peers" in tables:
        more |= torch_peers()
    return more


def shapes() -> list[tuple[o1.Geometry, str]]:
    """Windows, widths and heads a group whose bytes exceed 8 MB."""
    found = []
    for window, d, heads in (
        (1024, 128, 4), (2048, 128, 4), (4096, 128, 4), (8192, 128, 4), (16384, 128, 4), (4096, 64, 4),
        (4096, 96, 4), (2048, 256, 4), (4096, 128, 1), (4096, 128, 2), (4096, 128, 6), (4096, 128, 8),
    ):  # fmt: skip
        geometry = o1.Geometry(8 * heads, 8, d, window=window, sinks=4, landmarks=32)
        found.append((geometry, f"window {window}, width {d}, {heads} heads a group"))
    return found


def torch_peers() -> dict[str, Any]:
    """PyTorch on the same GPU, where there is one."""
    try:
        import h200_torch
        import torch
    except ImportError as error:
        return {"peers": [], "no_peers": str(error)}
    if not torch.cuda.is_available():
        return {"peers": [], "no_peers": "PyTorch finds no GPU"}
    rows = [
        {"name": name, "rows": rows, "keys": keys, "us": us}
        for name, rows, keys, us in h200_torch.peers(LLAMA)
    ]
    return {"torch": h200_torch.machine(), "peers": rows}


def tell(bench: Bench, more: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines: list[str] = []
    for table in dict.fromkeys(f.table for f in bench.figures if f.table not in ("shapes", "batches")):
        lines += [f"**{table}**", "", "| | us a layer | least to most | error |", "|---|---|---|---|"]
        for f in (f for f in bench.figures if f.table == table):
            error = "" if f.error is None else f"{f.error:.1e}"
            lines.append(f"| {f.name} | {f.median:.2f} | {f.least:.2f} to {f.most:.2f} | {error} |")
        lines.append("")
    for table in ("shapes", "batches"):
        pace = {f.name: f for f in bench.figures if f.table == table}
        if pace:
            lines += ["| | us | floor | times the floor | TB/s |", "|---|---|---|---|---|"]
        for name, f in pace.items():
            floor = pace.get(f"{name}: floor")
            if floor is not None and f.bytes_read is not None:
                speed = f.bytes_read / f.median / 1e6
                lines.append(
                    f"| {name} | {f.median:.1f} | {floor.median:.1f} | {f.median / floor.median:.2f} "
                    f"| {speed:.2f} |"
                )
        lines.append("")
    if more.get("peers"):
        lines += [f"| {more['torch']} | rows | keys | us a layer |", "|---|---|---|---|"]
        lines += [f"| {p['name']} | {p['rows']} | {p['keys']} | {p['us']:.1f} |" for p in more["peers"]]
        lines.append("")
    if bench.probes:
        lines.append(
            f"Multiply-adds before the turns: {min(bench.probes):.1f} to {max(bench.probes):.1f} TFLOP/s."
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="TABLE")
    parser.add_argument("--layers", type=int, default=32, help="of a contestant (32)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    given = parser.parse_args()
    device = o1.open_device(given.device)
    if device.gpu is None:
        print("h200: needs a GPU; bench/cpu.py measures NumPy", file=sys.stderr)
        return 2
    with Progress(console=Console(stderr=True)) as progress:
        bench = Bench(device, progress, given.layers)
        more: dict[str, Any] = {}
        try:
            more = measure(bench, given.only)
        except KeyboardInterrupt:
            print("h200: stopped; what has been measured follows", file=sys.stderr)
    print(f"{device.name}, {device.backend}\n\n{tell(bench, more)}")
    if given.json:
        found = {"device": device.info(), "figures": [asdict(f) for f in bench.figures], **more}
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
