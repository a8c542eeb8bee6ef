"""GPU time of the token path's kernels, alone and one after the other as a token takes them.

Every layer has a state of its own, so that keys and values come from memory, and all layers run in one
compute pass with timestamps at its ends. The kernels of a row hand each other two planes of scratch. What
all layers share makes a layer wait for the one before it, and wgpu makes one kernel wait for another over
a plane that merely changes hands; hence the orders, and the scratch of each layer's own, beside the plan's.

    python bench/token_path.py                                   the best GPU
    python bench/token_path.py --workgroups 132 264 528          how finely the keys are split
    python bench/token_path.py --variants                        other workgroup shapes beside the shipped

Outputs and state are compared with the kernels' NumPy twins before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cortiq_o1 as o1
from cortiq_o1.cpu.twins import TWINS
from cortiq_o1.gpu import shaders
from cortiq_o1.gpu.recording import pack
from cortiq_o1.gpu.timing import Stopwatch
from cortiq_o1.kernels import KERNELS, Grid
from cortiq_o1.params import stage_params
from cortiq_o1.paths import ATTEND, COMMIT
from cortiq_o1.planes import (
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    MZ_MAX,
    MZ_RECENT,
    MZ_TOTAL,
    NO_FAR_LIMIT,
    PLANES,
    Sizes,
)

FAR, NEAR, MERGE, COMMITS = "o1c_tok_far", "o1c_tok_near", "o1c_tok_merge", "o1c_tok_commit"
TOKEN = (FAR, NEAR, MERGE, COMMITS)
SCRATCH = ("tok_part", "tok_record")
FAR_ROWS = 3000
"""Past this many rows a new far maximum is as rare as in a long stream, and still happens."""
PROBE_GROUPS, PROBE_STEPS, WARM_PROBES = 16_384, 256, 400
PROBE = f"""
struct Params {{ count: u32, src_at: u32, dst_at: u32, pad0: u32 }}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> src: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> dst: array<vec4<u32>>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
    let x = bitcast<vec4<f32>>(src[0]) + f32(id.x);
    var a = x; var b = x + 1.0; var c = x + 2.0; var e = x + 3.0;
    for (var i = 0u; i < {PROBE_STEPS}u; i++) {{
        a = fma(a, x, x); b = fma(b, x, x); c = fma(c, x, x); e = fma(e, x, x);
        a = fma(a, x, x); b = fma(b, x, x); c = fma(c, x, x); e = fma(e, x, x);
    }}
    if (params.count == 0u) {{ dst[0] = bitcast<vec4<u32>>(a + b + c + e); }}
}}
"""
PROBE_FLOP = PROBE_GROUPS * 64 * PROBE_STEPS * 8 * 4 * 2.0


@dataclass(frozen=True)
class Text:
    """A kernel to time: its label, its pipeline and layout, its grid."""

    label: str
    kernel: str
    pipeline: Any
    layout: Any
    grid: Grid


@dataclass(frozen=True)
class Order:
    """Kernels of a layer in order, and which scratch is each layer's own."""

    label: str
    kernels: tuple[str, ...]
    own: tuple[str, ...] = ()


ORDERS = (
    Order("as planned", (*ATTEND["token"], *COMMIT["token"])),
    Order("near first", (NEAR, FAR, MERGE, COMMITS)),
    Order("near first, own record", (NEAR, FAR, MERGE, COMMITS), ("tok_record",)),
    Order("far first, own record", (FAR, NEAR, MERGE, COMMITS), ("tok_record",)),
    Order("far first, own scratch", (FAR, NEAR, MERGE, COMMITS), SCRATCH),
    Order("no commit", (FAR, NEAR, MERGE)),
    Order("no commit, near first, own record", (NEAR, FAR, MERGE), ("tok_record",)),
    Order("near and merge", (NEAR, MERGE)),
    *(Order(f"{kernel} alone", (kernel,)) for kernel in TOKEN),
    Order(f"{NEAR} alone, own scratch", (NEAR,), SCRATCH),
    Order(f"{FAR} alone, own scratch", (FAR,), SCRATCH),
)


def filled_planes(geometry: o1.Geometry, sizes: Sizes) -> dict[str, np.ndarray]:
    """A layer with a full ring and a far field in use, and a row; numbers of the right size."""
    rng = np.random.default_rng(3)
    names = dict.fromkeys(b.name for kernel in TOKEN for b in KERNELS[kernel].bindings)
    planes = {}
    for name in names:
        shape = PLANES[name].dims(sizes)
        if PLANES[name].dtype == np.float32:
            planes[name] = rng.standard_normal(shape, np.float32)
        else:
            planes[name] = np.zeros(shape, np.uint32)
    meta = planes["group_meta"]
    meta[:, META_LEN] = meta[:, META_WINDOW] = geometry.group_windows
    meta[:, META_HEAD] = geometry.min_window // 3
    meta[:, META_FAR_LEN] = FAR_ROWS
    meta[:, META_FAR_LIMIT] = NO_FAR_LIMIT
    meta[:, META_LANDMARKS] = geometry.landmarks
    planes["mix"] *= 0.1
    # Logits are about normal, so is the largest of them known.
    planes["far_mz"][:, MZ_MAX] = (2 * np.log(FAR_ROWS)) ** 0.5
    planes["far_mz"][:, MZ_TOTAL] = FAR_ROWS * np.exp(0.5 - planes["far_mz"][:, MZ_MAX])
    planes["far_mz"][:, MZ_RECENT] = 0
    return planes


class Bench:
    """The planes of several layers on one device, and what runs over them."""

    def __init__(self, device: o1.Device, geometry: o1.Geometry, layers: int, workgroups: int) -> None:
        self.context = device.engine.context
        sizes = Sizes.of(geometry, workgroups=workgroups)
        self.p = stage_params(geometry, sizes, 1, 0, sizes.splits)
        self.layers = layers
        self.arrays = filled_planes(geometry, sizes)
        create = self.context.memory.create
        shared = {name for name in self.arrays if PLANES[name].role == "rows"}
        self.buffers = {
            name: [create(name, array.nbytes) for _ in range(1 if name in shared else layers)]
            for name, array in self.arrays.items()
        }
        self.restore()
        self.probe = None if device.software else self.context.build("o1c_copy", PROBE)
        self.probe_buffers = [create(f"probe.{side}", 1024) for side in ("src", "dst")]

    def restore(self) -> None:
        """Every layer as it was."""
        pairs = [(buffer, self.arrays[name]) for name, found in self.buffers.items() for buffer in found]
        self.context.upload(pairs, "upload")

    def text(self, kernel: str, changes: Sequence[tuple[str, int]] = ()) -> Text:
        """A kernel as shipped, or with other constants; `changes` has the grid's `x` under "grid"."""
        source, grid = shaders.source(kernel), KERNELS[kernel].grid(self.p)
        for name, value in changes:
            if name == "grid":
                grid = (value, *grid[1:])
                continue
            source, count = re.subn(rf"\bconst {name}: u32 = \d+u;", f"const {name}: u32 = {value}u;", source)
            assert count == 1, name
        label = ", ".join(f"{n} {v}" for n, v in changes if n != "grid") or "shipped"
        return Text(label, kernel, *self.context.build(kernel, source), grid)

    def _steps(self, texts: Sequence[Text], own: Iterable[str], layers: int) -> list[tuple[Text, Any]]:
        found = []
        for layer in range(layers):
            for text in texts:
                ranges = [(self.context.parameters.buffer, 0, KERNELS[text.kernel].params_dtype.itemsize)]
                for b in KERNELS[text.kernel].bindings:
                    shared = b.name in SCRATCH and b.name not in own
                    buffers = self.buffers[b.name]
                    buffer = buffers[0 if shared else layer % len(buffers)]
                    ranges.append((buffer, 0, buffer.size))
                found.append((text, self.context.groups.get(text.kernel, text.layout, ranges)))
        return found

    def _record(self, compute_pass: Any, steps: list[tuple[Text, Any]], offset: int) -> None:
        for text, group in steps:
            compute_pass.set_pipeline(text.pipeline)
            compute_pass.set_bind_group(0, group, [offset])
            compute_pass.dispatch_workgroups(*text.grid)

    def run(self, texts: Sequence[Text], own: Iterable[str], layers: int, passes: int) -> list[float]:
        """Nanoseconds of each of several passes over the layers, in one submission."""
        context = self.context
        (offset,) = context.parameters.place([pack(texts[0].kernel, tuple(self.p.items()))])
        steps = self._steps(texts, own, layers)
        watch = Stopwatch(context, passes)
        encoder = context.encoder("token")
        for number in range(passes):
            compute_pass = encoder.begin_compute_pass(label="token", timestamp_writes=watch.writes(number))
            self._record(compute_pass, steps, offset)
            compute_pass.end()
        watch.resolve(encoder)
        context.submit(encoder, "token")
        context.flush("token")
        spent = watch.nanoseconds()
        if spent is None:
            raise SystemExit("this adapter's timestamps do not work")
        return list(spent)

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

    def time(self, texts: Sequence[Text], own: Iterable[str], passes: int) -> dict[str, float]:
        """Microseconds of a layer, and the probe's reading before and after.

        An idle GPU computes at a low clock for a while, hence the load before; the first passes fill
        what caches there are and are left out.
        """
        self.run(texts, own, self.layers, 1)
        self.tflops(WARM_PROBES)
        before = self.tflops(8)
        spent = self.run(texts, own, self.layers, passes + 2)[2:]
        after = self.tflops(8)
        each = [t / self.layers / 1e3 for t in spent]
        return {
            "us": statistics.median(each), "least": min(each), "most": max(each),
            "tflops_before": before, "tflops_after": after,
        }  # fmt: skip

    def errors(self, texts: Sequence[Text]) -> dict[str, float]:
        """Worst differences from the twins after a row, relative to the plane's largest number."""
        self.restore()
        self.run(texts, (), 1, 1)
        want = {name: array.copy() for name, array in self.arrays.items()}
        for kernel in TOKEN:
            TWINS[kernel](
                self.p, KERNELS[kernel].grid(self.p), *(want[b.name] for b in KERNELS[kernel].bindings)
            )
        found = {}
        for name in ("out", "group_meta", "ring_k", "ring_v", "far_mz", "t_hat"):
            got = np.empty_like(want[name])
            self.context.download(self.buffers[name][0], got, "read")
            difference = np.abs(got.astype(np.float64) - want[name])
            found[name] = float(difference.max() / max(1.0, float(np.abs(want[name]).max())))
        self.restore()
        return found


def variants(bench: Bench) -> list[Text]:
    """Other workgroup shapes that the texts allow by their constants alone."""
    width = int(max(bench.p["d"], bench.p["dv"])) // 4
    found = [bench.text(FAR, [("FAR_LANES", 128)])]
    for lanes, columns in ((256, 4), (256, 8), (128, 2), (128, 4), (64, 1)):
        grid = -(-width // columns)
        changes = [("COMMIT_LANES", lanes), ("COMMIT_COLUMNS", columns), ("grid", grid)]
        found.append(bench.text(COMMITS, changes))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto", help="as for open_device")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--landmarks", type=int, default=32)
    parser.add_argument("--workgroups", type=int, nargs="+", default=[132, 264, 528], metavar="N")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--passes", type=int, default=9, help="timed passes (9)")
    parser.add_argument("--variants", action="store_true", help="other workgroup shapes too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    geometry = o1.Geometry(
        args.heads, args.groups, args.dim, window=args.window, sinks=args.sinks, landmarks=args.landmarks
    )
    device = o1.open_device(args.device)
    if device.gpu is None:
        raise SystemExit("no GPU; name an adapter with --device")
    results: list[dict[str, Any]] = []

    def say(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    def report(bench: Bench, what: str, label: str, texts: Sequence[Text], own: Iterable[str]) -> None:
        times = bench.time(texts, own, args.passes)
        splits = int(bench.p["splits"])
        results.append({"splits": splits, "what": what, "text": label, **times})
        say(
            f"splits {splits:3} {what:36} {label:32} {times['us']:9.2f} us "
            f"({times['least']:.2f} to {times['most']:.2f})  probe {times['tflops_before']:.1f} "
            f"{times['tflops_after']:.1f}"
        )

    say(f"{device.name} ({device.backend}), {args.layers} layers, {geometry}")
    for number, workgroups in enumerate(args.workgroups):
        bench = Bench(device, geometry, args.layers, workgroups)
        shipped = {kernel: bench.text(kernel) for kernel in TOKEN}
        errors = bench.errors([shipped[kernel] for kernel in TOKEN])
        results.append({"splits": bench.p["splits"], "errors": errors})
        say(f"splits {bench.p['splits']:3} errors " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()))
        for order in ORDERS:
            report(bench, order.label, "shipped", [shipped[k] for k in order.kernels], order.own)
        if args.variants and number == 0:
            for text in variants(bench):
                worst = max(bench.errors([{**shipped, text.kernel: text}[k] for k in TOKEN]).values())
                report(bench, f"{text.kernel} alone, error {worst:.1e}", text.label, [text], ())
    if args.json:
        print(json.dumps({"device": device.info(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
