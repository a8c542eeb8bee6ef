"""How close the NumPy path comes to what its operator cannot do without.

A token must read the window's keys and values once; a chunk must take two matrix products over them.
Floor and engine take turns, each over the states of several layers, so that no cache holds them and a busy
machine slows both alike. Run it as `python bench/numpy_floor.py [--json]`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

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

TOKEN_TARGET, CHUNK_TARGET = 2.5, 1.5
REST = 0.2
# Past this many rows a new far maximum is as rare as in a long stream, and still happens.
FAR_ROWS = 4000


def filled_state(geometry: Geometry, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A full ring and a far field of `FAR_ROWS` rows; numbers of the right size, no model's."""
    sizes = Sizes.of(geometry)
    planes: dict[str, np.ndarray] = {}
    for name in STATE_PLANES:
        shape = PLANES[name].dims(sizes)
        if PLANES[name].dtype == np.float32:
            planes[name] = rng.standard_normal(shape, dtype=np.float32)
        else:
            planes[name] = np.zeros(shape, np.uint32)
    meta = planes["group_meta"]
    meta[:, META_LEN] = meta[:, META_WINDOW] = geometry.group_windows
    meta[:, META_FAR_LEN] = FAR_ROWS
    meta[:, META_FAR_LIMIT] = NO_FAR_LIMIT
    meta[:, META_LANDMARKS] = geometry.landmarks
    planes["mix"] *= 0.1
    # Logits are about normal, so is the largest of them known.
    planes["far_mz"][:, MZ_MAX] = (2 * np.log(FAR_ROWS)) ** 0.5
    planes["far_mz"][:, MZ_TOTAL] = FAR_ROWS * np.exp(0.5 - planes["far_mz"][:, MZ_MAX])
    planes["far_mz"][:, [MZ_RECENT, MZ_SHIFT]] = 0
    assert abs(planes["far_mz"]).max() < LARGE
    return planes


class Bench:
    """One geometry, the states of several layers, and the contestants over each of them."""

    def __init__(self, geometry: Geometry, layers: int, threads: int | None) -> None:
        self.geometry = geometry
        self.rng = np.random.default_rng(0)
        self.engine = DirectEngine(threads)
        self.residents = [
            self.engine.upload(geometry, filled_state(geometry, self.rng)) for _ in range(layers)
        ]

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values of new rows."""
        g = self.geometry
        widths = ((g.num_heads, g.head_dim), (g.num_kv_heads, g.head_dim), (g.num_kv_heads, g.value_dim or 0))
        q, k, v = (self.rng.standard_normal((count, *width), dtype=np.float32) for width in widths)
        return q, k, v

    def read_once(self, layer: int) -> Callable[[], Any]:
        """The floor of a token: every key and value once."""
        resident = self.residents[layer]
        return lambda: resident.ring_k.sum() + resident.ring_v.sum()

    def products(self, count: int) -> Callable[[int], Callable[[], Any]]:
        """The floor of a chunk: scores and values of `count` rows, no softmax between them."""
        g = self.geometry
        near = g.window + g.sinks
        lanes = (g.num_kv_heads, count * g.heads_per_group)
        q = self.rng.standard_normal((*lanes, g.head_dim), dtype=np.float32)
        scores = np.empty((*lanes, near), np.float32)
        out = np.empty((*lanes, g.value_dim or 0), np.float32)

        def over(layer: int) -> Callable[[], Any]:
            resident = self.residents[layer]

            def run() -> None:
                np.matmul(q, resident.ring_k.swapaxes(1, 2), out=scores)
                np.matmul(scores, resident.ring_v, out=out)

            return run

        return over

    def attend(self, count: int) -> Callable[[int], Callable[[], Any]]:
        """The engine over `count` new rows, commit included."""
        q, k, v = self.rows(count)
        return lambda layer: lambda: self.engine.attend(self.residents[layer], q, k, v, True)

    def race(self, floor: Callable[[int], Callable[[], Any]], count: int, seconds: float) -> dict[str, Any]:
        """Alternates floor and engine over the layers; times in milliseconds."""
        contestants = {"floor": floor, "engine": self.attend(count)}
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for contestant in contestants.values():  # buffers, threads and BLAS wake up
            contestant(0)()
        end = time.perf_counter() + seconds
        turn = 0
        while turn < 3 or time.perf_counter() < end:
            for name, contestant in contestants.items():
                if count > 1:
                    # BLAS's threads spin for a while after a product, on CPUs that the other one needs.
                    time.sleep(REST)
                for layer in range(len(self.residents)):
                    run = contestant(layer)
                    start = time.perf_counter()
                    run()
                    times[name].append(1e3 * (time.perf_counter() - start))
            turn += 1
        result: dict[str, Any] = {"rows": count, "runs": len(times["floor"])}
        for name, found in times.items():
            low, middle, high = np.percentile(found, (10, 50, 90))
            result[name] = {"median_ms": middle, "p10_ms": low, "p90_ms": high, "min_ms": min(found)}
        result["ratio"] = result["engine"]["median_ms"] / result["floor"]["median_ms"]
        result["ratio_p10"] = result["engine"]["p10_ms"] / result["floor"]["p10_ms"]
        return result


def machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[call-overload,index]
    settings = {k: v for k, v in os.environ.items() if k.startswith(("OPENBLAS_", "OMP_NUM", "MKL_NUM"))}
    return {
        "cpu": name,
        "threads": threads,
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
        "python": platform.python_version(),
        "environment": settings,
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="states to rotate over (16)")
    parser.add_argument("--threads", type=int, help="threads of the engine (all CPUs)")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each race (3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    geometry = Geometry(num_heads=32, num_kv_heads=8, head_dim=128, window=2048, sinks=4, landmarks=32)
    bench = Bench(geometry, arguments.layers, arguments.threads)
    races = {
        "token": (bench.read_once, 1, TOKEN_TARGET, "reading keys and values once"),
        "chunk": (bench.products(64), 64, CHUNK_TARGET, "the two matrix products"),
    }
    report: dict[str, Any] = {"machine": machine(bench.engine.threads), "geometry": geometry.to_dict()}
    for name, (floor, count, target, text) in races.items():
        report[name] = {
            **bench.race(floor, count, arguments.seconds),
            "target": target,
            "floor_is": text,
        }
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    print(", ".join(f"{k} {v}" for k, v in report["machine"].items()))
    for name in races:
        race = report[name]
        print(f"{name}, {race['rows']} rows, {race['runs']} runs; the floor is {race['floor_is']}")
        for who in ("floor", "engine"):
            print(
                "  {0:7s} median {median_ms:7.3f} ms, 10% {p10_ms:7.3f}, 90% {p90_ms:7.3f}, "
                "least {min_ms:7.3f}".format(who, **race[who])
            )
        text = "  ratio {ratio:.2f} (of the 10% quantiles {ratio_p10:.2f}), at most {target} wanted"
        print(text.format(**race))


if __name__ == "__main__":
    main()
