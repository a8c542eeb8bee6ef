// Second half of a fused token: the output from the partials, the far field and the row's own key, and
// the state after the row.
//
//   group_meta [G][8] u32                   see shared/group.wgsl
//   q          [rows][nh][d] vec4           the call's queries
//   k_rows     [rows][G][d] vec4            the call's keys
//   v_rows     [rows][G][dv] vec4           the call's values
//   fu_part    [nh][stride] vec4            see shared/fused.wgsl
//   ring       [ring_k | ring_v] vec4       each [G][w + ns][width], the ring's w slots, then the sinks
//   far        [far_mz | t_hat] vec4        [nh][4][m] floats, [nh][2][m][dv], see shared/far_sections.wgsl
//   out        [rows][nh][dv]               the call's outputs
//
// Grid (blocks of the value's vec4s, heads, then groups). One workgroup a (block, head) merges and moves
// the far numerator; one a group moves ring, far masses and position, which no other here reads.

//#include shared/fused.wgsl
//#include shared/far_sections.wgsl
//#include shared/arithmetic.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read_write> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k_rows: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> v_rows: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> fu_part: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> ring: array<RingQuad>;
@group(0) @binding(7) var<storage, read_write> far: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> out: array<f32>;

const MOVE_LANES: u32 = 256u;
const MOVE_COLUMNS: u32 = 8u;     // vec4s of the value that a workgroup merges
const MOVE_STRIPES: u32 = 32u;    // MOVE_LANES / MOVE_COLUMNS: splits and landmarks in turns
const SUM_STRIDE: u32 = 264u;     // MOVE_LANES and eight more
const SPLITS_AT_ONCE: u32 = 96u;  // three a stripe
const META_WORDS: u32 = 8u;
const META_LEN: u32 = 0u;
const META_HEAD: u32 = 1u;
const META_FAR_LEN: u32 = 2u;
const META_WINDOW: u32 = 3u;
const META_EVICTED: u32 = 6u;

var<workgroup> sh_tops: array<f32, MOVE_STRIPES>;
var<workgroup> sh_masses: array<f32, MOVE_STRIPES>;
var<workgroup> sh_dots: array<f32, MOVE_STRIPES>;
var<workgroup> sh_sums: array<f32, 1056>;    // 4 * SUM_STRIDE

fn eight_tops(at: u32) -> f32 {
    let low = max(max(sh_tops[at], sh_tops[at + 1u]), max(sh_tops[at + 2u], sh_tops[at + 3u]));
    let high = max(max(sh_tops[at + 4u], sh_tops[at + 5u]), max(sh_tops[at + 6u], sh_tops[at + 7u]));
    return max(low, high);
}

fn eight_dots(at: u32) -> f32 {
    return ((sh_dots[at] + sh_dots[at + 1u]) + (sh_dots[at + 2u] + sh_dots[at + 3u]))
        + ((sh_dots[at + 4u] + sh_dots[at + 5u]) + (sh_dots[at + 6u] + sh_dots[at + 7u]));
}

fn eight_masses(at: u32) -> f32 {
    return ((sh_masses[at] + sh_masses[at + 1u]) + (sh_masses[at + 2u] + sh_masses[at + 3u]))
        + ((sh_masses[at + 4u] + sh_masses[at + 5u]) + (sh_masses[at + 6u] + sh_masses[at + 7u]));
}

// Of eight stripes in a row.
fn eight_sums(at: u32) -> f32 {
    return ((sh_sums[at] + sh_sums[at + 8u]) + (sh_sums[at + 16u] + sh_sums[at + 24u]))
        + ((sh_sums[at + 32u] + sh_sums[at + 40u]) + (sh_sums[at + 48u] + sh_sums[at + 56u]));
}

// One landmark's numerator in two levels: moved over the row where it moves, and its share of the output.
struct Numerator {
    total: vec4<f32>,
    recent: vec4<f32>,
}

fn after_row(total: vec4<f32>, recent: vec4<f32>, fold: vec4<f32>, evicted: vec4<f32>) -> Numerator {
    return Numerator(total * fold.x, recent * fold.x + fold.y * evicted);
}

fn store(at: u32, recent_at: u32, to: Numerator, kept: f32, flushes: bool) {
    if (flushes) {
        far[at] = to.total + to.recent;
        far[recent_at] = vec4<f32>(0.0);
    } else {
        if (kept != 1.0) {
            far[at] = to.total;
        }
        far[recent_at] = to.recent;
    }
}

// Partials of near splits at the scale of their largest logit.
struct Near {
    top: f32,
    mass: f32,
    sum: vec4<f32>,
}

fn three_splits(gh: u32, s: u32, c: u32) -> Near {
    let last = params.splits - 1u;
    let at0 = split_at(gh, min(s, last));
    let at1 = split_at(gh, min(s + MOVE_STRIPES, last));
    let at2 = split_at(gh, min(s + 2u * MOVE_STRIPES, last));
    let h0 = fu_part[at0];
    let h1 = fu_part[at1];
    let h2 = fu_part[at2];
    let v0 = fu_part[at0 + 1u + c];
    let v1 = fu_part[at1 + 1u + c];
    let v2 = fu_part[at2 + 1u + c];
    let has0 = s <= last;
    let has1 = s + MOVE_STRIPES <= last;
    let has2 = s + 2u * MOVE_STRIPES <= last;
    let top = max(max(select(-LARGE, h0.x, has0), select(-LARGE, h1.x, has1)), select(-LARGE, h2.x, has2));
    let w0 = select(0.0, exp_floored(h0.x - top), has0);
    let w1 = select(0.0, exp_floored(h1.x - top), has1);
    let w2 = select(0.0, exp_floored(h2.x - top), has2);
    return Near(top, (w0 * h0.y + w1 * h1.y) + w2 * h2.y, (w0 * v0 + w1 * v1) + w2 * v2);
}

fn joined(a: Near, b: Near) -> Near {
    let top = max(a.top, b.top);
    let of_a = rescale(a.top, top);
    let of_b = rescale(b.top, top);
    return Near(top, a.mass * of_a + b.mass * of_b, a.sum * of_a + b.sum * of_b);
}

fn merge(block: u32, gh: u32, lane: u32) {
    let g = group_of(gh);
    let column = lane % MOVE_COLUMNS;
    let stripe = lane / MOVE_COLUMNS;
    let t = block * MOVE_COLUMNS + column;
    let c = min(t, DV4 - 1u);
    let m = params.m;
    let t_hat = second_part(arrayLength(&far), 1u, 2u * DV4);
    // What memory must bring comes first: the far field's is not in the cache.
    let b = min(stripe, m - 1u);
    let total_at = t_hat + (gh * T_SECTIONS + T_TOTAL) * m * DV4 + c;
    let recent_at = t_hat + (gh * T_SECTIONS + T_RECENT) * m * DV4 + c;
    let total0 = far[total_at + b * DV4];
    let recent0 = far[recent_at + b * DV4];
    let row = params.r0 * params.nh + gh;
    let own_row = params.r0 * params.ng + g;
    let own_value = v_rows[own_row * DV4 + c];
    let flags = fu_part[record_at(gh)];
    let far_head = fu_part[record_at(gh) + 1u];
    let evicted = fu_part[evicted_at(gh) + c];
    let gain0 = fu_part[masses_at(gh, b)].w;
    let fold0 = fu_part[folds_at(gh, b)];
    let landmarks = min(u32(flags.y), m);
    let moves = params.moves == 1u && flags.z > 0.5 && t < DV4;
    let flushes = flags.w > 0.5;

    var near = Near(-LARGE, 0.0, vec4<f32>(0.0));
    if (params.outputs == 1u) {
        // The first round stands apart: most windows have no other, and a loop costs.
        near = three_splits(gh, stripe, c);
        for (var s = stripe + SPLITS_AT_ONCE; s < params.splits; s += SPLITS_AT_ONCE) {
            near = joined(near, three_splits(gh, s, c));
        }
        if (column == 0u) {
            sh_tops[stripe] = near.top;
        }
        if (lane < MOVE_STRIPES) {
            var x = 0.0;
            for (var e = lane; e < D4; e += MOVE_STRIPES) {
                x += dot(q[row * D4 + e], k_rows[own_row * D4 + e]);
            }
            sh_dots[lane] = x;
        }
    }

    var numerator = vec4<f32>(0.0);
    if (stripe < landmarks) {
        let to = after_row(total0, recent0, fold0, evicted);
        numerator = gain0 * (to.total + to.recent);
        if (moves) {
            store(total_at + b * DV4, recent_at + b * DV4, to, fold0.x, flushes);
        }
    }
    for (var k = stripe + MOVE_STRIPES; k < landmarks; k += MOVE_STRIPES) {
        let fold = fu_part[folds_at(gh, k)];
        let to = after_row(far[total_at + k * DV4], far[recent_at + k * DV4], fold, evicted);
        numerator += fu_part[masses_at(gh, k)].w * (to.total + to.recent);
        if (moves) {
            store(total_at + k * DV4, recent_at + k * DV4, to, fold.x, flushes);
        }
    }
    if (params.outputs == 1u) {
        workgroupBarrier();
        let have = far_head.w > 0.5;
        let own = ((eight_dots(0u) + eight_dots(8u)) + (eight_dots(16u) + eight_dots(24u))) * params.scale;
        let tops = max(max(eight_tops(0u), eight_tops(8u)), max(eight_tops(16u), eight_tops(24u)));
        let exact = max(tops, own);
        let largest = select(exact, max(exact, far_head.y), have);
        let scale = exp_floored(near.top - largest);
        var mass = near.mass * scale;
        var sum = near.sum * scale;
        let far_scale = select(0.0, exp_floored(select(0.0, far_head.y - largest, have)), have);
        sum += numerator * far_scale;
        if (stripe == 0u) {
            let weight = exp_floored(own - largest);
            mass += weight + select(0.0, far_head.z, have) * far_scale;
            sum += weight * own_value;
        }
        sh_sums[lane] = sum.x;
        sh_sums[SUM_STRIDE + lane] = sum.y;
        sh_sums[2u * SUM_STRIDE + lane] = sum.z;
        sh_sums[3u * SUM_STRIDE + lane] = sum.w;
        if (column == 0u) {
            sh_masses[stripe] = mass;
        }
        workgroupBarrier();
        let word = lane / MOVE_COLUMNS;
        if (word < 4u && t < DV4) {
            let at = word * SUM_STRIDE + column;
            let total = (eight_sums(at) + eight_sums(at + 64u))
                + (eight_sums(at + 128u) + eight_sums(at + 192u));
            let denominator = (eight_masses(0u) + eight_masses(8u)) + (eight_masses(16u) + eight_masses(24u));
            out[(row * DV4 + t) * 4u + word] = total * (1.0 / max(denominator, MIN_DENOMINATOR));
        }
    }
}

// Ring, far masses and position of a group after the row.
fn move_group(g: u32, lane: u32) {
    let first = g * params.hpg;
    let flags = fu_part[record_at(first)];
    let slot = g * near_capacity() + min(u32(flags.x), max(params.w, 1u) - 1u);
    let own_row = params.r0 * params.ng + g;
    let ring_v = second_part(arrayLength(&ring), D4, DV4);
    for (var t = lane; t < D4; t += MOVE_LANES) {
        ring[slot * D4 + t] = to_ring(k_rows[own_row * D4 + t]);
    }
    for (var t = lane; t < DV4; t += MOVE_LANES) {
        ring[ring_v + slot * DV4 + t] = to_ring(v_rows[own_row * DV4 + t]);
    }
    let m = params.m;
    if (flags.z > 0.5) {
        // A head's four sections are a whole number of vec4s, a section need not be.
        for (var i = lane; i < params.hpg * m; i += MOVE_LANES) {
            let gh = first + i / m;
            let at = gh * m + i % m;
            let begin = 4u * (i % m);
            var found = far[at];
            found.x = mass_word(gh, begin, u32(flags.y), found.x);
            found.y = mass_word(gh, begin + 1u, u32(flags.y), found.y);
            found.z = mass_word(gh, begin + 2u, u32(flags.y), found.z);
            found.w = mass_word(gh, begin + 3u, u32(flags.y), found.w);
            far[at] = found;
        }
    }
    if (lane == 0u) {
        let at = g * META_WORDS;
        if (fu_part[record_at(first) + 1u].x > 0.5) {
            let window = max(group_meta[at + META_WINDOW], 1u);
            group_meta[at + META_HEAD] = (group_meta[at + META_HEAD] + 1u) % window;
            group_meta[at + META_EVICTED] = group_meta[at + META_EVICTED] + 1u;
        } else {
            group_meta[at + META_LEN] = group_meta[at + META_LEN] + 1u;
        }
        group_meta[at + META_FAR_LEN] = group_meta[at + META_FAR_LEN] + select(0u, 1u, flags.z > 0.5);
    }
}

// Word x of a head's sections of far_mz after the row: maximum, total, recent; the shift stays.
fn mass_word(gh: u32, x: u32, landmarks: u32, before: f32) -> f32 {
    let section = x / params.m;
    let a = x % params.m;
    let found = fu_part[masses_at(gh, a)];
    let after = select(select(found.z, found.y, section == MZ_TOTAL), found.x, section == MZ_MAX);
    return select(before, after, section < MZ_SHIFT && a < landmarks);
}

@compute @workgroup_size(MOVE_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    if (wid.y < params.nh) {
        merge(wid.x, wid.y, lane);
    } else if (wid.x == 0u && wid.y - params.nh < params.ng && params.moves == 1u) {
        move_group(wid.y - params.nh, lane);
    }
}
