//! How keys and values lie in memory.
//!
//! The KV cache of one layer is a list of *blocks* of [`KV_BLOCK`] tokens at absolute positions: block b holds
//! tokens `b * KV_BLOCK ..` of its sequence. A block is, for each kv head in turn,
//!
//! * K transposed, `[head_dim][KV_BLOCK]`: attention scores have tokens in the lanes, so that a dot product is a
//!   chain of multiply-adds over the dimensions with no sum across lanes; and
//! * V, `[KV_BLOCK][head_dim]`: the weighted sum has dimensions in the lanes and is a chain over tokens.
//!
//! Both are read front to back. The price is paid by the writer, who scatters each key over `head_dim` lines: once,
//! where attention reads it once per later token. Values are rounded to the cache's type here and nowhere else;
//! whoever reads them sees the same numbers, whether they were written in this step or long ago.
//!
//! A block belongs to whoever owns its bytes: this module only reads and writes plain, 64-byte aligned slices.

use crate::lanes::{LANES, Lanes, with_lanes};
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
}

impl KvType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F16 => size_of::<f16>(),
            Self::F32 => size_of::<f32>(),
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
        self.width() * self.dtype.size()
    }

    /// Floats in one token's keys, and in its values: all kv heads.
    pub const fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Copies the first `tokens` tokens of a block: copy-on-write of a block that is partly filled.
    ///
    /// # Panics
    /// If a block does not fit this layout, or `tokens` does not fit a block.
    pub fn copy_prefix(&self, src: &[u8], dst: &mut [u8], tokens: usize) {
        self.check(src);
        self.check(dst);
        assert!(tokens <= KV_BLOCK, "{tokens} tokens of a block of {KV_BLOCK}");
        let size = self.dtype.size();
        let part = self.head_dim * KV_BLOCK * size;
        for (src, dst) in src.chunks_exact(2 * part).zip(dst.chunks_exact_mut(2 * part)) {
            let ((src_k, src_v), (dst_k, dst_v)) = (src.split_at(part), dst.split_at_mut(part));
            let line = KV_BLOCK * size;
            for (src, dst) in src_k.chunks_exact(line).zip(dst_k.chunks_exact_mut(line)) {
                dst[..tokens * size].copy_from_slice(&src[..tokens * size]);
            }
            let filled = tokens * self.head_dim * size;
            dst_v[..filled].copy_from_slice(&src_v[..filled]);
        }
    }

    /// Copies one token's keys and values out, as they are stored: `row_bytes()` each, kv heads in order.
    ///
    /// # Panics
    /// If `block`, `slot`, `k` or `v` does not fit this layout.
    pub fn export(&self, block: &[u8], slot: usize, k: &mut [u8], v: &mut [u8]) {
        self.check(block);
        self.check_row(slot, k.len(), v.len());
        let (size, part) = (self.dtype.size(), self.head_dim * KV_BLOCK * self.dtype.size());
        let width = self.head_dim * size;
        for (head, (k, v)) in k.chunks_exact_mut(width).zip(v.chunks_exact_mut(width)).enumerate() {
            let (keys, values) = block[head * 2 * part..][..2 * part].split_at(part);
            for (to, line) in k.chunks_exact_mut(size).zip(keys.chunks_exact(KV_BLOCK * size)) {
                to.copy_from_slice(&line[slot * size..][..size]);
            }
            v.copy_from_slice(&values[slot * width..][..width]);
        }
    }

    /// Writes one token's keys and values as [`KvLayout::export`] gave them.
    ///
    /// # Panics
    /// If `block`, `slot`, `k` or `v` does not fit this layout.
    pub fn import(&self, block: &mut [u8], slot: usize, k: &[u8], v: &[u8]) {
        self.check(block);
        self.check_row(slot, k.len(), v.len());
        let (size, part) = (self.dtype.size(), self.head_dim * KV_BLOCK * self.dtype.size());
        let width = self.head_dim * size;
        for (head, (k, v)) in k.chunks_exact(width).zip(v.chunks_exact(width)).enumerate() {
            let (keys, values) = block[head * 2 * part..][..2 * part].split_at_mut(part);
            for (from, line) in k.chunks_exact(size).zip(keys.chunks_exact_mut(KV_BLOCK * size)) {
                line[slot * size..][..size].copy_from_slice(from);
            }
            values[slot * width..][..width].copy_from_slice(v);
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
    const IS_F32: bool;

    fn load<L: Lanes>(lanes: L, x: &[Self; LANES]) -> L::V;
    fn store<L: Lanes>(lanes: L, v: L::V, x: &mut [Self; LANES]);
}

impl Element for f32 {
    const IS_F32: bool = true;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[Self; LANES]) -> L::V {
        lanes.load(x)
    }
    #[inline(always)]
    fn store<L: Lanes>(lanes: L, v: L::V, x: &mut [Self; LANES]) {
        lanes.store(v, x);
    }
}

impl Element for f16 {
    const IS_F32: bool = false;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[Self; LANES]) -> L::V {
        lanes.load_f16(x)
    }
    #[inline(always)]
    fn store<L: Lanes>(lanes: L, v: L::V, x: &mut [Self; LANES]) {
        lanes.store_f16(v, x);
    }
}

/// One kv head of a block: K as a line of tokens per dimension, V as `KV_BLOCK` rows of `head_dim`.
pub(crate) fn head<'a, E: Element>(
    layout: &KvLayout,
    block: &'a [u8],
    kv_head: usize,
) -> (&'a [[E; KV_BLOCK]], &'a [E]) {
    let part = layout.head_dim * KV_BLOCK * size_of::<E>();
    let (k, v) = block[kv_head * 2 * part..][..2 * part].split_at(part);
    (bytemuck::cast_slice(k), bytemuck::cast_slice(v))
}

fn head_mut<'a, E: Element>(
    layout: &KvLayout,
    block: &'a mut [u8],
    kv_head: usize,
) -> (&'a mut [[E; KV_BLOCK]], &'a mut [E]) {
    let part = layout.head_dim * KV_BLOCK * size_of::<E>();
    let (k, v) = block[kv_head * 2 * part..][..2 * part].split_at_mut(part);
    (bytemuck::cast_slice_mut(k), bytemuck::cast_slice_mut(v))
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
                match layout.dtype {
                    KvType::F16 => {
                        lanes.vectorize(#[inline(always)] || write_block::<_, f16>(lanes, layout, k, v, write));
                    }
                    KvType::F32 => {
                        lanes.vectorize(#[inline(always)] || write_block::<_, f32>(lanes, layout, k, v, write));
                    }
                }
            }
        });
    });
}

#[inline(always)]
fn write_block<L: Lanes, E: Element>(
    lanes: L,
    layout: &KvLayout,
    k: Rows<'_>,
    v: Rows<'_>,
    write: &mut KvWrite<'_>,
) {
    let dim = layout.head_dim;
    for kv_head in 0..layout.kv_heads {
        let columns = kv_head * dim..(kv_head + 1) * dim;
        let (keys, values) = head_mut::<E>(layout, write.block, kv_head);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::HugeBuffer;
    use crate::path::Path;
    use proptest::prelude::*;

    fn layouts() -> impl Strategy<Value = KvLayout> {
        (1usize..4, 1usize..12, any::<bool>()).prop_map(|(kv_heads, eighths, half)| KvLayout {
            kv_heads,
            head_dim: 8 * eighths,
            dtype: if half { KvType::F16 } else { KvType::F32 },
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
