// The output: the pieces, the far numerator, the rows folded so far, over the denominator.
//
//   group_meta    [G][8] u32                     see shared/group.wgsl
//   sum_pieces    [kcap][nh][pieces][dv] vec4    near value sums
//   row_head      [kcap][nh][4]                  see shared/row_head.wgsl
//   gains         [kcap][nh][m]                  weights of the numerator before the sub-chunk
//   t_hat         [nh][2][m][dv] vec4            that numerator, see shared/far_planes.wgsl
//   evict_weights [kcap][nh][kcap]               weights of the rows folded so far
//   ring_v        [G][w + ns][dv] vec4           those rows' values, still in the ring
//   out           [rows][nh][dv] vec4
//
// One lane a vec4 of the value, for each query head and row.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/row_head.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> sum_pieces: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> row_head: array<f32>;
@group(0) @binding(4) var<storage, read> gains: array<f32>;
@group(0) @binding(5) var<storage, read> t_hat: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> evict_weights: array<f32>;
@group(0) @binding(7) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(8) var<storage, read_write> out: array<vec4<f32>>;

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let dv4 = params.dv / 4u;
    let t = id.x;
    let gh = id.y;
    let i = id.z;
    if (t >= dv4 || gh >= params.nh || i >= params.k) {
        return;
    }
    let row = i * params.nh + gh;
    let at = row_head_at(i, gh);
    var acc = vec4<f32>(0.0);
    for (var piece = 0u; piece < params.pieces; piece++) {
        acc += sum_pieces[(row * params.pieces + piece) * dv4 + t];
    }
    if (row_head[at + HD_HAVE] > 0.5) {
        let g = group_of(gh);
        let group = load_group(g);
        let folds = folds_of(group, i + 1u);
        // On its own, since its terms cancel.
        var far = vec4<f32>(0.0);
        for (var b = 0u; b < group.landmarks; b++) {
            let numerator = t_hat[t_hat_at(T_TOTAL, gh, b) + t] + t_hat[t_hat_at(T_RECENT, gh, b) + t];
            far += gains[row * params.m + b] * numerator;
        }
        for (var j = folds.first; j < folds.end; j++) {
            let value = from_ring(ring_v[ring_row(group, g, j - folds.first) * dv4 + t]);
            far += evict_weights[row * params.kcap + j] * value;
        }
        acc += far;
    }
    out[((params.r0 + i) * params.nh + gh) * dv4 + t] = acc * row_head[at + HD_INV];
}
