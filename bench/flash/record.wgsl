// What o1f_evict leaves behind far_rows for o1f_commit, which cannot read a group_meta that it writes.

const RE_LEN: u32 = 0u;
const RE_HEAD: u32 = 1u;
const RE_WINDOW: u32 = 2u;
const RE_FIRST: u32 = 3u;
const RE_END: u32 = 4u;
const RE_LANDMARKS: u32 = 5u;
const RE_FLUSH: u32 = 6u;

fn record_at(g: u32, word: u32) -> u32 {
    return 5u * params.nh * params.m * params.kcap + g * 8u + word;
}

// Landmark logits [kcap][nh][m] behind the records: in the same plane, so that one binding of it in the near
// part is enough for wgpu to let the far part run beside that.
fn land_at(i: u32, gh: u32, a: u32) -> u32 {
    return record_at(params.ng, 0u) + (i * params.nh + gh) * params.m + a;
}
