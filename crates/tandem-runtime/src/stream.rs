//! A request's answer as its reader sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::task::{Context, Poll, ready};

use crate::actor::Envelope;
use crate::channel::Receiver;
use crate::message::{Command, Done, Event, Reason, RequestId, Route};
use crate::{RuntimeError, channel};

/// The events of one request, in order; `next` waits, [`TokenStream::poll_next`] does not. The last is [`Event::Done`] or [`Event::Error`].
///
/// Dropping it before that cancels the request: its KV is freed before the engine's next step.
#[derive(Debug)]
pub struct TokenStream {
    events: Receiver,
    control: StreamControl,
    /// Why this engine, if whoever chose it has said.
    route: Option<Route>,
    ended: bool,
}

/// Ends a stream from elsewhere (a signal handler, a wrapper that has seen enough).
#[derive(Debug, Clone)]
pub struct StreamControl {
    id: RequestId,
    mailbox: SyncSender<Envelope>,
    finished: Arc<AtomicBool>,
}

impl TokenStream {
    pub(crate) fn new(id: RequestId, events: Receiver, mailbox: SyncSender<Envelope>) -> Self {
        let control = StreamControl { id, mailbox, finished: Arc::default() };
        Self { events, control, route: None, ended: false }
    }

    /// The same stream, whose `Done` carries this route.
    pub(crate) fn routed(mut self, route: Route) -> Self {
        self.route = Some(route);
        self
    }

    /// The request.
    pub fn id(&self) -> RequestId {
        self.control.id
    }

    /// Something to end it with.
    pub fn control(&self) -> StreamControl {
        self.control.clone()
    }
}

impl StreamControl {
    /// Asks for the end: after at most one more step the stream gives `Done` with this reason. Only the first call
    /// counts, and none does after the end.
    pub fn finish(&self, reason: Reason) {
        if !self.finished.swap(true, Ordering::Relaxed) {
            self.send(Command::Finish(self.id, reason));
        }
    }

    /// An actor that is gone has nothing left to be told.
    fn send(&self, command: Command) {
        let _ = self.mailbox.send(Envelope::control(command));
    }
}

impl Iterator for TokenStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let taken = self.events.take();
        Some(self.read(taken))
    }
}

impl TokenStream {
    /// The next event for an asynchronous task, which is woken when there is one; `None` after the last.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let taken = ready!(self.events.poll_take(context));
        Poll::Ready(Some(self.read(taken)))
    }

    fn read(&mut self, taken: Option<channel::Taken>) -> Event {
        let event = match taken {
            Some(channel::Taken { event, resume }) => {
                if resume {
                    self.control.send(Command::Resume(self.control.id));
                }
                event
            }
            None => Event::Error(RuntimeError::ShutDown),
        };
        self.ended = !matches!(event, Event::Token(_));
        match (event, self.route.take()) {
            (Event::Done(done), Some(route)) => Event::Done(Done { route, ..done }),
            (event, route) => {
                self.route = route;
                event
            }
        }
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if !self.ended {
            self.control.send(Command::Cancel(self.control.id));
        }
    }
}
