"""How far a sealed layer drifts from exact attention as its stream grows, and what resealing is worth.

The shipped queries, keys and values of a real model repeat as a long stream: each repetition begins
elsewhere in the text, without its first rows, and its queries and keys are turned on to the positions that
they then have (RoPE), of which the model was made for 8,192.
Five layers run side by side over the same rows: folding on ("always"), until as many rows are folded as the
prompt has ("prompt"), folding no more after the seal ("never"), folding on and resealed every N rows from an
archive of the last evictions, and sinks and window alone. A block's error is the root mean square over
rows, heads and width of the difference from exact attention (float64), as a part of exact attention's own.

    python bench/drift.py                                     the NumPy path
    python bench/drift.py --device vulkan --sample 32
    python bench/drift.py --ridge 0.01 --json drift.json      the ridge decides whether resealing pays
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cpu import machine

import cortiq_o1 as o1
from cortiq_o1.benchmark.quality import RealLayer, real_layers
from cortiq_o1.cli.report import Column, out_console, print_table, progress, write_json
from cortiq_o1.planes import (
    LARGE,
    META_FAR_LEN,
    META_FAR_LIMIT,
    MZ_MAX,
    MZ_SECTIONS,
    MZ_SHIFT,
)

THETA = 100_000.0
"""The model's RoPE, which turns the pairs (i, i + d / 2)."""
STRIDE = 389
"""Rows by which each repetition begins later in the text; without a divisor in common with its length."""
FIRST = 4
"""Rows that are not repeated: a model attends to the first of a text as to nothing later."""
KEY_ROWS = 2048
"""Keys that exact attention looks at together."""
ARCHIVE = 256
CALL_ROWS = 64

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


class Stream:
    """A layer's rows again and again; row `t` of the stream is made when it is asked for."""

    def __init__(self, layer: RealLayer) -> None:
        self.layer = layer
        half = layer.q.shape[2] // 2
        self._speed = THETA ** (-np.arange(half) / half)

    def rows(self, first: int, end: int) -> Rows:
        """Queries `(n, nh, d)`, keys `(n, G, d)` and values `(n, G, dv)` of those rows."""
        at = np.arange(first, end)
        return self.queries(at), *self._keys(at)

    def keys(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of those rows."""
        return self._keys(np.arange(first, end))

    def queries(self, at: np.ndarray) -> np.ndarray:
        """Queries of any rows."""
        return self._turned(self.layer.q[self._source(at)], at)

    def _keys(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        source = self._source(at)
        return self._turned(self.layer.k[source], at), self.layer.v[source]

    def _source(self, at: np.ndarray) -> np.ndarray:
        """The data's row that each of the stream's rows is."""
        length = len(self.layer.q)
        later = length - FIRST
        again = at - length
        return np.where(again < 0, at, FIRST + (again // later * STRIDE + STRIDE + again) % later)

    def _turned(self, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        """From the positions in the data on to those in the stream."""
        angle = (at - self._source(at))[:, None, None] * self._speed
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = np.split(x.astype(np.float64), 2, axis=-1)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(np.float32)


def exact_rows(stream: Stream, at: np.ndarray, scale: float) -> np.ndarray:
    """Exact causal attention of the rows `at`, ascending, in float64: `(n, nh, dv)`."""
    q = stream.queries(at).astype(np.float64)
    rows, heads, d = q.shape
    groups = stream.layer.k.shape[1]
    # A group's rows and heads together.
    q = q.reshape(rows, groups, -1, d).transpose(1, 0, 2, 3).reshape(groups, -1, d) * scale
    row = np.repeat(at, heads // groups)[None, :, None]
    largest = np.full((*q.shape[:2], 1), -np.inf)
    mass = np.zeros_like(largest)
    total = np.zeros((*q.shape[:2], stream.layer.v.shape[2]))
    for first in range(0, int(at[-1]) + 1, KEY_ROWS):
        end = min(first + KEY_ROWS, int(at[-1]) + 1)
        k, v = (x.astype(np.float64).swapaxes(0, 1) for x in stream.keys(first, end))
        logits = q @ k.swapaxes(1, 2)
        logits[np.broadcast_to(np.arange(first, end) > row, logits.shape)] = -np.inf
        before = largest
        # Every row sees key 0, so no maximum is infinite after the first keys.
        largest = np.maximum(before, logits.max(axis=2, keepdims=True))
        weights, kept = np.exp(logits - largest), np.exp(before - largest)
        mass = mass * kept + weights.sum(axis=2, keepdims=True)
        total = total * kept + weights @ v
    out = (total / mass).reshape(groups, rows, heads // groups, -1)
    return out.transpose(1, 0, 2, 3).reshape(rows, heads, -1)


def without_far_field(state: o1.LayerState) -> o1.LayerState:
    """Sinks and window alone: a far field that is empty and takes no row."""
    planes = {name: plane.copy() for name, plane in state.planes.items()}
    planes["group_meta"][:, [META_FAR_LEN, META_FAR_LIMIT]] = 0
    sums = [section for section in range(MZ_SECTIONS) if section not in (MZ_MAX, MZ_SHIFT)]
    planes["far_mz"][:, sums] = 0
    planes["far_mz"][:, MZ_MAX] = -LARGE
    planes["t_hat"][:] = 0
    return o1.LayerState(state.geometry, state.options, state.rows, planes=planes)


class Block(NamedTuple):
    """The rows `first .. end` of the stream, and each way's error over those of them that were compared."""

    first: int
    end: int
    errors: dict[str, float]


class Bench:
    """The five layers, after the same prompt."""

    def __init__(
        self, device: o1.Device, stream: Stream, geometry: o1.Geometry, prompt: int, reseal_every: int,
        ridge: float,
    ) -> None:  # fmt: skip
        self.stream = stream
        self.geometry = geometry
        self.at = prompt
        rows = stream.rows(0, prompt)
        always = o1.seal(*rows, geometry, ridge=ridge)
        cache = o1.Cache(device, reseal_every=reseal_every, archive=ARCHIVE)
        cache[0] = always
        self.cache = cache  # its layer lives as long as it does
        self.layers: dict[str, o1.Layer] = {
            "always": device.load(always),
            "prompt": device.load(o1.seal(*rows, geometry, ridge=ridge, fold="prompt")),
            "never": device.load(o1.seal(*rows, geometry, ridge=ridge, fold="never")),
            "resealed": cache[0],
            "window": device.load(without_far_field(always)),
        }

    def block(self, rows: int, sample: int) -> Block:
        """The next rows of the stream, of which at most `sample`, evenly spaced, are compared."""
        first, end = self.at, self.at + rows
        at = np.unique(np.linspace(first, end - 1, min(sample, rows)).astype(int))
        exact = exact_rows(self.stream, at, float(self.geometry.scale or 0))
        off = dict.fromkeys(self.layers, 0.0)
        for begin in range(first, end, CALL_ROWS):
            until = min(begin + CALL_ROWS, end)
            given = self.stream.rows(begin, until)
            here = (at >= begin) & (at < until)
            for name, layer in self.layers.items():
                out = layer.attend(*given)
                off[name] += float(((out[at[here] - begin] - exact[here]) ** 2).sum())
        self.at = end
        size = float((exact**2).sum())
        return Block(first, end, {name: (x / size) ** 0.5 for name, x in off.items()})

    def run(self, rows: int, block: int, sample: int) -> Iterator[Block]:
        """Blocks until the stream has so many rows."""
        while self.at < rows:
            yield self.block(min(block, rows - self.at), sample)


def chosen_layer(number: int | None) -> RealLayer:
    """The shipped data's layer of that number, its first if None."""
    layers = real_layers()
    found = [x for x in layers if number is None or x.name.endswith(f"layer {number}")]
    if not found:
        raise SystemExit(f"--layer: {number}, the data has {', '.join(x.name for x in layers)}")
    return found[0]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="as open_device takes it (cpu)")
    parser.add_argument("--rows", type=int, default=8192, help="rows of the stream (8192)")
    parser.add_argument("--layer", type=int, help="layer of the shipped data (its first)")
    parser.add_argument("--prompt", type=int, default=1024, help="rows that are sealed (1024)")
    parser.add_argument("--window", type=int, default=128, help="rows kept exactly (128)")
    parser.add_argument("--sinks", type=int, default=4, help="first rows kept exactly (4)")
    parser.add_argument("--landmarks", type=int, default=32, help="most landmarks (32)")
    parser.add_argument("--ridge", type=float, default=1e-6, help="of the mixing matrix (1e-6)")
    parser.add_argument("--reseal-every", type=int, default=512, help="rows between two reseals (512)")
    parser.add_argument("--block", type=int, default=1024, help="rows of a line of the table (1024)")
    parser.add_argument("--sample", type=int, default=128, help="rows of a block that are compared (128)")
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures there as JSON, - for standard output"
    )
    found = parser.parse_args()
    for name in ("rows", "prompt", "block", "sample"):
        if getattr(found, name) < 1:
            parser.error(f"--{name}: {getattr(found, name)}, expected at least 1")
    if found.rows <= found.prompt:
        parser.error(f"--rows: {found.rows}, expected more than the {found.prompt} of the prompt")
    return found


def print_report(report: dict[str, Any]) -> None:
    console = out_console()
    console.print(f"{report['data']}, repeated; error against exact attention", style="bold")
    geometry = report["geometry"]
    console.print(
        f"{report['device']}; window {geometry['window']}, {geometry['sinks']} sinks, "
        f"{geometry['landmarks']} landmarks, ridge {report['ridge']:g}; sealed after {report['prompt']} "
        f"rows, resealed every {report['reseal_every']} from the last {report['archive']} evictions; "
        f"{report['seconds']:.0f} s"
    )
    names = list(report["blocks"][0]["errors"])
    print_table(
        console,
        (Column("rows", right=True), *(Column(name, right=True) for name in names)),
        [
            (f"{block['end']:,}", *(f"{100 * block['errors'][name]:.2f}%" for name in names))
            for block in report["blocks"]
        ],
    )


def main() -> None:
    given = arguments()
    data = chosen_layer(given.layer)
    geometry = o1.Geometry(
        data.q.shape[1], data.k.shape[1], data.q.shape[2], data.v.shape[2],
        window=given.window, sinks=given.sinks, landmarks=given.landmarks,
    )  # fmt: skip
    if given.prompt <= geometry.exact_rows:
        raise SystemExit(f"--prompt: {given.prompt}, expected more than {geometry.exact_rows} rows to seal")
    device = o1.open_device(given.device)
    bench = Bench(device, Stream(data), geometry, given.prompt, given.reseal_every, given.ridge)
    begin = time.perf_counter()
    blocks = []
    with progress(-(-(given.rows - given.prompt) // given.block), False) as tell:
        tell(f"row {given.prompt:,}")
        for block in bench.run(given.rows, given.block, given.sample):
            blocks.append(block._asdict())
            tell(f"row {block.end:,}")
    report = {
        "machine": machine(0) if device.backend == "cpu" else None,
        "device": f"{device.name} ({device.backend})",
        "data": data.name,
        "geometry": geometry.to_dict(),
        "prompt": given.prompt,
        "reseal_every": given.reseal_every,
        "archive": ARCHIVE,
        "ridge": given.ridge,
        "sample": given.sample,
        "seconds": time.perf_counter() - begin,
        "blocks": blocks,
    }
    if given.json == "-":
        write_json(report)
        return
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=2) + "\n")
    print_report(report)


if __name__ == "__main__":
    main()
