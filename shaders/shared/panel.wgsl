// A group's panel: sinks, ring from its oldest row, the sub-chunk's rows, zeros; its rows of queries.

// The columns that a row sees: the sinks, and first .. last, its window with its own row the last.
struct Seen {
    first: u32,
    last: u32,
}

fn seen_by(group: Group, i: u32) -> Seen {
    let last = params.ns + group.len + i;
    return Seen(last + 1u - window_rows(group, i), last);
}

// Which of columns 4 quad .. 4 quad + 3 are seen.
fn is_seen(seen: Seen, quad: u32) -> vec4<bool> {
    let column = vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u);
    let in_window = (column >= vec4<u32>(seen.first)) & (column <= vec4<u32>(seen.last));
    return in_window | (column < vec4<u32>(params.ns));
}
