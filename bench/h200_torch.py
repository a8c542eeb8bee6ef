"""What PyTorch does on the same GPU: the peers of `bench/h200.py`, by CUDA graphs over several layers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cortiq_o1.geometry import Geometry

REPLAYS = 15
WARM_SECONDS = 0.5
MOST_BYTES = 8 << 30


def machine() -> str:
    """The GPU and the version, as a table's heading has it."""
    return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"


def graph_us(calls: list[Callable[[], object]]) -> tuple[float, float, float]:
    """Microseconds a call: least, median, most of the replays of one graph that has all calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls * 3:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    spent = 0.0
    found: list[float] = []
    while spent < WARM_SECONDS or len(found) < REPLAYS:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent += begin.elapsed_time(end) / 1e3
        found.append(1e3 * begin.elapsed_time(end) / len(calls))
    found = found[-REPLAYS:]
    return min(found), statistics.median(found), max(found)


def _layers(geometry: Geometry, keys: int, rows: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    g, d = geometry.num_kv_heads, geometry.head_dim
    size = torch.finfo(dtype).bits // 8
    count = max(2, min(32, MOST_BYTES // (2 * g * keys * d * size)))
    return [
        tuple(
            torch.randn((1, heads, n, d), device="cuda", dtype=dtype)
            for heads, n in ((geometry.num_heads, rows), (g, keys), (g, keys))
        )
        for _ in range(count)
    ]


def exact(geometry: Geometry, keys: int, rows: int, dtype: torch.dtype, backend: SDPBackend | None) -> float:
    """Exact attention of `rows` rows over `keys` keys: microseconds a layer, median."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)

    calls = [call(*layer) for layer in _layers(geometry, keys, rows, dtype)]
    if backend is None:
        return graph_us(calls)[1]
    with sdpa_kernel(backend):
        return graph_us(calls)[1]


def peers(geometry: Geometry) -> Iterator[tuple[str, int, int, float]]:
    """`(name, rows, keys, microseconds)` of each peer that this PyTorch has."""
    window = geometry.window + geometry.sinks
    lists: list[tuple[str, int, int, torch.dtype, SDPBackend | None]] = [
        ("SDPA bf16, default", 1, window, torch.bfloat16, None),
        ("SDPA bf16, flash", 1, window, torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        ("SDPA fp32, default", 1, window, torch.float32, None),
        *(("SDPA bf16, default", 1, keys, torch.bfloat16, None) for keys in (4096, 32768, 131072)),
        ("SDPA fp32, math", 64, window, torch.float32, SDPBackend.MATH),
        ("SDPA fp32, default", 64, window, torch.float32, None),
        ("SDPA bf16, default", 64, window, torch.bfloat16, None),
    ]
    for name, rows, keys, dtype, backend in lists:
        try:
            with torch.inference_mode():
                yield name, rows, keys, exact(geometry, keys, rows, dtype, backend)
        except RuntimeError as error:  # a backend that does not take such shapes says so by this
            print(f"{name}, {rows} rows: {error}".splitlines()[0])
        torch.cuda.empty_cache()
