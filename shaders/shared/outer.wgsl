// Four rows of four sums: column j of the matrix is row j.

fn add_outer(sums: mat4x4<f32>, left: vec4<f32>, right: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        sums[0] + left.x * right,
        sums[1] + left.y * right,
        sums[2] + left.z * right,
        sums[3] + left.w * right,
    );
}
