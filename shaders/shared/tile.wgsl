// A workgroup's tile of a matrix product: TILE_M rows times TILE_N columns, TILE_K terms a step.
//
// Half of the lanes bring the left operand's 4 x 4 blocks, the other half the right one's; then each
// lane sums 8 rows times 4 columns. The kernel that includes this also includes tile_f32 or
// tile_f16, which say what the operands are kept as.

//#include shared/outer.wgsl

const PRODUCT_LANES: u32 = 128u;    // invocations of a workgroup
const TILE_M: u32 = 64u;
const TILE_N: u32 = 64u;
const TILE_K: u32 = 16u;
const TILE_QUADS: u32 = 16u;        // vec4s across either operand's tile

// [term][rows or columns], so that a lane reads four neighbours at once. Arrays of arrays: a bound
// check then falls on the index that stays the same from step to step. Stores are whole vec4s.
var<workgroup> sh_left: array<array<TileQuad, TILE_QUADS>, TILE_K>;
var<workgroup> sh_right: array<array<TileQuad, TILE_QUADS>, TILE_K>;

// A lane's block to bring: four rows or columns from 4 quad on, terms term .. term + 3.
struct Block {
    left: bool,
    quad: u32,
    term: u32,
}

fn block_of(lane: u32) -> Block {
    return Block(lane < PRODUCT_LANES / 2u, lane % TILE_QUADS, lane / TILE_QUADS % (TILE_K / 4u) * 4u);
}

// `terms[j]` holds the four rows or columns at the block's j-th term.
fn put_block(block: Block, terms: mat4x4<f32>) {
    if (block.left) {
        sh_left[block.term][block.quad] = to_tile(terms[0]);
        sh_left[block.term + 1u][block.quad] = to_tile(terms[1]);
        sh_left[block.term + 2u][block.quad] = to_tile(terms[2]);
        sh_left[block.term + 3u][block.quad] = to_tile(terms[3]);
    } else {
        sh_right[block.term][block.quad] = to_tile(terms[0]);
        sh_right[block.term + 1u][block.quad] = to_tile(terms[1]);
        sh_right[block.term + 2u][block.quad] = to_tile(terms[2]);
        sh_right[block.term + 3u][block.quad] = to_tile(terms[3]);
    }
}

// A lane's place in the tile, in vec4s: it sums rows 4 row .. + 3, the same TILE_M / 2 further down,
// and columns 4 column .. + 3. Lanes of 32 in a row read few vec4s between them.
struct Place {
    row: u32,
    column: u32,
}

fn place_of(lane: u32) -> Place {
    let run = lane / 32u;
    return Place(lane / 8u % 4u + run / 2u * 4u, lane % 8u + run % 2u * 8u);
}

// A lane's sums: upper[j] is the j-th of its upper four rows, four columns each.
struct Sums {
    upper: mat4x4<f32>,
    lower: mat4x4<f32>,
}

fn add_term(sums: Sums, place: Place, term: u32) -> Sums {
    let right = vec4<f32>(sh_right[term][place.column]);
    let upper = vec4<f32>(sh_left[term][place.row]);
    let lower = vec4<f32>(sh_left[term][place.row + TILE_QUADS / 2u]);
    return Sums(add_outer(sums.upper, upper, right), add_outer(sums.lower, lower, right));
}

// Written out, for a loop costs a counter and an index check a turn.
fn add_tile(before: Sums, place: Place) -> Sums {
    var sums = before;
    sums = add_term(sums, place, 0u);
    sums = add_term(sums, place, 1u);
    sums = add_term(sums, place, 2u);
    sums = add_term(sums, place, 3u);
    sums = add_term(sums, place, 4u);
    sums = add_term(sums, place, 5u);
    sums = add_term(sums, place, 6u);
    sums = add_term(sums, place, 7u);
    sums = add_term(sums, place, 8u);
    sums = add_term(sums, place, 9u);
    sums = add_term(sums, place, 10u);
    sums = add_term(sums, place, 11u);
    sums = add_term(sums, place, 12u);
    sums = add_term(sums, place, 13u);
    sums = add_term(sums, place, 14u);
    sums = add_term(sums, place, 15u);
    return sums;
}

// A group's product has hpg * k live rows: row r is head r / k, row r % k of the sub-chunk.
fn live_rows() -> u32 {
    return params.hpg * params.k;
}

// Row of the [nh][kcap] planes that holds row r of group g; the last live one for any beyond.
fn panel_row(g: u32, r: u32) -> u32 {
    let live = min(r, max(live_rows(), 1u) - 1u);
    let k = max(params.k, 1u);
    return (g * params.hpg + live / k) * params.kcap + live % k;
}

// Rows r .. r + 3 of group g, each the row of a plane.
fn panel_rows(g: u32, r: u32) -> vec4<u32> {
    return vec4<u32>(panel_row(g, r), panel_row(g, r + 1u), panel_row(g, r + 2u), panel_row(g, r + 3u));
}
