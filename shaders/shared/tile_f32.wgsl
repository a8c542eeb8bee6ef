// A tile's operands as they are.

alias TileQuad = vec4<f32>;

fn to_tile(x: vec4<f32>) -> TileQuad {
    return x;
}
