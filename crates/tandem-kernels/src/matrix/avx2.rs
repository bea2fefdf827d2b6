//! AVX2 kernels: the steps of [`scalar`](super::scalar) on eight lanes, with several rows of activations in registers.
//!
//! Every function here needs AVX2, FMA and F16C. Pointers are read without checks inside the tiles; [`int`] and
//! [`float`] check all lengths first.

use std::arch::x86_64::*;
use std::ops::Range;

use tandem_model::format::{BLOCK, Format};

use super::scalar::{CHUNK, each_panel};
use super::{PANEL, head_bytes, packed_block_bytes};
use crate::activations::{FloatRows, IntRows};

/// As [`scalar::int`](super::scalar::int).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn int(format: Format, panel: &[u8], x: &IntRows<'_>, out: &mut [[f32; PANEL]]) {
    let blocks = x.cols / BLOCK;
    assert_eq!(panel.len(), blocks * packed_block_bytes(format), "panel");
    assert!(x.q.len() >= out.len() * x.cols, "rows");
    assert!(
        [x.scales.len(), x.sums.len(), x.totals.len()].iter().all(|&len| len >= out.len() * blocks),
        "rows"
    );
    let (tiles, rest) = out.as_chunks_mut::<4>();
    let done = 4 * tiles.len();
    // SAFETY: the lengths were checked for all rows of `out`.
    unsafe {
        for (i, tile) in tiles.iter_mut().enumerate() {
            int_rows(format, panel, x, 4 * i, tile);
        }
        if let Ok(tile) = <&mut [_; 3]>::try_from(&mut *rest) {
            int_rows(format, panel, x, done, tile);
        } else if let Ok(tile) = <&mut [_; 2]>::try_from(&mut *rest) {
            int_rows(format, panel, x, done, tile);
        } else if let Ok(tile) = <&mut [_; 1]>::try_from(&mut *rest) {
            int_rows(format, panel, x, done, tile);
        }
    }
}

/// # Safety
/// `panel` must be the panel of `x.cols` columns of a quantized `format`, and `x` hold the rows `first..first + T`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn int_rows<const T: usize>(
    format: Format,
    panel: &[u8],
    x: &IntRows<'_>,
    first: usize,
    out: &mut [[f32; PANEL]; T],
) {
    // With one or two rows both halves of the panel fit the registers, and memory is read once, in order.
    // SAFETY: as promised by the caller; `half` is 0 or 1.
    unsafe {
        match (format, T) {
            (Format::Q8_0, 1) => int8_tile::<T, 2>(panel, x, first, 0, out),
            (Format::Q4_0, 1 | 2) => int4_tile::<T, 2, false>(panel, x, first, 0, out),
            (_, 1 | 2) if format == Format::Q4_1 => int4_tile::<T, 2, true>(panel, x, first, 0, out),
            _ => {
                for half in 0..2 {
                    match format {
                        Format::Q4_0 => int4_tile::<T, 1, false>(panel, x, first, half, out),
                        Format::Q4_1 => int4_tile::<T, 1, true>(panel, x, first, half, out),
                        _ => int8_tile::<T, 1>(panel, x, first, half, out),
                    }
                }
            }
        }
    }
}

/// `T` rows times `H` halves (eight lanes each) of a panel of 4-bit weights.
///
/// A pair product of `maddubs` is at most 2 * 15 * 127, so the eight of a block sum in 16 bits.
///
/// # Safety
/// As [`int_rows`], and `first_half + H <= 2`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn int4_tile<const T: usize, const H: usize, const AFFINE: bool>(
    panel: &[u8],
    x: &IntRows<'_>,
    first: usize,
    first_half: usize,
    out: &mut [[f32; PANEL]; T],
) {
    let format = if AFFINE { Format::Q4_1 } else { Format::Q4_0 };
    let (head, size) = (const { 2 * PANEL } * (1 + usize::from(AFFINE)), packed_block_bytes(format));
    let blocks = x.cols / BLOCK;
    let nibble = _mm256_set1_epi8(15);
    let ones = _mm256_set1_epi16(1);
    let mut acc = [[_mm256_setzero_ps(); H]; T];
    // SAFETY: block `b` of the panel is `size` bytes and read up to its end; row `first + t` has `cols` values in `q`
    // and `blocks` scales and sums.
    unsafe {
        let rows: [*const i8; T] = std::array::from_fn(|t| x.q.as_ptr().add((first + t) * x.cols));
        for b in 0..blocks {
            let block = panel.as_ptr().add(b * size);
            let values = block.add(head).cast::<__m256i>();
            let mut dot = [[_mm256_setzero_si256(); H]; T];
            for pair in 0..4 {
                let bytes: [__m256i; H] =
                    std::array::from_fn(|h| _mm256_load_si256(values.add(2 * pair + first_half + h)));
                let low = bytes.map(|bytes| _mm256_and_si256(bytes, nibble));
                let high = bytes.map(|bytes| _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble));
                for t in 0..T {
                    let q = rows[t].add(b * BLOCK + 4 * pair).cast::<i32>();
                    let (q_low, q_high) =
                        (_mm256_set1_epi32(q.read_unaligned()), _mm256_set1_epi32(q.add(4).read_unaligned()));
                    for h in 0..H {
                        dot[t][h] = _mm256_add_epi16(dot[t][h], _mm256_maddubs_epi16(low[h], q_low));
                        dot[t][h] = _mm256_add_epi16(dot[t][h], _mm256_maddubs_epi16(high[h], q_high));
                    }
                }
            }
            let scales: [__m256; H] = std::array::from_fn(|h| halves(block, first_half + h));
            let minima: [__m256; H] =
                std::array::from_fn(|h| if AFFINE { halves(block, 2 + first_half + h) } else { scales[h] });
            for t in 0..T {
                let i = (first + t) * blocks + b;
                let scale = _mm256_set1_ps(*x.scales.as_ptr().add(i));
                for h in 0..H {
                    let mut sum = _mm256_madd_epi16(dot[t][h], ones);
                    if !AFFINE {
                        sum = _mm256_sub_epi32(sum, _mm256_set1_epi32(8 * *x.totals.as_ptr().add(i)));
                    }
                    let sum = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum));
                    acc[t][h] = _mm256_fmadd_ps(scales[h], sum, acc[t][h]);
                    if AFFINE {
                        let sums = _mm256_set1_ps(*x.sums.as_ptr().add(i));
                        acc[t][h] = _mm256_fmadd_ps(minima[h], sums, acc[t][h]);
                    }
                }
            }
        }
    }
    store(&acc, first_half, out);
}

/// `T` rows times `H` halves of a panel of 8-bit weights.
///
/// `maddubs` wants one side unsigned: that is the magnitude of the weight, whose sign goes to the activation. The
/// weight may be -128, the activation not. A pair is at most 2 * 128 * 127, which 16 bits hold, but not two of them.
///
/// # Safety
/// As [`int4_tile`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn int8_tile<const T: usize, const H: usize>(
    panel: &[u8],
    x: &IntRows<'_>,
    first: usize,
    first_half: usize,
    out: &mut [[f32; PANEL]; T],
) {
    let (head, size) = (head_bytes(Format::Q8_0), packed_block_bytes(Format::Q8_0));
    let blocks = x.cols / BLOCK;
    let ones = _mm256_set1_epi16(1);
    let mut acc = [[_mm256_setzero_ps(); H]; T];
    // SAFETY: as in `int4_tile`.
    unsafe {
        let rows: [*const i8; T] = std::array::from_fn(|t| x.q.as_ptr().add((first + t) * x.cols));
        for b in 0..blocks {
            let block = panel.as_ptr().add(b * size);
            let values = block.add(head).cast::<__m256i>();
            let mut dot = [[_mm256_setzero_si256(); H]; T];
            for group in 0..8 {
                let w: [__m256i; H] =
                    std::array::from_fn(|h| _mm256_load_si256(values.add(2 * group + first_half + h)));
                let magnitude = w.map(|w| _mm256_abs_epi8(w));
                for t in 0..T {
                    let q = rows[t].add(b * BLOCK + 4 * group).cast::<i32>();
                    let q = _mm256_set1_epi32(q.read_unaligned());
                    for h in 0..H {
                        let pairs = _mm256_maddubs_epi16(magnitude[h], _mm256_sign_epi8(q, w[h]));
                        dot[t][h] = _mm256_add_epi32(dot[t][h], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            let scales: [__m256; H] = std::array::from_fn(|h| halves(block, first_half + h));
            for t in 0..T {
                let scale = _mm256_set1_ps(*x.scales.as_ptr().add((first + t) * blocks + b));
                for h in 0..H {
                    let sum = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(dot[t][h]));
                    acc[t][h] = _mm256_fmadd_ps(scales[h], sum, acc[t][h]);
                }
            }
        }
    }
    store(&acc, first_half, out);
}

/// As [`scalar::float`](super::scalar::float).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn float(format: Format, panels: &[u8], x: &FloatRows<'_>, out: &mut [[f32; PANEL]]) {
    out.fill([0.0; PANEL]);
    match format {
        Format::F32 => float_panels::<F32>(format, panels, x, out),
        Format::F16 => float_panels::<F16>(format, panels, x, out),
        Format::Bf16 => float_panels::<Bf16>(format, panels, x, out),
        Format::Q4_0 | Format::Q4_1 | Format::Q8_0 => {
            let size = packed_block_bytes(format);
            let mut decoded = [0f32; PANEL * CHUNK];
            for (panel, out) in each_panel(format, panels, x, out) {
                for (c, blocks) in panel.chunks(CHUNK / BLOCK * size).enumerate() {
                    let cols = blocks.len() / size * BLOCK;
                    for (block, out) in blocks.chunks_exact(size).zip(decoded.as_chunks_mut().0) {
                        decode_block(format, block, out);
                    }
                    let bytes = as_bytes(&decoded[..cols * PANEL]);
                    float_rows::<F32>(bytes, x, c * CHUNK..c * CHUNK + cols, out);
                }
            }
        }
    }
}

/// With one row, the sums of one panel would wait for each other: two panels at a time keep the units busy.
#[target_feature(enable = "avx2,fma,f16c")]
fn float_panels<W: Load>(format: Format, panels: &[u8], x: &FloatRows<'_>, out: &mut [[f32; PANEL]]) {
    if let ([first, second], true) = (&mut *out, x.values.len() == x.cols) {
        let (low, high) = panels.split_at(panels.len() / 2);
        assert!([low, high].iter().all(|panel| panel.len() == x.cols * PANEL * W::SIZE), "panels");
        let out = &mut [std::array::from_mut(first), std::array::from_mut(second)];
        // SAFETY: both panels hold all columns, and `x` is one row.
        unsafe { float_tile::<W, 1, 2>([low, high], x, 0..x.cols, 0, out) };
        return;
    }
    for (panel, out) in each_panel(format, panels, x, out) {
        float_rows::<W>(panel, x, 0..x.cols, out);
    }
}

/// Loads eight stored floats.
trait Load {
    const SIZE: usize;

    /// # Safety
    /// `at` must be valid for eight values; AVX2 and F16C must be there.
    unsafe fn load(at: *const u8) -> __m256;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    const SIZE: usize = 4;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: as promised.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }
}

impl Load for F16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: as promised.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}

impl Load for Bf16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: as promised. A bfloat16 is the upper half of an f32.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
}

/// Adds the columns `cols` of a panel, stored `[cols][PANEL]` in `weights`, to `out`.
#[target_feature(enable = "avx2,fma,f16c")]
fn float_rows<W: Load>(weights: &[u8], x: &FloatRows<'_>, cols: Range<usize>, out: &mut [[f32; PANEL]]) {
    assert!(weights.len() == cols.len() * PANEL * W::SIZE && cols.end <= x.cols, "columns");
    assert!(x.values.len() >= out.len() * x.cols, "rows");
    let (tiles, rest) = out.as_chunks_mut::<6>();
    let done = 6 * tiles.len();
    // SAFETY: the lengths were checked for all rows of `out`.
    unsafe {
        for (i, tile) in tiles.iter_mut().enumerate() {
            float_tile::<W, 6, 1>([weights], x, cols.clone(), 6 * i, &mut [tile]);
        }
        let (pairs, last) = rest.as_chunks_mut::<2>();
        for (i, tile) in pairs.iter_mut().enumerate() {
            float_tile::<W, 2, 1>([weights], x, cols.clone(), done + 2 * i, &mut [tile]);
        }
        if let [tile] = last {
            float_tile::<W, 1, 1>(
                [weights],
                x,
                cols,
                done + 2 * pairs.len(),
                &mut [std::array::from_mut(tile)],
            );
        }
    }
}

/// Adds `P` panels times `T` rows to `out`.
///
/// # Safety
/// Each of `weights` must hold the columns `cols`, which lie inside the rows, and `x` the rows `first..first + T`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn float_tile<W: Load, const T: usize, const P: usize>(
    weights: [&[u8]; P],
    x: &FloatRows<'_>,
    cols: Range<usize>,
    first: usize,
    out: &mut [&mut [[f32; PANEL]; T]; P],
) {
    // SAFETY: column `k` has `PANEL` values in each of `weights`, and one in each of the rows.
    unsafe {
        let rows: [*const f32; T] =
            std::array::from_fn(|t| x.values.as_ptr().add((first + t) * x.cols + cols.start));
        let mut acc: [[[__m256; 2]; T]; P] = std::array::from_fn(|p| {
            std::array::from_fn(|t| [0, 8].map(|h| _mm256_loadu_ps(out[p][t].as_ptr().add(h))))
        });
        for k in 0..cols.len() {
            for p in 0..P {
                let w = weights[p].as_ptr().add(k * PANEL * W::SIZE);
                let w = [W::load(w), W::load(w.add(8 * W::SIZE))];
                for t in 0..T {
                    let x = _mm256_set1_ps(*rows[t].add(k));
                    for h in 0..2 {
                        acc[p][t][h] = _mm256_fmadd_ps(w[h], x, acc[p][t][h]);
                    }
                }
            }
        }
        for p in 0..P {
            for t in 0..T {
                _mm256_storeu_ps(out[p][t].as_mut_ptr(), acc[p][t][0]);
                _mm256_storeu_ps(out[p][t].as_mut_ptr().add(8), acc[p][t][1]);
            }
        }
    }
}

/// Decodes a packed block to `[BLOCK][PANEL]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode_block(format: Format, block: &[u8], out: &mut [f32; PANEL * BLOCK]) {
    assert_eq!(block.len(), packed_block_bytes(format), "block");
    let head = head_bytes(format);
    let nibble = _mm256_set1_epi32(15);
    for half in 0..2 {
        // SAFETY: the block has its scales (and minima, if affine), and eight (four, at 4 bits) groups of two times 32
        // bytes; `out` is 32 columns of two times eight floats.
        unsafe {
            let scale = halves(block.as_ptr(), half);
            let min = match format {
                Format::Q4_0 => _mm256_mul_ps(scale, _mm256_set1_ps(-8.0)),
                Format::Q4_1 => halves(block.as_ptr(), 2 + half),
                _ => _mm256_setzero_ps(),
            };
            let mut put = |k: usize, q: __m256i| {
                let value = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(q), min);
                _mm256_storeu_ps(out.as_mut_ptr().add(k * PANEL + 8 * half), value);
            };
            let values = block.as_ptr().add(head).cast::<__m256i>();
            if format == Format::Q8_0 {
                for group in 0..8 {
                    let mut w = _mm256_loadu_si256(values.add(2 * group + half));
                    // From the last byte of each lane to the first, so that each in turn is the topmost.
                    for j in (0..4).rev() {
                        put(4 * group + j, _mm256_srai_epi32::<24>(w));
                        w = _mm256_slli_epi32::<8>(w);
                    }
                }
            } else {
                for group in 0..4 {
                    let mut w = _mm256_loadu_si256(values.add(2 * group + half));
                    for j in 0..4 {
                        put(4 * group + j, _mm256_and_si256(w, nibble));
                        put(BLOCK / 2 + 4 * group + j, _mm256_and_si256(_mm256_srli_epi32::<4>(w), nibble));
                        w = _mm256_srli_epi32::<8>(w);
                    }
                }
            }
        }
    }
}

/// The `i`-th eight f16 of the head of a block, as f32.
///
/// # Safety
/// They must lie inside the block.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn halves(block: *const u8, i: usize) -> __m256 {
    // SAFETY: as promised.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(block.cast::<__m128i>().add(i))) }
}

/// Writes the lanes of `H` halves.
#[target_feature(enable = "avx2")]
#[inline]
fn store<const T: usize, const H: usize>(
    acc: &[[__m256; H]; T],
    first_half: usize,
    out: &mut [[f32; PANEL]; T],
) {
    for (acc, out) in acc.iter().zip(out) {
        for (acc, out) in acc.iter().zip(out.as_chunks_mut::<8>().0[first_half..].iter_mut()) {
            // SAFETY: eight floats.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), *acc) };
        }
    }
}

/// The memory of floats.
pub(super) fn as_bytes(floats: &[f32]) -> &[u8] {
    // SAFETY: every byte of an f32 is initialised, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(floats.as_ptr().cast(), size_of_val(floats)) }
}
