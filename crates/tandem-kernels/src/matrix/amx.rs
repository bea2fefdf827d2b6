//! AMX kernels: sixteen 8-bit rows times two panels, on the tile registers.
//!
//! Every block has scales of its own, so each product of tiles (16 rows, 32 columns, 16 outputs) is stored, and AVX-512
//! goes on with its 16 vectors. On a Xeon of 2023 the multiplication takes 16 cycles and hides behind the rest; the store
//! takes 16 and the arithmetic 16 or more, one after the other. So these are kept short:
//!
//! * A sum starts at [`MAGIC`] instead of zero. Its bits then are, without conversion, those of the float `MAGIC + dot`,
//!   and `fma(MAGIC + dot, d, -MAGIC * d)` is `d * dot`, rounded once, wherever `MAGIC * d` is exact.
//! * A tile is stored two products after its own: earlier, it would wait for it, and so would all stores behind.
//! * Two panels share the scales of eight rows, whose sums stay in registers for a *chunk* of products. The products of
//!   the next chunk are made meanwhile.
//!
//! Stable Rust has no intrinsics for tiles, hence the assembly. The compiler never uses tile registers itself. They are
//! configured and released within one call.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use tandem_model::format::{BLOCK, Format};

use super::avx512::{self, block_scales, groups};
use super::kind::{Kind, Scales, with_kind};
use super::{PANEL, unit_bytes};
use crate::activations::IntRows;

/// Rows that are multiplied together.
pub(super) const GROUP: usize = 16;
/// With this many rows left over, a group that repeats some of those before is faster than AVX-512.
const TAIL: usize = 9;
/// Panels that are multiplied together.
const PANELS: usize = 2;
/// Rows whose sums are in registers.
const HALF: usize = GROUP / 2;
/// Products of a chunk for each panel, at most.
const CHUNK: usize = 3;
/// Blocks of weights that are unpacked at a time. Whole units of every format.
const SEGMENT: usize = 16;
/// In the middle of those floats that are all integers of their range: any sum of a block can be added.
const MAGIC: f32 = 12_582_912.0;

/// One output tile of each panel.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Outputs([[[f32; PANEL]; GROUP]; PANELS]);

/// What sums start from.
static START: Outputs = Outputs([[[MAGIC; PANEL]; GROUP]; PANELS]);

/// A block of both panels, or half of one where halves have scales of their own.
#[repr(C, align(64))]
struct Piece {
    /// `[panel][group of four columns][lane][4]`: a tile. Half a block leaves half of it unused.
    values: [[[u8; 4 * PANEL]; BLOCK / 4]; PANELS],
    /// `d`
    scales: [[f32; PANEL]; PANELS],
    /// `-MAGIC * d`
    starts: [[f32; PANEL]; PANELS],
    minima: [[f32; PANEL]; PANELS],
}

/// Some products: a group of rows times some pieces.
#[derive(Clone, Copy)]
struct Chunk {
    row: usize,
    first: usize,
    last: usize,
    /// Whether the group begins, or ends, with this chunk.
    begins: bool,
    ends: bool,
    /// Where its products go.
    slots: *mut Outputs,
}

/// As [`scalar::int`](super::scalar::int), for one or two panels, each with its `out`.
///
/// # Panics
/// If the lengths do not fit, or there are no columns or fewer rows than [`GROUP`].
///
/// # Safety
/// The path must be that of AMX.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn int(format: Format, panels: &[&[u8]], x: &IntRows<'_>, out: &mut [&mut [[f32; PANEL]]]) {
    let panel = x.cols / format.block_len() * unit_bytes(format);
    assert!((1..=PANELS).contains(&panels.len()) && panels.len() == out.len(), "panels");
    assert!(panels.iter().all(|bytes| bytes.len() == panel), "panel");
    let rows = out[0].len();
    assert!(rows >= GROUP && out.iter().all(|out| out.len() == rows), "rows");
    x.check(rows);
    let run = with_kind!(format, K => int_rows::<K>);
    // A single panel is multiplied twice.
    let each = [panels[0], panels[panels.len() - 1]];
    // SAFETY: the lengths were checked; the caller vouches for the instructions.
    unsafe { run(format.block_len() / BLOCK, each, x, rows, out) };
    let rest = rows % GROUP;
    if (1..TAIL).contains(&rest) {
        let x = x.skip(rows - rest);
        for (panel, out) in each.into_iter().zip(out) {
            avx512::int(format, &[panel], &x, &mut [&mut out[rows - rest..]]);
        }
    }
}

/// [`int`] for whole groups of rows, and for the rest if it is long.
///
/// # Safety
/// Both panels must have `x.cols` columns of the format, `unit` blocks a unit; `x` must hold the rows; `out` is
/// that of one or two panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn int_rows<K: Kind>(
    unit: usize,
    panels: [&[u8]; PANELS],
    x: &IntRows<'_>,
    rows: usize,
    out: &mut [&mut [[f32; PANEL]]],
) {
    let halves = if K::SHAPE.split { 2 } else { 1 };
    let blocks = x.cols / BLOCK;
    let mut pieces = [const { MaybeUninit::<Piece>::uninit() }; SEGMENT * 2];
    let mut slots = [const { MaybeUninit::<Outputs>::uninit() }; 2 * CHUNK];
    let mut sums = Outputs([[[0.0; PANEL]; GROUP]; PANELS]);
    let segment = if K::SHAPE.split { SEGMENT } else { 2 * SEGMENT };
    let starts = (0..rows / GROUP).map(|group| group * GROUP);
    let starts = starts.chain((rows % GROUP >= TAIL).then(|| rows - GROUP));
    // SAFETY: segments are whole units; pieces, slots and rows are those that were made or checked before.
    unsafe {
        configure(BLOCK / halves);
        for begin in (0..blocks).step_by(segment) {
            let end = blocks.min(begin + segment);
            let count = unpack::<K>(unit, panels, begin..end, &mut pieces);
            let parts = count.div_ceil(CHUNK);
            let chunks = starts.clone().flat_map(|row| {
                (0..parts).map(move |part| Chunk {
                    row,
                    first: part * count / parts,
                    last: (part + 1) * count / parts,
                    begins: part == 0,
                    ends: part + 1 == parts,
                    slots: std::ptr::null_mut(),
                })
            });
            let tiles = Tiles { x, halves, begin, pieces: pieces.as_ptr().cast() };
            let mut store = Store { slot: slots.as_mut_ptr().cast(), odd: false };
            let mut before: Option<Chunk> = None;
            for (i, chunk) in chunks.enumerate() {
                let next = Chunk { slots: slots.as_mut_ptr().cast::<Outputs>().add(i % 2 * CHUNK), ..chunk };
                match before {
                    Some(chunk) => sum::<K>(&tiles, &chunk, Some(&next), &mut store, &mut sums, out),
                    None => (0..2 * (next.last - next.first))
                        .for_each(|step| product::<K>(&tiles, &next, step, &mut store)),
                }
                before = Some(next);
            }
            if let Some(chunk) = before {
                store.last();
                sum::<K>(&tiles, &chunk, None, &mut store, &mut sums, out);
            }
        }
        release();
    }
}

/// What products are made of.
struct Tiles<'a> {
    x: &'a IntRows<'a>,
    /// Pieces of a block.
    halves: usize,
    /// The first block of the segment.
    begin: usize,
    pieces: *const Piece,
}

/// The products that are not stored yet.
struct Store {
    slot: *mut Outputs,
    odd: bool,
}

/// Gives the tiles up, so that a switch to another thread need not save them.
///
/// # Safety
/// As [`configure`].
pub(crate) unsafe fn release() {
    // SAFETY: as promised.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Clears the tiles and sets their shapes: 0 to 3 are sums, 4 rows of so many columns, 6 and 7 weights.
///
/// # Safety
/// The path must be that of AMX, and `columns` a multiple of 4 up to 64.
pub(crate) unsafe fn configure(columns: usize) {
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    for tile in 0..4 {
        (config.row_bytes[tile], config.rows[tile]) = (4 * PANEL as u16, GROUP as u8);
    }
    (config.row_bytes[4], config.rows[4]) = (columns as u16, GROUP as u8);
    for tile in 6..8 {
        (config.row_bytes[tile], config.rows[tile]) = (4 * PANEL as u16, columns as u8 / 4);
    }
    // SAFETY: a valid configuration of 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
}

/// Unpacks some blocks of both panels, and says how many pieces they are.
///
/// # Safety
/// They must be whole units of the panels, and pieces enough.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<K: Kind>(
    unit: usize,
    panels: [&[u8]; PANELS],
    blocks: Range<usize>,
    pieces: &mut [MaybeUninit<Piece>],
) -> usize {
    let shape = const { K::SHAPE };
    let unit_bytes = shape.head() + unit * shape.block_bytes();
    let halves = if shape.split { 2 } else { 1 };
    // Of whole blocks of 8 bits, `groups` are unsigned: 128 larger.
    let shift = if shape.bits == 8 && !shape.split { shape.shift - 128 } else { shape.shift };
    let shift = _mm512_set1_epi8(shift as u8 as i8);
    // SAFETY: as promised; the parts of a piece are written as what they are.
    unsafe {
        for (i, b) in blocks.clone().enumerate() {
            for (p, panel) in panels.iter().enumerate() {
                let head = panel.as_ptr().add(b / unit * unit_bytes);
                let block = head.add(shape.head() + b % unit * shape.block_bytes());
                let values = block.add(shape.block_head()).cast::<__m512i>();
                let (scales, minimum) = block_scales::<K>(head, block);
                for half in 0..halves {
                    let piece = pieces[i * halves + half].as_mut_ptr();
                    let scale = scales[half];
                    _mm512_store_ps((&raw mut (*piece).scales[p]).cast(), scale);
                    _mm512_store_ps(
                        (&raw mut (*piece).starts[p]).cast(),
                        _mm512_mul_ps(_mm512_set1_ps(-MAGIC), scale),
                    );
                    if shape.affine {
                        _mm512_store_ps((&raw mut (*piece).minima[p]).cast(), minimum);
                    }
                }
                for g in 0..4 {
                    for (side, group) in groups::<K>(values, g).into_iter().enumerate() {
                        let (piece, at) = if shape.split { (i * 2 + side, g) } else { (i, g + 4 * side) };
                        let to = &raw mut (*pieces[piece].as_mut_ptr()).values[p][at];
                        _mm512_store_si512(to.cast(), _mm512_add_epi8(group, shift));
                    }
                }
            }
        }
    }
    blocks.len() * halves
}

macro_rules! multiply {
    ($op:literal, $store:literal, $sum:literal, $x:literal, $w:literal, $store_to:expr, $weights:expr) => {
        asm!(
            concat!("tileloadd ", $w, ", [{w} + {line}]"),
            concat!("tilestored [{to} + {line}], ", $store),
            concat!("tileloadd ", $sum, ", [{start} + {line}]"),
            concat!($op, " ", $sum, ", ", $x, ", ", $w),
            w = in(reg) $weights,
            to = in(reg) $store_to,
            start = in(reg) &raw const START,
            line = in(reg) 4 * PANEL,
            options(nostack),
        )
    };
}

/// Makes a product of a chunk, in the order of pieces, the panels of each in turn, and stores that of this panel before.
///
/// # Safety
/// Tiles must be configured, and all pointers valid for the chunk.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
unsafe fn product<K: Kind>(tiles: &Tiles<'_>, chunk: &Chunk, step: usize, store: &mut Store) {
    let shape = const { K::SHAPE };
    let (step, second) = (step / 2, step % 2 == 1);
    let piece = chunk.first + step;
    let size = if shape.split { BLOCK / 2 } else { BLOCK };
    // SAFETY: as promised.
    unsafe {
        let weights = (*tiles.pieces.add(piece)).values.as_ptr();
        let to = (*store.slot).0.as_mut_ptr();
        macro_rules! both {
            ($op:literal) => {
                match (second, store.odd) {
                    (false, false) => multiply!($op, "tmm2", "tmm0", "tmm4", "tmm6", to, weights),
                    (false, true) => multiply!($op, "tmm0", "tmm2", "tmm4", "tmm6", to, weights),
                    (true, false) => {
                        multiply!($op, "tmm3", "tmm1", "tmm4", "tmm7", to.add(1), weights.add(1))
                    }
                    (true, true) => multiply!($op, "tmm1", "tmm3", "tmm4", "tmm7", to.add(1), weights.add(1)),
                }
            };
        }
        if !second {
            let q = tiles.x.q.as_ptr().add(chunk.row * tiles.x.cols + tiles.begin * BLOCK + piece * size);
            asm!("tileloadd tmm4, [{q} + {cols}]", q = in(reg) q, cols = in(reg) tiles.x.cols, options(nostack, readonly));
        }
        if shape.bits == 8 && shape.shift == 128 {
            both!("tdpbsud");
        } else {
            both!("tdpbssd");
        }
        if second {
            store.slot = chunk.slots.add(step);
            store.odd = !store.odd;
        }
    }
}

impl Store {
    /// Stores the last products.
    ///
    /// # Safety
    /// As [`product`].
    unsafe fn last(&mut self) {
        // SAFETY: as promised.
        unsafe {
            let (first, second) = ((*self.slot).0.as_mut_ptr(), (*self.slot).0.as_mut_ptr().add(1));
            if self.odd {
                asm!("tilestored [{a} + {line}], tmm0", "tilestored [{b} + {line}], tmm1",
                    a = in(reg) first, b = in(reg) second, line = in(reg) 4 * PANEL, options(nostack));
            } else {
                asm!("tilestored [{a} + {line}], tmm2", "tilestored [{b} + {line}], tmm3",
                    a = in(reg) first, b = in(reg) second, line = in(reg) 4 * PANEL, options(nostack));
            }
        }
    }
}

/// Adds the products of a chunk to the sums of its group while it makes those of the next.
///
/// # Safety
/// As [`product`]; the products of the chunk must be made, and all but its last stored.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sum<K: Kind>(
    tiles: &Tiles<'_>,
    chunk: &Chunk,
    next: Option<&Chunk>,
    store: &mut Store,
    sums: &mut Outputs,
    out: &mut [&mut [[f32; PANEL]]],
) {
    let shape = const { K::SHAPE };
    let exact = shape.scales != Scales::F32;
    let blocks = tiles.x.cols / BLOCK;
    let steps = next.map_or(0, |next| 2 * (next.last - next.first));
    // SAFETY: as promised.
    unsafe {
        let mut step = 0;
        if let Some(next) = next {
            // Stores the last of ours.
            for _ in 0..2 {
                product::<K>(tiles, next, step, store);
                step += 1;
            }
        }
        if chunk.begins {
            for (p, sums) in sums.0.iter_mut().enumerate() {
                if tiles.begin == 0 {
                    *sums = [[0.0; PANEL]; GROUP];
                } else if let Some(out) = out.get(p) {
                    sums.copy_from_slice(&out[chunk.row..chunk.row + GROUP]);
                }
            }
        }
        for half in 0..2 {
            let mut acc: [[__m512; HALF]; PANELS] = std::array::from_fn(|p| {
                std::array::from_fn(|t| _mm512_load_ps(sums.0[p][half * HALF + t].as_ptr()))
            });
            for piece in chunk.first..chunk.last {
                let weights = &*tiles.pieces.add(piece);
                let dots = &*chunk.slots.add(piece - chunk.first);
                let at = (chunk.row + half * HALF) * blocks + tiles.begin + piece / tiles.halves;
                let vectors = |of: &[[f32; PANEL]; PANELS]| of.map(|of| _mm512_loadu_ps(of.as_ptr()));
                let (d, m) = (
                    vectors(&weights.scales),
                    if exact { vectors(&weights.starts) } else { [_mm512_set1_ps(MAGIC); 2] },
                );
                let dots = dots.0.as_ptr().cast::<[f32; PANEL]>().add(half * HALF);
                let scale = tiles.x.scales.as_ptr().add(at);
                let minima = if shape.affine { vectors(&weights.minima) } else { [_mm512_setzero_ps(); 2] };
                // In assembly, as the compiler would load all at once and lack registers for the sums.
                macro_rules! rows {
                    ($($t:literal)*) => { $({
                        let [a, b] = &mut acc;
                        let (a, b) = (&mut a[$t], &mut b[$t]);
                        if exact {
                            asm!(
                                "vmovaps zmm29, [{dots} + 64 * {t}]",
                                "vmovaps zmm30, [{dots} + 64 * {t} + 1024]",
                                "vbroadcastss zmm31, dword ptr [{scale}]",
                                "vfmadd213ps zmm29, {d}, {m}",
                                "vfmadd213ps zmm30, {e}, {n}",
                                "vfmadd231ps {a}, zmm29, zmm31",
                                "vfmadd231ps {b}, zmm30, zmm31",
                                t = const $t, dots = in(reg) dots, scale = in(reg) scale.add($t * blocks),
                                a = inout(zmm_reg) *a, b = inout(zmm_reg) *b,
                                d = in(zmm_reg) d[0], e = in(zmm_reg) d[1], m = in(zmm_reg) m[0], n = in(zmm_reg) m[1],
                                out("zmm29") _, out("zmm30") _, out("zmm31") _,
                                options(nostack, readonly, preserves_flags),
                            );
                        } else {
                            asm!(
                                "vmovaps zmm29, [{dots} + 64 * {t}]",
                                "vmovaps zmm30, [{dots} + 64 * {t} + 1024]",
                                "vbroadcastss zmm31, dword ptr [{scale}]",
                                "vsubps zmm29, zmm29, {m}",
                                "vsubps zmm30, zmm30, {m}",
                                "vmulps zmm29, zmm29, {d}",
                                "vmulps zmm30, zmm30, {e}",
                                "vfmadd231ps {a}, zmm29, zmm31",
                                "vfmadd231ps {b}, zmm30, zmm31",
                                t = const $t, dots = in(reg) dots, scale = in(reg) scale.add($t * blocks),
                                a = inout(zmm_reg) *a, b = inout(zmm_reg) *b,
                                d = in(zmm_reg) d[0], e = in(zmm_reg) d[1], m = in(zmm_reg) m[0],
                                out("zmm29") _, out("zmm30") _, out("zmm31") _,
                                options(nostack, readonly, preserves_flags),
                            );
                        }
                        if shape.affine {
                            let total = _mm512_set1_ps(*tiles.x.sums.as_ptr().add(at + $t * blocks));
                            *a = _mm512_fmadd_ps(minima[0], total, *a);
                            *b = _mm512_fmadd_ps(minima[1], total, *b);
                        }
                    })* };
                }
                rows!(0 1 2 3 4 5 6 7);
                if let Some(next) = next
                    && step < steps
                {
                    product::<K>(tiles, next, step, store);
                    step += 1;
                }
            }
            for (acc, sums) in acc.iter().zip(&mut sums.0) {
                for (acc, sums) in acc.iter().zip(&mut sums[half * HALF..]) {
                    _mm512_store_ps(sums.as_mut_ptr(), *acc);
                }
            }
        }
        if let Some(next) = next {
            while step < steps {
                product::<K>(tiles, next, step, store);
                step += 1;
            }
        }
    }
    if chunk.ends {
        // The rows that a group at the tail repeats are there already.
        let done = chunk.row.next_multiple_of(GROUP) - chunk.row;
        for (sums, out) in sums.0.iter().zip(out) {
            out[chunk.row + done..chunk.row + GROUP].copy_from_slice(&sums[done..]);
        }
    }
}
