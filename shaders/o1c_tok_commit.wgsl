// The state after a single row: far field, ring, position.
//
//   tok_record [nh][8 + 4 m]           see shared/token_planes.wgsl
//   k_rows     [rows][G][d] vec4       the call's keys
//   v_rows     [rows][G][dv] vec4      the call's values
//   group_meta [G][8] u32              position, in and out; see shared/group.wgsl
//   ring_k     [G][w + ns][d] vec4     the row's slot written
//   ring_v     [G][w + ns][dv] vec4    likewise, after the evicted value was read there
//   far_mz     [nh][3][m]              maximum and mass, in and out; see shared/far_planes.wgsl
//   t_hat      [nh][2][m][dv] vec4     numerator, in and out
//
// One workgroup a (COMMIT_COLUMNS vec4s of the width, group): lanes lie over the vec4s, and over the
// group's heads and their landmarks. Only the lane that moves group_meta reads it: the others take
// their position from the record, which holds it as it was.

//#include shared/params.wgsl
//#include shared/group.wgsl
//#include shared/far_planes.wgsl
//#include shared/token_planes.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> tok_record: array<f32>;
@group(0) @binding(2) var<storage, read> k_rows: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> v_rows: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> group_meta: array<u32>;
@group(0) @binding(5) var<storage, read_write> ring_k: array<RingQuad>;
@group(0) @binding(6) var<storage, read_write> ring_v: array<RingQuad>;
@group(0) @binding(7) var<storage, read_write> far_mz: array<f32>;
@group(0) @binding(8) var<storage, read_write> t_hat: array<vec4<f32>>;

const COMMIT_LANES: u32 = 256u;
const COMMIT_COLUMNS: u32 = 2u;

@compute @workgroup_size(COMMIT_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let g = wid.y;
    if (g < params.ng) {
        let d4 = params.d / 4u;
        let dv4 = params.dv / 4u;
        let t = wid.x * COMMIT_COLUMNS + lane % COMMIT_COLUMNS;
        // The same for every head of the group.
        let record = tok_record_at(g * params.hpg);
        let row = g * near_capacity() + min(u32(tok_record[record + TR_SLOT]), params.w - 1u);
        let landmarks = min(u32(tok_record[record + TR_FOLDS]), params.m);
        let flushes = tok_record[record + TR_FLUSHES] > 0.5;

        var evicted = vec4<f32>(0.0);
        if (landmarks > 0u && t < dv4) {
            evicted = from_ring(ring_v[row * dv4 + t]);
        }
        // Every lane has the old value before one writes the new.
        storageBarrier();
        workgroupBarrier();
        if (lane < COMMIT_COLUMNS) {
            let source = params.r0 * params.ng + g;
            if (t < d4) {
                ring_k[row * d4 + t] = to_ring(k_rows[source * d4 + t]);
            }
            if (t < dv4) {
                ring_v[row * dv4 + t] = to_ring(v_rows[source * dv4 + t]);
            }
        }
        let count = select(0u, params.hpg * landmarks, t < dv4);
        for (var i = lane / COMMIT_COLUMNS; i < count; i += COMMIT_LANES / COMMIT_COLUMNS) {
            let gh = g * params.hpg + i / max(landmarks, 1u);
            let a = i % max(landmarks, 1u);
            let t_total_at = t_hat_at(T_TOTAL, gh, a) + t;
            let t_recent_at = t_hat_at(T_RECENT, gh, a) + t;
            let t_recent_before = t_hat[t_recent_at];
            let kept = tok_record[tok_section_at(TS_RESCALE, gh, a)];
            let weight = tok_record[tok_section_at(TS_WEIGHT, gh, a)];
            let t_recent = t_recent_before * kept + weight * evicted;
            if (flushes) {
                t_hat[t_total_at] = t_hat[t_total_at] * kept + t_recent;
                t_hat[t_recent_at] = vec4<f32>(0.0);
            } else {
                // The maximum stands still for most rows, and the total with it.
                if (kept != 1.0) {
                    t_hat[t_total_at] = t_hat[t_total_at] * kept;
                }
                t_hat[t_recent_at] = t_recent;
            }
            if (t == 0u) {
                let total_at = far_mz_at(MZ_TOTAL, gh, a);
                let recent_at = far_mz_at(MZ_RECENT, gh, a);
                let total = far_mz[total_at] * kept;
                let recent = far_mz[recent_at] * kept + weight;
                far_mz[far_mz_at(MZ_MAX, gh, a)] = tok_record[tok_section_at(TS_MAX, gh, a)];
                far_mz[total_at] = select(total, total + recent, flushes);
                far_mz[recent_at] = select(recent, 0.0, flushes);
            }
        }
        if (wid.x == 0u && lane == 0u) {
            let group = load_group(g);
            let at = g * META_WORDS;
            if (tok_record[record + TR_EVICTS] > 0.5) {
                group_meta[at + META_HEAD] = ring_slot(group, 1u);
                group_meta[at + META_EVICTED] = group.evicted + 1u;
            } else {
                group_meta[at + META_LEN] = group.len + 1u;
            }
            group_meta[at + META_FAR_LEN] = group.far_len + select(0u, 1u, landmarks > 0u);
        }
    }
}
