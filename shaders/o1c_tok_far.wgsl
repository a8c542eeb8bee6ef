// Far part of a single row for a head, and what the commit needs: the eviction against every query
// landmark, gains at the scale of their own maximum, the far mass.
//
//   group_meta [G][8] u32                see shared/group.wgsl
//   q          [rows][nh][d] vec4        the call's queries
//   k_tilde    [G][m][d] vec4            key landmarks
//   ring_k     [G][w + ns][d] vec4       the ring's w slots, then the sinks
//   q_tilde    [nh][m][d] vec4           query landmarks
//   far_mz     [nh][3][m]                see shared/far_planes.wgsl
//   mix        [nh][m][m]                the mixing matrix, [a][b]
//   tok_record [nh][8 + 4 m]             see shared/token_planes.wgsl; landmarks in use
//
// One workgroup a query head: DOT_LANES lanes dot a landmark with the query and with the evicted key,
// then one lane a landmark, and lanes over the columns of M in stripes of its rows. What the commit
// takes does not depend on the query, so that a row may be committed later to the same bits.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/arithmetic.wgsl
//#include shared/token_planes.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k_tilde: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> ring_k: array<RingQuad>;
@group(0) @binding(5) var<storage, read> q_tilde: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> far_mz: array<f32>;
@group(0) @binding(7) var<storage, read> mix: array<f32>;
@group(0) @binding(8) var<storage, read_write> tok_record: array<f32>;

const RECT_FM: u32 = 1u;
const FAR_LANES: u32 = 256u;
const DOT_LANES: u32 = 8u;       // lanes that share a landmark
const DOT_STRIDE: u32 = 68u;     // LANES landmarks and four more, so that the parts lie in 32 banks
const DOT_PARTS: u32 = 544u;     // DOT_LANES * DOT_STRIDE

var<workgroup> sh_query: array<f32, DOT_PARTS>;      // parts of k_tilde . q
var<workgroup> sh_key: array<f32, DOT_PARTS>;        // parts of q_tilde . evicted key
var<workgroup> sh_logits: array<f32, LANES>;         // p_a
var<workgroup> sh_maxima: array<f32, LANES>;         // mu_b after the row
var<workgroup> sh_mixed: array<f32, FAR_LANES>;      // parts of u_b
var<workgroup> sh_mass: array<f32, LANES>;           // gain_b Z_b
var<workgroup> sh_evicted: array<f32, LANES>;        // gain_b e_b

fn eight_query_parts(at: u32) -> f32 {
    return ((sh_query[at] + sh_query[at + 68u]) + (sh_query[at + 136u] + sh_query[at + 204u]))
        + ((sh_query[at + 272u] + sh_query[at + 340u]) + (sh_query[at + 408u] + sh_query[at + 476u]));
}

fn eight_key_parts(at: u32) -> f32 {
    return ((sh_key[at] + sh_key[at + 68u]) + (sh_key[at + 136u] + sh_key[at + 204u]))
        + ((sh_key[at + 272u] + sh_key[at + 340u]) + (sh_key[at + 408u] + sh_key[at + 476u]));
}

fn eight_logits(at: u32) -> f32 {
    return max(
        max(max(sh_logits[at], sh_logits[at + 1u]), max(sh_logits[at + 2u], sh_logits[at + 3u])),
        max(max(sh_logits[at + 4u], sh_logits[at + 5u]), max(sh_logits[at + 6u], sh_logits[at + 7u])),
    );
}

fn eight_maxima(at: u32) -> f32 {
    return max(
        max(max(sh_maxima[at], sh_maxima[at + 1u]), max(sh_maxima[at + 2u], sh_maxima[at + 3u])),
        max(max(sh_maxima[at + 4u], sh_maxima[at + 5u]), max(sh_maxima[at + 6u], sh_maxima[at + 7u])),
    );
}

fn mix_at(gh: u32, landmarks: u32, a: u32, b: u32) -> u32 {
    return (gh * params.m + min(a, landmarks - 1u)) * params.m + min(b, landmarks - 1u);
}

// exp(p_a - f), zero past the landmarks in use.
fn landmark_weight(landmarks: u32, a: u32, f: f32) -> f32 {
    return select(0.0, exp_floored(sh_logits[min(a, LANES - 1u)] - f), a < landmarks);
}

@compute @workgroup_size(FAR_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.x;
    if (gh < params.nh) {
        let g = group_of(gh);
        let group = load_group(g);
        let landmarks = max(group.landmarks, 1u);
        let evicts = group.len == group.window;
        let folds = evicts && group.far_len < group.far_limit;
        let far_len = group.far_len + select(0u, 1u, folds);
        let in_use = lane < landmarks;

        var mu_before = -LARGE;
        var mass_before = 0.0;
        if (in_use) {
            mu_before = far_mz[far_mz_at(MZ_MAX, gh, lane)];
            mass_before = far_mz[far_mz_at(MZ_TOTAL, gh, lane)] + far_mz[far_mz_at(MZ_RECENT, gh, lane)];
        }
        // The first four rows of M that the lane will need, on their way while logits are made.
        let wide = select(LANES, LANES / 2u, landmarks <= LANES / 2u);
        let stripes = FAR_LANES / wide;
        let stripe = lane / wide;
        let b = lane % wide;
        let mix0 = mix[mix_at(gh, landmarks, stripe, b)];
        let mix1 = mix[mix_at(gh, landmarks, stripe + stripes, b)];
        let mix2 = mix[mix_at(gh, landmarks, stripe + 2u * stripes, b)];
        let mix3 = mix[mix_at(gh, landmarks, stripe + 3u * stripes, b)];

        let d4 = params.d / 4u;
        let query = (params.r0 * params.nh + gh) * d4;
        // The oldest row; where nothing is folded its dots are made, and left.
        let key = ring_row(group, g, 0u) * d4;
        let part = lane % DOT_LANES;
        for (var a = lane / DOT_LANES; a < landmarks; a += FAR_LANES / DOT_LANES) {
            let k_at = (g * params.m + a) * d4;
            let q_at = (gh * params.m + a) * d4;
            var to_query = 0.0;
            var to_key = 0.0;
            for (var e = part; e < d4; e += 4u * DOT_LANES) {
                let e1 = min(e + DOT_LANES, d4 - 1u);
                let e2 = min(e + 2u * DOT_LANES, d4 - 1u);
                let e3 = min(e + 3u * DOT_LANES, d4 - 1u);
                let to_query0 = dot(k_tilde[k_at + e], q[query + e]);
                let to_query1 = dot(k_tilde[k_at + e1], q[query + e1]);
                let to_query2 = dot(k_tilde[k_at + e2], q[query + e2]);
                let to_query3 = dot(k_tilde[k_at + e3], q[query + e3]);
                let to_key0 = dot(q_tilde[q_at + e], from_ring(ring_k[key + e]));
                let to_key1 = dot(q_tilde[q_at + e1], from_ring(ring_k[key + e1]));
                let to_key2 = dot(q_tilde[q_at + e2], from_ring(ring_k[key + e2]));
                let to_key3 = dot(q_tilde[q_at + e3], from_ring(ring_k[key + e3]));
                let has1 = e + DOT_LANES < d4;
                let has2 = e + 2u * DOT_LANES < d4;
                let has3 = e + 3u * DOT_LANES < d4;
                to_query += (to_query0 + select(0.0, to_query1, has1))
                    + (select(0.0, to_query2, has2) + select(0.0, to_query3, has3));
                to_key += (to_key0 + select(0.0, to_key1, has1))
                    + (select(0.0, to_key2, has2) + select(0.0, to_key3, has3));
            }
            sh_query[part * DOT_STRIDE + a] = to_query;
            sh_key[part * DOT_STRIDE + a] = to_key;
        }
        workgroupBarrier();

        var mu = -LARGE;
        var kept = 1.0;
        var weight = 0.0;
        if (lane < LANES) {
            var p = -LARGE;
            if (in_use) {
                p = eight_query_parts(lane) * params.scale;
                mu = mu_before;
                if (folds) {
                    let logit = eight_key_parts(lane) * params.scale - far_mz[far_mz_at(MZ_SHIFT, gh, lane)];
                    mu = max(mu_before, logit);
                    // An empty far field's maximum is -LARGE: its zero mass fades at the first fold.
                    kept = rescale(mu_before, mu);
                    weight = exp_floored(logit - mu);
                }
                tok_record[tok_section_at(TS_MAX, gh, lane)] = mu;
                tok_record[tok_section_at(TS_RESCALE, gh, lane)] = kept;
                tok_record[tok_section_at(TS_WEIGHT, gh, lane)] = weight;
            }
            sh_logits[lane] = p;
            sh_maxima[lane] = mu;
        }
        workgroupBarrier();

        var f = -LARGE;
        var largest = -LARGE;
        for (var a = 0u; a < landmarks; a += 16u) {
            f = max(f, max(eight_logits(a), eight_logits(a + 8u)));
            largest = max(largest, max(eight_maxima(a), eight_maxima(a + 8u)));
        }
        var mixed = (landmark_weight(landmarks, stripe, f) * mix0
            + landmark_weight(landmarks, stripe + stripes, f) * mix1)
            + (landmark_weight(landmarks, stripe + 2u * stripes, f) * mix2
            + landmark_weight(landmarks, stripe + 3u * stripes, f) * mix3);
        for (var a = stripe + 4u * stripes; a < landmarks; a += stripes) {
            mixed += landmark_weight(landmarks, a, f) * mix[mix_at(gh, landmarks, a, b)];
        }
        sh_mixed[lane] = mixed;
        workgroupBarrier();

        // The largest of the sums f + mu, for rounding keeps order.
        let scale_max = f + largest;
        if (lane < LANES) {
            var gain = 0.0;
            if (in_use) {
                var u = 0.0;
                for (var s = 0u; s < stripes; s++) {
                    u += sh_mixed[s * wide + lane];
                }
                if (params.rect == RECT_FM) {
                    u = max(u, 0.0);
                }
                if (far_len > 0u) {
                    gain = u * exp_floored(f + mu - scale_max);
                }
                tok_record[tok_section_at(TS_GAIN, gh, lane)] = gain * kept;
            }
            sh_mass[lane] = gain * (mass_before * kept + weight);
            sh_evicted[lane] = gain * weight;
        }
        workgroupBarrier();

        let at = tok_record_at(gh);
        if (lane == 0u) {
            var far = 0.0;
            for (var a = 0u; a < landmarks; a += 4u) {
                far += (sh_mass[a] + sh_mass[a + 1u]) + (sh_mass[a + 2u] + sh_mass[a + 3u]);
            }
            tok_record[at + TR_MAX] = select(-LARGE, scale_max, far_len > 0u);
            tok_record[at + TR_FAR] = far;
            // A far field with a negative mass is dropped whole.
            tok_record[at + TR_HAVE] = select(0.0, 1.0, far_len > 0u && far >= 0.0);
            tok_record[at + TR_SLOT] = f32(ring_slot(group, group.len));
            tok_record[at + TR_FOLDS] = select(0.0, f32(group.landmarks), folds);
            tok_record[at + TR_FLUSHES] =
                select(0.0, 1.0, far_len / FLUSH_ROWS != group.far_len / FLUSH_ROWS);
            tok_record[at + TR_EVICTS] = select(0.0, 1.0, evicts);
        }
        // Apart from the other sum, since both are long.
        if (lane == LANES) {
            var evicted = 0.0;
            for (var a = 0u; a < landmarks; a += 4u) {
                evicted += (sh_evicted[a] + sh_evicted[a + 1u]) + (sh_evicted[a + 2u] + sh_evicted[a + 3u]);
            }
            tok_record[at + TR_EVICTED] = evicted;
        }
    }
}
