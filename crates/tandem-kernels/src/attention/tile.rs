//! One tile of attention: a few queries of one kv head against [`KV_BLOCK`] consecutive keys and values.
//!
//! Three steps, each in one fixed order of arithmetic whatever the number of queries:
//!
//! 1. [`scores`]: `s[t] = Σ_d q[d] * K[d][t]`, a chain of fused multiply-adds over d, tokens in the lanes.
//! 2. [`soften`]: scale, soft-cap, mask, and one step of the online softmax (Milakov and Gimelshein, 2018).
//! 3. [`weigh`]: `acc[d] += p[t] * V[t][d]`, a chain over the *visible* t, dimensions in the lanes.
//!
//! A slot that a query must not see (in the future, before its window, or never written) may hold any bits: its score
//! is overwritten before anybody looks at it, and its value is not read on behalf of that query.
//!
//! `scores` and `weigh` hold a block of R queries × N vectors in registers: an operand is loaded once for R queries,
//! and there are enough independent chains to fill two multiply-add units. R and N do not change any bit.

use std::ops::Range;

use crate::kv::{Element, KV_BLOCK};
use crate::lanes::{LANES, Lanes};

/// The scores or probabilities of one query against the tokens of a tile.
pub(super) type Line = [f32; KV_BLOCK];

/// The most queries that are held in registers together.
const GROUP: usize = 6;

/// `0..rows` in as few groups of at most [`GROUP`] as possible, nearly equal.
fn groups(rows: usize) -> impl Iterator<Item = Range<usize>> {
    let count = rows.div_ceil(GROUP);
    (0..count).map(move |i| crate::team::share(rows, count, i))
}

/// Calls `$kernel::<L, E, R, N>` with R the length of a group.
macro_rules! for_group {
    ($lanes:expr, $rows:expr, $kernel:ident, $args:tt) => {
        match $rows {
            1 => for_group!(@ $lanes, $kernel, 1, 4, $args),
            2 => for_group!(@ $lanes, $kernel, 2, 4, $args),
            3 => for_group!(@ $lanes, $kernel, 3, 2, $args),
            4 => for_group!(@ $lanes, $kernel, 4, 2, $args),
            5 => for_group!(@ $lanes, $kernel, 5, 2, $args),
            _ => for_group!(@ $lanes, $kernel, 6, 2, $args),
        }
    };
    (@ $lanes:expr, $kernel:ident, $r:literal, $n:literal, ($($arg:expr),*)) => {
        $lanes.vectorize(#[inline(always)] || $kernel::<L, E, $r, $n>($lanes, $($arg),*))
    };
}

/// Writes the scores of each query of `q` (rows × dimensions) against all keys of a tile, unscaled.
pub(super) fn scores<L: Lanes, E: Element>(lanes: L, q: &[f32], keys: &[[E; KV_BLOCK]], out: &mut [Line]) {
    let dim = keys.len();
    for group in groups(out.len()) {
        let q = &q[group.start * dim..group.end * dim];
        let out = &mut out[group];
        for_group!(lanes, out.len(), scores_of, (q, keys, out));
    }
}

#[inline(always)]
fn scores_of<L: Lanes, E: Element, const R: usize, const N: usize>(
    lanes: L,
    q: &[f32],
    keys: &[[E; KV_BLOCK]],
    out: &mut [Line],
) {
    let dim = keys.len();
    let q: [&[f32]; R] = std::array::from_fn(|r| &q[r * dim..][..dim]);
    for first in (0..KV_BLOCK / LANES).step_by(N) {
        let mut sums = [[lanes.splat(0.0); N]; R];
        for (d, line) in keys.iter().enumerate() {
            let (line, _) = line.as_chunks::<LANES>();
            for j in 0..N {
                let k = E::load(lanes, &line[first + j]);
                for r in 0..R {
                    sums[r][j] = lanes.fma(lanes.splat(q[r][d]), k, sums[r][j]);
                }
            }
        }
        for (sums, out) in sums.iter().zip(out.iter_mut()) {
            let (out, _) = out.as_chunks_mut::<LANES>();
            for (sum, out) in sums.iter().zip(&mut out[first..]) {
                lanes.store(*sum, out);
            }
        }
    }
}

/// Adds the values of `tokens`, weighted, to each row of `acc` (rows × `dim`).
pub(super) fn weigh<L: Lanes, E: Element>(
    lanes: L,
    weights: &[Line],
    values: &[E],
    dim: usize,
    tokens: Range<usize>,
    acc: &mut [f32],
) {
    for group in groups(weights.len()) {
        let acc = &mut acc[group.start * dim..group.end * dim];
        let weights = &weights[group];
        for_group!(lanes, weights.len(), weigh_of, (weights, values, dim, tokens.clone(), acc));
    }
}

#[inline(always)]
fn weigh_of<L: Lanes, E: Element, const R: usize, const N: usize>(
    lanes: L,
    weights: &[Line],
    values: &[E],
    dim: usize,
    tokens: Range<usize>,
    acc: &mut [f32],
) {
    let (vectors, whole) = (dim / LANES, dim / LANES / N * N);
    for first in (0..whole).step_by(N) {
        strip::<L, E, R, N>(lanes, weights, values, vectors, first, tokens.clone(), acc);
    }
    for first in whole..vectors {
        strip::<L, E, R, 1>(lanes, weights, values, vectors, first, tokens.clone(), acc);
    }
}

/// N vectors of dimensions from the `first`-th on.
#[inline(always)]
fn strip<L: Lanes, E: Element, const R: usize, const N: usize>(
    lanes: L,
    weights: &[Line],
    values: &[E],
    vectors: usize,
    first: usize,
    tokens: Range<usize>,
    acc: &mut [f32],
) {
    assert!(tokens.end <= KV_BLOCK);
    let weights: [&Line; R] = std::array::from_fn(|r| &weights[r]);
    let (values, _) = values.as_chunks::<LANES>();
    let (acc, _) = acc.as_chunks_mut::<LANES>();
    let mut sums = [[lanes.splat(0.0); N]; R];
    for r in 0..R {
        for j in 0..N {
            sums[r][j] = lanes.load(&acc[r * vectors + first + j]);
        }
    }
    for t in tokens {
        let row = &values[t * vectors + first..][..N];
        for j in 0..N {
            let v = E::load(lanes, &row[j]);
            for r in 0..R {
                sums[r][j] = lanes.fma(lanes.splat(weights[r][t]), v, sums[r][j]);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (j, sum) in sums.iter().enumerate() {
            lanes.store(*sum, &mut acc[r * vectors + first + j]);
        }
    }
}

/// What turns a dot product into the score that the softmax sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scoring {
    pub scale: f32,
    pub softcap: Option<f32>,
}

/// The softmax of one query so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Softmax {
    /// The greatest score.
    pub max: f32,
    /// Σ exp(score - max).
    pub sum: f32,
}

impl Softmax {
    /// Of no token at all.
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// Turns the scores of a tile into weights `exp(score - max)`, 0 outside `visible`, which is not empty. Returns the
/// factor that brings what was accumulated under the old maximum under the new one, if it changed.
#[inline(always)]
pub(super) fn soften<L: Lanes>(
    lanes: L,
    scoring: Scoring,
    line: &mut Line,
    visible: Range<usize>,
    softmax: &mut Softmax,
) -> Option<f32> {
    let (vectors, _) = line.as_chunks_mut::<LANES>();
    let scale = lanes.splat(scoring.scale);
    for vector in vectors.iter_mut() {
        lanes.store(lanes.mul(lanes.load(vector), scale), vector);
    }
    if let Some(cap) = scoring.softcap {
        for vector in vectors.iter_mut() {
            lanes.store(softcap(lanes, lanes.load(vector), cap), vector);
        }
    }
    line[..visible.start].fill(f32::NEG_INFINITY);
    line[visible.end..].fill(f32::NEG_INFINITY);

    let (vectors, _) = line.as_chunks_mut::<LANES>();
    let mut max = lanes.splat(softmax.max);
    for vector in vectors.iter() {
        max = lanes.max(lanes.load(vector), max);
    }
    let max = lanes.greatest(max);
    let factor = (max != softmax.max).then(|| exp(lanes, softmax.max - max));

    let mut sum = lanes.splat(0.0);
    let shift = lanes.splat(max);
    for vector in vectors.iter_mut() {
        let weight = lanes.exp(lanes.sub(lanes.load(vector), shift));
        lanes.store(weight, vector);
        sum = lanes.add(sum, weight);
    }
    *softmax = Softmax { max, sum: softmax.sum * factor.unwrap_or(1.0) + lanes.sum(sum) };
    factor
}

/// cap * tanh(x / cap), as cap - 2 cap / (exp(2 x / cap) + 1).
#[inline(always)]
fn softcap<L: Lanes>(lanes: L, x: L::V, cap: f32) -> L::V {
    let e = lanes.exp(lanes.mul(x, lanes.splat(2.0 / cap)));
    lanes.sub(lanes.splat(cap), lanes.div(lanes.splat(2.0 * cap), lanes.add(e, lanes.splat(1.0))))
}

/// e^x, as the lanes compute it.
#[inline(always)]
pub(super) fn exp<L: Lanes>(lanes: L, x: f32) -> f32 {
    lanes.to_array(lanes.exp(lanes.splat(x)))[0]
}

/// Multiplies a row by a number.
#[inline(always)]
pub(super) fn rescale<L: Lanes>(lanes: L, row: &mut [f32], factor: f32) {
    let factor = lanes.splat(factor);
    for x in row.as_chunks_mut::<LANES>().0 {
        lanes.store(lanes.mul(lanes.load(x), factor), x);
    }
}

/// Adds the softmax and weighted sum `b` of later tokens to those of earlier ones.
#[inline(always)]
pub(super) fn merge<L: Lanes>(lanes: L, a: &mut Softmax, a_row: &mut [f32], b: &Softmax, b_row: &[f32]) {
    let max = if b.max > a.max { b.max } else { a.max };
    let (from_a, from_b) = (exp(lanes, a.max - max), exp(lanes, b.max - max));
    *a = Softmax { max, sum: b.sum.mul_add(from_b, a.sum * from_a) };
    let (from_a, from_b) = (lanes.splat(from_a), lanes.splat(from_b));
    for (a, b) in a_row.as_chunks_mut::<LANES>().0.iter_mut().zip(b_row.as_chunks::<LANES>().0) {
        lanes.store(lanes.fma(lanes.load(b), from_b, lanes.mul(lanes.load(a), from_a)), a);
    }
}

/// Asks for cache lines that will be read soon.
pub(super) fn prefetch<E: Element>(data: &[E]) {
    for line in data.chunks(64 / size_of::<E>()) {
        // SAFETY: a hint, of an address that is valid.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.as_ptr().cast()) };
    }
}
