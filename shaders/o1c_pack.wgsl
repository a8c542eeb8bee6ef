// The sub-chunk's queries, a head's rows together.
//
//   q       [rows][nh][d] vec4    the call's queries
//   panel_q [nh][kcap][d] vec4    k rows of each head written
//
// One lane a vec4 of a query, for each head.

//#include shared/params.wgsl

@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> panel_q: array<vec4<f32>>;

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let d4 = params.d / 4u;
    let i = id.x / max(d4, 1u);
    let t = id.x % max(d4, 1u);
    let gh = id.y;
    if (i < params.k && gh < params.nh) {
        panel_q[(gh * params.kcap + i) * d4 + t] = q[((params.r0 + i) * params.nh + gh) * d4 + t];
    }
}
