// The far part of every row of a chunk at its own maximum, so that it need not wait for the near part: the
// gains of the old numerator and the weights of the rows folded so far.
//
//   group_meta [G][8] u32          see shared/group.wgsl
//   mix        [nh][m][m]          the mixing matrix, [a][b]
//   fl_rows    [5][nh][m][kcap]    see shared/flash.wgsl
//   fl_far     [kcap][nh][132]     see shared/flash.wgsl
//
// One workgroup eight rows of a query head, 32 lanes a row: a landmark or an evicted row each.

//#include shared/flash.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/arithmetic.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> mix: array<f32>;
@group(0) @binding(3) var<storage, read> fl_rows: array<f32>;
@group(0) @binding(4) var<storage, read_write> fl_far: array<f32>;

const RECT_FM: u32 = 1u;
const ROWS: u32 = 8u;
const FAR_LANES: u32 = 256u;    // ROWS * 32

var<workgroup> sh_e: array<array<f32, 64>, ROWS>;       // p_a, then exp(p_a - f), then gain_b Z_b
var<workgroup> sh_mu: array<array<f32, 64>, ROWS>;      // mu_b after the row
var<workgroup> sh_gain: array<array<f32, 64>, ROWS>;    // gain_b

@compute @workgroup_size(FAR_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.y;
    let g = group_of(gh);
    let group = load_group(g);
    let landmarks = max(group.landmarks, 1u);
    let rr = lane / 32u;
    let l = lane % 32u;
    let i = min(wid.x * ROWS + rr, params.k - 1u);
    let folds = folds_of(group, i + 1u);
    let far_len = group.far_len + (folds.end - folds.first);

    let b0 = min(l, landmarks - 1u);
    let b1 = min(l + 32u, landmarks - 1u);
    let used0 = l < landmarks;
    let used1 = l + 32u < landmarks;
    let mu0 = fl_rows[far_rows_at(S_MAX, gh, b0, i)];
    let mu1 = fl_rows[far_rows_at(S_MAX, gh, b1, i)];
    sh_e[rr][l] = select(-LARGE, fl_rows[land_at(i, gh, b0)], used0);
    sh_e[rr][l + 32u] = select(-LARGE, fl_rows[land_at(i, gh, b1)], used1);
    sh_mu[rr][l] = select(-LARGE, mu0, used0);
    sh_mu[rr][l + 32u] = select(-LARGE, mu1, used1);
    workgroupBarrier();
    var f = -LARGE;
    var mu_max = -LARGE;
    for (var a = 0u; a < landmarks; a += 4u) {
        f = max(f, max(max(sh_e[rr][a], sh_e[rr][a + 1u]), max(sh_e[rr][a + 2u], sh_e[rr][a + 3u])));
        mu_max = max(mu_max, max(max(sh_mu[rr][a], sh_mu[rr][a + 1u]), max(sh_mu[rr][a + 2u], sh_mu[rr][a + 3u])));
    }
    let p0 = sh_e[rr][l];
    let p1 = sh_e[rr][l + 32u];
    workgroupBarrier();
    sh_e[rr][l] = select(0.0, exp_floored(p0 - f), used0);
    sh_e[rr][l + 32u] = select(0.0, exp_floored(p1 - f), used1);
    workgroupBarrier();
    var u0 = 0.0;
    var u1 = 0.0;
    // Weights past the last landmark are zero.
    for (var a = 0u; a < landmarks; a += 8u) {
        let at = gh * params.m * params.m;
        let r0 = min(vec4<u32>(a) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(landmarks - 1u)) * params.m + at;
        let r1 = min(vec4<u32>(a) + vec4<u32>(4u, 5u, 6u, 7u), vec4<u32>(landmarks - 1u)) * params.m + at;
        let e0 = vec4<f32>(sh_e[rr][a], sh_e[rr][a + 1u], sh_e[rr][a + 2u], sh_e[rr][a + 3u]);
        let e1 = vec4<f32>(sh_e[rr][a + 4u], sh_e[rr][a + 5u], sh_e[rr][a + 6u], sh_e[rr][a + 7u]);
        let m0 = vec4<f32>(mix[r0.x + b0], mix[r0.y + b0], mix[r0.z + b0], mix[r0.w + b0]);
        let m1 = vec4<f32>(mix[r1.x + b0], mix[r1.y + b0], mix[r1.z + b0], mix[r1.w + b0]);
        u0 += dot(e0, m0) + dot(e1, m1);
        if (landmarks > 32u) {
            let n0 = vec4<f32>(mix[r0.x + b1], mix[r0.y + b1], mix[r0.z + b1], mix[r0.w + b1]);
            let n1 = vec4<f32>(mix[r1.x + b1], mix[r1.y + b1], mix[r1.z + b1], mix[r1.w + b1]);
            u1 += dot(e0, n0) + dot(e1, n1);
        }
    }
    if (params.rect == RECT_FM) {
        u0 = max(u0, 0.0);
        u1 = max(u1, 0.0);
    }
    let far_max = f + mu_max;
    let gain0 = select(0.0, u0 * exp_floored(f + mu0 - far_max), used0 && far_len > 0u);
    let gain1 = select(0.0, u1 * exp_floored(f + mu1 - far_max), used1 && far_len > 0u);
    workgroupBarrier();
    let mass0 = select(0.0, gain0 * fl_rows[far_rows_at(S_MASS, gh, b0, i)], far_len > 0u);
    let mass1 = select(0.0, gain1 * fl_rows[far_rows_at(S_MASS, gh, b1, i)], far_len > 0u);
    sh_gain[rr][l] = gain0;
    sh_gain[rr][l + 32u] = gain1;
    sh_e[rr][l] = mass0;
    sh_e[rr][l + 32u] = mass1;
    workgroupBarrier();
    var far = 0.0;
    for (var b = 0u; b < landmarks; b += 4u) {
        far += (sh_e[rr][b] + sh_e[rr][b + 1u]) + (sh_e[rr][b + 2u] + sh_e[rr][b + 3u]);
    }
    let have = far_len > 0u && far >= 0.0;
    // Weights of the rows folded so far.
    var weight0 = 0.0;
    var weight1 = 0.0;
    let j0 = l;
    let j1 = l + 32u;
    let sees0 = have && j0 >= folds.first && j0 < folds.end;
    let sees1 = have && j1 >= folds.first && j1 < folds.end;
    if (sees0 || sees1) {
        let c0 = min(j0, params.kcap - 1u);
        let c1 = min(j1, params.kcap - 1u);
        for (var b = 0u; b < landmarks; b += 4u) {
            let known = min(vec4<u32>(b) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(landmarks - 1u));
            let at = (vec4<u32>(gh * params.m) + known) * params.kcap;
            let gain = vec4<f32>(sh_gain[rr][b], sh_gain[rr][b + 1u], sh_gain[rr][b + 2u], sh_gain[rr][b + 3u]);
            let mu = vec4<f32>(sh_mu[rr][known.x], sh_mu[rr][known.y], sh_mu[rr][known.z], sh_mu[rr][known.w]);
            let x = vec4<f32>(
                fl_rows[at.x + c0], fl_rows[at.y + c0], fl_rows[at.z + c0], fl_rows[at.w + c0],
            ) - mu;
            let y = vec4<f32>(
                fl_rows[at.x + c1], fl_rows[at.y + c1], fl_rows[at.z + c1], fl_rows[at.w + c1],
            ) - mu;
            weight0 += select(0.0, dot(gain, vec4<f32>(
                exp_floored(x.x), exp_floored(x.y), exp_floored(x.z), exp_floored(x.w))), sees0);
            weight1 += select(0.0, dot(gain, vec4<f32>(
                exp_floored(y.x), exp_floored(y.y), exp_floored(y.z), exp_floored(y.w))), sees1);
        }
    }
    let old = have && group.far_len > 0u;
    if (wid.x * ROWS + rr < params.k) {
        let at = fl_far_at(i, gh);
        if (l == 0u) {
            fl_far[at + FF_MAX] = far_max;
            fl_far[at + FF_MASS] = far;
            fl_far[at + FF_HAVE] = select(0.0, 1.0, have);
        }
        // A numerator of nothing may hold anything.
        fl_far[at + FF_GAINS + l] = select(0.0, gain0 * fl_rows[far_rows_at(S_RESCALE, gh, b0, i)], old);
        fl_far[at + FF_GAINS + 32u + l] = select(0.0, gain1 * fl_rows[far_rows_at(S_RESCALE, gh, b1, i)], old);
        fl_far[at + FF_WEIGHTS + l] = weight0;
        fl_far[at + FF_WEIGHTS + 32u + l] = weight1;
    }
}
