// A group's row of group_meta, its ring, and which rows of the sub-chunk evict what.
// The kernel that includes this binds group_meta [G][8] u32. Where it binds it read-only, all that
// follows from a uniform group index is uniform and may steer barriers.

const META_WORDS: u32 = 8u;
const META_LEN: u32 = 0u;          // rows in the ring
const META_HEAD: u32 = 1u;         // slot of the oldest
const META_FAR_LEN: u32 = 2u;      // rows folded
const META_WINDOW: u32 = 3u;       // the group's window w_g
const META_FAR_LIMIT: u32 = 4u;    // folded rows at which the far field closes
const META_LANDMARKS: u32 = 5u;    // landmarks in use m_g
const META_EVICTED: u32 = 6u;      // rows that have left the ring, folded or not, wrapping

struct Group {
    len: u32,
    head: u32,
    far_len: u32,
    window: u32,
    far_limit: u32,
    landmarks: u32,
    evicted: u32,
}

// Bounds what steers an index, so that a damaged row cannot lead out of a plane.
fn load_group(g: u32) -> Group {
    let at = g * META_WORDS;
    let window = clamp(group_meta[at + META_WINDOW], 1u, max(params.w, 1u));
    return Group(
        min(group_meta[at + META_LEN], window),
        group_meta[at + META_HEAD] % window,
        group_meta[at + META_FAR_LEN],
        window,
        group_meta[at + META_FAR_LIMIT],
        min(group_meta[at + META_LANDMARKS], min(params.m, LANES)),
        group_meta[at + META_EVICTED],
    );
}

// Slot of the ring's x-th oldest row; x = len is where the next row goes.
fn ring_slot(group: Group, x: u32) -> u32 {
    return (group.head + x) % max(group.window, 1u);
}

// Row of ring_k and ring_v that holds the ring's x-th oldest row.
fn ring_row(group: Group, g: u32, x: u32) -> u32 {
    return g * near_capacity() + ring_slot(group, x);
}

// Row of ring_k and ring_v that holds sink j.
fn sink_row(g: u32, j: u32) -> u32 {
    return g * near_capacity() + params.w + j;
}

// The sub-chunk's rows first .. end whose evicted row is folded, out of its rows 0 .. rows.
// Row j evicts the (j - first)-th oldest row of the ring as it was before the sub-chunk.
struct Folds {
    first: u32,
    end: u32,
}

fn folds_of(group: Group, rows: u32) -> Folds {
    let first = group.window - group.len;
    let evicted = max(rows, first) - first;
    let room = max(group.far_limit, group.far_len) - group.far_len;
    return Folds(first, first + min(evicted, room));
}

// Rows of row i's window, its own the last.
fn window_rows(group: Group, i: u32) -> u32 {
    return min(group.window, group.len + i + 1u);
}

// Where row i finds the key and value of column s: sinks first, then its window, oldest to newest.
struct NearRow {
    resident: bool,    // a row of ring_k and ring_v, else one of k_rows and v_rows
    row: u32,
}

fn near_row(group: Group, g: u32, i: u32, s: u32) -> NearRow {
    if (s < params.ns) {
        return NearRow(true, sink_row(g, s));
    }
    let x = group.len + i + 1u - window_rows(group, i) + s - params.ns;
    if (x < group.len) {
        return NearRow(true, ring_row(group, g, x));
    }
    return NearRow(false, (params.r0 + x - group.len) * params.ng + g);
}
