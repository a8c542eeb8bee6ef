// How rings keep keys and values: four floats as they are. `ring_f16.wgsl` stands in its place where a layer's
// rings are packed.

alias RingQuad = vec4<f32>;

fn from_ring(quad: RingQuad) -> vec4<f32> {
    return quad;
}

fn to_ring(values: vec4<f32>) -> RingQuad {
    return values;
}
