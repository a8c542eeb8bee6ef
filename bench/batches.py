"""GPU time a token over the number of sequences in a batch, beside the bytes that it must move.

Every figure is of one row in each sequence, several layers one after another in one compute pass so that no
cache holds their windows, and of one run: batches take turns. On a device without timestamps it is wall time.

    python bench/batches.py                              the best GPU, 1 to 16 sequences
    python bench/batches.py --batches 1 16 64 --json -   as JSON
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cortiq_o1 as o1
from cortiq_o1.planes import PLANES, STATE_PLANES, Sizes

COLD_BYTES = 256 << 20
"""Layers are added until their states exceed this, so that none is in a cache when its turn comes."""
FEWEST_LAYERS = 4
"""And there are so many at least, as in a model, where a layer's end overlaps the next one's beginning."""
WARM_ROUNDS = 3


@dataclass(frozen=True)
class Figure:
    """`seconds`: of one layer's token for the whole batch, the median; `spread` its quartiles' distance."""

    batch: int
    layers: int
    clock: str
    seconds: float
    spread: float
    bytes_read: int

    @property
    def bandwidth(self) -> float:
        """Bytes of window and far field a second."""
        return self.bytes_read / self.seconds


def token_bytes(geometry: o1.Geometry) -> int:
    """What a token must read of one sequence's state, and write of it."""
    sizes = Sizes.of(geometry)
    read = sum(PLANES[name].nbytes(sizes) for name in STATE_PLANES)
    return read + PLANES["t_hat"].nbytes(sizes) // 2  # the recent level of the numerator moves


def sealed_prompt(geometry: o1.Geometry, seed: int) -> o1.LayerState:
    """A random prompt, long enough to be sealed."""
    rng = np.random.default_rng(seed)
    rows = geometry.exact_rows + 1 + 64 * (seed % 5)
    shapes = (
        (rows, geometry.num_heads, geometry.head_dim),
        (rows, geometry.num_kv_heads, geometry.head_dim),
        (rows, geometry.num_kv_heads, geometry.value_dim or geometry.head_dim),
    )
    return o1.seal(*(rng.standard_normal(shape, np.float32) for shape in shapes), geometry)


def residents_of(device: o1.Device, geometry: o1.Geometry, batch: int) -> list[Any]:
    """The layers of a batch, each of `batch` sequences in one run."""
    states = [sealed_prompt(geometry, seed) for seed in range(2)]
    layers = max(FEWEST_LAYERS, -(-COLD_BYTES // (states[0].nbytes * batch)))
    made = [device.load([states[i % 2] for i in range(batch)]) for _ in range(layers)]
    runs = [run for one in made for run in one.residents]
    if len(runs) != layers:
        raise SystemExit(f"batch of {batch}: does not fit one binding of {device.name}; use a smaller one")
    return runs


def measure(device: o1.Device, geometry: o1.Geometry, batches: list[int], rounds: int) -> list[Figure]:
    """A figure for each size of batch; they take turns."""
    residents = {batch: residents_of(device, geometry, batch) for batch in batches}
    times: dict[int, list[float]] = {batch: [] for batch in batches}
    clock = "wall"
    for number in track(range(WARM_ROUNDS + rounds), "batches", console=Console(stderr=True)):
        for batch in batches:
            timing = device.engine.time_plan(residents[batch], 1, True, 5)
            clock = timing.clock
            if number >= WARM_ROUNDS:
                times[batch].append(statistics.median(timing.seconds) / len(residents[batch]))
    figures = []
    for batch in batches:
        low, middle, high = statistics.quantiles(times[batch], n=4)
        layers = len(residents[batch])
        figures.append(Figure(batch, layers, clock, middle, high - low, batch * token_bytes(geometry)))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, - for standard output")
    given = parser.parse_args()
    device = o1.open_device(given.device)
    if device.gpu is None:
        print("batches: needs a GPU; NumPy takes a batch's groups one after another", file=sys.stderr)
        return 2
    geometry = o1.Geometry(32, 8, 128, window=given.window, sinks=4, landmarks=32)
    figures = measure(device, geometry, given.batches, given.rounds)
    bandwidth, _ = device.engine.copy_bandwidth(1 << 30)
    first = figures[0]
    table = Table(title=f"one token, {device.name}, window {given.window}, copy {bandwidth / 1e12:.2f} TB/s")
    for column in ("sequences", "us a layer", "spread", f"times {first.batch}", "TB/s", "of copy"):
        table.add_column(column, justify="right")
    for f in figures:
        table.add_row(
            str(f.batch), f"{1e6 * f.seconds:.1f}", f"{1e6 * f.spread:.1f}",
            f"{f.seconds / first.seconds:.2f}",
            f"{f.bandwidth / 1e12:.2f}", f"{f.bandwidth / bandwidth:.0%}",
        )  # fmt: skip
    Console(stderr=given.json == "-").print(table)
    if given.json:
        text = json.dumps(
            {
                "device": device.info(),
                "geometry": geometry.to_dict(),
                "copy_bytes_per_second": bandwidth,
                "figures": [{**asdict(f), "bytes_per_second": f.bandwidth} for f in figures],
            },
            indent=1,
        )
        if given.json == "-":
            print(text)
        else:
            with open(given.json, "w", encoding="utf-8") as file:
                file.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
