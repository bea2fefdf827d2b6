//! What every engine refuses before it computes anything, checked in one place.

use crate::{Capabilities, EngineError, Input, Kind, Row, SeqId, Want};

/// What the checks need to know of a sequence.
#[derive(Debug, Clone, Copy)]
pub struct SeqState {
    /// Tokens fed so far.
    pub len: usize,
    /// What it was opened for.
    pub max_len: usize,
    /// Whether its last row asked for a sample.
    pub sampled: bool,
}

/// Checks a step against the capabilities and the sequences' states; an engine is left to check its memory.
///
/// # Errors
/// The first refusal: an empty step or row, too many rows or tokens, a sequence twice or unknown, a token outside the
/// vocabulary, a previous sample that is not there, a length beyond `max_len`, a sampling parameter out of range.
pub fn check_step(
    capabilities: &Capabilities,
    rows: &[Row],
    state: impl Fn(SeqId) -> Option<SeqState>,
) -> Result<(), EngineError> {
    if rows.is_empty() {
        return Err(EngineError::Empty("the step has no rows".into()));
    }
    let vocab = capabilities.vocab_size;
    let mut tokens_in_step = 0;
    for (i, row) in rows.iter().enumerate() {
        let seq = state(row.seq).ok_or(EngineError::UnknownSequence(row.seq))?;
        if rows[..i].iter().any(|other| other.seq == row.seq) {
            return Err(EngineError::DuplicateRow(row.seq));
        }
        let count = match &row.input {
            Input::Tokens(tokens) => {
                if tokens.is_empty() {
                    return Err(EngineError::Empty(format!("the row of {:?} has no tokens", row.seq)));
                }
                if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab) {
                    return Err(EngineError::TokenOutOfRange { token, vocab });
                }
                tokens.len()
            }
            Input::PreviousSample if seq.sampled => 1,
            Input::PreviousSample => return Err(EngineError::NothingSampled(row.seq)),
        };
        fits_context(seq.len + count, seq.max_len)?;
        if let Want::Sample(spec) = &row.want {
            spec.validate(vocab)?;
        }
        tokens_in_step += count;
    }
    let too_large = |unit: &str, limit, found| EngineError::StepTooLarge { unit: unit.into(), limit, found };
    if rows.len() > capabilities.max_batch {
        return Err(too_large("rows", capabilities.max_batch, rows.len()));
    }
    let limit = match &capabilities.kind {
        Kind::Dynamic { max_step_tokens } => *max_step_tokens,
        Kind::Static { chunks } => rows.len() * chunks.last().copied().unwrap_or(0),
    };
    if tokens_in_step > limit {
        return Err(too_large("tokens", limit, tokens_in_step));
    }
    Ok(())
}

/// `needed` tokens against a limit.
///
/// # Errors
/// [`EngineError::ContextOverflow`] with both numbers.
pub fn fits_context(needed: usize, limit: usize) -> Result<(), EngineError> {
    if needed > limit { Err(EngineError::ContextOverflow { needed, limit }) } else { Ok(()) }
}
