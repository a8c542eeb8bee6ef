// Body of o1c_pv: its bindings and its main, for either kind of operand.

@group(0) @binding(1) var<storage, read> panel_scores: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> panel_v: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> near_parts: array<vec4<f32>>;

// Four rows of weights at four columns of the panel, or those columns' values at four floats;
// `at` in vec4s. Past the panel the last columns come again, and nobody sums them.
fn fetch(block: Block, at: vec4<u32>, column: u32) -> mat4x4<f32> {
    let term = min(column, params.panel - TILE_K) + block.term;
    if (block.left) {
        let e = vec4<u32>(term / 4u) + at;
        return transpose(
            mat4x4<f32>(panel_scores[e.x], panel_scores[e.y], panel_scores[e.z], panel_scores[e.w])
        );
    }
    let e = vec4<u32>(term * (params.dv / 4u)) + at;
    return mat4x4<f32>(panel_v[e.x], panel_v[e.y], panel_v[e.z], panel_v[e.w]);
}

fn put_sums(g: u32, split: u32, r: u32, quad: u32, sums: vec4<f32>) {
    let dv4 = params.dv / 4u;
    if (r < live_rows() && quad < dv4) {
        near_parts[(split * params.nh * params.kcap + panel_row(g, r)) * dv4 + quad] = sums;
    }
}

@compute @workgroup_size(PRODUCT_LANES)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let splits = max(params.splits, 1u);
    let g = wid.z / splits;
    let split = wid.z % splits;
    let steps = params.panel / TILE_K;
    let per = (steps + splits - 1u) / splits * TILE_K;
    let end = min((split + 1u) * per, params.panel);
    let block = block_of(lane);
    let place = place_of(lane);
    let dv4 = params.dv / 4u;
    var at = vec4<u32>(0u);
    if (block.left) {
        at = panel_rows(g, wid.y * TILE_M + 4u * block.quad) * (params.panel / 4u);
    } else {
        // Columns past the width repeat the last ones and are not written.
        let quad = min(wid.x * (TILE_N / 4u) + block.quad, dv4 - 1u);
        at = (vec4<u32>(g * params.panel) + vec4<u32>(0u, 1u, 2u, 3u)) * dv4 + vec4<u32>(quad);
    }
    var sums = Sums();
    // The next step's blocks are on their way while this one's are summed.
    var next = fetch(block, at, split * per);
    for (var column = split * per; column < end; column += TILE_K) {
        put_block(block, next);
        workgroupBarrier();
        next = fetch(block, at, column + TILE_K);
        sums = add_tile(sums, place);
        workgroupBarrier();
    }
    let quad = wid.x * (TILE_N / 4u) + place.column;
    let upper = wid.y * TILE_M + 4u * place.row;
    let lower = upper + TILE_M / 2u;
    put_sums(g, split, upper, quad, sums.upper[0]);
    put_sums(g, split, upper + 1u, quad, sums.upper[1]);
    put_sums(g, split, upper + 2u, quad, sums.upper[2]);
    put_sums(g, split, upper + 3u, quad, sums.upper[3]);
    put_sums(g, split, lower, quad, sums.lower[0]);
    put_sums(g, split, lower + 1u, quad, sums.lower[1]);
    put_sums(g, split, lower + 2u, quad, sums.lower[2]);
    put_sums(g, split, lower + 3u, quad, sums.lower[3]);
}
