// Near part of a single row over a split of the keys: largest logit, mass, value sum.
//
//   group_meta [G][8] u32                   see shared/group.wgsl
//   q          [rows][nh][d] vec4           the call's queries
//   ring_k     [G][w + ns][d] vec4          the ring's w slots, then the sinks
//   k_rows     [rows][G][d] vec4            the call's keys
//   ring_v     [G][w + ns][dv] vec4
//   v_rows     [rows][G][dv] vec4
//   tok_part   [nh][splits][4 + dv] vec4    see shared/token_planes.wgsl
//
// One workgroup a (split, group, four of its heads). It takes its keys in tiles of NEAR_KEYS, each read
// once for the four heads: KEY_LANES lanes dot a key, one lane a (head, key) adds their parts, then
// lanes lie over the value's vec4s, in stripes of the keys. Loads that memory must answer are issued
// together and before what does not need them; loops that matter are written out.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/arithmetic.wgsl
//#include shared/token_planes.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> ring_k: array<RingQuad>;
@group(0) @binding(4) var<storage, read> k_rows: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(6) var<storage, read> v_rows: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> tok_part: array<vec4<f32>>;

const NEAR_LANES: u32 = 128u;
const NEAR_HEADS: u32 = 4u;
const NEAR_KEYS: u32 = 32u;      // keys of a tile
const KEY_LANES: u32 = 16u;      // lanes that share a key
const NEAR_SCORES: u32 = 128u;   // NEAR_HEADS * NEAR_KEYS
const PART_STRIDE: u32 = 130u;   // NEAR_SCORES and two more, so that a tile's parts lie in 32 banks
const NEAR_PARTS: u32 = 2080u;   // KEY_LANES * PART_STRIDE; holds the value sums at the end

var<workgroup> sh_parts: array<f32, NEAR_PARTS>;
var<workgroup> sh_scores: array<f32, NEAR_SCORES>;     // [head][key]; the stripes' masses at the end
var<workgroup> sh_weights: array<f32, NEAR_SCORES>;    // [head][key]
var<workgroup> sh_tops: array<f32, NEAR_HEADS>;        // the largest logits so far

// Row of ring_k and ring_v for column s; `oldest` is the age rank of the window's first row. The row's
// own column gets some row of the ring, whose contents the caller replaces.
fn column_row(group: Group, g: u32, oldest: u32, s: u32) -> u32 {
    // A conditional subtraction, for head < window and rank <= window.
    let ahead = group.head + oldest + s - params.ns;
    let slot = select(ahead, ahead - group.window, ahead >= group.window);
    return g * near_capacity() + select(slot, params.w + s, s < params.ns);
}

// The four heads' dots with one vec4 of a key.
fn dots(q0: vec4<f32>, q1: vec4<f32>, q2: vec4<f32>, q3: vec4<f32>, key: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(dot(q0, key), dot(q1, key), dot(q2, key), dot(q3, key));
}

// A lane's dots with its four keys of the tile, for head h at `at`.
fn put_parts(at: u32, x0: f32, x1: f32, x2: f32, x3: f32) {
    sh_parts[at] = x0;
    sh_parts[at + 8u] = x1;
    sh_parts[at + 16u] = x2;
    sh_parts[at + 24u] = x3;
}

// Eight of a lane's parts from `at` on, PART_STRIDE apart.
fn eight_parts(at: u32) -> f32 {
    return ((sh_parts[at] + sh_parts[at + 130u]) + (sh_parts[at + 260u] + sh_parts[at + 390u]))
        + ((sh_parts[at + 520u] + sh_parts[at + 650u]) + (sh_parts[at + 780u] + sh_parts[at + 910u]));
}

fn eight_scores(at: u32) -> f32 {
    return max(
        max(max(sh_scores[at], sh_scores[at + 1u]), max(sh_scores[at + 2u], sh_scores[at + 3u])),
        max(max(sh_scores[at + 4u], sh_scores[at + 5u]), max(sh_scores[at + 6u], sh_scores[at + 7u])),
    );
}

// The four heads' weights of a tile's key, zeros past the tile.
fn weights_of(key: u32) -> vec4<f32> {
    let at = min(key, NEAR_KEYS - 1u);
    let found = vec4<f32>(sh_weights[at], sh_weights[at + 32u], sh_weights[at + 64u], sh_weights[at + 96u]);
    return select(vec4<f32>(0.0), found, key < NEAR_KEYS);
}

fn put_sum(h: u32, lane: u32, sum: vec4<f32>) {
    let at = 4u * h * NEAR_LANES + lane;
    sh_parts[at] = sum.x;
    sh_parts[at + NEAR_LANES] = sum.y;
    sh_parts[at + 2u * NEAR_LANES] = sum.z;
    sh_parts[at + 3u * NEAR_LANES] = sum.w;
}

@compute @workgroup_size(NEAR_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let split = wid.x;
    let g = wid.y;
    let block = wid.z * NEAR_HEADS;
    if (split < params.splits && g < params.ng && block < params.hpg) {
        let group = load_group(g);
        let d4 = params.d / 4u;
        let dv4 = max(params.dv / 4u, 1u);
        let seen = window_rows(group, 0u);
        let oldest = group.len + 1u - seen;
        let columns = params.ns + seen;
        let per = (columns + params.splits - 1u) / max(params.splits, 1u);
        let first = min(split * per, columns);
        let end = min(first + per, columns);
        let own_k = (params.r0 * params.ng + g) * d4;
        let own_v = (params.r0 * params.ng + g) * dv4;

        // Heads past the group's last repeat it, and are not written.
        let heads = min(params.hpg - block, NEAR_HEADS);
        let gh = g * params.hpg + block;
        let q_row = params.r0 * params.nh + gh;
        let q0 = q_row * d4;
        let q1 = (q_row + min(1u, heads - 1u)) * d4;
        let q2 = (q_row + min(2u, heads - 1u)) * d4;
        let q3 = (q_row + min(3u, heads - 1u)) * d4;

        // The lane's place among those of a key, of a score, of a value.
        let key_part = lane % KEY_LANES;
        let key = lane / KEY_LANES;
        let score_head = lane / NEAR_KEYS;
        let score_key = lane % NEAR_KEYS;
        let stripes = min(NEAR_LANES / dv4, NEAR_KEYS);
        let column = lane % dv4;
        let stripe = lane / dv4;

        var top = -LARGE;                     // of the lane's score head
        var tops = vec4<f32>(-LARGE);         // of all four
        var mass = vec4<f32>(0.0);            // over the lane's stripe
        var sum0 = vec4<f32>(0.0);
        var sum1 = vec4<f32>(0.0);
        var sum2 = vec4<f32>(0.0);
        var sum3 = vec4<f32>(0.0);
        for (var tile = first; tile < end; tile += NEAR_KEYS) {
            let last = end - 1u;
            // The row's own key, the last column of all, is not in the ring yet.
            let has_own = last == columns - 1u && last - tile < NEAR_KEYS;
            let own = last - tile;
            let k0 = column_row(group, g, oldest, min(tile + key, last)) * d4;
            let k1 = column_row(group, g, oldest, min(tile + key + 8u, last)) * d4;
            let k2 = column_row(group, g, oldest, min(tile + key + 16u, last)) * d4;
            let k3 = column_row(group, g, oldest, min(tile + key + 24u, last)) * d4;
            var x0 = vec4<f32>(0.0);
            var x1 = vec4<f32>(0.0);
            var x2 = vec4<f32>(0.0);
            var x3 = vec4<f32>(0.0);
            for (var e = key_part; e < d4; e += 2u * KEY_LANES) {
                let more = e + KEY_LANES < d4;
                let f = select(e, e + KEY_LANES, more);
                var a0 = from_ring(ring_k[k0 + e]);
                var a1 = from_ring(ring_k[k1 + e]);
                var a2 = from_ring(ring_k[k2 + e]);
                var a3 = from_ring(ring_k[k3 + e]);
                var b0 = from_ring(ring_k[k0 + f]);
                var b1 = from_ring(ring_k[k1 + f]);
                var b2 = from_ring(ring_k[k2 + f]);
                var b3 = from_ring(ring_k[k3 + f]);
                if (has_own) {
                    let own_a = k_rows[own_k + e];
                    let own_b = k_rows[own_k + f];
                    // Lanes past the last key read it too; their scores are masked.
                    a0 = select(a0, own_a, key >= own);
                    a1 = select(a1, own_a, key + 8u >= own);
                    a2 = select(a2, own_a, key + 16u >= own);
                    a3 = select(a3, own_a, key + 24u >= own);
                    b0 = select(b0, own_b, key >= own);
                    b1 = select(b1, own_b, key + 8u >= own);
                    b2 = select(b2, own_b, key + 16u >= own);
                    b3 = select(b3, own_b, key + 24u >= own);
                }
                let qa0 = q[q0 + e];
                let qa1 = q[q1 + e];
                let qa2 = q[q2 + e];
                let qa3 = q[q3 + e];
                x0 += dots(qa0, qa1, qa2, qa3, a0);
                x1 += dots(qa0, qa1, qa2, qa3, a1);
                x2 += dots(qa0, qa1, qa2, qa3, a2);
                x3 += dots(qa0, qa1, qa2, qa3, a3);
                if (more) {
                    let qb0 = q[q0 + f];
                    let qb1 = q[q1 + f];
                    let qb2 = q[q2 + f];
                    let qb3 = q[q3 + f];
                    x0 += dots(qb0, qb1, qb2, qb3, b0);
                    x1 += dots(qb0, qb1, qb2, qb3, b1);
                    x2 += dots(qb0, qb1, qb2, qb3, b2);
                    x3 += dots(qb0, qb1, qb2, qb3, b3);
                }
            }
            let parts = key_part * PART_STRIDE + key;
            put_parts(parts, x0.x, x1.x, x2.x, x3.x);
            put_parts(parts + 32u, x0.y, x1.y, x2.y, x3.y);
            put_parts(parts + 64u, x0.z, x1.z, x2.z, x3.z);
            put_parts(parts + 96u, x0.w, x1.w, x2.w, x3.w);

            // The lane's first eight values, on their way while the weights are made.
            let i1 = stripe + stripes;
            let i2 = i1 + stripes;
            let i3 = i2 + stripes;
            let i4 = i3 + stripes;
            let i5 = i4 + stripes;
            let i6 = i5 + stripes;
            let i7 = i6 + stripes;
            var v0 = from_ring(ring_v[column_row(group, g, oldest, min(tile + stripe, last)) * dv4 + column]);
            var v1 = from_ring(ring_v[column_row(group, g, oldest, min(tile + i1, last)) * dv4 + column]);
            var v2 = from_ring(ring_v[column_row(group, g, oldest, min(tile + i2, last)) * dv4 + column]);
            var v3 = from_ring(ring_v[column_row(group, g, oldest, min(tile + i3, last)) * dv4 + column]);
            var v4 = from_ring(ring_v[column_row(group, g, oldest, min(tile + i4, last)) * dv4 + column]);
            var v5 = from_ring(ring_v[column_row(group, g, oldest, min(tile + i5, last)) * dv4 + column]);
            var v6 = from_ring(ring_v[column_row(group, g, oldest, min(tile + i6, last)) * dv4 + column]);
            var v7 = from_ring(ring_v[column_row(group, g, oldest, min(tile + i7, last)) * dv4 + column]);
            if (has_own) {
                let own_value = v_rows[own_v + column];
                v0 = select(v0, own_value, stripe >= own);
                v1 = select(v1, own_value, i1 >= own);
                v2 = select(v2, own_value, i2 >= own);
                v3 = select(v3, own_value, i3 >= own);
                v4 = select(v4, own_value, i4 >= own);
                v5 = select(v5, own_value, i5 >= own);
                v6 = select(v6, own_value, i6 >= own);
                v7 = select(v7, own_value, i7 >= own);
            }
            workgroupBarrier();

            let in_tile = tile + score_key < end;
            let dotted = (eight_parts(lane) + eight_parts(lane + 8u * PART_STRIDE)) * params.scale;
            let score = select(-LARGE, dotted, in_tile);
            sh_scores[lane] = score;
            workgroupBarrier();

            let row = score_head * NEAR_KEYS;
            let found = max(
                max(eight_scores(row), eight_scores(row + 8u)),
                max(eight_scores(row + 16u), eight_scores(row + 24u)),
            );
            top = max(top, found);
            sh_weights[lane] = select(0.0, exp_floored(score - top), in_tile);
            if (score_key == 0u) {
                sh_tops[score_head] = top;
            }
            workgroupBarrier();

            let before = tops;
            tops = vec4<f32>(sh_tops[0], sh_tops[1], sh_tops[2], sh_tops[3]);
            let kept = vec4<f32>(
                rescale(before.x, tops.x), rescale(before.y, tops.y),
                rescale(before.z, tops.z), rescale(before.w, tops.w),
            );
            let w0 = weights_of(stripe);
            let w1 = weights_of(i1);
            let w2 = weights_of(i2);
            let w3 = weights_of(i3);
            let w4 = weights_of(i4);
            let w5 = weights_of(i5);
            let w6 = weights_of(i6);
            let w7 = weights_of(i7);
            mass = mass * kept + (((w0 + w1) + (w2 + w3)) + ((w4 + w5) + (w6 + w7)));
            sum0 = sum0 * kept.x + (((w0.x * v0 + w1.x * v1) + (w2.x * v2 + w3.x * v3))
                + ((w4.x * v4 + w5.x * v5) + (w6.x * v6 + w7.x * v7)));
            sum1 = sum1 * kept.y + (((w0.y * v0 + w1.y * v1) + (w2.y * v2 + w3.y * v3))
                + ((w4.y * v4 + w5.y * v5) + (w6.y * v6 + w7.y * v7)));
            sum2 = sum2 * kept.z + (((w0.z * v0 + w1.z * v1) + (w2.z * v2 + w3.z * v3))
                + ((w4.z * v4 + w5.z * v5) + (w6.z * v6 + w7.z * v7)));
            sum3 = sum3 * kept.w + (((w0.w * v0 + w1.w * v1) + (w2.w * v2 + w3.w * v3))
                + ((w4.w * v4 + w5.w * v5) + (w6.w * v6 + w7.w * v7)));

            // What is left where values are wide and stripes few.
            let tile_keys = min(end - tile, NEAR_KEYS);
            for (var i = i7 + stripes; i < tile_keys; i += stripes) {
                var value = from_ring(ring_v[column_row(group, g, oldest, tile + i) * dv4 + column]);
                if (has_own && i == own) {
                    value = v_rows[own_v + column];
                }
                let weight = weights_of(i);
                mass += weight;
                sum0 += weight.x * value;
                sum1 += weight.y * value;
                sum2 += weight.z * value;
                sum3 += weight.w * value;
            }
        }

        put_sum(0u, lane, sum0);
        put_sum(1u, lane, sum1);
        put_sum(2u, lane, sum2);
        put_sum(3u, lane, sum3);
        if (column == 0u && stripe < stripes) {
            sh_scores[stripe] = mass.x;
            sh_scores[stripe + 32u] = mass.y;
            sh_scores[stripe + 64u] = mass.z;
            sh_scores[stripe + 96u] = mass.w;
        }
        workgroupBarrier();

        for (var i = lane; i < heads * dv4; i += NEAR_LANES) {
            let h = i / dv4;
            let c = i % dv4;
            var total = vec4<f32>(0.0);
            for (var s = 0u; s < stripes; s++) {
                let at = 4u * h * NEAR_LANES + s * dv4 + c;
                total += vec4<f32>(
                    sh_parts[at], sh_parts[at + NEAR_LANES],
                    sh_parts[at + 2u * NEAR_LANES], sh_parts[at + 3u * NEAR_LANES],
                );
            }
            tok_part[tok_part_at(gh + h, split) + 1u + c] = total;
        }
        if (score_key == 0u && score_head < heads) {
            var total = 0.0;
            for (var s = 0u; s < stripes; s++) {
                total += sh_scores[score_head * NEAR_KEYS + s];
            }
            tok_part[tok_part_at(gh + score_head, split)] = vec4<f32>(top, total, 0.0, 0.0);
        }
    }
}
