// The output: the splits, the far numerator, the rows folded so far, over the denominator.
//
//   group_meta    [G][8] u32                      see shared/group.wgsl
//   near_parts    [splits][nh][kcap][dv] vec4     near value sums
//   row_head      [kcap][nh][4]                   see shared/row_head.wgsl
//   gains         [kcap][nh][m]                   weights of the numerator before the sub-chunk
//   t_hat         [nh][2][m][dv] vec4             that numerator, see shared/far_planes.wgsl
//   evict_weights [kcap][nh][kcap]                weights of the rows folded so far
//   ring_v        [G][w + ns][dv] vec4            those rows' values, still in the ring
//   out           [rows][nh][dv] vec4
//
// One lane a vec4 of the value in four rows, for each query head: the rows share the far numerator and
// the evicted values.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/row_head.wgsl
//#include shared/outer.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> near_parts: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> row_head: array<f32>;
@group(0) @binding(4) var<storage, read> gains: array<f32>;
@group(0) @binding(5) var<storage, read> t_hat: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> evict_weights: array<f32>;
@group(0) @binding(7) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(8) var<storage, read_write> out: array<vec4<f32>>;

fn near_sum(gh: u32, i: u32, t: u32) -> vec4<f32> {
    var acc = vec4<f32>(0.0);
    for (var split = 0u; split < params.splits; split++) {
        acc += near_parts[((split * params.nh + gh) * params.kcap + i) * (params.dv / 4u) + t];
    }
    return acc;
}

// Four rows of a lane: where their weights lie in units of a plane's last dimension, which of them the
// far field counts for, and where the rows that each has folded end.
struct Four {
    at: vec4<u32>,
    counts: vec4<bool>,
    ends: vec4<u32>,
}

fn far_counts(gh: u32, i: u32) -> bool {
    return row_head[row_head_at(i, gh) + HD_HAVE] > 0.5;
}

fn four_of(group: Group, gh: u32, rows: vec4<u32>) -> Four {
    return Four(
        rows * params.nh + vec4<u32>(gh),
        vec4<bool>(
            far_counts(gh, rows.x), far_counts(gh, rows.y), far_counts(gh, rows.z), far_counts(gh, rows.w)
        ),
        vec4<u32>(
            folds_of(group, rows.x + 1u).end,
            folds_of(group, rows.y + 1u).end,
            folds_of(group, rows.z + 1u).end,
            folds_of(group, rows.w + 1u).end,
        ),
    );
}

// One landmark's part of the four numerators, none past `landmarks`. Where the far field does not
// count nobody has written a row's weights.
fn add_landmark(far: mat4x4<f32>, four: Four, gh: u32, t: u32, landmarks: u32, b: u32) -> mat4x4<f32> {
    let known = min(b, landmarks - 1u);
    let a = four.at * params.m + vec4<u32>(known);
    let gain = vec4<f32>(gains[a.x], gains[a.y], gains[a.z], gains[a.w]);
    let numerator = t_hat[t_hat_at(T_TOTAL, gh, known) + t] + t_hat[t_hat_at(T_RECENT, gh, known) + t];
    return add_outer(far, select(vec4<f32>(0.0), gain, four.counts & vec4<bool>(b < landmarks)), numerator);
}

// The part of the row that sub-chunk row j evicts.
fn add_evicted(far: mat4x4<f32>, four: Four, group: Group, g: u32, t: u32, j: u32) -> mat4x4<f32> {
    let known = min(j, four.ends.w - 1u);
    let a = four.at * params.kcap + vec4<u32>(known);
    let weight = vec4<f32>(evict_weights[a.x], evict_weights[a.y], evict_weights[a.z], evict_weights[a.w]);
    let value = from_ring(ring_v[ring_row(group, g, known - (group.window - group.len)) * (params.dv / 4u) + t]);
    return add_outer(far, select(vec4<f32>(0.0), weight, four.counts & (vec4<u32>(j) < four.ends)), value);
}

// The far numerators of four rows, zero where the far field does not count. Four terms a turn: their
// reads are under way together.
fn far_sums(gh: u32, rows: vec4<u32>, t: u32) -> mat4x4<f32> {
    let g = group_of(gh);
    let group = load_group(g);
    let four = four_of(group, gh, rows);
    var far = mat4x4<f32>();
    if (any(four.counts)) {
        for (var b = 0u; b < group.landmarks; b += 4u) {
            far = add_landmark(far, four, gh, t, group.landmarks, b);
            far = add_landmark(far, four, gh, t, group.landmarks, b + 1u);
            far = add_landmark(far, four, gh, t, group.landmarks, b + 2u);
            far = add_landmark(far, four, gh, t, group.landmarks, b + 3u);
        }
        for (var j = group.window - group.len; j < four.ends.w; j += 4u) {
            far = add_evicted(far, four, group, g, t, j);
            far = add_evicted(far, four, group, g, t, j + 1u);
            far = add_evicted(far, four, group, g, t, j + 2u);
            far = add_evicted(far, four, group, g, t, j + 3u);
        }
    }
    return far;
}

fn put_out(gh: u32, i: u32, t: u32, far: vec4<f32>) {
    if (i < params.k) {
        // The far terms are added up on their own, since they cancel.
        let acc = near_sum(gh, i, t) + far;
        let at = ((params.r0 + i) * params.nh + gh) * (params.dv / 4u) + t;
        out[at] = acc * row_head[row_head_at(i, gh) + HD_INV];
    }
}

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let dv4 = max(params.dv / 4u, 1u);
    let t = id.x % dv4;
    let i = id.x / dv4 * 4u;
    let gh = id.y;
    if (i >= params.k || gh >= params.nh) {
        return;
    }
    // Past the last row it comes again and is not written.
    let rows = min(vec4<u32>(i, i + 1u, i + 2u, i + 3u), vec4<u32>(params.k - 1u));
    let far = far_sums(gh, rows, t);
    put_out(gh, i, t, far[0]);
    put_out(gh, i + 1u, t, far[1]);
    put_out(gh, i + 2u, t, far[2]);
    put_out(gh, i + 3u, t, far[3]);
}
