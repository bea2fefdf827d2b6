//! The prompt prefix that need not be computed again.
//!
//! One finished sequence is kept frozen, the last. A new prompt forks it at the longest common prefix, so a chat's next
//! turn computes only what the turn added. The engine promises that a fork is exact or says that it cannot; then the
//! prompt is computed from its start. The kept sequence yields to any request that needs its memory.

use tandem_engine::{Engine, EngineError, Fork, SeqId};

/// What is kept.
#[derive(Debug, Default)]
pub(crate) struct Prefix {
    frozen: Option<Frozen>,
}

#[derive(Debug)]
struct Frozen {
    seq: SeqId,
    tokens: Vec<u32>,
}

impl Prefix {
    /// A sequence that starts with as much of `tokens` as is kept, and how much that is. Never all of it: the last
    /// token has to be computed for its logits.
    pub fn fork(
        &self,
        engine: &mut dyn Engine,
        tokens: &[u32],
        max_len: usize,
    ) -> Result<Option<(SeqId, usize)>, EngineError> {
        let Some(frozen) = &self.frozen else { return Ok(None) };
        let common = frozen.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let at = common.min(tokens.len().saturating_sub(1));
        if at == 0 {
            return Ok(None);
        }
        match engine.fork(frozen.seq, at, max_len)? {
            Fork::Exact(seq) => Ok(Some((seq, at))),
            Fork::Inexact => Ok(None),
        }
    }

    /// Keeps `seq`, which holds `tokens`, in place of what was kept.
    pub fn keep(&mut self, engine: &mut dyn Engine, seq: SeqId, tokens: Vec<u32>) {
        self.clear(engine);
        self.frozen = Some(Frozen { seq, tokens });
    }

    /// Bytes that [`Prefix::clear`] would free.
    pub fn exclusive_bytes(&self, engine: &dyn Engine) -> u64 {
        let bytes = self.frozen.as_ref().and_then(|f| engine.sequence_bytes(f.seq).ok());
        bytes.map_or(0, |b| b.exclusive)
    }

    /// Closes what is kept; whether there was anything.
    pub fn clear(&mut self, engine: &mut dyn Engine) -> bool {
        let Some(frozen) = self.frozen.take() else { return false };
        if let Err(error) = engine.close(frozen.seq) {
            tracing::error!(%error, "closing the kept prefix");
        }
        true
    }
}
