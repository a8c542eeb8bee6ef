// The window's keys and values as one panel for each group.
//
//   group_meta [G][8] u32             see shared/group.wgsl
//   ring_k     [G][w + ns][d] vec4    the ring's w slots, then the sinks
//   ring_v     [G][w + ns][dv] vec4
//   k_rows     [rows][G][d] vec4      the call's keys
//   v_rows     [rows][G][dv] vec4     the call's values
//   panel_k    [G][panel][d] vec4     sinks, ring from its oldest row, the sub-chunk's rows, zeros
//   panel_v    [G][panel][dv] vec4
//
// One lane a vec4 of a column's key and value, for each group. The grid is folded in two dimensions,
// for a panel may have more workgroups than one dimension holds.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> ring_k: array<RingQuad>;
@group(0) @binding(3) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(4) var<storage, read> k_rows: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> v_rows: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> panel_k: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> panel_v: array<vec4<f32>>;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let d4 = params.d / 4u;
    let dv4 = params.dv / 4u;
    let widest = max(max(d4, dv4), 1u);
    let n = (wid.y * grid.x + wid.x) * LANES + lane;
    let t = n % widest;
    let column = n / widest;
    let g = wid.z;
    if (column >= params.panel || g >= params.ng) {
        return;
    }
    let group = load_group(g);
    let newest = params.ns + group.len;
    let resident = column < newest;
    var row = 0u;
    if (column < params.ns) {
        row = sink_row(g, column);
    } else if (resident) {
        row = ring_row(group, g, column - params.ns);
    } else {
        row = (params.r0 + column - newest) * params.ng + g;
    }
    let filled = column < newest + params.k;
    let target_row = g * params.panel + column;
    if (t < d4) {
        var key = vec4<f32>(0.0);
        if (resident) {
            key = from_ring(ring_k[row * d4 + t]);
        } else if (filled) {
            key = k_rows[row * d4 + t];
        }
        panel_k[target_row * d4 + t] = key;
    }
    if (t < dv4) {
        var value = vec4<f32>(0.0);
        if (resident) {
            value = from_ring(ring_v[row * dv4 + t]);
        } else if (filled) {
            value = v_rows[row * dv4 + t];
        }
        panel_v[target_row * dv4 + t] = value;
    }
}
