//! A few queries of one kv head walk over the keys and values that they see.
//!
//! The tokens of a sequence are cut into *partitions* of [`PARTITION`] tokens at absolute positions. A query's partial
//! result over a partition is one online softmax over its tiles, in order; its result is the partial results merged,
//! in order. Both hold whether one thread walks all partitions or each is done by another thread and merged at the
//! end, and whether one query is walked alone or beside others: so the bits are the same.

use std::iter::repeat_n;
use std::ops::Range;

use super::tile::{self, Line, Scoring, Softmax};
use crate::kv::{self, Element, KV_BLOCK, KvLayout};
use crate::lanes::{Lanes, WIDE};
use crate::rows::Rows;

/// Tokens in a partition: a multiple of [`KV_BLOCK`].
pub(super) const PARTITION: usize = 128;

/// Up to this many rows, keys and values are converted to f32 on the way to a register; more share one converted
/// copy of the tile.
const CONVERT_IN_PLACE: usize = 12;

/// Rows that are weighted together where each token sees another part of the tile.
const RAGGED_ROWS: usize = 6;

/// All query heads of some kv heads, of consecutive tokens of a sequence. A *row* is one query head of one token; rows
/// are ordered by kv head, then token, then query head.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    pub layout: &'a KvLayout,
    pub scoring: Scoring,
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

    /// The slots of the tile at `base` that a token sees.
    fn slots(&self, token: usize, base: usize) -> Range<usize> {
        let visible = self.visible(token);
        visible.start.saturating_sub(base)..(visible.end - base).min(KV_BLOCK)
    }

    /// The first partition that a token sees a part of.
    fn first_partition(&self, token: usize) -> usize {
        self.visible(token).start / PARTITION
    }
}

/// Softmaxes and weighted sums of some rows.
#[derive(Default)]
pub(super) struct Accumulator {
    softmax: Vec<Softmax>,
    sums: Vec<f32>,
}

impl Accumulator {
    fn reset(&mut self, rows: usize, dim: usize) {
        self.softmax.clear();
        self.softmax.resize(rows, Softmax::EMPTY);
        self.sums.clear();
        self.sums.resize(rows * dim, 0.0);
    }
}

/// What a thread needs to walk, kept between calls.
#[derive(Default)]
pub(super) struct Scratch {
    q: Vec<f32>,
    lines: Vec<Line>,
    keys: Vec<f32>,
    values: Vec<f32>,
    partial: Accumulator,
    total: Accumulator,
}

impl Scratch {
    /// Takes the queries in, one row after the other.
    pub fn load(&mut self, queries: &Queries<'_>, q: Rows<'_>) {
        self.q.clear();
        for head in 0..queries.kv_heads {
            for token in queries.token..queries.token + queries.tokens {
                self.q.extend_from_slice(&q.row(token)[queries.columns(head)]);
            }
        }
        self.lines.resize(queries.rows().max(self.lines.len()), [0.0; KV_BLOCK]);
        self.total.reset(queries.rows(), queries.layout.head_dim);
    }

    /// Computes the partial result of partition `index`.
    pub fn walk<L: Lanes, E: Element>(&mut self, lanes: L, queries: &Queries<'_>, index: usize) {
        let span = queries.span();
        let start = span.start.max(index * PARTITION);
        let end = span.end.min((index + 1) * PARTITION);
        self.partial.reset(queries.rows(), queries.layout.head_dim);
        for tile in start / KV_BLOCK..end.div_ceil(KV_BLOCK) {
            let base = tile * KV_BLOCK;
            let tokens = queries.seeing(&(base..base + KV_BLOCK));
            if tokens.is_empty() {
                continue;
            }
            for head in 0..queries.kv_heads {
                let rows = queries.rows_of(head, &tokens);
                let tile = kv::head::<E>(queries.layout, queries.blocks[tile], queries.kv_head + head);
                if E::IS_F32 || rows.len() <= CONVERT_IN_PLACE {
                    self.attend(lanes, queries, tokens.clone(), rows, base, tile);
                } else {
                    let (mut k, mut v) = (std::mem::take(&mut self.keys), std::mem::take(&mut self.values));
                    convert(lanes, tile.keys.as_flattened(), &mut k);
                    convert(lanes, tile.values, &mut v);
                    let tile = kv::Head { keys: k.as_chunks().0, values: &v, scales: tile.scales };
                    self.attend(lanes, queries, tokens.clone(), rows, base, tile);
                    (self.keys, self.values) = (k, v);
                }
            }
        }
    }

    /// Some tokens, whose rows at one kv head are `rows`, against the tile at `base`.
    fn attend<L: Lanes, E: Element>(
        &mut self,
        lanes: L,
        queries: &Queries<'_>,
        tokens: Range<usize>,
        rows: Range<usize>,
        base: usize,
        tile: kv::Head<'_, E>,
    ) {
        let kv::Head { keys, values, scales } = tile;
        let (dim, group) = (queries.layout.head_dim, queries.group);
        let lines = &mut self.lines[rows.clone()];
        let sums = &mut self.partial.sums[rows.start * dim..rows.end * dim];
        let softmax = &mut self.partial.softmax[rows.clone()];

        tile::scores(lanes, &self.q[rows.start * dim..rows.end * dim], keys, lines);
        lanes.vectorize(
            #[inline(always)]
            || {
                let rows = lines.iter_mut().zip(softmax).zip(sums.chunks_exact_mut(dim));
                let slots = tokens.clone().flat_map(|token| repeat_n(queries.slots(token, base), group));
                for (((line, softmax), sums), slots) in rows.zip(slots) {
                    if let Some(factor) = tile::soften(lanes, queries.scoring, line, slots, scales, softmax) {
                        tile::rescale(lanes, sums, factor);
                    }
                }
            },
        );

        let mut weigh = |tokens: Range<usize>, slots: Range<usize>| {
            if !slots.is_empty() {
                let rows = tokens.start * group..tokens.end * group;
                let sums = &mut sums[rows.start * dim..rows.end * dim];
                tile::weigh(lanes, &lines[rows], values, dim, slots, sums);
            }
        };
        // Where all tokens see the same slots, all rows go together. Elsewhere a few tokens do, over the slots that
        // they all see, and each alone over those before and after: a token never meets a slot that it does not see.
        let slots = |token: usize| queries.slots(tokens.start + token, base);
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
                    tile::rescale(lanes, out, 1.0 / tile::total(lanes, softmax));
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

/// Converts a part of a tile to f32.
fn convert<L: Lanes, E: Element>(lanes: L, from: &[E], to: &mut Vec<f32>) {
    to.resize(from.len(), 0.0);
    lanes.vectorize(
        #[inline(always)]
        || {
            // A tile has a multiple of 32 values.
            for (from, to) in from.as_chunks::<WIDE>().0.iter().zip(to.as_chunks_mut::<WIDE>().0) {
                lanes.store_wide(E::load_wide(lanes, from), to);
            }
        },
    );
}
