// The state after a chunk without score planes: far field, ring and position in one.
//
//   group_meta [G][8] u32              length, head, far count, evictions written
//   k_rows     [rows][G][d] vec4       the call's keys
//   v_rows     [rows][G][dv] vec4      the call's values
//   fl_rows    [5][nh][m][kcap]        see shared/flash.wgsl; what o1c_fl_evict knows of the groups behind it
//   ring_k     [G][w + ns][d] vec4     the ring's w slots, then the sinks
//   ring_v     [G][w + ns][dv] vec4    values, laid out as the keys
//   far_mz     [nh][4][m]              see shared/far_planes.wgsl
//   t_hat      [nh][2][m][dv] vec4     the far numerator, see shared/far_planes.wgsl
//
// One workgroup COMMIT_COLUMNS vec4s of a group's keys and values: it alone reads the evicted values there, so
// that the new ones may take their place. One lane of a group moves its row of group_meta, which no other reads.

//#include shared/flash.wgsl
//#include shared/far_planes.wgsl
//#include shared/ring_f32.wgsl

const META_WORDS: u32 = 8u;
const META_LEN: u32 = 0u;
const META_HEAD: u32 = 1u;
const META_FAR_LEN: u32 = 2u;
const META_EVICTED: u32 = 6u;

@group(0) @binding(1) var<storage, read_write> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> k_rows: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> v_rows: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> fl_rows: array<f32>;
@group(0) @binding(5) var<storage, read_write> ring_k: array<RingQuad>;
@group(0) @binding(6) var<storage, read_write> ring_v: array<RingQuad>;
@group(0) @binding(7) var<storage, read_write> far_mz: array<f32>;
@group(0) @binding(8) var<storage, read_write> t_hat: array<vec4<f32>>;

const COMMIT_LANES: u32 = 256u;
const COMMIT_COLUMNS: u32 = 2u;
const HALF: u32 = 128u;    // lanes a column

var<workgroup> sh_v: array<array<vec4<f32>, 64>, COMMIT_COLUMNS>;

fn word(g: u32, name: u32) -> u32 {
    return u32(fl_rows[record_at(g, name)]);
}

@compute @workgroup_size(COMMIT_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let g = wid.y;
    let len = word(g, FR_LEN);
    let head = word(g, FR_HEAD);
    let window = max(word(g, FR_WINDOW), 1u);
    let first = word(g, FR_FIRST);
    let end = word(g, FR_END);
    let landmarks = word(g, FR_LANDMARKS);
    let flush = word(g, FR_FLUSHES) == 1u;
    let d4 = params.d / 4u;
    let dv4 = params.dv / 4u;
    let column = lane % COMMIT_COLUMNS;
    let t = wid.x * COMMIT_COLUMNS + column;
    let at = lane / COMMIT_COLUMNS;
    let base = g * near_capacity();
    let folded = end - first;
    if (at < folded && t < dv4) {
        sh_v[column][at] = from_ring(ring_v[(base + (head + at) % window) * dv4 + t]);
    }
    storageBarrier();
    workgroupBarrier();
    // Slots whose evicted rows are in shared memory, or dropped.
    for (var j = at; j < params.k; j += HALF) {
        let slot = base + (head + len + j) % window;
        let source = (params.r0 + j) * params.ng + g;
        if (t < d4) {
            ring_k[slot * d4 + t] = to_ring(k_rows[source * d4 + t]);
        }
        if (t < dv4) {
            ring_v[slot * dv4 + t] = to_ring(v_rows[source * dv4 + t]);
        }
    }
    if (wid.x == 0u && lane == 0u) {
        let evicted = max(params.k, first) - first;
        let words = g * META_WORDS;
        group_meta[words + META_LEN] = min(len + params.k, window);
        group_meta[words + META_HEAD] = (head + evicted) % window;
        group_meta[words + META_FAR_LEN] += folded;
        group_meta[words + META_EVICTED] += evicted;
    }
    let last = params.k - 1u;
    let moved = select(0u, params.hpg * landmarks, folded > 0u && t < dv4);
    for (var n = at; n < moved; n += HALF) {
        let gh = g * params.hpg + n / landmarks;
        let a = n % landmarks;
        let kept = fl_rows[far_rows_at(S_RESCALE, gh, a, last)];
        let weights = far_rows_at(S_WEIGHT, gh, a, first);
        let t_total_at = t_hat_at(T_TOTAL, gh, a) + t;
        let t_recent_at = t_hat_at(T_RECENT, gh, a) + t;
        let t_total = t_hat[t_total_at] * kept;
        var t_recent = t_hat[t_recent_at] * kept;
        var values = vec4<f32>(0.0);
        var mass = 0.0;
        for (var j = 0u; j < folded; j += 4u) {
            let top = folded - 1u;
            let j1 = min(j + 1u, top);
            let j2 = min(j + 2u, top);
            let j3 = min(j + 3u, top);
            let w0 = fl_rows[weights + j];
            let w1 = select(0.0, fl_rows[weights + j1], j + 1u < folded);
            let w2 = select(0.0, fl_rows[weights + j2], j + 2u < folded);
            let w3 = select(0.0, fl_rows[weights + j3], j + 3u < folded);
            values += (w0 * sh_v[column][j] + w1 * sh_v[column][j1])
                + (w2 * sh_v[column][j2] + w3 * sh_v[column][j3]);
            mass += (w0 + w1) + (w2 + w3);
        }
        t_recent += values;
        if (flush) {
            t_hat[t_total_at] = t_total + t_recent;
            t_hat[t_recent_at] = vec4<f32>(0.0);
        } else {
            t_hat[t_total_at] = t_total;
            t_hat[t_recent_at] = t_recent;
        }
        if (t == 0u) {
            let total_at = far_mz_at(MZ_TOTAL, gh, a);
            let recent_at = far_mz_at(MZ_RECENT, gh, a);
            let total = far_mz[total_at] * kept;
            let recent = far_mz[recent_at] * kept + mass;
            far_mz[far_mz_at(MZ_MAX, gh, a)] = fl_rows[far_rows_at(S_MAX, gh, a, last)];
            far_mz[total_at] = select(total, total + recent, flush);
            far_mz[recent_at] = select(recent, 0.0, flush);
        }
    }
}
