// First half of a fused token, which only reads the state: the near part in splits of the window, the far
// part a head, and what the second half needs to move the state.
//
//   group_meta [G][8] u32                   see shared/group.wgsl
//   q          [rows][nh][d] vec4           the call's queries
//   ring       [ring_k | ring_v] vec4       each [G][w + ns][width], the ring's w slots, then the sinks
//   k_tilde    [G][m][d] vec4               key landmarks
//   q_tilde    [nh][m][d] vec4              query landmarks
//   mix        [nh][m][m]                   the mixing matrix, [a][b]
//   far_mz     [nh][4][m]                   see shared/far_sections.wgsl
//   fu_part    [nh][stride] vec4            see shared/fused.wgsl
//
// Grid (heads a group, then splits, each for every four of the heads; groups). One workgroup a head has the
// far part, and comes first, for its way is the longer one; one a (split, four heads) has the near part. No
// lane looks at the row's own key: its loads would delay all others.

//#include shared/fused.wgsl
//#include shared/group.wgsl
//#include shared/far_sections.wgsl
//#include shared/arithmetic.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> ring: array<RingQuad>;
@group(0) @binding(4) var<storage, read> k_tilde: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> q_tilde: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> mix: array<f32>;
@group(0) @binding(7) var<storage, read> far_mz: array<f32>;
@group(0) @binding(8) var<storage, read_write> fu_part: array<vec4<f32>>;

const FUSED_LANES: u32 = 128u;

var<workgroup> sh_large: array<f32, 1088>;
var<workgroup> sh_small: array<f32, 384>;

//#include shared/fused_near.wgsl
//#include shared/fused_far.wgsl

@compute @workgroup_size(FUSED_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let g = wid.y;
    if (g < params.ng) {
        if (wid.x < params.hpg) {
            far_part(g * params.hpg + wid.x, lane);
        } else {
            // Those that read the same rows are neighbours.
            let blocks = (params.hpg + NEAR_HEADS - 1u) / NEAR_HEADS;
            let at = wid.x - params.hpg;
            if (at / blocks < params.splits) {
                near_part(g, at / blocks, at % blocks * NEAR_HEADS, lane);
            }
        }
    }
}
