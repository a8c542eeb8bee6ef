"""WGSL of the chunk's near part in one kernel, for several shapes of its tile.

    group_meta [G][8] u32
    q          [rows][nh][d] vec4              the call's queries
    ring_k     [G][w + ns][d] vec4             the ring's w slots, then the sinks
    ring_v     [G][w + ns][dv] vec4
    k_rows     [rows][G][d] vec4               the call's keys
    v_rows     [rows][G][dv] vec4              the call's values
    parts      [slots][kcap][nh][1 + dv] vec4  largest logit and mass at its scale, then the value sum

A tile is `rows` rows (a row and a head each, heads innermost) of a group's product times `keys` keys. The
tiles of all groups and rows, in order, are cut into equal runs, one a workgroup, so that all of them take
as long; a run may end one group's or one row tile's keys and begin the next one's. A pair of group and row
tile then has the parts of two workgroups or more, and `o1f_merge` finds which from the same figures:
params.panel tiles a pair, params.pieces tiles a workgroup, params.splits rows a tile.

Both products are the same loop: a lane sums 8 rows times 4 or 8 columns; operands lie in shared memory as
[term][rows, columns], queries and keys first, then weights and values, `step` terms at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

VALUE_QUADS = 32
"""Vec4s of the value a workgroup sums; wider values take more workgroups, which compute the scores again."""


@dataclass(frozen=True)
class Shape:
    """A tile: rows, keys, terms of a step; `ahead`: whether the next step's operands are read before this
    one's are summed; `fused`: multiply-adds written as fma; `pad`: vec4s that keep rows of shared memory
    in different banks; `buffers` 2: one step is stored while the other is summed, one barrier a step."""

    rows: int = 64
    keys: int = 64
    step: int = 16
    ahead: bool = True
    fused: bool = False
    pad: int = 1
    buffers: int = 1

    @property
    def lanes(self) -> int:
        return 2 * self.rows

    @property
    def quads(self) -> int:
        """Vec4s of a row of shared memory."""
        return self.rows // 4 + max(self.keys // 4, VALUE_QUADS) + self.pad

    @property
    def shared_bytes(self) -> int:
        return 16 * self.quads * self.step * self.buffers

    def __str__(self) -> str:
        return (
            f"{self.rows}x{self.keys} step {self.step}"
            + ("" if self.buffers == 1 else " double")
            + ("" if self.ahead else " late")
            + (" fma" if self.fused else "")
            + ("" if self.pad else " unpadded")
        )


_HEAD = """
//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/arithmetic.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> ring_k: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> ring_v: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> k_rows: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> v_rows: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> parts: array<vec4<f32>>;

const OWN: u32 = 0x80000000u;     // marks a row of k_rows and v_rows
const NOTHING: f32 = -1.0e38;     // largest of no logits: above -LARGE, so that a masked one weighs 0
const VALUE_QUADS: u32 = 32u;

// What a workgroup must know of a group and a tile of its rows.
struct Pair {
    g: u32,
    row: u32,        // the tile's first row
    live: u32,       // the group's rows
    x0: u32,         // the oldest x that the first row sees
    columns: u32,    // sinks, and all that any row of the tile sees
    inner: u32,      // columns first of which all rows see, and the last such
    outer: u32,
}

fn first_x(group: Group, i: u32) -> u32 {
    return group.len + i + 1u - window_rows(group, i);
}

fn pair_of(group: Group, g: u32, tile: u32) -> Pair {
    let hpg = max(params.hpg, 1u);
    let live = hpg * params.k;
    let row = tile * BM;
    let low = row / hpg;
    let high = min(row + BM, live) - 1u;
    let x0 = first_x(group, low);
    let last = group.len + high / hpg;
    return Pair(
        g, row, live, x0, params.ns + last + 1u - x0,
        params.ns + first_x(group, high / hpg) - x0, params.ns + group.len + low - x0,
    );
}

// Where column s lies: a row of ring_k and ring_v, or of k_rows and v_rows with OWN set. A column past the
// last stands for the last.
fn column_row(group: Group, pair: Pair, column: u32) -> u32 {
    let s = min(column, pair.columns - 1u);
    if (s < params.ns) {
        return sink_row(pair.g, s);
    }
    let x = pair.x0 + s - params.ns;
    if (x < group.len) {
        let slot = group.head + x;
        return pair.g * near_capacity() + select(slot, slot - group.window, slot >= group.window);
    }
    return OWN | ((params.r0 + x - group.len) * params.ng + pair.g);
}

fn scaled_row(row: u32, width: u32) -> u32 {
    return (row & OWN) | ((row & ~OWN) * width);
}

fn key_at(at: u32, e: u32) -> vec4<f32> {
    if ((at & OWN) != 0u) {
        return k_rows[(at & ~OWN) + e];
    }
    return ring_k[at + e];
}

fn value_at(row: u32, quad: u32) -> vec4<f32> {
    let dv4 = params.dv / 4u;
    if ((row & OWN) != 0u) {
        return v_rows[(row & ~OWN) * dv4 + quad];
    }
    return ring_v[row * dv4 + quad];
}

// Four rows of queries or keys at one vec4 of the width; zeros past it.
fn fetch(is_query: bool, mixed: bool, at: vec4<u32>, e: u32) -> mat4x4<f32> {
    if (e >= params.d / 4u) {
        return mat4x4<f32>();
    }
    if (is_query) {
        return mat4x4<f32>(q[at.x + e], q[at.y + e], q[at.z + e], q[at.w + e]);
    }
    if (mixed) {
        return mat4x4<f32>(key_at(at.x, e), key_at(at.y, e), key_at(at.z, e), key_at(at.w, e));
    }
    return mat4x4<f32>(ring_k[at.x + e], ring_k[at.y + e], ring_k[at.z + e], ring_k[at.w + e]);
}

fn query_at(pair: Pair, r: u32) -> u32 {
    let live = min(pair.row + r, pair.live - 1u);
    let hpg = max(params.hpg, 1u);
    return ((params.r0 + live / hpg) * params.nh + pair.g * hpg + live % hpg) * (params.d / 4u);
}

fn exp4(x: vec4<f32>) -> vec4<f32> {
    return exp(max(x, vec4<f32>(EXP_FLOOR)));
}

fn max4(a: mat4x4<f32>) -> vec4<f32> {
    return max(max(a[0], a[1]), max(a[2], a[3]));
}

fn weights4(a: mat4x4<f32>, largest: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        exp4(a[0] - largest), exp4(a[1] - largest), exp4(a[2] - largest), exp4(a[3] - largest)
    );
}

fn columns4(a: mat4x4<f32>) -> vec4<f32> {
    return (a[0] + a[1]) + (a[2] + a[3]);
}

// Row i of the sums times factor[i].
fn rescaled(a: mat4x4<f32>, factor: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(a[0] * factor.x, a[1] * factor.y, a[2] * factor.z, a[3] * factor.w);
}

// Which of four rows see a column: the sinks, and low .. high.
struct Sight {
    low: vec4<u32>,
    high: vec4<u32>,
}

fn sight_of(group: Group, pair: Pair, r: u32) -> Sight {
    let hpg = max(params.hpg, 1u);
    let i = min(vec4<u32>(pair.row + r) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(pair.live - 1u)) / hpg;
    let seen = vec4<u32>(group.len + 1u) + i;
    return Sight(
        params.ns + seen - min(vec4<u32>(group.window), seen) - pair.x0, params.ns + seen - 1u - pair.x0
    );
}

fn masked(logits: vec4<f32>, sight: Sight, column: u32) -> vec4<f32> {
    let s = vec4<u32>(column);
    let seen = ((s >= sight.low) & (s <= sight.high)) | (s < vec4<u32>(params.ns));
    return select(vec4<f32>(-LARGE), logits, seen);
}

// Columns column, + 16, + 32, + 48.
fn masked4(a: mat4x4<f32>, sight: Sight, column: u32) -> mat4x4<f32> {
    return mat4x4<f32>(
        masked(a[0], sight, column), masked(a[1], sight, column + 16u),
        masked(a[2], sight, column + 32u), masked(a[3], sight, column + 48u),
    );
}

// Four rows' sums of one half of the value.
fn put_values(pair: Pair, slot: u32, r: u32, quad: u32, sums: mat4x4<f32>) {
    if (quad < params.dv / 4u) {
        put_vec(pair, slot, r, 1u + quad, sums[0]);
        put_vec(pair, slot, r + 1u, 1u + quad, sums[1]);
        put_vec(pair, slot, r + 2u, 1u + quad, sums[2]);
        put_vec(pair, slot, r + 3u, 1u + quad, sums[3]);
    }
}

fn put_vec(pair: Pair, slot: u32, r: u32, at: u32, x: vec4<f32>) {
    let row = pair.row + r;
    if (row < pair.live) {
        let hpg = max(params.hpg, 1u);
        let head = pair.g * hpg + row % hpg;
        let base = ((slot * params.kcap + row / hpg) * params.nh + head) * (1u + params.dv / 4u);
        parts[base + at] = x;
    }
}
"""

_OUTER = """
fn add_outer(sums: mat4x4<f32>, left: vec4<f32>, right: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        sums[0] + left.x * right, sums[1] + left.y * right, sums[2] + left.z * right, sums[3] + left.w * right
    );
}
"""
_OUTER_FMA = """
fn add_outer(sums: mat4x4<f32>, left: vec4<f32>, right: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        fma(vec4<f32>(left.x), right, sums[0]), fma(vec4<f32>(left.y), right, sums[1]),
        fma(vec4<f32>(left.z), right, sums[2]), fma(vec4<f32>(left.w), right, sums[3]),
    );
}
"""


class _Text:
    """Lines with an indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, *lines: str) -> None:
        for line in lines:
            if line.startswith("}"):
                self.depth -= 1
            self.lines.append("    " * self.depth + line)
            if line.endswith("{"):
                self.depth += 1


def wgsl(shape: Shape) -> str:
    """The kernel's text, with includes still to be put in place."""
    rows_quads, key_quads = shape.rows // 4, shape.keys // 4
    lr_count = shape.rows // 8
    halves = shape.keys // 64
    terms = shape.step // 4
    q_blocks, k_blocks = rows_quads * terms, key_quads * terms
    slots = -(-(q_blocks + k_blocks) // shape.lanes)
    value_reads = shape.step * VALUE_QUADS // shape.lanes
    assert shape.keys in (64, 128)
    assert shape.rows in (32, 64, 128)
    assert shape.step in (8, 16)
    assert value_reads <= 4
    ring = ("sh",) if shape.buffers == 1 else ("sh", "sh_other")

    t = _Text()
    t(f"const BM: u32 = {shape.rows}u;", f"const BN: u32 = {shape.keys}u;")
    t(f"const TILE_LANES: u32 = {shape.lanes}u;")
    for name in ring:
        t(f"var<workgroup> {name}: array<array<vec4<f32>, {shape.quads}>, {shape.step}>;")
    t("@compute @workgroup_size(TILE_LANES)")
    t("fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {")
    t("let lc = lane % 8u + 8u * (lane / 32u % 2u);")
    t("let lr = lane / 8u % 4u + 4u * (lane / 64u);")
    t(f"let row_u = lr; let row_l = lr + {lr_count}u;")
    t(f"let col0 = {rows_quads}u + lc; let col1 = col0 + 16u;")
    for n in range(slots):
        t(f"let block{n} = lane + {n * shape.lanes}u;")
        t(f"let is_query{n} = block{n} < {q_blocks}u;")
        t(f"let is_block{n} = block{n} < {q_blocks + k_blocks}u;")
        t(f"let index{n} = select(block{n} - {q_blocks}u, block{n}, is_query{n});")
        if terms == 4:
            t(f"let term{n} = (index{n} & 1u) + ((index{n} >> 2u) & 2u);")
            t(f"let quad{n} = ((index{n} >> 1u) & 3u) + ((index{n} >> 4u) << 2u);")
        else:
            t(f"let term{n} = index{n} & 1u;", f"let quad{n} = index{n} >> 1u;")
        t(f"let put{n} = select({rows_quads}u + quad{n}, quad{n}, is_query{n});")
    t("let value_lane = min(wid.y * VALUE_QUADS + lane % VALUE_QUADS, max(params.dv / 4u, 1u) - 1u);")
    t("let tiles = (max(params.hpg, 1u) * params.k + BM - 1u) / BM;")
    t("let per_pair = max(params.panel, 1u);", "let per = max(params.pieces, 1u);")
    t("let end = min((wid.x + 1u) * per, params.ng * tiles * per_pair);")
    t("for (var unit = wid.x * per; unit < end; ) {")
    t("let number = unit / per_pair;", "let g = number / tiles;")
    t("let group = load_group(g);", "let pair = pair_of(group, g, number % tiles);")
    t("let stop = min(end, (number + 1u) * per_pair);")
    t("let column_end = min((stop - number * per_pair) * BN, pair.columns);")
    t("var column = (unit - number * per_pair) * BN;", "unit = stop;")
    for half in ("u", "l"):
        t(f"var largest_{half} = vec4<f32>(NOTHING);", f"var mass_{half} = vec4<f32>(0.0);")
        t(f"var o_{half}0 = mat4x4<f32>();", f"var o_{half}1 = mat4x4<f32>();")
    for n in range(slots):
        t(f"var next{n} = mat4x4<f32>();", f"var at{n} = vec4<u32>(0u);")
        t(f"if (is_query{n}) {{")
        t(f"at{n} = vec4<u32>(" + ", ".join(f"query_at(pair, 4u * quad{n} + {i}u)" for i in range(4)) + ");")
        t("}")
    t("var mixed = false;")

    def aim(column: str) -> None:
        """Addresses of a tile's keys, and its first step."""
        t(f"mixed = {column} + BN > params.ns + group.len - min(group.len, pair.x0);")
        for n in range(slots):
            if (n + 1) * shape.lanes <= q_blocks:
                continue
            t(f"if (is_block{n} && !is_query{n}) {{")
            t(f"let s = {column} + quad{n} % 16u + 64u * (quad{n} / 16u);")
            keys = ", ".join(
                f"scaled_row(column_row(group, pair, s + {16 * i}u), params.d / 4u)" for i in range(4)
            )
            t(f"at{n} = vec4<u32>({keys});")
            t("}")

    def read_keys(step: str) -> None:
        for n in range(slots):
            if shape.lanes * (n + 1) > q_blocks + k_blocks:
                t(f"if (is_block{n}) {{")
            t(f"next{n} = fetch(is_query{n}, mixed, at{n}, ({step}) * {terms}u + term{n});")
            if shape.lanes * (n + 1) > q_blocks + k_blocks:
                t("}")

    def put_keys(name: str) -> None:
        for n in range(slots):
            guarded = shape.lanes * (n + 1) > q_blocks + k_blocks
            t(f"if (is_block{n}) {{" if guarded else "{")
            t(f"let terms = transpose(next{n});")
            for i in range(4):
                t(f"{name}[4u * term{n} + {i}u][put{n}] = terms[{i}];")
            t("}")

    def read_values(step: str) -> None:
        for i in range(value_reads):
            key = f"lane / VALUE_QUADS + {i * shape.lanes // VALUE_QUADS}u"
            t(
                f"next0[{i}] = value_at(column_row(group, pair, column + ({step}) * {shape.step}u + {key}), "
                "value_lane);"
            )

    def put_values(name: str) -> None:
        for i in range(value_reads):
            key = f"lane / VALUE_QUADS + {i * shape.lanes // VALUE_QUADS}u"
            t(f"{name}[{key}][{rows_quads}u + lane % VALUE_QUADS] = next0[{i}];")

    def put_weights(name: str, step: str) -> None:
        per = 16 // shape.step
        # A weight's place among the terms is its lane's column; each step takes one of every lane's columns.
        t("var weight_u = vec4<f32>(0.0);", "var weight_l = vec4<f32>(0.0);")
        t(f"switch ({step}) / {per}u {{" if per > 1 else f"switch {step} {{")
        for j in range(4 * halves):
            label = f"case {j}u" if j < 4 * halves - 1 else "default"
            t(f"{label}: {{")
            t(f"weight_u = s{j // 4}u[{j % 4}];", f"weight_l = s{j // 4}l[{j % 4}];")
            t("}")
        t("}")
        if per > 1:
            t(f"if (lc / {shape.step}u == ({step}) % {per}u) {{")
        t(f"{name}[lc % {shape.step}u][row_u] = weight_u;", f"{name}[lc % {shape.step}u][row_l] = weight_l;")
        if per > 1:
            t("}")

    def sum_keys(name: str) -> None:
        for kk in range(shape.step):
            t("{")
            t(f"let upper = {name}[{kk}][row_u];", f"let lower = {name}[{kk}][row_l];")
            for h in range(halves):
                t(f"let keys{h} = {name}[{kk}][col{h}];")
            for h in range(halves):
                t(f"s{h}u = add_outer(s{h}u, keys{h}, upper);", f"s{h}l = add_outer(s{h}l, keys{h}, lower);")
            t("}")

    def sum_values(name: str) -> None:
        for kk in range(shape.step):
            t("{")
            t(f"let upper = {name}[{kk}][row_u];", f"let lower = {name}[{kk}][row_l];")
            t(f"let left = {name}[{kk}][col0];", f"let right = {name}[{kk}][col1];")
            t("o_u0 = add_outer(o_u0, upper, left);", "o_u1 = add_outer(o_u1, upper, right);")
            t("o_l0 = add_outer(o_l0, lower, left);", "o_l1 = add_outer(o_l1, lower, right);")
            t("}")

    def reduce(what: str, join: str) -> None:
        """`what`_u and `what`_l of all lanes of a row, in every one of them."""
        t(f"sh[lc % {shape.step}u][row_u + lc / {shape.step}u * {rows_quads}u] = {what}_u;")
        t(f"sh[lc % {shape.step}u][row_l + lc / {shape.step}u * {rows_quads}u] = {what}_l;")
        t("workgroupBarrier();")
        for half in ("u", "l"):
            reads = [f"sh[{c % shape.step}][row_{half} + {c // shape.step * rows_quads}u]" for c in range(16)]
            while len(reads) > 1:
                reads = [
                    f"{join}({a}, {b})" if join == "max" else f"({a} + {b})"
                    for a, b in zip(reads[::2], reads[1::2], strict=True)
                ]
            t(f"let all_{half} = {reads[0]};")
        t("workgroupBarrier();")

    def loop(count: str, read: object, put: object, add: object, after: object) -> None:
        """Steps 0 .. count, the first already read where they are read ahead; `after` instead of a read
        past the last."""
        if shape.buffers == 2:
            put("sh", "0u")
            t("workgroupBarrier();")
            t(f"for (var step = 0u; step < {count}; step += 2u) {{")
            t(f"if (step + 1u < {count}) {{")
            read("step + 1u")
            t("}")
            add("sh")
            t(f"if (step + 1u < {count}) {{")
            put("sh_other", "step + 1u")
            t("}")
            t("workgroupBarrier();")
            t(f"if (step + 2u < {count}) {{")
            read("step + 2u")
            t("} else {")
            after()
            t("}")
            t(f"if (step + 1u < {count}) {{")
            add("sh_other")
            t("}")
            t(f"if (step + 2u < {count}) {{")
            put("sh", "step + 2u")
            t("}")
            t("workgroupBarrier();")
            t("}")
            return
        t(f"for (var step = 0u; step < {count}; step++) {{")
        if not shape.ahead:
            read("step")
        put("sh", "step")
        t("workgroupBarrier();")
        if shape.ahead:
            t(f"if (step + 1u < {count}) {{")
            read("step + 1u")
            t("} else {")
            after()
            t("}")
        add("sh")
        t("workgroupBarrier();")
        t("}")

    ahead = shape.ahead or shape.buffers == 2
    aim("column")
    if ahead:
        read_keys("0u")
    t("for (; column < column_end; column += BN) {")
    if not ahead:
        aim("column")
    for h in range(halves):
        t(f"var s{h}u = mat4x4<f32>();", f"var s{h}l = mat4x4<f32>();")
    t(f"let key_steps = max((params.d / 4u + {terms - 1}u) / {terms}u, 1u);")
    loop(
        "key_steps", read_keys, lambda name, step: put_keys(name), sum_keys,
        (lambda: read_values("0u")) if ahead else (lambda: None),
    )  # fmt: skip
    for h in range(halves):
        for half in ("u", "l"):
            t(f"s{h}{half} = s{h}{half} * params.scale;")
    t("if (column < pair.inner || column + BN - 1u > pair.outer) {")
    t("let sight_u = sight_of(group, pair, 4u * row_u);", "let sight_l = sight_of(group, pair, 4u * row_l);")
    for h in range(halves):
        for half in ("u", "l"):
            t(f"s{h}{half} = masked4(s{h}{half}, sight_{half}, column + lc + {64 * h}u);")
    t("}")
    t("{")
    for half in ("u", "l"):
        found = f"max4(s0{half})" if halves == 1 else f"max(max4(s0{half}), max4(s1{half}))"
        t(f"let found_{half} = {found};")
    reduce("found", "max")
    for half in ("u", "l"):
        t(f"let now_{half} = max(largest_{half}, all_{half});")
        t(f"let fade_{half} = exp4(largest_{half} - now_{half});")
        t(f"largest_{half} = now_{half};")
        for h in range(halves):
            t(f"s{h}{half} = weights4(s{h}{half}, now_{half});")
        added = f"columns4(s0{half})" if halves == 1 else f"(columns4(s0{half}) + columns4(s1{half}))"
        t(f"mass_{half} = mass_{half} * fade_{half} + {added};")
        t(f"o_{half}0 = rescaled(o_{half}0, fade_{half});", f"o_{half}1 = rescaled(o_{half}1, fade_{half});")
    t("}")
    t(f"let value_steps = (min(BN, column_end - column) + {shape.step - 1}u) / {shape.step}u;")

    def next_tile() -> None:
        if ahead:
            t("if (column + BN < column_end) {")
            aim("(column + BN)")
            read_keys("0u")
            t("}")

    def put_both(name: str, step: str) -> None:
        t("{")
        put_weights(name, step)
        put_values(name)
        t("}")

    loop("value_steps", read_values, put_both, sum_values, next_tile)
    t("}")
    t("{")
    reduce("mass", "add")
    t("if (lc == 0u && wid.y == 0u) {")
    for half, row in (("u", "row_u"), ("l", "row_l")):
        for i, axis in enumerate("xyzw"):
            head = f"vec4<f32>(largest_{half}.{axis}, all_{half}.{axis}, 0.0, 0.0)"
            t(f"put_vec(pair, slot_of(wid.x, number, per_pair, per), 4u * {row} + {i}u, 0u, {head});")
    t("}")
    t("}")
    t("let slot = slot_of(wid.x, number, per_pair, per);", "let quad = wid.y * VALUE_QUADS + lc;")
    for half in ("u", "l"):
        t(f"put_values(pair, slot, 4u * row_{half}, quad, o_{half}0);")
        t(f"put_values(pair, slot, 4u * row_{half}, quad + 16u, o_{half}1);")
    t("}")
    t("}")
    slot = (
        "// Which of a pair's parts a workgroup's is.\n"
        "fn slot_of(workgroup: u32, number: u32, per_pair: u32, per: u32) -> u32 {\n"
        "    return workgroup - number * per_pair / per;\n}\n"
    )
    outer = _OUTER_FMA if shape.fused else _OUTER
    return _HEAD + outer + slot + "\n".join(t.lines) + "\n"
