// Near part of a chunk without score planes: logits of a tile of rows over a tile of keys, weights at the scale
// of the largest so far, value sums; a workgroup takes some tiles of keys one after another.
//
//   group_meta [G][8] u32                    see shared/group.wgsl
//   q          [rows][nh][d] vec4            the call's queries
//   ring_k     [G][w + ns][d] vec4           the ring's w slots, then the sinks
//   ring_v     [G][w + ns][dv] vec4          values, laid out as the keys
//   k_rows     [rows][G][d] vec4             the call's keys
//   v_rows     [rows][G][dv] vec4            the call's values
//   fl_parts   [slots][kcap][nh][dv] vec4    largest logit, mass, value sum, see shared/flash.wgsl
//   fl_rows    [5][nh][m][kcap]              not read: bound so that the wait for it comes before this kernel
//                                            and not before o1c_fl_far, which then runs beside it
//
// One workgroup a run of key tiles: those of all groups and row tiles in order are cut into equal runs, so that all
// take as long. A run may end one row tile's keys and begin the next one's.
//
// Both products are one loop: a lane sums eight rows times four columns, or eight; operands lie in shared
// memory as [term][rows, columns], queries and keys first, then weights and values.

//#include shared/flash.wgsl
//#include shared/group.wgsl
//#include shared/arithmetic.wgsl
//#include shared/outer.wgsl
//#include shared/ring_f32.wgsl

@group(0) @binding(1) var<storage, read> group_meta: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> ring_k: array<RingQuad>;
@group(0) @binding(4) var<storage, read> ring_v: array<RingQuad>;
@group(0) @binding(5) var<storage, read> k_rows: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> v_rows: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> fl_parts: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read> fl_rows: array<f32>;

//#include shared/flash_pair.wgsl

const TILE_LANES: u32 = 128u;
const TILE_STEP: u32 = 16u;    // terms of a product's step
var<workgroup> sh: array<array<vec4<f32>, 49>, 16>;

fn max_of_columns(row: u32) -> vec4<f32> {
    let low = max(max(max(sh[0][row], sh[1][row]), max(sh[2][row], sh[3][row])),
        max(max(sh[4][row], sh[5][row]), max(sh[6][row], sh[7][row])));
    let high = max(max(max(sh[8][row], sh[9][row]), max(sh[10][row], sh[11][row])),
        max(max(sh[12][row], sh[13][row]), max(sh[14][row], sh[15][row])));
    return max(low, high);
}

fn sum_of_columns(row: u32) -> vec4<f32> {
    let low = ((sh[0][row] + sh[1][row]) + (sh[2][row] + sh[3][row]))
        + ((sh[4][row] + sh[5][row]) + (sh[6][row] + sh[7][row]));
    let high = ((sh[8][row] + sh[9][row]) + (sh[10][row] + sh[11][row]))
        + ((sh[12][row] + sh[13][row]) + (sh[14][row] + sh[15][row]));
    return low + high;
}

// Column n of a matrix, without an index that is not a constant.
fn column_of(a: mat4x4<f32>, n: u32) -> vec4<f32> {
    return select(select(a[0], a[1], n == 1u), select(a[2], a[3], n == 3u), n >= 2u);
}

@compute @workgroup_size(TILE_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let lc = lane % 8u + 8u * (lane / 32u % 2u);
    let lr = lane / 8u % 4u + 4u * (lane / 64u);
    // Fours of rows in the upper and the lower half, keys or halves of the value.
    let row_u = lr;
    let row_l = lr + 8u;
    let col0 = 16u + lc;
    let col1 = col0 + 16u;
    // Half the lanes bring queries, half keys, four rows and four terms of a step each.
    let is_query = lane < 64u;
    let block = lane % 64u;
    let term = (block & 1u) + ((block >> 2u) & 2u);
    let quad_row = ((block >> 1u) & 3u) + ((block >> 4u) << 2u);
    let put = select(16u + quad_row, quad_row, is_query);
    let value_lane = min(wid.y * VALUE_QUADS + lane % VALUE_QUADS, max(params.dv / 4u, 1u) - 1u);
    let of_group = row_tiles();
    let pair_tiles = max(params.pair_tiles, 1u);
    let tiles = max(params.tiles, 1u);
    let end = min((wid.x + 1u) * tiles, params.ng * of_group * pair_tiles);
    for (var unit = wid.x * tiles; unit < end; ) {
        let number = unit / pair_tiles;
        let g = number / of_group;
        let group = load_group(g);
        let pair = pair_of(group, g, number % of_group);
        let stop = min(end, (number + 1u) * pair_tiles);
        let column_end = min((stop - number * pair_tiles) * TILE_KEYS, pair.columns);
        var column = (unit - number * pair_tiles) * TILE_KEYS;
        unit = stop;
        var largest_u = vec4<f32>(NOTHING);
        var mass_u = vec4<f32>(0.0);
        var o_u0 = mat4x4<f32>();
        var o_u1 = mat4x4<f32>();
        var largest_l = vec4<f32>(NOTHING);
        var mass_l = vec4<f32>(0.0);
        var o_l0 = mat4x4<f32>();
        var o_l1 = mat4x4<f32>();
        var at = vec4<u32>(0u);
        if (is_query) {
            let r = 4u * quad_row;
            at = vec4<u32>(query_at(pair, r), query_at(pair, r + 1u), query_at(pair, r + 2u), query_at(pair, r + 3u));
        }
        for (; column < column_end; column += TILE_KEYS) {
            // Past the ring's rows lie the sub-chunk's.
            let mixed = column + TILE_KEYS > params.ns + group.len - min(group.len, pair.x0);
            if (!is_query) {
                let d4 = params.d / 4u;
                let s = column + quad_row;
                at = vec4<u32>(
                    scaled_row(column_row(group, pair, s), d4),
                    scaled_row(column_row(group, pair, s + 16u), d4),
                    scaled_row(column_row(group, pair, s + 32u), d4),
                    scaled_row(column_row(group, pair, s + 48u), d4),
                );
            }
            var sums_u = mat4x4<f32>();
            var sums_l = mat4x4<f32>();
            let key_steps = max((params.d / 4u + 3u) / 4u, 1u);
            for (var step = 0u; step < key_steps; step++) {
                let terms = transpose(fetch(is_query, mixed, at, step * 4u + term));
                sh[4u * term][put] = terms[0];
                sh[4u * term + 1u][put] = terms[1];
                sh[4u * term + 2u][put] = terms[2];
                sh[4u * term + 3u][put] = terms[3];
                workgroupBarrier();
                sums_u = add_outer(sums_u, sh[0][col0], sh[0][row_u]);
                sums_l = add_outer(sums_l, sh[0][col0], sh[0][row_l]);
                sums_u = add_outer(sums_u, sh[1][col0], sh[1][row_u]);
                sums_l = add_outer(sums_l, sh[1][col0], sh[1][row_l]);
                sums_u = add_outer(sums_u, sh[2][col0], sh[2][row_u]);
                sums_l = add_outer(sums_l, sh[2][col0], sh[2][row_l]);
                sums_u = add_outer(sums_u, sh[3][col0], sh[3][row_u]);
                sums_l = add_outer(sums_l, sh[3][col0], sh[3][row_l]);
                sums_u = add_outer(sums_u, sh[4][col0], sh[4][row_u]);
                sums_l = add_outer(sums_l, sh[4][col0], sh[4][row_l]);
                sums_u = add_outer(sums_u, sh[5][col0], sh[5][row_u]);
                sums_l = add_outer(sums_l, sh[5][col0], sh[5][row_l]);
                sums_u = add_outer(sums_u, sh[6][col0], sh[6][row_u]);
                sums_l = add_outer(sums_l, sh[6][col0], sh[6][row_l]);
                sums_u = add_outer(sums_u, sh[7][col0], sh[7][row_u]);
                sums_l = add_outer(sums_l, sh[7][col0], sh[7][row_l]);
                sums_u = add_outer(sums_u, sh[8][col0], sh[8][row_u]);
                sums_l = add_outer(sums_l, sh[8][col0], sh[8][row_l]);
                sums_u = add_outer(sums_u, sh[9][col0], sh[9][row_u]);
                sums_l = add_outer(sums_l, sh[9][col0], sh[9][row_l]);
                sums_u = add_outer(sums_u, sh[10][col0], sh[10][row_u]);
                sums_l = add_outer(sums_l, sh[10][col0], sh[10][row_l]);
                sums_u = add_outer(sums_u, sh[11][col0], sh[11][row_u]);
                sums_l = add_outer(sums_l, sh[11][col0], sh[11][row_l]);
                sums_u = add_outer(sums_u, sh[12][col0], sh[12][row_u]);
                sums_l = add_outer(sums_l, sh[12][col0], sh[12][row_l]);
                sums_u = add_outer(sums_u, sh[13][col0], sh[13][row_u]);
                sums_l = add_outer(sums_l, sh[13][col0], sh[13][row_l]);
                sums_u = add_outer(sums_u, sh[14][col0], sh[14][row_u]);
                sums_l = add_outer(sums_l, sh[14][col0], sh[14][row_l]);
                sums_u = add_outer(sums_u, sh[15][col0], sh[15][row_u]);
                sums_l = add_outer(sums_l, sh[15][col0], sh[15][row_l]);
                workgroupBarrier();
            }
            sums_u = sums_u * params.scale;
            sums_l = sums_l * params.scale;
            if (column < pair.inner || column + TILE_KEYS - 1u > pair.outer) {
                let sight_u = sight_of(group, pair, 4u * row_u);
                let sight_l = sight_of(group, pair, 4u * row_l);
                sums_u = masked4(sums_u, sight_u, column + lc);
                sums_l = masked4(sums_l, sight_l, column + lc);
            }
            sh[lc][row_u] = max4(sums_u);
            sh[lc][row_l] = max4(sums_l);
            workgroupBarrier();
            let all_u = max_of_columns(row_u);
            let all_l = max_of_columns(row_l);
            workgroupBarrier();
            {
                let now_u = max(largest_u, all_u);
                let fade_u = exp4(largest_u - now_u);
                largest_u = now_u;
                sums_u = weights4(sums_u, now_u);
                mass_u = mass_u * fade_u + columns4(sums_u);
                o_u0 = rescaled(o_u0, fade_u);
                o_u1 = rescaled(o_u1, fade_u);
                let now_l = max(largest_l, all_l);
                let fade_l = exp4(largest_l - now_l);
                largest_l = now_l;
                sums_l = weights4(sums_l, now_l);
                mass_l = mass_l * fade_l + columns4(sums_l);
                o_l0 = rescaled(o_l0, fade_l);
                o_l1 = rescaled(o_l1, fade_l);
            }
            let value_steps = (min(TILE_KEYS, column_end - column) + TILE_STEP - 1u) / TILE_STEP;
            for (var step = 0u; step < value_steps; step++) {
                let s = column + step * TILE_STEP + lane / VALUE_QUADS;
                let value0 = value_at(column_row(group, pair, s), value_lane);
                let value1 = value_at(column_row(group, pair, s + 4u), value_lane);
                let value2 = value_at(column_row(group, pair, s + 8u), value_lane);
                let value3 = value_at(column_row(group, pair, s + 12u), value_lane);
                // A weight's place among the terms is its lane's column; a step takes one of its four.
                sh[lc][row_u] = column_of(sums_u, step);
                sh[lc][row_l] = column_of(sums_l, step);
                sh[lane / VALUE_QUADS][16u + lane % VALUE_QUADS] = value0;
                sh[lane / VALUE_QUADS + 4u][16u + lane % VALUE_QUADS] = value1;
                sh[lane / VALUE_QUADS + 8u][16u + lane % VALUE_QUADS] = value2;
                sh[lane / VALUE_QUADS + 12u][16u + lane % VALUE_QUADS] = value3;
                workgroupBarrier();
                o_u0 = add_outer(o_u0, sh[0][row_u], sh[0][col0]);
                o_u1 = add_outer(o_u1, sh[0][row_u], sh[0][col1]);
                o_l0 = add_outer(o_l0, sh[0][row_l], sh[0][col0]);
                o_l1 = add_outer(o_l1, sh[0][row_l], sh[0][col1]);
                o_u0 = add_outer(o_u0, sh[1][row_u], sh[1][col0]);
                o_u1 = add_outer(o_u1, sh[1][row_u], sh[1][col1]);
                o_l0 = add_outer(o_l0, sh[1][row_l], sh[1][col0]);
                o_l1 = add_outer(o_l1, sh[1][row_l], sh[1][col1]);
                o_u0 = add_outer(o_u0, sh[2][row_u], sh[2][col0]);
                o_u1 = add_outer(o_u1, sh[2][row_u], sh[2][col1]);
                o_l0 = add_outer(o_l0, sh[2][row_l], sh[2][col0]);
                o_l1 = add_outer(o_l1, sh[2][row_l], sh[2][col1]);
                o_u0 = add_outer(o_u0, sh[3][row_u], sh[3][col0]);
                o_u1 = add_outer(o_u1, sh[3][row_u], sh[3][col1]);
                o_l0 = add_outer(o_l0, sh[3][row_l], sh[3][col0]);
                o_l1 = add_outer(o_l1, sh[3][row_l], sh[3][col1]);
                o_u0 = add_outer(o_u0, sh[4][row_u], sh[4][col0]);
                o_u1 = add_outer(o_u1, sh[4][row_u], sh[4][col1]);
                o_l0 = add_outer(o_l0, sh[4][row_l], sh[4][col0]);
                o_l1 = add_outer(o_l1, sh[4][row_l], sh[4][col1]);
                o_u0 = add_outer(o_u0, sh[5][row_u], sh[5][col0]);
                o_u1 = add_outer(o_u1, sh[5][row_u], sh[5][col1]);
                o_l0 = add_outer(o_l0, sh[5][row_l], sh[5][col0]);
                o_l1 = add_outer(o_l1, sh[5][row_l], sh[5][col1]);
                o_u0 = add_outer(o_u0, sh[6][row_u], sh[6][col0]);
                o_u1 = add_outer(o_u1, sh[6][row_u], sh[6][col1]);
                o_l0 = add_outer(o_l0, sh[6][row_l], sh[6][col0]);
                o_l1 = add_outer(o_l1, sh[6][row_l], sh[6][col1]);
                o_u0 = add_outer(o_u0, sh[7][row_u], sh[7][col0]);
                o_u1 = add_outer(o_u1, sh[7][row_u], sh[7][col1]);
                o_l0 = add_outer(o_l0, sh[7][row_l], sh[7][col0]);
                o_l1 = add_outer(o_l1, sh[7][row_l], sh[7][col1]);
                o_u0 = add_outer(o_u0, sh[8][row_u], sh[8][col0]);
                o_u1 = add_outer(o_u1, sh[8][row_u], sh[8][col1]);
                o_l0 = add_outer(o_l0, sh[8][row_l], sh[8][col0]);
                o_l1 = add_outer(o_l1, sh[8][row_l], sh[8][col1]);
                o_u0 = add_outer(o_u0, sh[9][row_u], sh[9][col0]);
                o_u1 = add_outer(o_u1, sh[9][row_u], sh[9][col1]);
                o_l0 = add_outer(o_l0, sh[9][row_l], sh[9][col0]);
                o_l1 = add_outer(o_l1, sh[9][row_l], sh[9][col1]);
                o_u0 = add_outer(o_u0, sh[10][row_u], sh[10][col0]);
                o_u1 = add_outer(o_u1, sh[10][row_u], sh[10][col1]);
                o_l0 = add_outer(o_l0, sh[10][row_l], sh[10][col0]);
                o_l1 = add_outer(o_l1, sh[10][row_l], sh[10][col1]);
                o_u0 = add_outer(o_u0, sh[11][row_u], sh[11][col0]);
                o_u1 = add_outer(o_u1, sh[11][row_u], sh[11][col1]);
                o_l0 = add_outer(o_l0, sh[11][row_l], sh[11][col0]);
                o_l1 = add_outer(o_l1, sh[11][row_l], sh[11][col1]);
                o_u0 = add_outer(o_u0, sh[12][row_u], sh[12][col0]);
                o_u1 = add_outer(o_u1, sh[12][row_u], sh[12][col1]);
                o_l0 = add_outer(o_l0, sh[12][row_l], sh[12][col0]);
                o_l1 = add_outer(o_l1, sh[12][row_l], sh[12][col1]);
                o_u0 = add_outer(o_u0, sh[13][row_u], sh[13][col0]);
                o_u1 = add_outer(o_u1, sh[13][row_u], sh[13][col1]);
                o_l0 = add_outer(o_l0, sh[13][row_l], sh[13][col0]);
                o_l1 = add_outer(o_l1, sh[13][row_l], sh[13][col1]);
                o_u0 = add_outer(o_u0, sh[14][row_u], sh[14][col0]);
                o_u1 = add_outer(o_u1, sh[14][row_u], sh[14][col1]);
                o_l0 = add_outer(o_l0, sh[14][row_l], sh[14][col0]);
                o_l1 = add_outer(o_l1, sh[14][row_l], sh[14][col1]);
                o_u0 = add_outer(o_u0, sh[15][row_u], sh[15][col0]);
                o_u1 = add_outer(o_u1, sh[15][row_u], sh[15][col1]);
                o_l0 = add_outer(o_l0, sh[15][row_l], sh[15][col0]);
                o_l1 = add_outer(o_l1, sh[15][row_l], sh[15][col1]);
                workgroupBarrier();
            }
        }
        sh[lc][row_u] = mass_u;
        sh[lc][row_l] = mass_l;
        workgroupBarrier();
        let all_u = sum_of_columns(row_u);
        let all_l = sum_of_columns(row_l);
        workgroupBarrier();
        let slot = slot_of(wid.x, number, pair_tiles, tiles);
        if (lc == 0u && wid.y == 0u) {
            put_heads(pair, slot, 4u * row_u, largest_u, all_u);
            put_heads(pair, slot, 4u * row_l, largest_l, all_l);
        }
        let quad = wid.y * VALUE_QUADS + lc;
        put_values(pair, slot, 4u * row_u, quad, o_u0);
        put_values(pair, slot, 4u * row_u, quad + 16u, o_u1);
        put_values(pair, slot, 4u * row_l, quad, o_l0);
        put_values(pair, slot, 4u * row_l, quad + 16u, o_l1);
    }
}
