// Constants that the kernels share with the host's table of kernels, and how heads and rows lie in
// planes. The kernel that includes this declares params.

const LANES: u32 = 64u;           // invocations of a workgroup
const LARGE: f32 = 1.7e38;        // stands for infinity; differences of two such stay finite
const FLUSH_ROWS: u32 = 4096u;    // folded rows after which the recent far sums join the totals

fn group_of(gh: u32) -> u32 {
    return gh / max(params.hpg, 1u);
}

// Columns of a row of scores, and rows a group has in ring_k and ring_v.
fn near_capacity() -> u32 {
    return params.w + params.ns;
}
