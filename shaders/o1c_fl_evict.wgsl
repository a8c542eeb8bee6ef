// A chunk's queries against the key landmarks, its evicted keys against the query landmarks, and the far
// maximum and mass after each row: `o1c_far_e` and `o1c_land` in one.
//
//   group_meta [G][8] u32              see shared/group.wgsl
//   ring_k     [G][w + ns][d] vec4     the ring's w slots, then the sinks
//   q_tilde    [nh][m][d] vec4         query landmarks
//   far_mz     [nh][4][m]              see shared/far_planes.wgsl
//   q          [rows][nh][d] vec4      the call's queries
//   k_tilde    [G][m][d] vec4          key landmarks
//   fl_rows    [5][nh][m][kcap]        see shared/flash.wgsl
//
// One workgroup four landmarks of a query head. Eight lanes share a row's dot products, so that neighbours read
// side by side, and take two rows each; from the logits on a lane has one row of one landmark.

//#include shared/flash.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/arithmetic.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> ring_k: array<RingQuad>;
@group(0) @binding(3) var<storage, read> q_tilde: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> far_mz: array<f32>;
@group(0) @binding(5) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> k_tilde: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> fl_rows: array<f32>;

const EVICT_LANES: u32 = 256u;
const DOT_LANES: u32 = 8u;        // lanes that share a row
const DOT_STRIDE: u32 = 68u;      // 64 rows, and four so that no two lanes share a bank
const DOT_PARTS: u32 = 544u;      // DOT_LANES * DOT_STRIDE
const HALF: u32 = 32u;            // how far a lane's two rows are apart

var<workgroup> sh_part: array<array<f32, DOT_PARTS>, 4>;          // [landmark][lane of the row][row]
var<workgroup> sh_max: array<array<f32, EVICT_LANES>, 2>;         // [landmark][row]: largest logit of the rows up
var<workgroup> sh_mass: array<array<f32, EVICT_LANES>, 2>;        // to this one, and their mass at its scale

fn four(at: u32, stride: u32, known: u32) -> vec4<u32> {
    return vec4<u32>(at) + min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(known)) * stride;
}

fn put_parts(l: u32, row: u32, low: vec4<f32>, high: vec4<f32>) {
    let at = l * DOT_STRIDE + row;
    sh_part[0][at] = low.x;
    sh_part[1][at] = low.y;
    sh_part[2][at] = low.z;
    sh_part[3][at] = low.w;
    sh_part[0][at + HALF] = high.x;
    sh_part[1][at + HALF] = high.y;
    sh_part[2][at + HALF] = high.z;
    sh_part[3][at + HALF] = high.w;
}

fn sum_of_parts(stripe: u32, i: u32) -> f32 {
    let low = (sh_part[stripe][i] + sh_part[stripe][i + 68u])
        + (sh_part[stripe][i + 136u] + sh_part[stripe][i + 204u]);
    let high = (sh_part[stripe][i + 272u] + sh_part[stripe][i + 340u])
        + (sh_part[stripe][i + 408u] + sh_part[stripe][i + 476u]);
    return low + high;
}

// Largest logit and mass of some rows.
struct Mass {
    largest: f32,
    mass: f32,
}

// Those of row i and of three before it, so many rows apart, of half `half`.
fn joined(half: u32, lane: u32, i: u32, apart: u32) -> Mass {
    let at = vec4<u32>(lane) - min(vec4<u32>(0u, 1u, 2u, 3u) * apart, vec4<u32>(i));
    let is_row = vec4<u32>(i) >= vec4<u32>(0u, 1u, 2u, 3u) * apart;
    let largest = select(
        vec4<f32>(-LARGE),
        vec4<f32>(sh_max[half][at.x], sh_max[half][at.y], sh_max[half][at.z], sh_max[half][at.w]),
        is_row,
    );
    let mass = select(
        vec4<f32>(0.0),
        vec4<f32>(sh_mass[half][at.x], sh_mass[half][at.y], sh_mass[half][at.z], sh_mass[half][at.w]),
        is_row,
    );
    let top = max(max(largest.x, largest.y), max(largest.z, largest.w));
    return Mass(top, dot(mass, exp(max(largest - vec4<f32>(top), vec4<f32>(EXP_FLOOR)))));
}

@compute @workgroup_size(EVICT_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.y;
    let g = group_of(gh);
    let group = load_group(g);
    let a = wid.x * 4u;
    let rows = min(params.k, 64u);
    let folds = folds_of(group, rows);
    if (a == 0u && gh == g * params.hpg && lane == 0u) {
        fl_rows[record_at(g, FR_LEN)] = f32(group.len);
        fl_rows[record_at(g, FR_HEAD)] = f32(group.head);
        fl_rows[record_at(g, FR_WINDOW)] = f32(group.window);
        fl_rows[record_at(g, FR_FIRST)] = f32(folds.first);
        fl_rows[record_at(g, FR_END)] = f32(folds.end);
        fl_rows[record_at(g, FR_LANDMARKS)] = f32(group.landmarks);
        let far_len = group.far_len + (folds.end - folds.first);
        fl_rows[record_at(g, FR_FLUSHES)] = select(0.0, 1.0, far_len / FLUSH_ROWS != group.far_len / FLUSH_ROWS);
    }
    if (a < group.landmarks) {
        let d4 = params.d / 4u;
        let known = group.landmarks - 1u - a;
        let to_query = four((gh * params.m + a) * d4, d4, known);
        let to_key = four((g * params.m + a) * d4, d4, known);
        let l = lane % DOT_LANES;
        let low = lane / DOT_LANES;
        let high = low + HALF;
        let oldest = max(group.len, 1u) - 1u;
        let key_low = ring_row(group, g, min(max(low, folds.first) - folds.first, oldest)) * d4;
        let key_high = ring_row(group, g, min(max(high, folds.first) - folds.first, oldest)) * d4;
        let query_low = ((params.r0 + min(low, rows - 1u)) * params.nh + gh) * d4;
        let query_high = ((params.r0 + min(high, rows - 1u)) * params.nh + gh) * d4;
        // A lane's row and landmark once the logits are there.
        let i = lane % 64u;
        let stripe = lane / 64u;
        let b = min(a + stripe, group.landmarks - 1u);
        let shift = far_mz[far_mz_at(MZ_SHIFT, gh, b)];
        let mu_before = far_mz[far_mz_at(MZ_MAX, gh, b)];
        let mass_before = far_mz[far_mz_at(MZ_TOTAL, gh, b)] + far_mz[far_mz_at(MZ_RECENT, gh, b)];
        var land_low = vec4<f32>(0.0);
        var land_high = vec4<f32>(0.0);
        var dots_low = vec4<f32>(0.0);
        var dots_high = vec4<f32>(0.0);
        // Two steps of the width at a time, so that their loads do not wait for one another.
        for (var e = l; e < d4; e += 2u * DOT_LANES) {
            let more = e + DOT_LANES < d4;
            let f = select(e, e + DOT_LANES, more);
            let q0 = q[query_low + e];
            let q1 = q[query_high + e];
            let q2 = select(vec4<f32>(0.0), q[query_low + f], more);
            let q3 = select(vec4<f32>(0.0), q[query_high + f], more);
            let k0 = k_tilde[to_key.x + e];
            let k1 = k_tilde[to_key.y + e];
            let k2 = k_tilde[to_key.z + e];
            let k3 = k_tilde[to_key.w + e];
            let k4 = k_tilde[to_key.x + f];
            let k5 = k_tilde[to_key.y + f];
            let k6 = k_tilde[to_key.z + f];
            let k7 = k_tilde[to_key.w + f];
            let y0 = from_ring(ring_k[key_low + e]);
            let y1 = from_ring(ring_k[key_high + e]);
            let y2 = select(vec4<f32>(0.0), from_ring(ring_k[key_low + f]), more);
            let y3 = select(vec4<f32>(0.0), from_ring(ring_k[key_high + f]), more);
            let l0 = q_tilde[to_query.x + e];
            let l1 = q_tilde[to_query.y + e];
            let l2 = q_tilde[to_query.z + e];
            let l3 = q_tilde[to_query.w + e];
            let l4 = q_tilde[to_query.x + f];
            let l5 = q_tilde[to_query.y + f];
            let l6 = q_tilde[to_query.z + f];
            let l7 = q_tilde[to_query.w + f];
            land_low += vec4<f32>(dot(k0, q0), dot(k1, q0), dot(k2, q0), dot(k3, q0))
                + vec4<f32>(dot(k4, q2), dot(k5, q2), dot(k6, q2), dot(k7, q2));
            land_high += vec4<f32>(dot(k0, q1), dot(k1, q1), dot(k2, q1), dot(k3, q1))
                + vec4<f32>(dot(k4, q3), dot(k5, q3), dot(k6, q3), dot(k7, q3));
            dots_low += vec4<f32>(dot(l0, y0), dot(l1, y0), dot(l2, y0), dot(l3, y0))
                + vec4<f32>(dot(l4, y2), dot(l5, y2), dot(l6, y2), dot(l7, y2));
            dots_high += vec4<f32>(dot(l0, y1), dot(l1, y1), dot(l2, y1), dot(l3, y1))
                + vec4<f32>(dot(l4, y3), dot(l5, y3), dot(l6, y3), dot(l7, y3));
        }
        put_parts(l, low, land_low, land_high);
        workgroupBarrier();
        let is_live = i < rows && a + stripe < group.landmarks;
        if (is_live) {
            fl_rows[land_at(i, gh, b)] = sum_of_parts(stripe, i) * params.scale;
        }
        workgroupBarrier();
        put_parts(l, low, dots_low, dots_high);
        workgroupBarrier();
        let is_folded = i >= folds.first && i < folds.end;
        let logit = select(-LARGE, sum_of_parts(stripe, i) * params.scale - shift, is_folded);
        // Maximum and mass of the rows up to each: of four rows, of sixteen, of all.
        sh_max[0][lane] = logit;
        sh_mass[0][lane] = select(0.0, 1.0, is_folded);
        workgroupBarrier();
        let of_four = joined(0u, lane, i, 1u);
        sh_max[1][lane] = of_four.largest;
        sh_mass[1][lane] = of_four.mass;
        workgroupBarrier();
        let of_sixteen = joined(1u, lane, i, 4u);
        sh_max[0][lane] = of_sixteen.largest;
        sh_mass[0][lane] = of_sixteen.mass;
        workgroupBarrier();
        if (is_live) {
            let added = joined(0u, lane, i, 16u);
            let mu = max(mu_before, added.largest);
            let all = stripe * 64u;
            let largest = max(
                max(sh_max[0][all + 15u], sh_max[0][all + 31u]), max(sh_max[0][all + 47u], sh_max[0][all + 63u])
            );
            let mu_last = max(mu_before, largest);
            let kept = rescale(mu_before, mu);
            let mass = mass_before * kept + added.mass * exp_floored(added.largest - mu);
            fl_rows[far_rows_at(S_LOGIT, gh, b, i)] = logit;
            fl_rows[far_rows_at(S_MAX, gh, b, i)] = mu;
            fl_rows[far_rows_at(S_RESCALE, gh, b, i)] = kept;
            fl_rows[far_rows_at(S_MASS, gh, b, i)] = mass;
            fl_rows[far_rows_at(S_WEIGHT, gh, b, i)] = select(0.0, exp_floored(logit - mu_last), is_folded);
        }
    }
}
