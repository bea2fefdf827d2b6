//! Chains of what the NEON kernels do. Plain loops: a closure would not be compiled for the instructions of the function
//! that it stands in.

use std::arch::aarch64::*;

use super::{ROUNDS, black_box};
use crate::matrix::neon::dot;

/// Chains that hide the latency of an instruction.
const CHAINS: usize = 16;

/// Operations in a round of [`int8`].
pub(super) const INT8: u64 = (CHAINS * 16 * 2) as u64;
/// Operations in a round of [`f32`].
pub(super) const F32: u64 = (CHAINS * 4 * 2) as u64;

/// `sdot`.
#[target_feature(enable = "neon,dotprod")]
pub(super) fn int8() {
    let (w, x) = black_box((vdupq_n_s8(7), vdupq_n_s8(3)));
    let mut sums = [vdupq_n_s32(0); CHAINS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            // SAFETY: this function is compiled for dot products.
            *sum = unsafe { dot::<0>(*sum, w, x) };
        }
    }
    black_box(sums);
}

/// `fmla`.
#[target_feature(enable = "neon")]
pub(super) fn f32() {
    let x = black_box(vdupq_n_f32(0.5));
    let mut sums = [vdupq_n_f32(1.0); CHAINS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = vfmaq_f32(x, *sum, x);
        }
    }
    black_box(sums);
}
