//! AVX-512 kernels: the steps of [`scalar`](super::scalar) on sixteen lanes, one panel wide.
//!
//! VNNI's `dpbusd` multiplies four unsigned by four signed bytes a lane and adds them to 32 bits, exactly. 4-bit weights
//! are unsigned as they are; 8-bit ones get 128 added, which the sum of the activations takes out again.
//!
//! Pointers are read without checks inside the tiles; [`int`] and [`float`] check all lengths first.

use std::arch::x86_64::*;
use std::ops::Range;

use tandem_model::format::{BLOCK, Format};

use super::avx2::{as_bytes, decode_block};
use super::scalar::{CHUNK, each_panel};
use super::{PANEL, head_bytes, packed_block_bytes};
use crate::activations::{FloatRows, IntRows};

/// As [`scalar::int`](super::scalar::int).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn int(format: Format, panel: &[u8], x: &IntRows<'_>, out: &mut [[f32; PANEL]]) {
    let blocks = x.cols / BLOCK;
    assert_eq!(panel.len(), blocks * packed_block_bytes(format), "panel");
    assert!(x.q.len() >= out.len() * x.cols, "rows");
    assert!(
        [x.scales.len(), x.sums.len(), x.totals.len()].iter().all(|&len| len >= out.len() * blocks),
        "rows"
    );
    // SAFETY: the lengths were checked for all rows of `out`.
    unsafe {
        match format {
            Format::Q4_0 => int_rows::<Q4_0>(panel, x, out),
            Format::Q4_1 => int_rows::<Q4_1>(panel, x, out),
            _ => int_rows::<Q8_0>(panel, x, out),
        }
    }
}

/// How a quantized format becomes unsigned bytes.
trait Quantized {
    const FORMAT: Format;
    /// Whether blocks have a minimum.
    const AFFINE: bool = false;
    /// What the unsigned values are larger by than the true ones.
    const OFFSET: i32 = 0;

    /// Groups `i` and `i + 4` of the values of a block: 16 lanes of four bytes.
    ///
    /// # Safety
    /// `values` must be the values of a block, and `i < 4`; AVX-512 F must be there.
    unsafe fn groups(values: *const __m512i, i: usize) -> [__m512i; 2];
}

struct Q4_0;
struct Q4_1;
struct Q8_0;

impl Quantized for Q4_0 {
    const FORMAT: Format = Format::Q4_0;
    const OFFSET: i32 = 8;

    #[inline(always)]
    unsafe fn groups(values: *const __m512i, i: usize) -> [__m512i; 2] {
        // SAFETY: as promised.
        unsafe { Q4_1::groups(values, i) }
    }
}

impl Quantized for Q4_1 {
    const FORMAT: Format = Format::Q4_1;
    const AFFINE: bool = true;

    #[inline(always)]
    unsafe fn groups(values: *const __m512i, i: usize) -> [__m512i; 2] {
        // SAFETY: as promised.
        unsafe {
            let bytes = _mm512_loadu_si512(values.add(i));
            let nibble = _mm512_set1_epi32(0x0F0F_0F0F);
            [_mm512_and_si512(bytes, nibble), _mm512_and_si512(_mm512_srli_epi32::<4>(bytes), nibble)]
        }
    }
}

impl Quantized for Q8_0 {
    const FORMAT: Format = Format::Q8_0;
    const OFFSET: i32 = 128;

    #[inline(always)]
    unsafe fn groups(values: *const __m512i, i: usize) -> [__m512i; 2] {
        // SAFETY: as promised.
        unsafe {
            let offset = _mm512_set1_epi32(0x8080_8080_u32.cast_signed());
            [i, i + 4].map(|i| _mm512_xor_si512(_mm512_loadu_si512(values.add(i)), offset))
        }
    }
}

/// # Safety
/// `panel` must be a panel of `x.cols` columns of the format, and `x` hold as many rows as `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn int_rows<Q: Quantized>(panel: &[u8], x: &IntRows<'_>, out: &mut [[f32; PANEL]]) {
    let mut first = 0;
    // SAFETY: as promised by the caller; rows are taken in turn.
    unsafe {
        let (tiles, rest) = out.as_chunks_mut::<8>();
        for tile in tiles {
            int_tile::<Q, 8>(panel, x, first, tile);
            first += 8;
        }
        let (tiles, rest) = rest.as_chunks_mut::<4>();
        for tile in tiles {
            int_tile::<Q, 4>(panel, x, first, tile);
            first += 4;
        }
        let (tiles, rest) = rest.as_chunks_mut::<2>();
        for tile in tiles {
            int_tile::<Q, 2>(panel, x, first, tile);
            first += 2;
        }
        if let [row] = rest {
            int_tile::<Q, 1>(panel, x, first, std::array::from_mut(row));
        }
    }
}

/// `T` rows times a panel of quantized weights.
///
/// # Safety
/// `panel` must be a panel of `x.cols` columns of the format, and `x` hold the rows `first..first + T`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn int_tile<Q: Quantized, const T: usize>(
    panel: &[u8],
    x: &IntRows<'_>,
    first: usize,
    out: &mut [[f32; PANEL]; T],
) {
    let (head, size) = (head_bytes(Q::FORMAT), packed_block_bytes(Q::FORMAT));
    let blocks = x.cols / BLOCK;
    let mut acc = [_mm512_setzero_ps(); T];
    // SAFETY: block `b` of the panel is `size` bytes and read up to its end; row `first + t` has `cols` values in `q`
    // and `blocks` scales, sums and totals.
    unsafe {
        let rows: [*const i8; T] = std::array::from_fn(|t| x.q.as_ptr().add((first + t) * x.cols));
        for b in 0..blocks {
            let block = panel.as_ptr().add(b * size);
            let mut dot: [__m512i; T] = std::array::from_fn(|t| match Q::OFFSET {
                0 => _mm512_setzero_si512(),
                offset => _mm512_set1_epi32(-offset * *x.totals.as_ptr().add((first + t) * blocks + b)),
            });
            for i in 0..4 {
                let [low, high] = Q::groups(block.add(head).cast(), i);
                for t in 0..T {
                    let q = rows[t].add(b * BLOCK + 4 * i).cast::<i32>();
                    dot[t] = _mm512_dpbusd_epi32(dot[t], low, _mm512_set1_epi32(q.read_unaligned()));
                    dot[t] = _mm512_dpbusd_epi32(dot[t], high, _mm512_set1_epi32(q.add(4).read_unaligned()));
                }
            }
            let scales = halves(block);
            let minima = if Q::AFFINE { halves(block.add(2 * PANEL)) } else { scales };
            for t in 0..T {
                let i = (first + t) * blocks + b;
                let scale = _mm512_set1_ps(*x.scales.as_ptr().add(i));
                let sum = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(dot[t]));
                acc[t] = _mm512_fmadd_ps(scales, sum, acc[t]);
                if Q::AFFINE {
                    acc[t] = _mm512_fmadd_ps(minima, _mm512_set1_ps(*x.sums.as_ptr().add(i)), acc[t]);
                }
            }
        }
        for (acc, out) in acc.iter().zip(out) {
            _mm512_storeu_ps(out.as_mut_ptr(), *acc);
        }
    }
}

/// As [`scalar::float`](super::scalar::float).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
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

/// Loads sixteen stored floats.
trait Load {
    const SIZE: usize;

    /// # Safety
    /// `at` must be valid for sixteen values; AVX-512 F must be there.
    unsafe fn load(at: *const u8) -> __m512;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    const SIZE: usize = 4;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512 {
        // SAFETY: as promised.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }
}

impl Load for F16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512 {
        // SAFETY: as promised.
        unsafe { halves(at) }
    }
}

impl Load for Bf16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512 {
        // SAFETY: as promised. A bfloat16 is the upper half of an f32.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
}

/// Adds the columns `cols` of a panel, stored `[cols][PANEL]` in `weights`, to `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn float_rows<W: Load>(weights: &[u8], x: &FloatRows<'_>, cols: Range<usize>, out: &mut [[f32; PANEL]]) {
    assert!(weights.len() == cols.len() * PANEL * W::SIZE && cols.end <= x.cols, "columns");
    assert!(x.values.len() >= out.len() * x.cols, "rows");
    let mut first = 0;
    // SAFETY: the lengths were checked for all rows of `out`, which are taken in turn.
    unsafe {
        let (tiles, rest) = out.as_chunks_mut::<8>();
        for tile in tiles {
            float_tile::<W, 8, 1>([weights], x, cols.clone(), first, &mut [tile]);
            first += 8;
        }
        let (tiles, rest) = rest.as_chunks_mut::<4>();
        for tile in tiles {
            float_tile::<W, 4, 1>([weights], x, cols.clone(), first, &mut [tile]);
            first += 4;
        }
        let (tiles, rest) = rest.as_chunks_mut::<2>();
        for tile in tiles {
            float_tile::<W, 2, 1>([weights], x, cols.clone(), first, &mut [tile]);
            first += 2;
        }
        if let [row] = rest {
            float_tile::<W, 1, 1>([weights], x, cols, first, &mut [std::array::from_mut(row)]);
        }
    }
}

/// Adds `P` panels times `T` rows to `out`.
///
/// # Safety
/// Each of `weights` must hold the columns `cols`, which lie inside the rows, and `x` the rows `first..first + T`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
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
        let mut acc: [[__m512; T]; P] =
            std::array::from_fn(|p| std::array::from_fn(|t| _mm512_loadu_ps(out[p][t].as_ptr())));
        for k in 0..cols.len() {
            for p in 0..P {
                let w = W::load(weights[p].as_ptr().add(k * PANEL * W::SIZE));
                for t in 0..T {
                    acc[p][t] = _mm512_fmadd_ps(w, _mm512_set1_ps(*rows[t].add(k)), acc[p][t]);
                }
            }
        }
        for p in 0..P {
            for t in 0..T {
                _mm512_storeu_ps(out[p][t].as_mut_ptr(), acc[p][t]);
            }
        }
    }
}

/// Sixteen f16 as f32.
///
/// # Safety
/// `at` must be valid for them.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: as promised.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}
