"""A chunk without score planes: which structure is fastest.

Each variant is a shape of the near kernel's tile (rows x keys, terms a step) and how many columns of the keys
a workgroup takes. It is compared with the float64 reference first, then timed over several layers in one
compute pass with timestamps at its ends; each layer has a state of its own.

    python bench/flash/run.py                          all variants, 64 and 128 rows
    python bench/flash/run.py --only 64x64 --columns 128 192 256
    python bench/flash/run.py --check 20 --no-time     small random geometries only
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from checking import cases, check, compare
from pieces import Bench, Cut, Shape

import cortiq_o1 as o1
from cortiq_o1.gpu.adapters import REQUESTED_FEATURES, describe, required_limits
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
from cortiq_o1.reference import ReferenceLayer, StepResult

SHAPES = (
    Shape(64, 64, 16),
    Shape(64, 64, 16, fused=True),
    Shape(64, 64, 16, ahead=False),
    Shape(64, 64, 8, buffers=2),
    Shape(64, 128, 16),
    Shape(64, 128, 16, fused=True),
    Shape(64, 128, 16, ahead=False),
    Shape(64, 128, 8, buffers=2),
    Shape(64, 64, 16, pad=0),
    Shape(32, 64, 8),
    Shape(32, 128, 8),
    Shape(128, 64, 8),
    Shape(128, 128, 8),
    Shape(128, 64, 8, buffers=2, pad=0),
    Shape(128, 128, 8, buffers=2, pad=0),
    Shape(128, 64, 16, pad=0),
    Shape(128, 64, 16),
    Shape(128, 128, 16),
    Shape(64, 64, 16, buffers=2),
    Shape(64, 128, 16, buffers=2),
    Shape(128, 128, 16, buffers=2),
)
KERNELS = ("o1f_evict", "o1f_far", "o1f_near", "o1f_merge", "o1f_commit")
EVICT, FAR, NEAR, MERGE, COMMIT = KERNELS
FAR_ROWS = 3000
SHARED_BYTES = 49_152
"""Shared memory to ask for where an adapter has it."""


def filled(geometry: o1.Geometry, rows: int) -> dict[str, np.ndarray]:
    """A layer with a full ring and a far field in use, and rows; numbers of the right size."""
    rng = np.random.default_rng(3)
    sizes = Sizes.of(geometry, rows)
    planes = {}
    for name in (*STATE_PLANES, "q", "k_rows", "v_rows"):
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
    planes["far_mz"][:, MZ_MAX] = (2 * np.log(FAR_ROWS)) ** 0.5
    planes["far_mz"][:, MZ_TOTAL] = FAR_ROWS * np.exp(0.5 - planes["far_mz"][:, MZ_MAX])
    planes["far_mz"][:, MZ_RECENT] = 0
    planes["far_mz"][:, MZ_SHIFT] = planes["far_mz"][:, MZ_SHIFT, :1]
    return planes


def twins_after(geometry: o1.Geometry, arrays: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """What must come out to the bit after a call: rings and `group_meta`."""
    from cortiq_o1.cpu.twins import TWINS
    from cortiq_o1.planning import plan

    todo = plan(geometry, rows, True, "stages")
    found = {name: array.copy() for name, array in arrays.items()}
    for d in todo.dispatches:
        if d.kernel in ("o1c_ring_commit", "o1c_meta"):
            TWINS[d.kernel](dict(d.params), d.grid, *(found[name] for name in d.planes))
    found["out"] = np.empty(PLANES["out"].dims(todo.sizes), np.float32)
    return found


def reference_rows(
    geometry: o1.Geometry, arrays: dict[str, np.ndarray], file: Path | None
) -> list[StepResult]:
    """The outputs in float64, which take a second for two rows; kept in `file` if given."""
    key = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
    if file is not None and file.exists():
        with np.load(file) as found:
            if str(found["key"]) == key:
                columns = (found[name] for name in ("out", "other", "bound", "kappa"))
                return [StepResult(*row) for row in zip(*columns, strict=True)]
    layer = ReferenceLayer.from_planes(geometry, arrays)
    truth = layer.run(arrays["q"], arrays["k_rows"], arrays["v_rows"])
    if file is not None:
        names = ("out", "other", "bound", "kappa")
        np.savez_compressed(file, key=key, **{n: np.array([getattr(r, n) for r in truth]) for n in names})
    return truth


def with_shared_memory(device: o1.Device) -> o1.Device:
    """The same adapter with as much shared memory as it has, up to `SHARED_BYTES`."""
    adapter = device.engine.context.device.adapter
    info = describe(adapter)
    name = "max-compute-workgroup-storage-size"
    limits = {**required_limits(info), name: min(SHARED_BYTES, int(adapter.limits[name]))}
    features = [f for f in REQUESTED_FEATURES if f in info.features]
    return o1.open_device(adapter.request_device_sync(required_features=features, required_limits=limits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto", help="as for open_device")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--landmarks", type=int, default=32)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--passes", type=int, default=9, help="timed passes (9)")
    parser.add_argument("--warm", type=int, default=300, help="probes before a measurement (300)")
    parser.add_argument(
        "--columns", type=int, nargs="+", default=[128, 192, 256], help="columns of a workgroup (128 192 256)"
    )
    parser.add_argument("--default-limits", action="store_true", help="ask for no more shared memory")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="shapes whose name holds one of these")
    parser.add_argument("--check", type=int, default=2, metavar="N", help="random small geometries (2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picked", action="store_true", help="check the library's picked cases too")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-large-check", action="store_true", help="time without comparing outputs")
    parser.add_argument("--truth", type=Path, metavar="FILE", help="keep the reference's outputs there")
    parser.add_argument("--seconds", type=float, default=85.0, help="stop starting variants after so long")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    device = o1.open_device(args.device)
    if device.gpu is None:
        raise SystemExit("no GPU; name an adapter with --device")
    if not args.default_limits:
        device = with_shared_memory(device)
    shared = int(device.engine.context.device.limits["max-compute-workgroup-storage-size"])
    lanes = int(device.engine.context.device.limits["max-compute-invocations-per-workgroup"])
    results: list[dict[str, Any]] = []

    def say(line: str) -> None:
        if not args.json:
            print(line, flush=True)

    say(f"{device.name} ({device.backend}), {shared} bytes of shared memory, {lanes} lanes")
    shapes = [s for s in SHAPES if not args.only or any(word in str(s) for word in args.only)]
    for shape in [s for s in shapes if s.shared_bytes > shared or s.lanes > lanes]:
        say(f"{shape}: left out, {shape.shared_bytes} bytes of shared memory")
    shapes = [s for s in shapes if s.shared_bytes <= shared and s.lanes <= lanes]

    picked = cases(args.check, args.seed)
    picked = picked if args.picked else picked[len(picked) - args.check :]
    for number, case in enumerate(picked):
        wanted = {str(s): (s, (64, 128, 2048)[(number + n) % 3]) for n, s in enumerate(shapes)}
        found = check(device, case, wanted)
        label = max(found, key=lambda name: found[name])
        say(f"{case.name:20} rows {case.rows:3} worst {found[label]:.3f} of its bound ({label})")
    if args.no_time:
        return

    geometry = o1.Geometry(
        args.heads, args.groups, args.dim, window=args.window, sinks=args.sinks, landmarks=args.landmarks
    )
    arrays = filled(geometry, max(args.rows))
    truth = []
    finals = {}
    if not args.no_large_check:
        truth = reference_rows(geometry, arrays, args.truth)
        for rows in args.rows:
            finals[rows] = ReferenceLayer.from_planes(geometry, arrays)
            finals[rows].skip(arrays["k_rows"][:rows], arrays["v_rows"][:rows])
    say(f"{args.layers} layers, {geometry}; reference after {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()

    def report(rows: int, what: str, label: str, columns: int, times: dict[str, float]) -> None:
        keys = geometry.window + geometry.sinks
        flop = 4.0 * rows * geometry.num_heads * keys * geometry.head_dim
        tflops = flop / times["us"] / 1e6
        results.append(
            {"rows": rows, "what": what, "shape": label, "columns": columns, "tflops": tflops, **times}
        )
        say(
            f"{rows:4} rows {what:28} {label:26} {columns:4} columns {times['us']:9.2f} us "
            f"({times['least']:.2f} to {times['most']:.2f}) {tflops:6.2f} TFLOP/s "
            f"probe {times['tflops_before']:.1f} {times['tflops_after']:.1f}"
        )

    for rows in args.rows:
        part = {name: a[:rows] if name in ("q", "k_rows", "v_rows") else a for name, a in arrays.items()}
        bench = Bench(device, geometry, rows, part, args.layers)
        twins = twins_after(geometry, part, rows)
        best: dict[str, tuple[float, Shape, int]] = {}
        for shape in shapes:
            if time.perf_counter() - start > args.seconds * (args.rows.index(rows) + 1) / len(args.rows):
                say(f"out of time before {shape}")
                break
            kept = [c for c in args.columns if c % shape.keys == 0]
            for number, columns in enumerate(kept):
                compiled = time.perf_counter()
                near = bench.steps(shape, columns, (NEAR,))
                compiled = time.perf_counter() - compiled
                chunk = bench.steps(shape, columns)
                worst = float("nan")
                if truth and number == 0:
                    bench.restore_first()
                    where = f"{shape}, {rows} rows"
                    try:
                        worst = compare(bench, shape, columns, truth[:rows], finals[rows], twins, where)
                    except AssertionError as error:
                        say(f"WRONG: {error}")
                        results.append({"rows": rows, "shape": str(shape), "wrong": str(error)})
                        break
                times = bench.time(near, False, args.passes, args.warm)
                report(rows, "near alone", str(shape), columns, times | {"compile_s": compiled})
                times = bench.time(chunk, False, args.passes, args.warm)
                report(rows, "chunk", str(shape), columns, times | {"share_of_bound": worst})
                kind = "default limits" if shape.shared_bytes <= 16_384 else "more shared memory"
                best[kind] = min(best.get(kind, (np.inf, shape, columns)), (times["us"], shape, columns))
        if not best:
            continue
        _, shape, columns = min(best.values())

        def timed(what: str, kernels: tuple[str, ...], own: bool) -> None:
            steps = bench.steps(shape, columns, kernels)  # noqa: B023
            report(rows, what, str(shape), columns, bench.time(steps, own, args.passes, args.warm))  # noqa: B023

        timed("chunk", KERNELS, False)
        timed("chunk, own scratch", KERNELS, True)
        timed("near first, own scratch", (NEAR, EVICT, FAR, MERGE, COMMIT), True)
        timed("near merge commit", (NEAR, MERGE, COMMIT), False)
        timed("near merge", (NEAR, MERGE), False)
        timed("evict far near merge", KERNELS[:4], False)
        timed("evict far near", KERNELS[:3], False)
        timed("near before far, own scratch", (EVICT, NEAR, FAR, MERGE, COMMIT), True)
        for kernel in (EVICT, FAR, MERGE, COMMIT):
            timed(f"{kernel.removeprefix('o1f_')} alone", (kernel,), False)
        steps = bench.shipped("gemm")
        report(rows, "shipped", "gemm", 0, bench.time(steps, False, args.passes, args.warm))
        for kind, (us, shape, columns) in best.items():
            cut = Cut.of(geometry, shape, min(rows, bench.chunk), columns)
            say(f"best by {kind}: {shape}, {columns} columns, {us:.1f} us, {cut}")
        say(f"{time.perf_counter() - start:.1f} s so far")
    if args.json:
        print(json.dumps({"device": device.info(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
