//! One thread, one engine.
//!
//! The mailbox is bounded without ever making a cancel wait: a request takes a place when it is made and gives it back
//! when it ends, and each place can have only a few messages under way.
//!
//! A panic in the engine ends the requests it had, not the actor. The engine is rebuilt at once. If it cannot be built,
//! or fails again before it has answered anything, requests are answered with its error for a pause that doubles each
//! time, and then it is built again.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tandem_engine::{Capabilities, Engine, EngineFactory};

use crate::channel::{Places, Sender, channel};
use crate::load::{Board, Load, Posting};
use crate::message::{Command, EngineState, Request, RequestId, Status};
use crate::scheduler::Scheduler;
use crate::{Event, RuntimeError, TokenStream};

/// More than anyone waits, and little enough to be added to a time.
const LONGEST_DRAIN: Duration = Duration::from_secs(365 * 24 * 3600);

/// How an actor behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Requests that may run or wait at once.
    pub max_requests: usize,
    /// Events a stream holds before its sequence pauses.
    pub stream_capacity: usize,
    /// Tokens of ended requests whose KV is kept for prompts that begin alike. It yields to requests that need its memory;
    /// 0 keeps nothing.
    pub prefix_tokens: usize,
    /// Pause after a failure that is not mended at once; it doubles with each in a row, seven times at most.
    pub pause: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_requests: 256,
            stream_capacity: 64,
            prefix_tokens: 65_536,
            pause: Duration::from_millis(500),
        }
    }
}

/// Owns an engine's thread. Dropping it shuts the engine down and waits for that.
#[derive(Debug)]
pub struct Actor {
    handle: ActorHandle,
    thread: Option<JoinHandle<()>>,
}

/// Talks to an actor. Clones are equal.
#[derive(Debug, Clone)]
pub struct ActorHandle {
    mailbox: SyncSender<Envelope>,
    places: Places,
    board: Board,
    next_id: Arc<AtomicU64>,
    stream_capacity: usize,
}

/// A command and where its answer goes.
#[derive(Debug)]
pub(crate) struct Envelope {
    command: Command,
    reply: Reply,
    sent: Instant,
}

#[derive(Debug)]
enum Reply {
    Nowhere,
    Events(Sender),
    Status(SyncSender<Status>),
}

impl Envelope {
    fn new(command: Command, reply: Reply) -> Self {
        Self { command, reply, sent: Instant::now() }
    }

    pub(crate) fn control(command: Command) -> Self {
        Self::new(command, Reply::Nowhere)
    }
}

impl Actor {
    /// Starts the thread, which builds its engine. Requests may be made at once; they wait until it is ready.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn spawn(factory: Box<dyn EngineFactory>, options: &Options) -> std::io::Result<Self> {
        let (mailbox, messages) = sync_channel(4 * options.max_requests + 64);
        let board = Board::new();
        let handle = ActorHandle {
            mailbox,
            places: Places::new(options.max_requests),
            board: board.clone(),
            next_id: Arc::default(),
            stream_capacity: options.stream_capacity,
        };
        let worker = Worker {
            messages,
            board,
            prefix_tokens: options.prefix_tokens,
            pause: options.pause,
            failures: 0,
            restarts: 0,
            drained_by: None,
        };
        let thread = std::thread::Builder::new()
            .name("tandem-engine".to_owned())
            .spawn(move || worker.run(factory))?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// A way to talk to it.
    pub fn handle(&self) -> ActorHandle {
        self.handle.clone()
    }

    /// As [`ActorHandle::drain`], and waits until the thread has ended.
    pub fn drain(mut self, timeout: Duration) {
        self.handle.drain(timeout);
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine's thread panicked outside the engine");
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.handle.shutdown();
        self.join();
    }
}

impl ActorHandle {
    /// Asks for an answer. Does not wait.
    ///
    /// # Errors
    /// [`RuntimeError::Busy`], [`RuntimeError::Draining`], [`RuntimeError::ShutDown`]. Everything else comes as the
    /// stream's [`Event::Error`].
    pub fn generate(&self, request: Request) -> Result<TokenStream, RuntimeError> {
        if let Some(refusal) = self.board.refusal() {
            return Err(refusal);
        }
        let busy = || RuntimeError::Busy { limit: self.places.limit(), retry_after: self.board.next_end() };
        let place = self.places.take().ok_or_else(busy)?;
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = channel(self.stream_capacity, place);
        let envelope = Envelope::new(Command::Generate(id, request), Reply::Events(sender));
        self.mailbox.send(envelope).map_err(|_| RuntimeError::ShutDown)?;
        Ok(TokenStream::new(id, events, self.mailbox.clone()))
    }

    /// How the actor is, between two steps. Waits while the engine is being built.
    ///
    /// # Errors
    /// [`RuntimeError::ShutDown`].
    pub fn status(&self) -> Result<Status, RuntimeError> {
        let (reply, status) = sync_channel(1);
        let envelope = Envelope::new(Command::Status, Reply::Status(reply));
        self.mailbox.send(envelope).map_err(|_| RuntimeError::ShutDown)?;
        status.recv().map_err(|_| RuntimeError::ShutDown)
    }

    /// Waits until the engine is built and says what it can do.
    ///
    /// # Errors
    /// Why it could not be built.
    pub fn ready(&self) -> Result<Capabilities, RuntimeError> {
        match self.status()?.engine {
            EngineState::Ready { capabilities, .. } => Ok(capabilities),
            EngineState::Failed(error) => Err(error),
        }
    }

    /// How the actor was after its last step. Never waits.
    pub fn load(&self) -> Load {
        self.board.load(self.places.taken())
    }

    /// Frees the KV that is kept of ended requests. Does not wait.
    pub fn clear_prefixes(&self) {
        let _ = self.mailbox.send(Envelope::control(Command::ClearPrefixes));
    }

    /// Takes no more requests, answers those it has and then ends the thread. What is not answered after `timeout` ends
    /// with [`RuntimeError::ShutDown`]. Does not wait.
    pub fn drain(&self, timeout: Duration) {
        self.board.post_draining();
        let _ = self.mailbox.send(Envelope::control(Command::Drain(timeout)));
    }

    /// Ends all requests and the thread. Does not wait.
    pub fn shutdown(&self) {
        let _ = self.mailbox.send(Envelope::control(Command::Shutdown));
    }
}

/// The actor's thread.
struct Worker {
    messages: Receiver<Envelope>,
    board: Board,
    prefix_tokens: usize,
    pause: Duration,
    /// In a row, without an answered request between them.
    failures: u32,
    restarts: u64,
    /// Set by `Drain`: when what is not answered ends.
    drained_by: Option<Instant>,
}

/// Whether the thread goes on.
#[derive(PartialEq, Eq)]
enum Next {
    Continue,
    Stop,
}

impl Worker {
    fn run(mut self, mut factory: Box<dyn EngineFactory>) {
        self.build_and_serve(factory.as_mut());
        self.board.post_engine(Posting::Stopped, self.restarts);
    }

    /// Returns when it is told to stop.
    fn build_and_serve(&mut self, factory: &mut dyn EngineFactory) {
        loop {
            self.board.post_engine(Posting::Loading, self.restarts);
            let built = catch_unwind(AssertUnwindSafe(|| factory.build()));
            let (was_built, error) = match built {
                Ok(Ok(engine)) => match self.serve(engine) {
                    Ok(()) => return,
                    Err(error) => (true, error),
                },
                Ok(Err(error)) => (false, self.failed(error.into())),
                Err(panic) => (false, self.failed(crashed(panic.as_ref()))),
            };
            let at_once = was_built && self.failures == 1 && self.drained_by.is_none();
            if !at_once && self.wait_out(&error) == Next::Stop {
                return;
            }
            self.restarts += 1;
        }
    }

    /// Counts a failure that no answer preceded.
    fn failed(&mut self, error: RuntimeError) -> RuntimeError {
        tracing::error!(%error, "engine");
        self.board.post_error(error.clone());
        self.failures += 1;
        error
    }

    /// Answers requests until shut down (`Ok`) or until the engine breaks.
    fn serve(&mut self, engine: Box<dyn Engine>) -> Result<(), RuntimeError> {
        self.board.post_engine(Posting::Ready(engine.capabilities().clone()), self.restarts);
        let mut scheduler = Scheduler::new(engine, self.prefix_tokens);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.drive(&mut scheduler)));
        let outcome = outcome.unwrap_or_else(|panic| Err(crashed(panic.as_ref())));
        scheduler.fail_all(outcome.as_ref().err().unwrap_or(&RuntimeError::ShutDown));
        if scheduler.completed() > 0 {
            self.failures = 0;
        }
        // What is left of a broken engine may panic again when it is dropped.
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(scheduler)));
        if dropped.is_err() {
            tracing::error!("the engine panicked while it was dropped");
        }
        outcome.map_err(|error| self.failed(error))
    }

    fn drive(&mut self, scheduler: &mut Scheduler) -> Result<(), RuntimeError> {
        let mut busy = true;
        loop {
            if let Some(by) = self.drained_by
                && (scheduler.is_idle() || Instant::now() >= by)
            {
                return Ok(());
            }
            match self.next_message(busy) {
                Ok(envelope) => {
                    busy = true;
                    if self.deliver(envelope, scheduler) == Next::Stop {
                        return Ok(());
                    }
                }
                Err(TryRecvError::Empty) => {
                    busy = scheduler.step()?;
                    self.board.post_work(scheduler.work());
                }
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }

    /// What there is now, if there is work to do meanwhile; else waits.
    fn next_message(&self, busy: bool) -> Result<Envelope, TryRecvError> {
        match self.drained_by {
            _ if busy => self.messages.try_recv(),
            None => self.messages.recv().map_err(|_| TryRecvError::Disconnected),
            Some(by) => {
                let left = by.saturating_duration_since(Instant::now());
                self.messages.recv_timeout(left).map_err(|error| match error {
                    RecvTimeoutError::Timeout => TryRecvError::Empty,
                    RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
                })
            }
        }
    }

    fn deliver(&mut self, envelope: Envelope, scheduler: &mut Scheduler) -> Next {
        match (envelope.command, envelope.reply) {
            (Command::Generate(id, request), Reply::Events(sender)) => {
                scheduler.accept(id, request, sender, envelope.sent);
            }
            (Command::Cancel(id), _) => scheduler.cancel(id),
            (Command::Finish(id, reason), _) => scheduler.finish(id, reason),
            (Command::Status, Reply::Status(reply)) => {
                let engine = EngineState::Ready {
                    capabilities: scheduler.engine().capabilities().clone(),
                    memory: scheduler.engine().memory(),
                };
                let (running, waiting) = (scheduler.running(), scheduler.waiting());
                let _ = reply.send(Status { engine, running, waiting, restarts: self.restarts });
            }
            (Command::ClearPrefixes, _) => scheduler.clear_prefixes(),
            (Command::Drain(timeout), _) => {
                self.drained_by = Some(envelope.sent + timeout.min(LONGEST_DRAIN));
            }
            (Command::Shutdown, _) => return Next::Stop,
            // Resume has done its work by waking the thread. The others cannot come without their reply.
            (Command::Resume(_) | Command::Generate(..) | Command::Status, _) => {}
        }
        Next::Continue
    }

    /// Answers requests with `error` until the pause is over.
    fn wait_out(&mut self, error: &RuntimeError) -> Next {
        if self.drained_by.is_some() {
            return Next::Stop;
        }
        let doublings = self.failures.saturating_sub(2).min(7);
        let until = Instant::now() + self.pause.saturating_mul(1 << doublings);
        self.board.post_engine(Posting::Failed { error: error.clone(), until }, self.restarts);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let envelope = match self.messages.recv_timeout(left) {
                Ok(envelope) => envelope,
                Err(RecvTimeoutError::Timeout) => return Next::Continue,
                Err(RecvTimeoutError::Disconnected) => return Next::Stop,
            };
            match (&envelope.command, envelope.reply) {
                (Command::Generate(..), Reply::Events(sender)) => sender.end(Event::Error(error.clone())),
                (Command::Status, Reply::Status(reply)) => {
                    let engine = EngineState::Failed(error.clone());
                    let _ = reply.send(Status { engine, running: 0, waiting: 0, restarts: self.restarts });
                }
                (Command::Drain(_) | Command::Shutdown, _) => return Next::Stop,
                _ => {}
            }
        }
    }
}

fn crashed(panic: &(dyn Any + Send)) -> RuntimeError {
    let message = panic.downcast_ref::<&str>().copied().map(str::to_owned);
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    RuntimeError::Crashed(message.unwrap_or_else(|| "a panic without a message".to_owned()))
}
