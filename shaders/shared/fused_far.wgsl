// Far part of a fused token: one workgroup a query head. It leaves the record from which the second kernel
// makes the head's output and its new far field.

const DOT_LANES: u32 = 8u;        // lanes that share a landmark
const MARKS_ABREAST: u32 = 16u;   // FUSED_LANES / DOT_LANES
const MARK_STRIDE: u32 = 68u;     // LANES landmarks, four more: the parts lie in 32 banks
const KEY_PARTS: u32 = 544u;      // DOT_LANES * MARK_STRIDE: the evicted key's parts, the query's before
const MAXIMA: u32 = 64u;          // sections of sh_small: landmark logits, then these
const KEPT: u32 = 128u;
const FOLDED: u32 = 192u;
const SHARES: u32 = 256u;
const RECT_FM: u32 = 1u;

fn eight_dots(at: u32) -> f32 {
    return ((sh_large[at] + sh_large[at + 68u]) + (sh_large[at + 136u] + sh_large[at + 204u]))
        + ((sh_large[at + 272u] + sh_large[at + 340u]) + (sh_large[at + 408u] + sh_large[at + 476u]));
}


fn sixteen_shares(at: u32) -> f32 {
    return sum4(four_logits(at) + four_logits(at + 4u)) + sum4(four_logits(at + 8u) + four_logits(at + 12u));
}

// exp(p_a - f), zero past the landmarks in use.
fn landmark_weight(landmarks: u32, a: u32, f: f32) -> f32 {
    return select(0.0, exp_floored(sh_small[min(a, LANES - 1u)] - f), a < landmarks);
}

fn mix_of(gh: u32, a: u32, b: u32) -> f32 {
    return mix[(gh * params.m + min(a, params.m - 1u)) * params.m + min(b, params.m - 1u)];
}

fn far_part(gh: u32, lane: u32) {
    let g = group_of(gh);
    let group = load_group(g);
    let m = params.m;
    let landmarks = max(group.landmarks, 1u);
    let evicts = group.len == group.window;
    let folds = evicts && group.far_len < group.far_limit;
    let far_len = group.far_len + select(0u, 1u, folds);
    let flushes = far_len / FLUSH_ROWS != group.far_len / FLUSH_ROWS;
    let evicted_row = g * near_capacity() + group.head;

    // Lanes below LANES take a landmark's masses and gain, the others its maximum.
    let upper = lane >= LANES;
    let a = lane % LANES;
    let read = min(a, m - 1u);
    let mz0 = far_mz[far_mz_at(select(MZ_TOTAL, MZ_MAX, upper), gh, read)];
    let mz1 = far_mz[far_mz_at(select(MZ_RECENT, MZ_SHIFT, upper), gh, read)];

    // Columns of M in stripes of its rows; the first eight of a lane's rows are on their way early.
    let wide = select(LANES, 32u, m <= 32u);
    let column = lane % wide;
    let stripe = lane / wide;
    let stripes = FUSED_LANES / wide;
    let mix0 = mix_of(gh, stripe, column);
    let mix1 = mix_of(gh, stripe + stripes, column);
    let mix2 = mix_of(gh, stripe + 2u * stripes, column);
    let mix3 = mix_of(gh, stripe + 3u * stripes, column);
    let mix4 = mix_of(gh, stripe + 4u * stripes, column);
    let mix5 = mix_of(gh, stripe + 5u * stripes, column);
    let mix6 = mix_of(gh, stripe + 6u * stripes, column);
    let mix7 = mix_of(gh, stripe + 7u * stripes, column);

    let part = lane % DOT_LANES;
    let query_at = (params.r0 * params.nh + gh) * D4;
    let key_at = evicted_row * D4;
    for (var first = lane / DOT_LANES; first < m; first += 2u * MARKS_ABREAST) {
        let low = min(first, m - 1u);
        let high = min(first + MARKS_ABREAST, m - 1u);
        let kt0 = (g * m + low) * D4;
        let kt1 = (g * m + high) * D4;
        let qt0 = (gh * m + low) * D4;
        let qt1 = (gh * m + high) * D4;
        var to_query = vec2<f32>(0.0);
        var to_key = vec2<f32>(0.0);
        for (var e = part; e < D4; e += 4u * DOT_LANES) {
            let e0 = e;
            let e1 = min(e + DOT_LANES, D4 - 1u);
            let e2 = min(e + 2u * DOT_LANES, D4 - 1u);
            let e3 = min(e + 3u * DOT_LANES, D4 - 1u);
            let k00 = k_tilde[kt0 + e0];
            let k01 = k_tilde[kt0 + e1];
            let k02 = k_tilde[kt0 + e2];
            let k03 = k_tilde[kt0 + e3];
            let k10 = k_tilde[kt1 + e0];
            let k11 = k_tilde[kt1 + e1];
            let k12 = k_tilde[kt1 + e2];
            let k13 = k_tilde[kt1 + e3];
            let q00 = q_tilde[qt0 + e0];
            let q01 = q_tilde[qt0 + e1];
            let q02 = q_tilde[qt0 + e2];
            let q03 = q_tilde[qt0 + e3];
            let q10 = q_tilde[qt1 + e0];
            let q11 = q_tilde[qt1 + e1];
            let q12 = q_tilde[qt1 + e2];
            let q13 = q_tilde[qt1 + e3];
            let has1 = e + DOT_LANES < D4;
            let has2 = e + 2u * DOT_LANES < D4;
            let has3 = e + 3u * DOT_LANES < D4;
            let zero = vec4<f32>(0.0);
            let query0 = q[query_at + e0];
            let query1 = select(zero, q[query_at + e1], has1);
            let query2 = select(zero, q[query_at + e2], has2);
            let query3 = select(zero, q[query_at + e3], has3);
            let gone0 = from_ring(ring[key_at + e0]);
            let gone1 = select(zero, from_ring(ring[key_at + e1]), has1);
            let gone2 = select(zero, from_ring(ring[key_at + e2]), has2);
            let gone3 = select(zero, from_ring(ring[key_at + e3]), has3);
            to_query += vec2<f32>(
                (dot(k00, query0) + dot(k01, query1)) + (dot(k02, query2) + dot(k03, query3)),
                (dot(k10, query0) + dot(k11, query1)) + (dot(k12, query2) + dot(k13, query3)),
            );
            to_key += vec2<f32>(
                (dot(q00, gone0) + dot(q01, gone1)) + (dot(q02, gone2) + dot(q03, gone3)),
                (dot(q10, gone0) + dot(q11, gone1)) + (dot(q12, gone2) + dot(q13, gone3)),
            );
        }
        let to = part * MARK_STRIDE + first;
        sh_large[to] = to_query.x;
        sh_large[to + MARKS_ABREAST] = to_query.y;
        sh_large[KEY_PARTS + to] = to_key.x;
        sh_large[KEY_PARTS + to + MARKS_ABREAST] = to_key.y;
    }
    workgroupBarrier();

    // What is kept of a landmark past those in use is no number of this head's: it must not count.
    let in_use = a < landmarks;
    let x = eight_dots(select(0u, KEY_PARTS, upper) + a) * params.scale;
    if (!upper) {
        sh_small[a] = select(-LARGE, x, in_use);
    } else {
        let logit = x - mz1;
        let mu = select(mz0, max(mz0, logit), folds);
        sh_small[MAXIMA + a] = select(-LARGE, mu, in_use);
        sh_small[KEPT + a] = rescale(mz0, mu);
        sh_small[FOLDED + a] = select(0.0, exp_floored(logit - mu), folds);
    }
    workgroupBarrier();

    var f = largest_of(0u);
    var largest = largest_of(MAXIMA);
    if (landmarks > 32u) {
        f = max(f, largest_of(32u));
        largest = max(largest, largest_of(MAXIMA + 32u));
    }
    var mixed = ((landmark_weight(landmarks, stripe, f) * mix0
            + landmark_weight(landmarks, stripe + stripes, f) * mix1)
        + (landmark_weight(landmarks, stripe + 2u * stripes, f) * mix2
            + landmark_weight(landmarks, stripe + 3u * stripes, f) * mix3))
        + ((landmark_weight(landmarks, stripe + 4u * stripes, f) * mix4
            + landmark_weight(landmarks, stripe + 5u * stripes, f) * mix5)
        + (landmark_weight(landmarks, stripe + 6u * stripes, f) * mix6
            + landmark_weight(landmarks, stripe + 7u * stripes, f) * mix7));
    for (var k = stripe + 8u * stripes; k < landmarks; k += stripes) {
        mixed += landmark_weight(landmarks, k, f) * mix_of(gh, k, column);
    }
    sh_large[lane] = mixed;
    workgroupBarrier();

    // The largest of the sums f + mu, for rounding keeps order.
    let scale_max = f + largest;
    if (!upper) {
        var u = sh_large[a % wide] + sh_large[wide + a % wide];
        if (stripes == 4u) {
            u += sh_large[2u * wide + a % wide] + sh_large[3u * wide + a % wide];
        }
        if (params.rect == RECT_FM) {
            u = max(u, 0.0);
        }
        let mu = sh_small[MAXIMA + a];
        let kept = sh_small[KEPT + a];
        let weight = sh_small[FOLDED + a];
        let counts_here = in_use && far_len > 0u;
        let gain = select(0.0, u * exp_floored(f + mu - scale_max), counts_here);
        let total = mz0 * kept;
        let recent = mz1 * kept + weight;
        sh_small[SHARES + a] = select(0.0, gain * (total + recent), counts_here);
        if (in_use) {
            fu_part[masses_at(gh, a)] = vec4<f32>(
                mu, select(total, total + recent, flushes), select(recent, 0.0, flushes), gain,
            );
            fu_part[folds_at(gh, a)] = vec4<f32>(kept, weight, 0.0, 0.0);
        }
    }
    workgroupBarrier();

    if (lane == 0u) {
        var far = sixteen_shares(SHARES) + sixteen_shares(SHARES + 16u);
        if (landmarks > 32u) {
            far += sixteen_shares(SHARES + 32u) + sixteen_shares(SHARES + 48u);
        }
        // A far field with a negative mass is dropped whole.
        let have = far_len > 0u && far >= 0.0;
        fu_part[record_at(gh)] = vec4<f32>(
            f32(ring_slot(group, group.len)), f32(group.landmarks),
            select(0.0, 1.0, folds), select(0.0, 1.0, flushes),
        );
        fu_part[record_at(gh) + 1u] = vec4<f32>(
            select(0.0, 1.0, evicts), select(-LARGE, scale_max, far_len > 0u), far, select(0.0, 1.0, have),
        );
    }
    let ring_v = second_part(arrayLength(&ring), D4, DV4);
    if (lane < DV4) {
        fu_part[evicted_at(gh) + lane] = from_ring(ring[ring_v + evicted_row * DV4 + lane]);
    }
}
