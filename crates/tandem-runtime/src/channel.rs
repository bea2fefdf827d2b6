//! A bounded queue of events between a scheduler and one reader.
//!
//! The sender never waits: it asks [`Sender::has_room`] before it lets the sequence grow, and asking on a full queue
//! leaves a mark, so that the reader knows to send `Resume` once it has taken some. Question and mark are one critical
//! section, so no wake-up is lost. The one last event always fits.
//!
//! The reader is a thread that waits or an asynchronous task that is woken.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::message::Event;

#[derive(Debug)]
struct State {
    events: VecDeque<Event>,
    paused: bool,
    sender_gone: bool,
    /// The task that found nothing when it last looked.
    reader: Option<Waker>,
}

impl State {
    /// What there is now; `None` when the sender is gone and nothing is left.
    fn take(&mut self, capacity: usize) -> Poll<Option<Taken>> {
        match self.events.pop_front() {
            Some(event) => {
                let resume = self.paused && self.events.len() <= capacity / 2;
                self.paused &= !resume;
                Poll::Ready(Some(Taken { event, resume }))
            }
            None if self.sender_gone => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    arrived: Condvar,
    capacity: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and tells the reader.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let reader = {
            let mut state = self.lock();
            change(&mut state);
            state.reader.take()
        };
        self.arrived.notify_one();
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

/// The scheduler's end. It holds the request's place.
#[derive(Debug)]
pub(crate) struct Sender {
    shared: Arc<Shared>,
    place: Option<Place>,
}

/// The reader's end.
#[derive(Debug)]
pub(crate) struct Receiver(Arc<Shared>);

/// What a reader takes.
pub(crate) struct Taken {
    pub event: Event,
    /// The sender waits for room and there is some now.
    pub resume: bool,
}

/// A queue that holds `capacity` events (at least one) beside the last.
pub(crate) fn channel(capacity: usize, place: Place) -> (Sender, Receiver) {
    let state = State { events: VecDeque::new(), paused: false, sender_gone: false, reader: None };
    let shared =
        Arc::new(Shared { state: Mutex::new(state), arrived: Condvar::new(), capacity: capacity.max(1) });
    (Sender { shared: Arc::clone(&shared), place: Some(place) }, Receiver(shared))
}

impl Sender {
    /// Whether so many more events fit. If not, the reader will say when.
    pub fn has_room(&self, events: usize) -> bool {
        let mut state = self.shared.lock();
        state.paused = state.events.len() + events > self.shared.capacity;
        !state.paused
    }

    pub fn send(&self, event: Event) {
        self.shared.change(|state| state.events.push_back(event));
    }

    /// Sends the last event. The place is free before its reader knows.
    pub fn end(mut self, event: Event) {
        self.place = None;
        self.send(event);
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.shared.change(|state| state.sender_gone = true);
    }
}

impl Receiver {
    /// Waits for an event; `None` when the sender is gone and nothing is left.
    pub fn take(&self) -> Option<Taken> {
        let mut state = self.0.lock();
        loop {
            if let Poll::Ready(taken) = state.take(self.0.capacity) {
                return taken;
            }
            state = self.0.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// As [`Receiver::take`], but does not wait.
    #[cfg(test)]
    pub fn try_take(&self) -> Option<Option<Taken>> {
        match self.0.lock().take(self.0.capacity) {
            Poll::Ready(taken) => Some(taken),
            Poll::Pending => None,
        }
    }

    /// As [`Receiver::take`], but wakes the task instead of waiting.
    pub fn poll_take(&self, context: &mut Context<'_>) -> Poll<Option<Taken>> {
        let mut state = self.0.lock();
        let taken = state.take(self.0.capacity);
        state.reader = taken.is_pending().then(|| context.waker().clone());
        taken
    }
}

/// How many requests there may be at once.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    taken: Arc<AtomicUsize>,
    limit: usize,
}

/// One of them, free again when dropped.
#[derive(Debug)]
pub(crate) struct Place(Arc<AtomicUsize>);

impl Places {
    pub fn new(limit: usize) -> Self {
        Self { taken: Arc::default(), limit }
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Acquire)
    }

    pub fn take(&self) -> Option<Place> {
        let free = |taken| (taken < self.limit).then_some(taken + 1);
        self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, free).ok()?;
        Some(Place(Arc::clone(&self.taken)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
