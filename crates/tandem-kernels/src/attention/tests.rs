//! Against ordinary softmax attention in f64, and against itself cut up in every other way.

use proptest::prelude::*;

use super::*;
use crate::buffer::HugeBuffer;
use crate::kv::{KvWrite, write_kv};
use crate::path::Path;

/// A small generator (splitmix64): the same numbers everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale).collect()
    }
}

/// A sequence with all its tokens written.
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    tokens: usize,
    blocks: Vec<HugeBuffer>,
}

impl Sequence {
    /// Slots that no token was written to hold NaN.
    fn new(shape: &AttentionShape, tokens: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let layout = &shape.kv;
        let q = random.floats(tokens * shape.heads * layout.head_dim, 3.0);
        let k = random.floats(tokens * layout.width(), 3.0);
        let v = random.floats(tokens * layout.width(), 1.0);
        let team = Team::with_path(1, Path::SCALAR).unwrap();
        let mut blocks = Vec::new();
        for first in (0..tokens).step_by(KV_BLOCK) {
            let mut block = HugeBuffer::zeroed(layout.block_bytes()).unwrap();
            block.fill(0xff);
            let tokens = first..tokens.min(first + KV_BLOCK);
            let mut write = [KvWrite { block: &mut block, slot: 0, tokens }];
            let (k, v) = (Rows::packed(&k, layout.width()), Rows::packed(&v, layout.width()));
            write_kv(&team, layout, k, v, &mut write);
            blocks.push(block);
        }
        Self { q, k, v, tokens, blocks }
    }

    fn blocks(&self) -> Vec<&[u8]> {
        self.blocks.iter().map(|block| &**block).collect()
    }

    fn queries(&self, shape: &AttentionShape, tokens: std::ops::Range<usize>) -> &[f32] {
        let width = shape.heads * shape.kv.head_dim;
        &self.q[tokens.start * width..tokens.end * width]
    }

    /// The result for `tokens` alone.
    fn attend(&self, team: &Team, shape: &AttentionShape, tokens: std::ops::Range<usize>) -> Vec<f32> {
        let q = self.queries(shape, tokens.clone());
        let mut out = vec![f32::NAN; q.len()];
        let row = AttentionRow { tokens: tokens.len(), position: tokens.start, blocks: &self.blocks() };
        attention(team, shape, Rows::packed(q, shape.heads * shape.kv.head_dim), &[row], &mut out);
        out
    }

    /// The definition, in f64, on rounded keys and values.
    fn reference(&self, shape: &AttentionShape) -> Vec<f64> {
        let AttentionShape { heads, kv, scale, window, softcap } = *shape;
        let round = |x: &[f32]| -> Vec<f64> {
            match kv.dtype {
                KvType::F16 => x.iter().map(|x| f16::from_f32(*x).to_f64()).collect(),
                KvType::F32 => x.iter().copied().map(f64::from).collect(),
                KvType::Q8 => x
                    .chunks(kv.head_dim)
                    .flat_map(|head| {
                        let largest = head.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                        let integer = move |x: &f32| f64::from((x * (127.0 / largest)).round_ties_even());
                        head.iter().map(move |x| integer(x) * f64::from(largest / 127.0))
                    })
                    .collect(),
            }
        };
        let (k, v) = (round(&self.k), round(&self.v));
        let (dim, group) = (kv.head_dim, heads / kv.kv_heads);
        let mut out = vec![0.0; self.q.len()];
        for token in 0..self.tokens {
            for head in 0..heads {
                let place = (token * heads + head) * dim;
                let kv_place = |t: usize| (t * kv.kv_heads + head / group) * dim;
                let first = window.map_or(0, |window| (token + 1).saturating_sub(window));
                let scores: Vec<f64> = (first..=token)
                    .map(|t| {
                        let dot: f64 =
                            (0..dim).map(|d| f64::from(self.q[place + d]) * k[kv_place(t) + d]).sum();
                        let score = dot * f64::from(scale);
                        softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                for (t, s) in (first..=token).zip(&scores) {
                    let weight = (s - max).exp() / sum;
                    for d in 0..dim {
                        out[place + d] += weight * v[kv_place(t) + d];
                    }
                }
            }
        }
        out
    }
}

fn teams() -> Vec<Team> {
    let best = Path::detect().unwrap();
    (1..=4).map(|threads| Team::with_path(threads, best).unwrap()).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn shapes() -> impl Strategy<Value = AttentionShape> {
    let sizes =
        (1usize..4, 1usize..9, prop_oneof![Just(8), Just(16), Just(32), Just(64), Just(80), Just(24)]);
    let extras = (
        prop_oneof![Just(KvType::F16), Just(KvType::F32), Just(KvType::Q8)],
        prop_oneof![2 => Just(None), 1 => (1usize..80).prop_map(Some), 1 => (200usize..400).prop_map(Some)],
        prop_oneof![2 => Just(None), 1 => Just(Some(5.0f32))],
    );
    (sizes, extras).prop_map(|((kv_heads, group, head_dim), (dtype, window, softcap))| AttentionShape {
        heads: kv_heads * group,
        kv: KvLayout { kv_heads, head_dim, dtype },
        scale: 1.0 / (head_dim as f32).sqrt(),
        window,
        softcap,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.min(48)))]

    #[test]
    fn it_is_softmax_attention(shape in shapes(), tokens in 1usize..600, seed: u64) {
        let sequence = Sequence::new(&shape, tokens, seed);
        let team = Team::new(2).unwrap();
        let out = sequence.attend(&team, &shape, 0..tokens);
        for (i, (out, want)) in out.iter().zip(sequence.reference(&shape)).enumerate() {
            prop_assert!((f64::from(*out) - want).abs() < 1e-5, "float {i}: {out} for {want}");
        }
    }

    #[test]
    fn chunks_and_threads_and_single_tokens_give_the_same_bits(
        shape in shapes(),
        tokens in 1usize..600,
        seed: u64,
        cuts in prop::collection::vec(1usize..200, 1..6),
    ) {
        let sequence = Sequence::new(&shape, tokens, seed);
        let width = shape.heads * shape.kv.head_dim;
        let teams = teams();
        let whole = bits(&sequence.attend(&teams[0], &shape, 0..tokens));
        for team in &teams {
            prop_assert_eq!(&bits(&sequence.attend(team, &shape, 0..tokens)), &whole);
            let (mut first, mut cuts) = (0, cuts.iter().cycle());
            while first < tokens {
                let chunk = first..tokens.min(first + cuts.next().unwrap());
                let out = sequence.attend(team, &shape, chunk.clone());
                prop_assert_eq!(bits(&out), &whole[chunk.start * width..chunk.end * width]);
                first = chunk.end;
            }
            for token in (0..tokens).step_by(tokens / 8 + 1).chain([tokens - 1]) {
                let out = sequence.attend(team, &shape, token..token + 1);
                prop_assert_eq!(bits(&out), &whole[token * width..(token + 1) * width]);
            }
        }
    }

    #[test]
    fn neighbours_in_the_batch_change_no_bit(
        shape in shapes(),
        lengths in prop::collection::vec((0usize..300, 0usize..40), 1..6),
        seed: u64,
        rotate in 0usize..6,
    ) {
        let width = shape.heads * shape.kv.head_dim;
        let mut parts: Vec<_> = lengths
            .iter()
            .zip(seed..)
            .map(|(&(past, new), seed)| (Sequence::new(&shape, past + new + 1, seed), past..past + new))
            .collect();
        let count = parts.len();
        parts.rotate_left(rotate % count);
        // q is read out of the middle of a wider row, as from a fused projection.
        let mut fused = Vec::new();
        for (sequence, tokens) in &parts {
            for q in sequence.queries(&shape, tokens.clone()).chunks(width) {
                fused.extend([f32::NAN; 3]);
                fused.extend(q);
                fused.push(f32::NAN);
            }
        }
        let blocks: Vec<_> = parts.iter().map(|(sequence, _)| sequence.blocks()).collect();
        let rows: Vec<_> = parts
            .iter()
            .zip(&blocks)
            .map(|((_, tokens), blocks)| AttentionRow { tokens: tokens.len(), position: tokens.start, blocks })
            .collect();
        for team in teams() {
            let alone: Vec<f32> =
                parts.iter().flat_map(|(sequence, tokens)| sequence.attend(&team, &shape, tokens.clone())).collect();
            let mut out = vec![f32::NAN; alone.len()];
            attention(&team, &shape, Rows::columns(&fused, width + 4, 3, width), &rows, &mut out);
            prop_assert_eq!(bits(&out), bits(&alone));
        }
    }

    #[test]
    fn every_path_gives_the_bits_of_the_scalar_twin(shape in shapes(), tokens in 1usize..300, seed: u64) {
        let sequence = Sequence::new(&shape, tokens, seed);
        let scalar = Team::with_path(1, Path::SCALAR).unwrap();
        let want = bits(&sequence.attend(&scalar, &shape, 0..tokens));
        for path in Path::supported() {
            let team = Team::with_path(2, path).unwrap();
            prop_assert_eq!(&bits(&sequence.attend(&team, &shape, 0..tokens)), &want, "{}", path);
        }
    }
}

fn small() -> AttentionShape {
    AttentionShape {
        heads: 6,
        kv: KvLayout { kv_heads: 2, head_dim: 16, dtype: KvType::F16 },
        scale: 0.25,
        window: Some(40),
        softcap: None,
    }
}

/// The common head sizes that the properties above leave out.
#[test]
fn wide_heads() {
    for head_dim in [96, 128, 256, 512] {
        let kv = KvLayout { kv_heads: 1, head_dim, dtype: KvType::F16 };
        let shape = AttentionShape { heads: 4, kv, scale: 0.05, window: None, softcap: None };
        let sequence = Sequence::new(&shape, 70, 1);
        let out = sequence.attend(&Team::new(2).unwrap(), &shape, 0..70);
        for (out, want) in out.iter().zip(sequence.reference(&shape)) {
            assert!((f64::from(*out) - want).abs() < 1e-5, "{out} for {want}");
        }
    }
}

/// A fixed context long enough for several partitions, decoded as a real step would: split over threads.
#[test]
fn a_deep_decode_gives_the_bits_of_prefill() {
    let shape = AttentionShape { window: None, ..small() };
    let sequence = Sequence::new(&shape, 1500, 9);
    let width = shape.heads * shape.kv.head_dim;
    let whole = sequence.attend(&Team::new(1).unwrap(), &shape, 0..1500);
    for threads in [1, 2, 3] {
        let last = sequence.attend(&Team::new(threads).unwrap(), &shape, 1499..1500);
        assert_eq!(bits(&last), bits(&whole[1499 * width..]));
    }
}

/// Not even a NaN reaches a query that does not see it, in prefill as in decode.
#[test]
fn a_token_changes_no_bit_of_those_that_do_not_see_it() {
    let shape = small();
    let (tokens, width, team) = (170, 96, Team::new(2).unwrap());
    let mut sequence = Sequence::new(&shape, tokens, 3);
    let clean = sequence.attend(&team, &shape, 0..tokens);
    let nan = vec![0xff; shape.kv.row_bytes()];
    let poisoned = 77;
    shape.kv.import(&mut sequence.blocks[poisoned / KV_BLOCK], poisoned % KV_BLOCK, &nan, &nan);
    for (first, last) in [(0, tokens), (60, 90), (100, tokens)] {
        let out = sequence.attend(&team, &shape, first..last);
        for (token, (out, clean)) in
            (first..last).zip(out.chunks(width).zip(clean[first * width..].chunks(width)))
        {
            let sees = (poisoned..poisoned + 40).contains(&token);
            assert!(
                if sees { out.iter().all(|x| x.is_nan()) } else { bits(out) == bits(clean) },
                "token {token}"
            );
        }
    }
}

#[test]
fn blocks_outside_the_window_need_not_exist() {
    let shape = small();
    let sequence = Sequence::new(&shape, 200, 5);
    let want = sequence.attend(&Team::new(2).unwrap(), &shape, 190..200);
    let mut blocks = sequence.blocks();
    blocks[..4].fill(&[]);
    let mut out = vec![0.0; want.len()];
    let row = AttentionRow { tokens: 10, position: 190, blocks: &blocks };
    let q = Rows::packed(sequence.queries(&shape, 190..200), 96);
    attention(&Team::new(2).unwrap(), &shape, q, &[row], &mut out);
    assert_eq!(bits(&out), bits(&want));
}

#[test]
fn an_empty_batch_is_nothing_to_do() {
    let team = Team::new(2).unwrap();
    attention(&team, &small(), Rows::packed(&[], 96), &[], &mut []);
    let row = AttentionRow { tokens: 0, position: 7, blocks: &[] };
    attention(&team, &small(), Rows::packed(&[], 96), &[row], &mut []);
}

#[test]
#[should_panic(expected = "3 KV blocks for 97 tokens")]
fn too_few_blocks_are_refused() {
    let sequence = Sequence::new(&small(), 96, 5);
    let row = AttentionRow { tokens: 1, position: 96, blocks: &sequence.blocks() };
    attention(&Team::new(1).unwrap(), &small(), Rows::packed(&[0.0; 96], 96), &[row], &mut [0.0; 96]);
}

#[test]
#[should_panic(expected = "not aligned")]
fn misaligned_blocks_are_refused() {
    let bytes = small().kv.block_bytes();
    let memory = HugeBuffer::zeroed(bytes + 4).unwrap();
    let row = AttentionRow { tokens: 1, position: 0, blocks: &[&memory[4..]] };
    attention(&Team::new(1).unwrap(), &small(), Rows::packed(&[0.0; 96], 96), &[row], &mut [0.0; 96]);
}

#[test]
#[should_panic(expected = "2 queries for rows of 1 tokens")]
fn rows_must_account_for_all_queries() {
    let sequence = Sequence::new(&small(), 96, 5);
    let row = AttentionRow { tokens: 1, position: 0, blocks: &sequence.blocks() };
    attention(&Team::new(1).unwrap(), &small(), Rows::packed(&[0.0; 192], 96), &[row], &mut [0.0; 192]);
}
