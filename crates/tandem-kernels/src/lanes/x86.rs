//! The lanes of x86-64: AVX2, and AVX-512 for what is sixteen wide.

use half::f16;
use std::arch::x86_64::*;

use super::{LANES, Lanes, WIDE, wide_as_two_halves};
use crate::math;
use crate::path::{Isa, Path};

/// AVX2 with FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

/// All of [`Avx2`], and AVX-512 F, BW and VL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx2 {
    /// The token, if the path proves the features.
    pub(crate) fn on(path: Path) -> Option<Self> {
        matches!(path.isa(), Isa::Avx2 | Isa::Avx512 | Isa::Amx).then_some(Self(()))
    }
}

impl Avx512 {
    /// The token, if the path proves the features.
    pub(crate) fn on(path: Path) -> Option<Self> {
        matches!(path.isa(), Isa::Avx512 | Isa::Amx).then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Wraps intrinsics that are unsafe only for want of a feature.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: a token exists only where its features were detected.
        unsafe { $e }
    };
}

/// The operations on eight floats, which both have.
macro_rules! eight {
    () => {
        type V = __m256;

        #[inline(always)]
        fn prefetch<T>(self, x: &T) {
            // SAFETY: only a hint, and the address is good.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(x).cast()) }
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
        #[inline(always)]
        fn load_i8(self, x: &[i8; LANES]) -> __m256 {
            // SAFETY: the features as above, and eight bytes lie behind the reference.
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))) }
        }
    };
}

impl Avx2 {
    #[inline(always)]
    fn shifted(self, x: __m256) -> __m256 {
        op!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(x))))
    }
}

impl Lanes for Avx2 {
    const ACCUMULATORS: usize = 6;

    eight!();
    wide_as_two_halves!();

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        op!(with_avx2(f))
    }
}

impl Lanes for Avx512 {
    type W = __m512;

    const ACCUMULATORS: usize = 24;

    eight!();

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        op!(with_avx512(f))
    }
    #[inline(always)]
    fn splat_wide(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load_wide(self, x: &[f32; WIDE]) -> __m512 {
        // SAFETY: the features as above, and sixteen floats lie behind the reference.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    fn load_wide_f16(self, x: &[f16; WIDE]) -> __m512 {
        // SAFETY: the features as above, and 32 bytes lie behind the reference.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_wide_i8(self, x: &[i8; WIDE]) -> __m512 {
        // SAFETY: the features as above, and sixteen bytes lie behind the reference.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn store_wide(self, w: __m512, x: &mut [f32; WIDE]) {
        // SAFETY: the features as above, and sixteen floats lie behind the reference.
        unsafe { _mm512_storeu_ps(x.as_mut_ptr(), w) }
    }
    #[inline(always)]
    fn fma_wide(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn halves(self, w: __m512) -> [__m256; 2] {
        op!([_mm512_castps512_ps256(w), _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(w))),])
    }
    #[inline(always)]
    fn add_wide(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub_wide(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul_wide(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn max_wide(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn shifted_wide(self, x: __m512) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(x))))
    }
}
