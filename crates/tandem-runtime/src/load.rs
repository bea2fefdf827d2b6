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
    running: usize,
    restarts: u64,
    last_error: Option<RuntimeError>,
    memory: Memory,
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
            running: 0,
            restarts: 0,
            last_error: None,
            memory: Memory::default(),
        };
        Self(Arc::new(Mutex::new(posted)))
    }

    fn lock(&self) -> MutexGuard<'_, Posted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine is another, or none.
    pub fn post_engine(&self, engine: Posting, restarts: u64) {
        let mut posted = self.lock();
        (posted.engine, posted.restarts) = (engine, restarts);
        (posted.running, posted.memory) = (0, Memory::default());
    }

    /// What the engine does.
    pub fn post_work(&self, running: usize, memory: Memory) {
        let mut posted = self.lock();
        (posted.running, posted.memory) = (running, memory);
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
        let Posted { running, restarts, memory, .. } = *posted;
        let waiting = taken.saturating_sub(running);
        Load { state, running, waiting, restarts, last_error: posted.last_error.clone(), memory }
    }
}
