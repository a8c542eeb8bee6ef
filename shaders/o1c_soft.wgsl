// Near weights in place of the logits, and one over the denominator.
//
//   group_meta [G][8] u32           see shared/group.wgsl
//   scores     [kcap][nh][w + ns]   near logits x in, weights exp(x - C) out, ns + window columns
//   row_head   [kcap][nh][4]        see shared/row_head.wgsl; C and the far mass in, the inverse out
//
// One workgroup a (query head, row): each lane takes every 64th column, a tree joins the lanes.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/row_head.wgsl
//#include shared/arithmetic.wgsl
//#include shared/reduce.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read_write> scores: array<f32>;
@group(0) @binding(3) var<storage, read_write> row_head: array<f32>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.x;
    let i = wid.y;
    if (gh < params.nh && i < params.k) {
        let group = load_group(group_of(gh));
        let columns = params.ns + window_rows(group, i);
        let base = (i * params.nh + gh) * near_capacity();
        let at = row_head_at(i, gh);
        let largest = row_head[at + HD_MAX];
        var near = 0.0;
        for (var s = lane; s < columns; s += LANES) {
            let weight = exp_floored(scores[base + s] - largest);
            scores[base + s] = weight;
            near += weight;
        }
        near = reduce_sum(lane, near);
        if (lane == 0u) {
            row_head[at + HD_INV] = 1.0 / max(near + row_head[at + HD_FAR], MIN_DENOMINATOR);
        }
    }
}
