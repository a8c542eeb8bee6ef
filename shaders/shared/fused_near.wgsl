// Near part of a fused token: a workgroup's share of a group's window for four of its heads.
//
// Rows are read by where they lie, not by age, so that no load waits for group_meta; which of them count
// is asked of the logits alone. The row that leaves does not, the call's own row is the second kernel's.

const NEAR_HEADS: u32 = 4u;
const NEAR_KEYS: u32 = 32u;       // logits of a head
const ROW_LANES: u32 = 8u;        // lanes that share a key
const KEYS_ABREAST: u32 = 16u;    // FUSED_LANES / ROW_LANES
const WIDE: u32 = 32u;            // vec4s of a row beyond which a lane takes one key instead of two
const LOGIT_STRIDE: u32 = 132u;   // a logit of each (head, key), four more: the parts lie in 32 banks
const WEIGHTS: u32 = 128u;        // where sh_small has weights, logits before them

override TILE_KEYS: u32 = select(NEAR_KEYS, KEYS_ABREAST, D4 > WIDE || DV4 > WIDE);
override VALUE_STRIPES: u32 = min(max(FUSED_LANES / DV4, 1u), TILE_KEYS);
override VALUE_ROUNDS: u32 = (TILE_KEYS + VALUE_STRIPES - 1u) / VALUE_STRIPES;

fn counts(group: Group, r: u32) -> bool {
    let ahead = r + group.window - group.head;
    let age = select(ahead, ahead - group.window, ahead >= group.window);
    let oldest = select(0u, 1u, group.len == group.window);
    return (r < group.window && age < group.len && age >= oldest)
        || (r >= params.w && r < near_capacity());
}

fn dots(q0: vec4<f32>, q1: vec4<f32>, q2: vec4<f32>, q3: vec4<f32>, key: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(dot(q0, key), dot(q1, key), dot(q2, key), dot(q3, key));
}

fn query_quad(row: u32, e: u32) -> vec4<f32> {
    return select(vec4<f32>(0.0), q[row * D4 + min(e, D4 - 1u)], e < D4);
}

// The weights of key n of the tile for the four heads.
fn weights_of(n: u32) -> vec4<f32> {
    let at = WEIGHTS + min(n, NEAR_KEYS - 1u);
    let found = vec4<f32>(sh_small[at], sh_small[at + 32u], sh_small[at + 64u], sh_small[at + 96u]);
    return select(vec4<f32>(0.0), found, n < TILE_KEYS);
}

fn max4(v: vec4<f32>) -> f32 {
    return max(max(v.x, v.y), max(v.z, v.w));
}

fn four_logits(at: u32) -> vec4<f32> {
    return vec4<f32>(sh_small[at], sh_small[at + 1u], sh_small[at + 2u], sh_small[at + 3u]);
}

fn largest_of(row: u32) -> f32 {
    let low = max(
        max(four_logits(row), four_logits(row + 4u)),
        max(four_logits(row + 8u), four_logits(row + 12u)),
    );
    let high = max(
        max(four_logits(row + 16u), four_logits(row + 20u)),
        max(four_logits(row + 24u), four_logits(row + 28u)),
    );
    return max4(max(low, high));
}

// A lane's sums of two heads, so that another may add up its column's stripes.
fn put_sums(lane: u32, first: vec4<f32>, second: vec4<f32>) {
    sh_large[lane] = first.x;
    sh_large[128u + lane] = first.y;
    sh_large[256u + lane] = first.z;
    sh_large[384u + lane] = first.w;
    sh_large[512u + lane] = second.x;
    sh_large[640u + lane] = second.y;
    sh_large[768u + lane] = second.z;
    sh_large[896u + lane] = second.w;
}

fn sums_at(at: u32) -> vec4<f32> {
    return vec4<f32>(sh_large[at], sh_large[at + 128u], sh_large[at + 256u], sh_large[at + 384u]);
}

fn store_sums(gh: u32, split: u32, first: u32, heads: u32, lane: u32) {
    let h = lane / DV4;
    let column = lane % DV4;
    if (h < 2u && first + h < heads) {
        let at = h * 512u + column;
        var total = sums_at(at);
        if (VALUE_STRIPES >= 4u) {
            total = (total + sums_at(at + DV4)) + (sums_at(at + 2u * DV4) + sums_at(at + 3u * DV4));
            for (var s = 4u; s < VALUE_STRIPES; s++) {
                total += sums_at(at + s * DV4);
            }
        } else {
            for (var s = 1u; s < VALUE_STRIPES; s++) {
                total += sums_at(at + s * DV4);
            }
        }
        fu_part[split_at(gh + first + h, split) + 1u + column] = total;
    }
}

fn near_part(g: u32, split: u32, block: u32, lane: u32) {
    let group = load_group(g);
    let heads = min(params.hpg - block, NEAR_HEADS);
    let gh = g * params.hpg + block;
    let tile = split * TILE_KEYS;
    let base = g * near_capacity();
    let last = near_capacity() - 1u;
    let e = lane % ROW_LANES;
    let key = lane / ROW_LANES;
    let stripe = lane / DV4;
    let head = lane / NEAR_KEYS;
    let q0 = params.r0 * params.nh + gh;
    let q1 = q0 + min(1u, heads - 1u);
    let q2 = q0 + min(2u, heads - 1u);
    let q3 = q0 + min(3u, heads - 1u);
    let ka = (base + min(tile + key, last)) * D4 + e;
    let kb = (base + min(tile + key + KEYS_ABREAST, last)) * D4 + e;
    let zero = vec4<f32>(0.0);
    // Everything that memory has to bring, before anything is summed. Past a row's end lies another's,
    // finite as all are, and its query's part is zero.
    var a0 = from_ring(ring[ka]);
    var a1 = zero;
    var a2 = zero;
    var a3 = zero;
    var a4 = zero;
    var a5 = zero;
    var a6 = zero;
    var a7 = zero;
    var b0 = zero;
    var b1 = zero;
    var b2 = zero;
    var b3 = zero;
    if (D4 > 1u * ROW_LANES) { a1 = from_ring(ring[ka + 1u * ROW_LANES]); }
    if (D4 > 2u * ROW_LANES) { a2 = from_ring(ring[ka + 2u * ROW_LANES]); }
    if (D4 > 3u * ROW_LANES) { a3 = from_ring(ring[ka + 3u * ROW_LANES]); }
    if (D4 > 4u * ROW_LANES) { a4 = from_ring(ring[ka + 4u * ROW_LANES]); }
    if (D4 > 5u * ROW_LANES) { a5 = from_ring(ring[ka + 5u * ROW_LANES]); }
    if (D4 > 6u * ROW_LANES) { a6 = from_ring(ring[ka + 6u * ROW_LANES]); }
    if (D4 > 7u * ROW_LANES) { a7 = from_ring(ring[ka + 7u * ROW_LANES]); }
    if (TILE_KEYS > KEYS_ABREAST) {
        b0 = from_ring(ring[kb]);
        if (D4 > 1u * ROW_LANES) { b1 = from_ring(ring[kb + 1u * ROW_LANES]); }
        if (D4 > 2u * ROW_LANES) { b2 = from_ring(ring[kb + 2u * ROW_LANES]); }
        if (D4 > 3u * ROW_LANES) { b3 = from_ring(ring[kb + 3u * ROW_LANES]); }
    }
    let n0 = stripe + 0u * VALUE_STRIPES;
    let n1 = stripe + 1u * VALUE_STRIPES;
    let n2 = stripe + 2u * VALUE_STRIPES;
    let n3 = stripe + 3u * VALUE_STRIPES;
    let n4 = stripe + 4u * VALUE_STRIPES;
    let n5 = stripe + 5u * VALUE_STRIPES;
    let n6 = stripe + 6u * VALUE_STRIPES;
    let n7 = stripe + 7u * VALUE_STRIPES;
    let values = second_part(arrayLength(&ring), D4, DV4) + lane % DV4;
    let v0 = from_ring(ring[values + (base + min(tile + n0, last)) * DV4]);
    var v1 = zero;
    var v2 = zero;
    var v3 = zero;
    var v4 = zero;
    var v5 = zero;
    var v6 = zero;
    var v7 = zero;
    if (VALUE_ROUNDS > 1u) { v1 = from_ring(ring[values + (base + min(tile + n1, last)) * DV4]); }
    if (VALUE_ROUNDS > 2u) { v2 = from_ring(ring[values + (base + min(tile + n2, last)) * DV4]); }
    if (VALUE_ROUNDS > 3u) { v3 = from_ring(ring[values + (base + min(tile + n3, last)) * DV4]); }
    if (VALUE_ROUNDS > 4u) { v4 = from_ring(ring[values + (base + min(tile + n4, last)) * DV4]); }
    if (VALUE_ROUNDS > 5u) { v5 = from_ring(ring[values + (base + min(tile + n5, last)) * DV4]); }
    if (VALUE_ROUNDS > 6u) { v6 = from_ring(ring[values + (base + min(tile + n6, last)) * DV4]); }
    if (VALUE_ROUNDS > 7u) { v7 = from_ring(ring[values + (base + min(tile + n7, last)) * DV4]); }

    var xa = zero;
    var xb = zero;
    {
        let r0 = query_quad(q0, e + 0u * ROW_LANES);
        let r1 = query_quad(q1, e + 0u * ROW_LANES);
        let r2 = query_quad(q2, e + 0u * ROW_LANES);
        let r3 = query_quad(q3, e + 0u * ROW_LANES);
        xa += dots(r0, r1, r2, r3, a0);
        xb += dots(r0, r1, r2, r3, b0);
    }
    if (D4 > 1u * ROW_LANES) {
        let r0 = query_quad(q0, e + 1u * ROW_LANES);
        let r1 = query_quad(q1, e + 1u * ROW_LANES);
        let r2 = query_quad(q2, e + 1u * ROW_LANES);
        let r3 = query_quad(q3, e + 1u * ROW_LANES);
        xa += dots(r0, r1, r2, r3, a1);
        xb += dots(r0, r1, r2, r3, b1);
    }
    if (D4 > 2u * ROW_LANES) {
        let r0 = query_quad(q0, e + 2u * ROW_LANES);
        let r1 = query_quad(q1, e + 2u * ROW_LANES);
        let r2 = query_quad(q2, e + 2u * ROW_LANES);
        let r3 = query_quad(q3, e + 2u * ROW_LANES);
        xa += dots(r0, r1, r2, r3, a2);
        xb += dots(r0, r1, r2, r3, b2);
    }
    if (D4 > 3u * ROW_LANES) {
        let r0 = query_quad(q0, e + 3u * ROW_LANES);
        let r1 = query_quad(q1, e + 3u * ROW_LANES);
        let r2 = query_quad(q2, e + 3u * ROW_LANES);
        let r3 = query_quad(q3, e + 3u * ROW_LANES);
        xa += dots(r0, r1, r2, r3, a3);
        xb += dots(r0, r1, r2, r3, b3);
    }
    if (D4 > 4u * ROW_LANES) {
        let r0 = query_quad(q0, e + 4u * ROW_LANES);
        let r1 = query_quad(q1, e + 4u * ROW_LANES);
        let r2 = query_quad(q2, e + 4u * ROW_LANES);
        let r3 = query_quad(q3, e + 4u * ROW_LANES);
        xa += dots(r0, r1, r2, r3, a4);
    }
    if (D4 > 5u * ROW_LANES) {
        let r0 = query_quad(q0, e + 5u * ROW_LANES);
        let r1 = query_quad(q1, e + 5u * ROW_LANES);
        let r2 = query_quad(q2, e + 5u * ROW_LANES);
        let r3 = query_quad(q3, e + 5u * ROW_LANES);
        xa += dots(r0, r1, r2, r3, a5);
    }
    if (D4 > 6u * ROW_LANES) {
        let r0 = query_quad(q0, e + 6u * ROW_LANES);
        let r1 = query_quad(q1, e + 6u * ROW_LANES);
        let r2 = query_quad(q2, e + 6u * ROW_LANES);
        let r3 = query_quad(q3, e + 6u * ROW_LANES);
        xa += dots(r0, r1, r2, r3, a6);
    }
    if (D4 > 7u * ROW_LANES) {
        let r0 = query_quad(q0, e + 7u * ROW_LANES);
        let r1 = query_quad(q1, e + 7u * ROW_LANES);
        let r2 = query_quad(q2, e + 7u * ROW_LANES);
        let r3 = query_quad(q3, e + 7u * ROW_LANES);
        xa += dots(r0, r1, r2, r3, a7);
    }
    let to = e * LOGIT_STRIDE + key;
    sh_large[to] = xa.x;
    sh_large[to + 32u] = xa.y;
    sh_large[to + 64u] = xa.z;
    sh_large[to + 96u] = xa.w;
    sh_large[to + 16u] = xb.x;
    sh_large[to + 48u] = xb.y;
    sh_large[to + 80u] = xb.z;
    sh_large[to + 112u] = xb.w;
    workgroupBarrier();

    let key_of = lane % NEAR_KEYS;
    let counted = key_of < TILE_KEYS && counts(group, tile + key_of);
    let dotted = ((sh_large[lane] + sh_large[lane + 132u]) + (sh_large[lane + 264u] + sh_large[lane + 396u]))
        + ((sh_large[lane + 528u] + sh_large[lane + 660u]) + (sh_large[lane + 792u] + sh_large[lane + 924u]));
    let logit = select(-LARGE, dotted * params.scale, counted);
    sh_small[lane] = logit;
    workgroupBarrier();

    let top = largest_of(head * NEAR_KEYS);
    sh_small[WEIGHTS + lane] = select(0.0, exp_floored(logit - top), counted);
    workgroupBarrier();

    let w0 = weights_of(n0);
    let w1 = weights_of(n1);
    let w2 = weights_of(n2);
    let w3 = weights_of(n3);
    let w4 = weights_of(n4);
    let w5 = weights_of(n5);
    let w6 = weights_of(n6);
    let w7 = weights_of(n7);
    let mass = ((w0 + w1) + (w2 + w3)) + ((w4 + w5) + (w6 + w7));
    let sum0 = ((w0.x * v0 + w1.x * v1) + (w2.x * v2 + w3.x * v3))
        + ((w4.x * v4 + w5.x * v5) + (w6.x * v6 + w7.x * v7));
    let sum1 = ((w0.y * v0 + w1.y * v1) + (w2.y * v2 + w3.y * v3))
        + ((w4.y * v4 + w5.y * v5) + (w6.y * v6 + w7.y * v7));
    let sum2 = ((w0.z * v0 + w1.z * v1) + (w2.z * v2 + w3.z * v3))
        + ((w4.z * v4 + w5.z * v5) + (w6.z * v6 + w7.z * v7));
    let sum3 = ((w0.w * v0 + w1.w * v1) + (w2.w * v2 + w3.w * v3))
        + ((w4.w * v4 + w5.w * v5) + (w6.w * v6 + w7.w * v7));
    if (lane % DV4 == 0u && stripe < VALUE_STRIPES) {
        sh_small[stripe] = mass.x;
        sh_small[stripe + 32u] = mass.y;
        sh_small[stripe + 64u] = mass.z;
        sh_small[stripe + 96u] = mass.w;
    }
    put_sums(lane, sum0, sum1);
    workgroupBarrier();
    store_sums(gh, split, 0u, heads, lane);
    if (key_of == 0u && head < heads) {
        var total = sh_small[lane];
        for (var s = 1u; s < VALUE_STRIPES; s++) {
            total += sh_small[lane + s];
        }
        fu_part[split_at(gh + head, split)] = vec4<f32>(top, total, 0.0, 0.0);
    }
    workgroupBarrier();
    put_sums(lane, sum2, sum3);
    workgroupBarrier();
    store_sums(gh, split, 2u, heads, lane);
}
