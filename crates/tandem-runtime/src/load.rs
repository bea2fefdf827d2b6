//! What is known of an actor without asking it.
//!
//! The worker posts how it is on a [`Board`] after every step. Whoever chooses among actors reads it there, also while
//! the worker is deep in a step or builds its engine.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tandem_engine::{Capabilities, Memory};

use crate::RuntimeError;

/// How loaded an actor is. Plain data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// What it can do now.
    pub state: LoadState,
    /// Requests in the batch.
    pub running: usize,
    /// Requests that wait to join it, those still in the mailbox included.
    pub waiting: usize,
    /// Times the engine was rebuilt.
    pub restarts: u64,
    /// What it last broke of, also after it was mended.
    pub last_error: Option<RuntimeError>,
    /// Times a request had to give up its memory and wait again, since the engine was built.
    pub preempted: u64,
    /// Tokens of ended requests whose KV is kept for prompts that begin alike.
    pub prefix_tokens: usize,
    /// Bytes that the engine holds; all 0 while there is none.
    pub memory: Memory,
}

/// What an actor can do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum LoadState {
    /// Its engine is being built. Requests wait for it.
    Loading,
    /// It answers.
    Ready(Capabilities),
    /// Its engine broke or could not be built. Requests are answered with the error until the next try.
    Failed {
        /// Why.
        error: RuntimeError,
        /// How long until it is built again.
        retry_in: Duration,
    },
    /// It answers what it has taken and refuses the rest.
    Draining,
    /// Its thread has ended, or is about to.
    Stopped,
}

/// Where a worker posts how it is.
#[derive(Debug, Clone)]
pub(crate) struct Board(Arc<Mutex<Posted>>);

#[derive(Debug)]
struct Posted {
    engine: Posting,
    draining: bool,
    restarts: u64,
    last_error: Option<RuntimeError>,
    work: Work,
    turnover: Turnover,
}

/// What the engine does.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Work {
    pub running: usize,
    /// Requests that have ended.
    pub completed: u64,
    pub preempted: u64,
    pub prefix_tokens: usize,
    pub memory: Memory,
}

/// How often requests end while there are some.
#[derive(Debug, Default)]
struct Turnover {
    /// Seconds between two ends, smoothed.
    interval: f64,
    /// The last end, or the beginning of the work.
    since: Option<Instant>,
}

impl Turnover {
    fn observe(&mut self, before: &Work, now: &Work) {
        let ended = now.completed.saturating_sub(before.completed);
        let time = Instant::now();
        if ended > 0 {
            let seconds = self.since.map_or(0.0, |since| (time - since).as_secs_f64());
            self.interval += (seconds / ended as f64 - self.interval) / 4.0;
        }
        if ended > 0 || self.since.is_none() {
            self.since = Some(time);
        }
        if now.running == 0 {
            self.since = None;
        }
    }

    /// In whole seconds, as HTTP counts them.
    fn next_end(&self) -> Duration {
        Duration::from_secs((self.interval.ceil() as u64).clamp(1, 60))
    }
}

/// The engine's part.
#[derive(Debug)]
pub(crate) enum Posting {
    Loading,
    Ready(Capabilities),
    Failed { error: RuntimeError, until: Instant },
    Stopped,
}

impl Board {
    pub fn new() -> Self {
        let posted = Posted {
            engine: Posting::Loading,
            draining: false,
            restarts: 0,
            last_error: None,
            work: Work::default(),
            turnover: Turnover::default(),
        };
        Self(Arc::new(Mutex::new(posted)))
    }

    fn lock(&self) -> MutexGuard<'_, Posted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine is another, or none.
    pub fn post_engine(&self, engine: Posting, restarts: u64) {
        let mut posted = self.lock();
        (posted.engine, posted.restarts, posted.work) = (engine, restarts, Work::default());
    }

    /// What the engine does.
    pub fn post_work(&self, work: Work) {
        let mut posted = self.lock();
        let before = std::mem::replace(&mut posted.work, work);
        posted.turnover.observe(&before, &work);
    }

    /// When the next request is likely to end.
    pub fn next_end(&self) -> Duration {
        self.lock().turnover.next_end()
    }

    /// The engine broke.
    pub fn post_error(&self, error: RuntimeError) {
        self.lock().last_error = Some(error);
    }

    pub fn post_draining(&self) {
        self.lock().draining = true;
    }

    /// Why no request is taken now, if none is.
    pub fn refusal(&self) -> Option<RuntimeError> {
        let posted = self.lock();
        match posted.engine {
            Posting::Stopped => Some(RuntimeError::ShutDown),
            _ if posted.draining => Some(RuntimeError::Draining),
            _ => None,
        }
    }

    /// The load of an actor that has `taken` requests.
    pub fn load(&self, taken: usize) -> Load {
        let posted = self.lock();
        let state = match &posted.engine {
            Posting::Stopped => LoadState::Stopped,
            _ if posted.draining => LoadState::Draining,
            Posting::Loading => LoadState::Loading,
            Posting::Ready(capabilities) => LoadState::Ready(capabilities.clone()),
            Posting::Failed { error, until } => LoadState::Failed {
                error: error.clone(),
                retry_in: until.saturating_duration_since(Instant::now()),
            },
        };
        let Posted { restarts, work: Work { running, preempted, prefix_tokens, memory, .. }, .. } = *posted;
        // A request gives its place back before the step that ended it is posted.
        let running = running.min(taken);
        let waiting = taken - running;
        Load {
            state,
            running,
            waiting,
            restarts,
            last_error: posted.last_error.clone(),
            preempted,
            prefix_tokens,
            memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_is_worth_trying_again_when_the_next_request_is_likely_to_end() {
        let mut turnover = Turnover::default();
        assert_eq!(turnover.next_end(), Duration::from_secs(1), "nothing is known yet");
        let work = |running, completed| Work { running, completed, ..Work::default() };
        // Two ends every 50 seconds; what lies idle between does not count.
        for i in 0..40 {
            turnover.since = Some(Instant::now() - Duration::from_secs(50));
            turnover.observe(&work(4, 2 * i), &work(2, 2 * i + 2));
        }
        assert_eq!(turnover.next_end(), Duration::from_secs(25));
        turnover.observe(&work(2, 80), &work(0, 80));
        assert!(turnover.since.is_none());
    }
}
