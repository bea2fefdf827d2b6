//! Elementary functions on f32: a scalar form and SIMD forms that give the same bits.
//!
//! `exp` follows Cephes' `expf`: `x = n ln 2 + r` with `|r| <= ln 2 / 2`, a polynomial of degree 6 in `r`, and `2^n` by
//! the exponent bits. It is within 2 ulp of the true value; below -86.6 it is exactly 0, above 88.73 infinite, and NaN
//! stays NaN.

#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

use crate::path::{Isa, Path};

const LOG2_E: f32 = std::f32::consts::LOG2_E;
// ln 2 in two parts: the product of the first with a whole number up to 128 is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below this the result is 0.
const LOWEST: f32 = -86.6;
/// Above this the result is infinite in any case.
const HIGHEST: f32 = 89.0;
const POLYNOMIAL: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
/// `2 sqrt(2 / pi)`, of GELU's tanh form written as a logistic function.
const GELU_SCALE: f32 = 2.0 * 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

/// `e^x`.
#[inline]
pub fn exp(x: f32) -> f32 {
    if x < LOWEST {
        return 0.0;
    }
    let x = if x > HIGHEST { HIGHEST } else { x };
    let n = (x * LOG2_E).round_ties_even();
    let r = (-n).mul_add(LN2_LOW, (-n).mul_add(LN2_HIGH, x));
    let mut p = POLYNOMIAL[0];
    for c in &POLYNOMIAL[1..] {
        p = p.mul_add(r, *c);
    }
    let p = p.mul_add(r * r, r) + 1.0;
    // 2^(n-1), then once more: n = 128 has no exponent bits of its own.
    let half = f32::from_bits((((n as i32) + 126) << 23).cast_unsigned());
    p * half * 2.0
}

/// `x / (1 + e^-x)`, also called swish.
#[inline]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`: the tanh form of GELU, as Gemma uses it.
#[inline]
pub fn gelu_tanh(x: f32) -> f32 {
    let u = GELU_SCALE * x * (GELU_CUBIC * x).mul_add(x, 1.0);
    x / (1.0 + exp(-u))
}

/// The nonlinearity of a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// [`silu`]
    Silu,
    /// [`gelu_tanh`]
    GeluTanh,
}

impl Activation {
    /// `gate = activation(gate) * up`, element by element.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn gate(self, path: Path, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "lengths of gate and up");
        let done = match path.isa() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: such a path exists only where the CPU has these features.
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { avx2::gate(self, gate, up) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::gate(self, gate, up),
            _ => 0,
        };
        for (gate, up) in gate.iter_mut().zip(up).skip(done) {
            *gate = up
                * match self {
                    Activation::Silu => silu(*gate),
                    Activation::GeluTanh => gelu_tanh(*gate),
                };
        }
    }
}

/// The same functions on eight lanes, bit for bit.
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use super::{Activation, GELU_CUBIC, GELU_SCALE, HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, POLYNOMIAL};
    use std::arch::x86_64::*;

    /// [`Activation::gate`] for all whole lanes; returns how many elements those were.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn gate(activation: Activation, gate: &mut [f32], up: &[f32]) -> usize {
        let (gate, _) = gate.as_chunks_mut::<8>();
        let (up, _) = up.as_chunks::<8>();
        let count = gate.len();
        for (gate, up) in gate.iter_mut().zip(up) {
            // SAFETY: both are eight floats.
            unsafe {
                let x = _mm256_loadu_ps(gate.as_ptr());
                let x = match activation {
                    Activation::Silu => silu(x),
                    Activation::GeluTanh => gelu_tanh(x),
                };
                _mm256_storeu_ps(gate.as_mut_ptr(), _mm256_mul_ps(_mm256_loadu_ps(up.as_ptr()), x));
            }
        }
        8 * count
    }

    /// `e^x` in each lane.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn exp(x: __m256) -> __m256 {
        let zero = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(LOWEST));
        // With a NaN in either place, `min` returns its second operand.
        let x = _mm256_min_ps(_mm256_set1_ps(HIGHEST), x);
        let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
            x,
            _mm256_set1_ps(LOG2_E),
        ));
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_HIGH), x);
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_LOW), r);
        let mut p = _mm256_set1_ps(POLYNOMIAL[0]);
        for c in &POLYNOMIAL[1..] {
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*c));
        }
        let p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0));
        let bits = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(126)));
        let result = _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(bits)), _mm256_set1_ps(2.0));
        _mm256_andnot_ps(zero, result)
    }

    /// `x / (1 + e^-x)` in each lane.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn silu(x: __m256) -> __m256 {
        logistic(x, x)
    }

    /// GELU in its tanh form in each lane.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn gelu_tanh(x: __m256) -> __m256 {
        let cubic = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(GELU_CUBIC), x), x, _mm256_set1_ps(1.0));
        logistic(x, _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(GELU_SCALE), x), cubic))
    }

    /// `x / (1 + e^-u)` in each lane.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn logistic(x: __m256, u: __m256) -> __m256 {
        let negative = _mm256_xor_ps(u, _mm256_set1_ps(-0.0));
        _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0), exp(negative)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(got: f32, want: f64, relative: f64) -> bool {
        (f64::from(got) - want).abs() <= relative * want.abs() + 1e-37
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(1e30), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert!(close(exp(88.7), 88.7f32.into_exp(), 3e-7));
        assert!(close(exp(-86.5), (-86.5f32).into_exp(), 3e-7));
        assert!(silu(f32::NAN).is_nan());
        assert_eq!(silu(-200.0), -0.0);
        assert_eq!(silu(200.0), 200.0);
        assert_eq!(gelu_tanh(50.0), 50.0);
    }

    trait IntoExp {
        fn into_exp(self) -> f64;
    }

    impl IntoExp for f32 {
        fn into_exp(self) -> f64 {
            f64::from(self).exp()
        }
    }

    proptest! {
        #[test]
        fn close_to_the_standard_library(x in -86f32..88.0) {
            prop_assert!(close(exp(x), x.into_exp(), 2.5e-7), "exp({x}) = {}", exp(x));
            let x64 = f64::from(x);
            prop_assert!(close(silu(x), x64 / (1.0 + (-x64).exp()), 5e-7));
            let tanh = (0.797_884_560_802_865_4 * (x64 + 0.044715 * x64.powi(3))).tanh();
            // The tanh form cancels for negative x, in f64 too.
            prop_assert!((f64::from(gelu_tanh(x)) - 0.5 * x64 * (1.0 + tanh)).abs() <= 2e-6 * x64.abs().max(0.1));
        }

        #[test]
        #[cfg(target_arch = "x86_64")]
        fn lanes_equal_the_scalar_form(x in prop::array::uniform8(prop_oneof![-100f32..100.0, any::<f32>()])) {
            use std::arch::x86_64::*;
            if !is_x86_feature_detected!("avx2") || !is_x86_feature_detected!("fma") {
                return Ok(());
            }
            type Lanes = unsafe fn(__m256) -> __m256;
            type Scalar = fn(f32) -> f32;
            let pairs: [(Lanes, Scalar); 3] =
                [(avx2::exp, exp), (avx2::silu, silu), (avx2::gelu_tanh, gelu_tanh)];
            for (lanes, scalar) in pairs {
                let mut got = [0f32; 8];
                // SAFETY: the features were checked above; both arrays hold eight floats.
                unsafe { _mm256_storeu_ps(got.as_mut_ptr(), lanes(_mm256_loadu_ps(x.as_ptr()))) };
                for (got, x) in got.iter().zip(x) {
                    let want = scalar(x);
                    prop_assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "f({x}): {got} {want}");
                }
            }
        }
    }
}
