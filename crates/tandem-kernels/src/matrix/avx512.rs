//! AVX-512 kernels: the steps of [`scalar`](super::scalar) on sixteen lanes, one panel wide.
//!
//! VNNI's `dpbusd` multiplies four unsigned by four signed bytes a lane and adds them to 32 bits, exactly. 4-bit weights
//! are unsigned as they are; 8-bit ones get 128 added, which the sum of the activations takes out again. There is no such
//! sum of half a block: in split blocks the sign of a weight goes to the activation.
//!
//! Pointers are read without checks inside the tiles; [`int`] and [`float`] check all lengths first.

use std::arch::x86_64::*;
use std::ops::Range;

use tandem_model::format::{BLOCK, Format};

use super::avx2::{as_bytes, decode_unit, fetch};
use super::kind::{Kind, Scales, with_kind};
use super::scalar::{CHUNK, each_panel};
use super::{PANEL, unit_bytes};
use crate::activations::{FloatRows, IntRows};

/// A kernel for the panels of one packed format.
type IntPanels = unsafe fn(usize, &[&[u8]], &IntRows<'_>, &mut [&mut [[f32; PANEL]]]);

/// As [`scalar::int`](super::scalar::int), for some panels, each with its output.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn int(format: Format, panels: &[&[u8]], x: &IntRows<'_>, out: &mut [&mut [[f32; PANEL]]]) {
    let bytes = x.cols / format.block_len() * unit_bytes(format);
    assert!(panels.iter().all(|panel| panel.len() == bytes), "panels");
    out.iter().for_each(|out| x.check(out.len()));
    let run: IntPanels = with_kind!(format, K => int_panels::<K>);
    // SAFETY: the lengths were checked for all rows of `out`.
    unsafe { run(format.block_len() / BLOCK, panels, x, out) };
}

/// Few rows take two panels at a time: two streams from memory, and sums that do not wait for each other.
///
/// # Safety
/// `panels` must be panels of `x.cols` columns of the format, whose units are `unit` blocks, and `x` hold as many rows as
/// each of `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn int_panels<K: Kind>(
    unit: usize,
    panels: &[&[u8]],
    x: &IntRows<'_>,
    out: &mut [&mut [[f32; PANEL]]],
) {
    // SAFETY: as promised by the caller.
    unsafe {
        match (panels, out) {
            ([a, b], [first, second]) if first.len() < 8 && first.len() == second.len() => {
                int_rows::<K, 2>(unit, [a, b], x, &mut [first, second]);
            }
            (panels, out) => {
                for (panel, out) in panels.iter().zip(out) {
                    int_rows::<K, 1>(unit, [panel], x, &mut [out]);
                }
            }
        }
    }
}

/// `P` panels, all with as many rows.
///
/// # Safety
/// As [`int_panels`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn int_rows<K: Kind, const P: usize>(
    unit: usize,
    panels: [&[u8]; P],
    x: &IntRows<'_>,
    out: &mut [&mut [[f32; PANEL]]; P],
) {
    let (rows, mut first) = (out[0].len(), 0);
    // SAFETY: as promised by the caller; rows are taken in turn.
    unsafe {
        while P == 1 && rows - first >= 8 {
            int_tile::<K, P, 8>(unit, panels, x, first, out);
            first += 8;
        }
        if rows - first >= 4 {
            int_tile::<K, P, 4>(unit, panels, x, first, out);
            first += 4;
        }
        match rows - first {
            3 => int_tile::<K, P, 3>(unit, panels, x, first, out),
            2 => int_tile::<K, P, 2>(unit, panels, x, first, out),
            1 => int_tile::<K, P, 1>(unit, panels, x, first, out),
            _ => {}
        }
    }
}

/// `T` rows times `P` panels of quantized weights.
///
/// # Safety
/// As [`int_rows`], for the rows `first..first + T` of `x` and of each of `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn int_tile<K: Kind, const P: usize, const T: usize>(
    unit: usize,
    panels: [&[u8]; P],
    x: &IntRows<'_>,
    first: usize,
    out: &mut [&mut [[f32; PANEL]]; P],
) {
    let shape = const { K::SHAPE };
    // What the true integers are larger by than the unsigned ones that are multiplied.
    let shift = if shape.bits == 8 && !shape.split { shape.shift - 128 } else { shape.shift };
    let unit_bytes = shape.head() + unit * shape.block_bytes();
    let blocks = x.cols / BLOCK;
    let mut acc = [[_mm512_setzero_ps(); T]; P];
    // SAFETY: unit `u` of a panel is `unit_bytes`, and its blocks are read up to their ends; row `first + t` has `cols` values
    // in `q` and `blocks` scales, sums and totals.
    unsafe {
        let rows: [*const i8; T] = std::array::from_fn(|t| x.q.as_ptr().add((first + t) * x.cols));
        for (u, b) in (0..blocks).step_by(unit).enumerate() {
            for part in 0..unit {
                for p in 0..P {
                    let head = panels[p].as_ptr().add(u * unit_bytes);
                    let (b, block) = (b + part, head.add(shape.head() + part * shape.block_bytes()));
                    if shape.scales == Scales::Nested && part == 0 && first == 0 {
                        fetch(head, shape.head());
                    }
                    if first == 0 {
                        fetch(block, shape.block_bytes());
                    }
                    let values = block.add(shape.block_head()).cast::<__m512i>();
                    let mut dot = [[_mm512_setzero_si512(); 2]; T];
                    if shift != 0 {
                        for (t, dot) in dot.iter_mut().enumerate() {
                            dot[0] =
                                _mm512_set1_epi32(shift * *x.totals.as_ptr().add((first + t) * blocks + b));
                        }
                    }
                    for i in 0..4 {
                        let w = groups::<K>(values, i);
                        // Rows go in turn, so that no multiplication waits for the one before it.
                        for side in 0..2 {
                            for t in 0..T {
                                let q = rows[t].add(b * BLOCK + 4 * i).cast::<i32>();
                                let q = _mm512_set1_epi32(q.add(4 * side).read_unaligned());
                                if shape.split {
                                    let negative = _mm512_movepi8_mask(w[side]);
                                    let q = _mm512_mask_sub_epi8(q, negative, _mm512_setzero_si512(), q);
                                    dot[t][side] =
                                        _mm512_dpbusd_epi32(dot[t][side], _mm512_abs_epi8(w[side]), q);
                                } else {
                                    dot[t][0] = _mm512_dpbusd_epi32(dot[t][0], w[side], q);
                                }
                            }
                        }
                    }
                    let (scales, minimum) = block_scales::<K>(head, block);
                    for t in 0..T {
                        let i = (first + t) * blocks + b;
                        let scale = _mm512_set1_ps(*x.scales.as_ptr().add(i));
                        for side in 0..if shape.split { 2 } else { 1 } {
                            let sum = _mm512_mul_ps(scales[side], _mm512_cvtepi32_ps(dot[t][side]));
                            acc[p][t] = _mm512_fmadd_ps(scale, sum, acc[p][t]);
                        }
                        if shape.affine {
                            let sums = _mm512_set1_ps(*x.sums.as_ptr().add(i));
                            acc[p][t] = _mm512_fmadd_ps(minimum, sums, acc[p][t]);
                        }
                    }
                }
            }
        }
        for (acc, out) in acc.iter().zip(out) {
            for (acc, out) in acc.iter().zip(&mut out[first..]) {
                _mm512_storeu_ps(out.as_mut_ptr(), *acc);
            }
        }
    }
}

// What follows up to the f32 kernels must become part of its caller, or vectors would travel through memory. Hence it is
// inlined by order, which excludes features of its own, and works without closures.

/// Groups `i` and `i + 4` of the values of a block, 16 lanes of four bytes: unsigned, but in a split block as they are.
///
/// # Safety
/// `values` must be the values of a block, and `i < 4`; AVX-512 F must be there.
#[inline(always)]
pub(super) unsafe fn groups<K: Kind>(values: *const __m512i, i: usize) -> [__m512i; 2] {
    // SAFETY: as promised; a block has four vectors at 4 bits and eight at 8.
    unsafe {
        let first = _mm512_loadu_si512(values.add(i));
        if K::SHAPE.bits == 4 {
            let nibble = _mm512_set1_epi32(0x0F0F_0F0F);
            return [
                _mm512_and_si512(first, nibble),
                _mm512_and_si512(_mm512_srli_epi32::<4>(first), nibble),
            ];
        }
        let last = _mm512_loadu_si512(values.add(i + 4));
        if K::SHAPE.split {
            return [first, last];
        }
        let offset = _mm512_set1_epi32(0x8080_8080_u32.cast_signed());
        [_mm512_xor_si512(first, offset), _mm512_xor_si512(last, offset)]
    }
}

/// What [`Block::scales`](super::scalar::Block::scales) says, in sixteen lanes.
///
/// # Safety
/// `head` must be that of a unit, and `block` one of its blocks; AVX-512 F must be there.
#[inline(always)]
pub(super) unsafe fn block_scales<K: Kind>(head: *const u8, block: *const u8) -> ([__m512; 2], __m512) {
    let shape = const { K::SHAPE };
    // SAFETY: the head has 16 scales and, if affine, as many minima; a nested block 32 small ones.
    unsafe {
        let scale = head_scales::<K>(head, 0);
        let minimum = if shape.affine { head_scales::<K>(head, 1) } else { _mm512_setzero_ps() };
        if shape.scales != Scales::Nested {
            return ([scale; 2], minimum);
        }
        let (first, second) = (small_scales::<K>(block, 0), small_scales::<K>(block, 1));
        if shape.split {
            ([_mm512_mul_ps(scale, first), _mm512_mul_ps(scale, second)], minimum)
        } else {
            ([_mm512_mul_ps(scale, first); 2], _mm512_mul_ps(minimum, second))
        }
    }
}

/// The scales (0) or minima (1) of the head of a unit.
///
/// # Safety
/// They must be there; as [`block_scales`].
#[inline(always)]
unsafe fn head_scales<K: Kind>(head: *const u8, i: usize) -> __m512 {
    // SAFETY: as promised.
    unsafe {
        let at = head.add(i * PANEL * K::SHAPE.scale_bytes());
        match K::SHAPE.scales {
            Scales::F32 => F32::load(at),
            Scales::Bf16 => Bf16::load(at),
            Scales::F16 | Scales::Nested => F16::load(at),
        }
    }
}

/// The first or second small scales of a block.
///
/// # Safety
/// They must be there; as [`block_scales`].
#[inline(always)]
unsafe fn small_scales<K: Kind>(block: *const u8, i: usize) -> __m512 {
    // SAFETY: as promised.
    unsafe {
        let bytes = _mm_loadu_si128(block.add(i * PANEL).cast());
        let signed = K::SHAPE.split;
        _mm512_cvtepi32_ps(if signed { _mm512_cvtepi8_epi32(bytes) } else { _mm512_cvtepu8_epi32(bytes) })
    }
}

/// As [`scalar::float`](super::scalar::float).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn float(format: Format, panels: &[&[u8]], x: &FloatRows<'_>, out: &mut [&mut [[f32; PANEL]]]) {
    match format {
        Format::F32 => float_panels::<F32>(format, panels, x, out),
        Format::F16 => float_panels::<F16>(format, panels, x, out),
        Format::Bf16 => float_panels::<Bf16>(format, panels, x, out),
        _ => {
            let (columns, size) = (format.block_len(), unit_bytes(format));
            let mut decoded = [0f32; PANEL * CHUNK];
            for (panel, out) in each_panel(format, panels, x, out) {
                for (c, units) in panel.chunks(CHUNK / columns * size).enumerate() {
                    let cols = units.len() / size * columns;
                    for (unit, out) in units.chunks_exact(size).zip(decoded.chunks_exact_mut(columns * PANEL))
                    {
                        decode_unit(format, unit, out);
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
fn float_panels<W: Load>(
    format: Format,
    panels: &[&[u8]],
    x: &FloatRows<'_>,
    out: &mut [&mut [[f32; PANEL]]],
) {
    if let ([low, high], [[first], [second]]) = (panels, &mut *out) {
        assert!([low, high].iter().all(|panel| panel.len() == x.cols * PANEL * W::SIZE), "panels");
        assert!(x.values.len() >= x.cols, "rows");
        (*first, *second) = ([0.0; PANEL], [0.0; PANEL]);
        let out = &mut [std::array::from_mut(first), std::array::from_mut(second)];
        // SAFETY: both panels hold all columns, and `x` a row.
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
                let w = weights[p].as_ptr().add(k * PANEL * W::SIZE);
                if first == 0 {
                    fetch(w, PANEL * W::SIZE);
                }
                let w = W::load(w);
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
