// Near weights in place of the logits, and one over the denominator.
//
//   group_meta   [G][8] u32                see shared/group.wgsl
//   panel_scores [nh][kcap][panel] vec4    logits x in; out exp(x - C) where the row looks, else zero
//   row_head     [kcap][nh][4]             see shared/row_head.wgsl; C and the far mass in, the inverse out
//
// One workgroup a (query head, row): each lane takes every 64th vec4 of columns, a tree joins the lanes.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/panel.wgsl
//#include shared/row_head.wgsl
//#include shared/arithmetic.wgsl
//#include shared/reduce.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read_write> panel_scores: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> row_head: array<f32>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.x;
    let i = wid.y;
    if (gh < params.nh && i < params.k) {
        let seen = seen_by(load_group(group_of(gh)), i);
        let quads = params.panel / 4u;
        let base = (gh * params.kcap + i) * quads;
        let at = row_head_at(i, gh);
        let largest = row_head[at + HD_MAX];
        var near = vec4<f32>(0.0);
        for (var quad = lane; quad < quads; quad += LANES) {
            // A column that is not seen may lie above the largest.
            let x = clamp(panel_scores[base + quad] - largest, vec4<f32>(EXP_FLOOR), vec4<f32>(0.0));
            let weights = select(vec4<f32>(0.0), exp(x), is_seen(seen, quad));
            panel_scores[base + quad] = weights;
            near += weights;
        }
        let total = reduce_sum(lane, sum4(near));
        if (lane == 0u) {
            row_head[at + HD_INV] = 1.0 / max(total + row_head[at + HD_FAR], MIN_DENOMINATOR);
        }
    }
}
