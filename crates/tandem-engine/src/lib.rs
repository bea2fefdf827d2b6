//! The contract between the rooms above (actor, scheduler, prefix cache, coordinator) and every engine below.
//!
//! An engine holds *sequences*. A sequence is a token history and the KV that goes with it. A *step* feeds a ragged
//! batch of [`Row`]s, each some tokens for one sequence, and says what is wanted back for the last of them: nothing
//! (a chunk in the middle of a prefill), a sample, or logits. [`Engine::submit`] starts a step and
//! [`Engine::collect`] waits for it, so that an asynchronous device can be given the next step before the last one has
//! come back; [`Input::PreviousSample`] lets that next step use a token that the host has not seen yet.
//!
//! The promise that makes caching safe: [`Engine::fork`] and [`Engine::truncate`] either restore a prefix *exactly* or
//! say that they cannot, and then the caller recomputes. There is no third answer.
//!
//! [`conformance`] holds an engine to all of this; [`fake::FakeEngine`] is the smallest engine that passes.

pub mod checks;
pub mod conformance;
mod contract;
mod error;
pub mod fake;
pub mod sampler;
mod snapshot;

pub use contract::{
    AdapterId, Capabilities, Engine, EngineFactory, Fork, Input, Kind, Logits, Memory, Row, RowOut, SeqBytes,
    SeqId, Ticket, Want, Which,
};
pub use error::EngineError;
pub use sampler::{SampleSpec, Sampled};
pub use snapshot::{KvSnapshot, KvType, LayerKv};
