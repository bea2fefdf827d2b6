//! RMS norm that neither overflows in fp16 nor leaves the engine.

use crate::build::{Builder, Var};
use crate::error::CoremlError;

/// Smallest normal number of fp16.
const SMALLEST_NORMAL: f32 = 6.104e-5;

/// `x / sqrt(mean(x²) + eps) * weight` along `axis`.
///
/// Squares of values above 255 do not fit into fp16, so everything is divided by the largest magnitude `m` first:
/// with `y = x / m` it is `y / sqrt(mean(y²) + (sqrt(eps) / m)²)`, and all that is squared is at most 1.
pub(super) fn rms_norm(
    b: &mut Builder,
    label: &str,
    x: &Var,
    axis: usize,
    weight: &Var,
    eps: f32,
) -> Result<Var, CoremlError> {
    let name = |part: &str| format!("{label}_{part}");
    let root = eps.sqrt();
    let magnitude = b.abs(&name("abs"), x);
    let largest = b.reduce_max(&name("max"), &magnitude, axis)?;
    let (least, root) = (b.half(root.max(SMALLEST_NORMAL)), b.half(root));
    let largest = b.maximum(&name("magnitude"), &largest, &least)?;
    let small = b.div(&name("small"), x, &largest)?;
    let squares = b.square(&name("squares"), &small);
    let mean = b.reduce_mean(&name("mean"), &squares, axis)?;
    let eps = b.div(&name("root_eps"), &root, &largest)?;
    let eps = b.square(&name("eps"), &eps);
    let variance = b.add(&name("variance"), &mean, &eps)?;
    let scale = b.rsqrt(&name("scale"), &variance);
    let normed = b.mul(&name("normed"), &small, &scale)?;
    b.mul(label, &normed, weight)
}
