// Ring length, head, far count and evictions after the sub-chunk.
//
//   group_meta [G][8] u32   see shared/group.wgsl; length, head, far count, evictions written
//
// One lane a group. Rows evicted once the far field is closed count as evicted, not as folded.

//#include shared/params.wgsl
//#include shared/group.wgsl

@group(0) @binding(1) var<storage, read_write> group_meta: array<u32>;

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let g = id.x;
    if (g >= params.ng) {
        return;
    }
    let group = load_group(g);
    let folds = folds_of(group, params.k);
    let evicted = max(params.k, folds.first) - folds.first;
    let at = g * META_WORDS;
    group_meta[at + META_LEN] = min(group.len + params.k, group.window);
    group_meta[at + META_HEAD] = ring_slot(group, evicted);
    group_meta[at + META_FAR_LEN] = group.far_len + (folds.end - folds.first);
    group_meta[at + META_EVICTED] = group.evicted + evicted;
}
