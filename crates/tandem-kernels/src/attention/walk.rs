//! A few queries of one kv head walk over the keys and values that they see.
//!
//! The tokens of a sequence are cut into *partitions* of [`PARTITION`] tokens at absolute positions. A query's partial
//! result over a partition is one softmax over what it sees of that; its result is the partial results merged, in
//! order (the online softmax of Milakov and Gimelshein, 2018). Both hold whether one thread walks all partitions or each is done by another thread and merged at the
//! end, and whether one query is walked alone or beside others: so the bits are the same.

use std::iter::repeat_n;
use std::mem::take;
use std::ops::{Deref, DerefMut, Range};

use super::tile::{self, BLOCKS, Line, PARTITION, Parts, Scales, Softmax, Values};
use crate::kv::{self, Element, KV_BLOCK, KvLayout};
use crate::lanes::{Lanes, WIDE};
use crate::rows::Rows;

/// Up to this many rows, keys and values are converted to f32 on the way to a register; more share one converted
/// copy of the partition.
const CONVERT_IN_PLACE: usize = 12;

/// Rows that are weighted together where each token sees another part of the partition.
const RAGGED_ROWS: usize = 12;

/// All query heads of some kv heads, of consecutive tokens of a sequence. A *row* is one query head of one token; rows
/// are ordered by kv head, then token, then query head.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    pub layout: &'a KvLayout,
    /// Multiplies queries: scores come out in powers of two.
    pub scale: f32,
    /// Of such scores.
    pub softcap: Option<f32>,
    pub window: usize,
    pub blocks: &'a [&'a [u8]],
    /// The first kv head, and how many.
    pub kv_head: usize,
    pub kv_heads: usize,
    /// Query heads per kv head.
    pub group: usize,
    /// The first token, as a row of q.
    pub token: usize,
    /// Its absolute position.
    pub position: usize,
    /// The number of tokens, at least 1.
    pub tokens: usize,
}

impl<'a> Queries<'a> {
    pub fn rows(&self) -> usize {
        self.kv_heads * self.tokens * self.group
    }

    /// The rows of some tokens at the `head`-th of these kv heads.
    fn rows_of(&self, head: usize, tokens: &Range<usize>) -> Range<usize> {
        let first = head * self.tokens;
        (first + tokens.start) * self.group..(first + tokens.end) * self.group
    }

    /// The columns of q and of the output that belong to the `head`-th of these kv heads.
    pub fn columns(&self, head: usize) -> Range<usize> {
        let width = self.group * self.layout.head_dim;
        (self.kv_head + head) * width..(self.kv_head + head + 1) * width
    }

    /// The same tokens, one kv head at a time.
    pub fn by_head(&self) -> impl Iterator<Item = Self> {
        (self.kv_head..self.kv_head + self.kv_heads).map(|kv_head| Self { kv_head, kv_heads: 1, ..*self })
    }

    /// The positions that the `token`-th of these tokens sees.
    fn visible(&self, token: usize) -> Range<usize> {
        let end = self.position + token + 1;
        end.saturating_sub(self.window)..end
    }

    /// The positions that at least one token sees.
    pub fn span(&self) -> Range<usize> {
        self.visible(0).start..self.visible(self.tokens - 1).end
    }

    /// The partitions that at least one token sees a part of.
    pub fn partitions(&self) -> Range<usize> {
        let span = self.span();
        span.start / PARTITION..span.end.div_ceil(PARTITION)
    }

    /// The tokens that see a part of `positions`.
    fn seeing(&self, positions: &Range<usize>) -> Range<usize> {
        let end = positions.end.saturating_add(self.window - 1).saturating_sub(self.position);
        positions.start.saturating_sub(self.position)..end.min(self.tokens)
    }

    /// The slots of the partition at `base` that a token sees.
    fn slots(&self, token: usize, base: usize) -> Range<usize> {
        let visible = self.visible(token);
        visible.start.saturating_sub(base)..(visible.end - base).min(PARTITION)
    }

    /// The first partition that a token sees a part of.
    fn first_partition(&self, token: usize) -> usize {
        self.visible(token).start / PARTITION
    }
}

/// Floats that begin on a cache line, so that a vector of rows that are whole lines lies on one.
#[derive(Default)]
struct Floats {
    lines: Vec<CacheLine>,
    len: usize,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct CacheLine([f32; 16]);

impl Floats {
    /// Makes it `len` floats of unknown values.
    fn resize(&mut self, len: usize) {
        self.len = len;
        if self.lines.len() < len.div_ceil(16) {
            self.lines.resize(len.div_ceil(16), CacheLine([0.0; 16]));
        }
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// Softmaxes and weighted sums of some rows.
#[derive(Default)]
pub(super) struct Accumulator {
    softmax: Vec<Softmax>,
    sums: Floats,
}

impl Accumulator {
    fn reset(&mut self, rows: usize, dim: usize) {
        self.softmax.clear();
        self.softmax.resize(rows, Softmax::EMPTY);
        self.sums.resize(rows * dim);
        self.sums.fill(0.0);
    }
}

/// One kv head of the blocks of a partition.
struct Part<'a, E> {
    /// The position that the partition begins at.
    base: usize,
    /// Which of the queries' kv heads it is.
    head: usize,
    keys: Parts<'a, E>,
    values: Values<'a, E>,
    scales: Option<[Scales<'a>; 2]>,
}

impl<'a, E: Element> Part<'a, E> {
    /// That of partition `index` in `blocks`.
    fn of(queries: &Queries<'a>, head: usize, index: usize, blocks: Range<usize>) -> Self {
        let Queries { layout, kv_head, .. } = *queries;
        let first = index * BLOCKS;
        let tiles: [_; BLOCKS] = std::array::from_fn(|i| {
            let block = first + i;
            blocks.contains(&block).then(|| kv::head::<E>(layout, queries.blocks[block], kv_head + head))
        });
        // What is read afterwards: the next head's keys, or those of the next partition.
        let (later, next) = if head + 1 < queries.kv_heads { (0, head + 1) } else { (BLOCKS, 0) };
        let ahead = std::array::from_fn(|i| match queries.blocks.get(first + later + i) {
            Some(block) if block.len() == layout.block_bytes() => {
                kv::head::<E>(layout, block, kv_head + next).keys.as_flattened()
            }
            _ => &[],
        });
        let scales = |which: usize| {
            tiles.each_ref().map(|tile| match tile {
                Some(kv::Head { scales: Some(scales), .. }) => scales[which],
                _ => &[0.0; KV_BLOCK],
            })
        };
        Self {
            base: first * KV_BLOCK,
            head,
            keys: tiles.each_ref().map(|tile| tile.as_ref().map_or(&[][..], |tile| tile.keys.as_flattened())),
            values: Values {
                parts: tiles.each_ref().map(|tile| tile.as_ref().map_or(&[][..], |tile| tile.values)),
                ahead,
                dim: layout.head_dim,
            },
            scales: E::SCALED.then(|| [scales(0), scales(1)]),
        }
    }

    /// The same in f32, in memory that is kept.
    fn in_f32<'b, L: Lanes>(&self, lanes: L, keys: &'b mut Floats, values: &'b mut Floats) -> Part<'b, f32>
    where
        'a: 'b,
    {
        let Values { parts, dim, .. } = self.values;
        let values =
            Values { parts: converted(lanes, &parts, KV_BLOCK * dim, values), ahead: [&[]; BLOCKS], dim };
        let keys = converted(lanes, &self.keys, KV_BLOCK * dim, keys);
        Part { base: self.base, head: self.head, keys, values, scales: self.scales }
    }
}

/// What a thread needs to walk, kept between calls.
#[derive(Default)]
pub(super) struct Scratch {
    q: Vec<f32>,
    lines: Vec<Line>,
    keys: Floats,
    values: Floats,
    partial: Accumulator,
    total: Accumulator,
}

impl Scratch {
    /// Takes the queries in, one row after the other.
    pub fn load(&mut self, queries: &Queries<'_>, q: Rows<'_>) {
        self.q.clear();
        for head in 0..queries.kv_heads {
            for token in queries.token..queries.token + queries.tokens {
                self.q.extend(q.row(token)[queries.columns(head)].iter().map(|q| q * queries.scale));
            }
        }
        self.lines.resize(queries.rows().max(self.lines.len()), Line([0.0; PARTITION]));
        self.total.reset(queries.rows(), queries.layout.head_dim);
    }

    /// Computes the partial result of partition `index`.
    pub fn walk<L: Lanes, E: Element>(&mut self, lanes: L, queries: &Queries<'_>, index: usize) {
        let base = index * PARTITION;
        let tokens = queries.seeing(&(base..base + PARTITION));
        self.partial.reset(queries.rows(), queries.layout.head_dim);
        let span = queries.span();
        let first = span.start.max(base) / KV_BLOCK;
        let blocks = first..span.end.min(base + PARTITION).div_ceil(KV_BLOCK);
        for head in 0..queries.kv_heads {
            let part = Part::<E>::of(queries, head, index, blocks.clone());
            if E::IS_F32 || tokens.len() * queries.group <= CONVERT_IN_PLACE {
                self.attend(lanes, queries, tokens.clone(), &part);
            } else {
                let (mut keys, mut values) = (take(&mut self.keys), take(&mut self.values));
                self.attend(lanes, queries, tokens.clone(), &part.in_f32(lanes, &mut keys, &mut values));
                (self.keys, self.values) = (keys, values);
            }
        }
    }

    /// Some tokens at one kv head of a partition.
    fn attend<L: Lanes, E: Element>(
        &mut self,
        lanes: L,
        queries: &Queries<'_>,
        tokens: Range<usize>,
        part: &Part<'_, E>,
    ) {
        let Part { base, head, keys, values, scales } = part;
        let (dim, group) = (queries.layout.head_dim, queries.group);
        for (block, keys) in keys.iter().enumerate() {
            let positions = base + block * KV_BLOCK..base + (block + 1) * KV_BLOCK;
            let tokens = queries.seeing(&positions);
            if !keys.is_empty() && !tokens.is_empty() {
                let rows = queries.rows_of(*head, &tokens);
                let q = &self.q[rows.start * dim..rows.end * dim];
                let (keys, _) = keys.as_chunks();
                tile::scores(lanes, q, keys, values.parts[block], block, &mut self.lines[rows]);
            }
        }

        let rows = queries.rows_of(*head, &tokens);
        let lines = &mut self.lines[rows.clone()];
        let sums = &mut self.partial.sums[rows.start * dim..rows.end * dim];
        let softmax = &mut self.partial.softmax[rows];
        let slots = tokens.clone().flat_map(|token| repeat_n(queries.slots(token, *base), group));
        // Each in a loop of its own: together they need more registers than there are.
        macro_rules! each_line {
            (|$line:ident, $slots:ident, $softmax:ident| $body:expr) => {
                lanes.vectorize(
                    #[inline(always)]
                    || {
                        let lines = lines.iter_mut().zip(slots.clone()).zip(&mut *softmax);
                        for (($line, $slots), $softmax) in lines {
                            $body
                        }
                    },
                )
            };
        }
        if let Some([keys, _]) = scales {
            each_line!(|line, slots, _softmax| tile::multiply(lanes, line, &slots, keys));
        }
        if let Some(cap) = queries.softcap {
            each_line!(|line, slots, _softmax| tile::cap(lanes, line, &slots, cap));
        }
        each_line!(|line, slots, softmax| *softmax = tile::soften(lanes, line, &slots));
        if let Some([_, values]) = scales {
            each_line!(|line, slots, _softmax| tile::multiply(lanes, line, &slots, values));
        }

        let mut weigh = |tokens: Range<usize>, slots: Range<usize>| {
            if !slots.is_empty() {
                let rows = tokens.start * group..tokens.end * group;
                let sums = &mut sums[rows.start * dim..rows.end * dim];
                tile::weigh(lanes, &lines[rows], values, slots, sums);
            }
        };
        // Where all tokens see the same slots, all rows go together. Elsewhere a few tokens do, over the slots that
        // they all see, and each alone over those before and after: a token never meets a slot that it does not see.
        let slots = |token: usize| queries.slots(tokens.start + token, *base);
        let step =
            if slots(0) == slots(tokens.len() - 1) { tokens.len() } else { (RAGGED_ROWS / group).max(1) };
        for first in (0..tokens.len()).step_by(step) {
            let some = first..tokens.len().min(first + step);
            let (start, end) = (slots(some.end - 1).start, slots(first).end);
            let common = start..end.max(start);
            for token in some.clone() {
                let own = slots(token);
                weigh(token..token + 1, own.start..own.end.min(common.start));
            }
            weigh(some.clone(), common.clone());
            for token in some {
                let own = slots(token);
                weigh(token..token + 1, own.start.max(common.end)..own.end);
            }
        }
    }

    /// Copies the partial result out: a softmax and `head_dim` floats per row.
    pub fn store(&self, softmax: &mut [Softmax], sums: &mut [f32]) {
        softmax.copy_from_slice(&self.partial.softmax);
        sums.copy_from_slice(&self.partial.sums);
    }

    /// Merges the partial result of `walk` into the total. Partitions must come in order.
    pub fn merge<L: Lanes>(&mut self, lanes: L, queries: &Queries<'_>, index: usize) {
        let partial = &self.partial;
        merge(lanes, queries, index, &mut self.total, &partial.softmax, &partial.sums);
    }

    /// Merges a partial result that was stored.
    pub fn merge_stored<L: Lanes>(
        &mut self,
        lanes: L,
        queries: &Queries<'_>,
        index: usize,
        softmax: &[Softmax],
        sums: &[f32],
    ) {
        merge(lanes, queries, index, &mut self.total, softmax, sums);
    }

    /// Writes the result of one token at one kv head: `group` × `head_dim` floats.
    pub fn finish<L: Lanes>(
        &self,
        lanes: L,
        queries: &Queries<'_>,
        head: usize,
        token: usize,
        out: &mut [f32],
    ) {
        let dim = queries.layout.head_dim;
        let rows = queries.rows_of(head, &(token..token + 1));
        out.copy_from_slice(&self.total.sums[rows.start * dim..rows.end * dim]);
        let softmax = &self.total.softmax[rows];
        lanes.vectorize(
            #[inline(always)]
            || {
                for (out, softmax) in out.chunks_exact_mut(dim).zip(softmax) {
                    tile::rescale(lanes, out, 1.0 / softmax.sum);
                }
            },
        );
    }
}

fn merge<L: Lanes>(
    lanes: L,
    queries: &Queries<'_>,
    index: usize,
    total: &mut Accumulator,
    softmax: &[Softmax],
    sums: &[f32],
) {
    let dim = queries.layout.head_dim;
    let tokens = queries.seeing(&(index * PARTITION..(index + 1) * PARTITION));
    lanes.vectorize(
        #[inline(always)]
        || {
            for (head, token) in
                (0..queries.kv_heads).flat_map(|head| tokens.clone().map(move |token| (head, token)))
            {
                let first = queries.first_partition(token) == index;
                for row in queries.rows_of(head, &(token..token + 1)) {
                    let (row_sums, sums) = (&mut total.sums[row * dim..][..dim], &sums[row * dim..][..dim]);
                    if first {
                        total.softmax[row] = softmax[row];
                        row_sums.copy_from_slice(sums);
                    } else {
                        tile::merge(lanes, &mut total.softmax[row], row_sums, &softmax[row], sums);
                    }
                }
            }
        },
    );
}

/// Parts of `size` elements in f32.
fn converted<'a, L: Lanes, E: Element>(
    lanes: L,
    parts: &Parts<'_, E>,
    size: usize,
    to: &'a mut Floats,
) -> Parts<'a, f32> {
    to.resize(BLOCKS * size);
    let mut to = to.chunks_exact_mut(size);
    parts.map(|part| match to.next() {
        Some(to) if !part.is_empty() => {
            convert(lanes, part, to);
            &*to
        }
        _ => &[],
    })
}

/// Converts a part of a block to f32.
fn convert<L: Lanes, E: Element>(lanes: L, from: &[E], to: &mut [f32]) {
    lanes.vectorize(
        #[inline(always)]
        || {
            // A block has a multiple of 32 values.
            for (from, to) in from.as_chunks::<WIDE>().0.iter().zip(to.as_chunks_mut::<WIDE>().0) {
                lanes.store_wide(E::load_wide(lanes, from), to);
            }
        },
    );
}
