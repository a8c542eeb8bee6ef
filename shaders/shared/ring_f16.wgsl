// How rings keep keys and values: four floats rounded to float16, in two words. Stands in the place of
// `ring_f32.wgsl` where a layer's rings are packed; core WGSL, for it computes with no 16-bit floats.

alias RingQuad = vec2<u32>;

const LARGEST_F16: f32 = 65504.0;

fn from_ring(quad: RingQuad) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(quad.x), unpack2x16float(quad.y));
}

// The host lets no larger value through; a caller's own buffers may bring one, which has no float16.
fn to_ring(values: vec4<f32>) -> RingQuad {
    let known = clamp(values, vec4<f32>(-LARGEST_F16), vec4<f32>(LARGEST_F16));
    return vec2<u32>(pack2x16float(known.xy), pack2x16float(known.zw));
}
