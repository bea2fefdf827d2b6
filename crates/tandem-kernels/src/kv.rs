//! How keys and values lie in memory.
//!
//! The KV cache of one layer is a list of *blocks* of [`KV_BLOCK`] tokens at absolute positions: block b holds
//! tokens `b * KV_BLOCK ..` of its sequence. A block is, for each kv head in turn,
//!
//! * K transposed, `[head_dim][KV_BLOCK]`: attention scores have tokens in the lanes, so that a dot product is a
//!   chain of multiply-adds over the dimensions with no sum across lanes; and
//! * V, `[KV_BLOCK][head_dim]`: the weighted sum has dimensions in the lanes and is a chain over tokens.
//!
//! In the 8-bit type a head's K, and its V, is followed by a scale in f32 for each of the tokens: a key or value is its
//! integer times that, and attention multiplies scores and weights by it instead of every key and value.
//!
//! Both are read front to back. The price is paid by the writer, who scatters each key over `head_dim` lines: once,
//! where attention reads it once per later token. Values are rounded to the cache's type here and nowhere else;
//! whoever reads them sees the same numbers, whether they were written in this step or long ago.
//!
//! A block belongs to whoever owns its bytes: this module only reads and writes plain, 64-byte aligned slices.

use crate::activations::scale_of;
use crate::lanes::{LANES, Lanes, WIDE, with_lanes};
use crate::rows::Rows;
use crate::team::Team;
use half::f16;
use std::mem::size_of;
use std::ops::Range;

/// Tokens in a block, and in a tile of attention.
pub const KV_BLOCK: usize = 32;

/// The alignment of a block, in bytes.
pub const KV_ALIGN: usize = 64;

/// What keys and values are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// IEEE half precision; rounds to nearest, ties to even, and overflows to infinity.
    F16,
    /// Exact.
    F32,
    /// Integers of 8 bits, `round(127 x / max|x|)`, with a scale for the head of a token.
    Q8,
}

impl KvType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F16 => size_of::<f16>(),
            Self::F32 => size_of::<f32>(),
            Self::Q8 => size_of::<i8>(),
        }
    }

    /// Bytes of the scale of a head's key or value.
    const fn scale_size(self) -> usize {
        match self {
            Self::F16 | Self::F32 => 0,
            Self::Q8 => size_of::<f32>(),
        }
    }
}

/// The shape of one layer's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Floats in a head's key, and in its value; a multiple of 8.
    pub head_dim: usize,
    /// What they are stored as.
    pub dtype: KvType,
}

impl KvLayout {
    /// Bytes of a block.
    pub const fn block_bytes(&self) -> usize {
        2 * KV_BLOCK * self.row_bytes()
    }

    /// Bytes of one token's keys, and of its values.
    pub const fn row_bytes(&self) -> usize {
        self.kv_heads * self.head_row_bytes()
    }

    /// Floats in one token's keys, and in its values: all kv heads.
    pub const fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes of the key, and of the value, of one head of one token, its scale included.
    const fn head_row_bytes(&self) -> usize {
        self.head_dim * self.dtype.size() + self.dtype.scale_size()
    }

    /// Bytes of the keys, and of the values, of one head in a block, and how many of them come before the scales.
    const fn part(&self) -> (usize, usize) {
        (KV_BLOCK * self.head_row_bytes(), KV_BLOCK * self.head_dim * self.dtype.size())
    }

    /// Copies the first `tokens` tokens of a block: copy-on-write of a block that is partly filled.
    ///
    /// # Panics
    /// If a block does not fit this layout, or `tokens` does not fit a block.
    pub fn copy_prefix(&self, src: &[u8], dst: &mut [u8], tokens: usize) {
        self.check(src);
        self.check(dst);
        assert!(tokens <= KV_BLOCK, "{tokens} tokens of a block of {KV_BLOCK}");
        let (size, scale) = (self.dtype.size(), self.dtype.scale_size());
        let (part, elements) = self.part();
        for (src, dst) in src.chunks_exact(2 * part).zip(dst.chunks_exact_mut(2 * part)) {
            let ((src_k, src_v), (dst_k, dst_v)) = (src.split_at(part), dst.split_at_mut(part));
            let line = KV_BLOCK * size;
            let (src_lines, dst_lines) = (&src_k[..elements], &mut dst_k[..elements]);
            for (src, dst) in src_lines.chunks_exact(line).zip(dst_lines.chunks_exact_mut(line)) {
                dst[..tokens * size].copy_from_slice(&src[..tokens * size]);
            }
            let filled = tokens * self.head_dim * size;
            dst_v[..filled].copy_from_slice(&src_v[..filled]);
            let scales = elements..elements + tokens * scale;
            dst_k[scales.clone()].copy_from_slice(&src_k[scales.clone()]);
            dst_v[scales.clone()].copy_from_slice(&src_v[scales]);
        }
    }

    /// Copies one token's keys and values out, as they are stored: `row_bytes()` each, kv heads in order, each with its
    /// scale (little endian) at the end if it has one.
    ///
    /// # Panics
    /// If `block`, `slot`, `k` or `v` does not fit this layout.
    pub fn export(&self, block: &[u8], slot: usize, k: &mut [u8], v: &mut [u8]) {
        self.check(block);
        self.check_row(slot, k.len(), v.len());
        let (size, scale) = (self.dtype.size(), self.dtype.scale_size());
        let ((part, elements), width) = (self.part(), self.head_dim * size);
        let row = self.head_row_bytes();
        for (head, (k, v)) in k.chunks_exact_mut(row).zip(v.chunks_exact_mut(row)).enumerate() {
            let (keys, values) = block[head * 2 * part..][..2 * part].split_at(part);
            let lines = keys[..elements].chunks_exact(KV_BLOCK * size);
            for (to, line) in k.chunks_exact_mut(size).zip(lines) {
                to.copy_from_slice(&line[slot * size..][..size]);
            }
            v[..width].copy_from_slice(&values[slot * width..][..width]);
            k[width..].copy_from_slice(&keys[elements + slot * scale..][..scale]);
            v[width..].copy_from_slice(&values[elements + slot * scale..][..scale]);
        }
    }

    /// Writes one token's keys and values as [`KvLayout::export`] gave them.
    ///
    /// # Panics
    /// If `block`, `slot`, `k` or `v` does not fit this layout.
    pub fn import(&self, block: &mut [u8], slot: usize, k: &[u8], v: &[u8]) {
        self.check(block);
        self.check_row(slot, k.len(), v.len());
        let (size, scale) = (self.dtype.size(), self.dtype.scale_size());
        let ((part, elements), width) = (self.part(), self.head_dim * size);
        let row = self.head_row_bytes();
        for (head, (k, v)) in k.chunks_exact(row).zip(v.chunks_exact(row)).enumerate() {
            let (keys, values) = block[head * 2 * part..][..2 * part].split_at_mut(part);
            let lines = keys[..elements].chunks_exact_mut(KV_BLOCK * size);
            for (from, line) in k.chunks_exact(size).zip(lines) {
                line[slot * size..][..size].copy_from_slice(from);
            }
            values[slot * width..][..width].copy_from_slice(&v[..width]);
            keys[elements + slot * scale..][..scale].copy_from_slice(&k[width..]);
            values[elements + slot * scale..][..scale].copy_from_slice(&v[width..]);
        }
    }

    fn check_row(&self, slot: usize, k: usize, v: usize) {
        assert!(slot < KV_BLOCK, "slot {slot} of a block of {KV_BLOCK} tokens");
        let row = self.row_bytes();
        assert!(k == row && v == row, "{k} bytes of keys and {v} of values for a token of {row}");
    }

    /// Panics if `block` is not a block of this layout.
    pub(crate) fn check(&self, block: &[u8]) {
        assert!(
            self.kv_heads > 0 && self.head_dim > 0 && self.head_dim.is_multiple_of(LANES),
            "{} kv heads of {} floats: there must be one, and the floats a multiple of {LANES}",
            self.kv_heads,
            self.head_dim
        );
        let bytes = self.block_bytes();
        assert!(block.len() == bytes, "a KV block of {} bytes where the layout has {bytes}", block.len());
        assert!(
            block.as_ptr().addr().is_multiple_of(KV_ALIGN),
            "a KV block that is not aligned to {KV_ALIGN} bytes"
        );
    }
}

/// A number as the cache stores it.
pub(crate) trait Element: bytemuck::Pod + Send + Sync {
    const IS_F32: bool = false;
    /// Whether the numbers of a token's head have a scale.
    const SCALED: bool = false;

    fn load<L: Lanes>(lanes: L, x: &[Self; LANES]) -> L::V;
    fn load_wide<L: Lanes>(lanes: L, x: &[Self; WIDE]) -> L::W;
}

/// A number that each float is rounded to by itself.
trait Rounded: Element {
    fn store<L: Lanes>(lanes: L, v: L::V, x: &mut [Self; LANES]);
}

impl Element for f32 {
    const IS_F32: bool = true;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[Self; LANES]) -> L::V {
        lanes.load(x)
    }
    #[inline(always)]
    fn load_wide<L: Lanes>(lanes: L, x: &[Self; WIDE]) -> L::W {
        lanes.load_wide(x)
    }
}

impl Rounded for f32 {
    #[inline(always)]
    fn store<L: Lanes>(lanes: L, v: L::V, x: &mut [Self; LANES]) {
        lanes.store(v, x);
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[Self; LANES]) -> L::V {
        lanes.load_f16(x)
    }
    #[inline(always)]
    fn load_wide<L: Lanes>(lanes: L, x: &[Self; WIDE]) -> L::W {
        lanes.load_wide_f16(x)
    }
}

impl Rounded for f16 {
    #[inline(always)]
    fn store<L: Lanes>(lanes: L, v: L::V, x: &mut [Self; LANES]) {
        lanes.store_f16(v, x);
    }
}

impl Element for i8 {
    const SCALED: bool = true;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[Self; LANES]) -> L::V {
        lanes.load_i8(x)
    }
    #[inline(always)]
    fn load_wide<L: Lanes>(lanes: L, x: &[Self; WIDE]) -> L::W {
        lanes.load_wide_i8(x)
    }
}

/// One kv head of a block.
#[derive(Clone, Copy)]
pub(crate) struct Head<'a, E> {
    /// A line of tokens per dimension.
    pub keys: &'a [[E; KV_BLOCK]],
    /// `KV_BLOCK` rows of `head_dim`.
    pub values: &'a [E],
    /// Those of the keys and of the values, a token each, if there are any.
    pub scales: Option<[&'a [f32; KV_BLOCK]; 2]>,
}

pub(crate) fn head<'a, E: Element>(layout: &KvLayout, block: &'a [u8], kv_head: usize) -> Head<'a, E> {
    let (part, elements) = layout.part();
    let (k, v) = block[kv_head * 2 * part..][..2 * part].split_at(part);
    let ((keys, k_scales), (values, v_scales)) = (k.split_at(elements), v.split_at(elements));
    let scales = E::SCALED.then(|| [bytemuck::from_bytes(k_scales), bytemuck::from_bytes(v_scales)]);
    Head { keys: bytemuck::cast_slice(keys), values: bytemuck::cast_slice(values), scales }
}

/// The keys, the values, and the scales of both.
type HeadMut<'a, E> = (&'a mut [[E; KV_BLOCK]], &'a mut [E], [&'a mut [f32]; 2]);

fn head_mut<'a, E: Element>(layout: &KvLayout, block: &'a mut [u8], kv_head: usize) -> HeadMut<'a, E> {
    let (part, elements) = layout.part();
    let (k, v) = block[kv_head * 2 * part..][..2 * part].split_at_mut(part);
    let ((keys, k_scales), (values, v_scales)) = (k.split_at_mut(elements), v.split_at_mut(elements));
    let scales = [bytemuck::cast_slice_mut(k_scales), bytemuck::cast_slice_mut(v_scales)];
    (bytemuck::cast_slice_mut(keys), bytemuck::cast_slice_mut(values), scales)
}

/// Consecutive tokens of a batch that go to consecutive slots of one block.
#[derive(Debug)]
pub struct KvWrite<'a> {
    /// Where to.
    pub block: &'a mut [u8],
    /// The slot of the first of them: its absolute position modulo [`KV_BLOCK`].
    pub slot: usize,
    /// The rows of `k` and `v` they are.
    pub tokens: Range<usize>,
}

/// Rounds keys and values to the cache's type and writes them to their blocks. `k` and `v` have `layout.width()`
/// floats per token, kv heads in order; keys come after rope.
///
/// # Panics
/// If a block, a slot, or `k` or `v` does not fit the layout.
pub fn write_kv(team: &Team, layout: &KvLayout, k: Rows<'_>, v: Rows<'_>, writes: &mut [KvWrite<'_>]) {
    assert!(
        k.width() == layout.width() && v.width() == layout.width(),
        "{} and {} floats of keys and values per token for {layout:?}",
        k.width(),
        v.width()
    );
    for write in writes.iter() {
        layout.check(write.block);
        let fits = write.slot <= KV_BLOCK && write.tokens.len() <= KV_BLOCK - write.slot;
        assert!(fits, "{} tokens at slot {} of a block of {KV_BLOCK}", write.tokens.len(), write.slot);
    }
    with_lanes!(team.path(), lanes => {
        team.chunks_mut(writes, 1, 1, |_, writes| {
            for write in writes {
                lanes.vectorize(
                    #[inline(always)]
                    || match layout.dtype {
                        KvType::F16 => write_block::<_, f16>(lanes, layout, k, v, write),
                        KvType::F32 => write_block::<_, f32>(lanes, layout, k, v, write),
                        KvType::Q8 => quantize_block(layout, k, v, write),
                    },
                );
            }
        });
    });
}

#[inline(always)]
fn write_block<L: Lanes, E: Rounded>(
    lanes: L,
    layout: &KvLayout,
    k: Rows<'_>,
    v: Rows<'_>,
    write: &mut KvWrite<'_>,
) {
    let dim = layout.head_dim;
    for kv_head in 0..layout.kv_heads {
        let columns = kv_head * dim..(kv_head + 1) * dim;
        let (keys, values, _) = head_mut::<E>(layout, write.block, kv_head);
        for (slot, token) in (write.slot..).zip(write.tokens.clone()) {
            let (k, _) = k.row(token)[columns.clone()].as_chunks::<LANES>();
            let (keys, _) = keys.as_chunks_mut::<LANES>();
            for (keys, k) in keys.iter_mut().zip(k) {
                let mut rounded = [E::zeroed(); LANES];
                E::store(lanes, lanes.load(k), &mut rounded);
                for (line, k) in keys.iter_mut().zip(rounded) {
                    line[slot] = k;
                }
            }
            let (v, _) = v.row(token)[columns.clone()].as_chunks::<LANES>();
            let (values, _) = values[slot * dim..][..dim].as_chunks_mut::<LANES>();
            for (to, v) in values.iter_mut().zip(v) {
                E::store(lanes, lanes.load(v), to);
            }
        }
    }
}

/// [`write_block`] to 8 bits.
#[inline(always)]
fn quantize_block(layout: &KvLayout, k: Rows<'_>, v: Rows<'_>, write: &mut KvWrite<'_>) {
    let dim = layout.head_dim;
    for kv_head in 0..layout.kv_heads {
        let columns = kv_head * dim..(kv_head + 1) * dim;
        let (keys, values, [key_scales, value_scales]) = head_mut::<i8>(layout, write.block, kv_head);
        for (slot, token) in (write.slot..).zip(write.tokens.clone()) {
            let k = &k.row(token)[columns.clone()];
            let (scale, inverse) = scale_of(k);
            key_scales[slot] = scale;
            for (line, k) in keys.iter_mut().zip(k) {
                line[slot] = (k * inverse).round_ties_even() as i8;
            }
            let v = &v.row(token)[columns.clone()];
            let (scale, inverse) = scale_of(v);
            value_scales[slot] = scale;
            for (to, v) in values[slot * dim..][..dim].iter_mut().zip(v) {
                *to = (v * inverse).round_ties_even() as i8;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::HugeBuffer;
    use crate::path::Path;
    use proptest::prelude::*;

    fn layouts() -> impl Strategy<Value = KvLayout> {
        let dtype = prop_oneof![Just(KvType::F16), Just(KvType::F32), Just(KvType::Q8)];
        (1usize..4, 1usize..12, dtype).prop_map(|(kv_heads, eighths, dtype)| KvLayout {
            kv_heads,
            head_dim: 8 * eighths,
            dtype,
        })
    }

    fn block(layout: &KvLayout) -> HugeBuffer {
        let mut block = HugeBuffer::zeroed(layout.block_bytes()).unwrap();
        block.fill(0xff);
        block
    }

    fn bytes(layout: &KvLayout, x: &[f32]) -> Vec<u8> {
        match layout.dtype {
            KvType::F16 => x.iter().flat_map(|x| f16::from_f32(*x).to_ne_bytes()).collect(),
            KvType::F32 => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            KvType::Q8 => x
                .chunks(layout.head_dim)
                .flat_map(|head| {
                    let largest = head.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                    let integers =
                        head.iter().map(move |x| (x * (127.0 / largest)).round_ties_even() as i8 as u8);
                    integers.chain((largest / 127.0).to_ne_bytes()).collect::<Vec<_>>()
                })
                .collect(),
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            layout in layouts(),
            seed in prop::collection::vec(prop_oneof![-3f32..3.0, -7e4f32..7e4, -1e-6f32..1e-6], 83),
            slot in 0usize..KV_BLOCK,
            tokens in 1usize..20,
        ) {
            let width = layout.width();
            let floats = |skip: usize| seed.iter().cycle().skip(skip).take(tokens * width).copied().collect::<Vec<_>>();
            let (k, v) = (floats(0), floats(7));
            let here = tokens.min(KV_BLOCK - slot);
            let mut first: Option<Vec<u8>> = None;
            for path in Path::supported() {
                let team = Team::with_path(2, path).unwrap();
                // A first block takes what fits, a second one the rest.
                let (mut a, mut b) = (block(&layout), block(&layout));
                let mut writes = vec![KvWrite { block: &mut a, slot, tokens: 0..here }];
                if here < tokens {
                    writes.push(KvWrite { block: &mut b, slot: 0, tokens: here..tokens });
                }
                write_kv(&team, &layout, Rows::packed(&k, width), Rows::packed(&v, width), &mut writes);
                let (mut got_k, mut got_v) = (vec![0; layout.row_bytes()], vec![0; layout.row_bytes()]);
                let mut copy = block(&layout);
                for token in 0..tokens {
                    let (block, slot) = if token < here { (&a, slot + token) } else { (&b, token - here) };
                    layout.export(block, slot, &mut got_k, &mut got_v);
                    prop_assert_eq!(&got_k, &bytes(&layout, &k[token * width..][..width]));
                    prop_assert_eq!(&got_v, &bytes(&layout, &v[token * width..][..width]));
                    if token < here {
                        layout.import(&mut copy, slot, &got_k, &got_v);
                    }
                }
                // No other slot was touched, by writing or by importing.
                prop_assert_eq!(&copy[..], &a[..]);
                prop_assert_eq!(&first.get_or_insert_with(|| a.to_vec())[..], &a[..], "{}", path);
            }
        }

        #[test]
        fn a_prefix_is_copied_and_nothing_else(layout in layouts(), tokens in 0usize..=KV_BLOCK) {
            let mut source = block(&layout);
            let (mut k, mut v) = (vec![0; layout.row_bytes()], vec![0; layout.row_bytes()]);
            for slot in 0..KV_BLOCK {
                k.fill(slot as u8);
                v.fill(100 + slot as u8);
                layout.import(&mut source, slot, &k, &v);
            }
            let mut copy = block(&layout);
            layout.copy_prefix(&source, &mut copy, tokens);
            for slot in 0..KV_BLOCK {
                layout.export(&copy, slot, &mut k, &mut v);
                let (want_k, want_v) = if slot < tokens { (slot as u8, 100 + slot as u8) } else { (0xff, 0xff) };
                prop_assert!(k.iter().all(|b| *b == want_k) && v.iter().all(|b| *b == want_v));
            }
        }
    }

    #[test]
    fn a_block_of_f16_takes_four_bytes_for_a_key_and_its_value() {
        let layout = KvLayout { kv_heads: 3, head_dim: 64, dtype: KvType::F16 };
        assert_eq!(layout.block_bytes(), 4 * KV_BLOCK * 3 * 64);
        assert_eq!(layout.row_bytes(), 2 * 3 * 64);
    }

    #[test]
    fn what_is_no_number_stays_none_in_8_bits() {
        let layout = KvLayout { kv_heads: 2, head_dim: 8, dtype: KvType::Q8 };
        assert_eq!(layout.row_bytes(), 2 * (8 + 4));
        for path in Path::supported() {
            let mut k = [0.0; 16];
            (k[3], k[8]) = (f32::NAN, f32::INFINITY);
            let mut block = block(&layout);
            let mut writes = [KvWrite { block: &mut block, slot: 5, tokens: 0..1 }];
            let team = Team::with_path(1, path).unwrap();
            write_kv(&team, &layout, Rows::packed(&k, 16), Rows::packed(&[0.0; 16], 16), &mut writes);
            let scales = [0, 1].map(|i| head::<i8>(&layout, &block, i).scales.unwrap().map(|s| s[5]));
            assert!(scales[0][0].is_nan() && scales[1][0].is_infinite());
            assert!(scales.iter().all(|[_, value]| *value == 0.0));
        }
    }

    #[test]
    #[should_panic(expected = "3 tokens at slot 30")]
    fn tokens_that_do_not_fit_the_block_are_refused() {
        let layout = KvLayout { kv_heads: 1, head_dim: 8, dtype: KvType::F32 };
        let mut block = block(&layout);
        let rows = Rows::packed(&[0.0; 24], 8);
        let mut writes = [KvWrite { block: &mut block, slot: 30, tokens: 0..3 }];
        write_kv(&Team::new(1).unwrap(), &layout, rows, rows, &mut writes);
    }

    #[test]
    #[should_panic(expected = "the floats a multiple of 8")]
    fn odd_head_sizes_are_refused() {
        let layout = KvLayout { kv_heads: 1, head_dim: 12, dtype: KvType::F32 };
        layout.copy_prefix(&[], &mut [], 0);
    }
}
