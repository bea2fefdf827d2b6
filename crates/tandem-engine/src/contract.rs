//! The `Engine` trait and the plain data that crosses it.

use serde::{Deserialize, Serialize};

use crate::{EngineError, KvSnapshot, SampleSpec, Sampled};

/// A sequence of one engine. Never reused within the life of that engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SeqId(pub u64);

/// A submitted step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ticket(pub u64);

/// A fine-tuning adapter that an engine has loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AdapterId(pub u32);

/// One sequence's part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Which sequence grows. A sequence may stand in a step once.
    pub seq: SeqId,
    /// What it grows by.
    pub input: Input,
    /// What comes back.
    pub want: Want,
}

/// What a sequence is fed.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// These tokens; at least one.
    Tokens(Vec<u32>),
    /// The token that the sequence's previous row sampled, whether or not it has been collected.
    PreviousSample,
}

/// What a row gives back.
#[derive(Debug, Clone, PartialEq)]
pub enum Want {
    /// Nothing: the head projection is skipped.
    Nothing,
    /// The token after the row's last one. It joins the sequence only when a later row feeds it.
    Sample(SampleSpec),
    /// Logits.
    Logits(Which),
}

/// Which positions of a row's input give logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The last one.
    Last,
    /// Every one.
    All,
}

/// What a row gave.
#[derive(Debug, Clone, PartialEq)]
pub enum RowOut {
    /// Nothing was wanted.
    Nothing,
    /// The sampled token.
    Sampled(Sampled),
    /// The logits.
    Logits(Logits),
    /// This row failed and the others did not (logits that are not finite).
    Failed(EngineError),
}

/// Logits, `[positions, vocab]` in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    /// Values per position.
    pub vocab: usize,
    /// Position after position.
    pub values: Vec<f32>,
}

/// What came of a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fork {
    /// A new sequence that continues exactly as if its tokens had been computed cold.
    Exact(SeqId),
    /// The engine cannot restore that prefix exactly. Recompute it.
    Inexact,
}

/// How an engine runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Any shape, up to so many tokens in a step.
    Dynamic {
        /// Sum of the lengths of a step's rows.
        max_step_tokens: usize,
    },
    /// Shapes fixed ahead of time.
    Static {
        /// Input lengths there is a function for, ascending.
        chunks: Vec<usize>,
    },
}

/// What an engine can do. Constant over its life.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Short name (`cpu`, `mlx`, `coreml`).
    pub engine: String,
    /// What it runs on, in words.
    pub device: String,
    /// Dynamic or static.
    pub kind: Kind,
    /// Longest sequence in tokens.
    pub context: usize,
    /// Token ids run below this.
    pub vocab_size: usize,
    /// Rows in a step.
    pub max_batch: usize,
    /// `fork` answers `Exact` wherever the source still holds what the prefix needs.
    pub exact_fork: bool,
    /// `truncate` answers `true` wherever the sequence still holds what the prefix needs.
    pub exact_truncate: bool,
    /// `export` and `import` work.
    pub snapshots: bool,
    /// A row's result has the same bits whatever the batch, the chunking and the number of threads.
    pub batch_invariant: bool,
    /// `submit` returns before the step is computed, so that submitting the next one first keeps the device busy. Where
    /// it does not, that gains nothing.
    pub overlaps: bool,
    /// KV bytes that one more token of a long sequence costs.
    pub kv_bytes_per_token: u64,
}

/// Bytes by kind, now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Weights as the engine holds them.
    pub weights: u64,
    /// KV that exactly one sequence holds.
    pub kv_exclusive: u64,
    /// KV that several sequences hold, counted once.
    pub kv_shared: u64,
    /// KV kept allocated for reuse, held by no sequence.
    pub kv_free: u64,
    /// Most KV bytes the engine will hold; `submit` refuses beyond it.
    pub kv_limit: u64,
    /// Activations and other working memory.
    pub scratch: u64,
}

/// KV bytes of one sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeqBytes {
    /// Freed if it is closed.
    pub exclusive: u64,
    /// Also held by others.
    pub shared: u64,
}

/// A running model. Lives on its actor's thread and need not be `Send`.
pub trait Engine {
    /// What it can do.
    fn capabilities(&self) -> &Capabilities;

    /// Opens an empty sequence that will grow to at most `max_len` tokens. All that depends on the total length (dynamic
    /// and long rope factors) is fixed here.
    ///
    /// # Errors
    /// [`EngineError::ContextOverflow`] if `max_len` exceeds the engine's context, [`EngineError::Unsupported`] for an
    /// adapter it does not have.
    fn open(&mut self, max_len: usize, adapter: Option<AdapterId>) -> Result<SeqId, EngineError>;

    /// Tokens fed so far, submitted steps included.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    fn len(&self, seq: SeqId) -> Result<usize, EngineError>;

    /// Starts one step over a ragged batch. It is all or nothing: after an error no sequence has changed. Steps take
    /// effect in the order of their submission, and a step may be submitted while earlier ones are uncollected.
    ///
    /// # Errors
    /// Any refusal of the batch, its memory or a row in it, each naming the sequence and the numbers.
    fn submit(&mut self, rows: &[Row]) -> Result<Ticket, EngineError>;

    /// Waits for a step. One [`RowOut`] per row, in order. A row whose sequence was closed since still answers.
    ///
    /// # Errors
    /// [`EngineError::UnknownTicket`], also for one collected before; [`EngineError::Device`] if the step failed as a
    /// whole.
    fn collect(&mut self, ticket: Ticket) -> Result<Vec<RowOut>, EngineError>;

    /// A new sequence that shares the first `at` tokens of `seq` and may grow to `max_len`. `Exact` only if
    /// `open(max_len)` would have fixed the same as the source's `open` did. The source is untouched.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::BeyondEnd`], [`EngineError::ContextOverflow`].
    fn fork(&mut self, seq: SeqId, at: usize, max_len: usize) -> Result<Fork, EngineError>;

    /// Drops all but the first `len` tokens. `false` if that cannot be done exactly; the sequence is then untouched.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::BeyondEnd`].
    fn truncate(&mut self, seq: SeqId, len: usize) -> Result<bool, EngineError>;

    /// Frees a sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    fn close(&mut self, seq: SeqId) -> Result<(), EngineError>;

    /// The sequence's KV as plain data, for another engine or process.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::Unsupported`] without `snapshots`.
    fn export(&mut self, seq: SeqId) -> Result<KvSnapshot, EngineError>;

    /// A new sequence from a snapshot, allowed to grow to `max_len`. A round trip through the same engine is bit-exact.
    ///
    /// # Errors
    /// [`EngineError::SnapshotMismatch`] naming the field, [`EngineError::OutOfMemory`],
    /// [`EngineError::ContextOverflow`], [`EngineError::Unsupported`].
    fn import(&mut self, snapshot: &KvSnapshot, max_len: usize) -> Result<SeqId, EngineError>;

    /// Bytes by kind.
    fn memory(&self) -> Memory;

    /// KV bytes of one sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    fn sequence_bytes(&self, seq: SeqId) -> Result<SeqBytes, EngineError>;
}

/// Builds an engine on its actor's thread, and builds it again after a panic.
pub trait EngineFactory: Send {
    /// Loads the weights and returns a ready engine.
    ///
    /// # Errors
    /// Whatever loading meets; memory is checked before it is taken.
    fn build(&mut self) -> Result<Box<dyn Engine>, EngineError>;
}

impl<F> EngineFactory for F
where
    F: FnMut() -> Result<Box<dyn Engine>, EngineError> + Send,
{
    fn build(&mut self) -> Result<Box<dyn Engine>, EngineError> {
        self()
    }
}
