"""Every NumPy figure of `docs/performance.md`, peers included, in one run: prints the tables that it holds.

    pip install "cortiq-o1[cpu]"                                                    the engine at its best
    pip install torch --index-url https://download.pytorch.org/whl/cpu             the peers; left out without
    python bench/cpu.py [--threads 2] [--seconds 10] [--json]

A token must read the window's keys and values once; a chunk must take two matrix products over them: these
are the floors. Contestants take turns, each over several layers, so that no cache holds their states, and a
slow machine slows all alike. A turn beside which other processes ran is thrown away (on Linux; elsewhere see
to it that there are none).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from cortiq_o1.cpu.direct import DirectEngine
from cortiq_o1.geometry import Geometry
from cortiq_o1.planes import (
    LARGE,
    META_FAR_LEN,
    META_FAR_LIMIT,
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
from cortiq_o1.reference import ReferenceLayer, worst_error

GEOMETRY = Geometry(num_heads=32, num_kv_heads=8, head_dim=128, window=2048, sinks=4, landmarks=32)
WIDTH = GEOMETRY.head_dim  # of values too
CHUNK = 64
CONTEXTS = (4096, 16384, 32768, 131072)
COLD_BYTES = 256 << 20
"""Keys and values of all layers together, or of one if it has more: several times a CPU's last cache."""
FAR_ROWS = 4000
"""Past this many rows a new far maximum is as rare as in a long stream, and still happens."""
WIDE_LOGITS = 4.0
"""Queries times this have logits that their norms do not bound, so that every row needs its maximum."""
WARM, TURN = 0.1, 0.2
"""Seconds of a turn at least: those in which the system spreads threads over CPUs again, those that count."""
REST = 0.1
"""Seconds between contestants: BLAS's and PyTorch's threads spin for a while after a call."""
MOST_OTHERS = 0.1
"""CPUs that other processes may take in a turn."""
PATIENCE = 300.0
"""Seconds after which a race no longer waits for valid turns."""

Call = Callable[[int], Any]
"""One contestant on one layer."""


@dataclass(frozen=True)
class Times:
    """Of one contestant, in milliseconds."""

    median: float
    p10: float
    p90: float
    runs: int

    def __str__(self) -> str:
        digits = 3 if self.median < 1 else 2 if self.median < 10 else 1
        return f"{self.median:.{digits}f} ({self.p10:.{digits}f} to {self.p90:.{digits}f})"


def others_seconds() -> float | None:
    """CPU time of all processes but this one since some moment, None where that is not known."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, soft, steal, *_ = map(int, file.readline().split()[1:])
    except OSError:
        return None
    own = os.times()
    busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return busy - own.user - own.system


def for_layers(call: Call, layers: int, seconds: float) -> list[float]:
    """Milliseconds of calls over all layers, as often as it takes to fill so many seconds."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        for layer in range(layers):
            start = time.perf_counter()
            call(layer)
            found.append(1e3 * (time.perf_counter() - start))
    return found


def filled_state(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A full ring and a far field of `FAR_ROWS` rows; numbers of the right size, no model's."""
    sizes = Sizes.of(GEOMETRY)
    planes: dict[str, np.ndarray] = {}
    for name in STATE_PLANES:
        shape = PLANES[name].dims(sizes)
        if PLANES[name].dtype == np.float32:
            planes[name] = rng.standard_normal(shape, dtype=np.float32)
        else:
            planes[name] = np.zeros(shape, np.uint32)
    meta = planes["group_meta"]
    meta[:, META_LEN] = meta[:, META_WINDOW] = GEOMETRY.group_windows
    meta[:, META_FAR_LEN] = FAR_ROWS
    meta[:, META_FAR_LIMIT] = NO_FAR_LIMIT
    meta[:, META_LANDMARKS] = GEOMETRY.landmarks
    planes["mix"] *= 0.1
    # Logits are about normal, so is the largest of them known.
    planes["far_mz"][:, MZ_MAX] = (2 * np.log(FAR_ROWS)) ** 0.5
    planes["far_mz"][:, MZ_TOTAL] = FAR_ROWS * np.exp(0.5 - planes["far_mz"][:, MZ_MAX])
    planes["far_mz"][:, [MZ_RECENT, MZ_SHIFT]] = 0
    assert abs(planes["far_mz"]).max() < LARGE
    return planes


class Bench:
    """The states of several layers, and who works on them."""

    def __init__(self, threads: int, seconds: float) -> None:
        self.rng = np.random.default_rng(0)
        self.threads, self.seconds = threads, seconds
        self.refused = 0
        g = GEOMETRY
        self.layers = max(1, COLD_BYTES // (g.num_kv_heads * g.window * (g.head_dim + WIDTH) * 4))
        self.planes = [filled_state(self.rng) for _ in range(self.layers)]

    def rows(self, count: int, reach: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values of new rows."""
        g = GEOMETRY
        widths = ((g.num_heads, g.head_dim), (g.num_kv_heads, g.head_dim), (g.num_kv_heads, WIDTH))
        q, k, v = (self.rng.standard_normal((count, *width), dtype=np.float32) for width in widths)
        return q * np.float32(reach), k, v

    def attend(self, count: int, reach: float = 1.0, held: bool = True) -> Call:
        """The engine over new rows, commit included; BLAS held to a thread or, `held` off, products cut."""
        engine = DirectEngine(self.threads)
        if not held:
            engine._blas = None
        q, k, v = self.rows(count, reach)
        planes = self.planes[0]
        checked = ReferenceLayer.from_planes(GEOMETRY, planes).run(q[:1], k[:1], v[:1])
        residents = [engine.upload(GEOMETRY, each) for each in self.planes]
        got = engine.attend(residents[0], q, k, v, False)[:1]
        assert worst_error(checked, got)[1] <= 1.0, "the engine does not follow the reference"
        return lambda layer: engine.attend(residents[layer], q, k, v, True)

    def read_once(self) -> Call:
        """The floor of a token: every key and value once, in NumPy's own words."""
        return lambda layer: self.planes[layer]["ring_k"].sum() + self.planes[layer]["ring_v"].sum()

    def products(self) -> Call:
        """The floor of a chunk: scores and values of its rows over the window, no softmax between them."""
        g = GEOMETRY
        lanes = (g.num_kv_heads, CHUNK * g.heads_per_group)
        q = self.rng.standard_normal((*lanes, g.head_dim), dtype=np.float32)
        scores = np.empty((*lanes, g.window), np.float32)
        out = np.empty((*lanes, WIDTH), np.float32)

        def run(layer: int) -> None:
            planes = self.planes[layer]
            np.matmul(q, planes["ring_k"][:, : g.window].swapaxes(1, 2), out=scores)
            np.matmul(scores, planes["ring_v"][:, : g.window], out=out)

        return run

    def race(self, contestants: dict[str, tuple[Call, int]]) -> dict[str, Times]:
        """Contestants, each with its number of layers, take turns."""
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for call, _ in contestants.values():  # buffers, threads and libraries wake up
            call(0)
        begin = time.perf_counter()
        while time.perf_counter() < begin + self.seconds or not all(times.values()):
            if time.perf_counter() > begin + self.seconds + PATIENCE:
                sys.exit("other processes leave no turn valid")
            for name, (call, layers) in contestants.items():
                time.sleep(REST)
                others, turn = others_seconds(), time.perf_counter()
                for_layers(call, layers, WARM)
                found = for_layers(call, layers, TURN)
                now = others_seconds()
                if others is None or now is None or now - others < MOST_OTHERS * (time.perf_counter() - turn):
                    times[name] += found
                else:
                    self.refused += 1
        return {
            name: Times(float(np.median(t)), *map(float, np.percentile(t, (10, 90))), len(t))
            for name, t in times.items()
        }

    def engine_races(self) -> dict[str, dict[str, Times]]:
        """The engine beside its floors."""
        n, blas = self.layers, importlib.util.find_spec("threadpoolctl") is not None
        token = {"floor": (self.read_once(), n), "engine": (self.attend(1), n)}
        chunk = {
            "floor": (self.products(), n),
            "engine": (self.attend(CHUNK), n),
            "maxima": (self.attend(CHUNK, WIDE_LOGITS), n),
        }
        if blas:
            token["cut"] = (self.attend(1, held=False), n)
            chunk["cut"] = (self.attend(CHUNK, held=False), n)
        return {"token": self.race(token), "chunk": self.race(chunk)}

    def peer_races(self) -> dict[str, dict[str, Times]]:
        """The engine's token beside PyTorch's."""
        from cpu_torch import Exact, Operator, set_threads

        set_threads(self.threads)
        g, n = GEOMETRY, self.layers
        q, k, v = self.rows(1)
        engine = (self.attend(1), n)
        window = [Exact(g, planes["ring_k"], planes["ring_v"]) for planes in self.planes]
        check_exact(window[0], q[0])
        own = [Operator(g, planes) for planes in self.planes]
        checked = ReferenceLayer.from_planes(g, self.planes[0]).run(q, k, v)
        got = Operator(g, self.planes[0]).attend(q[0], k[0], v[0])
        assert worst_error(checked, got[None])[1] <= 1.0, "PyTorch's operator does not follow the reference"
        peers: dict[str, tuple[Call, int]] = {
            "engine": engine,
            "floor": (self.read_once(), n),
            "window": (lambda layer: window[layer].attend(q[0]), n),
            "operator": (lambda layer: own[layer].attend(q[0], k[0], v[0]), n),
        }
        found = {"peers": self.race(peers)}
        for keys in CONTEXTS:
            shape = (g.num_kv_heads, keys, g.head_dim)
            layers = max(1, COLD_BYTES // (2 * 4 * int(np.prod(shape))))
            exact = [
                Exact(g, *(self.rng.standard_normal(shape, dtype=np.float32) for _ in "kv"))
                for _ in range(layers)
            ]

            def attend(layer: int, exact: list[Exact] = exact) -> np.ndarray:
                return exact[layer].attend(q[0])

            found[f"exact {keys}"] = self.race({"engine": engine, "exact": (attend, layers)})
        return found


def check_exact(exact: Any, q: np.ndarray) -> None:
    """PyTorch's attention against float64, in one group."""
    g = GEOMETRY
    rows = q[: g.heads_per_group].astype(float) * g.scale
    logits = rows @ exact.keys[0, 0].numpy().astype(float).T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    want = weights @ exact.values[0, 0].numpy() / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(exact.attend(q)[: g.heads_per_group], want, atol=1e-5)


def machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[call-overload,index]
    return {
        "cpu": name,
        "threads": threads,
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
        "python": platform.python_version(),
    }


def has_torch() -> bool:
    """Whether the peers can run."""
    return importlib.util.find_spec("torch") is not None


def tables(races: dict[str, dict[str, Times]]) -> str:
    """The document's tables, in Markdown: medians in milliseconds, 10% and 90% quantiles."""
    lines = ["| | floor | engine | ratio |", "|---|---|---|---|"]
    texts = {
        "token": "one row; reading keys and values once by `sum`",
        "chunk": f"{CHUNK} rows; the two matrix products alone",
    }
    more = {
        "maxima": "the same, logits too large to go without maxima",
        "cut": "the same without threadpoolctl",
    }
    for name, text in texts.items():
        race = races[name]
        for who, what in {"engine": text, **more}.items():
            if who in race:
                ratio = race[who].median / race["floor"].median
                lines.append(f"| {what} | {race['floor']} | {race[who]} | {ratio:.2f} |")
    if "peers" in races:
        race = races["peers"]
        lines += ["", "| one row | ms | engine's time over it |", "|---|---|---|"]
        names = {
            "engine": "the engine, far field and commit included",
            "window": "PyTorch, `scaled_dot_product_attention` over the window alone",
            "operator": "PyTorch, the operator with its commit, eager",
        }
        for who, what in names.items():
            lines.append(f"| {what} | {race[who]} | {race['engine'].median / race[who].median:.2f} |")
        lines += ["", "| keys | exact, PyTorch | engine | exact over engine |", "|---|---|---|---|"]
        for keys in CONTEXTS:
            race = races[f"exact {keys}"]
            ratio = race["exact"].median / race["engine"].median
            lines.append(f"| {keys:,} | {race['exact']} | {race['engine']} | {ratio:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="threads of each contestant (2)")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each race (10)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    settings = [name for name in os.environ if name.startswith("OPENBLAS_")]
    if settings:
        parser.error(f"{', '.join(settings)} in the environment: such settings slow NumPy, unset them")
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
    bench = Bench(arguments.threads, arguments.seconds)
    console = Console(stderr=True)
    parts = [("engine and floors", bench.engine_races)]
    found = machine(arguments.threads)
    if has_torch():
        import torch

        found["torch"] = torch.__version__
        parts.append(("PyTorch", bench.peer_races))
    else:
        console.print("PyTorch is not installed: no peers")
    races: dict[str, dict[str, Times]] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(parts))
        for what, part in parts:
            progress.update(task, description=what)
            races |= part()
            progress.advance(task)
    report = {"machine": found, "geometry": GEOMETRY.to_dict()}
    if arguments.json:
        report["races"] = {name: {w: asdict(t) for w, t in race.items()} for name, race in races.items()}
        print(json.dumps({**report, "thrown_away": bench.refused}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    print(f"\nMilliseconds: median (10% to 90%); {bench.refused} turns thrown away\n\n{tables(races)}")


if __name__ == "__main__":
    main()
