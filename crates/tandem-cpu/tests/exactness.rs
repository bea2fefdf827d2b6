//! Cold equals warm and alone equals batched, bit by bit: random timelines of batches, chunks, forks, truncations and
//! snapshots, on several thread counts, against each history computed cold, alone and in one step on one thread.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Features, Tiny, VOCAB, options};
use proptest::prelude::*;
use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::{Engine, Fork, Input, Row, RowOut, SeqId, Want, Which};
use tandem_model::format::Format;

#[derive(Debug, Clone)]
enum Op {
    Open,
    /// For each sequence in turn, how many tokens it gets in this step (0: it sits out).
    Step(Vec<usize>),
    Fork(prop::sample::Index, prop::sample::Index),
    Truncate(prop::sample::Index, prop::sample::Index),
    RoundTrip(prop::sample::Index),
    Close(prop::sample::Index),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let index = any::<prop::sample::Index>;
    let op = prop_oneof![
        2 => Just(Op::Open),
        6 => prop::collection::vec(prop_oneof![Just(0), Just(1), 1usize..40], 1..6).prop_map(Op::Step),
        2 => (index(), index()).prop_map(|(a, b)| Op::Fork(a, b)),
        1 => (index(), index()).prop_map(|(a, b)| Op::Truncate(a, b)),
        1 => index().prop_map(Op::RoundTrip),
        1 => index().prop_map(Op::Close),
    ];
    prop::collection::vec(op, 4..24)
}

struct Timeline {
    engine: CpuEngine,
    live: Vec<(SeqId, Vec<u32>)>,
    next: u32,
}

impl Timeline {
    fn new(tiny: &Tiny, options: &CpuOptions) -> Self {
        let mut timeline = Self { engine: tiny.engine(options), live: Vec::new(), next: 1 };
        timeline.apply(&Op::Open);
        timeline
    }

    fn token(&mut self) -> u32 {
        self.next = self.next.wrapping_mul(1_103_515_245).wrapping_add(12345);
        (self.next >> 16) % VOCAB as u32
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Open => self.live.push((self.engine.open(512, None).unwrap(), Vec::new())),
            Op::Step(counts) => {
                let mut rows = Vec::new();
                for (i, &count) in counts.iter().enumerate().take(self.live.len()) {
                    let count = count.min(400 - self.live[i].1.len());
                    let tokens: Vec<u32> = (0..count).map(|_| self.token()).collect();
                    if !tokens.is_empty() {
                        self.live[i].1.extend(&tokens);
                        rows.push(Row {
                            seq: self.live[i].0,
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
            Op::Fork(which, at) if !self.live.is_empty() => {
                let (seq, tokens) = which.get(&self.live).clone();
                let at = at.index(tokens.len() + 1);
                let Fork::Exact(fork) = self.engine.fork(seq, at, 512).unwrap() else { panic!("inexact") };
                self.live.push((fork, tokens[..at].to_vec()));
            }
            Op::Truncate(which, len) if !self.live.is_empty() => {
                let i = which.index(self.live.len());
                let len = len.index(self.live[i].1.len() + 1);
                assert!(self.engine.truncate(self.live[i].0, len).unwrap());
                self.live[i].1.truncate(len);
            }
            Op::RoundTrip(which) if !self.live.is_empty() => {
                let i = which.index(self.live.len());
                let snapshot = self.engine.export(self.live[i].0).unwrap();
                self.engine.close(self.live[i].0).unwrap();
                self.live[i].0 = self.engine.import(&snapshot, 512).unwrap();
            }
            Op::Close(which) if self.live.len() > 1 => {
                let (seq, _) = self.live.swap_remove(which.index(self.live.len()));
                self.engine.close(seq).unwrap();
            }
            _ => {}
        }
    }

    /// Feeds one token to every sequence in one step; its logits show the whole history.
    fn last_logits(&mut self) -> Vec<(Vec<u32>, Vec<u32>)> {
        let rows: Vec<Row> = self
            .live
            .iter()
            .map(|(seq, _)| Row { seq: *seq, input: Input::Tokens(vec![3]), want: Want::Logits(Which::Last) })
            .collect();
        let ticket = self.engine.submit(&rows).unwrap();
        let outs = self.engine.collect(ticket).unwrap();
        outs.into_iter().zip(&self.live).map(|(out, (_, tokens))| (tokens.clone(), bits(out))).collect()
    }
}

fn bits(out: RowOut) -> Vec<u32> {
    let RowOut::Logits(logits) = out else { panic!("{out:?}") };
    assert!(logits.values.iter().all(|v| v.is_finite()));
    logits.values.iter().map(|v| v.to_bits()).collect()
}

fn cold(engine: &mut CpuEngine, tokens: &[u32]) -> Vec<u32> {
    let seq = engine.open(512, None).unwrap();
    let fed = [tokens, &[3]].concat();
    let row = Row { seq, input: Input::Tokens(fed), want: Want::Logits(Which::Last) };
    let ticket = engine.submit(&[row]).unwrap();
    let out = engine.collect(ticket).unwrap().remove(0);
    engine.close(seq).unwrap();
    bits(out)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_timeline_gives_the_bits_of_a_cold_run(
        ops in ops(),
        format in prop::sample::select(vec![Format::F32, Format::Bf16, Format::Q4_0, Format::Q4_1, Format::Q8_0]),
        all_features: bool,
        exact: bool,
        threads in 1usize..5,
    ) {
        let tiny = Tiny::new(format, if all_features { Features::ALL } else { Features::default() });
        let with = |threads| {
            let options = CpuOptions { max_step_tokens: 512, ..options(threads) };
            if exact { options.exact() } else { options }
        };
        let mut timeline = Timeline::new(&tiny, &with(threads));
        ops.iter().for_each(|op| timeline.apply(op));
        let warm = timeline.last_logits();
        let mut reference = tiny.engine(&with(1));
        for (tokens, warm) in warm {
            prop_assert_eq!(cold(&mut reference, &tokens), warm, "history of {} tokens", tokens.len());
        }
        let open: Vec<SeqId> = timeline.live.iter().map(|(seq, _)| *seq).collect();
        open.into_iter().for_each(|seq| timeline.engine.close(seq).unwrap());
        let memory = timeline.engine.memory();
        prop_assert_eq!(memory.kv_exclusive + memory.kv_shared, 0, "blocks leaked");
    }
}
