// Exponentials whose argument may lie far below float32's range, the least divisor, the sum of a vec4.

// exp(-x) underflows long before; below it some drivers' range reduction goes wrong.
const EXP_FLOOR: f32 = -1.0e4;
// No smaller: WGSL promises divisions only by divisors from 2^-126 on.
const MIN_DENOMINATOR: f32 = 1.0e-30;

// exp(x) for x <= 0, however small.
fn exp_floored(x: f32) -> f32 {
    return exp(max(x, EXP_FLOOR));
}

// exp(before - after) for a maximum that rose from `before` to `after`: exactly 1 while it stands
// still, or a long stream would lose its far field to the rounding of exp.
fn rescale(before: f32, after: f32) -> f32 {
    return select(exp_floored(before - after), 1.0, before == after);
}

fn sum4(v: vec4<f32>) -> f32 {
    return (v.x + v.y) + (v.z + v.w);
}
