//! One thread, one engine.
//!
//! The mailbox is bounded without ever making a cancel wait: a request takes a place when it is made and gives it back
//! when it ends, and each place can have only a few messages under way.
//!
//! A panic in the engine ends the requests it had, not the actor. The engine is rebuilt at once. If it cannot be built,
//! or fails again before it has answered anything, requests are answered with its error for a pause that doubles each
//! time, and the first one after the pause tries again.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tandem_engine::{Capabilities, Engine, EngineFactory};

use crate::channel::{Places, Sender, channel};
use crate::message::{Command, EngineState, Request, RequestId, Status};
use crate::scheduler::Scheduler;
use crate::{Event, RuntimeError, TokenStream};

/// How an actor behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Requests that may run or wait at once.
    pub max_requests: usize,
    /// Events a stream holds before its sequence pauses.
    pub stream_capacity: usize,
    /// Pause after a failure that is not mended at once; it doubles with each in a row, seven times at most.
    pub pause: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { max_requests: 256, stream_capacity: 64, pause: Duration::from_millis(500) }
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
        let handle = ActorHandle {
            mailbox,
            places: Places::new(options.max_requests),
            next_id: Arc::default(),
            stream_capacity: options.stream_capacity,
        };
        let worker = Worker { messages, pause: options.pause, failures: 0, restarts: 0, held_over: None };
        let thread = std::thread::Builder::new()
            .name("tandem-engine".to_owned())
            .spawn(move || worker.run(factory))?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// A way to talk to it.
    pub fn handle(&self) -> ActorHandle {
        self.handle.clone()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.handle.shutdown();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine's thread panicked outside the engine");
        }
    }
}

impl ActorHandle {
    /// Asks for an answer. Does not wait.
    ///
    /// # Errors
    /// [`RuntimeError::Busy`], [`RuntimeError::ShutDown`]. Everything else comes as the stream's [`Event::Error`].
    pub fn generate(&self, request: Request) -> Result<TokenStream, RuntimeError> {
        let place = self.places.take().ok_or(RuntimeError::Busy { limit: self.places.limit() })?;
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

    /// Ends all requests and the thread. Does not wait.
    pub fn shutdown(&self) {
        let _ = self.mailbox.send(Envelope::control(Command::Shutdown));
    }
}

/// The actor's thread.
struct Worker {
    messages: Receiver<Envelope>,
    pause: Duration,
    /// In a row, without an answered request between them.
    failures: u32,
    restarts: u64,
    /// The request that ended a pause.
    held_over: Option<Envelope>,
}

/// Whether the thread goes on.
#[derive(PartialEq, Eq)]
enum Next {
    Continue,
    Stop,
}

impl Worker {
    fn run(mut self, mut factory: Box<dyn EngineFactory>) {
        loop {
            let built = catch_unwind(AssertUnwindSafe(|| factory.build()));
            let (was_built, error) = match built {
                Ok(Ok(engine)) => match self.serve(engine) {
                    Ok(()) => return,
                    Err(error) => (true, error),
                },
                Ok(Err(error)) => (false, self.failed(error.into())),
                Err(panic) => (false, self.failed(crashed(panic.as_ref()))),
            };
            let at_once = was_built && self.failures == 1;
            if !at_once && self.wait_out(&error) == Next::Stop {
                return;
            }
            self.restarts += 1;
        }
    }

    /// Counts a failure that no answer preceded.
    fn failed(&mut self, error: RuntimeError) -> RuntimeError {
        tracing::error!(%error, "engine");
        self.failures += 1;
        error
    }

    /// Answers requests until shut down (`Ok`) or until the engine breaks.
    fn serve(&mut self, engine: Box<dyn Engine>) -> Result<(), RuntimeError> {
        let mut scheduler = Scheduler::new(engine);
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
        if let Some(envelope) = self.held_over.take() {
            self.deliver(envelope, scheduler);
        }
        loop {
            let message = if busy {
                self.messages.try_recv()
            } else {
                self.messages.recv().map_err(|_| TryRecvError::Disconnected)
            };
            match message {
                Ok(envelope) => {
                    busy = true;
                    if self.deliver(envelope, scheduler) == Next::Stop {
                        return Ok(());
                    }
                }
                Err(TryRecvError::Empty) => busy = scheduler.step()?,
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }

    fn deliver(&self, envelope: Envelope, scheduler: &mut Scheduler) -> Next {
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
            (Command::Shutdown, _) => return Next::Stop,
            // Resume has done its work by waking the thread. The others cannot come without their reply.
            (Command::Resume(_) | Command::Generate(..) | Command::Status, _) => {}
        }
        Next::Continue
    }

    /// Answers requests with `error` until the pause is over.
    fn wait_out(&mut self, error: &RuntimeError) -> Next {
        let doublings = self.failures.saturating_sub(2).min(7);
        let over = Instant::now() + self.pause.saturating_mul(1 << doublings);
        while let Ok(envelope) = self.messages.recv() {
            match (&envelope.command, envelope.reply) {
                (Command::Generate(..), reply) if Instant::now() >= over => {
                    self.held_over = Some(Envelope { reply, ..envelope });
                    return Next::Continue;
                }
                (Command::Generate(..), Reply::Events(sender)) => sender.end(Event::Error(error.clone())),
                (Command::Status, Reply::Status(reply)) => {
                    let engine = EngineState::Failed(error.clone());
                    let _ = reply.send(Status { engine, running: 0, waiting: 0, restarts: self.restarts });
                }
                (Command::Shutdown, _) => return Next::Stop,
                _ => {}
            }
        }
        Next::Stop
    }
}

fn crashed(panic: &(dyn Any + Send)) -> RuntimeError {
    let message = panic.downcast_ref::<&str>().copied().map(str::to_owned);
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    RuntimeError::Crashed(message.unwrap_or_else(|| "a panic without a message".to_owned()))
}
