//! The functions on four lanes, bit for bit. NEON is part of what all code for AArch64 is compiled for.

use std::arch::aarch64::*;

use super::{Activation, GELU_CUBIC, GELU_SCALE, HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, POLYNOMIAL};

/// [`Activation::gate`] for all whole vectors; returns how many elements those were.
pub(super) fn gate(activation: Activation, gate: &mut [f32], up: &[f32]) -> usize {
    let (gate, _) = gate.as_chunks_mut::<4>();
    let (up, _) = up.as_chunks::<4>();
    let count = gate.len();
    for (gate, up) in gate.iter_mut().zip(up) {
        // SAFETY: both are four floats, and NEON is there.
        unsafe {
            let x = vld1q_f32(gate.as_ptr());
            let x = match activation {
                Activation::Silu => silu(x),
                Activation::GeluTanh => gelu_tanh(x),
            };
            vst1q_f32(gate.as_mut_ptr(), vmulq_f32(vld1q_f32(up.as_ptr()), x));
        }
    }
    4 * count
}

/// `e^x` in each lane.
#[inline(always)]
pub(crate) fn exp(x: float32x4_t) -> float32x4_t {
    // SAFETY: NEON is there.
    unsafe {
        let highest = vdupq_n_f32(HIGHEST);
        let zero = vcltq_f32(x, vdupq_n_f32(LOWEST));
        let x = vbslq_f32(vcgtq_f32(x, highest), highest, x);
        let n = vrndnq_f32(vmulq_f32(x, vdupq_n_f32(LOG2_E)));
        let r = vfmsq_f32(x, n, vdupq_n_f32(LN2_HIGH));
        let r = vfmsq_f32(r, n, vdupq_n_f32(LN2_LOW));
        let mut p = vdupq_n_f32(POLYNOMIAL[0]);
        for c in &POLYNOMIAL[1..] {
            p = vfmaq_f32(vdupq_n_f32(*c), p, r);
        }
        let p = vaddq_f32(vfmaq_f32(r, p, vmulq_f32(r, r)), vdupq_n_f32(1.0));
        let bits = vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(126)));
        let result = vmulq_f32(vmulq_f32(p, vreinterpretq_f32_s32(bits)), vdupq_n_f32(2.0));
        vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(result), zero))
    }
}

/// `x / (1 + e^-x)` in each lane.
#[inline(always)]
pub(super) fn silu(x: float32x4_t) -> float32x4_t {
    logistic(x, x)
}

/// GELU in its tanh form in each lane.
#[inline(always)]
pub(super) fn gelu_tanh(x: float32x4_t) -> float32x4_t {
    // SAFETY: NEON is there.
    let u = unsafe {
        let cubic = vfmaq_f32(vdupq_n_f32(1.0), vmulq_f32(vdupq_n_f32(GELU_CUBIC), x), x);
        vmulq_f32(vmulq_f32(vdupq_n_f32(GELU_SCALE), x), cubic)
    };
    logistic(x, u)
}

/// `x / (1 + e^-u)` in each lane.
#[inline(always)]
fn logistic(x: float32x4_t, u: float32x4_t) -> float32x4_t {
    // SAFETY: NEON is there.
    unsafe { vdivq_f32(x, vaddq_f32(vdupq_n_f32(1.0), exp(vnegq_f32(u)))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lanes_equal_the_scalar_form(x in prop::array::uniform4(prop_oneof![-100f32..100.0, any::<f32>()])) {
            type Lanes = fn(float32x4_t) -> float32x4_t;
            type Scalar = fn(f32) -> f32;
            let pairs: [(Lanes, Scalar); 3] =
                [(exp, super::super::exp), (silu, super::super::silu), (gelu_tanh, super::super::gelu_tanh)];
            for (lanes, scalar) in pairs {
                let mut got = [0f32; 4];
                // SAFETY: both arrays hold four floats, and NEON is there.
                unsafe { vst1q_f32(got.as_mut_ptr(), lanes(vld1q_f32(x.as_ptr()))) };
                for (got, x) in got.iter().zip(x) {
                    let want = scalar(x);
                    prop_assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "f({x}): {got} {want}");
                }
            }
        }
    }
}
