// The far part of a row, with the far field as of that row: its maximum, its mass, the weight of the
// numerator as it was before the sub-chunk, and of every row the sub-chunk has folded so far.
//
//   group_meta    [G][8] u32         see shared/group.wgsl
//   land_scores   [kcap][nh][m]      landmark logits p
//   near_max      [kcap][nh]         the largest near logit
//   mix           [nh][m][m]         the mixing matrix, [a][b]
//   far_rows      [5][nh][m][kcap]   see shared/far_planes.wgsl
//   row_head      [kcap][nh][4]      see shared/row_head.wgsl; all but the last word written
//   gains         [kcap][nh][m]      written where the far field counts, for landmarks in use
//   evict_weights [kcap][nh][kcap]   written where it counts, for the rows folded up to this one
//
// One workgroup a (query head, row), one lane a landmark, then one lane a folded row. A far field
// with a negative mass is dropped whole, its part in the row's maximum included.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/row_head.wgsl
//#include shared/arithmetic.wgsl
//#include shared/reduce.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> land_scores: array<f32>;
@group(0) @binding(3) var<storage, read> near_max: array<f32>;
@group(0) @binding(4) var<storage, read> mix: array<f32>;
@group(0) @binding(5) var<storage, read> far_rows: array<f32>;
@group(0) @binding(6) var<storage, read_write> row_head: array<f32>;
@group(0) @binding(7) var<storage, read_write> gains: array<f32>;
@group(0) @binding(8) var<storage, read_write> evict_weights: array<f32>;

const RECT_FM: u32 = 1u;

var<workgroup> sh_exp: array<f32, LANES>;     // exp(p_a - f)
var<workgroup> sh_gain: array<f32, LANES>;    // gain_b
var<workgroup> sh_max: array<f32, LANES>;     // mu_b after the row

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.x;
    let i = wid.y;
    if (gh < params.nh && i < params.k) {
        let group = load_group(group_of(gh));
        let folds = folds_of(group, i + 1u);
        let landmarks = group.landmarks;
        let in_use = lane < landmarks;
        let row = i * params.nh + gh;
        let near = near_max[row];
        var largest = near;
        var far = 0.0;
        var have = 0.0;
        if (group.far_len + (folds.end - folds.first) > 0u) {
            var p = -LARGE;
            var mu = -LARGE;
            if (in_use) {
                p = land_scores[row * params.m + lane];
                mu = far_rows[far_rows_at(S_MAX, gh, lane, i)];
            }
            let f = reduce_max(lane, p);
            sh_exp[lane] = select(0.0, exp_floored(p - f), in_use);
            sh_max[lane] = mu;
            workgroupBarrier();
            var u = 0.0;
            if (in_use) {
                for (var a = 0u; a < landmarks; a++) {
                    u += sh_exp[a] * mix[(gh * params.m + a) * params.m + lane];
                }
                if (params.rect == RECT_FM) {
                    u = max(u, 0.0);
                }
            }
            largest = max(near, reduce_max(lane, select(-LARGE, f + mu, in_use)));
            let gain = u * exp_floored(f + mu - largest);
            sh_gain[lane] = gain;
            var part = 0.0;
            if (in_use) {
                part = gain * far_rows[far_rows_at(S_MASS, gh, lane, i)];
            }
            // Its barriers also let every lane see every gain.
            far = reduce_sum(lane, part);
            if (far >= 0.0) {
                have = 1.0;
                if (in_use) {
                    gains[row * params.m + lane] = gain * far_rows[far_rows_at(S_RESCALE, gh, lane, i)];
                }
                let j = lane;
                if (j >= folds.first && j < folds.end) {
                    var weight = 0.0;
                    for (var b = 0u; b < landmarks; b++) {
                        let logit = far_rows[far_rows_at(S_LOGIT, gh, b, j)];
                        weight += sh_gain[b] * exp_floored(logit - sh_max[b]);
                    }
                    evict_weights[row * params.kcap + j] = weight;
                }
            } else {
                largest = near;
                far = 0.0;
            }
        }
        if (lane == 0u) {
            let at = row_head_at(i, gh);
            row_head[at + HD_MAX] = largest;
            row_head[at + HD_FAR] = far;
            row_head[at + HD_HAVE] = have;
        }
    }
}
