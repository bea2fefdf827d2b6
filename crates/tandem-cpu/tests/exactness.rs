//! Cold equals warm and alone equals batched, bit by bit: random timelines of batches, chunks, forks, truncations and
//! snapshots, on several thread counts, against each history computed cold, alone and in one step on one thread.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Features, ORIGINAL_CONTEXT, Tiny, VOCAB, options};
use proptest::prelude::*;
use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::{Engine, Fork, Input, Row, RowOut, SeqId, Want, Which};
use tandem_model::decoder::{Layer, Mixer, Rope};
use tandem_model::format::Format;

#[derive(Debug, Clone)]
enum Op {
    /// For how many tokens.
    Open(usize),
    /// For each sequence in turn, how many tokens it gets in this step (0: it sits out).
    Step(Vec<usize>),
    /// Which, at what length, for how many tokens.
    Fork(prop::sample::Index, prop::sample::Index, usize),
    Truncate(prop::sample::Index, prop::sample::Index),
    RoundTrip(prop::sample::Index),
    Close(prop::sample::Index),
}

/// Three lengths, of which some ropes turn the first two alike.
fn length() -> impl Strategy<Value = usize> {
    prop::sample::select(vec![160, ORIGINAL_CONTEXT, 512])
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let index = any::<prop::sample::Index>;
    let op = prop_oneof![
        2 => length().prop_map(Op::Open),
        6 => prop::collection::vec(prop_oneof![Just(0), Just(1), 1usize..40], 1..6).prop_map(Op::Step),
        2 => (index(), index(), length()).prop_map(|(a, b, length)| Op::Fork(a, b, length)),
        1 => (index(), index()).prop_map(|(a, b)| Op::Truncate(a, b)),
        1 => index().prop_map(Op::RoundTrip),
        1 => index().prop_map(Op::Close),
    ];
    prop::collection::vec(op, 4..24)
}

#[derive(Debug, Clone)]
struct Live {
    seq: SeqId,
    tokens: Vec<u32>,
    max_len: usize,
}

struct Timeline {
    engine: CpuEngine,
    live: Vec<Live>,
    next: u32,
    rope_by_length: bool,
}

impl Timeline {
    fn new(tiny: &Tiny, options: &CpuOptions) -> Self {
        let by_length = |layer: &Layer| {
            let Mixer::Attention(attention) = &layer.mixer;
            attention.rope.as_ref().is_some_and(Rope::depends_on_length)
        };
        let rope_by_length = tiny.decoder.layers.iter().any(by_length);
        let mut timeline = Self { engine: tiny.engine(options), live: Vec::new(), next: 1, rope_by_length };
        timeline.apply(&Op::Open(512));
        timeline
    }

    fn token(&mut self) -> u32 {
        self.next = self.next.wrapping_mul(1_103_515_245).wrapping_add(12345);
        (self.next >> 16) % VOCAB as u32
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Open(max_len) => {
                let seq = self.engine.open(*max_len, None).unwrap();
                self.live.push(Live { seq, tokens: Vec::new(), max_len: *max_len });
            }
            Op::Step(counts) => {
                let mut rows = Vec::new();
                for (i, &count) in counts.iter().enumerate().take(self.live.len()) {
                    let room = (self.live[i].max_len - 1).min(400) - self.live[i].tokens.len();
                    let count = count.min(room);
                    let tokens: Vec<u32> = (0..count).map(|_| self.token()).collect();
                    if !tokens.is_empty() {
                        self.live[i].tokens.extend(&tokens);
                        rows.push(Row {
                            seq: self.live[i].seq,
                            input: Input::Tokens(tokens),
                            want: Want::Nothing,
                        });
                    }
                }
                if !rows.is_empty() {
                    let ticket = self.engine.submit(&rows).unwrap();
                    self.engine.collect(ticket).unwrap();
                }
            }
            Op::Fork(which, at, max_len) if !self.live.is_empty() => {
                let source = which.get(&self.live).clone();
                let at = at.index(source.tokens.len().min(max_len - 1) + 1);
                match self.engine.fork(source.seq, at, *max_len).unwrap() {
                    Fork::Exact(seq) => {
                        let tokens = source.tokens[..at].to_vec();
                        self.live.push(Live { seq, tokens, max_len: *max_len });
                    }
                    Fork::Inexact => assert!(
                        self.rope_by_length
                            && (source.max_len > ORIGINAL_CONTEXT) != (*max_len > ORIGINAL_CONTEXT)
                    ),
                }
            }
            Op::Truncate(which, len) if !self.live.is_empty() => {
                let i = which.index(self.live.len());
                let len = len.index(self.live[i].tokens.len() + 1);
                assert!(self.engine.truncate(self.live[i].seq, len).unwrap());
                self.live[i].tokens.truncate(len);
            }
            Op::RoundTrip(which) if !self.live.is_empty() => {
                let i = which.index(self.live.len());
                let Live { seq, max_len, .. } = self.live[i];
                let snapshot = self.engine.export(seq).unwrap();
                self.engine.close(seq).unwrap();
                self.live[i].seq = self.engine.import(&snapshot, max_len).unwrap();
            }
            Op::Close(which) if self.live.len() > 1 => {
                let closed = self.live.swap_remove(which.index(self.live.len()));
                self.engine.close(closed.seq).unwrap();
            }
            _ => {}
        }
    }

    /// Feeds one token to every sequence in one step; its logits show the whole history.
    fn last_logits(&mut self) -> Vec<(Live, Vec<u32>)> {
        let rows: Vec<Row> = self
            .live
            .iter()
            .map(|live| Row { seq: live.seq, input: Input::Tokens(vec![3]), want: Want::Logits(Which::Last) })
            .collect();
        let ticket = self.engine.submit(&rows).unwrap();
        let outs = self.engine.collect(ticket).unwrap();
        outs.into_iter().zip(&self.live).map(|(out, live)| (live.clone(), bits(out))).collect()
    }
}

fn bits(out: RowOut) -> Vec<u32> {
    let RowOut::Logits(logits) = out else { panic!("{out:?}") };
    assert!(logits.values.iter().all(|v| v.is_finite()));
    logits.values.iter().map(|v| v.to_bits()).collect()
}

fn cold(engine: &mut CpuEngine, live: &Live) -> Vec<u32> {
    let seq = engine.open(live.max_len, None).unwrap();
    let fed = [live.tokens.as_slice(), &[3]].concat();
    let row = Row { seq, input: Input::Tokens(fed), want: Want::Logits(Which::Last) };
    let ticket = engine.submit(&[row]).unwrap();
    let out = engine.collect(ticket).unwrap().remove(0);
    engine.close(seq).unwrap();
    bits(out)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.min(48)))]
    #[test]
    fn any_timeline_gives_the_bits_of_a_cold_run(
        ops in ops(),
        format in prop::sample::select(vec![Format::F32, Format::Bf16, Format::Q4_0, Format::Q4_1, Format::Q8_0]),
        features in prop::sample::select(vec![Features::default(), Features::ALL, Features::BY_LENGTH]),
        exact: bool,
        threads in 1usize..5,
    ) {
        let tiny = Tiny::new(format, features);
        let with = |threads| {
            let options = CpuOptions { max_step_tokens: 512, ..options(threads) };
            if exact { options.exact() } else { options }
        };
        let mut timeline = Timeline::new(&tiny, &with(threads));
        ops.iter().for_each(|op| timeline.apply(op));
        let warm = timeline.last_logits();
        let mut reference = tiny.engine(&with(1));
        for (live, warm) in warm {
            prop_assert_eq!(cold(&mut reference, &live), warm, "history of {} tokens", live.tokens.len());
        }
        let open: Vec<SeqId> = timeline.live.iter().map(|live| live.seq).collect();
        open.into_iter().for_each(|seq| timeline.engine.close(seq).unwrap());
        let memory = timeline.engine.memory();
        prop_assert_eq!(memory.kv_exclusive + memory.kv_shared, 0, "blocks leaked");
    }
}
