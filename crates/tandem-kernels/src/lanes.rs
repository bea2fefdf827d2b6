//! Eight f32 lanes, so that a kernel is written once and runs on every path.
//!
//! A kernel is generic over [`Lanes`] and is instantiated twice: with [`Avx2`] (on ARM, `Neon`), whose operations are
//! one or two instructions, and with [`Scalar`], whose operations are loops over eight floats. The scalar twin of a kernel is
//! therefore the same source with the same lane order, and agrees with it to the bit: all operations used are
//! correctly rounded by IEEE 754 (add, multiply, fused multiply-add, division, square root, conversions), and the
//! two horizontal reductions have a fixed tree.
//!
//! `Avx2` and `Neon` are tokens: one is made from a [`Path`] that proves the features, which is what makes its methods safe. They
//! must end up inside a function compiled *with* those features to become instructions, and [`Lanes::vectorize`] is
//! that function. [`with_lanes`] goes from a path to the token.

#[cfg(target_arch = "aarch64")]
mod neon;

use half::f16;

use crate::math;
#[cfg(target_arch = "x86_64")]
use crate::path::{Isa, Path};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;

/// Floats in a vector.
pub(crate) const LANES: usize = 8;

/// Vector operations on eight f32. All methods but `vectorize` must be called inside `vectorize`, or be slow.
pub(crate) trait Lanes: Copy + Send + Sync {
    /// Eight floats.
    type V: Copy;

    /// Runs `f` in a function compiled for this path; mark the closure `#[inline(always)]`.
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, x: &[f32; LANES]) -> Self::V;
    fn load_f16(self, x: &[f16; LANES]) -> Self::V;
    fn store(self, v: Self::V, x: &mut [f32; LANES]);
    /// Rounds to nearest, ties to even.
    fn store_f16(self, v: Self::V, x: &mut [f16; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b` in each lane: `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn exp(self, x: Self::V) -> Self::V;

    /// The eight values.
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut x = [0.0; LANES];
        self.store(v, &mut x);
        x
    }

    /// Sum of the lanes: i and i+4, then i and i+2, then the last two.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let x = self.to_array(v);
        let four = [x[0] + x[4], x[1] + x[5], x[2] + x[6], x[3] + x[7]];
        (four[0] + four[2]) + (four[1] + four[3])
    }

    /// Greatest of the lanes, in the order of `sum` and by the rule of `max`.
    #[inline(always)]
    fn greatest(self, v: Self::V) -> f32 {
        let max = |a: f32, b: f32| if a > b { a } else { b };
        let x = self.to_array(v);
        let four = [max(x[0], x[4]), max(x[1], x[5]), max(x[2], x[6]), max(x[3], x[7])];
        max(max(four[0], four[2]), max(four[1], four[3]))
    }
}

/// Evaluates an expression with `$lanes` bound to the [`Lanes`] of a [`Path`].
macro_rules! with_lanes {
    ($path:expr, $lanes:ident => $body:expr) => {{
        let path: $crate::path::Path = $path;
        #[cfg(target_arch = "x86_64")]
        let token = $crate::lanes::Avx2::on(path);
        #[cfg(target_arch = "aarch64")]
        let token = $crate::lanes::Neon::on(path);
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let token: Option<$crate::lanes::Scalar> =
            (path != $crate::path::Path::SCALAR).then_some($crate::lanes::Scalar);
        if let Some($lanes) = token {
            $body
        } else {
            let $lanes = $crate::lanes::Scalar;
            $body
        }
    }};
}
pub(crate) use with_lanes;

/// The scalar twin: plain Rust, runs anywhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Lanes for Scalar {
    type V = [f32; LANES];

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        *x
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16; LANES]) -> Self::V {
        x.map(f16::to_f32)
    }
    #[inline(always)]
    fn store(self, v: Self::V, x: &mut [f32; LANES]) {
        *x = v;
    }
    #[inline(always)]
    fn store_f16(self, v: Self::V, x: &mut [f16; LANES]) {
        *x = v.map(f16::from_f32);
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        x.map(math::exp)
    }
}

/// AVX2 with FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Avx2, Isa, LANES, Lanes, Path};
    use crate::math;
    use half::f16;
    use std::arch::x86_64::*;

    impl Avx2 {
        /// The token, if the path proves the features.
        pub(crate) fn on(path: Path) -> Option<Self> {
            matches!(path.isa(), Isa::Avx2 | Isa::Avx512).then_some(Self(()))
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn with_features<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    /// Wraps intrinsics that are unsafe only for want of a feature.
    macro_rules! op {
        ($e:expr) => {
            // SAFETY: a value of `Avx2` exists only where its features were detected.
            unsafe { $e }
        };
    }

    impl Lanes for Avx2 {
        type V = __m256;

        #[inline(always)]
        fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
            op!(with_features(f))
        }
        #[inline(always)]
        fn splat(self, x: f32) -> __m256 {
            op!(_mm256_set1_ps(x))
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> __m256 {
            // SAFETY: the features as above, and eight floats lie behind the reference.
            unsafe { _mm256_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn load_f16(self, x: &[f16; LANES]) -> __m256 {
            // SAFETY: the features as above, and sixteen bytes lie behind the reference.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())) }
        }
        #[inline(always)]
        fn store(self, v: __m256, x: &mut [f32; LANES]) {
            // SAFETY: the features as above, and eight floats lie behind the reference.
            unsafe { _mm256_storeu_ps(x.as_mut_ptr(), v) }
        }
        #[inline(always)]
        fn store_f16(self, v: __m256, x: &mut [f16; LANES]) {
            // SAFETY: the features as above, and sixteen bytes lie behind the reference.
            unsafe {
                _mm_storeu_si128(x.as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
            }
        }
        #[inline(always)]
        fn add(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_add_ps(a, b))
        }
        #[inline(always)]
        fn sub(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_sub_ps(a, b))
        }
        #[inline(always)]
        fn mul(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_mul_ps(a, b))
        }
        #[inline(always)]
        fn div(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_div_ps(a, b))
        }
        #[inline(always)]
        fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
            op!(_mm256_fmadd_ps(a, b, c))
        }
        #[inline(always)]
        fn max(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_max_ps(a, b))
        }
        #[inline(always)]
        fn exp(self, x: __m256) -> __m256 {
            op!(math::avx2::exp(x))
        }
    }
}
