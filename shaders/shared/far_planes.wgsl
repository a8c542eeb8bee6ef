// Sections of far_rows beside those of the far field, and where an element of one lies.

//#include shared/far_sections.wgsl

// far_rows [S_SECTIONS][nh][m][kcap], each per landmark and row of the sub-chunk.
const S_LOGIT: u32 = 0u;      // logit of the key the row evicts, -LARGE if none is folded
const S_MAX: u32 = 1u;        // mu after the row
const S_RESCALE: u32 = 2u;    // exp(mu before the sub-chunk - mu after the row)
const S_MASS: u32 = 3u;       // far mass after the row, both levels, at scale exp(-mu after the row)
const S_WEIGHT: u32 = 4u;     // weight of the evicted key at the scale after the whole sub-chunk

fn far_rows_at(section: u32, gh: u32, a: u32, i: u32) -> u32 {
    return ((section * params.nh + gh) * params.m + a) * params.kcap + i;
}
