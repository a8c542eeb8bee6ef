// What the sub-chunk evicts into the archive, before the ring takes its rows.
//
//   group_meta [G][8] u32             see shared/group.wgsl
//   q          [rows][nh][d] vec4     the call's queries
//   ring_k     [G][w + ns][d] vec4    the evicted keys, still in the ring
//   ring_v     [G][w + ns][dv] vec4   their values
//   archive_q  [archive][nh][d] vec4  queries of the rows that evict, written
//   archive_k  [G][archive][d] vec4   evicted keys, written
//   archive_v  [G][archive][dv] vec4  evicted values, written
//
// One lane a vec4 of the width, for each query head and row; a group's first head copies the key and
// the value. The group's n-th eviction takes slot n mod archive, also past the far limit. A sub-chunk
// evicts no more rows than the archive has slots.

//#include shared/layout.wgsl
//#include shared/group.wgsl
//#include shared/ring_f32.wgsl

struct Params {
    hpg: u32,        // query heads a group
    m: u32,          // landmarks, capacity
    w: u32,          // ring capacity, rows
    ns: u32,         // sinks, rows
    d: u32,          // key width, floats
    dv: u32,         // value width, floats
    nh: u32,         // query heads of all groups
    ng: u32,         // groups
    k: u32,          // rows of this sub-chunk
    r0: u32,         // its first row within the call
    archive: u32,    // evictions that the archive holds
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> ring_k: array<RingQuad>;
@group(0) @binding(4) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(5) var<storage, read_write> archive_q: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> archive_k: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> archive_v: array<vec4<f32>>;

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let t = id.x;
    let gh = id.y;
    let i = id.z;
    if (gh >= params.nh || i >= params.k) {
        return;
    }
    let g = group_of(gh);
    let group = load_group(g);
    let first = group.window - group.len;
    if (i < first) {
        return;
    }
    let slot = (group.evicted + (i - first)) % max(params.archive, 1u);
    let d4 = params.d / 4u;
    let dv4 = params.dv / 4u;
    if (t < d4) {
        archive_q[(slot * params.nh + gh) * d4 + t] = q[((params.r0 + i) * params.nh + gh) * d4 + t];
    }
    if (gh == g * params.hpg) {
        let source_row = ring_row(group, g, i - first);
        let target_row = g * params.archive + slot;
        if (t < d4) {
            archive_k[target_row * d4 + t] = from_ring(ring_k[source_row * d4 + t]);
        }
        if (t < dv4) {
            archive_v[target_row * dv4 + t] = from_ring(ring_v[source_row * dv4 + t]);
        }
    }
}
