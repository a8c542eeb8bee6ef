// What the two kernels of a fused token share: parameters, widths, partials and records.
//
// fu_part [nh][stride] vec4, a head's row of it:
//   for each split   (largest logit, mass at its scale, 0, 0), then the value sum [dv]
//   the record       (ring slot of the row, landmarks in use, 1 where they fold, 1 where levels join)
//                    (1 where a row is evicted, maximum of the far part, its mass, 1 where it counts)
//                    [m] (far maximum, total and recent mass after the row, gain)
//                    [m] (exp(maximum before - maximum after), the evicted row's weight, 0, 0)
//                    [dv] the evicted value
//
// ring and far each are two planes in one buffer: ring_k then ring_v, far_mz then t_hat. The first part
// has room for a number of rows that the buffer's length tells, see `second_part`.

//#include shared/layout.wgsl

struct Params {
    hpg: u32,        // query heads a group
    m: u32,          // landmarks, capacity
    w: u32,          // ring capacity, rows
    ns: u32,         // sinks, rows
    d: u32,          // key width, floats
    dv: u32,         // value width, floats
    nh: u32,         // query heads of all groups
    ng: u32,         // groups
    r0: u32,         // the row within the call
    rect: u32,       // 0 aggregate, 1 fm
    scale: f32,      // factor of every logit
    splits: u32,     // tiles of a group's window, a workgroup each
    outputs: u32,    // 1 where the output is wanted
    moves: u32,      // 1 where the state moves
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;

// Widths in vec4s, compiled in: what a lane does with a row is then written out without loops.
override D4: u32 = 32u;
override DV4: u32 = 32u;

const RECORD_WORDS: u32 = 2u;

fn part_stride() -> u32 {
    return params.splits * (1u + DV4) + RECORD_WORDS + 2u * params.m + DV4;
}

fn split_at(gh: u32, split: u32) -> u32 {
    return gh * part_stride() + split * (1u + DV4);
}

fn record_at(gh: u32) -> u32 {
    return gh * part_stride() + params.splits * (1u + DV4);
}

fn masses_at(gh: u32, a: u32) -> u32 {
    return record_at(gh) + RECORD_WORDS + a;
}

fn folds_at(gh: u32, a: u32) -> u32 {
    return record_at(gh) + RECORD_WORDS + params.m + a;
}

fn evicted_at(gh: u32) -> u32 {
    return record_at(gh) + RECORD_WORDS + 2u * params.m;
}

// Where the second of two planes begins, whose rows take so many vec4s: both have as many rows.
fn second_part(length: u32, first: u32, second: u32) -> u32 {
    return length / (first + second) * first;
}
