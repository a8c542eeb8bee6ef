// Near logits of every row over the sinks and its own window.
//
//   group_meta [G][8] u32            see shared/group.wgsl
//   q          [rows][nh][d] vec4    the call's queries
//   ring_k     [G][w + ns][d] vec4   the ring's w slots, then the sinks
//   k_rows     [rows][G][d] vec4     the call's keys
//   scores     [kcap][nh][w + ns]    written for the row's ns + window columns: sinks, then window
//
// One lane a (key, query head, row). The window runs over the ring and the sub-chunk's rows up to
// the row's own.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/arithmetic.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> ring_k: array<RingQuad>;
@group(0) @binding(4) var<storage, read> k_rows: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> scores: array<f32>;

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let s = id.x;
    let gh = id.y;
    let i = id.z;
    if (gh >= params.nh || i >= params.k) {
        return;
    }
    let g = group_of(gh);
    let group = load_group(g);
    if (s >= params.ns + window_rows(group, i)) {
        return;
    }
    let d4 = params.d / 4u;
    let query = ((params.r0 + i) * params.nh + gh) * d4;
    let near = near_row(group, g, i, s);
    let key = near.row * d4;
    var acc = vec4<f32>(0.0);
    if (near.resident) {
        for (var e = 0u; e < d4; e++) {
            acc += q[query + e] * from_ring(ring_k[key + e]);
        }
    } else {
        for (var e = 0u; e < d4; e++) {
            acc += q[query + e] * k_rows[key + e];
        }
    }
    scores[(i * params.nh + gh) * near_capacity() + s] = sum4(acc) * params.scale;
}
