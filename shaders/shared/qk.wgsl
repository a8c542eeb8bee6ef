// Body of o1c_qk: its bindings and its main, for either kind of operand.

@group(0) @binding(1) var<storage, read> panel_q: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> panel_k: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> panel_scores: array<vec4<f32>>;

// Four rows of queries or keys, `at` in vec4s, at four terms; zeros past the width.
fn fetch(block: Block, at: vec4<u32>, term: u32) -> mat4x4<f32> {
    let e = (term + block.term) / 4u;
    if (e >= params.d / 4u) {
        return mat4x4<f32>();
    }
    if (block.left) {
        return transpose(
            mat4x4<f32>(panel_q[at.x + e], panel_q[at.y + e], panel_q[at.z + e], panel_q[at.w + e])
        );
    }
    return transpose(
        mat4x4<f32>(panel_k[at.x + e], panel_k[at.y + e], panel_k[at.z + e], panel_k[at.w + e])
    );
}

fn put_scores(g: u32, r: u32, quad: u32, sums: vec4<f32>) {
    if (r < live_rows()) {
        panel_scores[panel_row(g, r) * (params.panel / 4u) + quad] = sums * params.scale;
    }
}

@compute @workgroup_size(PRODUCT_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let g = wid.z;
    let block = block_of(lane);
    let place = place_of(lane);
    let column = wid.x * TILE_N + 4u * block.quad;
    // Panels end with a tile, so that every column is there.
    var at = vec4<u32>(g * params.panel + column) + vec4<u32>(0u, 1u, 2u, 3u);
    if (block.left) {
        at = panel_rows(g, wid.y * TILE_M + 4u * block.quad);
    }
    at = at * (params.d / 4u);
    var sums = Sums();
    // The next step's blocks are on their way while this one's are summed.
    var next = fetch(block, at, 0u);
    for (var term = 0u; term < params.d; term += TILE_K) {
        put_block(block, next);
        workgroupBarrier();
        next = fetch(block, at, term + TILE_K);
        sums = add_tile(sums, place);
        workgroupBarrier();
    }
    let quad = wid.x * (TILE_N / 4u) + place.column;
    let upper = wid.y * TILE_M + 4u * place.row;
    let lower = upper + TILE_M / 2u;
    put_scores(g, upper, quad, sums.upper[0]);
    put_scores(g, upper + 1u, quad, sums.upper[1]);
    put_scores(g, upper + 2u, quad, sums.upper[2]);
    put_scores(g, upper + 3u, quad, sums.upper[3]);
    put_scores(g, lower, quad, sums.lower[0]);
    put_scores(g, lower + 1u, quad, sums.lower[1]);
    put_scores(g, lower + 2u, quad, sums.lower[2]);
    put_scores(g, lower + 3u, quad, sums.lower[3]);
}
