// Every key that the sub-chunk evicts against a query landmark: its logit, and the far maximum and
// mass after each row.
//
//   group_meta [G][8] u32            see shared/group.wgsl
//   ring_k     [G][w + ns][d] vec4   the ring's w slots, then the sinks
//   q_tilde    [nh][m][d] vec4       query landmarks
//   far_mz     [nh][4][m]            see shared/far_planes.wgsl
//   far_rows   [5][nh][m][kcap]      written for landmarks in use, rows 0 .. k
//
// One workgroup a (landmark, query head), one lane a row: the lane dots its evicted key with the
// landmark, then goes over the logits of the rows up to its own. Weights are taken at each row's
// own maximum, so a large key late in the sub-chunk leaves the rows before it alone.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/arithmetic.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> ring_k: array<RingQuad>;
@group(0) @binding(3) var<storage, read> q_tilde: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> far_mz: array<f32>;
@group(0) @binding(5) var<storage, read_write> far_rows: array<f32>;

var<workgroup> sh_logit: array<f32, LANES>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) i: u32) {
    let a = wid.x;
    let gh = wid.y;
    if (gh < params.nh) {
        let g = group_of(gh);
        let group = load_group(g);
        if (a < group.landmarks) {
            let rows = min(params.k, LANES);
            let folds = folds_of(group, rows);
            let is_folded = i >= folds.first && i < folds.end;
            var logit = -LARGE;
            if (is_folded) {
                let d4 = params.d / 4u;
                let key = ring_row(group, g, i - folds.first) * d4;
                let landmark = (gh * params.m + a) * d4;
                var acc = vec4<f32>(0.0);
                for (var e = 0u; e < d4; e++) {
                    acc += q_tilde[landmark + e] * from_ring(ring_k[key + e]);
                }
                logit = sum4(acc) * params.scale - far_mz[far_mz_at(MZ_SHIFT, gh, a)];
            }
            sh_logit[i] = logit;
            workgroupBarrier();
            if (i < rows) {
                let mu_before = far_mz[far_mz_at(MZ_MAX, gh, a)];
                var mu = mu_before;
                for (var j = folds.first; j < min(folds.end, i + 1u); j++) {
                    mu = max(mu, sh_logit[j]);
                }
                var mu_last = mu;
                for (var j = max(folds.first, i + 1u); j < folds.end; j++) {
                    mu_last = max(mu_last, sh_logit[j]);
                }
                // The stored maximum of an empty far field is -LARGE: its zero mass fades at the first fold.
                let kept = rescale(mu_before, mu);
                let mass_before = far_mz[far_mz_at(MZ_TOTAL, gh, a)] + far_mz[far_mz_at(MZ_RECENT, gh, a)];
                var added = 0.0;
                for (var j = folds.first; j < min(folds.end, i + 1u); j++) {
                    added += exp_floored(sh_logit[j] - mu);
                }
                var weight = 0.0;
                if (is_folded) {
                    weight = exp_floored(logit - mu_last);
                }
                far_rows[far_rows_at(S_LOGIT, gh, a, i)] = logit;
                far_rows[far_rows_at(S_MAX, gh, a, i)] = mu;
                far_rows[far_rows_at(S_RESCALE, gh, a, i)] = kept;
                far_rows[far_rows_at(S_MASS, gh, a, i)] = mass_before * kept + added;
                far_rows[far_rows_at(S_WEIGHT, gh, a, i)] = weight;
            }
        }
    }
}
