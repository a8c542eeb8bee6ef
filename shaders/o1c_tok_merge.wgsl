// The output of a single row: the splits, the far numerator and the evicted row at one scale, over the
// denominator.
//
//   group_meta [G][8] u32                   see shared/group.wgsl
//   tok_part   [nh][splits][4 + dv] vec4    see shared/token_planes.wgsl
//   tok_record [nh][8 + 4 m]                likewise
//   t_hat      [nh][2][m][dv] vec4          the numerator before the row, see shared/far_planes.wgsl
//   ring_v     [G][w + ns][dv] vec4         the evicted value, still in the ring
//   out        [rows][nh][dv] vec4
//
// One workgroup a (MERGE_COLUMNS vec4s of the value, query head): lanes lie over the vec4s, in stripes
// of the splits and of the landmarks.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/arithmetic.wgsl
//#include shared/token_planes.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> tok_part: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> tok_record: array<f32>;
@group(0) @binding(4) var<storage, read> t_hat: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>;

const MERGE_LANES: u32 = 256u;
const MERGE_COLUMNS: u32 = 8u;
const MERGE_STRIPES: u32 = 32u;    // MERGE_LANES / MERGE_COLUMNS
const SUM_STRIDE: u32 = 264u;      // MERGE_LANES and eight more, so that four components lie in 32 banks
const MERGE_SUMS: u32 = 1056u;     // four of them

var<workgroup> sh_tops: array<f32, MERGE_STRIPES>;
var<workgroup> sh_masses: array<f32, MERGE_STRIPES>;
var<workgroup> sh_sums: array<f32, MERGE_SUMS>;         // [component][stripe][vec4]
var<workgroup> sh_totals: array<f32, MERGE_STRIPES>;    // [component][vec4]

fn eight_tops(at: u32) -> f32 {
    return max(
        max(max(sh_tops[at], sh_tops[at + 1u]), max(sh_tops[at + 2u], sh_tops[at + 3u])),
        max(max(sh_tops[at + 4u], sh_tops[at + 5u]), max(sh_tops[at + 6u], sh_tops[at + 7u])),
    );
}

fn eight_masses(at: u32) -> f32 {
    return ((sh_masses[at] + sh_masses[at + 1u]) + (sh_masses[at + 2u] + sh_masses[at + 3u]))
        + ((sh_masses[at + 4u] + sh_masses[at + 5u]) + (sh_masses[at + 6u] + sh_masses[at + 7u]));
}

// Eight stripes of a component, MERGE_COLUMNS apart.
fn eight_sums(at: u32) -> f32 {
    return ((sh_sums[at] + sh_sums[at + 8u]) + (sh_sums[at + 16u] + sh_sums[at + 24u]))
        + ((sh_sums[at + 32u] + sh_sums[at + 40u]) + (sh_sums[at + 48u] + sh_sums[at + 56u]));
}

@compute @workgroup_size(MERGE_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gh = wid.y;
    if (gh < params.nh) {
        let g = group_of(gh);
        let record = tok_record_at(gh);
        let have = tok_record[record + TR_HAVE] > 0.5;
        let folds = tok_record[record + TR_FOLDS] > 0.5;
        let far_max = tok_record[record + TR_MAX];
        // A far field that does not count takes no part in anything.
        let landmarks = select(0u, load_group(g).landmarks, have);
        let dv4 = max(params.dv / 4u, 1u);
        let column = lane % MERGE_COLUMNS;
        let stripe = lane / MERGE_COLUMNS;
        let t = wid.x * MERGE_COLUMNS + column;
        // Columns past the width repeat its last, and are not written.
        let c = min(t, dv4 - 1u);

        var top = -LARGE;
        for (var s = stripe; s < params.splits; s += MERGE_STRIPES) {
            top = max(top, tok_part[tok_part_at(gh, s)].x);
        }
        var mass = 0.0;
        var near = vec4<f32>(0.0);
        for (var s = stripe; s < params.splits; s += MERGE_STRIPES) {
            let at = tok_part_at(gh, s);
            let head = tok_part[at];
            let weight = exp_floored(head.x - top);
            mass += weight * head.y;
            near += weight * tok_part[at + 1u + c];
        }
        var far = vec4<f32>(0.0);
        for (var b = stripe; b < landmarks; b += MERGE_STRIPES) {
            let numerator = t_hat[t_hat_at(T_TOTAL, gh, b) + c] + t_hat[t_hat_at(T_RECENT, gh, b) + c];
            far += tok_record[tok_section_at(TS_GAIN, gh, b)] * numerator;
        }
        if (have && folds && stripe == MERGE_STRIPES - 1u) {
            let slot = min(u32(tok_record[record + TR_SLOT]), params.w - 1u);
            far += tok_record[record + TR_EVICTED] * from_ring(ring_v[(g * near_capacity() + slot) * dv4 + c]);
        }
        if (column == 0u) {
            sh_tops[stripe] = top;
        }
        workgroupBarrier();

        let near_max = max(max(eight_tops(0u), eight_tops(8u)), max(eight_tops(16u), eight_tops(24u)));
        let largest = select(near_max, max(near_max, far_max), have);
        let near_scale = exp_floored(top - largest);
        var far_scale = 0.0;
        if (have) {
            far_scale = exp_floored(far_max - largest);
        }
        let sum = near * near_scale + far * far_scale;
        sh_sums[lane] = sum.x;
        sh_sums[lane + SUM_STRIDE] = sum.y;
        sh_sums[lane + 2u * SUM_STRIDE] = sum.z;
        sh_sums[lane + 3u * SUM_STRIDE] = sum.w;
        if (column == 0u) {
            sh_masses[stripe] = mass * near_scale;
        }
        workgroupBarrier();

        if (lane < MERGE_STRIPES) {
            let at = lane / MERGE_COLUMNS * SUM_STRIDE + column;
            sh_totals[lane] = (eight_sums(at) + eight_sums(at + 64u))
                + (eight_sums(at + 128u) + eight_sums(at + 192u));
        }
        workgroupBarrier();

        if (lane < MERGE_COLUMNS && t < dv4) {
            let total = vec4<f32>(
                sh_totals[lane], sh_totals[lane + 8u], sh_totals[lane + 16u], sh_totals[lane + 24u],
            );
            let near_mass = (eight_masses(0u) + eight_masses(8u)) + (eight_masses(16u) + eight_masses(24u));
            let far_mass = select(0.0, tok_record[record + TR_FAR] * far_scale, have);
            let inverse = 1.0 / max(near_mass + far_mass, MIN_DENOMINATOR);
            out[(params.r0 * params.nh + gh) * dv4 + t] = total * inverse;
        }
    }
}
