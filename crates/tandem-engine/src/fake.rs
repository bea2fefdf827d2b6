//! The smallest engine that keeps the contract, for tests of the rooms above.
//!
//! Its logits are a hash of the token history, so that any mix-up of sequences, positions or prefixes shows as a
//! different token. Its "KV" is one counted slot per token.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::checks::{SeqState, check_step, fits_context};
use crate::sampler::{sample, uniform};
use crate::{
    AdapterId, Capabilities, Engine, EngineError, Fork, Input, Kind, KvSnapshot, Logits, Memory, Row, RowOut,
    SeqBytes, SeqId, Ticket, Want, Which,
};

/// KV bytes that a token costs here.
const SLOT_BYTES: u64 = 64;

/// One token's KV; counts itself out when the last sequence that holds it lets go.
struct Slot {
    token: u32,
    live: Rc<Cell<u64>>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.live.set(self.live.get() - 1);
    }
}

struct Sequence {
    max_len: usize,
    slots: Vec<Rc<Slot>>,
    sampled: Option<u32>,
}

/// A deterministic engine without weights.
pub struct FakeEngine {
    capabilities: Capabilities,
    kv_limit: u64,
    panic_after: Option<u64>,
    sequences: BTreeMap<SeqId, Sequence>,
    outputs: BTreeMap<Ticket, Vec<RowOut>>,
    live: Rc<Cell<u64>>,
    opened: u64,
    steps: u64,
}

impl FakeEngine {
    /// An engine with this vocabulary and context, whose KV holds `kv_tokens` tokens over all sequences.
    pub fn new(vocab_size: usize, context: usize, kv_tokens: usize) -> Self {
        let capabilities = Capabilities {
            engine: "fake".into(),
            device: "none".into(),
            kind: Kind::Dynamic { max_step_tokens: 64 },
            context,
            vocab_size,
            max_batch: 16,
            exact_fork: true,
            exact_truncate: true,
            snapshots: true,
            batch_invariant: true,
            kv_bytes_per_token: SLOT_BYTES,
        };
        Self {
            capabilities,
            kv_limit: kv_tokens as u64 * SLOT_BYTES,
            panic_after: None,
            sequences: BTreeMap::new(),
            outputs: BTreeMap::new(),
            live: Rc::default(),
            opened: 0,
            steps: 0,
        }
    }

    /// Makes `submit` panic once `steps` steps have been taken, to test what an actor does about it.
    #[must_use]
    pub fn panicking_after(mut self, steps: u64) -> Self {
        self.panic_after = Some(steps);
        self
    }

    /// Makes it a static engine that has these chunk lengths and computes one sequence at a time.
    #[must_use]
    pub fn with_chunks(mut self, chunks: &[usize]) -> Self {
        self.capabilities.kind = Kind::Static { chunks: chunks.to_vec() };
        self.capabilities.max_batch = 1;
        self
    }

    /// The logits after `history`: uniform in `[-4, 4)`, a function of every token and its position.
    pub fn logits(history: &[u32], vocab_size: usize) -> Vec<f32> {
        let key = history.iter().fold(0u64, |key, token| {
            (key.rotate_left(5) ^ u64::from(*token)).wrapping_mul(0x517c_c1b7_2722_0a95).wrapping_add(1)
        });
        (0..vocab_size).map(|id| (uniform(key, id as u64) * 8.0 - 4.0) as f32).collect()
    }

    fn seq(&self, seq: SeqId) -> Result<&Sequence, EngineError> {
        self.sequences.get(&seq).ok_or(EngineError::UnknownSequence(seq))
    }

    fn insert(&mut self, max_len: usize, slots: Vec<Rc<Slot>>) -> Result<SeqId, EngineError> {
        fits_context(max_len, self.capabilities.context)?;
        fits_context(slots.len(), max_len)?;
        self.opened += 1;
        self.sequences.insert(SeqId(self.opened), Sequence { max_len, slots, sampled: None });
        Ok(SeqId(self.opened))
    }

    fn new_slots(&self, tokens: &[u32]) -> Result<Vec<Rc<Slot>>, EngineError> {
        self.fits_memory(tokens.len())?;
        self.live.set(self.live.get() + tokens.len() as u64);
        Ok(tokens.iter().map(|&token| Rc::new(Slot { token, live: self.live.clone() })).collect())
    }

    fn fits_memory(&self, tokens: usize) -> Result<(), EngineError> {
        let needed = tokens as u64 * SLOT_BYTES;
        let available = self.kv_limit - self.live.get() * SLOT_BYTES;
        if needed > available {
            let (what, hint) = ("the KV cache".into(), "close a sequence".into());
            return Err(EngineError::OutOfMemory { what, needed, available, hint });
        }
        Ok(())
    }

    fn run_row(&mut self, row: &Row) -> Result<RowOut, EngineError> {
        let vocab = self.capabilities.vocab_size;
        let tokens = match (&row.input, self.seq(row.seq)?.sampled) {
            (Input::Tokens(tokens), _) => tokens.clone(),
            (Input::PreviousSample, sampled) => sampled.into_iter().collect(),
        };
        let slots = self.new_slots(&tokens)?;
        let sequence = self.sequences.get_mut(&row.seq).ok_or(EngineError::UnknownSequence(row.seq))?;
        sequence.slots.extend(slots);
        let history: Vec<u32> = sequence.slots.iter().map(|slot| slot.token).collect();
        let first = match &row.want {
            Want::Logits(Which::All) => history.len() + 1 - tokens.len(),
            _ => history.len(),
        };
        sequence.sampled = None;
        Ok(match &row.want {
            Want::Nothing => RowOut::Nothing,
            Want::Sample(spec) => match sample(spec, &Self::logits(&history, vocab), &history) {
                None => RowOut::Failed(EngineError::NotFinite(row.seq)),
                Some(sampled) => {
                    sequence.sampled = Some(sampled.token);
                    RowOut::Sampled(sampled)
                }
            },
            Want::Logits(_) => {
                let values =
                    (first..=history.len()).flat_map(|len| Self::logits(&history[..len], vocab)).collect();
                RowOut::Logits(Logits { vocab, values })
            }
        })
    }
}

impl Engine for FakeEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn open(&mut self, max_len: usize, adapter: Option<AdapterId>) -> Result<SeqId, EngineError> {
        if adapter.is_some() {
            let (engine, feature, hint) = ("fake".into(), "adapters".into(), "open without one".into());
            return Err(EngineError::Unsupported { engine, feature, hint });
        }
        self.insert(max_len, Vec::new())
    }

    fn len(&self, seq: SeqId) -> Result<usize, EngineError> {
        Ok(self.seq(seq)?.slots.len())
    }

    fn submit(&mut self, rows: &[Row]) -> Result<Ticket, EngineError> {
        check_step(&self.capabilities, rows, |seq| {
            let Sequence { max_len, slots, sampled } = self.sequences.get(&seq)?;
            Some(SeqState { len: slots.len(), max_len: *max_len, sampled: sampled.is_some() })
        })?;
        let tokens = |row: &Row| if let Input::Tokens(tokens) = &row.input { tokens.len() } else { 1 };
        self.fits_memory(rows.iter().map(tokens).sum())?;
        assert!(self.panic_after.is_none_or(|limit| self.steps < limit), "the fake engine was told to panic");
        let outputs = rows.iter().map(|row| self.run_row(row)).collect::<Result<_, _>>()?;
        self.steps += 1;
        self.outputs.insert(Ticket(self.steps), outputs);
        Ok(Ticket(self.steps))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<RowOut>, EngineError> {
        self.outputs.remove(&ticket).ok_or(EngineError::UnknownTicket(ticket))
    }

    fn fork(&mut self, seq: SeqId, at: usize, max_len: usize) -> Result<Fork, EngineError> {
        let slots = &self.seq(seq)?.slots;
        let prefix = slots.get(..at).ok_or(EngineError::BeyondEnd { seq, at, len: slots.len() })?.to_vec();
        Ok(Fork::Exact(self.insert(max_len, prefix)?))
    }

    fn truncate(&mut self, seq: SeqId, len: usize) -> Result<bool, EngineError> {
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        let now = sequence.slots.len();
        if len > now {
            return Err(EngineError::BeyondEnd { seq, at: len, len: now });
        }
        sequence.slots.truncate(len);
        sequence.sampled = None;
        Ok(true)
    }

    fn close(&mut self, seq: SeqId) -> Result<(), EngineError> {
        self.sequences.remove(&seq).map(drop).ok_or(EngineError::UnknownSequence(seq))
    }

    fn export(&mut self, seq: SeqId) -> Result<KvSnapshot, EngineError> {
        let tokens = self.seq(seq)?.slots.iter().map(|slot| slot.token).collect();
        Ok(KvSnapshot {
            model: "fake".into(),
            adapter: None,
            rope: "none".into(),
            tokens,
            layers: Vec::new(),
        })
    }

    fn import(&mut self, snapshot: &KvSnapshot, max_len: usize) -> Result<SeqId, EngineError> {
        snapshot.check_origin("fake", "none")?;
        let slots = self.new_slots(&snapshot.tokens)?;
        self.insert(max_len, slots)
    }

    fn memory(&self) -> Memory {
        let (mut exclusive, mut shared) = (0.0, 0.0);
        for slot in self.sequences.values().flat_map(|sequence| &sequence.slots) {
            match Rc::strong_count(slot) {
                1 => exclusive += 1.0,
                holders => shared += 1.0 / holders as f64,
            }
        }
        let bytes = |slots: f64| slots.round() as u64 * SLOT_BYTES;
        Memory {
            kv_exclusive: bytes(exclusive),
            kv_shared: bytes(shared),
            kv_limit: self.kv_limit,
            ..Memory::default()
        }
    }

    fn sequence_bytes(&self, seq: SeqId) -> Result<SeqBytes, EngineError> {
        let slots = &self.seq(seq)?.slots;
        let exclusive = slots.iter().filter(|slot| Rc::strong_count(slot) == 1).count();
        Ok(SeqBytes {
            exclusive: exclusive as u64 * SLOT_BYTES,
            shared: (slots.len() - exclusive) as u64 * SLOT_BYTES,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::conformance_tests!(|| Box::new(FakeEngine::new(101, 512, 4096)), tolerance = 0.0);
}
