//! AVX2 kernels: the steps of [`scalar`](super::scalar) on eight lanes, with several rows of activations in registers.
//!
//! Every function here needs AVX2, FMA and F16C. Pointers are read without checks inside the tiles; [`int`] and
//! [`float`] check all lengths first.

use std::arch::x86_64::*;
use std::ops::Range;

use tandem_model::format::{BLOCK, Format};

use super::kind::{Kind, Scales, with_kind};
use super::scalar::{CHUNK, each_panel};
use super::{PANEL, unit_bytes};
use crate::activations::{FloatRows, IntRows};

/// How many bytes before their use a kernel asks for weights. A core has too few loads in flight to hide memory behind
/// multiplications, and the hardware fetches ahead only within 4 KiB.
const AHEAD: usize = 4096;

/// A kernel for one packed format.
type IntPanel = unsafe fn(usize, &[u8], &IntRows<'_>, &mut [[f32; PANEL]]);

/// As [`scalar::int`](super::scalar::int).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn int(format: Format, panel: &[u8], x: &IntRows<'_>, out: &mut [[f32; PANEL]]) {
    assert_eq!(panel.len(), x.cols / format.block_len() * unit_bytes(format), "panel");
    x.check(out.len());
    let run: IntPanel = with_kind!(format, K => int_panel::<K>);
    // SAFETY: the lengths were checked for all rows of `out`.
    unsafe { run(format.block_len() / BLOCK, panel, x, out) };
}

/// # Safety
/// `panel` must be a panel of `x.cols` columns of the format, whose units are `unit` blocks, and `x` hold as many rows as
/// `out`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int_panel<K: Kind>(unit: usize, panel: &[u8], x: &IntRows<'_>, out: &mut [[f32; PANEL]]) {
    let (tiles, rest) = out.as_chunks_mut::<4>();
    let done = 4 * tiles.len();
    // SAFETY: as promised by the caller; rows are taken in turn.
    unsafe {
        for (i, tile) in tiles.iter_mut().enumerate() {
            int_rows::<K, 4>(unit, panel, x, 4 * i, tile);
        }
        if let Ok(tile) = <&mut [_; 3]>::try_from(&mut *rest) {
            int_rows::<K, 3>(unit, panel, x, done, tile);
        } else if let Ok(tile) = <&mut [_; 2]>::try_from(&mut *rest) {
            int_rows::<K, 2>(unit, panel, x, done, tile);
        } else if let Ok(tile) = <&mut [_; 1]>::try_from(&mut *rest) {
            int_rows::<K, 1>(unit, panel, x, done, tile);
        }
    }
}

/// # Safety
/// As [`int_panel`], for the rows `first..first + T` of `x`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn int_rows<K: Kind, const T: usize>(
    unit: usize,
    panel: &[u8],
    x: &IntRows<'_>,
    first: usize,
    out: &mut [[f32; PANEL]; T],
) {
    // With one or two rows both halves of the panel fit the registers, and memory is read once, in order.
    // SAFETY: as promised by the caller; halves are 0 and 1.
    unsafe {
        if T == 1 || T == 2 && K::SHAPE.bits == 4 {
            int_tile::<K, T, 2>(unit, panel, x, first, 0, out);
        } else {
            int_tile::<K, T, 1>(unit, panel, x, first, 0, out);
            int_tile::<K, T, 1>(unit, panel, x, first, 1, out);
        }
    }
}

/// `T` rows times `H` halves (eight lanes each) of a panel of quantized weights.
///
/// # Safety
/// As [`int_rows`], and `first_half + H <= 2`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn int_tile<K: Kind, const T: usize, const H: usize>(
    unit: usize,
    panel: &[u8],
    x: &IntRows<'_>,
    first: usize,
    first_half: usize,
    out: &mut [[f32; PANEL]; T],
) {
    let shape = const { K::SHAPE };
    let unit_bytes = shape.head() + unit * shape.block_bytes();
    let blocks = x.cols / BLOCK;
    let mut acc = [[_mm256_setzero_ps(); H]; T];
    // SAFETY: unit `u` of the panel is `unit_bytes`, and its blocks are read up to their ends; row `first + t` has `cols` values
    // in `q` and `blocks` scales, sums and totals.
    unsafe {
        let rows: [*const i8; T] = std::array::from_fn(|t| x.q.as_ptr().add((first + t) * x.cols));
        for (u, b) in (0..blocks).step_by(unit).enumerate() {
            let head = panel.as_ptr().add(u * unit_bytes);
            if shape.scales == Scales::Nested && first + first_half == 0 {
                fetch(head, shape.head());
            }
            for part in 0..unit {
                let (b, block) = (b + part, head.add(shape.head() + part * shape.block_bytes()));
                if first + first_half == 0 {
                    fetch(block, shape.block_bytes());
                }
                let values = block.add(shape.block_head()).cast::<__m256i>();
                let mut scales = [BlockScales::ZERO; H];
                for (h, scales) in scales.iter_mut().enumerate() {
                    *scales = block_scales::<K>(head, block, first_half + h);
                }
                for side in 0..if shape.split { 2 } else { 1 } {
                    let mut dot = [[_mm256_setzero_si256(); H]; T];
                    let (values, at) = (values.add(8 * side + first_half), b * BLOCK + side * 16);
                    match (shape.bits, shape.split) {
                        (4, _) => dot4(values, &rows, at, &mut dot),
                        (_, false) => dot8::<T, H, 8>(values, &rows, at, &mut dot),
                        (_, true) => dot8::<T, H, 4>(values, &rows, at, &mut dot),
                    }
                    for t in 0..T {
                        let i = (first + t) * blocks + b;
                        let scale = _mm256_set1_ps(*x.scales.as_ptr().add(i));
                        for h in 0..H {
                            let mut sum = dot[t][h];
                            if shape.shift != 0 {
                                let shift = _mm256_set1_epi32(shape.shift * *x.totals.as_ptr().add(i));
                                sum = _mm256_add_epi32(sum, shift);
                            }
                            let sum = _mm256_mul_ps(scales[h].scales[side], _mm256_cvtepi32_ps(sum));
                            acc[t][h] = _mm256_fmadd_ps(scale, sum, acc[t][h]);
                        }
                    }
                }
                if shape.affine {
                    for (t, acc) in acc.iter_mut().enumerate() {
                        let sums = _mm256_set1_ps(*x.sums.as_ptr().add((first + t) * blocks + b));
                        for h in 0..H {
                            acc[h] = _mm256_fmadd_ps(scales[h].minimum, sums, acc[h]);
                        }
                    }
                }
            }
        }
    }
    store(&acc, first_half, out);
}

/// Asks for the `bytes` that lie [`AHEAD`] of those at `at`; where they are the end of the memory, for nothing.
#[inline(always)]
pub(super) fn fetch(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a prefetch of any address is allowed, and every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD + line).cast()) };
    }
}

/// Eight lanes of what [`Block::scales`](super::scalar::Block::scales) says.
#[derive(Clone, Copy)]
struct BlockScales {
    scales: [__m256; 2],
    minimum: __m256,
}

impl BlockScales {
    // SAFETY: eight floats are as many bytes, and all bits 0 is the float 0.
    const ZERO: BlockScales = unsafe { std::mem::zeroed() };
}

// What follows up to the f32 kernels must become part of its caller, or vectors would travel through memory. Hence it is
// inlined by order, which excludes features of its own, and works without closures.

/// # Safety
/// `head` must be that of a unit, and `block` one of its blocks; `half` is 0 or 1; AVX2 and F16C must be there.
#[inline(always)]
unsafe fn block_scales<K: Kind>(head: *const u8, block: *const u8, half: usize) -> BlockScales {
    let shape = const { K::SHAPE };
    // SAFETY: the head has 16 scales and, if affine, as many minima; a nested block 32 small ones.
    unsafe {
        let scale = head_scales::<K>(head, half);
        let minimum = if shape.affine { head_scales::<K>(head, half + 2) } else { _mm256_setzero_ps() };
        match (shape.scales, shape.split) {
            (Scales::Nested, false) => {
                let scale = _mm256_mul_ps(scale, small_scales::<K>(block, half));
                let minimum = _mm256_mul_ps(minimum, small_scales::<K>(block, half + 2));
                BlockScales { scales: [scale; 2], minimum }
            }
            (Scales::Nested, true) => {
                let first = _mm256_mul_ps(scale, small_scales::<K>(block, half));
                let last = _mm256_mul_ps(scale, small_scales::<K>(block, half + 2));
                BlockScales { scales: [first, last], minimum }
            }
            _ => BlockScales { scales: [scale; 2], minimum },
        }
    }
}

/// The `i`-th eight scales or minima of the head of a unit.
///
/// # Safety
/// They must be there; as [`block_scales`].
#[inline(always)]
unsafe fn head_scales<K: Kind>(head: *const u8, i: usize) -> __m256 {
    // SAFETY: as promised.
    unsafe {
        let at = head.add(8 * i * K::SHAPE.scale_bytes());
        match K::SHAPE.scales {
            Scales::F32 => F32::load(at),
            Scales::Bf16 => Bf16::load(at),
            Scales::F16 | Scales::Nested => F16::load(at),
        }
    }
}

/// The `i`-th eight small scales of a block.
///
/// # Safety
/// They must be there; as [`block_scales`].
#[inline(always)]
unsafe fn small_scales<K: Kind>(block: *const u8, i: usize) -> __m256 {
    // SAFETY: as promised.
    unsafe {
        let bytes = _mm_loadl_epi64(block.add(8 * i).cast());
        let signed = K::SHAPE.split;
        _mm256_cvtepi32_ps(if signed { _mm256_cvtepi8_epi32(bytes) } else { _mm256_cvtepu8_epi32(bytes) })
    }
}

/// The integer products of `T` rows, from column `at` on, and `H` halves of a block of 4-bit weights.
///
/// A pair product of `maddubs` is at most 2 * 15 * 127, so the eight of a block sum in 16 bits.
///
/// # Safety
/// `values` must be the values of a block from the first half on, and each row have 32 columns more; AVX2 must be there.
#[inline(always)]
unsafe fn dot4<const T: usize, const H: usize>(
    values: *const __m256i,
    rows: &[*const i8; T],
    at: usize,
    dot: &mut [[__m256i; H]; T],
) {
    // SAFETY: as promised; a block has four times two vectors of values.
    unsafe {
        let (nibble, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        for pair in 0..4 {
            let (mut low, mut high) = ([nibble; H], [nibble; H]);
            for h in 0..H {
                let bytes = _mm256_load_si256(values.add(2 * pair + h));
                low[h] = _mm256_and_si256(bytes, nibble);
                high[h] = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble);
            }
            for t in 0..T {
                let q = rows[t].add(at + 4 * pair).cast::<i32>();
                let (q_low, q_high) =
                    (_mm256_set1_epi32(q.read_unaligned()), _mm256_set1_epi32(q.add(4).read_unaligned()));
                for h in 0..H {
                    dot[t][h] = _mm256_add_epi16(dot[t][h], _mm256_maddubs_epi16(low[h], q_low));
                    dot[t][h] = _mm256_add_epi16(dot[t][h], _mm256_maddubs_epi16(high[h], q_high));
                }
            }
        }
        for dot in dot.as_flattened_mut() {
            *dot = _mm256_madd_epi16(*dot, ones);
        }
    }
}

/// The integer products of `T` rows, from column `at` on, and `H` halves of `G` groups of 8-bit weights.
///
/// `maddubs` wants one side unsigned: that is the magnitude of the weight, whose sign goes to the activation. The
/// weight may be -128, the activation not. A pair is at most 2 * 128 * 127, which 16 bits hold, but not two of them.
///
/// # Safety
/// `values` must be the first of `G` groups, from the first half on, and each row have `4 * G` columns more; AVX2 must be
/// there.
#[inline(always)]
unsafe fn dot8<const T: usize, const H: usize, const G: usize>(
    values: *const __m256i,
    rows: &[*const i8; T],
    at: usize,
    dot: &mut [[__m256i; H]; T],
) {
    // SAFETY: as promised; a group is two vectors of values.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        for group in 0..G {
            let (mut w, mut magnitude) = ([ones; H], [ones; H]);
            for h in 0..H {
                w[h] = _mm256_load_si256(values.add(2 * group + h));
                magnitude[h] = _mm256_abs_epi8(w[h]);
            }
            for t in 0..T {
                let q = rows[t].add(at + 4 * group).cast::<i32>();
                let q = _mm256_set1_epi32(q.read_unaligned());
                for h in 0..H {
                    let pairs = _mm256_maddubs_epi16(magnitude[h], _mm256_sign_epi8(q, w[h]));
                    dot[t][h] = _mm256_add_epi32(dot[t][h], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
    }
}

/// As [`scalar::float`](super::scalar::float).
#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
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
                if first == 0 {
                    fetch(w, PANEL * W::SIZE);
                }
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

/// Decodes a packed unit to `[block_len][PANEL]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode_unit(format: Format, unit: &[u8], out: &mut [f32]) {
    assert!(unit.len() == unit_bytes(format) && out.len() == format.block_len() * PANEL, "unit");
    let (blocks, _) = out.as_chunks_mut();
    let decode: unsafe fn(&[u8], &mut [[f32; PANEL * BLOCK]]) = with_kind!(format, K => decode_blocks::<K>);
    // SAFETY: the unit is whole, and `blocks` are as many as it has.
    unsafe { decode(unit, blocks) };
}

/// # Safety
/// `unit` must be one of the format, with as many blocks as `out`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn decode_blocks<K: Kind>(unit: &[u8], out: &mut [[f32; PANEL * BLOCK]]) {
    let shape = const { K::SHAPE };
    let nibble = _mm256_set1_epi32(15);
    let shift = _mm256_set1_epi32(shape.shift);
    for (part, out) in out.iter_mut().enumerate() {
        for half in 0..2 {
            // SAFETY: the block has eight (four, at 4 bits) groups of two times 32 bytes after its small scales; `out` is 32
            // columns of two times eight floats.
            unsafe {
                let block = unit.as_ptr().add(shape.head() + part * shape.block_bytes());
                let BlockScales { scales, minimum } = block_scales::<K>(unit.as_ptr(), block, half);
                let mut put = |k: usize, q: __m256i| {
                    let q = if shape.shift == 0 { q } else { _mm256_add_epi32(q, shift) };
                    let mut value = _mm256_mul_ps(scales[k / 16], _mm256_cvtepi32_ps(q));
                    if shape.affine {
                        value = _mm256_add_ps(value, minimum);
                    }
                    _mm256_storeu_ps(out.as_mut_ptr().add(k * PANEL + 8 * half), value);
                };
                let values = block.add(shape.block_head()).cast::<__m256i>();
                if shape.bits == 8 {
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
                            put(
                                BLOCK / 2 + 4 * group + j,
                                _mm256_and_si256(_mm256_srli_epi32::<4>(w), nibble),
                            );
                            w = _mm256_srli_epi32::<8>(w);
                        }
                    }
                }
            }
        }
    }
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
