// What the kernels of a chunk without score planes share: parameters, and where their scratch has what.

//#include shared/layout.wgsl

struct Params {
    hpg: u32,           // query heads a group
    m: u32,             // landmarks, capacity
    w: u32,             // ring capacity, rows
    ns: u32,            // sinks, rows
    d: u32,             // key width, floats
    dv: u32,            // value width, floats
    nh: u32,            // query heads of all groups
    ng: u32,            // groups
    k: u32,             // rows of this sub-chunk
    r0: u32,            // its first row within the call
    kcap: u32,          // row stride of fl_rows
    rect: u32,          // 0 aggregate, 1 fm
    scale: f32,         // factor of every logit
    pair_tiles: u32,    // key tiles that a group's row tile has
    tiles: u32,         // key tiles of a workgroup
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: Params;

const TILE_ROWS: u32 = 64u;    // rows, a row and a head each, of a tile
const TILE_KEYS: u32 = 64u;    // and its keys

// fl_rows: far_rows as shared/far_planes.wgsl has it, then eight words a group for o1c_fl_commit, which
// cannot read a group_meta that it writes, then the landmark logits [kcap][nh][m].
const FR_LEN: u32 = 0u;
const FR_HEAD: u32 = 1u;
const FR_WINDOW: u32 = 2u;
const FR_FIRST: u32 = 3u;         // rows of the sub-chunk whose evicted row is folded: first ..
const FR_END: u32 = 4u;           // .. end
const FR_LANDMARKS: u32 = 5u;
const FR_FLUSHES: u32 = 6u;       // 1 where levels join
const FR_WORDS: u32 = 8u;

fn record_at(g: u32, word: u32) -> u32 {
    return 5u * params.nh * params.m * params.kcap + g * FR_WORDS + word;
}

fn land_at(i: u32, gh: u32, a: u32) -> u32 {
    return record_at(params.ng, 0u) + (i * params.nh + gh) * params.m + a;
}

// fl_far [kcap][nh][FF_WORDS]: the far part of a row, at the scale of its own maximum.
const FF_MAX: u32 = 0u;        // its maximum
const FF_MASS: u32 = 1u;       // its mass
const FF_HAVE: u32 = 2u;       // 1 where it counts
const FF_GAINS: u32 = 4u;      // weights of the old numerator, 64, zero past the landmarks in use
const FF_WEIGHTS: u32 = 68u;   // weights of the rows folded, 64, zero where none is
const FF_WORDS: u32 = 132u;

fn fl_far_at(i: u32, gh: u32) -> u32 {
    return (i * params.nh + gh) * FF_WORDS;
}

// fl_parts [slots][kcap][nh] (largest logit, mass, two words, the value sum [dv]): in vec4s.
fn part_at(slot: u32, i: u32, gh: u32) -> u32 {
    return ((slot * params.kcap + i) * params.nh + gh) * (1u + params.dv / 4u);
}

// Row tiles of a group.
fn row_tiles() -> u32 {
    return (max(params.hpg, 1u) * params.k + TILE_ROWS - 1u) / TILE_ROWS;
}
