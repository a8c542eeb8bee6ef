// A range of one plane into another, as bits: a driver may flush a small integer that it takes for
// a float.
//
//   src [src_at .. src_at + count] vec4<u32>   read
//   dst [dst_at .. dst_at + count] vec4<u32>   written
//
// One lane a vec4. The grid is folded in two dimensions, for a plane may have more workgroups than
// one dimension holds.

const LANES: u32 = 64u;

struct Params {
    count: u32,     // vec4s to copy
    src_at: u32,    // first vec4 read
    dst_at: u32,    // first vec4 written
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> src: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> dst: array<vec4<u32>>;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let x = (wid.y * grid.x + wid.x) * LANES + lane;
    if (x < params.count) {
        dst[params.dst_at + x] = src[params.src_at + x];
    }
}
