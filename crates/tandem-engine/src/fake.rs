//! The smallest engine that keeps the contract, for tests of the rooms above.
//!
//! Its logits are a hash of the token history, so that any mix-up of sequences, positions or prefixes shows as a
//! different token. Its "KV" is one counted slot per token. It can stand for engines of other kinds: that compute after
//! `submit` has returned, forget what lies before a window, have shapes fixed ahead of time, or hold adapters.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use crate::checks::{SeqState, check_step, fits_context};
use crate::sampler::{sample, uniform};
use crate::{
    AdapterId, Capabilities, Engine, EngineError, Fork, Input, Kind, KvSnapshot, Logits, Memory, Row, RowOut,
    SeqBytes, SeqId, Ticket, Want, Which,
};

/// KV bytes that a token costs here.
const SLOT_BYTES: u64 = 64;

/// Slots that one sequence holds, and slots that several do.
#[derive(Default)]
struct Counts {
    exclusive: Cell<u64>,
    shared: Cell<u64>,
}

/// One token's KV in one of the sequences that hold it. Keeps the counts right as it is cloned and dropped.
struct Slot {
    holders: Rc<Cell<u64>>,
    counts: Rc<Counts>,
}

fn add(count: &Cell<u64>, change: i64) {
    count.set(count.get().wrapping_add_signed(change));
}

impl Slot {
    fn new(counts: &Rc<Counts>) -> Self {
        add(&counts.exclusive, 1);
        Self { holders: Rc::new(Cell::new(1)), counts: Rc::clone(counts) }
    }
}

impl Clone for Slot {
    fn clone(&self) -> Self {
        add(&self.holders, 1);
        if self.holders.get() == 2 {
            add(&self.counts.exclusive, -1);
            add(&self.counts.shared, 1);
        }
        Self { holders: Rc::clone(&self.holders), counts: Rc::clone(&self.counts) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        add(&self.holders, -1);
        match self.holders.get() {
            0 => add(&self.counts.exclusive, -1),
            1 => {
                add(&self.counts.shared, -1);
                add(&self.counts.exclusive, 1);
            }
            _ => {}
        }
    }
}

struct Sequence {
    max_len: usize,
    adapter: Option<AdapterId>,
    tokens: Vec<u32>,
    /// Hash of the adapter and the tokens up to each.
    keys: Vec<u64>,
    /// KV of the last tokens: of all, or of as many as the window holds.
    slots: VecDeque<Slot>,
    sampled: Option<u32>,
}

/// A deterministic engine without weights.
pub struct FakeEngine {
    capabilities: Capabilities,
    kv_limit: u64,
    window: usize,
    adapters: u32,
    panic_after: Option<u64>,
    sequences: BTreeMap<SeqId, Sequence>,
    outputs: BTreeMap<Ticket, Vec<RowOut>>,
    counts: Rc<Counts>,
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
            overlaps: false,
            kv_bytes_per_token: SLOT_BYTES,
        };
        Self {
            capabilities,
            kv_limit: kv_tokens as u64 * SLOT_BYTES,
            window: usize::MAX,
            adapters: 0,
            panic_after: None,
            sequences: BTreeMap::new(),
            outputs: BTreeMap::new(),
            counts: Rc::default(),
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

    /// Claims that steps overlap.
    #[must_use]
    pub fn overlapping(mut self) -> Self {
        self.capabilities.overlaps = true;
        self
    }

    /// Keeps the KV of the last `window` tokens only, as a model does whose every layer has a window. What lies further
    /// back cannot be restored.
    #[must_use]
    pub fn windowed(mut self, window: usize) -> Self {
        self.window = window;
        self.capabilities.exact_fork = false;
        self.capabilities.exact_truncate = false;
        self.capabilities.snapshots = false;
        self
    }

    /// Takes rows of these lengths, ascending, as an engine does whose shapes are fixed ahead of time; shorter ones are
    /// padded.
    #[must_use]
    pub fn fixed_shapes(mut self, chunks: &[usize]) -> Self {
        self.capabilities.kind = Kind::Static { chunks: chunks.to_vec() };
        self
    }

    /// Holds `count` adapters, numbered from 0. Each gives other logits.
    #[must_use]
    pub fn with_adapters(mut self, count: u32) -> Self {
        self.adapters = count;
        self
    }

    /// The logits after `history`: uniform in `[-4, 4)`, a function of every token and its position.
    pub fn logits(history: &[u32], vocab_size: usize) -> Vec<f32> {
        Self::adapted_logits(None, history, vocab_size)
    }

    /// As [`FakeEngine::logits`], with an adapter.
    pub fn adapted_logits(adapter: Option<AdapterId>, history: &[u32], vocab_size: usize) -> Vec<f32> {
        logits(history.iter().fold(first_key(adapter), |key, token| next_key(key, *token)), vocab_size)
    }

    fn seq(&self, seq: SeqId) -> Result<&Sequence, EngineError> {
        self.sequences.get(&seq).ok_or(EngineError::UnknownSequence(seq))
    }

    fn insert(&mut self, sequence: Sequence) -> Result<SeqId, EngineError> {
        fits_context(sequence.max_len, self.capabilities.context)?;
        fits_context(sequence.tokens.len(), sequence.max_len)?;
        self.opened += 1;
        self.sequences.insert(SeqId(self.opened), sequence);
        Ok(SeqId(self.opened))
    }

    fn held(&self) -> u64 {
        (self.counts.exclusive.get() + self.counts.shared.get()) * SLOT_BYTES
    }

    fn fits_memory(&self, tokens: usize) -> Result<(), EngineError> {
        let needed = tokens as u64 * SLOT_BYTES;
        let available = self.kv_limit - self.held();
        if needed > available {
            let (what, hint) = ("the KV cache".into(), "close a sequence".into());
            return Err(EngineError::OutOfMemory { what, needed, available, hint });
        }
        Ok(())
    }

    fn run_row(&mut self, row: &Row) -> Result<RowOut, EngineError> {
        let (vocab, window) = (self.capabilities.vocab_size, self.window);
        let counts = Rc::clone(&self.counts);
        let sequence = self.sequences.get_mut(&row.seq).ok_or(EngineError::UnknownSequence(row.seq))?;
        let before = sequence.tokens.len();
        match (&row.input, sequence.sampled) {
            (Input::Tokens(tokens), _) => {
                tokens.iter().for_each(|token| sequence.push(*token, window, &counts));
            }
            (Input::PreviousSample, sampled) => {
                sampled.into_iter().for_each(|token| sequence.push(token, window, &counts));
            }
        }
        sequence.sampled = None;
        let last = sequence.key();
        Ok(match &row.want {
            Want::Nothing => RowOut::Nothing,
            Want::Sample(spec) => match sample(spec, &logits(last, vocab), &sequence.tokens) {
                None => RowOut::Failed(EngineError::NotFinite(row.seq)),
                Some(sampled) => {
                    sequence.sampled = Some(sampled.token);
                    RowOut::Sampled(sampled)
                }
            },
            Want::Logits(Which::Last) => RowOut::Logits(Logits { vocab, values: logits(last, vocab) }),
            Want::Logits(Which::All) => {
                let values = sequence.keys[before..].iter().flat_map(|key| logits(*key, vocab)).collect();
                RowOut::Logits(Logits { vocab, values })
            }
        })
    }
}

fn first_key(adapter: Option<AdapterId>) -> u64 {
    adapter.map_or(0, |AdapterId(adapter)| u64::from(adapter) + 1)
}

fn next_key(key: u64, token: u32) -> u64 {
    (key.rotate_left(5) ^ u64::from(token)).wrapping_mul(0x517c_c1b7_2722_0a95).wrapping_add(1)
}

fn logits(key: u64, vocab_size: usize) -> Vec<f32> {
    (0..vocab_size).map(|id| (uniform(key, id as u64) * 8.0 - 4.0) as f32).collect()
}

impl Sequence {
    fn new(max_len: usize, adapter: Option<AdapterId>) -> Self {
        let (tokens, keys, slots) = (Vec::new(), Vec::new(), VecDeque::new());
        Self { max_len, adapter, tokens, keys, slots, sampled: None }
    }

    fn key(&self) -> u64 {
        self.keys.last().copied().unwrap_or(first_key(self.adapter))
    }

    fn push(&mut self, token: u32, window: usize, counts: &Rc<Counts>) {
        self.keys.push(next_key(self.key(), token));
        self.tokens.push(token);
        self.slots.push_back(Slot::new(counts));
        if self.slots.len() > window {
            self.slots.pop_front();
        }
    }

    /// How many slots the first `len` tokens have, if what they need is still there.
    fn slots_at(&self, len: usize, window: usize) -> Option<usize> {
        let dropped = self.tokens.len() - self.slots.len();
        let first = len.saturating_sub(window);
        (len == 0 || first >= dropped).then(|| len - dropped.min(len))
    }
}

impl Engine for FakeEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn open(&mut self, max_len: usize, adapter: Option<AdapterId>) -> Result<SeqId, EngineError> {
        if let Some(AdapterId(adapter)) = adapter.filter(|adapter| adapter.0 >= self.adapters) {
            let feature = format!("adapter {adapter}");
            let (engine, hint) = ("fake".into(), "open without one".into());
            return Err(EngineError::Unsupported { engine, feature, hint });
        }
        self.insert(Sequence::new(max_len, adapter))
    }

    fn len(&self, seq: SeqId) -> Result<usize, EngineError> {
        Ok(self.seq(seq)?.tokens.len())
    }

    fn submit(&mut self, rows: &[Row]) -> Result<Ticket, EngineError> {
        check_step(&self.capabilities, rows, |seq| {
            let Sequence { max_len, tokens, sampled, .. } = self.sequences.get(&seq)?;
            Some(SeqState { len: tokens.len(), max_len: *max_len, sampled: sampled.is_some() })
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
        let source = self.seq(seq)?;
        let len = source.tokens.len();
        if at > len {
            return Err(EngineError::BeyondEnd { seq, at, len });
        }
        let Some(slots) = source.slots_at(at, self.window) else { return Ok(Fork::Inexact) };
        let fork = Sequence {
            tokens: source.tokens[..at].to_vec(),
            keys: source.keys[..at].to_vec(),
            slots: source.slots.iter().take(slots).cloned().collect(),
            ..Sequence::new(max_len, source.adapter)
        };
        Ok(Fork::Exact(self.insert(fork)?))
    }

    fn truncate(&mut self, seq: SeqId, len: usize) -> Result<bool, EngineError> {
        let window = self.window;
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        let now = sequence.tokens.len();
        if len > now {
            return Err(EngineError::BeyondEnd { seq, at: len, len: now });
        }
        let Some(slots) = sequence.slots_at(len, window) else { return Ok(false) };
        sequence.tokens.truncate(len);
        sequence.keys.truncate(len);
        sequence.slots.truncate(slots);
        sequence.sampled = None;
        Ok(true)
    }

    fn close(&mut self, seq: SeqId) -> Result<(), EngineError> {
        self.sequences.remove(&seq).map(drop).ok_or(EngineError::UnknownSequence(seq))
    }

    fn export(&mut self, seq: SeqId) -> Result<KvSnapshot, EngineError> {
        let Sequence { tokens, adapter, .. } = self.seq(seq)?;
        let (model, rope) = ("fake".into(), "none".into());
        Ok(KvSnapshot { model, adapter: *adapter, rope, tokens: tokens.clone(), layers: Vec::new() })
    }

    fn import(&mut self, snapshot: &KvSnapshot, max_len: usize) -> Result<SeqId, EngineError> {
        snapshot.check_origin("fake", "none")?;
        self.fits_memory(snapshot.tokens.len())?;
        let mut sequence = Sequence::new(max_len, None);
        for token in &snapshot.tokens {
            sequence.push(*token, self.window, &self.counts);
        }
        self.insert(sequence)
    }

    fn memory(&self) -> Memory {
        Memory {
            kv_exclusive: self.counts.exclusive.get() * SLOT_BYTES,
            kv_shared: self.counts.shared.get() * SLOT_BYTES,
            kv_limit: self.kv_limit,
            ..Memory::default()
        }
    }

    fn sequence_bytes(&self, seq: SeqId) -> Result<SeqBytes, EngineError> {
        let slots = &self.seq(seq)?.slots;
        let exclusive = slots.iter().filter(|slot| slot.holders.get() == 1).count();
        Ok(SeqBytes {
            exclusive: exclusive as u64 * SLOT_BYTES,
            shared: (slots.len() - exclusive) as u64 * SLOT_BYTES,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    mod plain {
        use super::*;
        crate::conformance_tests!(|| Box::new(FakeEngine::new(101, 512, 4096)), tolerance = 0.0);
    }

    mod windowed {
        use super::*;
        crate::conformance_tests!(|| Box::new(FakeEngine::new(101, 512, 4096).windowed(24)), tolerance = 0.0);
    }

    #[test]
    fn an_adapter_is_part_of_the_history() {
        let mut engine = FakeEngine::new(101, 64, 100).with_adapters(1);
        assert!(engine.open(64, Some(AdapterId(1))).is_err());
        let seq = engine.open(64, Some(AdapterId(0))).unwrap();
        let row = Row { seq, input: Input::Tokens(vec![5, 6]), want: Want::Logits(Which::Last) };
        let ticket = engine.submit(&[row]).unwrap();
        let RowOut::Logits(logits) = engine.collect(ticket).unwrap().remove(0) else { panic!() };
        assert_eq!(logits.values, FakeEngine::adapted_logits(Some(AdapterId(0)), &[5, 6], 101));
        assert_ne!(logits.values, FakeEngine::logits(&[5, 6], 101));
    }
}
