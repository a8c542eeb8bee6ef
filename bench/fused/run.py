"""A token in two dispatches: prototypes, checked against the token path's twins, then timed.

    python bench/fused/run.py                         the default contestants on the best GPU
    python bench/fused/run.py --variant v1,p=2 --variant v2,own=2
    python bench/fused/run.py --sweep near            other sets, see SETS
    python bench/fused/run.py --check                 only correctness: random small geometries, every state
    python bench/fused/run.py --dump v1,p=4 --to DIR  the WGSL of one variant

Layers have planes of their own and share scratch; all run in one compute pass with timestamps at its ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import wgsl
from wgsl import Choice, parse

import cortiq_o1 as o1
from cortiq_o1.cpu.twins import TWINS
from cortiq_o1.gpu.timing import Stopwatch
from cortiq_o1.planes import LARGE, NO_FAR_LIMIT

SETS: dict[str, tuple[str, ...]] = {
    # The structures, beside the two floors.
    "default": (
        "v1,p=4", "v1,p=2", "v1,p=1", "v1,p=4,far=last", "v1,p=4,own=2",
        "v1,p=4,v=mid", "v1,p=4,v=late",
        "v1,p=4,lp=8", "v1,p=4,lp=8,sr=2",
        "v1,p=4,tiles=2", "v1,p=4,tiles=4", "v1,p=4,nt=256,lp=8,mt=256",
        "v1,p=4,mc=4", "v1,p=4,mc=4,mt=128", "v1,p=4,mc=8,mt=128", "v1,p=4,mc=16",
        "v2", "v2,mc=4", "v2,touch=1,mc=4", "v2,touch=2,mc=4", "v2,mc=4,mt=128", "v2,own=2", "v2,lp=8,sr=2,mc=4",  # noqa: E501
        "v3,p=4", "v3,p=2", "v1,p=4,general",
    ),
    "near": (
        "v1,nofar=1", "v1,nofar=1,v=mid", "v1,nofar=1,v=late", "v1,nofar=1,lp=8", "v1,nofar=1,lp=8,sr=2",
        "v1,nofar=1,lp=8,sr=2,v=mid", "v1,nofar=1,lp=4,sr=2", "v1,nofar=1,lp=4,sr=2,v=mid", "v1,nofar=1,tiles=2",  # noqa: E501
        "v1,nofar=1,tiles=2,v=mid", "v1,nofar=1,tiles=3", "v1,nofar=1,tiles=4", "v1,nofar=1,tiles=8",
        "v1,nofar=1,nt=256,lp=8", "v1,nofar=1,nt=256,lp=8,v=late", "v1,nofar=1,nt=256,lp=8,v=mid",
        "v1,nofar=1,own=2", "v1,nofar=1,general",
    ),
    "far": (
        "v1,nofar=2,p=1", "v1,nofar=2,p=2", "v1,nofar=2,p=4", "v1,nofar=2,p=4,ta=2", "v1,nofar=2,p=8,ta=1",
        "v1,nofar=2,p=4,lp=8", "v1,nofar=2,p=2,lp=8", "v1,nofar=2,p=1,nt=256,lp=8", "v1,nofar=2,p=2,nt=256,lp=8",  # noqa: E501
        "v1,nofar=2,p=4,nt=256,lp=8", "v2,nofar=2", "v2,nofar=2,nt=256,lp=8", "v1,p=8,ta=1", "v1,p=4,ta=2",
        "v1,p=2,lp=8,sr=2", "v1,p=2,lp=8", "v1,p=8,ta=1,lp=8,sr=2",
    ),
    "merge": (
        "v1", "v1,mc=4", "v1,mc=2", "v1,mc=16", "v1,mc=32", "v1,mt=128", "v1,mt=128,mc=4", "v1,mt=128,mc=2",
        "v1,mt=64,mc=2", "v1,mt=64,mc=4", "v1,tiles=2,mt=128", "v1,tiles=2,mt=128,mc=4", "v1,tiles=2,mc=4",
        "v1,tiles=2,mc=16",
    ),
    "smoke": ("v1", "v1,p=2,tiles=2,lp=8,sr=2,mc=4", "v1,own=2,general", "v2", "v3"),
}  # fmt: skip
CHECKS = (
    "v1,general", "v1,p=1,own=2,general,v=mid", "v1,p=2,lp=8,sr=2,mc=4,mt=128,general", "v2,general",
    "v2,own=2,mc=4,general,tiles=3", "v3,p=2,general,tiles=2", "v1,nt=256,lp=8,general,far=last,ta=1",
    "v2,nt=256,lp=8,general,v=late,mc=16", "v2,touch=2,mc=4,general",
)  # fmt: skip
FAR_ROWS = 3000
PROBE_GROUPS, PROBE_STEPS, WARM_PROBES = 16_384, 256, 100
PROBE_FLOP = PROBE_GROUPS * 64 * PROBE_STEPS * 8 * 4 * 2.0
PROBE = f"""
struct Params {{ count: u32, a: u32, b: u32, c: u32 }}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> src: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> dst: array<vec4<f32>>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
    let x = src[0] + f32(id.x);
    var a = x; var b = x + 1.0; var c = x + 2.0; var e = x + 3.0;
    for (var i = 0u; i < {PROBE_STEPS}u; i++) {{
        a = fma(a, x, x); b = fma(b, x, x); c = fma(c, x, x); e = fma(e, x, x);
        a = fma(a, x, x); b = fma(b, x, x); c = fma(c, x, x); e = fma(e, x, x);
    }}
    if (params.count == 0u) {{ dst[0] = a + b + c + e; }}
}}
"""
# Reads a layer's window and nothing else; a tiny dispatch after it.
FLOOR_READ = """
struct Params { count: u32, a: u32, b: u32, c: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ring: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> part: array<vec4<f32>>;
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = wid.x * 2048u + lane;
    let s = (((ring[at] + ring[at + 128u]) + (ring[at + 256u] + ring[at + 384u]))
        + ((ring[at + 512u] + ring[at + 640u]) + (ring[at + 768u] + ring[at + 896u])))
        + (((ring[at + 1024u] + ring[at + 1152u]) + (ring[at + 1280u] + ring[at + 1408u]))
        + ((ring[at + 1536u] + ring[at + 1664u]) + (ring[at + 1792u] + ring[at + 1920u])));
    if (s.x == 12345.678) { part[0] = s; }
}
"""
FLOOR_TINY = """
struct Params { count: u32, a: u32, b: u32, c: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> part: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    out[min(wid.x * 128u + lane, 1023u)] = part[wid.x * 128u + lane];
}
"""
STATE = ("out", "group_meta", "ring_k", "ring_v", "far_mz", "t_hat")


def up(n: int, to: int) -> int:
    return -(-n // to) * to


def sizes(
    ng: int, hpg: int, d: int, dv: int, w: int, ns: int, m: int, rect: int = 0, splits: int = 1
) -> dict[str, Any]:
    """The twins' parameters."""
    return {
        "hpg": hpg, "m": m, "w": w, "ns": ns, "d": d, "dv": dv, "nh": ng * hpg, "ng": ng, "k": 1, "r0": 0,
        "kcap": 1, "pieces": 1, "rect": rect, "scale": float(np.float32(d**-0.5)), "panel": 64, "splits": splits,  # noqa: E501
    }  # fmt: skip


def planes_of(p: dict[str, Any], seed: int, steady: bool = False) -> dict[str, np.ndarray]:
    """The planes of a layer and a row: steady (full ring, long far field), or in a random state a group."""
    rng = np.random.default_rng(seed)
    ng, nh, m, d, dv, w, ns = (p[n] for n in ("ng", "nh", "m", "d", "dv", "w", "ns"))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    planes = {
        "group_meta": np.zeros((ng, 8), np.uint32),
        "q": normal(1, nh, d), "k_rows": normal(1, ng, d), "v_rows": normal(1, ng, dv),
        "ring_k": normal(ng, w + ns, d), "ring_v": normal(ng, w + ns, dv),
        "k_tilde": normal(ng, m, d), "q_tilde": normal(nh, m, d), "mix": 0.1 * normal(nh, m, m),
        "far_mz": np.zeros((nh, 4, m), np.float32), "t_hat": normal(nh, 2, m, dv),
    }  # fmt: skip
    if not steady and seed % 2:
        planes["mix"] = np.abs(planes["mix"])
    meta, mz = planes["group_meta"], planes["far_mz"]
    for g in range(ng):
        heads = slice(g * p["hpg"], (g + 1) * p["hpg"])
        window = w if steady or g == 0 else int(rng.integers(max(1, w // 2), w + 1))
        kind = "steady" if steady else str(
            rng.choice(["steady", "steady", "filling", "new", "limit", "flush", "empty", "limit empty"])
        )  # fmt: skip
        length = int(rng.integers(0, window)) if kind in ("filling", "new") else window
        rows = 0 if kind in ("new", "empty", "limit empty") else 4095 if kind == "flush" else FAR_ROWS
        limit = rows if kind.startswith("limit") else NO_FAR_LIMIT
        live = m if steady else int(rng.integers(min(4, m), m + 1))
        # A ring that still fills starts at slot 0.
        head = 0 if length < window else int(rng.integers(0, window))
        meta[g, :7] = length, head, rows, window, limit, live, int(rng.integers(0, 1 << 32))
        if rows:
            mz[heads, 0] = (2 * np.log(rows)) ** 0.5 - (0 if steady else 1.5 * rng.random())
            mz[heads, 0] -= 0 if steady else 3 * rng.random((p["hpg"], m))
            mz[heads, 1] = rows * np.exp(0.5 - mz[heads, 0])
            if not steady:
                mz[heads, 2] = rng.random((p["hpg"], m)) * mz[heads, 1]
                mz[heads, 3] = rng.random()
                mz[heads, 0] -= mz[heads, 3]
        else:
            mz[heads, 0] = -LARGE
            planes["t_hat"][heads] = 0
    return planes


def expected(p: dict[str, Any], planes: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """Outputs and state after the row, by the twins in float32 or float64."""
    got = {n: a.astype(dtype) if a.dtype == np.float32 else a.copy() for n, a in planes.items()}
    got["out"] = np.zeros((1, p["nh"], p["dv"]), dtype)
    got["tok_part"] = np.zeros((p["nh"], p["splits"], 4 + p["dv"]), dtype)
    got["tok_record"] = np.zeros((p["nh"], 8 + 4 * p["m"]), dtype)
    from cortiq_o1.kernels import KERNELS

    for name in ("o1c_tok_near", "o1c_tok_far", "o1c_tok_merge", "o1c_tok_commit"):
        TWINS[name](p, (1, 1, 1), *(got[b.name] for b in KERNELS[name].bindings))
    return {n: got[n] for n in STATE} | {"record": got["tok_record"]}


class Layers:
    """Buffers of several equal layers on a device."""

    def __init__(self, context: Any, p: dict[str, Any], planes: dict[str, np.ndarray], layers: int) -> None:
        self.context, self.p, self.planes, self.layers = context, p, planes, layers
        create = context.memory.create
        self.sections: dict[str, tuple[tuple[str, int], ...]] = {}  # buffer: (plane, byte offset)
        self.nbytes: dict[str, int] = {}
        for buffer, names in (
            ("group_meta", ("group_meta",)), ("q", ("q",)), ("kv", ("k_rows", "v_rows")),
            ("ring", ("ring_k", "ring_v")), ("marks", ("k_tilde", "q_tilde", "mix")), ("far_mz", ("far_mz",)),
            ("t_hat", ("t_hat",)),
        ):  # fmt: skip
            at, found = 0, []
            for name in names:
                found.append((name, at))
                at = up(at + planes[name].nbytes, 256)
            self.sections[buffer], self.nbytes[buffer] = tuple(found), at
        least = min(-(-(p["w"] + p["ns"] + 1) // 32), 4096) + 2
        self.nbytes["out"] = 4 * p["nh"] * p["dv"]
        records = p["nh"] * (2 + 2 * p["m"] + p["dv"] // 4)
        self.nbytes["part"] = 16 * (p["nh"] * (least + 1) * (1 + p["dv"] // 4) + records)
        self.nbytes["far_part"] = 16 * (p["nh"] * (1 + p["dv"] // 4) + records)
        shared = {"q", "kv", "out", "part"}
        self.buffers = {
            n: [create(n, size) for _ in range(1 if n in shared else layers)]
            for n, size in self.nbytes.items()
        }
        self.restore(range(layers))

    def image(self, buffer: str) -> np.ndarray:
        data = np.zeros(self.nbytes[buffer], np.uint8)
        for name, at in self.sections[buffer]:
            flat = np.ascontiguousarray(self.planes[name]).reshape(-1).view(np.uint8)
            data[at : at + flat.size] = flat
        return data

    def restore(self, layers: Sequence[int]) -> None:
        pairs = []
        for buffer in self.sections:
            data = self.image(buffer)
            found = self.buffers[buffer]
            pairs += [(found[i], data) for i in layers if i < len(found)]
        self.context.upload(pairs, "upload")

    def read(self) -> dict[str, np.ndarray]:
        """The first layer's state and the output."""
        got = {}
        for buffer in ("group_meta", "ring", "far_mz", "t_hat"):
            data = np.empty(self.nbytes[buffer], np.uint8)
            self.context.download(self.buffers[buffer][0], data, "read")
            for name, at in self.sections[buffer]:
                like = self.planes[name]
                got[name] = data[at : at + like.nbytes].view(like.dtype).reshape(like.shape)
        out = np.empty((1, self.p["nh"], self.p["dv"]), np.float32)
        self.context.download(self.buffers["out"][0], out, "read")
        got["out"] = out
        return got

    def section(self, buffer: str, name: str) -> int:
        """Where a section starts, in vec4s."""
        return dict(self.sections[buffer])[name] // 16


class Step:
    """A pipeline with its grid, and the bind groups of every layer."""

    def __init__(
        self,
        layers: Layers,
        label: str,
        source: str,
        names: Sequence[str],
        grid: tuple[int, ...],
        uniform: Any,
    ) -> None:
        device = layers.context.device
        start = time.perf_counter()
        entries = [{"binding": 0, "visibility": 4, "buffer": {"type": "uniform"}}]
        for i, name in enumerate(names, 1):
            kind = "storage" if name.endswith("!") else "read-only-storage"
            entries.append({"binding": i, "visibility": 4, "buffer": {"type": kind}})
        try:
            module = device.create_shader_module(label=label, code=source)
            layout = device.create_bind_group_layout(label=label, entries=entries)
            self.pipeline = device.create_compute_pipeline(
                label=label,
                layout=device.create_pipeline_layout(label=label, bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": "main"},
            )
        except Exception:
            Path("/tmp/failed.wgsl").write_text(source)
            raise
        self.compile_s = time.perf_counter() - start
        self.grid = grid
        self.groups = []
        for layer in range(layers.layers):
            resources = [uniform]
            for name in names:
                found = layers.buffers[name.rstrip("!")]
                resources.append(found[layer % len(found)])
            self.groups.append(
                device.create_bind_group(
                    label=label,
                    layout=layout,
                    entries=[
                        {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}}
                        for i, b in enumerate(resources)
                    ],
                )
            )


class Variant:
    """One choice on some layers: its dispatches in order."""

    def __init__(self, layers: Layers, choice: Choice) -> None:
        self.choice, self.layers = choice, layers
        p = layers.p
        if choice.un and (p["d"] != 128 or p["dv"] != 128):
            raise ValueError("only `general` variants fit this width")
        rows = p["w"] + p["ns"] + (1 if choice.own == 1 else 0)
        self.splits = splits = -(-rows // (choice.tiles * choice.nk))
        dv4 = p["dv"] // 4
        head_at = p["nh"] * (splits + 1) * dv4
        rec_at = head_at + p["nh"] * (splits + 1)
        stride = 2 + (p["m"] if choice.kind == "v1" else 2 * p["m"] + dv4)
        far_head_at = p["nh"] * dv4
        values: dict[str, Any] = {n: p[n] for n in wgsl.PARAM_NAMES[:10]}
        values |= {
            "splits": splits,
            "ring_v_at": layers.section("ring", "ring_v"),
            "q_tilde_at": layers.section("marks", "q_tilde"),
            "mix_at": layers.section("marks", "mix"),
            "kv_v_at": layers.section("kv", "v_rows"),
            "head_at": head_at,
            "rec_at": far_head_at + p["nh"] if choice.split else rec_at,
            "rec_stride": stride,
            "far_values_at": 0,
            "far_head_at": far_head_at,
        }
        if 16 * (rec_at + p["nh"] * stride) > layers.nbytes["part"]:
            raise ValueError("part is too small")
        words = np.zeros(len(wgsl.PARAM_NAMES), np.uint32)
        for i, name in enumerate(wgsl.PARAM_NAMES):
            if name == "scale":
                words[i : i + 1].view(np.float32)[0] = values[name]
            else:
                words[i] = values.get(name, 0)
        context = layers.context
        uniform = context.memory.create("params", words.nbytes, 0x40 | 0x8)
        context.write(uniform, words, "params")
        blocks, ng, hpg = -(-p["hpg"] // 4), p["ng"], p["hpg"]
        pieces = choice.pieces
        self.shared_bytes: list[int] = []
        self.steps: list[Step] = []

        def add(which: str, made: tuple[str, int], grid: tuple[int, int, int]) -> None:
            self.shared_bytes.append(made[1])
            if made[1] > 16384:
                raise ValueError(f"{choice.spec}: {made[1]} bytes of shared memory")
            names = wgsl.bindings(choice, which)
            assert len(names) <= 8
            self.steps.append(Step(layers, f"{choice.spec} {which}", made[0], names, grid, uniform))

        if choice.split:
            add("far", wgsl.far_source(choice), (ng, hpg * pieces, 1))
            add("near", wgsl.near_source(choice), (ng, splits, blocks))
        else:
            add("first", wgsl.first_source(choice), (ng, hpg * pieces + splits, blocks))
        merges = -(-dv4 // choice.mc)
        if not choice.nofar:
            add("merge", wgsl.merge_source(choice, splits), (merges, p["nh"] + ng, 1))

    def check(self, want: dict[str, np.ndarray]) -> dict[str, float]:
        """Worst differences after one row on the first layer, over the plane's largest number."""
        run(self.layers.context, self.steps, 1, 1)
        return differences(self.layers.read(), want)


def differences(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
    """The worst of each plane, over its largest number; of far_mz, over each number itself."""
    found = {}
    for name in STATE:
        difference = np.abs(got[name].astype(np.float64) - want[name].astype(np.float64))
        sizes = np.abs(want[name].astype(np.float64))
        if name != "far_mz":
            sizes = sizes.max()
        error = (difference / np.maximum(1.0, sizes)).max()
        found[name] = float(error) if np.isfinite(error) else float("inf")
    return found


def run(context: Any, steps: Sequence[Step], layers: int, passes: int) -> list[float] | None:
    """Nanoseconds of each of several passes over the layers, in one submission."""
    watch = Stopwatch(context, passes)
    encoder = context.encoder("token")
    for number in range(passes):
        compute_pass = encoder.begin_compute_pass(label="token", timestamp_writes=watch.writes(number))
        for layer in range(layers):
            for step in steps:
                compute_pass.set_pipeline(step.pipeline)
                compute_pass.set_bind_group(0, step.groups[layer])
                compute_pass.dispatch_workgroups(*step.grid)
        compute_pass.end()
    watch.resolve(encoder)
    context.submit(encoder, "token")
    context.flush("token")
    spent = watch.nanoseconds()
    return None if spent is None else list(spent)


class Probe:
    """The GPU's arithmetic now, by a loop of multiply-adds: its clock, so to speak."""

    def __init__(self, layers: Layers, software: bool) -> None:
        self.context, self.step = layers.context, None
        self.best, self.warmed = 0.0, 0
        if software:
            return
        uniform = self.context.memory.create("probe.params", 16, 0x40 | 0x8)
        self.context.write(uniform, np.array([1, 0, 0, 0], np.uint32), "probe")
        self.step = Step(layers, "probe", PROBE, ["q", "out!"], (PROBE_GROUPS, 1, 1), uniform)

    def tflops(self, dispatches: int) -> float:
        if self.step is None:
            return 0.0
        spent = run(self.context, [self.step] * dispatches, 1, 1)
        return dispatches * PROBE_FLOP / (spent or [float("inf")])[0] / 1e3

    def warm(self) -> None:
        """Loads the GPU until its clock stands: an idle one computes at a low clock for a while."""
        if self.step is None:
            return
        deadline = time.perf_counter() + 3.0
        while time.perf_counter() < deadline:
            found = self.tflops(WARM_PROBES)
            self.best = max(self.best, found)
            if found > 0.98 * self.best and self.warmed >= 6:
                break
            self.warmed += 1


def check_all(context: Any, seeds: int, say: Any) -> bool:
    """Every checked variant on small random geometries in random states; true where all agree."""
    good = True
    for seed in range(seeds):
        rng = np.random.default_rng(100 + seed)
        d = int(rng.choice([8, 64, 96, 128, 256, 512]))
        dv = d if rng.random() < 0.6 else int(rng.choice([16, 64, 128, 320]))
        p = sizes(
            int(rng.integers(1, 4)), int(rng.integers(1, 10)), d, dv, int(rng.integers(1, 130)),
            int(rng.choice([0, 1, 4])), int(rng.choice([4, 7, 30, 32, 33, 64])), int(rng.integers(0, 2)),
        )  # fmt: skip
        planes = planes_of(p, seed)
        truth, near = expected(p, planes, np.float64), expected(p, planes, np.float32)
        specs = [CHECKS[i % len(CHECKS)] for i in range(3 * seed, 3 * seed + 3)]
        if d == dv == 128:
            specs += [s.replace(",general", "") for s in specs]
        layers = Layers(context, p, planes, 1)
        records = truth["record"]
        say(
            f"seed {seed}: {p['ng']} x {p['hpg']} heads, d {d}, dv {dv}, w {p['w']}, sinks {p['ns']}, "
            f"m {p['m']}, rect {p['rect']}; dropped {(records[:, 2] == 0).sum()} of {p['nh']}; "
            f"meta {planes['group_meta'][:, :6].tolist()}"
        )
        own = differences(near, truth)
        for spec in specs:
            layers.restore([0])
            errors = Variant(layers, parse(spec, un=1)).check(truth)
            # The twin's own float32 error says how much the numbers of this seed cancel.
            bad = [n for n in STATE if errors[n] > max(4e-6, 8 * own[n])]
            bad += [n for n in ("group_meta", "ring_k", "ring_v") if errors[n] > 0]
            good = good and not bad
            text = ", ".join(f"{n} {errors[n]:.1e} ({own[n]:.0e})" for n in ("out", "far_mz", "t_hat"))
            say(f"    {'BAD ' + ' '.join(bad) if bad else 'good'} {spec}: {text}")
    return good


def floors(layers: Layers) -> list[tuple[str, list[Step]]]:
    context, p = layers.context, layers.p
    uniform = context.memory.create("floor.params", 16, 0x40 | 0x8)
    count = layers.nbytes["ring"] // 16 // 2048
    read = Step(layers, "floor read", FLOOR_READ, ["ring", "part!"], (count, 1, 1), uniform)
    tiny = Step(
        layers, "floor tiny", FLOOR_TINY, ["part", "out!"], (max(1, p["nh"] * p["dv"] // 512), 1, 1), uniform
    )
    return [("floor: read", [read]), ("floor: read, tiny", [read, tiny]), ("floor: tiny", [tiny])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto", help="as for open_device")
    parser.add_argument("--variant", action="append", help="a choice such as v1,p=2,mc=4; may be repeated")
    parser.add_argument(
        "--sweep", nargs="+", default=["default"], choices=list(SETS), help="sets of variants"
    )
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--heads-per-group", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--landmarks", type=int, default=32)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--passes", type=int, default=9, help="timed passes a round (9)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every variant (2)")
    parser.add_argument("--no-alone", action="store_true", help="do not time the dispatches alone")
    parser.add_argument("--check", action="store_true", help="only correctness, on random small geometries")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--dump", help="print the WGSL of a variant")
    parser.add_argument("--to", type=Path, help="folder for --dump")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    if args.dump:
        choice = parse(args.dump)
        rows = args.window + args.sinks + (1 if choice.own == 1 else 0)
        splits = -(-rows // (choice.tiles * choice.nk))
        made = {"merge": wgsl.merge_source(choice, splits)}
        if choice.split:
            made |= {"near": wgsl.near_source(choice), "far": wgsl.far_source(choice)}
        else:
            made |= {"first": wgsl.first_source(choice)}
        for name, (text, nbytes) in made.items():
            say(f"// {choice.spec} {name}: {nbytes} bytes of shared memory, {wgsl.bindings(choice, name)}")
            if args.to:
                args.to.mkdir(parents=True, exist_ok=True)
                (args.to / f"{name}.wgsl").write_text(text)
            else:
                print(text)
        return
    device = o1.open_device(args.device)
    if device.gpu is None:
        raise SystemExit("no GPU; name an adapter with --device")
    context = device.engine.context
    began = time.perf_counter()
    if args.check:
        good = check_all(context, args.seeds, say)
        say("all agree" if good else "SOME DIFFER")
        raise SystemExit(0 if good else 1)
    p = sizes(args.groups, args.heads_per_group, args.dim, args.dim, args.window, args.sinks, args.landmarks)
    planes = planes_of(p, 3, steady=True)
    layers = Layers(context, p, planes, args.layers)
    truth = expected(p, planes, np.float64)
    say(
        f"{device.name} ({device.backend}), {args.layers} layers, ready after {time.perf_counter() - began:.1f} s"  # noqa: E501
    )
    specs = args.variant or [s for name in args.sweep for s in SETS[name]]
    results: dict[str, dict[str, Any]] = {}
    for spec in dict.fromkeys(specs):
        choice = parse(spec, un=int(args.dim == 128))
        try:
            variant = Variant(layers, choice)
        except Exception as error:
            say(f"{spec}: {type(error).__name__}: {str(error)[:600]}")
            continue
        row: dict[str, Any] = {"spec": spec, "splits": variant.splits, "shared": variant.shared_bytes}
        row["compile_s"] = [round(s.compile_s, 3) for s in variant.steps]
        if not choice.nofar:
            errors = variant.check(truth)
            layers.restore([0])
            row["errors"] = errors
            row["good"] = max(errors.values()) < 5e-6 and max(errors[n] for n in ("ring_k", "ring_v")) == 0
            row["good"] = bool(row["good"] and errors["group_meta"] == 0)
        row["steps"] = variant.steps
        results[spec] = row
    for label, steps in floors(layers):
        results[label] = {"spec": label, "splits": 0, "steps": steps, "compile_s": [], "floor": True}
    say(f"compiled and checked after {time.perf_counter() - began:.1f} s")

    probe = Probe(layers, device.software)
    for _ in range(args.rounds):
        for row in results.values():
            steps = row["steps"]
            parts = [("us", steps)]
            if len(steps) > 1 and not args.no_alone and not row.get("floor"):
                parts += [("first_us", steps[:-1]), ("merge_us", steps[-1:])]
            run(context, steps, args.layers, 1)
            probe.warm()
            row.setdefault("probe", []).append(probe.tflops(8))
            for name, part in parts:
                spent = run(context, part, args.layers, args.passes + 2)
                if spent is None:
                    raise SystemExit("this adapter's timestamps do not work")
                row.setdefault(name, []).extend(t / args.layers / 1e3 for t in spent[2:])
            row["probe"].append(probe.tflops(8))
    say(
        f"{'variant':34} {'us':>7} {'least':>7} {'most':>7} {'D1':>7} {'D2':>7}  splits  error    compile s"
        "     probe least most"
    )
    for row in sorted(results.values(), key=lambda r: statistics.median(r["us"])):
        del row["steps"]
        row["median"] = statistics.median(row["us"])

        def alone(name: str, row: dict[str, Any] = row) -> str:
            return f"{statistics.median(row[name]):7.2f}" if name in row else "      -"

        error = f"{max(row['errors'].values()):.1e}" if "errors" in row else "-      "
        if "good" in row and not row["good"]:
            error += " WRONG " + str(row["errors"])
        say(
            f"{row['spec']:34} {row['median']:7.2f} {min(row['us']):7.2f} {max(row['us']):7.2f} "
            f"{alone('first_us')} {alone('merge_us')}  {row['splits']:5}  {error}  "
            f"{'+'.join(f'{t:.2f}' for t in row['compile_s']):12} {min(row['probe']):6.1f} {max(row['probe']):6.1f}"  # noqa: E501
        )
    say(f"done after {time.perf_counter() - began:.1f} s")
    if args.json:
        print(json.dumps({"device": device.info(), "results": list(results.values())}, indent=1, default=str))


if __name__ == "__main__":
    main()
