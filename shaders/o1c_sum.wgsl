// The near value sum in pieces of the keys.
//
//   group_meta [G][8] u32                     see shared/group.wgsl
//   scores     [kcap][nh][w + ns]             near weights
//   ring_v     [G][w + ns][dv] vec4           the ring's w slots, then the sinks
//   v_rows     [rows][G][dv] vec4             the call's values
//   sum_pieces [kcap][nh][pieces][dv] vec4
//
// One lane a (piece, vec4 of the value), for each query head and row: the weighted sum over one of
// `pieces` equal parts of the row's ns + window columns.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> scores: array<f32>;
@group(0) @binding(3) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(4) var<storage, read> v_rows: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> sum_pieces: array<vec4<f32>>;

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let dv4 = params.dv / 4u;
    let gh = id.y;
    let i = id.z;
    if (id.x >= params.pieces * dv4 || gh >= params.nh || i >= params.k) {
        return;
    }
    let t = id.x % max(dv4, 1u);
    let piece = id.x / max(dv4, 1u);
    let g = group_of(gh);
    let group = load_group(g);
    let columns = params.ns + window_rows(group, i);
    let pieces = max(params.pieces, 1u);
    let per = (columns + pieces - 1u) / pieces;
    let row = i * params.nh + gh;
    let base = row * near_capacity();
    let end = min((piece + 1u) * per, columns);
    var acc = vec4<f32>(0.0);
    for (var s = piece * per; s < end; s++) {
        let near = near_row(group, g, i, s);
        var value = vec4<f32>(0.0);
        if (near.resident) {
            value = from_ring(ring_v[near.row * dv4 + t]);
        } else {
            value = v_rows[near.row * dv4 + t];
        }
        acc += scores[base + s] * value;
    }
    sum_pieces[(row * params.pieces + piece) * dv4 + t] = acc;
}
