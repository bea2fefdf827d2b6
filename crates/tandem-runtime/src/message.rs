//! The data that crosses between an actor and everyone else. All of it serializes.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tandem_engine::{AdapterId, Capabilities, Memory, SampleSpec};

use crate::RuntimeError;

/// A request's name, unique within its actor's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// What an actor is told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Answer this. Events go to the stream that came with it.
    Generate(RequestId, Request),
    /// Nobody reads that request's events any more: free all it holds.
    Cancel(RequestId),
    /// Its reader has what it wants. It ends with `Done` and this reason, and its prefix is kept.
    Finish(RequestId, Reason),
    /// Its reader has made room for more events.
    Resume(RequestId),
    /// Say how you are.
    Status,
    /// Free the KV that is kept of ended requests.
    ClearPrefixes,
    /// Take no more requests, answer those there are and end the thread; end what is not answered after this time.
    Drain(Duration),
    /// End all requests and the thread.
    Shutdown,
}

/// What to generate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The prompt; at least one token.
    pub tokens: Vec<u32>,
    /// How to choose tokens. `generated_from` is set to the prompt's length by the actor.
    pub sample: SampleSpec,
    /// Most tokens to generate; `None` goes on until the context is full.
    pub max_tokens: Option<usize>,
    /// Tokens that end the answer. They are counted, but no [`Event::Token`] is sent for them.
    pub stop_tokens: Vec<u32>,
    /// Most tokens of prompt and answer together; `None` is the engine's context, which it cannot exceed.
    pub context: Option<usize>,
    /// The adapter to answer with.
    #[serde(default)]
    pub adapter: Option<AdapterId>,
    /// Who comes first where not all can: higher before lower, 0 is normal.
    #[serde(default)]
    pub priority: i8,
}

/// What a stream carries. The last event is `Done` or `Error`, and nothing follows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A generated token.
    Token(Token),
    /// The answer is complete.
    Done(Done),
    /// There will be no more of it.
    Error(RuntimeError),
}

/// A generated token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its natural log-probability under the model, if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens with theirs, likeliest first, if asked for.
    pub top: Vec<(u32, f32)>,
}

/// How an answer ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Why.
    pub reason: Reason,
    /// Tokens.
    pub usage: Usage,
    /// Seconds.
    pub timing: Timing,
    /// Who answered.
    pub route: Route,
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The model chose a stop token.
    Stop {
        /// Which.
        token: u32,
    },
    /// `max_tokens` were generated, or the context is full.
    Length,
    /// The text held a stop string.
    StopString {
        /// Which.
        text: String,
    },
    /// The reader asked for no more.
    Interrupted,
}

impl Reason {
    /// Its name (`stop`, `length`, `stop_string`, `interrupted`).
    pub fn name(&self) -> &'static str {
        match self {
            Reason::Stop { .. } => "stop",
            Reason::Length => "length",
            Reason::StopString { .. } => "stop_string",
            Reason::Interrupted => "interrupted",
        }
    }
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that were not computed again.
    pub cached: usize,
    /// Tokens generated, a stop token included.
    pub generated: usize,
}

/// Seconds of a request. `None` is what did not happen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// From the request until its first step could start.
    pub queue: Option<f64>,
    /// From then until the first token.
    pub prefill: Option<f64>,
    /// From the request until the first token: `queue + prefill`.
    pub ttft: Option<f64>,
    /// From the first token to the last: `generated - 1` steps.
    pub decode: Option<f64>,
}

impl Timing {
    /// Prompt tokens computed per second.
    pub fn prefill_rate(&self, usage: &Usage) -> Option<f64> {
        rate(usage.prompt - usage.cached, self.prefill)
    }

    /// Tokens per second after the first.
    pub fn decode_rate(&self, usage: &Usage) -> Option<f64> {
        rate(usage.generated.saturating_sub(1), self.decode)
    }
}

fn rate(tokens: usize, seconds: Option<f64>) -> Option<f64> {
    seconds.filter(|s| *s > 0.0 && tokens > 0).map(|s| tokens as f64 / s)
}

/// Which engine answered, and why that one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Its short name.
    pub engine: String,
    /// In words.
    pub reason: String,
}

/// How an actor is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Its engine.
    pub engine: EngineState,
    /// Requests in the batch.
    pub running: usize,
    /// Requests that wait to join it.
    pub waiting: usize,
    /// Times the engine was rebuilt.
    pub restarts: u64,
}

/// An actor's engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum EngineState {
    /// It answers.
    Ready {
        /// What it can do.
        capabilities: Capabilities,
        /// What it holds.
        memory: Memory,
    },
    /// It could not be built.
    Failed(RuntimeError),
}
