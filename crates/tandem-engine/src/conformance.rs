//! What every engine is held to.
//!
//! Each check takes a maker of fresh engines over the same small model (vocabulary of at least 64, context of at least
//! 160, room for a few hundred tokens of KV) and a tolerance. An engine that claims `batch_invariant` is compared bit
//! by bit; another by `‖Δ‖₂ / ‖ref‖₂` against the tolerance. [`conformance_tests!`](crate::conformance_tests) turns all
//! of them into tests.

use crate::sampler::sample;
use crate::{Engine, EngineError, Fork, Input, Row, RowOut, SampleSpec, SeqId, Want, Which};

/// A maker of fresh engines over the same model.
pub type Make<'a> = &'a dyn Fn() -> Box<dyn Engine>;

/// Generates one `#[test]` per check: `conformance_tests!(|| Box::new(engine), tolerance = 0.01);`
#[macro_export]
macro_rules! conformance_tests {
    ($make:expr, tolerance = $tolerance:expr) => {
        $crate::conformance_tests!(@each $make, $tolerance;
            logits_of_all_positions, ragged_batch_equals_alone, chunked_prefill_equals_whole, fork_equals_cold,
            truncate_equals_cold, length_is_part_of_a_prefix, snapshot_round_trip, rows_that_want_nothing, samples_follow_the_specification,
            steps_overlap, refusals_change_nothing, snapshots_of_something_else, memory_returns);
    };
    (@each $make:expr, $tolerance:expr; $($check:ident),*) => {
        $(#[test]
        fn $check() {
            $crate::conformance::$check(&|| -> Box<dyn $crate::Engine> { ($make)() }, $tolerance);
        })*
    };
}

/// A reproducible prompt; different `salt`s give different prompts.
pub fn prompt(salt: u32, len: usize, vocab: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i.wrapping_mul(i + 7) + salt * 31 + i * 13) % vocab as u32).collect()
}

struct Probe {
    engine: Box<dyn Engine>,
    tolerance: f32,
    vocab: usize,
    context: usize,
}

impl Probe {
    fn new(make: Make<'_>, tolerance: f32) -> Self {
        let engine = make();
        let (vocab, context) = (engine.capabilities().vocab_size, engine.capabilities().context);
        assert!(vocab >= 64 && context >= 160, "the conformance model is too small");
        Self { engine, tolerance, vocab, context }
    }

    fn prompt(&self, salt: u32, len: usize) -> Vec<u32> {
        prompt(salt, len, self.vocab)
    }

    fn open(&mut self) -> SeqId {
        self.engine.open(self.context, None).expect("open")
    }

    fn step(&mut self, rows: &[Row]) -> Vec<RowOut> {
        let ticket = self.engine.submit(rows).expect("submit");
        self.engine.collect(ticket).expect("collect")
    }

    fn feed(&mut self, seq: SeqId, tokens: &[u32], want: Want) -> RowOut {
        self.step(&[Row { seq, input: Input::Tokens(tokens.to_vec()), want }]).remove(0)
    }

    fn last(&mut self, seq: SeqId, tokens: &[u32]) -> Vec<f32> {
        logits(self.feed(seq, tokens, Want::Logits(Which::Last)))
    }

    /// The last logits of `tokens` in a sequence of their own, in one step.
    fn cold(&mut self, tokens: &[u32]) -> Vec<f32> {
        let seq = self.open();
        let out = self.last(seq, tokens);
        self.engine.close(seq).expect("close");
        out
    }

    fn same(&self, got: &[f32], expected: &[f32], what: &str) {
        assert_eq!(got.len(), expected.len(), "{what}: length");
        assert!(expected.iter().all(|v| v.is_finite()), "{what}: reference is not finite");
        if self.engine.capabilities().batch_invariant {
            let differing = got.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(differing, 0, "{what}: {differing} of {} values differ in their bits", got.len());
        } else {
            let error = relative_error(got, expected);
            assert!(error <= self.tolerance, "{what}: relative error {error} exceeds {}", self.tolerance);
        }
    }
}

/// `‖a − b‖₂ / ‖b‖₂`.
pub fn relative_error(a: &[f32], b: &[f32]) -> f32 {
    let square = |v: f32| f64::from(v) * f64::from(v);
    let delta: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (delta / b.iter().map(|b| square(*b)).sum::<f64>()).sqrt() as f32
}

fn logits(out: RowOut) -> Vec<f32> {
    match out {
        RowOut::Logits(logits) => logits.values,
        other => panic!("expected logits, got {other:?}"),
    }
}

fn token(out: &RowOut) -> u32 {
    match out {
        RowOut::Sampled(sampled) => sampled.token,
        other => panic!("expected a sample, got {other:?}"),
    }
}

fn row(seq: SeqId, tokens: &[u32], want: Want) -> Row {
    Row { seq, input: Input::Tokens(tokens.to_vec()), want }
}

/// `Which::All` gives one row of logits per position, each what `Which::Last` gives for that prefix.
pub fn logits_of_all_positions(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let tokens = p.prompt(1, 37);
    let seq = p.open();
    let all = logits(p.feed(seq, &tokens, Want::Logits(Which::All)));
    assert_eq!(all.len(), 37 * p.vocab);
    for at in [1, 2, 16, 31, 32, 33, 37] {
        let cold = p.cold(&tokens[..at]);
        p.same(&all[(at - 1) * p.vocab..at * p.vocab], &cold, &format!("position {}", at - 1));
    }
    let other = p.cold(&p.prompt(2, 37));
    assert!(relative_error(&other, &all[36 * p.vocab..]) > 1e-3, "another prompt must give other logits");
}

/// A row's result does not depend on the rows beside it.
pub fn ragged_batch_equals_alone(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let prompts: Vec<_> =
        [1usize, 5, 31, 2, 24].iter().zip(0..).map(|(len, salt)| p.prompt(salt, *len)).collect();
    let cold: Vec<_> = prompts.iter().map(|tokens| p.cold(tokens)).collect();
    let seqs: Vec<_> = prompts.iter().map(|_| p.open()).collect();
    let first: Vec<_> =
        seqs.iter().zip(&prompts).map(|(s, t)| row(*s, t, Want::Logits(Which::Last))).rev().collect();
    for (out, cold) in p.step(&first).into_iter().rev().zip(&cold) {
        p.same(&logits(out), cold, "first step of a ragged batch");
    }
    let next: Vec<_> = seqs.iter().map(|seq| row(*seq, &[7, 3], Want::Logits(Which::Last))).collect();
    for (out, tokens) in p.step(&next).into_iter().zip(&prompts) {
        let cold = p.cold(&[tokens.as_slice(), &[7, 3]].concat());
        p.same(&logits(out), &cold, "second step of a ragged batch");
    }
}

/// A prefill in chunks of any size ends where one in a single step does.
pub fn chunked_prefill_equals_whole(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let tokens = p.prompt(3, 60);
    let whole = p.cold(&tokens);
    for chunk in [1, 7, 32, 59] {
        let seq = p.open();
        let mut last = Vec::new();
        for part in tokens.chunks(chunk) {
            last = p.last(seq, part);
        }
        assert_eq!(p.engine.len(seq), Ok(60));
        p.same(&last, &whole, &format!("prefill in chunks of {chunk}"));
        p.engine.close(seq).expect("close");
    }
}

/// An exact fork continues as the same tokens do cold; neither side disturbs the other.
pub fn fork_equals_cold(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let (tokens, branch) = (p.prompt(4, 50), p.prompt(5, 9));
    let source = p.open();
    p.feed(source, &tokens, Want::Nothing);
    for at in [0, 1, 20, 32, 33, 50] {
        let Fork::Exact(fork) = p.engine.fork(source, at, p.context).expect("fork") else {
            assert!(!p.engine.capabilities().exact_fork, "claims exact_fork and answers Inexact at {at}");
            continue;
        };
        assert_eq!(p.engine.len(fork), Ok(at));
        let grown = p.last(fork, &branch);
        let cold = p.cold(&[&tokens[..at], &branch].concat());
        p.same(&grown, &cold, &format!("fork at {at}"));
        // A fork of the fork outlives it.
        if let Fork::Exact(second) = p.engine.fork(fork, at + 3, p.context).expect("fork") {
            p.engine.close(fork).expect("close");
            let grown = p.last(second, &[9]);
            let cold = p.cold(&[&tokens[..at], &branch[..3], &[9]].concat());
            p.same(&grown, &cold, &format!("fork of a fork at {at}"));
            p.engine.close(second).expect("close");
        }
    }
    let grown = p.last(source, &branch);
    let cold = p.cold(&[&tokens[..], &branch].concat());
    p.same(&grown, &cold, "source after its forks");
}

/// After an exact truncation a sequence goes on as if the dropped tokens had never been.
pub fn truncate_equals_cold(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let (tokens, tail) = (p.prompt(6, 48), p.prompt(7, 5));
    for len in [0, 1, 31, 32, 40, 48] {
        let seq = p.open();
        p.feed(seq, &tokens, Want::Nothing);
        if !p.engine.truncate(seq, len).expect("truncate") {
            assert!(!p.engine.capabilities().exact_truncate, "claims exact_truncate and refuses {len}");
            assert_eq!(p.engine.len(seq), Ok(48), "a refused truncation must change nothing");
            continue;
        }
        assert_eq!(p.engine.len(seq), Ok(len));
        let grown = p.last(seq, &tail);
        let cold = p.cold(&[&tokens[..len], &tail].concat());
        p.same(&grown, &cold, &format!("truncated to {len}"));
        p.engine.close(seq).expect("close");
    }
}

/// A snapshot restored into this engine, and into a fresh one, continues with the same bits and exports the same bytes.
pub fn snapshot_round_trip(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    if !p.engine.capabilities().snapshots {
        return;
    }
    let tokens = p.prompt(8, 45);
    let seq = p.open();
    p.feed(seq, &tokens, Want::Nothing);
    let snapshot = p.engine.export(seq).expect("export");
    assert_eq!(snapshot.tokens, tokens);
    let straight = p.last(seq, &[11, 12]);
    let mut fresh = Probe::new(make, tolerance);
    for p in [&mut p, &mut fresh] {
        let restored = p.engine.import(&snapshot, p.context).expect("import");
        assert_eq!(p.engine.len(restored), Ok(45));
        assert!(
            p.engine.export(restored).expect("export") == snapshot,
            "a second export must give the same bytes"
        );
        let grown = p.last(restored, &[11, 12]);
        p.same(&grown, &straight, "restored from a snapshot");
    }
}

/// Rows that want nothing give nothing, and count all the same.
pub fn rows_that_want_nothing(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let tokens = p.prompt(9, 30);
    let (a, b) = (p.open(), p.open());
    let outs = p.step(&[row(a, &tokens[..10], Want::Nothing), row(b, &tokens, Want::Logits(Which::Last))]);
    assert_eq!(outs[0], RowOut::Nothing);
    let outs = p.step(&[row(a, &tokens[10..], Want::Logits(Which::Last)), row(b, &[1], Want::Nothing)]);
    assert_eq!(outs[1], RowOut::Nothing);
    let cold = p.cold(&tokens);
    p.same(&logits(outs[0].clone()), &cold, "after a row that wanted nothing");
}

/// Samples are what the reference sampler makes of the logits.
pub fn samples_follow_the_specification(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let tokens = p.prompt(10, 20);
    let reference = p.cold(&tokens);
    let greedy = SampleSpec::greedy();
    let hot = |seed| SampleSpec { temperature: 1.0, seed, ..SampleSpec::greedy() };
    let mut specs = vec![
        greedy.clone(),
        SampleSpec { top_logprobs: Some(3), ..greedy.clone() },
        SampleSpec { logit_bias: vec![(5, 100.0)], ..greedy.clone() },
        SampleSpec { repetition_penalty: 1.3, presence_penalty: 0.5, generated_from: 10, ..greedy.clone() },
    ];
    specs.extend((0..12).map(|seed| SampleSpec { top_k: 20, top_p: 0.9, min_p: 0.02, ..hot(seed) }));
    for spec in specs {
        let seq = p.open();
        let RowOut::Sampled(got) = p.feed(seq, &tokens, Want::Sample(spec.clone())) else {
            panic!("{spec:?} gave no sample");
        };
        let expected = sample(&spec, &reference, &tokens).expect("finite logits");
        if p.engine.capabilities().batch_invariant || spec.temperature == 0.0 {
            assert_eq!(got.token, expected.token, "{spec:?}");
        }
        assert_eq!(got.top.len(), expected.top.len());
        for (got, expected) in got.top.iter().zip(&expected.top) {
            assert!(
                (got.1 - expected.1).abs() <= 1e-4 + tolerance * expected.1.abs(),
                "{got:?} {expected:?}"
            );
        }
        p.engine.close(seq).expect("close");
    }
}

/// A step may be submitted before the last is collected, fed by a sample that the host has not seen.
pub fn steps_overlap(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let tokens = p.prompt(11, 12);
    let greedy = || Want::Sample(SampleSpec::greedy());
    let seq = p.open();
    let mut one_by_one = vec![token(&p.feed(seq, &tokens, greedy()))];
    for _ in 0..5 {
        let fed = [one_by_one[one_by_one.len() - 1]];
        one_by_one.push(token(&p.feed(seq, &fed, greedy())));
    }
    let (seq, other) = (p.open(), p.open());
    let mut tickets = vec![p.engine.submit(&[row(seq, &tokens, greedy())]).expect("submit")];
    for _ in 0..5 {
        let rows =
            [Row { seq, input: Input::PreviousSample, want: greedy() }, row(other, &[4], Want::Nothing)];
        tickets.push(p.engine.submit(&rows).expect("submit"));
    }
    assert_eq!(p.engine.len(seq), Ok(17), "submitted tokens count");
    p.engine.close(other).expect("close");
    let overlapped: Vec<u32> =
        tickets.iter().map(|ticket| token(&p.engine.collect(*ticket).expect("collect")[0])).collect();
    assert_eq!(overlapped, one_by_one);
    let again = p.engine.collect(tickets[0]);
    assert_eq!(again, Err(EngineError::UnknownTicket(tickets[0])), "a ticket is collected once");
}

/// Every refusal is the right error, and leaves the sequences as they were.
pub fn refusals_change_nothing(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let tokens = p.prompt(12, 20);
    let good = p.open();
    p.feed(good, &tokens[..10], Want::Nothing);
    let short = p.engine.open(4, None).expect("open");
    let gone = p.open();
    p.engine.close(gone).expect("close");
    let vocab = p.vocab as u32;
    let hot = Want::Sample(SampleSpec { temperature: -1.0, ..SampleSpec::greedy() });
    let previous = Row { seq: good, input: Input::PreviousSample, want: Want::Nothing };
    let batch = p.engine.capabilities().max_batch;
    let many: Vec<_> = (0..=batch).map(|_| row(p.open(), &[1], Want::Nothing)).collect();
    type Expect = fn(&EngineError) -> bool;
    let cases: Vec<(Vec<Row>, Expect)> = vec![
        (vec![], |e| matches!(e, EngineError::Empty(_))),
        (vec![row(good, &[], Want::Nothing)], |e| matches!(e, EngineError::Empty(_))),
        (vec![row(gone, &[1], Want::Nothing)], |e| matches!(e, EngineError::UnknownSequence(_))),
        (vec![row(good, &[1], Want::Nothing); 2], |e| matches!(e, EngineError::DuplicateRow(_))),
        (vec![row(good, &[vocab], Want::Nothing)], |e| matches!(e, EngineError::TokenOutOfRange { .. })),
        (vec![row(short, &[1; 5], Want::Nothing)], |e| {
            matches!(e, EngineError::ContextOverflow { needed: 5, limit: 4 })
        }),
        (vec![previous], |e| matches!(e, EngineError::NothingSampled(_))),
        (vec![row(good, &[1], hot)], |e| matches!(e, EngineError::InvalidSpec { .. })),
        (many.clone(), |e| matches!(e, EngineError::StepTooLarge { .. })),
    ];
    for (rows, expected) in cases {
        // A good row in front must not be taken when a later one is refused.
        let in_front = (!rows.is_empty() && rows.iter().all(|r| r.seq != good))
            .then(|| row(good, &tokens[10..], Want::Logits(Which::Last)));
        let rows: Vec<_> = in_front.into_iter().chain(rows).collect();
        let error = p.engine.submit(&rows).expect_err("must be refused");
        assert!(expected(&error), "unexpected refusal: {error}");
        assert!(!error.to_string().is_empty());
    }
    assert!(matches!(p.engine.open(p.context + 1, None), Err(EngineError::ContextOverflow { .. })));
    assert!(matches!(p.engine.close(gone), Err(EngineError::UnknownSequence(_))));
    assert!(matches!(p.engine.len(gone), Err(EngineError::UnknownSequence(_))));
    assert!(matches!(
        p.engine.fork(good, 11, p.context),
        Err(EngineError::BeyondEnd { at: 11, len: 10, .. })
    ));
    assert!(matches!(p.engine.fork(good, 5, p.context + 1), Err(EngineError::ContextOverflow { .. })));
    assert!(matches!(p.engine.truncate(good, 11), Err(EngineError::BeyondEnd { at: 11, len: 10, .. })));
    for row in many {
        p.engine.close(row.seq).expect("close");
    }
    let grown = p.last(good, &tokens[10..]);
    let cold = p.cold(&tokens);
    p.same(&grown, &cold, "after refusals");
}

/// What a fork or an import takes over for another `max_len` continues as a sequence opened for that length, or is not
/// taken over.
pub fn length_is_part_of_a_prefix(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let (tokens, more) = (p.prompt(21, 40), p.prompt(22, 6));
    let lengths = [46, 100, p.context / 2 + 1, p.context];
    for from in lengths {
        let source = p.engine.open(from, None).expect("open");
        p.feed(source, &tokens, Want::Nothing);
        for to in lengths {
            let cold = p.engine.open(to, None).expect("open");
            let expected = p.last(cold, &[tokens.as_slice(), &more].concat());
            p.engine.close(cold).expect("close");
            let what = format!("opened for {from}, continued for {to}");
            match p.engine.fork(source, 40, to).expect("fork") {
                Fork::Exact(fork) => {
                    let warm = p.last(fork, &more);
                    p.same(&warm, &expected, &what);
                    p.engine.close(fork).expect("close");
                }
                Fork::Inexact => assert_ne!(from, to, "Inexact without another length"),
            }
            if p.engine.capabilities().snapshots {
                let snapshot = p.engine.export(source).expect("export");
                match p.engine.import(&snapshot, to) {
                    Ok(imported) => {
                        let warm = p.last(imported, &more);
                        p.same(&warm, &expected, &what);
                        p.engine.close(imported).expect("close");
                    }
                    Err(error) => {
                        assert!(
                            matches!(&error, EngineError::SnapshotMismatch { field, .. } if field == "rope")
                        );
                        assert_ne!(from, to, "refused without another length");
                    }
                }
            }
        }
        p.engine.close(source).expect("close");
    }
}

/// A snapshot of another model, with other rope or with missing parts is refused by the field's name.
pub fn snapshots_of_something_else(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    if !p.engine.capabilities().snapshots {
        return;
    }
    let seq = p.open();
    p.feed(seq, &p.prompt(13, 8), Want::Nothing);
    let good = p.engine.export(seq).expect("export");
    let before = p.engine.memory();
    let mut bad = vec![good.clone(), good.clone()];
    bad[0].model = "another".into();
    bad[1].rope = "another".into();
    if !good.layers.is_empty() {
        let mut add = |change: &dyn Fn(&mut crate::KvSnapshot)| {
            bad.push(good.clone());
            change(bad.last_mut().expect("just pushed"));
        };
        add(&|s| s.layers.truncate(0));
        add(&|s| s.layers[0].kv_heads += 1);
        add(&|s| s.layers[0].head_dim += 1);
        add(&|s| s.layers[0].k.truncate(1));
        add(&|s| s.tokens.truncate(1));
    }
    for snapshot in bad {
        let error = p.engine.import(&snapshot, p.context).expect_err("must be refused");
        assert!(matches!(error, EngineError::SnapshotMismatch { .. }), "unexpected refusal: {error}");
    }
    assert!(matches!(p.engine.import(&good, 4), Err(EngineError::ContextOverflow { needed: 8, limit: 4 })));
    assert_eq!(p.engine.memory(), before, "a refused import must keep nothing");
}

/// Closing everything gives all KV back; a fork costs less than its source.
pub fn memory_returns(make: Make<'_>, tolerance: f32) {
    let mut p = Probe::new(make, tolerance);
    let used = |p: &Probe| p.engine.memory().kv_exclusive + p.engine.memory().kv_shared;
    assert_eq!(used(&p), 0);
    let source = p.open();
    let tokens = p.prompt(14, 96);
    for part in tokens.chunks(48) {
        p.feed(source, part, Want::Nothing);
    }
    let alone = p.engine.sequence_bytes(source).expect("bytes");
    assert!(alone.exclusive > 0 && alone.shared == 0);
    assert_eq!(used(&p), alone.exclusive);
    if let Fork::Exact(fork) = p.engine.fork(source, 96, p.context).expect("fork") {
        let forked = p.engine.sequence_bytes(fork).expect("bytes");
        assert!(used(&p) < 2 * alone.exclusive, "a fork must share");
        assert!(forked.exclusive + forked.shared >= alone.exclusive / 2, "a fork reports what it holds");
        p.engine.close(source).expect("close");
        assert_eq!(p.engine.sequence_bytes(fork).expect("bytes").shared, 0, "nobody else is left");
        p.engine.close(fork).expect("close");
    } else {
        p.engine.close(source).expect("close");
    }
    assert_eq!(used(&p), 0);
}
