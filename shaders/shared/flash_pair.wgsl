// What a chunk's near part must know of its tiles: a tile's rows are a group's, a row and a head each, heads
// innermost; its columns are sinks, then what any of its rows sees of ring and sub-chunk, oldest first.
//
// The kernel that includes this binds group_meta, q, ring_k, ring_v, k_rows, v_rows and fl_parts.

const OWN: u32 = 2147483648u;    // 2^31 marks a row of k_rows and v_rows
const NOTHING: f32 = -1.0e38;     // largest of no logits: above -LARGE, so that a masked one weighs 0
const VALUE_QUADS: u32 = 32u;

// A group and a tile of its rows.
struct Pair {
    g: u32,
    row: u32,        // the tile's first row
    live: u32,       // the group's rows
    x0: u32,         // the oldest x that the first row sees
    columns: u32,    // sinks, and all that any row of the tile sees
    inner: u32,      // columns first of which all rows see, and the last such
    outer: u32,
}

fn first_x(group: Group, i: u32) -> u32 {
    return group.len + i + 1u - window_rows(group, i);
}

fn pair_of(group: Group, g: u32, tile: u32) -> Pair {
    let hpg = max(params.hpg, 1u);
    let live = hpg * params.k;
    let row = tile * TILE_ROWS;
    let low = row / hpg;
    let high = min(row + TILE_ROWS, live) - 1u;
    let x0 = first_x(group, low);
    let last = group.len + high / hpg;
    return Pair(
        g, row, live, x0, params.ns + last + 1u - x0,
        params.ns + first_x(group, high / hpg) - x0, params.ns + group.len + low - x0,
    );
}

// Where column s lies: a row of ring_k and ring_v, or of k_rows and v_rows with OWN set. A column past the
// last stands for the last.
fn column_row(group: Group, pair: Pair, column: u32) -> u32 {
    let s = min(column, pair.columns - 1u);
    if (s < params.ns) {
        return sink_row(pair.g, s);
    }
    let x = pair.x0 + s - params.ns;
    if (x < group.len) {
        let slot = group.head + x;
        return pair.g * near_capacity() + select(slot, slot - group.window, slot >= group.window);
    }
    return OWN | ((params.r0 + x - group.len) * params.ng + pair.g);
}

fn scaled_row(row: u32, width: u32) -> u32 {
    return (row & OWN) | ((row & ~OWN) * width);
}

fn key_at(at: u32, e: u32) -> vec4<f32> {
    if ((at & OWN) != 0u) {
        return k_rows[(at & ~OWN) + e];
    }
    return from_ring(ring_k[at + e]);
}

fn value_at(row: u32, quad: u32) -> vec4<f32> {
    let dv4 = params.dv / 4u;
    if ((row & OWN) != 0u) {
        return v_rows[(row & ~OWN) * dv4 + quad];
    }
    return from_ring(ring_v[row * dv4 + quad]);
}

// Four rows of queries or keys at one vec4 of the width; zeros past it.
fn fetch(is_query: bool, mixed: bool, at: vec4<u32>, e: u32) -> mat4x4<f32> {
    if (e >= params.d / 4u) {
        return mat4x4<f32>();
    }
    if (is_query) {
        return mat4x4<f32>(q[at.x + e], q[at.y + e], q[at.z + e], q[at.w + e]);
    }
    if (mixed) {
        return mat4x4<f32>(key_at(at.x, e), key_at(at.y, e), key_at(at.z, e), key_at(at.w, e));
    }
    return mat4x4<f32>(
        from_ring(ring_k[at.x + e]), from_ring(ring_k[at.y + e]),
        from_ring(ring_k[at.z + e]), from_ring(ring_k[at.w + e]),
    );
}

fn query_at(pair: Pair, r: u32) -> u32 {
    let live = min(pair.row + r, pair.live - 1u);
    let hpg = max(params.hpg, 1u);
    return ((params.r0 + live / hpg) * params.nh + pair.g * hpg + live % hpg) * (params.d / 4u);
}

fn exp4(x: vec4<f32>) -> vec4<f32> {
    return exp(max(x, vec4<f32>(EXP_FLOOR)));
}

fn max4(a: mat4x4<f32>) -> vec4<f32> {
    return max(max(a[0], a[1]), max(a[2], a[3]));
}

fn weights4(a: mat4x4<f32>, largest: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        exp4(a[0] - largest), exp4(a[1] - largest), exp4(a[2] - largest), exp4(a[3] - largest)
    );
}

fn columns4(a: mat4x4<f32>) -> vec4<f32> {
    return (a[0] + a[1]) + (a[2] + a[3]);
}

// Row i of the sums times factor[i].
fn rescaled(a: mat4x4<f32>, factor: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(a[0] * factor.x, a[1] * factor.y, a[2] * factor.z, a[3] * factor.w);
}

// Which of four rows see a column: the sinks, and low .. high.
struct Sight {
    low: vec4<u32>,
    high: vec4<u32>,
}

fn sight_of(group: Group, pair: Pair, r: u32) -> Sight {
    let hpg = max(params.hpg, 1u);
    let i = min(vec4<u32>(pair.row + r) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(pair.live - 1u)) / hpg;
    let seen = vec4<u32>(group.len + 1u) + i;
    return Sight(
        params.ns + seen - min(vec4<u32>(group.window), seen) - pair.x0, params.ns + seen - 1u - pair.x0
    );
}

fn masked(logits: vec4<f32>, sight: Sight, column: u32) -> vec4<f32> {
    let s = vec4<u32>(column);
    let seen = ((s >= sight.low) & (s <= sight.high)) | (s < vec4<u32>(params.ns));
    return select(vec4<f32>(-LARGE), logits, seen);
}

// Columns column, + 16, + 32, + 48.
fn masked4(a: mat4x4<f32>, sight: Sight, column: u32) -> mat4x4<f32> {
    return mat4x4<f32>(
        masked(a[0], sight, column), masked(a[1], sight, column + 16u),
        masked(a[2], sight, column + 32u), masked(a[3], sight, column + 48u),
    );
}

// Four rows' sums of one half of the value.
fn put_values(pair: Pair, slot: u32, r: u32, quad: u32, sums: mat4x4<f32>) {
    if (quad < params.dv / 4u) {
        put_vec(pair, slot, r, 1u + quad, sums[0]);
        put_vec(pair, slot, r + 1u, 1u + quad, sums[1]);
        put_vec(pair, slot, r + 2u, 1u + quad, sums[2]);
        put_vec(pair, slot, r + 3u, 1u + quad, sums[3]);
    }
}

fn put_vec(pair: Pair, slot: u32, r: u32, at: u32, x: vec4<f32>) {
    let row = pair.row + r;
    if (row < pair.live) {
        let hpg = max(params.hpg, 1u);
        fl_parts[part_at(slot, row / hpg, pair.g * hpg + row % hpg) + at] = x;
    }
}

// A row's largest logit and its mass, of four rows.
fn put_heads(pair: Pair, slot: u32, r: u32, largest: vec4<f32>, mass: vec4<f32>) {
    put_vec(pair, slot, r, 0u, vec4<f32>(largest.x, mass.x, 0.0, 0.0));
    put_vec(pair, slot, r + 1u, 0u, vec4<f32>(largest.y, mass.y, 0.0, 0.0));
    put_vec(pair, slot, r + 2u, 0u, vec4<f32>(largest.z, mass.z, 0.0, 0.0));
    put_vec(pair, slot, r + 3u, 0u, vec4<f32>(largest.w, mass.w, 0.0, 0.0));
}

// Which of a pair's parts a workgroup's is.
fn slot_of(workgroup: u32, number: u32, pair_tiles: u32, tiles: u32) -> u32 {
    return workgroup - number * pair_tiles / tiles;
}
