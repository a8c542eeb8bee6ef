// Landmark logits of every row.
//
//   group_meta  [G][8] u32          see shared/group.wgsl
//   q           [rows][nh][d] vec4  the call's queries
//   k_tilde     [G][m][d] vec4      key landmarks
//   land_scores [kcap][nh][m]       written for landmarks in use
//
// One lane a landmark, for each query head and row.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/arithmetic.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k_tilde: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> land_scores: array<f32>;

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let a = id.x;
    let gh = id.y;
    let i = id.z;
    if (gh >= params.nh || i >= params.k) {
        return;
    }
    let g = group_of(gh);
    if (a >= load_group(g).landmarks) {
        return;
    }
    let d4 = params.d / 4u;
    let query = ((params.r0 + i) * params.nh + gh) * d4;
    let landmark = (g * params.m + a) * d4;
    var acc = vec4<f32>(0.0);
    for (var e = 0u; e < d4; e++) {
        acc += q[query + e] * k_tilde[landmark + e];
    }
    land_scores[(i * params.nh + gh) * params.m + a] = sum4(acc) * params.scale;
}
