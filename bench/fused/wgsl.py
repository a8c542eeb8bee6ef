"""WGSL of a token in two dispatches (or three), put together for one set of choices.

Buffers (section offsets in vec4s come as parameters):

    group_meta [G][8] u32                       as in shaders/shared/group.wgsl
    q          [nh][d]
    kv         [k_rows [G][d] | v_rows [G][dv]] the row's own key and value
    ring       [ring_k | ring_v]                each [G][w + ns][width], the ring's w slots, then the sinks
    marks      [k_tilde | q_tilde | mix]
    far_mz     [nh][4][m] f32
    t_hat      [nh][2][m][dv]
    part       [nh][splits + 1][dv] value sums, [nh][splits + 1] heads (largest logit, mass), records;
               the last of the splits is the far field
    far_part   with three dispatches: the far field's [nh][dv], [nh], records

A head's record: (slot, landmarks, folds, flushes), (evicts, far maximum, far mass, have), then for each
landmark (maximum, total, recent, gain), and for "v2" (kept, weight, 0, 0) and the evicted value [dv].

The near part reads rows by where they lie, not by age: so its loads do not wait for group_meta, which
only masks the logits. Stale slots must hold finite numbers, and do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

HEADS = 4
FLUSH = 4096


@dataclass(frozen=True)
class Choice:
    """One way to do it; `spec` names the choices that differ from the defaults."""

    kind: str = "v1"  # v1: numerator committed by the far workgroups; v2: all by the second dispatch
    split: int = 0  # 1: near and far as two dispatches (v3 with v1's kernels)
    p: int = 4  # far workgroups a head (v1)
    nt: int = 128  # invocations of the first dispatch
    lp: int = 16  # lanes that share a key or a landmark
    tiles: int = 1  # tiles of nt / 4 keys a workgroup takes
    v: str = "early"  # values loaded: early (with the keys), mid (before the softmax), late
    sr: int = 1  # rounds of the value sums' exchange (2 halves shared memory)
    own: int = 1  # dispatch that attends the row's own key
    far: str = "first"  # where far workgroups lie in the grid: first, last
    mt: int = 256  # invocations of the merge
    mc: int = 8  # vec4 columns of a merge workgroup
    un: int = 0  # d = dv = 128 written out (1) or any width (0)
    ta: int = 4  # landmarks whose numerator a far lane loads ahead
    touch: int = 0  # v2: workgroups a head that only bring the numerator into the cache
    nofar: int = 0  # 1: no far workgroups, 2: no near workgroups (timing only)

    @property
    def pieces(self) -> int:
        """Far workgroups of a head."""
        return self.p if self.kind == "v1" else 1 + self.touch

    @property
    def nk(self) -> int:
        return self.nt // HEADS

    @property
    def rounds(self) -> int:
        return max(self.sr, self.nt // 128)

    @property
    def spec(self) -> str:
        base = Choice()
        shown = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in ("kind", "un", "split") and getattr(self, f.name) != getattr(base, f.name)
        ]
        return ",".join(["v3" if self.split else self.kind, *shown, *([] if self.un else ["general"])])


def parse(text: str, un: int = 1) -> Choice:
    """`v1,p=2,own=2` and the like; v3 is v1 with its near and far parts apart; `general` any width."""
    kind, *rest = text.split(",")
    choice = Choice(kind="v1" if kind == "v3" else kind, split=int(kind == "v3"), un=un)
    for item in rest:
        if item == "general":
            choice = replace(choice, un=0)
            continue
        name, value = item.split("=")
        choice = replace(choice, **{name: type(getattr(choice, name))(value)})
    fits = choice.nt in (128, 256) and 32 % choice.lp == 0 and choice.nk % (choice.nt // choice.lp) == 0
    known = choice.kind in ("v1", "v2") and choice.v in ("early", "mid", "late")
    if not (fits and known) or (choice.split and choice.kind == "v2"):
        raise SystemExit(f"no such variant: {text}")
    return choice


PARAM_NAMES = (
    "hpg", "m", "w", "ns", "d", "dv", "nh", "ng", "rect", "scale", "splits", "ring_v_at", "q_tilde_at",
    "mix_at", "kv_v_at", "head_at", "rec_at", "rec_stride", "far_values_at", "far_head_at", "pad0", "pad1",
    "pad2", "pad3",
)  # fmt: skip
ELEMENTS = {"group_meta": "u32", "far_mz": "f32", "out": "f32"}


def bindings(c: Choice, which: str) -> list[str]:
    """Buffers of a kernel, those written with a `!`."""
    own1, own2 = (["kv"], []) if c.own == 1 else ([], ["q"])
    if which == "near":
        return ["group_meta", "q", *own1, "ring", "part!"]
    if which == "far":
        return ["group_meta", "q", "ring", "marks", "far_mz", "t_hat!", "far_part!"]
    if which == "first":
        t_hat = ["t_hat!"] if c.kind == "v1" else ["t_hat"] if c.touch else []
        return ["group_meta", "q", *own1, "ring", "marks", "far_mz", *t_hat, "part!"]
    apart = ["far_part"] if c.split else []
    t_hat = ["t_hat!"] if c.kind == "v2" else []
    return ["group_meta!", *own2, "kv", "part", *apart, "ring!", "far_mz!", *t_hat, "out!"]


def header(c: Choice, which: str) -> str:
    lines = ["struct Params {"]
    lines += [f"    {n}: {'f32' if n == 'scale' else 'u32'}," for n in PARAM_NAMES]
    lines += ["}", "@group(0) @binding(0) var<uniform> params: Params;"]
    for i, name in enumerate(bindings(c, which), 1):
        access = "read_write" if name.endswith("!") else "read"
        name = name.rstrip("!")
        element = ELEMENTS.get(name, "vec4<f32>")
        lines.append(f"@group(0) @binding({i}) var<storage, {access}> {name}: array<{element}>;")
    widths = "const D4: u32 = 32u;\nconst DV4: u32 = 32u;" if c.un else ""
    return (
        "\n".join(lines)
        + f"""
{widths}
const LARGE: f32 = 1.7e38;
const FLUSH_ROWS: u32 = {FLUSH}u;

fn near_capacity() -> u32 {{ return params.w + params.ns; }}
fn exp_floored(x: f32) -> f32 {{ return exp(max(x, -1.0e4)); }}
fn rescale(before: f32, after: f32) -> f32 {{
    return select(exp_floored(before - after), 1.0, before == after);
}}
fn values_at(gh: u32, s: u32, dv4: u32) -> u32 {{ return (gh * (params.splits + 1u) + s) * dv4; }}
fn heads_at(gh: u32, s: u32) -> u32 {{ return params.head_at + gh * (params.splits + 1u) + s; }}
fn record_at(gh: u32) -> u32 {{ return params.rec_at + gh * params.rec_stride; }}
fn far_mz_at(section: u32, gh: u32, a: u32) -> u32 {{ return (gh * 4u + section) * params.m + a; }}
"""
    )


def widths(c: Choice) -> str:
    if c.un:
        return "    let d4 = D4;\n    let dv4 = DV4;\n"
    return "    let d4 = params.d / 4u;\n    let dv4 = max(params.dv / 4u, 1u);\n"


GROUP = """
struct Group { len: u32, head: u32, far_len: u32, window: u32, far_limit: u32, landmarks: u32 }

fn load_group(g: u32) -> Group {
    let at = g * 8u;
    let window = clamp(group_meta[at + 3u], 1u, max(params.w, 1u));
    return Group(
        min(group_meta[at], window),
        group_meta[at + 1u] % window,
        group_meta[at + 2u],
        window,
        group_meta[at + 4u],
        min(group_meta[at + 5u], min(params.m, 64u)),
    );
}
"""


def tree(items: list[str], op: str = "+") -> str:
    """Items joined in pairs."""
    while len(items) > 1:
        pairs = [items[i : i + 2] for i in range(0, len(items), 2)]
        if op == "max":
            items = [f"max({', '.join(p)})" if len(p) == 2 else p[0] for p in pairs]
        else:
            items = [f"({' + '.join(p)})" if len(p) == 2 else p[0] for p in pairs]
    return items[0]


def shared(c: Choice, near: bool, far: bool) -> tuple[str, int]:
    stride = c.nt + 32 // c.lp
    big = 0
    if near:
        big = max(big, c.lp * stride, 16 * c.nt // c.rounds)
    if far:
        big = max(big, 2 * c.lp * (64 + 32 // c.lp), 4 * (c.nt + 8))
    small = max((2 * c.nt + 4) if near else 0, 384 if far else 0)
    text = f"var<workgroup> sh: array<f32, {big}>;\nvar<workgroup> sh2: array<f32, {small}>;\n"
    return text, 4 * (big + small)


def near_text(c: Choice) -> str:
    nt, lp, nk = c.nt, c.lp, c.nk
    kp = nt // lp  # keys side by side
    kpl = nk // kp  # keys a lane
    eu = 32 // lp  # vec4s of a key that a lane loads at once
    stride = nt + 32 // lp
    vu = 8  # values a lane loads at once
    own = c.own == 1
    multi = c.tiles > 1
    out: list[str] = []
    w = out.append
    w(f"""
// Whether the group's row r counts: the ring's rows but the one that leaves, the sinks, the own one.
fn counts(group: Group, r: u32) -> bool {{
    let ahead = r + group.window - group.head;
    let rank = select(ahead, ahead - group.window, ahead >= group.window);
    let oldest = select(0u, 1u, group.len == group.window);
    let in_ring = r < group.window && rank < group.len && rank >= oldest;
    return in_ring || (r >= params.w && r < near_capacity() + {int(own)}u);
}}

fn dots(q0: vec4<f32>, q1: vec4<f32>, q2: vec4<f32>, q3: vec4<f32>, key: vec4<f32>) -> vec4<f32> {{
    return vec4<f32>(dot(q0, key), dot(q1, key), dot(q2, key), dot(q3, key));
}}

fn near_part(g: u32, split: u32, block: u32, lane: u32) {{
    let group = load_group(g);
    let heads = min(params.hpg - block, 4u);
    let gh = g * params.hpg + block;
{widths(c)}    let base = g * near_capacity();
    let resident = near_capacity() - 1u;
    let part_lane = lane % {lp}u;
    let key = lane / {lp}u;
    let column = lane % dv4;
    let stripe = lane / dv4;
    let stripes = min({nt}u / dv4, {nk}u);
    let score_head = lane / {nk}u;
    let score_key = lane % {nk}u;
    let q0 = gh * d4;
    let q1 = (gh + min(1u, heads - 1u)) * d4;
    let q2 = (gh + min(2u, heads - 1u)) * d4;
    let q3 = (gh + min(3u, heads - 1u)) * d4;
    let end = near_capacity() + {int(own)}u;
    var top = -LARGE;
    var mass = vec4<f32>(0.0);""")
    for h in range(HEADS):
        w(f"    var sum{h} = vec4<f32>(0.0);")
    if multi:
        w("    var tops = vec4<f32>(-LARGE);")

    def key_rows(at: str, suffix: str, e: str = "part_lane") -> None:
        for k in range(kpl):
            w(f"    let k{k}{suffix} = (base + min({at} + key + {k * kp}u, resident)) * d4 + {e};")

    def load_keys(suffix: str, declare: str) -> None:
        for k in range(kpl):
            for j in range(eu):
                w(f"    {declare}a{k}_{j} = ring[k{k}{suffix} + {j * lp}u];")

    def put_own(e: str) -> None:
        if own:
            w("    if (has_own) {")
            for j in range(eu):
                at = f"{e} + {j * lp}u" if c.un else f"min({e} + {j * lp}u, d4 - 1u)"
                w(f"        let o{j} = kv[g * d4 + {at}];")
                for k in range(kpl):
                    w(
                        f"        a{k}_{j} = select(a{k}_{j}, o{j}, tile + key + {k * kp}u >= near_capacity());"  # noqa: E501
                    )
            w("    }")

    def dot_keys(e: str) -> None:
        for j in range(eu):
            for h in range(HEADS):
                if c.un:
                    w(f"    let q{h}_{j} = q[q{h} + {e} + {j * lp}u];")
                else:
                    w(
                        f"    let q{h}_{j} = select(vec4<f32>(0.0), q[q{h} + min({e} + {j * lp}u, d4 - 1u)], "
                        f"{e} + {j * lp}u < d4);"
                    )
            for k in range(kpl):
                w(f"    x{k} += dots(q0_{j}, q1_{j}, q2_{j}, q3_{j}, a{k}_{j});")

    def load_values() -> None:
        for s in range(vu):
            w(f"    let i{s} = stripe + {s}u * stripes;")
            w(f"    var v{s} = ring[params.ring_v_at + (base + min(tile + i{s}, resident)) * dv4 + column];")
        if own:
            w("    if (has_own) {")
            w("        let own_value = kv[params.kv_v_at + g * dv4 + column];")
            for s in range(vu):
                w(f"        v{s} = select(v{s}, own_value, tile + i{s} >= near_capacity());")
            w("    }")

    piped = multi and c.un
    if piped:
        w(f"    let first = split * {c.tiles * nk}u;")
        key_rows("first", "p")
        load_keys("p", "var ")
    if multi:
        w(f"    let stop = min((split + 1u) * {c.tiles * nk}u, end);")
        w(f"    for (var tile = split * {c.tiles * nk}u; tile < stop; tile += {nk}u) {{")
    else:
        w(f"    let tile = split * {nk}u;")
    if own:
        w(f"    let has_own = tile + {nk}u > near_capacity();")
    for k in range(kpl):
        w(f"    var x{k} = vec4<f32>(0.0);")
    if c.un:
        if not piped:
            key_rows("tile", "")
            load_keys("", "var ")
        if c.v == "early":
            load_values()
        put_own("part_lane")
        dot_keys("part_lane")
        if piped:
            w(f"    let next = min(tile + {nk}u, end);")
            key_rows("next", "n")
            load_keys("n", "")
    else:
        if c.v == "early":
            load_values()
        key_rows("tile", "", "0u")
        w(f"    for (var e = part_lane; e < d4; e += {lp * eu}u) {{")
        for k in range(kpl):
            for j in range(eu):
                w(f"    var a{k}_{j} = ring[k{k} + min(e + {j * lp}u, d4 - 1u)];")
        put_own("e")
        dot_keys("e")
        w("    }")
    w(f"    let at = part_lane * {stride}u + key;")
    for k in range(kpl):
        for h in range(HEADS):
            w(f"    sh[at + {h * nk + k * kp}u] = x{k}[{h}];")
    if c.v == "mid":
        load_values()
    w("    workgroupBarrier();")
    w("    let counted = counts(group, tile + score_key);")
    w(f"    let dotted = {tree([f'sh[lane + {i * stride}u]' for i in range(lp)])};")
    w("    let score = select(-LARGE, dotted * params.scale, counted);")
    w("    sh2[lane] = score;")
    w("    workgroupBarrier();")
    w(f"    let row = score_head * {nk}u;")
    w(f"    top = max(top, {tree([f'sh2[row + {i}u]' for i in range(nk)], 'max')});")
    w(f"    sh2[{nt}u + lane] = select(0.0, exp_floored(score - top), counted);")
    if multi:
        w(f"    if (score_key == 0u) {{ sh2[{2 * nt}u + score_head] = top; }}")
    w("    workgroupBarrier();")
    if c.v == "late":
        load_values()
    for s in range(vu):
        found = f"vec4<f32>({', '.join(f'sh2[{nt + h * nk}u + n{s}]' for h in range(HEADS))})"
        if c.un:
            w(f"    let n{s} = i{s};")
            w(f"    let w{s} = {found};")
        else:
            w(f"    let n{s} = min(i{s}, {nk - 1}u);")
            w(f"    let w{s} = select(vec4<f32>(0.0), {found}, i{s} < {nk}u);")
    if multi:
        w("    let before = tops;")
        w(f"    tops = vec4<f32>({', '.join(f'sh2[{2 * nt + h}u]' for h in range(HEADS))});")
        w("    let kept = vec4<f32>(rescale(before.x, tops.x), rescale(before.y, tops.y),")
        w("        rescale(before.z, tops.z), rescale(before.w, tops.w));")
    w(f"    mass = {'mass * kept + ' if multi else ''}{tree([f'w{s}' for s in range(vu)])};")
    for h in range(HEADS):
        terms = tree([f"w{s}[{h}] * v{s}" for s in range(vu)])
        w(f"    sum{h} = {f'sum{h} * kept[{h}] + ' if multi else ''}{terms};")
    if not c.un:
        w(f"    for (var i = stripe + {vu}u * stripes; i < {nk}u; i += stripes) {{")
        w("        var value = ring[params.ring_v_at + (base + min(tile + i, resident)) * dv4 + column];")
        if own:
            w("        if (tile + i >= near_capacity()) {")
            w("            value = kv[params.kv_v_at + g * dv4 + column];")
            w("        }")
        w(f"        let weight = vec4<f32>({', '.join(f'sh2[{nt + h * nk}u + i]' for h in range(HEADS))});")
        w("        mass += weight;")
        for h in range(HEADS):
            w(f"        sum{h} += weight[{h}] * value;")
        w("    }")
    if multi:
        w("    }")
    # The masses: scores are no longer read.
    w("    if (column == 0u && stripe < stripes) {")
    for h in range(HEADS):
        w(f"        sh2[stripe + {h * nk}u] = mass[{h}];")
    w("    }")
    per = HEADS // c.rounds
    for r in range(c.rounds):
        if r:
            w("    workgroupBarrier();")
        for h in range(per):
            for k, name in enumerate("xyzw"):
                w(f"    sh[{(4 * h + k) * nt}u + lane] = sum{r * per + h}.{name};")
        w("    workgroupBarrier();")

        def total(s: str) -> str:
            return f"vec4<f32>({', '.join(f'sh[begin + {k * nt}u + {s}]' for k in range(4))})"

        if c.un:
            count = per * 32
            n = nt // 32
            w(
                f"    if ({'lane < ' + str(count) + 'u && ' if count < nt else ''}{r * per}u + lane / 32u < heads) {{"  # noqa: E501
            )
            w(f"        let begin = lane / 32u * {4 * nt}u + lane % 32u;")
            w(f"        part[values_at(gh + {r * per}u + lane / 32u, split, dv4) + lane % 32u] =")
            w(f"            {tree([total(f'{s * 32}u') for s in range(n)])};")
            w("    }")
        else:
            w(f"    for (var i = lane; i < {per}u * dv4; i += {nt}u) {{")
            w(f"        let h = {r * per}u + i / dv4;")
            w("        let c = i % dv4;")
            w("        var total = vec4<f32>(0.0);")
            w("        for (var s = 0u; s < stripes; s++) {")
            w(f"            let begin = (h - {r * per}u) * {4 * nt}u + c;")
            w(f"            total += {total('s * dv4')};")
            w("        }")
            w("        if (h < heads) { part[values_at(gh + h, split, dv4) + c] = total; }")
            w("    }")
        if r == 0:
            w("    if (score_key == 0u && score_head < heads) {")
            if c.un:
                w(
                    f"        let total = {tree([f'sh2[row_of(score_head) + {s}u]' for s in range(nt // 32)])};"  # noqa: E501
                )
            else:
                w("        var total = 0.0;")
                w("        for (var s = 0u; s < stripes; s++) { total += sh2[row_of(score_head) + s]; }")
            w("        part[heads_at(gh + score_head, split)] = vec4<f32>(top, total, 0.0, 0.0);")
            w("    }")
    w("}")
    return f"fn row_of(h: u32) -> u32 {{ return h * {nk}u; }}\n" + "\n".join(out) + "\n"


def far_text(c: Choice) -> str:
    nt, dl = c.nt, c.lp
    dk = nt // dl  # landmarks side by side
    du = max(1, 32 // dk)  # landmarks a lane takes at once
    eu = 32 // dl
    stride = 64 + 32 // dl
    half = dl * stride
    v1 = c.kind == "v1"
    out: list[str] = []
    w = out.append
    if c.split:
        w("fn far_values_at(gh: u32, dv4: u32) -> u32 { return params.far_values_at + gh * dv4; }")
        w("fn far_head_at(gh: u32) -> u32 { return params.far_head_at + gh; }")
        buffer = "far_part"
    else:
        w("fn far_values_at(gh: u32, dv4: u32) -> u32 { return values_at(gh, params.splits, dv4); }")
        w("fn far_head_at(gh: u32) -> u32 { return heads_at(gh, params.splits); }")
        buffer = "part"
    w(f"""
// Four of mix's columns from b on, of row a.
fn mix_quad(gh: u32, a: u32, b: u32) -> vec4<f32> {{
    let i = (gh * params.m + min(a, params.m - 1u)) * params.m + b;
    let at = params.mix_at + i / 4u;
    let low = marks[at];
    if (params.m % 4u == 0u) {{
        return low;
    }}
    let high = marks[at + 1u];
    let r = i % 4u;
    let one = vec4<f32>(low.y, low.z, low.w, high.x);
    let two = vec4<f32>(low.z, low.w, high.x, high.y);
    let three = vec4<f32>(low.w, high.x, high.y, high.z);
    return select(select(low, one, r == 1u), select(two, three, r == 3u), r >= 2u);
}}

fn landmark_weight(landmarks: u32, a: u32, f: f32) -> f32 {{
    return select(0.0, exp_floored(sh2[min(a, 63u)] - f), a < landmarks);
}}

fn far_of(g: u32, h: u32, piece: u32, lane: u32) {{
    let gh = g * params.hpg + h;
    let group = load_group(g);
{widths(c)}    let m = max(params.m, 1u);
    let landmarks = max(group.landmarks, 1u);
    let evicts = group.len == group.window;
    let folds = evicts && group.far_len < group.far_limit;
    let far_len = group.far_len + select(0u, 1u, folds);
    let flushes = far_len / FLUSH_ROWS != group.far_len / FLUSH_ROWS;
    let base = g * near_capacity();

    // Lanes 0 .. 63 take a landmark's masses and gain, 64 .. 127 its maximum.
    let side = lane / 64u;
    let a = lane % 64u;
    let mz0 = far_mz[far_mz_at(select(1u, 0u, side == 1u), gh, min(a, m - 1u))];
    let mz1 = far_mz[far_mz_at(select(2u, 3u, side == 1u), gh, min(a, m - 1u))];

    let dot_lane = lane % {dl}u;
    let query_at = gh * d4;
    let key_at = (base + group.head) * d4;""")

    def dots(e: str, exact: bool) -> None:
        def at(j: int) -> str:
            return f"{e} + {j * dl}u" if exact else f"min({e} + {j * dl}u, d4 - 1u)"

        for j in range(eu):
            for name, source in (("query", "q[query_at"), ("evict", "ring[key_at")):
                load = f"{source} + {at(j)}]"
                w(
                    f"        let {name}{j} = "
                    + (f"{load};" if exact else f"select(vec4<f32>(0.0), {load}, {e} + {j * dl}u < d4);")
                )
        for u in range(du):
            for j in range(eu):
                w(f"        let kt{u}_{j} = marks[kt{u} + {at(j)}];")
        for u in range(du):
            for j in range(eu):
                w(f"        let qt{u}_{j} = marks[qt{u} + {at(j)}];")
        for u in range(du):
            w(f"        tq{u} += {tree([f'dot(kt{u}_{j}, query{j})' for j in range(eu)])};")
        for u in range(du):
            w(f"        tk{u} += {tree([f'dot(qt{u}_{j}, evict{j})' for j in range(eu)])};")

    w(f"    for (var a0 = lane / {dl}u; a0 < m; a0 += {dk * du}u) {{")
    for u in range(du):
        w(f"        let kt{u} = (g * m + min(a0 + {u * dk}u, m - 1u)) * d4;")
        w(f"        let qt{u} = params.q_tilde_at + (gh * m + min(a0 + {u * dk}u, m - 1u)) * d4;")
        w(f"        var tq{u} = 0.0;")
        w(f"        var tk{u} = 0.0;")
    if c.un:
        dots("dot_lane", True)
    else:
        w(f"        for (var e = dot_lane; e < d4; e += {dl * eu}u) {{")
        dots("e", False)
        w("        }")
    for u in range(du):
        w(f"        sh[dot_lane * {stride}u + min(a0 + {u * dk}u, 63u)] = tq{u};")
        w(f"        sh[{half}u + dot_lane * {stride}u + min(a0 + {u * dk}u, 63u)] = tk{u};")
    w("    }")

    if v1:
        w(f"""
    let columns = (dv4 + {c.p - 1}u) / {c.p}u;
    let column = lane % columns;
    let stripe = lane / columns;
    let stripes = {nt}u / columns;
    let t = piece * columns + column;
    let in_piece = stripe < stripes && t < dv4;
    let tc = min(t, dv4 - 1u);
    let total_at = (gh * 2u) * m;
    let recent_at = (gh * 2u + 1u) * m;
    let evicted = ring[params.ring_v_at + (base + group.head) * dv4 + tc];""")
        for k in range(c.ta):
            w(f"    let b{k} = stripe + {k}u * stripes;")
            w(f"    let t{k} = t_hat[(total_at + min(b{k}, m - 1u)) * dv4 + tc];")
            w(f"    let r{k} = t_hat[(recent_at + min(b{k}, m - 1u)) * dv4 + tc];")
    w(f"""
    // Columns of M by fours, in stripes of its rows.
    let wide = select(16u, 8u, m <= 32u);
    let quad = lane % wide;
    let mix_stripe = lane / wide;
    let mix_stripes = {nt}u / wide;
    let mix0 = mix_quad(gh, mix_stripe, 4u * quad);
    let mix1 = mix_quad(gh, mix_stripe + mix_stripes, 4u * quad);
    workgroupBarrier();

    if (lane < 128u) {{
        let begin = side * {half}u + a;
        let x = ({tree([f"sh[begin + {i * stride}u]" for i in range(dl)])}) * params.scale;
        if (side == 0u) {{
            sh2[a] = select(-LARGE, x, a < landmarks);
        }} else {{
            let logit = x - mz1;
            let mu = select(mz0, max(mz0, logit), folds);
            sh2[64u + a] = select(-LARGE, mu, a < landmarks);
            sh2[128u + a] = rescale(mz0, mu);
            sh2[192u + a] = select(0.0, exp_floored(logit - mu), folds);
        }}
    }}
    workgroupBarrier();

    var f = {tree([f"sh2[{i}u]" for i in range(32)], "max")};
    var largest = {tree([f"sh2[{64 + i}u]" for i in range(32)], "max")};
    if (landmarks > 32u) {{
        f = max(f, {tree([f"sh2[{i}u]" for i in range(32, 64)], "max")});
        largest = max(largest, {tree([f"sh2[{64 + i}u]" for i in range(32, 64)], "max")});
    }}
    var mixed = landmark_weight(landmarks, mix_stripe, f) * mix0
        + landmark_weight(landmarks, mix_stripe + mix_stripes, f) * mix1;
    for (var k = mix_stripe + 2u * mix_stripes; k < landmarks; k += mix_stripes) {{
        mixed += landmark_weight(landmarks, k, f) * mix_quad(gh, k, 4u * quad);
    }}""")
    for k, name in enumerate("xyzw"):
        w(f"    sh[{k * (nt + 8)}u + lane] = mixed.{name};")
    w(f"""    workgroupBarrier();

    let scale_max = f + largest;
    if (lane < 64u) {{
        let begin = a % 4u * {nt + 8}u + a / 4u;
        var u = 0.0;
        if (wide == 8u) {{
            u = {tree([f"sh[begin + {8 * s}u]" for s in range(nt // 8)])};
        }} else {{
            u = {tree([f"sh[begin + {16 * s}u]" for s in range(nt // 16)])};
        }}
        if (params.rect == 1u) {{
            u = max(u, 0.0);
        }}
        let mu = sh2[64u + a];
        let kept = sh2[128u + a];
        let weight = sh2[192u + a];
        let gain = select(0.0, u * exp_floored(f + mu - scale_max), a < landmarks && far_len > 0u);
        let mass = (mz0 + mz1) * kept + weight;
        sh2[256u + a] = gain;
        sh2[320u + a] = gain * select(0.0, mass, a < landmarks);
        if (piece == 0u && a < landmarks) {{
            let total = mz0 * kept;
            let recent = mz1 * kept + weight;
            {buffer}[record_at(gh) + 2u + a] = vec4<f32>(
                mu, select(total, total + recent, flushes), select(recent, 0.0, flushes), gain,
            );""")
    if not v1:
        w(f"            {buffer}[record_at(gh) + 2u + m + a] = vec4<f32>(kept, weight, 0.0, 0.0);")
    w(f"""        }}
    }}
    workgroupBarrier();

    var far = {tree([f"sh2[{320 + i}u]" for i in range(32)])};
    if (landmarks > 32u) {{
        far += {tree([f"sh2[{320 + i}u]" for i in range(32, 64)])};
    }}
    // A far field with a negative mass is dropped whole.
    let have = far_len > 0u && far >= 0.0;
    if (piece == 0u && lane == 0u) {{
        let slot = (group.head + group.len) % group.window;
        {buffer}[far_head_at(gh)] = vec4<f32>(
            select(-LARGE, scale_max, have), select(0.0, far, have), 0.0, 0.0,
        );
        {buffer}[record_at(gh)] = vec4<f32>(
            f32(slot), f32(group.landmarks), select(0.0, 1.0, folds), select(0.0, 1.0, flushes),
        );
        {buffer}[record_at(gh) + 1u] = vec4<f32>(
            select(0.0, 1.0, evicts), scale_max, far, select(0.0, 1.0, have),
        );
    }}""")
    if not v1:
        w(f"""    for (var t = lane; t < dv4; t += {nt}u) {{
        {buffer}[record_at(gh) + 2u + 2u * m + t] = ring[params.ring_v_at + (base + group.head) * dv4 + t];
    }}
}}""")
        return "\n".join(out) + "\n"

    w("    var acc = vec4<f32>(0.0);")

    def fold(b: str, total: str, recent: str, pad: str) -> None:
        w(f"{pad}{{")
        w(f"{pad}    let at = min({b}, 63u);")
        w(f"{pad}    let kept = sh2[128u + at];")
        w(f"{pad}    let tt = {total} * kept;")
        w(f"{pad}    let tr = {recent} * kept + sh2[192u + at] * evicted;")
        w(f"{pad}    acc += select(0.0, sh2[256u + at], {b} < landmarks) * (tt + tr);")
        w(f"{pad}    if (folds && in_piece && {b} < landmarks) {{")
        w(f"{pad}        let total_to = (total_at + {b}) * dv4 + tc;")
        w(f"{pad}        if (flushes) {{")
        w(f"{pad}            t_hat[total_to] = tt + tr;")
        w(f"{pad}        }} else if (kept != 1.0) {{")
        w(f"{pad}            t_hat[total_to] = tt;")
        w(f"{pad}        }}")
        w(f"{pad}        t_hat[(recent_at + {b}) * dv4 + tc] = select(tr, vec4<f32>(0.0), flushes);")
        w(f"{pad}    }}")
        w(f"{pad}}}")

    for k in range(c.ta):
        fold(f"b{k}", f"t{k}", f"r{k}", "    ")
    w(f"    for (var b = stripe + {c.ta}u * stripes; b < landmarks; b += stripes) {{")
    w("        let tb = t_hat[(total_at + b) * dv4 + tc];")
    w("        let rb = t_hat[(recent_at + b) * dv4 + tc];")
    fold("b", "tb", "rb", "        ")
    w("    }")
    for k, name in enumerate("xyzw"):
        w(f"    sh[{k * (nt + 8)}u + lane] = acc.{name};")
    w("    workgroupBarrier();")
    w("    if (lane < columns && t < dv4) {")

    def got(s: str) -> str:
        return f"vec4<f32>({', '.join(f'sh[lane + {k * (nt + 8)}u + {s}]' for k in range(4))})"

    if c.un:
        cols = 32 // c.p
        w(f"        let total = {tree([got(f'{s * cols}u') for s in range(nt // cols)])};")
    else:
        w("        var total = vec4<f32>(0.0);")
        w(f"        for (var s = 0u; s < stripes; s++) {{ total += {got('s * columns')}; }}")
    w(f"        {buffer}[far_values_at(gh, dv4) + t] = select(vec4<f32>(0.0), total, have);")
    w("    }")
    w("}")
    return "\n".join(out) + "\n"


def touch_text(c: Choice) -> str:
    """Reads a share of a head's numerator; the store is there so that the reads are."""
    loads = 16 // c.touch * 128 // c.nt
    at = [f"t_hat[min(begin + {k * c.nt}u, last)]" for k in range(max(1, loads))]
    return f"""
fn touch(gh: u32, piece: u32, lane: u32) {{
    let count = 2u * params.m * params.dv / 4u;
    let last = (gh + 1u) * count - 1u;
    let share = (count + {c.touch - 1}u) / {c.touch}u;
    for (var i = lane; i < share; i += {c.nt * max(1, loads)}u) {{
        let begin = gh * count + piece * share + i;
        let sum = {tree(at)};
        if (sum.x == 3.0e38) {{
            part[record_at(gh) + 1u] = sum;
        }}
    }}
}}
"""


def first_source(c: Choice) -> tuple[str, int]:
    """Near splits and far workgroups in one dispatch: grid (G, far workgroups a group + splits, heads / 4)."""  # noqa: E501
    near, far = c.nofar != 2, c.nofar != 1
    declared, nbytes = shared(c, near, far)
    body = header(c, "first") + GROUP + declared
    body += near_text(c) if near else ""
    body += far_text(c) if far else ""
    body += touch_text(c) if far and c.touch else ""
    p = c.pieces
    call_far = f"far_of(wid.x, index / {p}u, index % {p}u, lane);" if far else ""
    if far and c.touch:
        call_far = f"if (index % {p}u == 0u) {{ far_of(wid.x, index / {p}u, 0u, lane); }} else {{"
        call_far += f" touch(wid.x * params.hpg + index / {p}u, index % {p}u - 1u, lane); }}"
    call_near = "near_part(wid.x, index, wid.z * 4u, lane);" if near else ""
    if c.far == "first":
        pick = f"""
    let far_count = params.hpg * {p}u;
    if (wid.y < far_count) {{
        let index = wid.y;
        if (wid.z == 0u) {{ {call_far} }}
    }} else if (wid.y - far_count < params.splits) {{
        let index = wid.y - far_count;
        {call_near}
    }}"""
    else:
        pick = f"""
    let far_count = params.hpg * {p}u;
    if (wid.y < params.splits) {{
        let index = wid.y;
        {call_near}
    }} else if (wid.y - params.splits < far_count) {{
        let index = wid.y - params.splits;
        if (wid.z == 0u) {{ {call_far} }}
    }}"""
    body += f"""
@compute @workgroup_size({c.nt})
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
    if (wid.x >= params.ng) {{ return; }}{pick}
}}
"""
    return body, nbytes


def near_source(c: Choice) -> tuple[str, int]:
    declared, nbytes = shared(c, True, False)
    body = header(c, "near") + GROUP + declared + near_text(c)
    body += f"""
@compute @workgroup_size({c.nt})
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
    if (wid.x < params.ng && wid.y < params.splits) {{ near_part(wid.x, wid.y, wid.z * 4u, lane); }}
}}
"""
    return body, nbytes


def far_source(c: Choice) -> tuple[str, int]:
    declared, nbytes = shared(c, False, True)
    body = header(c, "far") + GROUP + declared + far_text(c)
    body += f"""
@compute @workgroup_size({c.nt})
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
    if (wid.x < params.ng && wid.y < params.hpg * {c.p}u) {{
        far_of(wid.x, wid.y / {c.p}u, wid.y % {c.p}u, lane);
    }}
}}
"""
    return body, nbytes


def merge_source(c: Choice, splits: int) -> tuple[str, int]:
    """Grid (column blocks, nh + G): a merge workgroup a (block, head), then a commit workgroup a group."""
    mt, mc = c.mt, c.mc
    stripes = mt // mc
    v2 = c.kind == "v2"
    whole = not v2 and not c.split  # the far field is one more split
    count = splits + 1 if whole else splits
    mu = min(-(-count // stripes), 6) if c.un else 3  # splits a lane takes at once
    loop = not (c.un and mu * stripes >= count)
    pad = mt + 8
    rec = "far_part" if c.split else "part"
    out: list[str] = []
    w = out.append
    words = [
        f"var<workgroup> sh_tops: array<f32, {stripes}>;",
        f"var<workgroup> sh_masses: array<f32, {stripes}>;",
    ]
    words.append(f"var<workgroup> sh_sums: array<f32, {4 * pad}>;")
    nbytes = 4 * (2 * stripes + 4 * pad)
    if c.own == 2:
        words.append("var<workgroup> sh_dot: array<f32, 32>;")
        nbytes += 128
    w(f"""
fn merge(block: u32, gh: u32, lane: u32) {{
    let g = gh / max(params.hpg, 1u);
{widths(c)}    let column = lane % {mc}u;
    let stripe = lane / {mc}u;
    let t = block * {mc}u + column;
    let c = min(t, dv4 - 1u);
    let count = params.splits + {int(whole)}u;""")
    if v2:
        # What must come from memory first.
        la = max(1, -(-32 // stripes))
        w("""    let m = max(params.m, 1u);
    let total_at = (gh * 2u) * m;
    let recent_at = (gh * 2u + 1u) * m;""")
        for k in range(la):
            w(f"    let b{k} = stripe + {k * stripes}u;")
            w(f"    let t{k} = t_hat[(total_at + min(b{k}, m - 1u)) * dv4 + c];")
            w(f"    let r{k} = t_hat[(recent_at + min(b{k}, m - 1u)) * dv4 + c];")
        w("    let rec = record_at(gh);")
        w("    let flags = part[rec];")
        w("    let far_head = part[rec + 1u];")
        w("    let evicted = part[rec + 2u + 2u * m + c];")
        for k in range(la):
            w(f"    let gain{k} = part[rec + 2u + min(b{k}, m - 1u)].w;")
            w(f"    let fold{k} = part[rec + 2u + m + min(b{k}, m - 1u)];")
    w("    var top = -LARGE;\n    var mass = 0.0;\n    var sum = vec4<f32>(0.0);")
    if loop:
        w(f"    for (var s = stripe; s < count; s += {stripes * mu}u) {{")
        prefix = ""
    else:
        w("    {\n        let s = stripe;")
        prefix = ""
    for k in range(mu):
        w(f"        let s{k} = min(s + {k * stripes}u, count - 1u);")
        w(f"        let h{k} = part[heads_at(gh, s{k})];")
        w(f"        let v{k} = part[values_at(gh, s{k}, dv4) + c];")
    for k in range(mu):
        w(f"        let x{k} = select(-LARGE, h{k}.x, s + {k * stripes}u < count);")
        w(f"        let m{k} = select(0.0, h{k}.y, s + {k * stripes}u < count);")
    w(f"        let found = {'max(top, ' if loop else '('}{tree([f'x{k}' for k in range(mu)], 'max')});")
    for k in range(mu):
        w(f"        let w{k} = select(0.0, exp_floored(x{k} - found), s + {k * stripes}u < count);")
    if loop:
        w("        let kept = exp_floored(top - found);")
        prefix = "mass * kept + "
    w(f"        mass = {prefix}{tree([f'w{k} * m{k}' for k in range(mu)])};")
    prefix = "sum * kept + " if loop else ""
    w(f"        sum = {prefix}{tree([f'w{k} * v{k}' for k in range(mu)])};")
    w("        top = found;\n    }")
    if c.split:
        # The far field's part comes from a buffer of its own.
        w(f"""    if (stripe == {stripes - 1}u) {{
        let far_head = far_part[params.far_head_at + gh];
        let far_value = far_part[params.far_values_at + gh * dv4 + c];
        let found = max(top, far_head.x);
        let kept = exp_floored(top - found);
        let weight = exp_floored(far_head.x - found);
        mass = mass * kept + weight * far_head.y;
        sum = sum * kept + weight * far_value;
        top = found;
    }}""")
    w("    if (column == 0u) { sh_tops[stripe] = top; }")
    if c.own == 2:
        w("""    if (lane < 32u) {
        var x = 0.0;
        for (var e = lane; e < d4; e += 32u) { x += dot(q[gh * d4 + e], kv[g * d4 + e]); }
        sh_dot[lane] = x;
    }
    let own_value = kv[params.kv_v_at + g * dv4 + c];""")
    if v2:
        w("    let landmarks = min(u32(flags.y), m);")
        w("    let folds = flags.z > 0.5;\n    let flushes = flags.w > 0.5;")
        w("    var far = vec4<f32>(0.0);")

        def fold(b: str, total: str, recent: str, gain: str, both: str) -> None:
            w("    {")
            w(f"        let tt = {total} * {both}.x;")
            w(f"        let tr = {recent} * {both}.x + {both}.y * evicted;")
            w(f"        if ({b} < landmarks) {{")
            w(f"            far += {gain} * (tt + tr);")
            w("            if (folds && t < dv4) {")
            w(f"                let to = (total_at + {b}) * dv4 + t;")
            w("                if (flushes) { t_hat[to] = tt + tr; }")
            w(f"                else if ({both}.x != 1.0) {{ t_hat[to] = tt; }}")
            w(f"                t_hat[(recent_at + {b}) * dv4 + t] = select(tr, vec4<f32>(0.0), flushes);")
            w("            }\n        }\n    }")

        for k in range(la):
            fold(f"b{k}", f"t{k}", f"r{k}", f"gain{k}", f"fold{k}")
        w(f"    for (var b = stripe + {la * stripes}u; b < landmarks; b += {stripes}u) {{")
        w("        let tb = t_hat[(total_at + b) * dv4 + c];")
        w("        let rb = t_hat[(recent_at + b) * dv4 + c];")
        w("        let gain = part[rec + 2u + b].w;")
        w("        let both = part[rec + 2u + m + b];")
        fold("b", "tb", "rb", "gain", "both")
        w("    }")
        w("    let have = far_head.w > 0.5;")
    w("    workgroupBarrier();")
    w(f"    var largest = {tree([f'sh_tops[{i}u]' for i in range(stripes)], 'max')};")
    if c.own == 2:
        w(f"    let own = ({tree([f'sh_dot[{i}u]' for i in range(32)])}) * params.scale;")
        w("    largest = max(largest, own);")
    if v2:
        w("    largest = select(largest, max(largest, far_head.y), have);")
    w("    let scale = exp_floored(top - largest);")
    w("    mass = mass * scale;\n    sum = sum * scale;")
    if c.own == 2:
        w("    if (stripe == 0u) {")
        w("        let weight = exp_floored(own - largest);")
        w("        mass += weight;\n        sum += weight * own_value;\n    }")
    if v2:
        w("    let far_scale = select(0.0, exp_floored(select(0.0, far_head.y - largest, have)), have);")
        w(f"    if (stripe == {stripes - 1}u) {{ mass += select(0.0, far_head.z, have) * far_scale; }}")
        w("    sum += far * far_scale;")
    for k, name in enumerate("xyzw"):
        w(f"    sh_sums[{k * pad}u + lane] = sum.{name};")
    w("    if (column == 0u) { sh_masses[stripe] = mass; }")
    w("    workgroupBarrier();")
    w(f"    let part_of = lane / {mc}u;")
    w(f"    if (lane < {4 * mc}u && t < dv4) {{")
    w(f"        let begin = part_of * {pad}u + column;")
    w(f"        let total = {tree([f'sh_sums[begin + {s * mc}u]' for s in range(stripes)])};")
    w(f"        let denominator = {tree([f'sh_masses[{s}u]' for s in range(stripes)])};")
    w("        out[(gh * dv4 + t) * 4u + part_of] = total * (1.0 / max(denominator, 1.0e-30));")
    w("    }\n}")

    w(f"""
// The ring, the far masses, the position of a group. Nothing else reads what is written here.
fn commit(g: u32, lane: u32) {{
{widths(c)}    let record = {rec}[record_at(g * params.hpg)];
    let evicts = {rec}[record_at(g * params.hpg) + 1u].x > 0.5;
    let row = g * near_capacity() + min(u32(record.x), params.w - 1u);
    for (var t = lane; t < d4; t += {mt}u) {{
        ring[row * d4 + t] = kv[g * d4 + t];
    }}
    for (var t = lane; t < dv4; t += {mt}u) {{
        ring[params.ring_v_at + row * dv4 + t] = kv[params.kv_v_at + g * dv4 + t];
    }}
    let landmarks = min(u32(record.y), params.m);
    if (record.z > 0.5) {{
        for (var i = lane; i < params.hpg * params.m; i += {mt}u) {{
            let gh = g * params.hpg + i / params.m;
            let a = i % params.m;
            if (a < landmarks) {{
                let found = {rec}[record_at(gh) + 2u + a];
                far_mz[far_mz_at(0u, gh, a)] = found.x;
                far_mz[far_mz_at(1u, gh, a)] = found.y;
                far_mz[far_mz_at(2u, gh, a)] = found.z;
            }}
        }}
    }}
    if (lane == 0u) {{
        let at = g * 8u;
        if (evicts) {{
            group_meta[at + 1u] = (group_meta[at + 1u] + 1u) % max(group_meta[at + 3u], 1u);
            group_meta[at + 6u] = group_meta[at + 6u] + 1u;
        }} else {{
            group_meta[at] = group_meta[at] + 1u;
        }}
        group_meta[at + 2u] = group_meta[at + 2u] + select(0u, 1u, record.z > 0.5);
    }}
}}

@compute @workgroup_size({mt})
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
    if (wid.y < params.nh) {{
        merge(wid.x, wid.y, lane);
    }} else if (wid.x == 0u && wid.y - params.nh < params.ng) {{
        commit(wid.y - params.nh, lane);
    }}
}}
""")
    return header(c, "merge") + "\n".join(words) + "\n" + "\n".join(out), nbytes
