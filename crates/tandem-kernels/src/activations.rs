//! The rows that a matrix product reads: f32 values, and beside them 8-bit blocks.
//!
//! Products with quantized weights run on integers: each block of 32 values of a row is rounded once, to
//! `d * q` with `d = max|x| / 127` and `q` in -127..=127, and every matrix that reads the row shares it. The exact mode
//! of an engine simply does not quantize; the products then use the f32 values.

#[cfg(target_arch = "aarch64")]
mod neon;

use std::ops::Range;

use tandem_model::format::BLOCK;

use crate::path::{Isa, Path};
use crate::team::{SharedMut, Team};

/// Blocks whose largest value is smaller than this are zero: `127 / max` would overflow.
const TINY: f32 = 1e-36;

/// A matrix of activations, row-major: one row a token.
#[derive(Debug, Default, Clone)]
pub struct Activations {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
    quantized: bool,
    q: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    totals: Vec<i32>,
}

/// Quantized rows, as a kernel reads them. Every slice covers the same rows.
#[derive(Clone, Copy)]
pub(crate) struct IntRows<'a> {
    /// Columns of a row, a multiple of [`BLOCK`].
    pub cols: usize,
    /// `[rows][cols]`
    pub q: &'a [i8],
    /// `d`, `[rows][cols / BLOCK]`
    pub scales: &'a [f32],
    /// `d * sum(q)`, `[rows][cols / BLOCK]`
    pub sums: &'a [f32],
    /// `sum(q)`, `[rows][cols / BLOCK]`
    pub totals: &'a [i32],
}

impl<'a> IntRows<'a> {
    /// All but the first `rows`.
    ///
    /// # Panics
    /// If there are not so many.
    #[cfg(target_arch = "x86_64")]
    pub fn skip(&self, rows: usize) -> IntRows<'a> {
        let blocks = rows * (self.cols / BLOCK);
        IntRows {
            cols: self.cols,
            q: &self.q[rows * self.cols..],
            scales: &self.scales[blocks..],
            sums: &self.sums[blocks..],
            totals: &self.totals[blocks..],
        }
    }

    /// Checks that there are at least `rows`.
    ///
    /// # Panics
    /// If there are not.
    pub fn check(&self, rows: usize) {
        let blocks = self.cols / BLOCK;
        let per_block = [self.scales.len(), self.sums.len(), self.totals.len()];
        assert!(
            self.q.len() >= rows * self.cols && per_block.iter().all(|&len| len >= rows * blocks),
            "rows"
        );
    }
}

/// f32 rows, as a kernel reads them.
#[derive(Clone, Copy)]
pub(crate) struct FloatRows<'a> {
    pub cols: usize,
    /// `[rows][cols]`
    pub values: &'a [f32],
}

impl Activations {
    /// No rows yet, of `cols` values each.
    pub fn new(cols: usize) -> Activations {
        Activations { cols, ..Activations::default() }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Sets the number of rows, keeping memory that is there. Values of new rows are unspecified (old or 0); the
    /// 8-bit form is dropped.
    pub fn resize(&mut self, rows: usize) {
        self.rows = rows;
        self.quantized = false;
        if self.values.len() < rows * self.cols {
            self.values.resize(rows * self.cols, 0.0);
        }
    }

    /// The f32 values, `[rows][cols]`.
    pub fn values(&self) -> &[f32] {
        &self.values[..self.rows * self.cols]
    }

    /// The f32 values, to be changed; this drops the 8-bit form.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.quantized = false;
        &mut self.values[..self.rows * self.cols]
    }

    /// Row `row`, `[cols]`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values()[row * self.cols..][..self.cols]
    }

    /// Row `row`, to be changed; this drops the 8-bit form.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        let cols = self.cols;
        &mut self.values_mut()[row * cols..][..cols]
    }

    /// Whether the 8-bit form is there, so that products with quantized weights use it.
    pub fn is_quantized(&self) -> bool {
        self.quantized
    }

    /// Bytes of memory held.
    pub fn bytes(&self) -> usize {
        let blocks = self.scales.capacity() + self.sums.capacity() + self.totals.capacity();
        4 * (self.values.capacity() + blocks) + self.q.capacity()
    }

    /// Makes the 8-bit form of every row. Rows that do not divide into blocks of 32 stay f32 only, as no quantized
    /// matrix can read them.
    pub fn quantize(&mut self, team: &Team) {
        self.fill_rows(team, true, |_, _| ());
    }

    /// Runs `f(row, values)` for every row, spread over the team, and quantizes each row while it is in cache if
    /// `quantize` is set (see [`Activations::quantize`]). The result does not depend on the number of threads.
    pub fn fill_rows<F: Fn(usize, &mut [f32]) + Sync>(&mut self, team: &Team, quantize: bool, f: F) {
        let (rows, path) = (self.rows, team.path());
        let writer = self.writer(quantize);
        team.deal(rows, rows.div_ceil(team.threads() * 4), |range| {
            for row in range {
                // SAFETY: each row is dealt to one thread.
                unsafe { writer.write(path, row, 0..writer.cols, |values| f(row, values)) };
            }
        });
    }

    /// Access for threads that write disjoint parts. The caller must see to it that all rows get written.
    pub(crate) fn writer(&mut self, quantize: bool) -> Writer<'_> {
        self.quantized = quantize && self.cols.is_multiple_of(BLOCK);
        let (len, blocks) =
            if self.quantized { (self.rows * self.cols, self.rows * self.cols / BLOCK) } else { (0, 0) };
        if self.q.len() < len {
            self.q.resize(len, 0);
            self.scales.resize(blocks, 0.0);
            self.sums.resize(blocks, 0.0);
            self.totals.resize(blocks, 0);
        }
        Writer {
            cols: self.cols,
            quantize: self.quantized,
            values: SharedMut::new(&mut self.values[..self.rows * self.cols]),
            q: SharedMut::new(&mut self.q[..len]),
            scales: SharedMut::new(&mut self.scales[..blocks]),
            sums: SharedMut::new(&mut self.sums[..blocks]),
            totals: SharedMut::new(&mut self.totals[..blocks]),
        }
    }

    /// The 8-bit form of some rows; `None` if it is not there.
    pub(crate) fn int_rows(&self, rows: Range<usize>) -> Option<IntRows<'_>> {
        let blocks = self.cols / BLOCK;
        let blocks = rows.start * blocks..rows.end * blocks;
        self.quantized.then(|| IntRows {
            cols: self.cols,
            q: &self.q[rows.start * self.cols..rows.end * self.cols],
            scales: &self.scales[blocks.clone()],
            sums: &self.sums[blocks.clone()],
            totals: &self.totals[blocks],
        })
    }

    /// The f32 form of some rows.
    pub(crate) fn float_rows(&self, rows: Range<usize>) -> FloatRows<'_> {
        FloatRows { cols: self.cols, values: &self.values()[rows.start * self.cols..rows.end * self.cols] }
    }
}

/// Writes parts of the rows of an [`Activations`] from several threads.
pub(crate) struct Writer<'a> {
    cols: usize,
    quantize: bool,
    values: SharedMut<'a, f32>,
    q: SharedMut<'a, i8>,
    scales: SharedMut<'a, f32>,
    sums: SharedMut<'a, f32>,
    totals: SharedMut<'a, i32>,
}

impl Writer<'_> {
    /// Lets `f` write the values `cols` of row `row`, then quantizes them if that was asked for.
    ///
    /// # Panics
    /// If `cols` is not inside a row, or is to be quantized and not made of whole blocks.
    ///
    /// # Safety
    /// No other thread may write an overlapping part at the same time.
    pub(crate) unsafe fn write(
        &self,
        path: Path,
        row: usize,
        cols: Range<usize>,
        f: impl FnOnce(&mut [f32]),
    ) {
        assert!(cols.end <= self.cols, "columns {cols:?} of {}", self.cols);
        let part = row * self.cols + cols.start..row * self.cols + cols.end;
        // SAFETY: the caller keeps parts disjoint.
        let values = unsafe { self.values.slice(part.clone()) };
        f(values);
        if self.quantize {
            assert!(cols.start.is_multiple_of(BLOCK) && cols.end.is_multiple_of(BLOCK), "whole blocks");
            let blocks = part.start / BLOCK..part.end / BLOCK;
            // SAFETY: disjoint parts of whole blocks have disjoint blocks.
            unsafe {
                quantize_row(
                    path,
                    values,
                    self.q.slice(part),
                    self.scales.slice(blocks.clone()),
                    self.sums.slice(blocks.clone()),
                    self.totals.slice(blocks),
                );
            }
        }
    }
}

/// Rounds whole blocks of values to 8 bits: `x ~ scale * q`, `sum = scale * sum(q)`, `total = sum(q)`.
///
/// Ties go to even. A block with a NaN or an infinity in it gets a scale that is NaN or infinite.
///
/// # Panics
/// If the lengths do not fit each other.
pub(crate) fn quantize_row(
    path: Path,
    values: &[f32],
    q: &mut [i8],
    scales: &mut [f32],
    sums: &mut [f32],
    totals: &mut [i32],
) {
    let (values, rest) = values.as_chunks::<BLOCK>();
    let (q, q_rest) = q.as_chunks_mut::<BLOCK>();
    assert!(rest.is_empty() && q_rest.is_empty() && values.len() == q.len(), "whole blocks");
    assert!([scales.len(), sums.len(), totals.len()] == [q.len(); 3], "one scale and sum a block");
    for (i, (values, q)) in values.iter().zip(q).enumerate() {
        let (scale, total) = match path.isa() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: such a path exists only where the CPU has these features.
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { quantize_block_avx2(values, q) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::quantize_block(values, q),
            _ => quantize_block(values, q),
        };
        scales[i] = scale;
        totals[i] = total;
        sums[i] = scale * total as f32;
    }
}

/// The scale of some values that are rounded to -127..=127 together, and its inverse. With a NaN or an infinity among
/// them, the scale is NaN or infinite.
#[inline]
pub(crate) fn scale_of(values: &[f32]) -> (f32, f32) {
    // As integers, magnitudes compare as they do as floats, and a NaN is larger than all.
    scale_of_bits(values.iter().map(|v| v.abs().to_bits().cast_signed()).fold(0, i32::max))
}

/// [`scale_of`], from the bits of the largest magnitude.
#[inline]
fn scale_of_bits(bits: i32) -> (f32, f32) {
    let largest = f32::from_bits(bits.cast_unsigned());
    if largest < TINY { (0.0, 0.0) } else { (largest / 127.0, 127.0 / largest) }
}

fn quantize_block(values: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> (f32, i32) {
    let (scale, inverse) = scale_of(values);
    let mut total = 0;
    for (q, v) in q.iter_mut().zip(values) {
        *q = (v * inverse).round_ties_even() as i8;
        total += i32::from(*q);
    }
    (scale, total)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn quantize_block_avx2(values: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> (f32, i32) {
    use std::arch::x86_64::*;
    // SAFETY: part `i` of the four is eight floats.
    let v: [__m256; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(values.as_ptr().add(8 * i)) });
    let magnitude = _mm256_set1_epi32(i32::MAX);
    let m = v.map(|v| _mm256_and_si256(_mm256_castps_si256(v), magnitude));
    let m = _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3]));
    let m = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m));
    let (scale, inverse) = scale_of_bits(_mm_cvtsi128_si32(m));

    let inverse = _mm256_set1_ps(inverse);
    let i = v.map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse)));
    let bytes = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
    // The packs worked within 128-bit halves.
    let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: `q` is 32 bytes.
    unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), bytes) };

    let t = _mm256_add_epi32(_mm256_add_epi32(i[0], i[1]), _mm256_add_epi32(i[2], i[3]));
    let t = _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256::<1>(t));
    let t = _mm_add_epi32(t, _mm_shuffle_epi32::<0b01_00_11_10>(t));
    let t = _mm_add_epi32(t, _mm_shuffle_epi32::<0b10_11_00_01>(t));
    (scale, _mm_cvtsi128_si32(t))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn quantized(path: Path, threads: usize, cols: usize, values: &[f32]) -> Activations {
        let team = Team::with_path(threads, path).unwrap();
        let mut x = Activations::new(cols);
        x.resize(values.len() / cols);
        x.fill_rows(&team, true, |row, out| out.copy_from_slice(&values[row * cols..][..cols]));
        x
    }

    #[test]
    fn edges() {
        let mut values = vec![0.0; 6 * BLOCK];
        values[BLOCK] = 1e-40;
        values[2 * BLOCK] = f32::NAN;
        values[3 * BLOCK] = f32::INFINITY;
        values[4 * BLOCK..5 * BLOCK].fill(-3.0);
        values[5 * BLOCK..].copy_from_slice(&std::array::from_fn::<f32, BLOCK, _>(|i| i as f32 + 0.5));
        values[6 * BLOCK - 1] = 127.0;
        for path in Path::supported() {
            let x = quantized(path, 1, 6 * BLOCK, &values);
            assert_eq!(x.scales[..2], [0.0, 0.0]);
            assert!(x.scales[2].is_nan());
            assert_eq!(x.scales[3], f32::INFINITY);
            assert_eq!((x.q[4 * BLOCK], x.totals[4]), (-127, -127 * 32));
            // Ties to even.
            assert_eq!(x.q[5 * BLOCK..][..4], [0, 2, 2, 4]);
        }
    }

    #[test]
    fn rows_that_are_not_whole_blocks_stay_f32() {
        assert!(!quantized(Path::SCALAR, 1, 31, &[1.0; 31]).is_quantized());
    }

    #[test]
    fn changing_values_drops_the_8_bit_form() {
        let mut x = quantized(Path::SCALAR, 1, 32, &[1.0; 32]);
        assert!(x.is_quantized());
        x.row_mut(0)[3] = 2.0;
        assert!(!x.is_quantized());
    }

    proptest! {
        #[test]
        fn paths_and_threads_agree_and_stay_close(
            values in prop::collection::vec(-8f32..8.0, 3 * 64..=3 * 64),
            power in -20i32..20,
        ) {
            let values: Vec<_> = values.iter().map(|v| v * 2f32.powi(power)).collect();
            let reference = quantized(Path::SCALAR, 1, 64, &values);
            for (block, values) in values.chunks(BLOCK).enumerate() {
                let scale = reference.scales[block];
                for (q, v) in reference.q[block * BLOCK..].iter().zip(values) {
                    prop_assert!((f32::from(*q) * scale - v).abs() <= scale * 0.5001);
                }
            }
            for path in Path::supported() {
                for threads in [1, 3] {
                    let x = quantized(path, threads, 64, &values);
                    prop_assert_eq!(&x.q, &reference.q);
                    prop_assert_eq!(&x.scales, &reference.scales);
                    prop_assert_eq!(&x.sums, &reference.sums);
                    prop_assert_eq!(&x.totals, &reference.totals);
                }
            }
        }
    }
}
