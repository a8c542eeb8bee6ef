"""Other tile shapes of the matrix products, as whole WGSL texts for `bench/products.py` to compare.

They take the bindings and parameters of `o1c_qk` and `o1c_pv` and compute the same. Unlike the shipped
text, which is written by hand for one shape, everything that follows from the shape is filled in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHARED = Path(__file__).resolve().parent.parent / "shaders" / "shared"


@dataclass(frozen=True)
class Shape:
    """A workgroup's tile of `m` rows, `n` columns and `k` terms a step; a lane sums `lane_m` x `lane_n`.

    With two `stages` a step's operands go to one half of the shared memory while others still read the
    other half, which saves one of two barriers. Swizzled, neighbouring lanes bring neighbouring terms of
    one row, which makes for longer reads, and vec4s change places so that the stores fall on all banks.
    """

    m: int
    n: int
    k: int
    lane_m: int
    lane_n: int
    stages: int = 1
    swizzled: bool = False

    @property
    def lanes(self) -> int:
        """Invocations of a workgroup."""
        return self.m * self.n // (self.lane_m * self.lane_n)

    @property
    def shared_bytes(self) -> int:
        """Of float32 operands."""
        return 4 * self.k * (self.m + self.n) * self.stages

    def __str__(self) -> str:
        more = (", two stages" if self.stages == 2 else "") + (", swizzled" if self.swizzled else "")
        return f"{self.m}x{self.n}x{self.k} {self.lanes} lanes {self.lane_m}x{self.lane_n}{more}"


SHAPES: tuple[Shape, ...] = (
    Shape(64, 64, 16, 8, 4),
    Shape(64, 64, 16, 8, 4, stages=2),
    Shape(64, 64, 16, 8, 8),
    Shape(64, 64, 32, 8, 8),
    Shape(128, 64, 16, 8, 8),
    Shape(128, 64, 8, 8, 8, stages=2),
    Shape(128, 128, 16, 8, 8),
    Shape(128, 128, 8, 8, 8, stages=2),
    Shape(64, 64, 16, 8, 4, swizzled=True),
    Shape(64, 64, 16, 8, 8, swizzled=True),
    Shape(128, 64, 16, 8, 8, swizzled=True),
    Shape(128, 128, 16, 8, 8, swizzled=True),
)
"""All within WebGPU's default limits: 16 KiB of shared memory, 256 lanes."""

_HEAD = """
const TILE_M: u32 = {m}u;
const TILE_N: u32 = {n}u;
const TILE_K: u32 = {k}u;
{alias}
var<workgroup> sh_left: array<array<array<Quad, {left_quads}>, {k}>, {stages}>;
var<workgroup> sh_right: array<array<array<Quad, {right_quads}>, {k}>, {stages}>;

fn live_rows() -> u32 {{
    return params.hpg * params.k;
}}

fn panel_row(g: u32, r: u32) -> u32 {{
    let live = min(r, max(live_rows(), 1u) - 1u);
    let k = max(params.k, 1u);
    return (g * params.hpg + live / k) * params.kcap + live % k;
}}

fn panel_rows(g: u32, r: u32) -> vec4<u32> {{
    return vec4<u32>(panel_row(g, r), panel_row(g, r + 1u), panel_row(g, r + 2u), panel_row(g, r + 3u));
}}
"""
_F32 = """alias Quad = vec4<f32>;

fn to_tile(x: vec4<f32>) -> Quad {
    return x;
}
"""
_F16 = """alias Quad = vec4<f16>;

fn to_tile(x: vec4<f32>) -> Quad {
    return vec4<f16>(clamp(x, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}
"""
_QK = """
@group(0) @binding(1) var<storage, read> panel_q: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> panel_k: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> panel_scores: array<vec4<f32>>;

fn first_term(split: u32) -> u32 {
    return 0u;
}

fn end_term(split: u32) -> u32 {
    return params.d;
}

fn left_at(g: u32, r: u32) -> vec4<u32> {
    return panel_rows(g, r) * (params.d / 4u);
}

fn right_at(g: u32, column: u32) -> vec4<u32> {
    let last = g * params.panel + params.panel - 1u;
    let rows = vec4<u32>(g * params.panel + column) + vec4<u32>(0u, 1u, 2u, 3u);
    return min(rows, vec4<u32>(last)) * (params.d / 4u);
}

fn fetch_left(at: vec4<u32>, term: u32) -> mat4x4<f32> {
    let e = term / 4u;
    if (e >= params.d / 4u) {
        return mat4x4<f32>();
    }
    return transpose(mat4x4<f32>(panel_q[at.x + e], panel_q[at.y + e], panel_q[at.z + e], panel_q[at.w + e]));
}

fn fetch_right(at: vec4<u32>, term: u32) -> mat4x4<f32> {
    let e = term / 4u;
    if (e >= params.d / 4u) {
        return mat4x4<f32>();
    }
    return transpose(mat4x4<f32>(panel_k[at.x + e], panel_k[at.y + e], panel_k[at.z + e], panel_k[at.w + e]));
}

fn put(g: u32, split: u32, r: u32, quad: u32, sums: vec4<f32>) {
    if (r < live_rows() && quad < params.panel / 4u) {
        panel_scores[panel_row(g, r) * (params.panel / 4u) + quad] = sums * params.scale;
    }
}
"""
_PV = """
@group(0) @binding(1) var<storage, read> panel_scores: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> panel_v: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> near_parts: array<vec4<f32>>;

fn first_term(split: u32) -> u32 {
    let steps = params.panel / TILE_K;
    return split * ((steps + params.splits - 1u) / params.splits * TILE_K);
}

fn end_term(split: u32) -> u32 {
    return min(first_term(split + 1u), params.panel);
}

fn left_at(g: u32, r: u32) -> vec4<u32> {
    return panel_rows(g, r) * (params.panel / 4u);
}

fn right_at(g: u32, column: u32) -> vec4<u32> {
    let dv4 = params.dv / 4u;
    let rows = vec4<u32>(g * params.panel) + vec4<u32>(0u, 1u, 2u, 3u);
    return rows * dv4 + vec4<u32>(min(column / 4u, dv4 - 1u));
}

fn fetch_left(at: vec4<u32>, term: u32) -> mat4x4<f32> {
    let e = at + vec4<u32>(min(term, params.panel - 4u) / 4u);
    return transpose(mat4x4<f32>(panel_scores[e.x], panel_scores[e.y], panel_scores[e.z], panel_scores[e.w]));
}

fn fetch_right(at: vec4<u32>, term: u32) -> mat4x4<f32> {
    let e = at + vec4<u32>(min(term, params.panel - 4u) * (params.dv / 4u));
    return mat4x4<f32>(panel_v[e.x], panel_v[e.y], panel_v[e.z], panel_v[e.w]);
}

fn put(g: u32, split: u32, r: u32, quad: u32, sums: vec4<f32>) {
    let dv4 = params.dv / 4u;
    if (r < live_rows() && quad < dv4) {
        near_parts[(split * params.nh * params.kcap + panel_row(g, r)) * dv4 + quad] = sums;
    }
}
"""
_MAIN = """
@compute @workgroup_size({lanes})
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
    let splits = max({splits}, 1u);
    let g = wid.z / splits;
    let split = wid.z % splits;
    let run = lane / 32u;
    let place_m = lane / 8u % 4u + run / {runs}u * 4u;
    let place_n = lane % 8u + run % {runs}u * 8u;
{prepare}
    let end = end_term(split);
    for (var term = first_term(split); term < end; term += TILE_K) {{
        let stage = {stage};
{store}
        workgroupBarrier();
{fetch}
{sum}
{barrier}    }}
{put}}}
"""


def _blocks(shape: Shape) -> int:
    """4 x 4 blocks that a lane brings each step; some lanes may lack the last."""
    return -(-(shape.m + shape.n) * shape.k // 16 // shape.lanes)


def _each(shape: Shape, b: int, left: str, right: str) -> str:
    """Statements for block `b` of a lane, for whichever operand it is of."""
    lefts, all_blocks = shape.m * shape.k // 16, (shape.m + shape.n) * shape.k // 16
    start, end = b * shape.lanes, (b + 1) * shape.lanes
    if end <= lefts:
        return f"        {left}\n"
    last = f"if (index{b} < {all_blocks}u) " if end > all_blocks else ""
    if start >= lefts:
        return f"        {last}{{\n            {right}\n        }}\n"
    first = f"        if (index{b} < {lefts}u) {{\n            {left}\n        }}"
    return f"{first} else {last}{{\n            {right}\n        }}\n"


def _place(shape: Shape, index: str, quads: int) -> tuple[str, str]:
    """Vec4 and first term of an operand's block of that index."""
    if shape.swizzled:
        return f"({index} / {shape.k // 4}u)", f"({index} % {shape.k // 4}u * 4u)"
    return f"({index} % {quads}u)", f"({index} / {quads}u * 4u)"


def _stores(shape: Shape, side: str, terms: str, quad: str, term: str) -> str:
    """Stores of a block's four terms."""
    # Eight lanes in a row then store to eight places.
    at = f"{quad} ^ ({term} / 4u * {32 // shape.k}u)" if shape.swizzled else quad
    return " ".join(f"sh_{side}[stage][{term} + {j}u][{at}] = to_tile({terms}[{j}]);" for j in range(4))


def wgsl(product: str, shape: Shape, half: bool) -> str:
    """The text of "qk" or "pv" in that shape, with operands in float16 if `half`."""
    m4, n4 = shape.m // 4, shape.n // 4
    first_right = m4 * shape.k // 4
    prepare = store = fetch = total = put = ""
    rows, columns = shape.m // shape.lane_m, shape.n // shape.lane_n
    for b in range(_blocks(shape)):
        prepare += f"    let index{b} = lane + {b * shape.lanes}u;\n    var at{b} = vec4<u32>(0u);\n"
        prepare += f"    var next{b} = mat4x4<f32>();\n"
        left_quad, left_term = _place(shape, f"index{b}", m4)
        right_quad, right_term = _place(shape, f"(index{b} - {first_right}u)", n4)
        prepare += _each(
            shape, b,
            f"at{b} = left_at(g, wid.y * TILE_M + 4u * ({left_quad})); "
            f"next{b} = fetch_left(at{b}, first_term(split) + {left_term});",
            f"at{b} = right_at(g, wid.x * TILE_N + 4u * ({right_quad})); "
            f"next{b} = fetch_right(at{b}, first_term(split) + {right_term});",
        )  # fmt: skip
        fetch += _each(
            shape, b,
            f"next{b} = fetch_left(at{b}, term + TILE_K + {left_term});",
            f"next{b} = fetch_right(at{b}, term + TILE_K + {right_term});",
        )  # fmt: skip
        store += _each(
            shape, b,
            _stores(shape, "left", f"next{b}", left_quad, left_term),
            _stores(shape, "right", f"next{b}", right_quad, right_term),
        )  # fmt: skip
    step = 32 // shape.k if shape.swizzled else 0
    pairs = [(i, j) for i in range(shape.lane_m // 4) for j in range(shape.lane_n // 4)]
    prepare += "".join(f"    var sums{i}{j} = mat4x4<f32>();\n" for i, j in pairs)
    for term in range(shape.k):
        swap = f" ^ {term // 4 * step}u" if step else ""
        for i in range(shape.lane_m // 4):
            quad = f"(place_m + {i * rows}u){swap}"
            total += f"        let l{term}_{i} = vec4<f32>(sh_left[stage][{term}u][{quad}]);\n"
        for j in range(shape.lane_n // 4):
            quad = f"(place_n + {j * columns}u){swap}"
            total += f"        let r{term}_{j} = vec4<f32>(sh_right[stage][{term}u][{quad}]);\n"
        for i, j in pairs:
            total += f"        sums{i}{j} = add_outer(sums{i}{j}, l{term}_{i}, r{term}_{j});\n"
    for i, j in pairs:
        for row in range(4):
            put += (
                f"    put(g, split, wid.y * TILE_M + 4u * (place_m + {i * rows}u) + {row}u, "
                f"wid.x * (TILE_N / 4u) + place_n + {j * columns}u, sums{i}{j}[{row}]);\n"
            )
    parts = [
        "enable f16;\n" if half else "",
        (SHARED / "params.wgsl").read_text(encoding="utf-8"),
        (SHARED / "outer.wgsl").read_text(encoding="utf-8"),
        _HEAD.format(
            m=shape.m, n=shape.n, k=shape.k, stages=shape.stages, left_quads=m4, right_quads=n4,
            alias=_F16 if half else _F32,
        ),
        _QK if product == "qk" else _PV,
        _MAIN.format(
            lanes=shape.lanes, splits="1u" if product == "qk" else "params.splits", runs=columns // 8,
            prepare=prepare, store=store, fetch=fetch, sum=total, put=put,
            stage="term / TILE_K % 2u" if shape.stages == 2 else "0u",
            barrier="" if shape.stages == 2 else "        workgroupBarrier();\n",
        ),
    ]  # fmt: skip
    return "".join(parts)


def grid(product: str, shape: Shape, p: dict[str, int | float]) -> tuple[int, int, int]:
    """Workgroups of "qk" or "pv" in that shape."""
    width, groups = ("panel", p["ng"]) if product == "qk" else ("dv", p["ng"] * p["splits"])
    tiles_m = -(-int(p["hpg"] * p["k"]) // shape.m)
    return -(-int(p[width]) // shape.n), tiles_m, int(groups)
