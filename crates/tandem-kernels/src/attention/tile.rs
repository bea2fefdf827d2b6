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
//! `scores` and `weigh` hold a block of R queries × N wide vectors in registers: an operand is loaded once for R
//! queries, and there are enough independent chains to fill the multiply-add units. R and N do not change any bit.

use std::ops::Range;

use crate::kv::{Element, KV_BLOCK};
use crate::lanes::{LANES, Lanes, WIDE};

/// The scores or probabilities of one query against the tokens of a tile.
pub(super) type Line = [f32; KV_BLOCK];

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

/// Writes the scores of each query of `q` (rows × dimensions) against all keys of a tile, unscaled.
pub(super) fn scores<L: Lanes, E: Element>(lanes: L, q: &[f32], keys: &[[E; KV_BLOCK]], out: &mut [Line]) {
    let dim = keys.len();
    for group in groups::<L>(out.len()) {
        let q = &q[group.start * dim..group.end * dim];
        let out = &mut out[group];
        for_group!(lanes, out.len(), 2, scores_of, (q, keys, out));
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
    for first in (0..KV_BLOCK / WIDE).step_by(N) {
        let mut sums = [[lanes.splat_wide(0.0); N]; R];
        for (d, line) in keys.iter().enumerate() {
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
            let (out, _) = out.as_chunks_mut::<WIDE>();
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
    values: &[E],
    dim: usize,
    tokens: Range<usize>,
    acc: &mut [f32],
) {
    for group in groups::<L>(weights.len()) {
        let acc = &mut acc[group.start * dim..group.end * dim];
        let weights = &weights[group];
        for_group!(lanes, weights.len(), 4, weigh_of, (weights, values, dim, tokens.clone(), acc));
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
    let mut first = 0;
    while first + N * WIDE <= dim {
        strip::<L, E, R, N>(lanes, weights, values, dim, first, tokens.clone(), acc);
        first += N * WIDE;
    }
    while first + WIDE <= dim {
        strip::<L, E, R, 1>(lanes, weights, values, dim, first, tokens.clone(), acc);
        first += WIDE;
    }
    if first < dim {
        narrow_strip::<L, E, R>(lanes, weights, values, dim, first, tokens, acc);
    }
}

/// N wide vectors of dimensions from `first` on.
#[inline(always)]
fn strip<L: Lanes, E: Element, const R: usize, const N: usize>(
    lanes: L,
    weights: &[Line],
    values: &[E],
    dim: usize,
    first: usize,
    tokens: Range<usize>,
    acc: &mut [f32],
) {
    assert!(tokens.end <= KV_BLOCK);
    let weights: [&Line; R] = std::array::from_fn(|r| &weights[r]);
    let mut sums = [[lanes.splat_wide(0.0); N]; R];
    for r in 0..R {
        let (acc, _) = acc[r * dim + first..][..N * WIDE].as_chunks();
        for j in 0..N {
            sums[r][j] = lanes.load_wide(&acc[j]);
        }
    }
    for t in tokens {
        let (row, _) = values[t * dim + first..][..N * WIDE].as_chunks();
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
    values: &[E],
    dim: usize,
    first: usize,
    tokens: Range<usize>,
    acc: &mut [f32],
) {
    for (weights, acc) in weights[..R].iter().zip(acc.chunks_exact_mut(dim)) {
        let (acc, _) = acc[first..].as_chunks_mut::<LANES>();
        let mut sum = lanes.load(&acc[0]);
        for t in tokens.clone() {
            let (row, _) = values[t * dim + first..][..LANES].as_chunks();
            sum = lanes.fma(lanes.splat(weights[t]), E::load(lanes, &row[0]), sum);
        }
        lanes.store(sum, &mut acc[0]);
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
    pub sums: [f32; WIDE],
}

impl Softmax {
    /// Of no token at all.
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sums: [0.0; WIDE] };
}

/// Turns the scores of a tile into weights `exp(score - max)`, 0 outside `visible`, which is not empty. Returns the
/// factor that brings what was accumulated under the old maximum under the new one, if it changed.
///
/// `scales` are those of the tile's keys and values, where they are stored with some: scores are multiplied by the first,
/// and weights, after they were summed up, by the second.
#[inline(always)]
pub(super) fn soften<L: Lanes>(
    lanes: L,
    scoring: Scoring,
    line: &mut Line,
    visible: Range<usize>,
    scales: Option<[&Line; 2]>,
    softmax: &mut Softmax,
) -> Option<f32> {
    let (vectors, _) = line.as_chunks_mut::<WIDE>();
    let scale = lanes.splat_wide(scoring.scale);
    if let Some([keys, _]) = scales {
        for (vector, keys) in vectors.iter_mut().zip(keys.as_chunks().0) {
            lanes.store_wide(lanes.mul_wide(lanes.load_wide(vector), lanes.load_wide(keys)), vector);
        }
    }
    for vector in vectors.iter_mut() {
        lanes.store_wide(lanes.mul_wide(lanes.load_wide(vector), scale), vector);
    }
    if let Some(cap) = scoring.softcap {
        for vector in line.as_chunks_mut().0 {
            lanes.store(softcap(lanes, lanes.load(vector), cap), vector);
        }
    }
    line[..visible.start].fill(f32::NEG_INFINITY);
    line[visible.end..].fill(f32::NEG_INFINITY);

    let (vectors, _) = line.as_chunks_mut::<WIDE>();
    let mut greatest = lanes.splat_wide(softmax.max);
    for vector in vectors.iter() {
        greatest = lanes.max_wide(lanes.load_wide(vector), greatest);
    }
    let [low, high] = lanes.halves(greatest);
    let greatest = lanes.greatest(lanes.max(low, high));
    let mut factor = None;
    if greatest != softmax.max {
        let change = exp(lanes, softmax.max - greatest);
        softmax.max = greatest;
        rescale(lanes, &mut softmax.sums, change);
        factor = Some(change);
    }

    let mut sums = lanes.load_wide(&softmax.sums);
    let shift = lanes.splat_wide(greatest);
    for vector in vectors.iter_mut() {
        let weight = lanes.exp_wide(lanes.sub_wide(lanes.load_wide(vector), shift));
        lanes.store_wide(weight, vector);
        sums = lanes.add_wide(sums, weight);
    }
    lanes.store_wide(sums, &mut softmax.sums);
    if let Some([_, values]) = scales {
        for (vector, values) in vectors.iter_mut().zip(values.as_chunks().0) {
            lanes.store_wide(lanes.mul_wide(lanes.load_wide(vector), lanes.load_wide(values)), vector);
        }
    }
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
    let add = |a: &mut [f32], b: &[f32]| {
        for (a, b) in a.as_chunks_mut().0.iter_mut().zip(b.as_chunks().0) {
            lanes.store(lanes.fma(lanes.load(b), from_b, lanes.mul(lanes.load(a), from_a)), a);
        }
    };
    a.max = max;
    add(&mut a.sums, &b.sums);
    add(a_row, b_row);
}

/// The sum of a softmax's weights.
#[inline(always)]
pub(super) fn total<L: Lanes>(lanes: L, softmax: &Softmax) -> f32 {
    let [low, high] = lanes.halves(lanes.load_wide(&softmax.sums));
    lanes.sum(lanes.add(low, high))
}
