// The far field after the sub-chunk: rescaled to its maximum, plus every folded row.
//
//   group_meta [G][8] u32             see shared/group.wgsl
//   ring_v     [G][w + ns][dv] vec4   the folded rows' values, still in the ring
//   far_rows   [5][nh][m][kcap]       see shared/far_planes.wgsl
//   far_mz     [nh][3][m]             maximum and mass, in and out
//   t_hat      [nh][2][m][dv] vec4    numerator, in and out
//
// One lane a (landmark, vec4 of the value), for each query head; the lane of a landmark's first vec4
// also moves its maximum and mass. Runs after the outputs, which read the far field as it was, and
// before the ring takes the sub-chunk's rows. Sums have two levels, for a single one would swallow new rows
// after some millions.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(3) var<storage, read> far_rows: array<f32>;
@group(0) @binding(4) var<storage, read_write> far_mz: array<f32>;
@group(0) @binding(5) var<storage, read_write> t_hat: array<vec4<f32>>;

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let dv4 = max(params.dv / 4u, 1u);
    let t = id.x % dv4;
    let a = id.x / dv4;
    let gh = id.y;
    if (gh >= params.nh) {
        return;
    }
    let g = group_of(gh);
    let group = load_group(g);
    let folds = folds_of(group, params.k);
    if (a >= group.landmarks || folds.first >= folds.end) {
        return;
    }
    let last = params.k - 1u;
    let kept = far_rows[far_rows_at(S_RESCALE, gh, a, last)];
    var values = vec4<f32>(0.0);
    var mass = 0.0;
    for (var j = folds.first; j < folds.end; j++) {
        let weight = far_rows[far_rows_at(S_WEIGHT, gh, a, j)];
        values += weight * from_ring(ring_v[ring_row(group, g, j - folds.first) * dv4 + t]);
        mass += weight;
    }
    let far_len = group.far_len + (folds.end - folds.first);
    let flush = far_len / FLUSH_ROWS != group.far_len / FLUSH_ROWS;

    let t_total_at = t_hat_at(T_TOTAL, gh, a) + t;
    let t_recent_at = t_hat_at(T_RECENT, gh, a) + t;
    let t_total = t_hat[t_total_at] * kept;
    let t_recent = t_hat[t_recent_at] * kept + values;
    if (flush) {
        t_hat[t_total_at] = t_total + t_recent;
        t_hat[t_recent_at] = vec4<f32>(0.0);
    } else {
        t_hat[t_total_at] = t_total;
        t_hat[t_recent_at] = t_recent;
    }
    if (t == 0u) {
        let total_at = far_mz_at(MZ_TOTAL, gh, a);
        let recent_at = far_mz_at(MZ_RECENT, gh, a);
        let total = far_mz[total_at] * kept;
        let recent = far_mz[recent_at] * kept + mass;
        far_mz[far_mz_at(MZ_MAX, gh, a)] = far_rows[far_rows_at(S_MAX, gh, a, last)];
        if (flush) {
            far_mz[total_at] = total + recent;
            far_mz[recent_at] = 0.0;
        } else {
            far_mz[total_at] = total;
            far_mz[recent_at] = recent;
        }
    }
}
