//! Step by step on the fake engine. Expected tokens come from its logits function and the reference sampler, never from
//! a scheduler.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use proptest::prelude::*;
use tandem_engine::fake::FakeEngine;
use tandem_engine::sampler::sample;
use tandem_engine::{AdapterId, Fork, KvSnapshot, Memory, SampleSpec, SeqBytes, Ticket};

use super::*;
use crate::channel::{Places, Receiver, channel};

const VOCAB: usize = 97;
const CONTEXT: usize = 512;

/// A fake engine that keeps a record and can be told to misbehave.
struct Spy {
    inner: FakeEngine,
    record: Rc<RefCell<Record>>,
}

#[derive(Default)]
struct Record {
    steps: Vec<Vec<(SeqId, usize, bool)>>,
    inexact: bool,
    refuse: Option<SeqId>,
}

impl Engine for Spy {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn open(&mut self, max_len: usize, adapter: Option<AdapterId>) -> Result<SeqId, EngineError> {
        self.inner.open(max_len, adapter)
    }
    fn len(&self, seq: SeqId) -> Result<usize, EngineError> {
        self.inner.len(seq)
    }
    fn submit(&mut self, rows: &[Row]) -> Result<Ticket, EngineError> {
        let mut record = self.record.borrow_mut();
        if let Some(row) = rows.iter().find(|r| Some(r.seq) == record.refuse) {
            return Err(EngineError::NotFinite(row.seq));
        }
        let ticket = self.inner.submit(rows)?;
        let row = |r: &Row| match &r.input {
            Input::Tokens(tokens) => (r.seq, tokens.len(), r.want != Want::Nothing),
            Input::PreviousSample => (r.seq, 1, true),
        };
        record.steps.push(rows.iter().map(row).collect());
        Ok(ticket)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<Vec<RowOut>, EngineError> {
        self.inner.collect(ticket)
    }
    fn fork(&mut self, seq: SeqId, at: usize, max_len: usize) -> Result<Fork, EngineError> {
        if self.record.borrow().inexact { Ok(Fork::Inexact) } else { self.inner.fork(seq, at, max_len) }
    }
    fn truncate(&mut self, seq: SeqId, len: usize) -> Result<bool, EngineError> {
        self.inner.truncate(seq, len)
    }
    fn close(&mut self, seq: SeqId) -> Result<(), EngineError> {
        self.inner.close(seq)
    }
    fn export(&mut self, seq: SeqId) -> Result<KvSnapshot, EngineError> {
        self.inner.export(seq)
    }
    fn import(&mut self, snapshot: &KvSnapshot, max_len: usize) -> Result<SeqId, EngineError> {
        self.inner.import(snapshot, max_len)
    }
    fn memory(&self) -> Memory {
        self.inner.memory()
    }
    fn sequence_bytes(&self, seq: SeqId) -> Result<SeqBytes, EngineError> {
        self.inner.sequence_bytes(seq)
    }
}

struct Rig {
    scheduler: Scheduler,
    record: Rc<RefCell<Record>>,
    places: Places,
    next: u64,
}

impl Rig {
    fn new(kv_tokens: usize) -> Self {
        let record = Rc::<RefCell<Record>>::default();
        let inner = FakeEngine::new(VOCAB, CONTEXT, kv_tokens);
        let scheduler = Scheduler::new(Box::new(Spy { inner, record: Rc::clone(&record) }));
        Self { scheduler, record, places: Places::new(1000), next: 0 }
    }

    fn accept(&mut self, request: &Request, capacity: usize) -> (RequestId, Receiver) {
        let (sender, receiver) = channel(capacity, self.places.take().unwrap());
        self.next += 1;
        self.scheduler.accept(RequestId(self.next), request.clone(), sender, Instant::now());
        (RequestId(self.next), receiver)
    }

    fn run(&mut self) {
        while self.scheduler.step().unwrap() {}
    }

    /// Accepts, runs to the end and returns everything.
    fn answer(&mut self, request: &Request) -> (Vec<u32>, Result<Done, RuntimeError>) {
        let (_, receiver) = self.accept(request, 1000);
        self.run();
        read(&receiver)
    }

    fn kv_tokens(&self) -> u64 {
        let memory = self.scheduler.engine().memory();
        (memory.kv_exclusive + memory.kv_shared) / self.scheduler.capabilities.kv_bytes_per_token
    }
}

fn read(receiver: &Receiver) -> (Vec<u32>, Result<Done, RuntimeError>) {
    let mut tokens = Vec::new();
    loop {
        match receiver.take().unwrap().event {
            Event::Token(token) => tokens.push(token.id),
            Event::Done(done) => return (tokens, Ok(done)),
            Event::Error(error) => return (tokens, Err(error)),
        }
    }
}

fn request(tokens: impl Into<Vec<u32>>, max_tokens: usize) -> Request {
    Request {
        tokens: tokens.into(),
        sample: SampleSpec::greedy(),
        max_tokens: Some(max_tokens),
        stop_tokens: Vec::new(),
        context: None,
        adapter: None,
        priority: 0,
    }
}

/// What `request` gives, by definition.
fn expected(request: &Request) -> Vec<u32> {
    let mut history = request.tokens.clone();
    let spec = SampleSpec { generated_from: history.len(), ..request.sample.clone() };
    let mut out = Vec::new();
    while out.len() < request.max_tokens.unwrap() {
        let token = sample(&spec, &FakeEngine::logits(&history, VOCAB), &history).unwrap().token;
        if request.stop_tokens.contains(&token) {
            break;
        }
        history.push(token);
        out.push(token);
    }
    out
}

fn prompt(key: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (key * 31 + i * i * 7 + i) % VOCAB as u32).collect()
}

#[test]
fn a_batch_of_many_equals_each_alone() {
    let mut rig = Rig::new(100_000);
    let requests: Vec<Request> = (0..40)
        .map(|i| {
            let mut request = request(prompt(i, 1 + (i as usize * 37) % 200), 1 + i as usize % 30);
            request.sample.temperature = (i % 3) as f32 * 0.6;
            request.sample.seed = u64::from(i);
            request.sample.frequency_penalty = (i % 2) as f32 * 0.3;
            request
        })
        .collect();
    let receivers: Vec<_> = requests.iter().map(|r| rig.accept(r, 1000).1).collect();
    rig.run();
    for (request, receiver) in requests.iter().zip(&receivers) {
        let (tokens, done) = read(receiver);
        assert_eq!(tokens, expected(request));
        assert_eq!(done.unwrap().reason, Reason::Length);
    }
    assert!(rig.record.borrow().steps.iter().any(|rows| rows.len() >= 8), "it never batched");
}

#[test]
fn a_long_prompt_is_fed_in_chunks_that_want_nothing_back_beside_decoding_rows() {
    let mut rig = Rig::new(100_000);
    let (_, short) = rig.accept(&request(prompt(1, 5), 10), 1000);
    rig.scheduler.step().unwrap();
    let (_, long) = rig.accept(&request(prompt(2, 150), 2), 1000);
    rig.run();
    assert_eq!(read(&short).0, expected(&request(prompt(1, 5), 10)));
    assert_eq!(read(&long).0, expected(&request(prompt(2, 150), 2)));
    let record = rig.record.borrow();
    let shape = |step: &Vec<(SeqId, usize, bool)>| step.iter().map(|r| (r.1, r.2)).collect::<Vec<_>>();
    let shapes: Vec<_> = record.steps.iter().take(4).map(shape).collect();
    assert_eq!(
        shapes,
        [
            vec![(5, true)],
            vec![(1, true), (63, false)],
            vec![(1, true), (63, false)],
            vec![(1, true), (24, true)],
        ]
    );
}

#[test]
fn a_cancel_frees_all_kv_before_the_next_step_also_in_mid_prefill() {
    for steps in [0, 1, 2, 6] {
        let mut rig = Rig::new(100_000);
        let (id, _receiver) = rig.accept(&request(prompt(1, 200), 100), 1000);
        for _ in 0..steps {
            rig.scheduler.step().unwrap();
        }
        assert_eq!(rig.kv_tokens(), [0, 64, 128, 0, 0, 0, 202][steps]);
        rig.scheduler.cancel(id);
        assert_eq!(rig.kv_tokens(), 0);
        assert!(!rig.scheduler.step().unwrap());
        assert_eq!(rig.record.borrow().steps.len(), steps);
    }
}

#[test]
fn a_slow_reader_pauses_only_itself() {
    let mut rig = Rig::new(100_000);
    let (slow, quick) = (request(prompt(1, 10), 30), request(prompt(2, 10), 30));
    let (_, slow_reader) = rig.accept(&slow, 4);
    let (_, quick_reader) = rig.accept(&quick, 1000);
    rig.run();
    assert_eq!(read(&quick_reader).0, expected(&quick));
    let rows = rig.record.borrow().steps.iter().flatten().filter(|r| r.0 == SeqId(1)).count();
    assert_eq!(rows, 4, "a row was submitted for a reader that was not ready");

    let mut tokens = Vec::new();
    let done = loop {
        let taken = slow_reader.take().unwrap();
        if taken.resume {
            rig.run();
        }
        match taken.event {
            Event::Token(token) => tokens.push(token.id),
            Event::Done(done) => break done,
            Event::Error(error) => panic!("{error}"),
        }
    };
    assert_eq!(tokens, expected(&slow));
    assert_eq!(done.usage.generated, 30);
}

#[test]
fn context_overflow_names_both_numbers_and_computes_nothing() {
    let mut rig = Rig::new(100_000);
    let within = |context: usize, mut request: Request| {
        request.context = Some(context);
        request
    };
    let open_ended = |tokens| Request { max_tokens: None, ..request(tokens, 1) };
    for (bad, needed, limit) in [
        (request(prompt(1, 600), 1), 601, 512),
        (request(prompt(1, 500), 13), 513, 512),
        (within(100, request(prompt(1, 90), 11)), 101, 100),
        (within(10_000, request(prompt(1, 90), 600)), 690, 512),
        (open_ended(prompt(1, 512)), 513, 512),
    ] {
        let (_, result) = rig.answer(&bad);
        assert_eq!(result.unwrap_err(), EngineError::ContextOverflow { needed, limit }.into());
    }
    assert!(rig.record.borrow().steps.is_empty());

    let (tokens, done) = rig.answer(&within(40, open_ended(prompt(1, 30))));
    assert_eq!((tokens.len(), done.unwrap().reason), (10, Reason::Length));
}

#[test]
fn bad_requests_are_refused_by_name() {
    let mut rig = Rig::new(100_000);
    let mut hot = request(prompt(1, 3), 1);
    hot.sample.temperature = -1.0;
    for (bad, word) in [
        (request([], 1), "prompt is empty"),
        (request([3, VOCAB as u32], 1), "token 97 is outside the vocabulary of 97"),
        (request([3], 0), "max_tokens = 0"),
        (hot, "temperature = -1"),
    ] {
        let error = rig.answer(&bad).1.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    assert!(rig.record.borrow().steps.is_empty());
}

#[test]
fn kv_memory_is_decided_before_prefill() {
    let mut rig = Rig::new(100);
    let error = rig.answer(&request(prompt(1, 50), 51)).1.unwrap_err();
    let RuntimeError::Engine(EngineError::OutOfMemory { needed, available, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!((needed, available), (101 * 64, 100 * 64));
    assert!(rig.record.borrow().steps.is_empty());

    // Two that do not fit beside each other run one after the other.
    let requests = [request(prompt(1, 30), 30), request(prompt(2, 30), 30)];
    let readers = requests.each_ref().map(|r| rig.accept(r, 1000).1);
    rig.run();
    for (request, reader) in requests.iter().zip(&readers) {
        assert_eq!(read(reader).0, expected(request));
    }
    assert!(rig.record.borrow().steps.iter().all(|rows| rows.len() == 1));
}

#[test]
fn stop_tokens_end_the_answer_and_are_counted_but_not_sent() {
    let mut rig = Rig::new(100_000);
    let free = expected(&request(prompt(1, 10), 10));
    let mut stopping = request(prompt(1, 10), 10);
    stopping.stop_tokens = vec![free[4]];
    let at = free.iter().position(|t| *t == free[4]).unwrap();
    let (tokens, done) = rig.answer(&stopping);
    let done = done.unwrap();
    assert_eq!(tokens, free[..at]);
    assert_eq!((done.reason, done.usage.generated), (Reason::Stop { token: free[4] }, at + 1));
}

#[test]
fn the_next_turn_of_a_chat_computes_only_what_it_adds() {
    let mut rig = Rig::new(100_000);
    let first = request(prompt(1, 100), 20);
    let (answer, done) = rig.answer(&first);
    assert_eq!(done.unwrap().usage, Usage { prompt: 100, cached: 0, generated: 20 });

    // The last token was sampled but never fed, so it is not cached.
    let second = request([first.tokens, answer, prompt(5, 10)].concat(), 20);
    let (answer, done) = rig.answer(&second);
    assert_eq!(answer, expected(&second));
    assert_eq!(done.unwrap().usage, Usage { prompt: 130, cached: 119, generated: 20 });

    // The same prompt again: its last token is computed for the logits.
    let (again, done) = rig.answer(&second);
    assert_eq!(again, answer);
    assert_eq!(done.unwrap().usage.cached, 129);

    // Something else entirely.
    let other = request([vec![96], prompt(7, 20)].concat(), 5);
    let (answer, done) = rig.answer(&other);
    assert_eq!((answer, done.unwrap().usage.cached), (expected(&other), 0));
}

#[test]
fn an_inexact_fork_means_recomputing() {
    let mut rig = Rig::new(100_000);
    rig.record.borrow_mut().inexact = true;
    let again = request(prompt(1, 100), 20);
    for _ in 0..2 {
        let (answer, done) = rig.answer(&again);
        assert_eq!((answer, done.unwrap().usage.cached), (expected(&again), 0));
    }
}

#[test]
fn the_kept_prefix_yields_to_a_request_that_needs_its_memory() {
    let mut rig = Rig::new(100);
    rig.answer(&request(prompt(1, 50), 10)).1.unwrap();
    assert_eq!(rig.kv_tokens(), 59);
    let other = request([vec![96], prompt(2, 50)].concat(), 29);
    let (answer, done) = rig.answer(&other);
    assert_eq!((answer, done.unwrap().usage.cached), (expected(&other), 0));
    assert_eq!(rig.kv_tokens(), 79);

    // A request that continues it shares its memory instead, however little is left.
    let longer = request([other.tokens.clone(), expected(&other)].concat(), 20);
    let (answer, done) = rig.answer(&longer);
    assert_eq!((answer, done.unwrap().usage.cached), (expected(&longer), 79));
    assert_eq!(rig.kv_tokens(), 99);
}

#[test]
fn a_refused_row_ends_its_own_request_only() {
    let mut rig = Rig::new(100_000);
    let good = request(prompt(2, 10), 10);
    let (_, bad_reader) = rig.accept(&request(prompt(1, 10), 10), 1000);
    let (_, good_reader) = rig.accept(&good, 1000);
    rig.record.borrow_mut().refuse = Some(SeqId(1));
    rig.run();
    assert_eq!(read(&bad_reader).1.unwrap_err(), EngineError::NotFinite(SeqId(1)).into());
    assert_eq!(read(&good_reader).0, expected(&good));
}

#[test]
fn finishing_keeps_the_prefix_and_says_why() {
    let mut rig = Rig::new(100_000);
    let long = request(prompt(1, 20), 100);
    let (id, reader) = rig.accept(&long, 1000);
    for _ in 0..5 {
        rig.scheduler.step().unwrap();
    }
    let reason = Reason::StopString { text: "END".to_owned() };
    rig.scheduler.finish(id, reason.clone());
    let (tokens, done) = read(&reader);
    let done = done.unwrap();
    assert_eq!((tokens.len(), done.reason, done.usage.generated), (5, reason, 5));
    assert_eq!(rig.answer(&long).1.unwrap().usage.cached, 19);

    // One that has not begun yet.
    let (id, reader) = rig.accept(&long, 1000);
    rig.scheduler.finish(id, Reason::Interrupted);
    let done = read(&reader).1.unwrap();
    assert_eq!((done.reason, done.timing.ttft), (Reason::Interrupted, None));
}

/// Something that happens to a scheduler.
#[derive(Debug, Clone)]
enum Happening {
    Accept { key: u32, len: usize, max_tokens: usize, seed: u64, capacity: usize },
    Cancel(usize),
    Finish(usize),
    Read(usize),
    Steps(usize),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        (0..4u32, 1..150usize, 1..40usize, 0..3u64, 1..6usize).prop_map(
            |(key, len, max_tokens, seed, capacity)| Happening::Accept {
                key,
                len,
                max_tokens,
                seed,
                capacity
            }
        ),
        (0..8usize).prop_map(Happening::Cancel),
        (0..8usize).prop_map(Happening::Finish),
        (0..8usize).prop_map(Happening::Read),
        (1..8usize).prop_map(Happening::Steps),
    ]
}

proptest! {
    /// Whatever happens around a request, its tokens are a prefix of what it gives alone, and all memory comes back.
    #[test]
    fn no_timeline_changes_an_answer_or_leaks(
        kv in 200..2000usize,
        timeline in prop::collection::vec(happening(), 1..60),
    ) {
        let mut rig = Rig::new(kv);
        let mut live: Vec<(RequestId, Request, Receiver, Vec<u32>)> = Vec::new();
        let mut ended = BTreeSet::new();
        for happening in timeline {
            match happening {
                Happening::Accept { key, len, max_tokens, seed, capacity } => {
                    let mut request = request(prompt(key, len), max_tokens);
                    request.sample.seed = seed;
                    request.sample.temperature = seed as f32;
                    let (id, receiver) = rig.accept(&request, capacity);
                    live.push((id, request, receiver, Vec::new()));
                }
                Happening::Cancel(i) if i < live.len() => {
                    let (id, ..) = live.remove(i);
                    rig.scheduler.cancel(id);
                }
                Happening::Finish(i) if i < live.len() => rig.scheduler.finish(live[i].0, Reason::Interrupted),
                Happening::Read(i) if i < live.len() && !ended.contains(&live[i].0) => {
                    // Reads what is there, as a reader thread would.
                    while rig.scheduler.step().unwrap() {}
                    let (id, _, receiver, tokens) = &mut live[i];
                    if rig.scheduler.running.iter().any(|a| a.id == *id) {
                        if let Event::Token(token) = receiver.take().unwrap().event {
                            tokens.push(token.id);
                        }
                    } else if !rig.scheduler.waiting.iter().any(|w| w.id == *id) {
                        tokens.extend(read(receiver).0);
                        ended.insert(*id);
                    }
                }
                Happening::Steps(n) => (0..n).for_each(|_| { rig.scheduler.step().unwrap(); }),
                _ => {}
            }
        }
        for (_, request, _, tokens) in &live {
            prop_assert!(expected(request).starts_with(tokens));
        }
        let requests: Vec<_> = live.iter().map(|(id, ..)| *id).collect();
        requests.into_iter().for_each(|id| rig.scheduler.cancel(id));
        let scheduler = &mut rig.scheduler;
        scheduler.prefix.clear(scheduler.engine.as_mut());
        prop_assert_eq!(rig.kv_tokens(), 0);
    }
}

/// The fake engine never answers this; a broken engine might.
#[test]
fn logits_in_place_of_a_sample_end_the_request() {
    let logits = tandem_engine::Logits { vocab: 1, values: vec![0.0] };
    let mut rig = Rig::new(1000);
    let (_, reader) = rig.accept(&request([1], 1), 10);
    rig.scheduler.admit();
    rig.scheduler.running[0].take(1, RowOut::Logits(logits), Instant::now());
    rig.scheduler.reap();
    assert!(read(&reader).1.unwrap_err().to_string().contains("logits"));
}
