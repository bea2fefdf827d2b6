//! NEON kernels: the steps of [`scalar`](super::scalar) on four lanes, with several rows of activations in registers.
//!
//! A panel is four vectors wide, its *quarters*. `sdot` multiplies four signed bytes a lane by four others and adds them to
//! 32 bits, exactly: packed values go into it as they are, and of a row's sixteen bytes it takes any four for all lanes.
//!
//! Pointers are read without checks inside the tiles; [`int`] and [`float`] check all lengths first. NEON is part of what
//! all code for this target is compiled for; only the dot product asks for more.

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use tandem_model::format::{BLOCK, Format};

use super::kind::{Kind, Scales, with_kind};
use super::scalar::{CHUNK, each_panel};
use super::{PANEL, unit_bytes};
use crate::activations::{FloatRows, IntRows};

/// Vectors of four lanes in a panel.
const QUARTERS: usize = PANEL / 4;

/// A kernel for one packed format.
type IntPanel = unsafe fn(usize, &[u8], &IntRows<'_>, &mut [[f32; PANEL]]);

/// As [`scalar::int`](super::scalar::int).
#[target_feature(enable = "neon,dotprod")]
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
#[target_feature(enable = "neon,dotprod")]
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
#[target_feature(enable = "neon,dotprod")]
#[inline]
unsafe fn int_rows<K: Kind, const T: usize>(
    unit: usize,
    panel: &[u8],
    x: &IntRows<'_>,
    first: usize,
    out: &mut [[f32; PANEL]; T],
) {
    // With one or two rows the whole panel fits the registers, and memory is read once, in order.
    // SAFETY: as promised by the caller; these are the quarters of a panel.
    unsafe {
        if T <= 2 {
            int_tile::<K, T, 4>(unit, panel, x, first, 0, out);
        } else {
            int_tile::<K, T, 2>(unit, panel, x, first, 0, out);
            int_tile::<K, T, 2>(unit, panel, x, first, 2, out);
        }
    }
}

/// `T` rows times `Q` quarters of a panel of quantized weights.
///
/// # Safety
/// As [`int_rows`], and `quarter + Q <= QUARTERS`.
#[target_feature(enable = "neon,dotprod")]
#[inline]
unsafe fn int_tile<K: Kind, const T: usize, const Q: usize>(
    unit: usize,
    panel: &[u8],
    x: &IntRows<'_>,
    first: usize,
    quarter: usize,
    out: &mut [[f32; PANEL]; T],
) {
    let shape = const { K::SHAPE };
    let unit_bytes = shape.head() + unit * shape.block_bytes();
    let blocks = x.cols / BLOCK;
    let mut acc = [[vdupq_n_f32(0.0); Q]; T];
    // SAFETY: unit `u` of the panel is `unit_bytes`, and its blocks are read up to their ends; row `first + t` has `cols` values
    // in `q` and `blocks` scales, sums and totals; `out` has `QUARTERS` quarters.
    unsafe {
        let rows: [*const i8; T] = std::array::from_fn(|t| x.q.as_ptr().add((first + t) * x.cols));
        for (u, b) in (0..blocks).step_by(unit).enumerate() {
            let head = panel.as_ptr().add(u * unit_bytes);
            for part in 0..unit {
                let (b, block) = (b + part, head.add(shape.head() + part * shape.block_bytes()));
                let values = block.add(shape.block_head() + 16 * quarter);
                let mut scales = [BlockScales::ZERO; Q];
                for (q, scales) in scales.iter_mut().enumerate() {
                    *scales = block_scales::<K>(head, block, quarter + q);
                }
                for side in 0..if shape.split { 2 } else { 1 } {
                    let mut dot = [[vdupq_n_s32(0); Q]; T];
                    if shape.shift != 0 {
                        for (t, dot) in dot.iter_mut().enumerate() {
                            let total = *x.totals.as_ptr().add((first + t) * blocks + b);
                            *dot = [vdupq_n_s32(shape.shift * total); Q];
                        }
                    }
                    let at = b * BLOCK;
                    if shape.bits == 4 {
                        dot4(values, &rows, at, &mut dot);
                    } else if shape.split {
                        dot8(values.add(4 * 4 * PANEL * side), &rows, at + 16 * side, &mut dot);
                    } else {
                        dot8(values, &rows, at, &mut dot);
                        dot8(values.add(4 * 4 * PANEL), &rows, at + 16, &mut dot);
                    }
                    for t in 0..T {
                        let scale = *x.scales.as_ptr().add((first + t) * blocks + b);
                        for q in 0..Q {
                            let sum = vmulq_f32(vcvtq_f32_s32(dot[t][q]), scales[q].scales[side]);
                            acc[t][q] = vfmaq_n_f32(acc[t][q], sum, scale);
                        }
                    }
                }
                if shape.affine {
                    for (t, acc) in acc.iter_mut().enumerate() {
                        let sum = *x.sums.as_ptr().add((first + t) * blocks + b);
                        for q in 0..Q {
                            acc[q] = vfmaq_n_f32(acc[q], scales[q].minimum, sum);
                        }
                    }
                }
            }
        }
        for (acc, out) in acc.iter().zip(out) {
            for (q, acc) in acc.iter().enumerate() {
                vst1q_f32(out.as_mut_ptr().add(4 * (quarter + q)), *acc);
            }
        }
    }
}

// What follows up to the f32 kernels must become part of its caller, or vectors would travel through memory. Hence it is
// inlined by order, which excludes features of its own, and works without closures.

/// `$body` for each constant `$i` in 0..4.
macro_rules! four {
    ($i:ident => $body:expr) => {
        four!(@ $i, $body, 0 1 2 3)
    };
    (@ $i:ident, $body:expr, $($n:literal)*) => {
        $({
            const $i: i32 = $n;
            $body
        })*
    };
}

/// `sum + w · q` in each lane, of four bytes each; all lanes take the `I`-th four of `q`.
///
/// # Safety
/// Must become part of a function that is compiled for `dotprod`.
#[inline(always)]
pub(crate) unsafe fn dot<const I: i32>(mut sum: int32x4_t, w: int8x16_t, q: int8x16_t) -> int32x4_t {
    // SAFETY: arithmetic on registers; the caller sees to it that the instruction exists. The intrinsic for it is not
    // stable.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {w:v}.16b, {q:v}.4b[{i}]",
            sum = inout(vreg) sum,
            w = in(vreg) w,
            q = in(vreg) q,
            i = const I,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// The integer products of `T` rows, from column `at` on, and `Q` quarters of a block of 4-bit weights.
///
/// # Safety
/// `values` must be the values of a block from the first quarter on, and each row have 32 columns more; else as [`dot`].
#[inline(always)]
unsafe fn dot4<const T: usize, const Q: usize>(
    values: *const u8,
    rows: &[*const i8; T],
    at: usize,
    sums: &mut [[int32x4_t; Q]; T],
) {
    // SAFETY: as promised; a block has four groups of values.
    unsafe {
        let nibble = vdupq_n_u8(15);
        let mut x = [[vdupq_n_s8(0); 2]; T];
        for (x, row) in x.iter_mut().zip(rows) {
            *x = [vld1q_s8(row.add(at)), vld1q_s8(row.add(at + 16))];
        }
        four!(I => {
            for q in 0..Q {
                let bytes = vld1q_u8(values.add(4 * PANEL * I as usize + 16 * q));
                let low = vreinterpretq_s8_u8(vandq_u8(bytes, nibble));
                let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes));
                for (sums, x) in sums.iter_mut().zip(&x) {
                    sums[q] = dot::<I>(sums[q], low, x[0]);
                    sums[q] = dot::<I>(sums[q], high, x[1]);
                }
            }
        });
    }
}

/// The integer products of `T` rows, from column `at` on, and `Q` quarters of four groups of 8-bit weights.
///
/// # Safety
/// `values` must be the first of four groups, from the first quarter on, and each row have 16 columns more; else as
/// [`dot`].
#[inline(always)]
unsafe fn dot8<const T: usize, const Q: usize>(
    values: *const u8,
    rows: &[*const i8; T],
    at: usize,
    sums: &mut [[int32x4_t; Q]; T],
) {
    // SAFETY: as promised.
    unsafe {
        let mut x = [vdupq_n_s8(0); T];
        for (x, row) in x.iter_mut().zip(rows) {
            *x = vld1q_s8(row.add(at));
        }
        four!(I => {
            for q in 0..Q {
                let w = vld1q_s8(values.add(4 * PANEL * I as usize + 16 * q).cast());
                for (sums, x) in sums.iter_mut().zip(&x) {
                    sums[q] = dot::<I>(sums[q], w, *x);
                }
            }
        });
    }
}

/// Four lanes of what [`Block::scales`](super::scalar::Block::scales) says.
#[derive(Clone, Copy)]
struct BlockScales {
    scales: [float32x4_t; 2],
    minimum: float32x4_t,
}

impl BlockScales {
    // SAFETY: four floats are as many bytes, and all bits 0 is the float 0.
    const ZERO: BlockScales = unsafe { std::mem::zeroed() };
}

/// # Safety
/// `head` must be that of a unit, and `block` one of its blocks; `quarter < QUARTERS`.
#[inline(always)]
unsafe fn block_scales<K: Kind>(head: *const u8, block: *const u8, quarter: usize) -> BlockScales {
    let shape = const { K::SHAPE };
    // SAFETY: the head has 16 scales and, if affine, as many minima; a nested block 32 small ones.
    unsafe {
        let scale = head_scales::<K>(head, quarter);
        let minimum =
            if shape.affine { head_scales::<K>(head, quarter + QUARTERS) } else { vdupq_n_f32(0.0) };
        if shape.scales != Scales::Nested {
            return BlockScales { scales: [scale; 2], minimum };
        }
        let (first, second) =
            (small_scales::<K>(block, quarter), small_scales::<K>(block, quarter + QUARTERS));
        if shape.split {
            BlockScales { scales: [vmulq_f32(scale, first), vmulq_f32(scale, second)], minimum }
        } else {
            BlockScales { scales: [vmulq_f32(scale, first); 2], minimum: vmulq_f32(minimum, second) }
        }
    }
}

/// The `i`-th four scales or minima of the head of a unit.
///
/// # Safety
/// They must be there.
#[inline(always)]
unsafe fn head_scales<K: Kind>(head: *const u8, i: usize) -> float32x4_t {
    // SAFETY: as promised.
    unsafe {
        let at = head.add(4 * i * K::SHAPE.scale_bytes());
        match K::SHAPE.scales {
            Scales::F32 => F32::load(at),
            Scales::Bf16 => Bf16::load(at),
            Scales::F16 | Scales::Nested => F16::load(at),
        }
    }
}

/// The `i`-th four small scales of a block.
///
/// # Safety
/// They must be there.
#[inline(always)]
unsafe fn small_scales<K: Kind>(block: *const u8, i: usize) -> float32x4_t {
    // SAFETY: as promised.
    unsafe {
        let bytes = vcreate_u8(block.add(4 * i).cast::<u32>().read_unaligned().into());
        if K::SHAPE.split {
            let words = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes)));
            vcvtq_f32_s32(vmovl_s16(words))
        } else {
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))))
        }
    }
}

/// As [`scalar::float`](super::scalar::float).
#[target_feature(enable = "neon")]
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
                    let bytes = bytemuck::cast_slice(&decoded[..cols * PANEL]);
                    float_rows::<F32>(bytes, x, c * CHUNK..c * CHUNK + cols, out);
                }
            }
        }
    }
}

/// With one row, the sums of one panel would wait for each other: two panels at a time keep the units busy.
#[target_feature(enable = "neon")]
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

/// Loads four stored floats.
trait Load {
    const SIZE: usize;

    /// # Safety
    /// `at` must be valid for four values.
    unsafe fn load(at: *const u8) -> float32x4_t;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    const SIZE: usize = 4;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> float32x4_t {
        // SAFETY: as promised.
        unsafe { vreinterpretq_f32_u8(vld1q_u8(at)) }
    }
}

impl Load for F16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> float32x4_t {
        // SAFETY: as promised.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at))) }
    }
}

impl Load for Bf16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> float32x4_t {
        // SAFETY: as promised. A bfloat16 is the upper half of an f32.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(at)))) }
    }
}

/// Adds the columns `cols` of a panel, stored `[cols][PANEL]` in `weights`, to `out`.
#[target_feature(enable = "neon")]
fn float_rows<W: Load>(weights: &[u8], x: &FloatRows<'_>, cols: Range<usize>, out: &mut [[f32; PANEL]]) {
    assert!(weights.len() == cols.len() * PANEL * W::SIZE && cols.end <= x.cols, "columns");
    assert!(x.values.len() >= out.len() * x.cols, "rows");
    let mut first = 0;
    // SAFETY: the lengths were checked for all rows of `out`, which are taken in turn.
    unsafe {
        let (tiles, rest) = out.as_chunks_mut::<4>();
        for tile in tiles {
            float_tile::<W, 4, 1>([weights], x, cols.clone(), first, &mut [tile]);
            first += 4;
        }
        let (pairs, last) = rest.as_chunks_mut::<2>();
        for tile in pairs {
            float_tile::<W, 2, 1>([weights], x, cols.clone(), first, &mut [tile]);
            first += 2;
        }
        if let [row] = last {
            float_tile::<W, 1, 1>([weights], x, cols, first, &mut [std::array::from_mut(row)]);
        }
    }
}

/// Adds `P` panels times `T` rows to `out`.
///
/// # Safety
/// Each of `weights` must hold the columns `cols`, which lie inside the rows, and `x` the rows `first..first + T`.
#[target_feature(enable = "neon")]
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
        let mut acc = [[[vdupq_n_f32(0.0); QUARTERS]; T]; P];
        for (acc, out) in acc.iter_mut().zip(out.iter()) {
            for (acc, out) in acc.iter_mut().zip(out.iter()) {
                for (q, acc) in acc.iter_mut().enumerate() {
                    *acc = vld1q_f32(out.as_ptr().add(4 * q));
                }
            }
        }
        for k in 0..cols.len() {
            for p in 0..P {
                let at = weights[p].as_ptr().add(k * PANEL * W::SIZE);
                let mut w = [vdupq_n_f32(0.0); QUARTERS];
                for (q, w) in w.iter_mut().enumerate() {
                    *w = W::load(at.add(4 * q * W::SIZE));
                }
                for t in 0..T {
                    let x = *rows[t].add(k);
                    for q in 0..QUARTERS {
                        acc[p][t][q] = vfmaq_n_f32(acc[p][t][q], w[q], x);
                    }
                }
            }
        }
        for (acc, out) in acc.iter().zip(out) {
            for (acc, out) in acc.iter().zip(out.iter_mut()) {
                for (q, acc) in acc.iter().enumerate() {
                    vst1q_f32(out.as_mut_ptr().add(4 * q), *acc);
                }
            }
        }
    }
}

/// Decodes a packed unit to `[block_len][PANEL]`.
#[target_feature(enable = "neon")]
fn decode_unit(format: Format, unit: &[u8], out: &mut [f32]) {
    assert!(unit.len() == unit_bytes(format) && out.len() == format.block_len() * PANEL, "unit");
    let (blocks, _) = out.as_chunks_mut();
    let decode: unsafe fn(&[u8], &mut [[f32; PANEL * BLOCK]]) = with_kind!(format, K => decode_blocks::<K>);
    // SAFETY: the unit is whole, and `blocks` are as many as it has.
    unsafe { decode(unit, blocks) };
}

/// # Safety
/// `unit` must be one of the format, with as many blocks as `out`.
#[target_feature(enable = "neon")]
unsafe fn decode_blocks<K: Kind>(unit: &[u8], out: &mut [[f32; PANEL * BLOCK]]) {
    let shape = const { K::SHAPE };
    let nibble = vdupq_n_s32(15);
    let shift = vdupq_n_s32(shape.shift);
    for (part, out) in out.iter_mut().enumerate() {
        for quarter in 0..QUARTERS {
            // SAFETY: the block has eight (four, at 4 bits) groups of four times 16 bytes after its small scales; `out` is 32
            // columns of four times four floats.
            unsafe {
                let block = unit.as_ptr().add(shape.head() + part * shape.block_bytes());
                let BlockScales { scales, minimum } = block_scales::<K>(unit.as_ptr(), block, quarter);
                let mut put = |k: usize, q: int32x4_t| {
                    let q = if shape.shift == 0 { q } else { vaddq_s32(q, shift) };
                    let mut value = vmulq_f32(scales[k / 16], vcvtq_f32_s32(q));
                    if shape.affine {
                        value = vaddq_f32(value, minimum);
                    }
                    vst1q_f32(out.as_mut_ptr().add(k * PANEL + 4 * quarter), value);
                };
                let values = block.add(shape.block_head() + 16 * quarter);
                for group in 0..shape.bits {
                    let mut w = vreinterpretq_s32_u8(vld1q_u8(values.add(4 * PANEL * group)));
                    if shape.bits == 8 {
                        // From the last byte of each lane to the first, so that each in turn is the topmost.
                        for j in (0..4).rev() {
                            put(4 * group + j, vshrq_n_s32::<24>(w));
                            w = vshlq_n_s32::<8>(w);
                        }
                    } else {
                        for j in 0..4 {
                            put(4 * group + j, vandq_s32(w, nibble));
                            put(BLOCK / 2 + 4 * group + j, vandq_s32(vshrq_n_s32::<4>(w), nibble));
                            w = vshrq_n_s32::<8>(w);
                        }
                    }
                }
            }
        }
    }
}
