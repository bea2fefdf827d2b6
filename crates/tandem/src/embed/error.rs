use tandem_engine::EngineError;
use tandem_model::ModelError;
use tandem_runtime::{ReadyError, RouteError, RuntimeError};

use super::engines::ENGINES;

/// What may go wrong. Each says what happened and ends with a hint where there is something to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model's files, its tokenizer or its chat template.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A context longer than the model's.
    #[error(
        "a context of {asked} tokens is more than the {handles} this model handles. hint: --context 0 takes all"
    )]
    Context {
        /// What was asked for.
        asked: usize,
        /// What there is.
        handles: usize,
    },
    /// The model has no chat template.
    #[error("{0} has no chat template. hint: complete a text instead")]
    NoTemplate(
        /// Where it was opened from.
        String,
    ),
    /// No such engine.
    #[error("there is no engine `{engine}`, only {}", ENGINES.join(", "))]
    NoEngine {
        /// What was asked for.
        engine: String,
    },
    /// An engine that was asked for by name is not to be had.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine could not be built.
    #[error(transparent)]
    Ready(Box<ReadyError>),
    /// No engine serves the request.
    #[error(transparent)]
    Route(Box<RouteError>),
    /// The request failed.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The system.
    #[error("the system gave no thread: {0}")]
    Thread(#[from] std::io::Error),
}

impl From<ReadyError> for Error {
    fn from(error: ReadyError) -> Self {
        Error::Ready(Box::new(error))
    }
}

impl From<RouteError> for Error {
    fn from(error: RouteError) -> Self {
        Error::Route(Box::new(error))
    }
}
