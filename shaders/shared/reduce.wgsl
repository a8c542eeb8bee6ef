// Maximum and sum over a workgroup's lanes: a tree in shared memory, since the size of a subgroup
// is not known. Every lane calls, in uniform control flow, and every lane gets the result. The
// closing barrier lets the next reduction overwrite the array.

var<workgroup> sh_tree: array<f32, LANES>;

fn reduce_max(lane: u32, value: f32) -> f32 {
    sh_tree[lane] = value;
    workgroupBarrier();
    for (var stride = LANES / 2u; stride > 0u; stride = stride / 2u) {
        if (lane < stride) {
            sh_tree[lane] = max(sh_tree[lane], sh_tree[lane + stride]);
        }
        workgroupBarrier();
    }
    let result = sh_tree[0];
    workgroupBarrier();
    return result;
}

fn reduce_sum(lane: u32, value: f32) -> f32 {
    sh_tree[lane] = value;
    workgroupBarrier();
    for (var stride = LANES / 2u; stride > 0u; stride = stride / 2u) {
        if (lane < stride) {
            sh_tree[lane] = sh_tree[lane] + sh_tree[lane + stride];
        }
        workgroupBarrier();
    }
    let result = sh_tree[0];
    workgroupBarrier();
    return result;
}
