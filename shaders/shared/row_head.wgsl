// Words of a row in row_head [kcap][nh][HD_WORDS].

const HD_MAX: u32 = 0u;     // the row's maximum C
const HD_FAR: u32 = 1u;     // its far mass at scale exp(-C)
const HD_HAVE: u32 = 2u;    // 1 where the far field counts, else 0
const HD_INV: u32 = 3u;     // 1 / denominator
const HD_WORDS: u32 = 4u;

fn row_head_at(i: u32, gh: u32) -> u32 {
    return (i * params.nh + gh) * HD_WORDS;
}
