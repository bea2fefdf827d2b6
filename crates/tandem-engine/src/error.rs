//! What an engine can refuse. Every message carries its numbers and says what to do.

use serde::{Deserialize, Serialize};

use crate::{SeqId, Ticket};

/// Why an engine refused. Plain data, so that it crosses from an actor's thread or process.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum EngineError {
    /// No such sequence.
    #[error("sequence {0:?} is not open in this engine")]
    UnknownSequence(SeqId),
    /// No such step, or it was collected before.
    #[error("step {0:?} is not outstanding in this engine")]
    UnknownTicket(Ticket),
    /// A step without rows, or a row without tokens.
    #[error("nothing to compute: {0}. hint: a prompt needs at least one token")]
    Empty(String),
    /// More rows or tokens than a step takes.
    #[error("a step takes at most {limit} {unit}, this one has {found}. hint: split it into several steps")]
    StepTooLarge {
        /// `rows` or `tokens`.
        unit: String,
        /// The limit.
        limit: usize,
        /// What came.
        found: usize,
    },
    /// A sequence stands twice in one step.
    #[error("sequence {0:?} stands twice in one step")]
    DuplicateRow(SeqId),
    /// A token id outside the vocabulary.
    #[error(
        "token {token} is outside the vocabulary of {vocab}. hint: the tokenizer and the weights do not belong together"
    )]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Ids run below this.
        vocab: usize,
    },
    /// `PreviousSample` where the sequence's previous row sampled nothing.
    #[error("sequence {0:?} has no previous sample: its last row did not ask for one")]
    NothingSampled(SeqId),
    /// Longer than the context.
    #[error(
        "{needed} tokens do not fit the context of {limit}. hint: shorten the prompt, ask for fewer tokens or raise --context"
    )]
    ContextOverflow {
        /// Tokens needed in all.
        needed: usize,
        /// Tokens there is room for.
        limit: usize,
    },
    /// A prefix longer than the sequence.
    #[error("sequence {seq:?} holds {len} tokens, fewer than {at}")]
    BeyondEnd {
        /// The sequence.
        seq: SeqId,
        /// What was asked for.
        at: usize,
        /// What there is.
        len: usize,
    },
    /// Not enough memory.
    #[error("not enough memory for {what}: {needed} bytes needed, {available} available. hint: {hint}")]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// Bytes.
        needed: u64,
        /// Bytes.
        available: u64,
        /// What to do.
        hint: String,
    },
    /// A sampling parameter outside its range.
    #[error("{field} = {value} is not allowed: {expected}")]
    InvalidSpec {
        /// The parameter.
        field: String,
        /// Its value.
        value: String,
        /// What it may be.
        expected: String,
    },
    /// A snapshot of something else.
    #[error(
        "the KV snapshot does not fit: {field} is {found}, this engine needs {expected}. hint: recompute the prefix"
    )]
    SnapshotMismatch {
        /// The field.
        field: String,
        /// What this engine needs.
        expected: String,
        /// What the snapshot says.
        found: String,
    },
    /// A feature that this engine does not compute.
    #[error("the {engine} engine does not support {feature}. hint: {hint}")]
    Unsupported {
        /// The engine.
        engine: String,
        /// The feature, by name.
        feature: String,
        /// What to do.
        hint: String,
    },
    /// Every logit is NaN or infinite.
    #[error(
        "sequence {0:?}: the model gave no finite logit. hint: the weights are damaged, or overflow this number format"
    )]
    NotFinite(SeqId),
    /// The model's files.
    #[error("{0}")]
    Model(String),
    /// The device or the system failed.
    #[error("engine failure: {0}")]
    Device(String),
}

impl From<tandem_model::ModelError> for EngineError {
    fn from(error: tandem_model::ModelError) -> Self {
        Self::Model(error.to_string())
    }
}
