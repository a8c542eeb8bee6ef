// The output of a chunk without score planes: near parts, far numerator, the rows folded so far, over the
// denominator.
//
//   group_meta [G][8] u32                    see shared/group.wgsl
//   fl_far     [kcap][nh][132]               see shared/flash.wgsl
//   fl_parts   [slots][kcap][nh][dv] vec4    see shared/flash.wgsl
//   t_hat      [nh][2][m][dv] vec4           the numerator before the sub-chunk, see shared/far_planes.wgsl
//   ring_v     [G][w + ns][dv] vec4          the ring's w slots, then the sinks
//   out        [rows][nh][dv] vec4           the call's outputs
//
// One workgroup ROWS rows of a query head and 32 vec4s of the value: first 32 lanes a row, a landmark or an
// evicted row each, then a lane a vec4 of the value, four rows and every STRIPES-th term.

//#include shared/flash.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/arithmetic.wgsl
//#include shared/outer.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> fl_far: array<f32>;
@group(0) @binding(3) var<storage, read> fl_parts: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> t_hat: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>;

const ROWS: u32 = 8u;
const MERGE_LANES: u32 = 256u;    // ROWS * 32
const STRIPES: u32 = 4u;
const SLOTS: u32 = 32u;           // most parts of a row
const NOTHING: f32 = -1.0e38;

var<workgroup> sh_e: array<array<f32, 64>, ROWS>;       // the evicted rows' weights
var<workgroup> sh_gain: array<array<f32, 64>, ROWS>;    // those of the numerator
var<workgroup> sh_part: array<array<f32, SLOTS>, ROWS>; // factor of a part
var<workgroup> sh_sums: array<array<vec4<f32>, 128>, 4>;

// Four rows' weights of the numerator of landmark b; zero past the last.
fn gains_at(four: u32, b: u32) -> vec4<f32> {
    let c = min(b, 63u);
    return vec4<f32>(sh_gain[four][c], sh_gain[four + 1u][c], sh_gain[four + 2u][c], sh_gain[four + 3u][c]);
}

// Four rows' weights of the row that j folds; zero from `end` on.
fn weights_at(four: u32, j: u32, end: u32) -> vec4<f32> {
    let c = min(j, 63u);
    let found = vec4<f32>(sh_e[four][c], sh_e[four + 1u][c], sh_e[four + 2u][c], sh_e[four + 3u][c]);
    return select(vec4<f32>(0.0), found, j < end);
}

@compute @workgroup_size(MERGE_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.z;
    let g = group_of(gh);
    let group = load_group(g);
    let rr = lane / 32u;
    let l = lane % 32u;
    let i = min(wid.y * ROWS + rr, params.k - 1u);
    let at = fl_far_at(i, gh);
    let far_max = fl_far[at + FF_MAX];
    let far = fl_far[at + FF_MASS];
    let have = fl_far[at + FF_HAVE] > 0.5;
    let gain0 = fl_far[at + FF_GAINS + l];
    let gain1 = fl_far[at + FF_GAINS + 32u + l];
    let weight0 = fl_far[at + FF_WEIGHTS + l];
    let weight1 = fl_far[at + FF_WEIGHTS + 32u + l];

    // Which workgroups have a part of the row.
    let hpg = max(params.hpg, 1u);
    let of_group = row_tiles();
    let pair_tiles = max(params.pair_tiles, 1u);
    let tiles = max(params.tiles, 1u);
    let pair = g * of_group + (i * hpg + gh % hpg) / TILE_ROWS;
    let slots = min((pair * pair_tiles + pair_tiles - 1u) / tiles - pair * pair_tiles / tiles + 1u, SLOTS);

    var near_max = NOTHING;
    // Loads of a loop's turn do not wait for one another; a turn past the end repeats the last.
    for (var slot = 0u; slot < slots; slot += 4u) {
        let s = min(vec4<u32>(slot) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(slots - 1u));
        near_max = max(near_max, max(
            max(fl_parts[part_at(s.x, i, gh)].x, fl_parts[part_at(s.y, i, gh)].x),
            max(fl_parts[part_at(s.z, i, gh)].x, fl_parts[part_at(s.w, i, gh)].x),
        ));
    }
    let largest = select(near_max, max(near_max, far_max), have);
    let far_factor = select(0.0, exp_floored(far_max - largest), have);
    var mass = 0.0;
    for (var slot = 0u; slot < slots; slot += 4u) {
        let s = min(vec4<u32>(slot) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(slots - 1u));
        let x = fl_parts[part_at(s.x, i, gh)];
        let y = fl_parts[part_at(s.y, i, gh)];
        let z = fl_parts[part_at(s.z, i, gh)];
        let w = fl_parts[part_at(s.w, i, gh)];
        mass += x.y * exp_floored(x.x - largest)
            + select(0.0, y.y * exp_floored(y.x - largest), slot + 1u < slots)
            + select(0.0, z.y * exp_floored(z.x - largest), slot + 2u < slots)
            + select(0.0, w.y * exp_floored(w.x - largest), slot + 3u < slots);
    }
    let inverse = 1.0 / max(mass + select(0.0, far * far_factor, have), MIN_DENOMINATOR);
    let scale = far_factor * inverse;
    if (l < slots) {
        sh_part[rr][l] = exp_floored(fl_parts[part_at(l, i, gh)].x - largest) * inverse;
    }
    sh_e[rr][l] = weight0 * scale;
    sh_e[rr][l + 32u] = weight1 * scale;
    sh_gain[rr][l] = gain0 * scale;
    sh_gain[rr][l + 32u] = gain1 * scale;
    let old_field = group.far_len > 0u;
    workgroupBarrier();

    let dv4 = max(params.dv / 4u, 1u);
    let t = min(wid.x * 32u + l, dv4 - 1u);
    let four = rr % 2u * 4u;
    let stripe = rr / 2u;
    let rows = min(vec4<u32>(wid.y * ROWS + four) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(params.k - 1u));
    var acc = mat4x4<f32>();
    if (old_field) {
        for (var b = stripe; b < group.landmarks; b += 4u * STRIPES) {
            let b4 = vec4<u32>(b) + vec4<u32>(0u, 1u, 2u, 3u) * STRIPES;
            let c = min(b4, vec4<u32>(group.landmarks - 1u));
            let v0 = t_hat[t_hat_at(T_TOTAL, gh, c.x) + t] + t_hat[t_hat_at(T_RECENT, gh, c.x) + t];
            let v1 = t_hat[t_hat_at(T_TOTAL, gh, c.y) + t] + t_hat[t_hat_at(T_RECENT, gh, c.y) + t];
            let v2 = t_hat[t_hat_at(T_TOTAL, gh, c.z) + t] + t_hat[t_hat_at(T_RECENT, gh, c.z) + t];
            let v3 = t_hat[t_hat_at(T_TOTAL, gh, c.w) + t] + t_hat[t_hat_at(T_RECENT, gh, c.w) + t];
            acc = add_outer(acc, gains_at(four, b4.x), v0);
            acc = add_outer(acc, gains_at(four, b4.y), v1);
            acc = add_outer(acc, gains_at(four, b4.z), v2);
            acc = add_outer(acc, gains_at(four, b4.w), v3);
        }
    }
    let last = folds_of(group, rows.w + 1u);
    for (var j = last.first + stripe; j < last.end; j += 4u * STRIPES) {
        let j4 = vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u) * STRIPES;
        let c = min(j4, vec4<u32>(last.end - 1u)) - vec4<u32>(last.first);
        let v0 = from_ring(ring_v[ring_row(group, g, c.x) * dv4 + t]);
        let v1 = from_ring(ring_v[ring_row(group, g, c.y) * dv4 + t]);
        let v2 = from_ring(ring_v[ring_row(group, g, c.z) * dv4 + t]);
        let v3 = from_ring(ring_v[ring_row(group, g, c.w) * dv4 + t]);
        acc = add_outer(acc, weights_at(four, j4.x, last.end), v0);
        acc = add_outer(acc, weights_at(four, j4.y, last.end), v1);
        acc = add_outer(acc, weights_at(four, j4.z, last.end), v2);
        acc = add_outer(acc, weights_at(four, j4.w, last.end), v3);
    }
    // Rows of four may lie in different tiles, with more or fewer parts.
    let head = gh % hpg;
    let pairs = vec4<u32>(g * of_group) + (rows * hpg + vec4<u32>(head)) / TILE_ROWS;
    let firsts = pairs * pair_tiles;
    let counts = min((firsts + vec4<u32>(pair_tiles - 1u)) / tiles - firsts / tiles + vec4<u32>(1u), vec4<u32>(SLOTS));
    let most = max(max(counts.x, counts.y), max(counts.z, counts.w));
    for (var slot = stripe; slot < most; slot += STRIPES) {
        let used = vec4<u32>(slot) < counts;
        let s = min(vec4<u32>(slot), counts - vec4<u32>(1u));
        let at = ((s * params.kcap + rows) * params.nh + vec4<u32>(gh)) * (1u + dv4) + vec4<u32>(1u + t);
        acc[0] += select(0.0, sh_part[four][slot], used.x) * fl_parts[at.x];
        acc[1] += select(0.0, sh_part[four + 1u][slot], used.y) * fl_parts[at.y];
        acc[2] += select(0.0, sh_part[four + 2u][slot], used.z) * fl_parts[at.z];
        acc[3] += select(0.0, sh_part[four + 3u][slot], used.w) * fl_parts[at.w];
    }
    let place = lane % 128u;
    if (stripe >= 2u) {
        sh_sums[0][place] = acc[0];
        sh_sums[1][place] = acc[1];
        sh_sums[2][place] = acc[2];
        sh_sums[3][place] = acc[3];
    }
    workgroupBarrier();
    if (stripe < 2u) {
        acc[0] += sh_sums[0][place];
        acc[1] += sh_sums[1][place];
        acc[2] += sh_sums[2][place];
        acc[3] += sh_sums[3][place];
    }
    workgroupBarrier();
    if (stripe == 1u) {
        sh_sums[0][place] = acc[0];
        sh_sums[1][place] = acc[1];
        sh_sums[2][place] = acc[2];
        sh_sums[3][place] = acc[3];
    }
    workgroupBarrier();
    if (stripe == 0u && wid.x * 32u + l < dv4) {
        let other = place + 64u;
        acc[0] += sh_sums[0][other];
        acc[1] += sh_sums[1][other];
        acc[2] += sh_sums[2][other];
        acc[3] += sh_sums[3][other];
        let first = wid.y * ROWS + four;
        for (var n = 0u; n < 4u; n++) {
            if (first + n < params.k) {
                out[((params.r0 + first + n) * params.nh + gh) * dv4 + t] = acc[n];
            }
        }
    }
}
