//! Why a request was not answered.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tandem_engine::EngineError;

/// Why a request ended without an answer. Plain data, so that it crosses from an actor's thread or process.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum RuntimeError {
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine panicked. It is being rebuilt.
    #[error("the engine crashed: {0}. hint: it is restarted; send the request again")]
    Crashed(String),
    /// Too many requests are running or waiting.
    #[error("{limit} requests are running or waiting already. hint: try again when some have ended")]
    Busy {
        /// How many this actor takes.
        limit: usize,
        /// When the next of them is likely to end.
        retry_after: Duration,
    },
    /// The actor answers what it has and then ends.
    #[error("the engine is being shut down. hint: send the request to another server, or after the restart")]
    Draining,
    /// The actor has shut down.
    #[error("the engine has been shut down")]
    ShutDown,
    /// A stop string without a character would stop everything.
    #[error("a stop string is empty. hint: leave it out")]
    EmptyStop,
}

impl RuntimeError {
    /// When the same request may succeed; `None` if it never will here, however long one waits.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => Some(*retry_after),
            Self::Crashed(_) => Some(Duration::from_secs(1)),
            Self::Engine(_) | Self::Draining | Self::ShutDown | Self::EmptyStop => None,
        }
    }
}
