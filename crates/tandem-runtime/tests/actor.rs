//! The actor as its users see it: threads, streams, panics.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use tandem_engine::fake::FakeEngine;
use tandem_engine::{
    AdapterId, Capabilities, Engine, EngineError, EngineFactory, Fork, KvSnapshot, Memory, Row, RowOut,
    SampleSpec, SeqBytes, SeqId, Ticket,
};
use tandem_kernels::team::Team;
use tandem_runtime::{
    Actor, ActorHandle, Command, Done, EngineState, Event, LoadState, Options, Reason, Request, RequestId,
    RuntimeError,
};

const VOCAB: usize = 97;

fn engine() -> FakeEngine {
    FakeEngine::new(VOCAB, 4096, 100_000)
}

fn factory() -> Box<dyn EngineFactory> {
    Box::new(|| Ok(Box::new(engine()) as Box<dyn Engine>))
}

fn spawn(factory: Box<dyn EngineFactory>) -> Actor {
    let options = Options { pause: Duration::from_millis(300), ..Options::default() };
    Actor::spawn(factory, &options).unwrap()
}

fn request(prompt: usize, max_tokens: usize) -> Request {
    Request {
        tokens: (0..prompt as u32).map(|i| i % VOCAB as u32).collect(),
        sample: SampleSpec::greedy(),
        max_tokens: Some(max_tokens),
        stop_tokens: Vec::new(),
        context: None,
        adapter: None,
        priority: 0,
    }
}

fn last(handle: &ActorHandle, request: Request) -> Event {
    handle.generate(request).unwrap().last().unwrap()
}

fn done(event: Event) -> Done {
    match event {
        Event::Done(done) => done,
        other => panic!("{other:?}"),
    }
}

fn kv(handle: &ActorHandle) -> u64 {
    match handle.status().unwrap().engine {
        EngineState::Ready { memory, .. } => memory.kv_exclusive + memory.kv_shared,
        EngineState::Failed(error) => panic!("{error}"),
    }
}

#[test]
fn an_answer_comes_with_usage_timing_and_route() {
    let actor = spawn(factory());
    let events: Vec<Event> = actor.handle().generate(request(100, 5)).unwrap().collect();
    assert_eq!(events.len(), 6);
    let done = done(events[5].clone());
    assert_eq!((done.reason, done.route.engine.as_str()), (Reason::Length, "fake"));
    assert_eq!((done.usage.prompt, done.usage.cached, done.usage.generated), (100, 0, 5));
    let timing = done.timing;
    assert!((timing.ttft.unwrap() - timing.queue.unwrap() - timing.prefill.unwrap()).abs() < 1e-6);
    assert!(timing.decode_rate(&done.usage).unwrap() > 0.0);
}

#[test]
fn dropping_a_stream_frees_its_kv_before_the_next_message_is_answered() {
    let actor = spawn(factory());
    let handle = actor.handle();
    // In the middle of decoding, and (with 4,000 tokens to go in chunks of 64) most likely of prefill.
    for mut request in [request(10, 4000), request(4000, 10)] {
        request.context = None;
        let decoding = request.tokens.len() == 10;
        let mut stream = handle.generate(request).unwrap();
        if decoding {
            stream.next().unwrap();
        }
        drop(stream);
        assert_eq!(kv(&handle), 0);
        let status = handle.status().unwrap();
        assert_eq!((status.running, status.waiting), (0, 0));
    }
}

#[test]
fn a_slow_reader_loses_nothing() {
    let options = Options { stream_capacity: 2, ..Options::default() };
    let actor = Actor::spawn(factory(), &options).unwrap();
    let whole: Vec<Event> = spawn(factory()).handle().generate(request(10, 200)).unwrap().collect();
    let mut slow = actor.handle().generate(request(10, 200)).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let mut events: Vec<Event> = slow.by_ref().take(10).collect();
    std::thread::sleep(Duration::from_millis(20));
    events.extend(slow);
    assert_eq!(events[..200], whole[..200]);
}

#[test]
fn a_panic_fails_the_requests_it_meets_and_the_next_one_succeeds() {
    let built = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&built);
    let (all_made, wait) = std::sync::mpsc::channel();
    let actor = spawn(Box::new(move || {
        let first = count.fetch_add(1, Ordering::SeqCst) == 0;
        if first {
            wait.recv().unwrap();
        }
        let engine = if first { engine().panicking_after(3) } else { engine() };
        Ok(Box::new(engine) as Box<dyn Engine>)
    }));
    let handle = actor.handle();
    let streams: Vec<_> = (0..16).map(|i| handle.generate(request(5 + i, 1000)).unwrap()).collect();
    all_made.send(()).unwrap();
    for stream in streams {
        match stream.last().unwrap() {
            Event::Error(RuntimeError::Crashed(message)) => assert!(message.contains("told to panic")),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(done(last(&handle, request(5, 3))).usage.generated, 3);
    assert_eq!((handle.status().unwrap().restarts, built.load(Ordering::SeqCst)), (1, 2));
}

/// An engine that, when told, panics in a thread of its team.
struct TeamPanics {
    inner: FakeEngine,
    team: Team,
    steps_left: usize,
}

impl Engine for TeamPanics {
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
        let caller = std::thread::current().id();
        let (meets_worker, fails) = (Barrier::new(2), self.steps_left == 0);
        self.steps_left = self.steps_left.saturating_sub(1);
        // Two items for two threads: neither ends before both have begun.
        self.team.run(|_| {
            meets_worker.wait();
            assert!(!fails || std::thread::current().id() == caller, "a helper thread was told to panic");
        });
        self.inner.submit(rows)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<Vec<RowOut>, EngineError> {
        self.inner.collect(ticket)
    }
    fn fork(&mut self, seq: SeqId, at: usize, max_len: usize) -> Result<Fork, EngineError> {
        self.inner.fork(seq, at, max_len)
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

#[test]
fn a_panic_in_a_helper_thread_fails_the_requests_it_meets_and_the_next_one_succeeds() {
    let built = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&built);
    let (all_made, wait) = std::sync::mpsc::channel();
    let actor = spawn(Box::new(move || {
        let first = count.fetch_add(1, Ordering::SeqCst) == 0;
        if first {
            wait.recv().unwrap();
        }
        let steps_left = if first { 3 } else { usize::MAX };
        let engine = TeamPanics { inner: engine(), team: Team::new(2).unwrap(), steps_left };
        Ok(Box::new(engine) as Box<dyn Engine>)
    }));
    let handle = actor.handle();
    let streams: Vec<_> = (0..16).map(|i| handle.generate(request(5 + i, 1000)).unwrap()).collect();
    all_made.send(()).unwrap();
    for stream in streams {
        match stream.last().unwrap() {
            Event::Error(RuntimeError::Crashed(message)) => assert!(message.contains("helper thread")),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(done(last(&handle, request(5, 3))).usage.generated, 3);
    assert_eq!((handle.load().restarts, built.load(Ordering::SeqCst)), (1, 2));
}

#[test]
fn an_engine_that_keeps_crashing_is_given_a_pause() {
    let built = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&built);
    let actor = spawn(Box::new(move || {
        let healthy = count.fetch_add(1, Ordering::SeqCst) >= 2;
        let engine = if healthy { engine() } else { engine().panicking_after(0) };
        Ok(Box::new(engine) as Box<dyn Engine>)
    }));
    let handle = actor.handle();
    // The first crash is mended at once, the second is not.
    for _ in 0..4 {
        assert!(matches!(last(&handle, request(5, 3)), Event::Error(RuntimeError::Crashed(_))));
    }
    assert_eq!(built.load(Ordering::SeqCst), 2);
    assert!(matches!(handle.status().unwrap().engine, EngineState::Failed(RuntimeError::Crashed(_))));
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(done(last(&handle, request(5, 3))).usage.generated, 3);
}

#[test]
fn an_engine_that_cannot_be_built_answers_with_the_reason_and_is_tried_again() {
    let error = EngineError::Device("no such device".to_owned());
    let outcome = Arc::new(Mutex::new(Err(error.clone())));
    let next = Arc::clone(&outcome);
    let actor =
        spawn(Box::new(move || next.lock().unwrap().clone().map(|()| Box::new(engine()) as Box<dyn Engine>)));
    let handle = actor.handle();
    assert_eq!(handle.ready().unwrap_err(), error.clone().into());
    assert_eq!(last(&handle, request(5, 3)), Event::Error(error.into()));
    *outcome.lock().unwrap() = Ok(());
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(done(last(&handle, request(5, 3))).usage.generated, 3);
}

#[test]
fn a_panic_while_building_is_an_error_too() {
    let actor = spawn(Box::new(|| -> Result<Box<dyn Engine>, EngineError> { panic!("bad weights") }));
    let error = actor.handle().ready().unwrap_err();
    assert_eq!(error, RuntimeError::Crashed("bad weights".to_owned()));
}

#[test]
fn more_requests_than_there_are_places_are_refused_with_the_number() {
    let options = Options { max_requests: 2, stream_capacity: 1, ..Options::default() };
    let actor = Actor::spawn(factory(), &options).unwrap();
    let handle = actor.handle();
    let streams: Vec<_> = (0..2).map(|_| handle.generate(request(5, 100)).unwrap()).collect();
    assert_eq!(
        handle.generate(request(5, 1)).unwrap_err(),
        RuntimeError::Busy { limit: 2, retry_after: Duration::from_secs(1) }
    );
    // An ended request's place is free before its reader sees the end.
    for stream in streams {
        done(stream.last().unwrap());
        done(last(&handle, request(5, 1)));
    }
}

#[test]
fn a_stream_can_be_finished_from_another_thread() {
    let actor = spawn(factory());
    let mut stream = actor.handle().generate(request(5, 4000)).unwrap();
    let control = stream.control();
    stream.next().unwrap();
    let thread = std::thread::spawn(move || control.finish(Reason::Interrupted));
    assert_eq!(done(stream.last().unwrap()).reason, Reason::Interrupted);
    thread.join().unwrap();
}

#[test]
fn shutting_down_ends_everything() {
    let actor = spawn(factory());
    let handle = actor.handle();
    let stream = handle.generate(request(5, 4000)).unwrap();
    drop(actor);
    assert_eq!(stream.last().unwrap(), Event::Error(RuntimeError::ShutDown));
    assert_eq!(handle.generate(request(5, 1)).unwrap_err(), RuntimeError::ShutDown);
    assert_eq!(handle.status().unwrap_err(), RuntimeError::ShutDown);
}

/// Looks until `seen`, as a coordinator does that never asks the worker.
fn until(handle: &ActorHandle, what: &str, seen: impl Fn(&tandem_runtime::Load) -> bool) {
    for _ in 0..2000 {
        if seen(&handle.load()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("{what}: {:?}", handle.load());
}

#[test]
fn the_load_is_known_without_asking_the_worker() {
    let (go, wait) = std::sync::mpsc::channel();
    let error = EngineError::Device("no such device".to_owned());
    let mut outcomes = vec![None, Some(error.clone())];
    let actor = spawn(Box::new(move || {
        wait.recv().unwrap();
        match outcomes.pop().flatten() {
            Some(error) => Err(error),
            None => Ok(Box::new(engine()) as Box<dyn Engine>),
        }
    }));
    let handle = actor.handle();
    let first = handle.generate(request(5, 3)).unwrap();
    let load = handle.load();
    assert_eq!((load.state, load.running, load.waiting), (LoadState::Loading, 0, 1));
    go.send(()).unwrap();
    assert_eq!(first.last().unwrap(), Event::Error(error.clone().into()));
    let LoadState::Failed { error: shown, retry_in } = handle.load().state else {
        panic!("{:?}", handle.load())
    };
    assert_eq!(shown, error.into());
    assert!(retry_in <= Duration::from_millis(300));
    // It tries again of itself.
    until(&handle, "loading", |load| load.state == LoadState::Loading);
    go.send(()).unwrap();
    until(&handle, "ready", |load| matches!(&load.state, LoadState::Ready(can) if can.engine == "fake"));
    assert_eq!(handle.load().restarts, 1);

    let mut stream = handle.generate(request(5, 4000)).unwrap();
    stream.next().unwrap();
    until(&handle, "running", |load| load.running == 1 && load.memory.kv_exclusive > 0);
    drop(stream);
    until(&handle, "idle", |load| (load.running, load.waiting, load.memory.kv_exclusive) == (0, 0, 0));
    let text = serde_json::to_string(&handle.load()).unwrap();
    assert_eq!(serde_json::from_str::<tandem_runtime::Load>(&text).unwrap(), handle.load());
    drop(actor);
    assert_eq!(handle.load().state, LoadState::Stopped);
}

#[test]
fn kept_prefixes_are_known_and_can_be_given_up() {
    let actor = spawn(factory());
    let handle = actor.handle();
    done(last(&handle, request(20, 5)));
    until(&handle, "kept", |load| load.prefix_tokens == 24 && load.memory.kv_exclusive > 0);
    handle.clear_prefixes();
    assert_eq!(kv(&handle), 0);
    until(&handle, "given up", |load| load.prefix_tokens == 0 && load.memory.kv_exclusive == 0);
}

#[test]
fn draining_answers_what_was_taken_and_refuses_the_rest() {
    let actor = spawn(factory());
    let handle = actor.handle();
    let streams: Vec<_> = (0..40).map(|i| handle.generate(request(5 + i, 50)).unwrap()).collect();
    handle.drain(Duration::from_secs(60));
    assert_eq!(handle.load().state, LoadState::Draining);
    let refusal = handle.generate(request(5, 1)).unwrap_err();
    assert_eq!(refusal, RuntimeError::Draining);
    for stream in streams {
        assert_eq!(done(stream.last().unwrap()).usage.generated, 50);
    }
    until(&handle, "stopped", |load| load.state == LoadState::Stopped);
    assert_eq!(handle.generate(request(5, 1)).unwrap_err(), RuntimeError::ShutDown);
}

#[test]
fn a_drain_ends_what_takes_too_long() {
    let options = Options { stream_capacity: 2, ..Options::default() };
    let actor = Actor::spawn(factory(), &options).unwrap();
    let mut unread = actor.handle().generate(request(5, 50)).unwrap();
    unread.next().unwrap();
    actor.drain(Duration::from_millis(50));
    assert_eq!(unread.last().unwrap(), Event::Error(RuntimeError::ShutDown));
}

#[test]
fn an_engine_that_is_broken_is_drained_at_once() {
    let error = EngineError::Device("no such device".to_owned());
    let actor = spawn(Box::new(move || Err(error.clone())));
    assert!(actor.handle().ready().is_err());
    actor.drain(Duration::from_secs(3600));
}

#[test]
fn messages_are_plain_data() {
    let command = Command::Generate(RequestId(7), request(3, 2));
    let text = serde_json::to_string(&command).unwrap();
    assert_eq!(serde_json::from_str::<Command>(&text).unwrap(), command);
    let actor = spawn(factory());
    for event in actor.handle().generate(request(3, 2)).unwrap() {
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event);
    }
}

/// A waker that lets its thread go on.
struct Unpark(std::thread::Thread);

impl std::task::Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_task_that_is_woken_reads_what_a_thread_that_waits_reads() {
    let options = Options { stream_capacity: 2, ..Options::default() };
    let actor = Actor::spawn(factory(), &options).unwrap();
    let waited: Vec<Event> = actor.handle().generate(request(10, 50)).unwrap().collect();
    let mut stream = actor.handle().generate(request(10, 50)).unwrap();
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut polled = Vec::new();
    loop {
        match stream.poll_next(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(20)),
            std::task::Poll::Ready(Some(event)) => polled.push(event),
            std::task::Poll::Ready(None) => break,
        }
    }
    assert_eq!(polled.len(), 51);
    assert_eq!(polled[..50], waited[..50]);
}
