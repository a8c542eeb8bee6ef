// What the kernels of a single row hand each other.

// tok_part [nh][splits][TP_WORDS + dv], in vec4s: a split's largest logit and its mass at that scale
// in the first, then its value sum.
fn tok_part_at(gh: u32, split: u32) -> u32 {
    return (gh * params.splits + split) * (1u + params.dv / 4u);
}

// tok_record [nh][TR_WORDS + TS_SECTIONS * m], the far part of the row for a head.
const TR_MAX: u32 = 0u;         // its maximum, the scale of what follows
const TR_FAR: u32 = 1u;         // its mass
const TR_HAVE: u32 = 2u;        // 1 where it counts, else 0
const TR_EVICTED: u32 = 3u;     // weight of the evicted row's value, 0 where that is not folded
const TR_SLOT: u32 = 4u;        // the ring's slot that the row takes, of the evicted one if there is one
const TR_FOLDS: u32 = 5u;       // landmarks that fold the evicted row: those in use, or none
const TR_FLUSHES: u32 = 6u;     // 1 where the recent far sums join the totals
const TR_EVICTS: u32 = 7u;      // 1 where a row leaves the ring
const TR_WORDS: u32 = 8u;
const TS_GAIN: u32 = 0u;        // weight of the old numerator, per landmark
const TS_MAX: u32 = 1u;         // mu after the row
const TS_RESCALE: u32 = 2u;     // exp(mu before the row - mu after)
const TS_WEIGHT: u32 = 3u;      // weight of the folded row at the scale after
const TS_SECTIONS: u32 = 4u;

fn tok_record_at(gh: u32) -> u32 {
    return gh * (TR_WORDS + TS_SECTIONS * params.m);
}

fn tok_section_at(section: u32, gh: u32, a: u32) -> u32 {
    return tok_record_at(gh) + TR_WORDS + section * params.m + a;
}
