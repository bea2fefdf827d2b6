//! Causal attention of a ragged batch over paged keys and values: one operation for prefill, for decode, and for both
//! in the same step.
//!
//! The result for a (token, head) has the same bits whatever else is in the batch, however a prompt is cut into chunks,
//! and however many threads there are:
//!
//! * keys and values are read *after* they were rounded to the cache's type ([`crate::kv`]);
//! * partitions of tokens lie at absolute positions, and their results are merged in order by the same formulas in all
//!   cases (`walk`);
//! * within a partition, each output float is one accumulator with one order of arithmetic (`tile`).
//!
//! What varies is only who does what. The unit of work is a tile of queries of one kv head: several consecutive tokens
//! × the query heads that share its keys, which are thus read once for all of them. If there are too few such units
//! to keep all threads busy, as in decode, each partition of the context becomes a unit (flash decoding), and a second
//! round merges the partial results. Scratch memory is a few tiles per thread, and in the second case a few rows per
//! partition: nothing grows with the square of the context.

mod tile;
mod walk;

#[cfg(test)]
mod tests;

use half::f16;
use std::cell::RefCell;
use std::f32::consts::LOG2_E;

use crate::kv::{Element, KV_BLOCK, KvLayout, KvType};
use crate::lanes::{Lanes, with_lanes};
use crate::rows::Rows;
use crate::team::{SharedMut, Team};
use tile::Softmax;
use walk::{Queries, Scratch};

/// Most rows (query heads × tokens) in a unit of work: large enough to pay for converting keys and values, small enough
/// for the cache. The first with which there are enough units is taken.
const TILE_ROWS: [usize; 5] = [192, 96, 48, 24, 12];

/// Units of work per thread that are enough to balance them.
const UNITS_PER_THREAD: usize = 4;

/// Rows × visible tokens × dimensions up to which cutting up the context costs more than it saves: some ten microseconds
/// of one thread. Tests cut up whatever they can.
const SMALL_WORK: usize = if cfg!(test) { 0 } else { 1 << 17 };

/// What attention computes: softmax(scale q·k, capped, over visible keys) · v.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads: a multiple of the kv heads; query head h reads kv head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// The cache: kv heads, head dimension and type.
    pub kv: KvLayout,
    /// Multiplies q·k; usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// A query sees this many tokens, itself included; `None` for all before it.
    pub window: Option<usize>,
    /// Scores x become `cap * tanh(x / cap)`.
    pub softcap: Option<f32>,
}

/// Consecutive new tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRow<'a> {
    /// How many. They are the next that many rows of q.
    pub tokens: usize,
    /// The absolute position of the first.
    pub position: usize,
    /// The sequence's KV blocks of this layer, from position 0 on; they already hold the new tokens. Those wholly
    /// outside the windows of all tokens are not touched and may be empty slices.
    pub blocks: &'a [&'a [u8]],
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Attention of all rows. `q` (after rope) and `out` have `heads * head_dim` floats per token; `out` is packed.
///
/// # Panics
/// If shapes do not fit: `q` has not the tokens of `rows` or not the width, `out` not the size, `heads` is not a
/// multiple of the kv heads, the window is 0, or a block that is needed is missing, misaligned or of the wrong size.
pub fn attention(
    team: &Team,
    shape: &AttentionShape,
    q: Rows<'_>,
    rows: &[AttentionRow<'_>],
    out: &mut [f32],
) {
    let AttentionShape { heads, kv: layout, scale, window, softcap } = shape;
    let width = heads * layout.head_dim;
    assert!(
        *heads > 0 && layout.kv_heads > 0 && heads.is_multiple_of(layout.kv_heads),
        "{heads} query heads on {} kv heads",
        layout.kv_heads
    );
    assert!(q.width() == width, "queries of {} floats for {shape:?}", q.width());
    assert!(*window != Some(0), "a window of 0 tokens");
    let tokens: usize = rows.iter().map(|row| row.tokens).sum();
    assert!(tokens == q.tokens(), "{} queries for rows of {tokens} tokens", q.tokens());
    assert!(out.len() == tokens * width, "{} floats for the result of {tokens} tokens of {width}", out.len());

    let whole = Queries {
        layout,
        scale: scale * LOG2_E,
        softcap: softcap.map(|cap| cap * LOG2_E),
        window: window.unwrap_or(usize::MAX),
        blocks: &[],
        kv_head: 0,
        kv_heads: layout.kv_heads,
        group: heads / layout.kv_heads,
        token: 0,
        position: 0,
        tokens: 0,
    };
    let enough = |units: usize| team.threads() == 1 || units >= team.threads() * UNITS_PER_THREAD;
    let mut tiles = Vec::new();
    for size in TILE_ROWS {
        tiles = cut(&whole, rows, size);
        if enough(tiles.len()) {
            break;
        }
    }
    let work: usize = tiles.iter().map(|tile| tile.rows() * tile.span().len() * layout.head_dim).sum();
    let split = !enough(tiles.len()) && work > SMALL_WORK;
    if split && !enough(tiles.iter().map(|tile| tile.partitions().len()).sum()) {
        tiles = tiles.iter().flat_map(Queries::by_head).collect();
    }
    // The longest come first, so that the last to finish are short.
    tiles.reverse();

    let job = Job { team, q, tiles: &tiles, out: SharedMut::new(out), width };
    with_lanes!(team.path(), lanes => match (layout.dtype, split) {
        (KvType::F16, false) => job.whole::<_, f16>(lanes),
        (KvType::F32, false) => job.whole::<_, f32>(lanes),
        (KvType::Q8, false) => job.whole::<_, i8>(lanes),
        (KvType::F16, true) => job.split::<_, f16>(lanes),
        (KvType::F32, true) => job.split::<_, f32>(lanes),
        (KvType::Q8, true) => job.split::<_, i8>(lanes),
    });
}

/// Cuts the rows of a batch into tiles of queries, of all kv heads if that makes at most `rows_per_tile` rows, else of
/// one each. All heads together read whole blocks, front to back, which memory likes best.
///
/// # Panics
/// If a block that is needed is missing or does not fit the layout.
fn cut<'a>(whole: &Queries<'a>, rows: &[AttentionRow<'a>], rows_per_tile: usize) -> Vec<Queries<'a>> {
    let mut tiles = Vec::new();
    let mut token = 0;
    for row in rows {
        let all_heads = row.tokens * whole.group * whole.kv_heads <= rows_per_tile;
        let step = (rows_per_tile / whole.group).max(1);
        for first in (0..row.tokens).step_by(step) {
            let tile = Queries {
                blocks: row.blocks,
                token: token + first,
                position: row.position + first,
                tokens: step.min(row.tokens - first),
                ..*whole
            };
            let span = tile.span();
            let needed = row.blocks.get(span.start / KV_BLOCK..span.end.div_ceil(KV_BLOCK));
            let needed =
                needed.unwrap_or_else(|| panic!("{} KV blocks for {} tokens", row.blocks.len(), span.end));
            needed.iter().for_each(|block| whole.layout.check(block));
            if all_heads {
                tiles.push(tile);
            } else {
                tiles.extend(tile.by_head());
            }
        }
        token += row.tokens;
    }
    tiles
}

struct Job<'a> {
    team: &'a Team,
    q: Rows<'a>,
    /// No two have a row in common.
    tiles: &'a [Queries<'a>],
    out: SharedMut<'a, f32>,
    width: usize,
}

impl Job<'_> {
    /// A unit is a tile of queries.
    fn whole<L: Lanes, E: Element>(&self, lanes: L) {
        let Self { q, tiles, out, width, .. } = self;
        self.team.deal(tiles.len(), 1, |units| {
            SCRATCH.with_borrow_mut(|scratch| {
                for tile in &tiles[units] {
                    scratch.load(tile, *q);
                    for partition in tile.partitions() {
                        scratch.walk::<L, E>(lanes, tile, partition);
                        scratch.merge(lanes, tile, partition);
                    }
                    finish(lanes, scratch, tile, out, *width);
                }
            });
        });
    }

    /// A unit is a partition of what a tile of queries sees.
    fn split<L: Lanes, E: Element>(&self, lanes: L) {
        let Self { q, tiles, out, width, .. } = self;
        let mut units = Vec::new();
        let mut slots = 0;
        let firsts: Vec<usize> = tiles
            .iter()
            .map(|tile| {
                let first = slots;
                for partition in tile.partitions() {
                    units.push((tile, partition, slots));
                    slots += tile.rows();
                }
                first
            })
            .collect();
        let dim = tiles.first().map_or(0, |tile| tile.layout.head_dim);
        let mut softmax = vec![Softmax::EMPTY; slots];
        let mut sums = vec![0.0; slots * dim];
        let (shared_softmax, shared_sums) = (SharedMut::new(&mut softmax), SharedMut::new(&mut sums));
        self.team.deal(units.len(), 1, |range| {
            SCRATCH.with_borrow_mut(|scratch| {
                for &(tile, partition, slot) in &units[range] {
                    scratch.load(tile, *q);
                    scratch.walk::<L, E>(lanes, tile, partition);
                    let rows = slot..slot + tile.rows();
                    // SAFETY: each unit has slots of its own.
                    let sums = unsafe { shared_sums.slice(rows.start * dim..rows.end * dim) };
                    // SAFETY: as above.
                    scratch.store(unsafe { shared_softmax.slice(rows) }, sums);
                }
            });
        });
        self.team.deal(tiles.len(), 1, |units| {
            SCRATCH.with_borrow_mut(|scratch| {
                for (tile, first) in tiles[units.clone()].iter().zip(&firsts[units]) {
                    scratch.load(tile, *q);
                    for (i, partition) in tile.partitions().enumerate() {
                        let rows = first + i * tile.rows()..first + (i + 1) * tile.rows();
                        let sums = &sums[rows.start * dim..rows.end * dim];
                        scratch.merge_stored(lanes, tile, partition, &softmax[rows], sums);
                    }
                    finish(lanes, scratch, tile, out, *width);
                }
            });
        });
    }
}

fn finish<L: Lanes>(lanes: L, scratch: &Scratch, tile: &Queries<'_>, out: &SharedMut<'_, f32>, width: usize) {
    for (head, token) in (0..tile.kv_heads).flat_map(|head| (0..tile.tokens).map(move |token| (head, token)))
    {
        let (start, columns) = ((tile.token + token) * width, tile.columns(head));
        // SAFETY: no two tiles have a (token, kv head) in common, and each is finished once.
        let out = unsafe { out.slice(start + columns.start..start + columns.end) };
        scratch.finish(lanes, tile, head, token, out);
    }
}
