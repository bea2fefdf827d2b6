//! Step by step on the fake engine. Expected tokens come from its logits function and the reference sampler, never from
//! a scheduler.

mod answers;
mod fairness;
mod memory;
mod overlap;
mod prefixes;
mod timelines;

use std::cell::RefCell;
use std::rc::Rc;

use tandem_engine::fake::FakeEngine;
use tandem_engine::sampler::sample;
use tandem_engine::{
    AdapterId, EngineError, Fork, Input, KvSnapshot, Memory, Row, RowOut, SampleSpec, SeqBytes, Ticket, Want,
};

use super::*;
use crate::channel::{Places, Receiver, channel};
use crate::message::{Done, Usage};

const VOCAB: usize = 97;
const CONTEXT: usize = 512;

/// A fake engine that keeps a record and can be told to misbehave.
struct Spy {
    inner: FakeEngine,
    record: Rc<RefCell<Record>>,
}

/// A row as it was submitted: whose, how many tokens, and whether something was wanted.
type Fed = (SeqId, usize, bool);

#[derive(Default)]
struct Record {
    steps: Vec<Vec<Fed>>,
    /// Submissions (`+`) and collections (`-`) in order.
    order: String,
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
        record.order.push('+');
        Ok(ticket)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<Vec<RowOut>, EngineError> {
        self.record.borrow_mut().order.push('-');
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

/// A clock that stands still between two looks, so that steps take the same time on every machine.
fn ticking() -> Instant {
    use std::sync::LazyLock;
    static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
    thread_local!(static LOOKS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) });
    LOOKS.set(LOOKS.get() + 1);
    *BEGUN + std::time::Duration::from_millis(1) * LOOKS.get()
}

struct Rig {
    scheduler: Scheduler,
    record: Rc<RefCell<Record>>,
    places: Places,
    next: u64,
}

impl Rig {
    fn new(kv_tokens: usize) -> Self {
        Self::with(FakeEngine::new(VOCAB, CONTEXT, kv_tokens))
    }

    fn with(inner: FakeEngine) -> Self {
        let record = Rc::<RefCell<Record>>::default();
        let mut scheduler = Scheduler::new(Box::new(Spy { inner, record: Rc::clone(&record) }), 1 << 20);
        scheduler.now = ticking;
        Self { scheduler, record, places: Places::new(1000), next: 0 }
    }

    fn accept(&mut self, request: &Request, capacity: usize) -> (RequestId, Receiver) {
        let (sender, receiver) = channel(capacity, self.places.take().unwrap());
        self.next += 1;
        self.scheduler.accept(RequestId(self.next), request.clone(), sender, Instant::now());
        (RequestId(self.next), receiver)
    }

    fn steps(&mut self, count: usize) {
        (0..count).for_each(|_| assert!(self.scheduler.step().unwrap()));
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
    let most = request.max_tokens.unwrap_or(request.context.unwrap_or(CONTEXT) - history.len());
    let mut out = Vec::new();
    while out.len() < most {
        let logits = FakeEngine::adapted_logits(request.adapter, &history, VOCAB);
        let token = sample(&spec, &logits, &history).unwrap().token;
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
