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
            let mut k = [lanes.splat(0.0); N];
            for j in 0..N {
                k[j] = E::load(lanes, &line[first + j]);
            }
            for r in 0..R {
                let q = lanes.splat(q[r][d]);
                for j in 0..N {
                    sums[r][j] = lanes.fma(q, k[j], sums[r][j]);
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
        let mut v = [lanes.splat(0.0); N];
        for j in 0..N {
            v[j] = E::load(lanes, &row[j]);
        }
        for r in 0..R {
            let weight = lanes.splat(weights[r][t]);
            for j in 0..N {
                sums[r][j] = lanes.fma(weight, v[j], sums[r][j]);
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
    /// Σ exp(score - max), over the tokens of each lane.
    pub sums: [f32; LANES],
}

impl Softmax {
    /// Of no token at all.
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sums: [0.0; LANES] };
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
    let mut greatest = lanes.splat(softmax.max);
    for vector in vectors.iter() {
        greatest = lanes.max(lanes.load(vector), greatest);
    }
    let greatest = lanes.greatest(greatest);
    let mut factor = None;
    if greatest != softmax.max {
        let change = exp(lanes, softmax.max - greatest);
        softmax.max = greatest;
        rescale(lanes, &mut softmax.sums, change);
        factor = Some(change);
    }

    let mut sums = lanes.load(&softmax.sums);
    let shift = lanes.splat(greatest);
    for vector in vectors.iter_mut() {
        let weight = lanes.exp(lanes.sub(lanes.load(vector), shift));
        lanes.store(weight, vector);
        sums = lanes.add(sums, weight);
    }
    lanes.store(sums, &mut softmax.sums);
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
    let (from_a, from_b) = (lanes.splat(from_a), lanes.splat(from_b));
    let add = |a: &mut [f32; LANES], b: &[f32; LANES]| {
        lanes.store(lanes.fma(lanes.load(b), from_b, lanes.mul(lanes.load(a), from_a)), a);
    };
    a.max = max;
    add(&mut a.sums, &b.sums);
    for (a, b) in a_row.as_chunks_mut::<LANES>().0.iter_mut().zip(b_row.as_chunks::<LANES>().0) {
        add(a, b);
    }
}
