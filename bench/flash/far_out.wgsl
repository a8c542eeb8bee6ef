// The far part of a row, at the scale of its own maximum.

const FO_MAX: u32 = 0u;        // its maximum
const FO_FAR: u32 = 1u;        // its mass
const FO_HAVE: u32 = 2u;       // 1 where it counts
const FO_GAINS: u32 = 4u;      // weights of the old numerator, 64, zero past the landmarks in use
const FO_WEIGHTS: u32 = 68u;   // weights of the rows folded, 64, zero where none is
const FO_WORDS: u32 = 132u;

fn far_out_at(i: u32, gh: u32) -> u32 {
    return (i * params.nh + gh) * FO_WORDS;
}
