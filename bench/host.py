"""What the host adds to the GPU's time: tokens back to back, one token alone, the first token, the import.

    python bench/host.py --device vulkan                 prints the table as Markdown
    python bench/host.py --device vulkan --json FILE     and writes every figure

Tokens go through `Layer.encode`, a layer after another into one compute pass over buffers that stay the same,
as a decoder's do; the next one is recorded while the GPU is at the one before. The two ways to tell a pass,
`cortiq_o1/gpu/raw.py`'s functions and wgpu-py's methods, take turns, and before each turn the GPU is loaded
until its clock stands. The processor has a probe of its own, a loop of plain Python: others on the same
machine may slow it to half, and a turn before or after which it reads so is thrown away. A first token is one
of a process of its own, after one such process that is not counted, so that the driver's cache is warm.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from batches import sealed_prompt
from h200 import LLAMA, Bench
from rich.console import Console
from rich.progress import Progress

import cortiq_o1 as o1
from cortiq_o1.gpu.timing import Stopwatch
from cortiq_o1.planes import PLANES, Sizes

LAYERS, ROUNDS, TOKENS, ALONE = 32, 9, 200, 60
PROBE_STEPS, PROBE_STANDS, MOST_TURNS = 200_000, 1.15, 60
"""Turns of the processor's probe; how far from its best reading it may be; turns until enough are kept."""
INPUTS = ("q", "k_rows", "v_rows", "out")
FIRST = """
import time
import numpy as np
import cortiq_o1 as o1
geometry = o1.Geometry(32, 8, 128, window={window}, sinks=4, landmarks=32)
rng = np.random.default_rng(0)
shapes = [(geometry.exact_rows + 1, n, 128) for n in (32, 8, 8)]
state = o1.seal(*(rng.standard_normal(s, np.float32) for s in shapes), geometry)
device = o1.open_device({device!r})
warm = device.warm_up(geometry, 1).seconds if {warm} else 0.0
layer = device.load(state)
loaded = time.perf_counter()
layer.attend(*(rng.standard_normal((1, n, 128), np.float32) for n in (32, 8, 8)))
print(warm, time.perf_counter() - loaded)
"""
IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


@dataclass(frozen=True)
class Figure:
    """Microseconds: least, median and most of the turns."""

    name: str
    least: float
    median: float
    most: float

    @classmethod
    def of(cls, name: str, seconds: list[float]) -> Figure:
        """From seconds."""
        return cls(name, *(1e6 * f(seconds) for f in (min, statistics.median, max)))


class Decoder:
    """Layers with buffers of their own, and the two ways to record a token of all of them."""

    def __init__(self, device: o1.Device, geometry: o1.Geometry, layers: int) -> None:
        self.device, self.context = device, device.engine.context
        state = sealed_prompt(geometry, 0)
        self.layers = [device.load(state) for _ in range(layers)]
        rng = np.random.default_rng(1)
        sizes = Sizes.of(geometry, 1)
        self.buffers = []
        for _ in self.layers:
            made = [self.context.memory.create(name, PLANES[name].nbytes(sizes)) for name in INPUTS]
            for name, buffer in zip(INPUTS[:3], made, strict=False):
                self.context.write(buffer, rng.standard_normal(PLANES[name].dims(sizes), np.float32), "rows")
            self.buffers.append(made)
        self.row = tuple(
            rng.standard_normal((1, n, geometry.head_dim), np.float32)
            for n in (geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads)
        )

    @contextmanager
    def methods(self) -> Iterator[None]:
        """wgpu-py's methods instead of the C functions."""
        raw, self.context.raw = self.context.raw, None
        for layer in self.layers:
            layer._again = None
        try:
            yield
        finally:
            self.context.raw = raw

    def record(self, encoder: Any, timestamps: Any = None) -> None:
        """A token's pass."""
        compute_pass = encoder.begin_compute_pass(timestamp_writes=timestamps)
        for layer, buffers in zip(self.layers, self.buffers, strict=True):
            layer.encode(compute_pass, *buffers, 1)
        compute_pass.end()

    def token(self, spent: tuple[list[float], ...]) -> None:
        """A token submitted; adds the seconds of recording, finishing and submitting."""
        times = [time.perf_counter()]
        encoder = self.device.gpu.create_command_encoder()
        self.record(encoder)
        times.append(time.perf_counter())
        commands = encoder.finish()
        times.append(time.perf_counter())
        self.device.gpu.queue.submit([commands])
        times.append(time.perf_counter())
        for found, begin, end in zip(spent, times, times[1:], strict=False):
            found.append(end - begin)

    def back_to_back(self, spent: tuple[list[float], ...]) -> float:
        """Seconds a token, from the first one's recording to the last one's end."""
        begin = time.perf_counter()
        for _ in range(TOKENS):
            self.token(spent)
        self.context.flush("bench")
        return (time.perf_counter() - begin) / TOKENS

    def on_gpu(self) -> float:
        """Seconds of a token's pass by timestamps, the median."""
        watch = Stopwatch(self.context, ALONE)
        for number in range(ALONE):
            encoder = self.device.gpu.create_command_encoder()
            self.record(encoder, watch.writes(number))
            if number == ALONE - 1:
                watch.resolve(encoder)
            self.device.gpu.queue.submit([encoder.finish()])
        self.context.flush("bench")
        spent = watch.nanoseconds()
        if spent is None:
            raise SystemExit("host: this adapter's timestamps do not work")
        return statistics.median(spent) * 1e-9

    def alone(self) -> float:
        """Seconds of one `attend` of one layer, the answer on the host, the median."""
        times = []
        for _ in range(ALONE):
            begin = time.perf_counter()
            self.layers[0].attend(*self.row)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


class Processor:
    """Tells whether the processor is at its best, by a loop of plain Python."""

    def __init__(self) -> None:
        self.best = math.inf
        self.thrown = 0
        for _ in range(50):
            self._read()

    def _read(self) -> float:
        begin = time.perf_counter()
        for _ in range(PROBE_STEPS):
            pass
        found = time.perf_counter() - begin
        self.best = min(self.best, found)
        return found

    def undisturbed(self, run: Callable[[], float]) -> float:
        """What `run` gives in the first turn with the processor at its best before and after; in the last
        turn, whatever it gives."""
        for _ in range(MOST_TURNS):
            before = self._read()
            found = run()
            if max(before, self._read()) <= PROBE_STANDS * self.best:
                return found
            self.thrown += 1
        return found


def back_to_back(bench: Bench, decoder: Decoder, processor: Processor) -> list[Figure]:
    """Tokens back to back both ways, beside their GPU time."""
    gpu: list[float] = []
    ways: dict[str, list[float]] = {"C functions": [], "methods": []}
    split: dict[str, tuple[list[float], ...]] = {name: ([], [], []) for name in ways}
    alone: list[float] = []
    task = bench.progress.add_task("tokens", total=ROUNDS)

    last: dict[str, tuple[list[float], ...]] = {}

    def turn(name: str) -> float:
        last[name] = ([], [], [])
        return decoder.back_to_back(last[name])

    def kept(name: str) -> float:
        found = processor.undisturbed(lambda: turn(name))
        for part, seconds in zip(split[name], last[name], strict=True):
            part += seconds
        return found

    for _ in range(ROUNDS):
        bench.clock()
        gpu.append(decoder.on_gpu())
        bench.clock()
        ways["C functions"].append(kept("C functions"))
        bench.clock()
        with decoder.methods():
            ways["methods"].append(kept("methods"))
        bench.clock()
        alone.append(processor.undisturbed(decoder.alone))
        bench.progress.advance(task)
    found = [Figure.of(f"{len(decoder.layers)} layers, GPU time", gpu)]
    for name, times in ways.items():
        found.append(Figure.of(f"{len(decoder.layers)} layers back to back, {name}", times))
        for part, seconds in zip(("record", "finish", "submit"), split[name], strict=True):
            ordered = sorted(seconds)
            inner = ordered[len(ordered) // 10 : -len(ordered) // 10 or None]
            found.append(Figure.of(f"of it {part}", inner))
    found.append(Figure.of("one token of one layer alone, answer on the host", alone))
    return found


def first_tokens(bench: Bench, device: str, window: int) -> list[Figure]:
    """First tokens of processes of their own, and imports."""
    found = []
    task = bench.progress.add_task("processes", total=4)
    for warm in (False, True):
        times = []
        for _ in range(1 + ROUNDS):
            text = FIRST.format(device=device, warm=warm, window=window)
            times.append([float(x) for x in _python(text).split()])
        warming, first = zip(*times[1:], strict=True)
        if warm:
            found.append(Figure.of("warm_up of a token", list(warming)))
        found.append(Figure.of("first token after load" + (" and warm_up" if warm else ""), list(first)))
        bench.progress.advance(task)
    for name in ("numpy", "cortiq_o1"):
        times = [float(_python(IMPORT.format(name))) for _ in range(ROUNDS)]
        found.append(Figure.of(f"import {name}", times))
        bench.progress.advance(task)
    return found


def _python(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"host: a process failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def tell(figures: list[Figure]) -> str:
    """The table as Markdown."""
    gpu = figures[0].median
    lines = ["| | us | least to most | over the GPU's time |", "|---|---|---|---|"]
    for f in figures:
        ratio = f"{f.median / gpu:.2f}" if "back to back" in f.name else ""
        lines.append(f"| {f.name} | {f.median:.0f} | {f.least:.0f} to {f.most:.0f} | {ratio} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto", help="as for open_device")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--window", type=int, default=LLAMA.window)
    parser.add_argument("--json", metavar="FILE", help="where every figure goes")
    args = parser.parse_args()
    device = o1.open_device(args.device)
    if device.gpu is None:
        raise SystemExit("host: the CPU has no compute passes; choose a GPU")
    geometry = replace(LLAMA, window=args.window, windows=None)
    with Progress(console=Console(stderr=True)) as progress:
        bench = Bench(device, progress, args.layers)
        processor = Processor()
        figures = back_to_back(bench, Decoder(device, geometry, args.layers), processor)
        figures += first_tokens(bench, args.device, args.window)
    print(tell(figures))
    print(f"\n{processor.thrown} turns beside a slow processor thrown away.")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": device.info(), "figures": [asdict(f) for f in figures]}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
