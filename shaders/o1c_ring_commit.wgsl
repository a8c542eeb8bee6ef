// The sub-chunk's keys and values into the ring.
//
//   group_meta [G][8] u32             see shared/group.wgsl
//   k_rows     [rows][G][d] vec4      the call's keys
//   v_rows     [rows][G][dv] vec4     the call's values
//   ring_k     [G][w + ns][d] vec4    the ring's w slots written, the sinks behind them not
//   ring_v     [G][w + ns][dv] vec4
//
// One lane a vec4 of the key and of the value, for each group and row. Row j lands behind the ring's
// newest, which is where its evicted row was once the ring is full.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> k_rows: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> v_rows: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> ring_k: array<RingQuad>;
@group(0) @binding(5) var<storage, read_write> ring_v: array<RingQuad>;

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let t = id.x;
    let g = id.y;
    let j = id.z;
    if (g >= params.ng || j >= params.k) {
        return;
    }
    let group = load_group(g);
    let target_row = ring_row(group, g, group.len + j);
    let source_row = (params.r0 + j) * params.ng + g;
    let d4 = params.d / 4u;
    let dv4 = params.dv / 4u;
    if (t < d4) {
        ring_k[target_row * d4 + t] = to_ring(k_rows[source_row * d4 + t]);
    }
    if (t < dv4) {
        ring_v[target_row * dv4 + t] = to_ring(v_rows[source_row * dv4 + t]);
    }
}
