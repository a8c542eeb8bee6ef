// The largest near logit of a row, over the columns it sees.
//
//   group_meta   [G][8] u32                see shared/group.wgsl
//   panel_scores [nh][kcap][panel] vec4    logits of every row over all columns
//   near_max     [kcap][nh]
//
// One workgroup a (query head, row): each lane takes every 64th vec4 of columns, a tree joins the lanes.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/panel.wgsl
//#include shared/reduce.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> panel_scores: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> near_max: array<f32>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.x;
    let i = wid.y;
    if (gh < params.nh && i < params.k) {
        let seen = seen_by(load_group(group_of(gh)), i);
        let quads = params.panel / 4u;
        let base = (gh * params.kcap + i) * quads;
        var largest = vec4<f32>(-LARGE);
        for (var quad = lane; quad < quads; quad += LANES) {
            let logits = panel_scores[base + quad];
            largest = max(largest, select(vec4<f32>(-LARGE), logits, is_seen(seen, quad)));
        }
        let found = reduce_max(lane, max(max(largest.x, largest.y), max(largest.z, largest.w)));
        if (lane == 0u) {
            near_max[i * params.nh + gh] = found;
        }
    }
}
