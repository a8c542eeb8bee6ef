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
// One workgroup four landmarks of a query head, its lanes in four stripes of the width, a row each.

//#include shared/flash.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/arithmetic.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> ring_k: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> q_tilde: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> far_mz: array<f32>;
@group(0) @binding(5) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> k_tilde: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> fl_rows: array<f32>;

const EVICT_LANES: u32 = 256u;    // 64 rows, 4 stripes of the width

var<workgroup> sh_land: array<array<vec4<f32>, 64>, 4>;
var<workgroup> sh_logit: array<array<vec4<f32>, 64>, 4>;

var<workgroup> sh_one: array<f32, 256>;    // [landmark][row]

fn four(at: u32, stride: u32, known: u32) -> vec4<u32> {
    return vec4<u32>(at) + min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(known)) * stride;
}

@compute @workgroup_size(EVICT_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.y;
    let g = group_of(gh);
    let group = load_group(g);
    let a = wid.x * 4u;
    let i = lane % 64u;
    let stripe = lane / 64u;
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
        let is_folded = i >= folds.first && i < folds.end;
        let known = group.landmarks - 1u - a;
        let to_query = four((gh * params.m + a) * d4, d4, known);
        let to_key = four((g * params.m + a) * d4, d4, known);
        let key = ring_row(group, g, min(max(i, folds.first) - folds.first, max(group.len, 1u) - 1u)) * d4;
        let query = ((params.r0 + min(i, rows - 1u)) * params.nh + gh) * d4;
        var land = vec4<f32>(0.0);
        var evicted = vec4<f32>(0.0);
        // Two steps of the width at a time, so that their loads do not wait for one another.
        for (var e = stripe; e < d4; e += 8u) {
            let more = e + 4u < d4;
            let e1 = select(e, e + 4u, more);
            let x0 = q[query + e];
            let x1 = select(vec4<f32>(0.0), q[query + e1], more);
            let k0 = k_tilde[to_key.x + e];
            let k1 = k_tilde[to_key.y + e];
            let k2 = k_tilde[to_key.z + e];
            let k3 = k_tilde[to_key.w + e];
            let k4 = k_tilde[to_key.x + e1];
            let k5 = k_tilde[to_key.y + e1];
            let k6 = k_tilde[to_key.z + e1];
            let k7 = k_tilde[to_key.w + e1];
            let y0 = ring_k[key + e];
            let y1 = select(vec4<f32>(0.0), ring_k[key + e1], more);
            let l0 = q_tilde[to_query.x + e];
            let l1 = q_tilde[to_query.y + e];
            let l2 = q_tilde[to_query.z + e];
            let l3 = q_tilde[to_query.w + e];
            let l4 = q_tilde[to_query.x + e1];
            let l5 = q_tilde[to_query.y + e1];
            let l6 = q_tilde[to_query.z + e1];
            let l7 = q_tilde[to_query.w + e1];
            land += vec4<f32>(dot(k0, x0), dot(k1, x0), dot(k2, x0), dot(k3, x0))
                + vec4<f32>(dot(k4, x1), dot(k5, x1), dot(k6, x1), dot(k7, x1));
            evicted += vec4<f32>(dot(l0, y0), dot(l1, y0), dot(l2, y0), dot(l3, y0))
                + vec4<f32>(dot(l4, y1), dot(l5, y1), dot(l6, y1), dot(l7, y1));
        }
        sh_land[stripe][i] = land;
        sh_logit[stripe][i] = evicted;
        workgroupBarrier();
        // From here on a stripe takes one of the landmarks.
        let b = a + stripe;
        var logit = -LARGE;
        if (b < group.landmarks) {
            let sum = (sh_land[0][i] + sh_land[1][i]) + (sh_land[2][i] + sh_land[3][i]);
            let dots = (sh_logit[0][i] + sh_logit[1][i]) + (sh_logit[2][i] + sh_logit[3][i]);
            if (i < rows) {
                fl_rows[land_at(i, gh, b)] = sum[stripe] * params.scale;
            }
            if (is_folded) {
                logit = dots[stripe] * params.scale - far_mz[far_mz_at(MZ_SHIFT, gh, b)];
            }
        }
        workgroupBarrier();
        sh_one[stripe * 64u + i] = logit;
        workgroupBarrier();
        if (i < rows && b < group.landmarks) {
            let mu_before = far_mz[far_mz_at(MZ_MAX, gh, b)];
            var mu = mu_before;
            var mu_last = mu_before;
            // Rows that fold nothing hold -LARGE.
            for (var j = 0u; j < folds.end; j += 4u) {
                let l0 = sh_one[stripe * 64u + j];
                let l1 = sh_one[stripe * 64u + j + 1u];
                let l2 = sh_one[stripe * 64u + j + 2u];
                let l3 = sh_one[stripe * 64u + j + 3u];
                mu_last = max(mu_last, max(max(l0, l1), max(l2, l3)));
                mu = max(mu, max(
                    max(select(-LARGE, l0, j <= i), select(-LARGE, l1, j + 1u <= i)),
                    max(select(-LARGE, l2, j + 2u <= i), select(-LARGE, l3, j + 3u <= i)),
                ));
            }
            let kept = rescale(mu_before, mu);
            let mass_before = far_mz[far_mz_at(MZ_TOTAL, gh, b)] + far_mz[far_mz_at(MZ_RECENT, gh, b)];
            var added = 0.0;
            for (var j = folds.first; j < min(folds.end, i + 1u); j += 4u) {
                let l0 = sh_one[stripe * 64u + j];
                let l1 = sh_one[stripe * 64u + min(j + 1u, 63u)];
                let l2 = sh_one[stripe * 64u + min(j + 2u, 63u)];
                let l3 = sh_one[stripe * 64u + min(j + 3u, 63u)];
                let end = min(folds.end, i + 1u);
                added += exp_floored(l0 - mu)
                    + select(0.0, exp_floored(min(l1 - mu, 0.0)), j + 1u < end)
                    + select(0.0, exp_floored(min(l2 - mu, 0.0)), j + 2u < end)
                    + select(0.0, exp_floored(min(l3 - mu, 0.0)), j + 3u < end);
            }
            fl_rows[far_rows_at(S_LOGIT, gh, b, i)] = logit;
            fl_rows[far_rows_at(S_MAX, gh, b, i)] = mu;
            fl_rows[far_rows_at(S_RESCALE, gh, b, i)] = kept;
            fl_rows[far_rows_at(S_MASS, gh, b, i)] = mass_before * kept + added;
            fl_rows[far_rows_at(S_WEIGHT, gh, b, i)] = select(0.0, exp_floored(logit - mu_last), is_folded);
        }
    }
}
