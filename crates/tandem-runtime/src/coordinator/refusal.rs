//! Why an engine, or all of a model's, cannot serve a request.

use std::fmt;
use std::time::Duration;

use tandem_engine::EngineError;

use crate::RuntimeError;

/// Why one engine cannot serve a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Refusal {
    /// It is being built.
    Loading,
    /// It broke, or could not be built.
    Failed {
        /// Why.
        error: RuntimeError,
        /// How long until it is built again.
        retry_in: Duration,
    },
    /// It takes no more requests.
    Ending(RuntimeError),
    /// It has as many requests as it takes.
    Busy(RuntimeError),
    /// It takes fewer answers at once than the request wants.
    TooMany {
        /// Answers that the request wants.
        wanted: usize,
        /// Requests that the engine takes.
        limit: usize,
    },
    /// It never will: too long, or not enough memory.
    Unfit(EngineError),
}

impl Refusal {
    /// One word for counters and programs.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Failed { .. } => "failed",
            Self::Ending(_) => "draining",
            Self::Busy(_) => "busy",
            Self::TooMany { .. } => "too_many",
            Self::Unfit(_) => "unfit",
        }
    }

    /// When the same request may succeed; `None` if it never will.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Loading => Some(Duration::from_secs(1)),
            Self::Failed { retry_in, .. } => Some(*retry_in),
            Self::Busy(error) => error.retry_after(),
            Self::Ending(_) | Self::TooMany { .. } | Self::Unfit(_) => None,
        }
    }

    /// The most hopeful first, as that decides what a client is told to do.
    fn rank(&self) -> u8 {
        match self {
            Self::Busy(_) => 0,
            Self::Loading => 1,
            Self::Failed { .. } => 2,
            Self::Ending(_) => 3,
            Self::TooMany { .. } => 4,
            Self::Unfit(_) => 5,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loading => write!(f, "it is loading. hint: try again soon"),
            Self::Failed { error, retry_in } => {
                write!(f, "it has failed and is started again in {:.1} s: {error}", retry_in.as_secs_f64())
            }
            Self::Ending(error) | Self::Busy(error) => error.fmt(f),
            Self::TooMany { wanted, limit } => {
                write!(
                    f,
                    "{wanted} answers were asked for, and it takes {limit} requests in all. hint: ask for fewer"
                )
            }
            Self::Unfit(error) => error.fmt(f),
        }
    }
}

/// Why a request got no route.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RouteError {
    /// No such model in the registry.
    #[error("there is no model `{model}` here")]
    NoModel {
        /// What was asked for.
        model: String,
    },
    /// The request names an engine that the model does not have.
    #[error(
        "there is no engine `{engine}` here, only {}. hint: leave it out to let Tandem choose",
        quoted(known)
    )]
    NoEngine {
        /// What was asked for.
        engine: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The named engine cannot serve it.
    #[error("the engine `{engine}` cannot serve this: {refusal}")]
    Asked {
        /// Which.
        engine: String,
        /// Why.
        refusal: Refusal,
    },
    /// None can.
    #[error("{}", none(.0))]
    Nobody(
        /// Each engine with its reason.
        Vec<(String, Refusal)>,
    ),
}

impl RouteError {
    /// The refusal that leaves the most hope.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::NoModel { .. } | Self::NoEngine { .. } => None,
            Self::Asked { refusal, .. } => Some(refusal),
            Self::Nobody(refusals) => refusals.iter().map(|(_, refusal)| refusal).min_by_key(|r| r.rank()),
        }
    }
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// The only engine's reason as it is; several by name.
fn none(refusals: &[(String, Refusal)]) -> String {
    match refusals {
        [(_, only @ (Refusal::Busy(_) | Refusal::Ending(_) | Refusal::Unfit(_)))] => only.to_string(),
        [(engine, only)] => format!("the engine `{engine}` cannot serve this: {only}"),
        _ => {
            let each: Vec<_> =
                refusals.iter().map(|(engine, refusal)| format!("{engine}: {refusal}")).collect();
            format!("no engine can serve this; {}", each.join("; "))
        }
    }
}
