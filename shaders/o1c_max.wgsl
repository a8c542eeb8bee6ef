// The largest near logit of a row.
//
//   group_meta [G][8] u32           see shared/group.wgsl
//   scores     [kcap][nh][w + ns]   near logits, ns + window columns of them written
//   near_max   [kcap][nh]
//
// One workgroup a (query head, row): each lane takes every 64th column, a tree joins the lanes.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/reduce.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> scores: array<f32>;
@group(0) @binding(3) var<storage, read_write> near_max: array<f32>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.x;
    let i = wid.y;
    if (gh < params.nh && i < params.k) {
        let group = load_group(group_of(gh));
        let columns = params.ns + window_rows(group, i);
        let row = i * params.nh + gh;
        let base = row * near_capacity();
        var largest = -LARGE;
        for (var s = lane; s < columns; s += LANES) {
            largest = max(largest, scores[base + s]);
        }
        largest = reduce_max(lane, largest);
        if (lane == 0u) {
            near_max[row] = largest;
        }
    }
}
