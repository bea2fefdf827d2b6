//! One partition of attention: a few queries of one kv head against [`PARTITION`] consecutive keys and values.
//!
//! Three steps, each in one fixed order of arithmetic whatever the number of queries:
//!
//! 1. [`scores`]: `s[t] = Σ_d q[d] * K[d][t]`, a chain of fused multiply-adds over d, tokens in the lanes.
//! 2. [`soften`]: soft-cap, mask, the greatest score, and each weight `2^(s - greatest)`.
//! 3. [`weigh`]: `acc[d] += p[t] * V[t][d]`, a chain over the *visible* t, dimensions in the lanes.
//!
//! Scores are in powers of two: queries were multiplied by `log2 e`, with the scale, before they came here.
//!
//! A slot that a query must not see (in the future, before its window, or never written) may hold any bits: its score
//! is overwritten before anybody looks at it, and its value is not read on behalf of that query.
//!
//! `scores` and `weigh` hold a block of R queries × N wide vectors in registers: an operand is loaded once for R
//! queries, and there are enough independent chains to fill the multiply-add units. R and N do not change any bit.

use std::ops::Range;

use crate::kv::{Element, KV_BLOCK};
use crate::lanes::{LANES, Lanes, WIDE};

/// Tokens in a partition.
pub(super) const PARTITION: usize = BLOCKS * KV_BLOCK;

/// KV blocks in a partition.
pub(super) const BLOCKS: usize = 4;

/// The scores or weights of one query against the tokens of a partition.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Line(pub [f32; PARTITION]);

/// The values of a partition, `KV_BLOCK` rows each, or its keys; empty where nobody looks at them.
pub(super) type Parts<'a, E> = [&'a [E]; BLOCKS];

/// What is weighed.
#[derive(Clone, Copy)]
pub(super) struct Values<'a, E> {
    pub parts: Parts<'a, E>,
    /// Keys that are going to be read next.
    pub ahead: Parts<'a, E>,
    pub dim: usize,
}

/// Up to this many queries, memory is slower than arithmetic, and what comes next is asked for on the way.
const PREFETCH: usize = 4;

/// The scales of a partition's keys, or of its values.
pub(super) type Scales<'a> = [&'a [f32; KV_BLOCK]; BLOCKS];

/// `0..rows` in groups of the sizes that kernels are made for, large ones first.
fn groups<L: Lanes>(rows: usize) -> impl Iterator<Item = Range<usize>> {
    let sizes = [12, 6, 4, 3, 2, 1].into_iter().filter(|size| *size <= L::ACCUMULATORS);
    let mut first = 0;
    sizes.flat_map(move |size| {
        let count = (rows - first) / size;
        let start = first;
        first += count * size;
        (0..count).map(move |i| start + i * size..start + (i + 1) * size)
    })
}

/// Calls `$kernel::<L, E, R, N>` with R the length of a group, and N as many wide vectors as fit the registers beside it,
/// but no more than `$most` (2 or 4).
macro_rules! for_group {
    ($lanes:expr, $rows:expr, $most:literal, $kernel:ident, $args:tt) => {
        match ($rows, L::ACCUMULATORS >= 24) {
            (1, false) => for_group!(@ $lanes, $kernel, 1, 2, $args),
            (2, false) => for_group!(@ $lanes, $kernel, 2, 2, $args),
            (3, false) => for_group!(@ $lanes, $kernel, 3, 1, $args),
            (4, false) => for_group!(@ $lanes, $kernel, 4, 1, $args),
            (_, false) => for_group!(@ $lanes, $kernel, 6, 1, $args),
            (1, true) => for_group!(@ $lanes, $kernel, 1, $most, $args),
            (2, true) => for_group!(@ $lanes, $kernel, 2, $most, $args),
            (3, true) => for_group!(@ $lanes, $kernel, 3, $most, $args),
            (4, true) => for_group!(@ $lanes, $kernel, 4, $most, $args),
            (6, true) => for_group!(@ $lanes, $kernel, 6, $most, $args),
            (_, true) => for_group!(@ $lanes, $kernel, 12, 2, $args),
        }
    };
    (@ $lanes:expr, $kernel:ident, $r:literal, $n:literal, ($($arg:expr),*)) => {
        $lanes.vectorize(#[inline(always)] || $kernel::<L, E, $r, $n>($lanes, $($arg),*))
    };
}

/// Writes the scores of each query of `q` (rows × dimensions) against all keys of the `block`-th block of a partition.
/// As many values, `ahead`, are going to be read next.
pub(super) fn scores<L: Lanes, E: Element>(
    lanes: L,
    q: &[f32],
    keys: &[[E; KV_BLOCK]],
    ahead: &[E],
    block: usize,
    out: &mut [Line],
) {
    let dim = keys.len();
    for group in groups::<L>(out.len()) {
        let q = &q[group.start * dim..group.end * dim];
        let out = &mut out[group];
        for_group!(lanes, out.len(), 2, scores_of, (q, keys, ahead, block, out));
    }
}

#[inline(always)]
fn scores_of<L: Lanes, E: Element, const R: usize, const N: usize>(
    lanes: L,
    q: &[f32],
    keys: &[[E; KV_BLOCK]],
    ahead: &[E],
    block: usize,
    out: &mut [Line],
) {
    let dim = keys.len();
    let q: [&[f32]; R] = std::array::from_fn(|r| &q[r * dim..][..dim]);
    for first in (0..KV_BLOCK / WIDE).step_by(N) {
        let mut sums = [[lanes.splat_wide(0.0); N]; R];
        for (d, line) in keys.iter().enumerate() {
            if R <= PREFETCH
                && let Some(ahead) = ahead.get(d * KV_BLOCK)
            {
                lanes.prefetch(ahead);
            }
            let (line, _) = line.as_chunks::<WIDE>();
            let mut k = [lanes.splat_wide(0.0); N];
            for j in 0..N {
                k[j] = E::load_wide(lanes, &line[first + j]);
            }
            for r in 0..R {
                let q = lanes.splat_wide(q[r][d]);
                for j in 0..N {
                    sums[r][j] = lanes.fma_wide(q, k[j], sums[r][j]);
                }
            }
        }
        for (sums, out) in sums.iter().zip(out.iter_mut()) {
            let (out, _) = out.0[block * KV_BLOCK..][..KV_BLOCK].as_chunks_mut::<WIDE>();
            for (sum, out) in sums.iter().zip(&mut out[first..]) {
                lanes.store_wide(*sum, out);
            }
        }
    }
}

/// Adds the values of `tokens`, weighted, to each row of `acc` (rows × `dim`).
pub(super) fn weigh<L: Lanes, E: Element>(
    lanes: L,
    weights: &[Line],
    values: &Values<'_, E>,
    tokens: Range<usize>,
    acc: &mut [f32],
) {
    let dim = values.dim;
    for group in groups::<L>(weights.len()) {
        let acc = &mut acc[group.start * dim..group.end * dim];
        let weights = &weights[group];
        for_group!(lanes, weights.len(), 4, weigh_of, (weights, values, &tokens, acc));
    }
}

#[inline(always)]
fn weigh_of<L: Lanes, E: Element, const R: usize, const N: usize>(
    lanes: L,
    weights: &[Line],
    values: &Values<'_, E>,
    tokens: &Range<usize>,
    acc: &mut [f32],
) {
    let dim = values.dim;
    let mut first = 0;
    while first + N * WIDE <= dim {
        strip::<L, E, R, N>(lanes, weights, values, first, tokens, acc);
        first += N * WIDE;
    }
    while first + WIDE <= dim {
        strip::<L, E, R, 1>(lanes, weights, values, first, tokens, acc);
        first += WIDE;
    }
    if first < dim {
        narrow_strip::<L, E, R>(lanes, weights, values, first, tokens, acc);
    }
}

/// `tokens` block by block: the block, and the slots in it.
#[inline(always)]
fn by_block(tokens: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let Range { start, end } = *tokens;
    (start / KV_BLOCK..end.div_ceil(KV_BLOCK)).map(move |block| {
        let base = block * KV_BLOCK;
        (block, start.max(base) - base..end.min(base + KV_BLOCK) - base)
    })
}

/// N wide vectors of dimensions from `first` on.
#[inline(always)]
fn strip<L: Lanes, E: Element, const R: usize, const N: usize>(
    lanes: L,
    weights: &[Line],
    values: &Values<'_, E>,
    first: usize,
    tokens: &Range<usize>,
    acc: &mut [f32],
) {
    let Values { parts, ahead, dim } = *values;
    let mut sums = [[lanes.splat_wide(0.0); N]; R];
    for r in 0..R {
        let (acc, _) = acc[r * dim + first..][..N * WIDE].as_chunks();
        for j in 0..N {
            sums[r][j] = lanes.load_wide(&acc[j]);
        }
    }
    for (block, slots) in by_block(tokens) {
        let weights: [&[f32]; R] = std::array::from_fn(|r| &weights[r].0[block * KV_BLOCK..][slots.clone()]);
        let rows = parts[block][slots.start * dim..slots.end * dim].chunks_exact(dim);
        for (t, row) in rows.enumerate() {
            if R <= PREFETCH {
                let place = (slots.start + t) * dim + first;
                for at in (0..N * WIDE).step_by(64 / size_of::<E>()) {
                    if let Some(next) = ahead[block].get(place + at) {
                        lanes.prefetch(next);
                    }
                }
            }
            let (row, _) = row[first..][..N * WIDE].as_chunks();
            let mut v = [lanes.splat_wide(0.0); N];
            for j in 0..N {
                v[j] = E::load_wide(lanes, &row[j]);
            }
            for r in 0..R {
                let weight = lanes.splat_wide(weights[r][t]);
                for j in 0..N {
                    sums[r][j] = lanes.fma_wide(weight, v[j], sums[r][j]);
                }
            }
        }
    }
    for r in 0..R {
        let (acc, _) = acc[r * dim + first..][..N * WIDE].as_chunks_mut();
        for j in 0..N {
            lanes.store_wide(sums[r][j], &mut acc[j]);
        }
    }
}

/// The last eight dimensions, where they do not divide into wide vectors.
#[inline(always)]
fn narrow_strip<L: Lanes, E: Element, const R: usize>(
    lanes: L,
    weights: &[Line],
    values: &Values<'_, E>,
    first: usize,
    tokens: &Range<usize>,
    acc: &mut [f32],
) {
    let dim = values.dim;
    for (weights, acc) in weights[..R].iter().zip(acc.chunks_exact_mut(dim)) {
        let (acc, _) = acc[first..].as_chunks_mut::<LANES>();
        let mut sum = lanes.load(&acc[0]);
        for (block, slots) in by_block(tokens) {
            for t in slots {
                let (row, _) = values.parts[block][t * dim + first..][..LANES].as_chunks();
                let weight = lanes.splat(weights.0[block * KV_BLOCK + t]);
                sum = lanes.fma(weight, E::load(lanes, &row[0]), sum);
            }
        }
        lanes.store(sum, &mut acc[0]);
    }
}

/// The softmax of one query over some tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Softmax {
    /// The greatest score.
    pub max: f32,
    /// Σ 2^(score - max).
    pub sum: f32,
}

impl Softmax {
    /// Of no token at all.
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// The vectors of a line in which some slots are `visible`. It depends on nothing else which ones are looked at.
fn vectors(visible: &Range<usize>) -> Range<usize> {
    visible.start / WIDE..visible.end.div_ceil(WIDE)
}

/// Turns the scores of the slots that are `visible`, of which there are some, into weights `2^(score - max)`.
#[inline(always)]
pub(super) fn soften<L: Lanes>(lanes: L, line: &mut Line, visible: &Range<usize>) -> Softmax {
    let looked_at = vectors(visible);
    line.0[looked_at.start * WIDE..visible.start].fill(f32::NEG_INFINITY);
    line.0[visible.end..looked_at.end * WIDE].fill(f32::NEG_INFINITY);
    let vectors = &mut line.0.as_chunks_mut::<WIDE>().0[looked_at];
    // The most frequent case once more, with a number of vectors that the compiler knows.
    match <&mut [_; PARTITION / WIDE]>::try_from(&mut *vectors) {
        Ok(all) => exponentiate(lanes, all),
        Err(_) => exponentiate(lanes, vectors),
    }
}

/// Scores x become `cap * tanh(x / cap)`.
#[inline(always)]
pub(super) fn cap<L: Lanes>(lanes: L, line: &mut Line, visible: &Range<usize>, cap: f32) {
    let Range { start, end } = vectors(visible);
    for vector in line.0[start * WIDE..end * WIDE].as_chunks_mut().0 {
        lanes.store(capped(lanes, lanes.load(vector), cap), vector);
    }
}

/// Multiplies scores, or weights, by the scales of the keys, or of the values.
#[inline(always)]
pub(super) fn multiply<L: Lanes>(lanes: L, line: &mut Line, visible: &Range<usize>, scales: &Scales<'_>) {
    let Range { start, end } = vectors(visible);
    for (block, slots) in by_block(&(start * WIDE..end * WIDE)) {
        let (line, _) = line.0[block * KV_BLOCK..][slots.clone()].as_chunks_mut::<WIDE>();
        let (scales, _) = scales[block][slots].as_chunks();
        for (vector, scales) in line.iter_mut().zip(scales) {
            lanes.store_wide(lanes.mul_wide(lanes.load_wide(vector), lanes.load_wide(scales)), vector);
        }
    }
}

#[inline(always)]
fn exponentiate<L: Lanes>(lanes: L, vectors: &mut [[f32; WIDE]]) -> Softmax {
    let mut greatest = lanes.splat_wide(f32::NEG_INFINITY);
    for vector in vectors.iter() {
        greatest = lanes.max_wide(lanes.load_wide(vector), greatest);
    }
    let [low, high] = lanes.halves(greatest);
    let max = lanes.greatest(lanes.max(low, high));
    let (mut sums, shift) = (lanes.splat_wide(0.0), lanes.splat_wide(max));
    for vector in vectors.iter_mut() {
        let weight = exp2_wide(lanes, lanes.sub_wide(lanes.load_wide(vector), shift));
        lanes.store_wide(weight, vector);
        sums = lanes.add_wide(sums, weight);
    }
    let [low, high] = lanes.halves(sums);
    Softmax { max, sum: lanes.sum(lanes.add(low, high)) }
}

/// Below this [`exp2`] does not fall any further.
const LOWEST: f32 = -126.0;

/// Added to a number, brings it to where floats are 1 apart, and its low bits to what an exponent needs.
const ROUND: f32 = 1.5 * (1 << 23) as f32 + 127.0;

/// `(2^r - 1) / r` for `|r| <= 1/2`, the highest power first: the least relative error of 2^r is 1.1e-7.
#[expect(clippy::approx_constant, reason = "the last is a fit, beside ln 2")]
const POLYNOMIAL: [f32; 5] = [1.326_471_4e-3, 9.671_513e-3, 5.550_734e-2, 2.402_224_2e-1, 6.931_47e-1];

/// 2^x of numbers that are not positive, `2^-126` of those below -126; NaN stays NaN.
#[inline(always)]
fn exp2_wide<L: Lanes>(lanes: L, x: L::W) -> L::W {
    let round = lanes.splat_wide(ROUND);
    let x = lanes.max_wide(lanes.splat_wide(LOWEST), x);
    let rounded = lanes.add_wide(x, round);
    let r = lanes.sub_wide(x, lanes.sub_wide(rounded, round));
    let mut p = lanes.splat_wide(POLYNOMIAL[0]);
    for c in &POLYNOMIAL[1..] {
        p = lanes.fma_wide(p, r, lanes.splat_wide(*c));
    }
    let p = lanes.fma_wide(p, r, lanes.splat_wide(1.0));
    lanes.mul_wide(p, lanes.shifted_wide(rounded))
}

/// The same of one number.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    let x = if LOWEST > x { LOWEST } else { x };
    let rounded = x + ROUND;
    let r = x - (rounded - ROUND);
    let p = POLYNOMIAL[1..].iter().fold(POLYNOMIAL[0], |p, c| p.mul_add(r, *c));
    p.mul_add(r, 1.0) * f32::from_bits(rounded.to_bits() << 23)
}

/// cap * tanh(x / cap), as cap - 2 cap / (exp(2 x / cap) + 1).
#[inline(always)]
fn capped<L: Lanes>(lanes: L, x: L::V, cap: f32) -> L::V {
    let e = lanes.exp(lanes.mul(x, lanes.splat(2.0 / cap)));
    lanes.sub(lanes.splat(cap), lanes.div(lanes.splat(2.0 * cap), lanes.add(e, lanes.splat(1.0))))
}

/// Multiplies a row by a number.
#[inline(always)]
pub(super) fn rescale<L: Lanes>(lanes: L, row: &mut [f32], factor: f32) {
    let (wide, rest) = row.as_chunks_mut::<WIDE>();
    for x in wide {
        lanes.store_wide(lanes.mul_wide(lanes.load_wide(x), lanes.splat_wide(factor)), x);
    }
    for x in rest.as_chunks_mut::<LANES>().0 {
        lanes.store(lanes.mul(lanes.load(x), lanes.splat(factor)), x);
    }
}

/// Adds the softmax and weighted sum `b` of later tokens to those of earlier ones.
#[inline(always)]
pub(super) fn merge<L: Lanes>(lanes: L, a: &mut Softmax, a_row: &mut [f32], b: &Softmax, b_row: &[f32]) {
    let max = if b.max > a.max { b.max } else { a.max };
    let (from_a, from_b) = (exp2(a.max - max), exp2(b.max - max));
    *a = Softmax { max, sum: b.sum.mul_add(from_b, a.sum * from_a) };
    let ((a_wide, a_rest), (b_wide, b_rest)) = (a_row.as_chunks_mut::<WIDE>(), b_row.as_chunks::<WIDE>());
    let (from_a_wide, from_b_wide) = (lanes.splat_wide(from_a), lanes.splat_wide(from_b));
    for (a, b) in a_wide.iter_mut().zip(b_wide) {
        let earlier = lanes.mul_wide(lanes.load_wide(a), from_a_wide);
        lanes.store_wide(lanes.fma_wide(lanes.load_wide(b), from_b_wide, earlier), a);
    }
    for (a, b) in a_rest.as_chunks_mut::<LANES>().0.iter_mut().zip(b_rest.as_chunks().0) {
        let earlier = lanes.mul(lanes.load(a), lanes.splat(from_a));
        lanes.store(lanes.fma(lanes.load(b), lanes.splat(from_b), earlier), a);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::with_lanes;
    use crate::path::Path;
    use proptest::prelude::*;

    fn exp2_on(path: Path, x: [f32; WIDE]) -> [f32; WIDE] {
        let mut out = [0.0; WIDE];
        with_lanes!(path, lanes => lanes.vectorize(
            #[inline(always)]
            || lanes.store_wide(exp2_wide(lanes, lanes.load_wide(&x)), &mut out),
        ));
        out
    }

    proptest! {
        #[test]
        fn powers_of_two_are_close_and_the_same_everywhere(x in prop::array::uniform16(-200f32..=0.0)) {
            for path in Path::supported() {
                for (x, got) in x.into_iter().zip(exp2_on(path, x)) {
                    let want = f64::from(x.max(LOWEST)).exp2();
                    prop_assert!((f64::from(got) - want).abs() <= 2.5e-7 * want, "2^{x} = {got} on {path}");
                    prop_assert_eq!(got.to_bits(), exp2(x).to_bits(), "2^{} on {}", x, path);
                }
            }
        }
    }

    #[test]
    fn powers_of_two_at_the_edges() {
        // Also a NaN whose low bits are set, which must not become part of an exponent.
        let mut x = [f32::NAN; WIDE];
        x[..4].copy_from_slice(&[0.0, -1.0, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff)]);
        for path in Path::supported() {
            let out = exp2_on(path, x);
            assert_eq!(out[..3], [1.0, 0.5, f32::MIN_POSITIVE]);
            assert!(out[3..].iter().all(|x| x.is_nan()), "{path}");
        }
        assert!(exp2(f32::NAN).is_nan());
    }
}
