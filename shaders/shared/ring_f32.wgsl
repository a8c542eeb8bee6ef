// The ring's rows as they are, four numbers at a time. The kernel that includes this binds ring.

fn ring_quad(at: u32) -> vec4<f32> {
    return ring[at];
}

fn ring_length() -> u32 {
    return arrayLength(&ring);
}
