//! The lanes of AArch64: eight in two NEON registers, sixteen in four.

use std::arch::aarch64::*;

use half::f16;

use super::{LANES, Lanes, WIDE, wide_as_two_halves};
use crate::math;
use crate::path::{Isa, Path};

/// NEON, with the conversions to and from f16 that every AArch64 has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

/// Wraps intrinsics that are unsafe only for want of a feature.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: a value of `Neon` exists only where its features were detected.
        unsafe { $e }
    };
}

impl Neon {
    /// The token, if the path proves the features.
    pub(crate) fn on(path: Path) -> Option<Self> {
        (path.isa() == Isa::Neon).then_some(Self(()))
    }

    #[inline(always)]
    fn shifted(self, x: [float32x4_t; 2]) -> [float32x4_t; 2] {
        op!(x.map(
            #[inline(always)]
            |x| vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(x)))
        ))
    }
}

impl Lanes for Neon {
    type V = [float32x4_t; 2];

    const ACCUMULATORS: usize = 6;

    wide_as_two_halves!();

    /// NEON is part of what all code for this target is compiled for.
    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        op!([vdupq_n_f32(x); 2])
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        // SAFETY: the features as above, and eight floats lie behind the reference.
        unsafe { [vld1q_f32(x.as_ptr()), vld1q_f32(x.as_ptr().add(4))] }
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16; LANES]) -> Self::V {
        // SAFETY: the features as above, and eight f16 lie behind the reference.
        let x = unsafe { vreinterpretq_f16_u16(vld1q_u16(x.as_ptr().cast())) };
        op!([vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)])
    }
    #[inline(always)]
    fn store(self, v: Self::V, x: &mut [f32; LANES]) {
        // SAFETY: the features as above, and eight floats lie behind the reference.
        unsafe {
            vst1q_f32(x.as_mut_ptr(), v[0]);
            vst1q_f32(x.as_mut_ptr().add(4), v[1]);
        }
    }
    #[inline(always)]
    fn store_f16(self, v: Self::V, x: &mut [f16; LANES]) {
        let v = op!(vcvt_high_f16_f32(vcvt_f16_f32(v[0]), v[1]));
        // SAFETY: the features as above, and eight f16 lie behind the reference.
        unsafe { vst1q_u16(x.as_mut_ptr().cast(), vreinterpretq_u16_f16(v)) };
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        op!([vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        op!([vsubq_f32(a[0], b[0]), vsubq_f32(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        op!([vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        op!([vdivq_f32(a[0], b[0]), vdivq_f32(a[1], b[1])])
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        op!([vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])])
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        // Not `fmax`, which gives NaN where either is.
        op!([0, 1].map(
            #[inline(always)]
            |i| vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i])
        ))
    }
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        [math::neon::exp(x[0]), math::neon::exp(x[1])]
    }
    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::V {
        // SAFETY: the features as above, and eight bytes lie behind the reference.
        let x = unsafe { vmovl_s8(vld1_s8(x.as_ptr())) };
        op!([vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))])
    }
}
