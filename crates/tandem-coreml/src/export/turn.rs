//! Rotary position embedding from cosines and signed sines that the caller computes.

use crate::build::{Builder, Var};
use crate::error::CoremlError;

/// Turns `x` along `axis`, of whose `width` values the first `rotary` are turned: `x * cos + swapped(x) * sin`, where
/// `swapped` exchanges the halves of what is turned, and cosines are 1 and sines 0 past it.
pub(super) fn turned(
    b: &mut Builder,
    label: &str,
    x: &Var,
    axis: usize,
    [rotary, width]: [usize; 2],
    [cos, sin]: &[Var; 2],
) -> Result<Var, CoremlError> {
    let sizes = [rotary / 2, rotary / 2, width - rotary];
    let sizes = if rotary == width { &sizes[..2] } else { &sizes[..] };
    let halves = b.split(&format!("{label}_halves"), x, axis, sizes)?;
    let swapped: Vec<&Var> = [1, 0, 2].iter().filter_map(|&i| halves.get(i)).collect();
    let swapped = b.concat(&format!("{label}_swapped"), &swapped, axis)?;
    let kept = b.mul(&format!("{label}_cos"), x, cos)?;
    let moved = b.mul(&format!("{label}_sin"), &swapped, sin)?;
    b.add(&format!("{label}_turned"), &kept, &moved)
}
