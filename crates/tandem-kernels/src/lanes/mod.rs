//! Eight f32 lanes, or sixteen, so that a kernel is written once and runs on every path.
//!
//! A kernel is generic over [`Lanes`] and is instantiated once a path: with [`Scalar`], whose operations are loops over
//! the lanes, and with tokens like [`Avx2`](x86::Avx2), whose operations are instructions. The scalar twin of a kernel
//! is therefore the same source with the same lane order, and agrees with it to the bit: all operations used are
//! correctly rounded by IEEE 754 (add, multiply, fused multiply-add, division, square root, conversions), and the
//! two horizontal reductions have a fixed tree. Where a lane is an output and never a part of a sum, kernels take
//! sixteen at a time ([`Lanes::W`]): one register of AVX-512, two of AVX2, four of NEON, with the same bits.
//!
//! A token is made from a [`Path`](crate::path::Path) that proves the features, which is what makes its methods safe.
//! They must end up inside a function compiled *with* those features to become instructions, and [`Lanes::vectorize`]
//! is that function. [`with_lanes`] goes from a path to the token.

use half::f16;

use crate::math;

#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

/// Floats in a vector.
pub(crate) const LANES: usize = 8;

/// Floats in a wide vector.
pub(crate) const WIDE: usize = 2 * LANES;

/// Vector operations on eight or sixteen f32. All methods but `vectorize` must be called inside `vectorize`, or be slow.
pub(crate) trait Lanes: Copy + Send + Sync {
    /// Eight floats.
    type V: Copy;
    /// Sixteen floats.
    type W: Copy;

    /// Wide vectors that fit the registers beside each other: what a kernel may hold as accumulators.
    const ACCUMULATORS: usize;

    /// Runs `f` in a function compiled for this path; mark the closure `#[inline(always)]`.
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R;

    /// Asks for the cache line of `x`, which is going to be read, where there is an instruction for that.
    #[inline(always)]
    fn prefetch<T>(self, _: &T) {}

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

    fn load_i8(self, x: &[i8; LANES]) -> Self::V;
    fn splat_wide(self, x: f32) -> Self::W;
    fn load_wide(self, x: &[f32; WIDE]) -> Self::W;
    fn load_wide_f16(self, x: &[f16; WIDE]) -> Self::W;
    fn load_wide_i8(self, x: &[i8; WIDE]) -> Self::W;
    fn store_wide(self, w: Self::W, x: &mut [f32; WIDE]);
    /// The first and the last eight.
    fn halves(self, w: Self::W) -> [Self::V; 2];
    fn add_wide(self, a: Self::W, b: Self::W) -> Self::W;
    fn sub_wide(self, a: Self::W, b: Self::W) -> Self::W;
    fn mul_wide(self, a: Self::W, b: Self::W) -> Self::W;
    /// By the rule of `max`.
    fn max_wide(self, a: Self::W, b: Self::W) -> Self::W;
    /// The number whose bits are those of `x`, 23 places to the left: `2^n`, if the low eight bits of `x` are n + 127.
    fn shifted_wide(self, x: Self::W) -> Self::W;
    /// `a * b + c`, rounded once.
    fn fma_wide(self, a: Self::W, b: Self::W, c: Self::W) -> Self::W;

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

/// The operations of [`Lanes`] on sixteen floats by those on eight, where a register holds no more.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! wide_as_two_halves {
    () => {
        type W = [Self::V; 2];

        #[inline(always)]
        fn splat_wide(self, x: f32) -> Self::W {
            [self.splat(x); 2]
        }
        #[inline(always)]
        fn load_wide(self, x: &[f32; WIDE]) -> Self::W {
            let (halves, _) = x.as_chunks();
            [self.load(&halves[0]), self.load(&halves[1])]
        }
        #[inline(always)]
        fn load_wide_f16(self, x: &[f16; WIDE]) -> Self::W {
            let (halves, _) = x.as_chunks();
            [self.load_f16(&halves[0]), self.load_f16(&halves[1])]
        }
        #[inline(always)]
        fn load_wide_i8(self, x: &[i8; WIDE]) -> Self::W {
            let (halves, _) = x.as_chunks();
            [self.load_i8(&halves[0]), self.load_i8(&halves[1])]
        }
        #[inline(always)]
        fn store_wide(self, w: Self::W, x: &mut [f32; WIDE]) {
            let (halves, _) = x.as_chunks_mut();
            self.store(w[0], &mut halves[0]);
            self.store(w[1], &mut halves[1]);
        }
        #[inline(always)]
        fn halves(self, w: Self::W) -> [Self::V; 2] {
            w
        }
        #[inline(always)]
        fn add_wide(self, a: Self::W, b: Self::W) -> Self::W {
            [self.add(a[0], b[0]), self.add(a[1], b[1])]
        }
        #[inline(always)]
        fn sub_wide(self, a: Self::W, b: Self::W) -> Self::W {
            [self.sub(a[0], b[0]), self.sub(a[1], b[1])]
        }
        #[inline(always)]
        fn mul_wide(self, a: Self::W, b: Self::W) -> Self::W {
            [self.mul(a[0], b[0]), self.mul(a[1], b[1])]
        }
        #[inline(always)]
        fn max_wide(self, a: Self::W, b: Self::W) -> Self::W {
            [self.max(a[0], b[0]), self.max(a[1], b[1])]
        }
        #[inline(always)]
        fn shifted_wide(self, x: Self::W) -> Self::W {
            [self.shifted(x[0]), self.shifted(x[1])]
        }
        #[inline(always)]
        fn fma_wide(self, a: Self::W, b: Self::W, c: Self::W) -> Self::W {
            [self.fma(a[0], b[0], c[0]), self.fma(a[1], b[1], c[1])]
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use wide_as_two_halves;

/// Evaluates an expression with `$lanes` bound to the [`Lanes`] of a [`Path`](crate::path::Path).
#[cfg(target_arch = "x86_64")]
macro_rules! with_lanes {
    ($path:expr, $lanes:ident => $body:expr) => {{
        let path: $crate::path::Path = $path;
        if let Some($lanes) = $crate::lanes::x86::Avx512::on(path) {
            $body
        } else if let Some($lanes) = $crate::lanes::x86::Avx2::on(path) {
            $body
        } else {
            let $lanes = $crate::lanes::Scalar;
            $body
        }
    }};
}

/// Evaluates an expression with `$lanes` bound to the [`Lanes`] of a [`Path`](crate::path::Path).
#[cfg(target_arch = "aarch64")]
macro_rules! with_lanes {
    ($path:expr, $lanes:ident => $body:expr) => {{
        if let Some($lanes) = $crate::lanes::neon::Neon::on($path) {
            $body
        } else {
            let $lanes = $crate::lanes::Scalar;
            $body
        }
    }};
}

/// Evaluates an expression with `$lanes` bound to the [`Lanes`] of a [`Path`](crate::path::Path).
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
macro_rules! with_lanes {
    ($path:expr, $lanes:ident => $body:expr) => {{
        let _: $crate::path::Path = $path;
        let $lanes = $crate::lanes::Scalar;
        $body
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
    type W = [f32; WIDE];

    const ACCUMULATORS: usize = 6;

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
    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::V {
        x.map(f32::from)
    }
    #[inline(always)]
    fn splat_wide(self, x: f32) -> Self::W {
        [x; WIDE]
    }
    #[inline(always)]
    fn load_wide(self, x: &[f32; WIDE]) -> Self::W {
        *x
    }
    #[inline(always)]
    fn load_wide_f16(self, x: &[f16; WIDE]) -> Self::W {
        x.map(f16::to_f32)
    }
    #[inline(always)]
    fn load_wide_i8(self, x: &[i8; WIDE]) -> Self::W {
        x.map(f32::from)
    }
    #[inline(always)]
    fn store_wide(self, w: Self::W, x: &mut [f32; WIDE]) {
        *x = w;
    }
    #[inline(always)]
    fn fma_wide(self, a: Self::W, b: Self::W, c: Self::W) -> Self::W {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn halves(self, w: Self::W) -> [Self::V; 2] {
        let (halves, _) = w.as_chunks();
        [halves[0], halves[1]]
    }
    #[inline(always)]
    fn add_wide(self, a: Self::W, b: Self::W) -> Self::W {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub_wide(self, a: Self::W, b: Self::W) -> Self::W {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul_wide(self, a: Self::W, b: Self::W) -> Self::W {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn max_wide(self, a: Self::W, b: Self::W) -> Self::W {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn shifted_wide(self, x: Self::W) -> Self::W {
        x.map(|x| f32::from_bits(x.to_bits() << 23))
    }
}
