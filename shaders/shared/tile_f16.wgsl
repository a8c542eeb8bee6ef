// A tile's operands rounded to float16; what is larger becomes its largest number, not infinity.

alias TileQuad = vec4<f16>;

fn to_tile(x: vec4<f32>) -> TileQuad {
    return vec4<f16>(clamp(x, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}
