//! What stands between an engine and the people who wait for its tokens.
//!
//! An [`Actor`] is one thread that owns one engine. Nothing but messages crosses to it: a [`Command`] is plain
//! serializable data, and where its answers go travels beside it, so that an actor can live on a thread today and in a
//! worker process tomorrow. Inside, a scheduler turns the requests into steps over a ragged batch: one row for each
//! sequence that decodes, and what is left of the step's tokens for prompts. A prompt's longest prefix that is already
//! computed is forked, not computed again.
//!
//! A request is answered by a [`TokenStream`]. It is bounded: a slow reader pauses its own sequence and nobody else's.
//! Dropping it is the cancel. [`TextStream`] wraps it on the reader's side and turns token ids into text, holding back
//! what may be half a character or the start of a stop string; the engine's thread never does that work.
//!
//! A [`Coordinator`] holds the actors of all models and decides which engine serves a request, and says why.

mod actor;
mod channel;
mod coordinator;
mod error;
mod load;
mod message;
mod prefix;
mod scheduler;
mod stop;
mod stream;
mod text;

pub use actor::{Actor, ActorHandle, Options};
pub use coordinator::{
    Candidate, Choice, Coordinator, Decision, Policy, Prospect, ReadyError, Refusal, RouteError, Routed,
    Shape, Threshold,
};
pub use error::RuntimeError;
pub use load::{Load, LoadState};
pub use message::{
    Command, Done, EngineState, Event, Reason, Request, RequestId, Route, Status, Timing, Token, Usage,
};
pub use stop::{StopMatcher, Stopped};
pub use stream::{StreamControl, TokenStream};
pub use text::{TextEvent, TextStream};
