"""GPU time of the two matrix products of the "gemm" path, alone and one after the other.

Each product runs over several layers in one compute pass with timestamps at its ends. Queries, keys and
values are each layer's own, so that they come from memory; logits and sums are shared by the layers, as
they are in the library, so that each dispatch waits for the one before. Useful work counts the columns
that a row sees. Every text is compared with NumPy in float64 before it is timed.

    python bench/products.py                        the shipped kernels on the best GPU
    python bench/products.py --variants --splits 4 8    other tile shapes beside them
    python bench/products.py --half                 operands in float16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from product_variants import SHAPES, grid, wgsl

import cortiq_o1 as o1
from cortiq_o1.gpu.recording import pack
from cortiq_o1.gpu.timing import Stopwatch
from cortiq_o1.kernels import KERNELS
from cortiq_o1.params import stage_params
from cortiq_o1.planes import PLANES, Sizes

Params = dict[str, int | float]
WARM_SECONDS = 0.5
"""A GPU that was idle computes at a low clock for a while."""
OWN = ("panel_q", "panel_k", "panel_v")
"""Planes of which each layer has its own."""


class Text(NamedTuple):
    """A kernel to time: its label, its pipeline and layout, its grid."""

    label: str
    kernel: str
    pipeline: Any
    layout: Any
    grid: tuple[int, int, int]


class Bench:
    """The planes of several layers on one device, and what runs over them."""

    def __init__(self, device: o1.Device, geometry: o1.Geometry, rows: int, splits: int, layers: int) -> None:
        self.context = device.engine.context
        sizes = Sizes.of(geometry, rows, rows)
        self.p = stage_params(geometry, sizes, rows, 0, splits)
        self.layers = layers
        rng = np.random.default_rng(5)
        shapes = {name: PLANES[name].dims(sizes) for name in (*OWN, "panel_scores")}
        self.arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        filled = geometry.window + geometry.sinks + rows
        for name in ("panel_k", "panel_v"):
            self.arrays[name][:, filled:] = 0
        self.arrays["panel_scores"] = np.exp(self.arrays["panel_scores"])
        self.parts = (splits, *PLANES["near_parts"].dims(sizes)[1:])
        create = self.context.memory.create
        self.buffers = {
            name: [create(name, array.nbytes) for _ in range(layers if name in OWN else 1)]
            for name, array in self.arrays.items()
        }
        self.buffers["near_parts"] = [create("near_parts", 4 * int(np.prod(self.parts)))]
        for name, array in self.arrays.items():
            self.context.upload([(buffer, array) for buffer in self.buffers[name]], "upload")
        keys = geometry.window + geometry.sinks
        self.flop = {
            "o1c_qk": 2.0 * rows * geometry.num_heads * keys * sizes.d,
            "o1c_pv": 2.0 * rows * geometry.num_heads * keys * sizes.dv,
        }

    def text(self, kernel: str, label: str, source: str | None, grid: tuple[int, int, int]) -> Text:
        """A kernel of that source, or as shipped."""
        pipeline, layout = self.context.build(kernel, source)
        return Text(label, kernel, pipeline, layout, grid)

    def _group(self, text: Text, layer: int) -> Any:
        names = [b.name for b in KERNELS[text.kernel].bindings]
        chosen = [self.buffers[name][layer % len(self.buffers[name])] for name in names]
        params = (self.context.parameters.buffer, 0, KERNELS[text.kernel].params_dtype.itemsize)
        return self.context.groups.get(
            text.kernel, text.layout, [params, *((buffer, 0, buffer.size) for buffer in chosen)]
        )

    def run(self, texts: Sequence[Text], layers: int) -> float | None:
        """The texts one after the other for each layer in one pass; its nanoseconds, if they can be told."""
        context = self.context
        (offset,) = context.parameters.place([pack(texts[0].kernel, tuple(self.p.items()))])
        steps = [(t, self._group(t, layer)) for layer in range(layers) for t in texts]
        watch = Stopwatch(context, 1)
        encoder = context.encoder("products")
        compute_pass = encoder.begin_compute_pass(label="products", timestamp_writes=watch.writes(0))
        for text, group in steps:
            compute_pass.set_pipeline(text.pipeline)
            compute_pass.set_bind_group(0, group, [offset])
            compute_pass.dispatch_workgroups(*text.grid)
        compute_pass.end()
        watch.resolve(encoder)
        context.submit(encoder, "products")
        context.flush("products")
        spent = watch.nanoseconds()
        return None if spent is None else spent[0]

    def time(self, texts: Sequence[Text], repeats: int) -> tuple[float, float, float]:
        """Median, least and most microseconds of a layer."""
        self.run(texts, self.layers)
        start = time.perf_counter()
        while time.perf_counter() < start + WARM_SECONDS:
            self.run(texts, self.layers)
        found = [self.run(texts, self.layers) for _ in range(repeats)]
        times = [t / self.layers / 1e3 for t in found if t is not None]
        if not times:
            raise SystemExit("this adapter's timestamps do not work")
        return statistics.median(times), min(times), max(times)

    def error(self, text: Text) -> float:
        """The worst error against float64, relative to the sum of the terms' sizes."""
        scores = self.buffers["panel_scores"][0]
        if text.kernel.startswith("o1c_pv"):
            self.context.upload([(scores, self.arrays["panel_scores"])], "upload")
        self.run([text], 1)
        rows, hpg = int(self.p["k"]), int(self.p["hpg"])
        got = np.empty(
            self.arrays["panel_scores"].shape if text.kernel.startswith("o1c_qk") else self.parts, np.float32
        )
        target = scores if text.kernel.startswith("o1c_qk") else self.buffers["near_parts"][0]
        self.context.download(target, got, "read")
        worst = 0.0
        for g in range(int(self.p["ng"])):
            heads = slice(g * hpg, (g + 1) * hpg)
            if text.kernel.startswith("o1c_qk"):
                left = self.arrays["panel_q"][heads, :rows].astype(np.float64) * self.p["scale"]
                right = self.arrays["panel_k"][g].T.astype(np.float64)
                result = got[heads, :rows].astype(np.float64)
            else:
                left = self.arrays["panel_scores"][heads, :rows].astype(np.float64)
                right = self.arrays["panel_v"][g].astype(np.float64)
                result = got[:, heads, :rows].astype(np.float64).sum(axis=0)
            size = np.abs(left) @ np.abs(right)
            error = np.abs(result - left @ right)
            if (error[size == 0] > 0).any():
                return float("inf")
            worst = max(worst, float((error[size > 0] / size[size > 0]).max()))
        return worst


def texts_of(bench: Bench, product: str, variants: bool, half: bool) -> list[Text]:
    """The shipped kernel, and the other shapes if wanted."""
    kernel = f"o1c_{product}" + ("_f16" if half else "")
    found = [bench.text(kernel, "shipped", None, KERNELS[kernel].grid(bench.p))]
    if variants:
        for shape in SHAPES:
            source = wgsl(product, shape, half)
            found.append(bench.text(kernel, str(shape), source, grid(product, shape, bench.p)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto", help="as for open_device")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--splits", type=int, nargs="+", default=[4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--half", action="store_true", help="operands in float16")
    parser.add_argument("--variants", action="store_true", help="other tile shapes too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    geometry = o1.Geometry(args.heads, args.groups, args.dim, window=args.window, sinks=args.sinks)
    device = o1.open_device(args.device)
    if device.gpu is None:
        raise SystemExit("no GPU; name an adapter with --device")
    results: list[dict[str, Any]] = []

    def report(
        splits: int, what: str, label: str, times: tuple[float, ...], flop: float, error: float
    ) -> None:
        median, least, most = times
        results.append(
            {
                "splits": splits, "what": what, "text": label, "us": median, "least": least, "most": most,
                "tflops": flop / median / 1e6, "error": error,
            }
        )  # fmt: skip
        if not args.json:
            print(
                f"{what:5} splits {splits:2} {label:40} {median:9.1f} us ({least:.1f} to {most:.1f}) "
                f"{flop / median / 1e6:6.2f} TFLOP/s  error {error:.1e}",
                flush=True,
            )

    if not args.json:
        print(f"{device.name} ({device.backend}), {args.rows} rows, {geometry}")
    for number, splits in enumerate(args.splits):
        bench = Bench(device, geometry, args.rows, splits, args.layers)
        best: dict[str, tuple[float, Text]] = {}
        shipped: dict[str, Text] = {}
        # The splits are the value sum's alone.
        for product in ("qk", "pv") if number == 0 else ("pv",):
            for text in texts_of(bench, product, args.variants, args.half):
                error = bench.error(text)
                times = bench.time([text], args.repeats)
                report(splits, product, text.label, times, bench.flop[f"o1c_{product}"], error)
                shipped.setdefault(product, text)
                best[product] = min(best.get(product, (np.inf, text)), (times[0], text), key=lambda b: b[0])
        if number == 0:
            kept_qk = shipped["qk"], best["qk"][1]
        flop = sum(bench.flop.values())
        pairs = [("shipped", kept_qk[0], shipped["pv"]), ("fastest of each", kept_qk[1], best["pv"][1])]
        for label, qk, pv in pairs if args.variants else pairs[:1]:
            report(splits, "both", label, bench.time([qk, pv], args.repeats), flop, 0.0)
    if args.json:
        print(json.dumps({"device": device.info(), "rows": args.rows, "results": results}, indent=1))


if __name__ == "__main__":
    main()
