//! The contract's promises around the forward pass.

use std::collections::BTreeMap;
use std::sync::Arc;

use tandem_engine::checks::{SeqState, check_step, fits_context};
use tandem_engine::{
    AdapterId, Capabilities, Engine, EngineError, EngineFactory, Fork, Input, Kind, KvSnapshot, KvType,
    LayerKv, Logits, Memory, Row, RowOut, SeqBytes, SeqId, Ticket, Want, Which,
};
use tandem_kernels::kv::{self, KV_BLOCK, KvLayout};
use tandem_kernels::team::Team;
use tandem_model::Weights;
use tandem_model::decoder::{Decoder, Mixer};

use crate::blocks::{BlockId, Blocks, blocks_for};
use crate::forward::{Forward, Part};
use crate::lower::{lower, packed_bytes, supports};
use crate::memory::available_memory;
use crate::turns::{Ropes, Turns};

/// Told the share of loading that is done, from 0 to 1.
pub type LoadProgress = Box<dyn FnMut(f32) + Send>;

/// What float weights are quantized to at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quant {
    /// 4-bit blocks of 32; the head at 8 bits.
    Q4,
    /// 8-bit blocks of 32.
    Q8,
}

/// How to run a model on the CPU.
#[derive(Debug, Clone)]
pub struct CpuOptions {
    /// Threads; `None` for as many as the machine runs at once.
    pub threads: Option<usize>,
    /// Longest sequence in tokens; `None` for what the checkpoint says.
    pub context: Option<usize>,
    /// Round activations to 8 bits before products with quantized weights (fast), or keep them f32 (exact).
    pub quantize_activations: bool,
    /// Number format of the KV cache.
    pub kv: KvType,
    /// Quantize float weights at load.
    pub quant: Option<Quant>,
    /// Most bytes for weights, KV and working memory together; `None` for what the system has available.
    pub memory_budget: Option<u64>,
    /// Most tokens in a step.
    pub max_step_tokens: usize,
    /// Most sequences in a step.
    pub max_batch: usize,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            threads: None,
            context: None,
            quantize_activations: true,
            kv: KvType::F16,
            quant: None,
            memory_budget: None,
            max_step_tokens: 512,
            max_batch: 64,
        }
    }
}

impl CpuOptions {
    /// f32 activations and KV: as the weights are, nothing rounded on top.
    #[must_use]
    pub fn exact(mut self) -> Self {
        self.quantize_activations = false;
        self.kv = KvType::F32;
        self
    }
}

/// Builds the CPU engine on its actor's thread.
pub struct CpuFactory {
    decoder: Decoder,
    weights: Arc<Weights>,
    options: CpuOptions,
    progress: LoadProgress,
}

impl CpuFactory {
    /// A factory for one checkpoint.
    pub fn new(decoder: Decoder, weights: Arc<Weights>, options: CpuOptions, progress: LoadProgress) -> Self {
        Self { decoder, weights, options, progress }
    }
}

impl EngineFactory for CpuFactory {
    fn build(&mut self) -> Result<Box<dyn Engine>, EngineError> {
        let weights = Arc::clone(&self.weights);
        Ok(Box::new(CpuEngine::load(&self.decoder, weights, &self.options, &mut self.progress)?))
    }
}

#[derive(Debug)]
struct Sequence {
    max_len: usize,
    tokens: Vec<u32>,
    blocks: Vec<BlockId>,
    turns: Arc<Turns>,
    sampled: Option<u32>,
}

/// A model on the CPU.
pub struct CpuEngine {
    capabilities: Capabilities,
    weights: Arc<Weights>,
    weight_bytes: u64,
    ropes: Ropes,
    kv_type: KvType,
    forward: Forward,
    blocks: Blocks,
    sequences: BTreeMap<SeqId, Sequence>,
    outputs: BTreeMap<Ticket, Vec<RowOut>>,
    opened: u64,
    submitted: u64,
}

impl CpuEngine {
    /// Packs the weights. Memory is checked before it is taken.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] for a feature or option this engine does not have, [`EngineError::OutOfMemory`] with
    /// the numbers, [`EngineError::Model`] for a checkpoint that does not hold together.
    pub fn load(
        decoder: &Decoder,
        weights: Arc<Weights>,
        options: &CpuOptions,
        progress: &mut LoadProgress,
    ) -> Result<Self, EngineError> {
        let widths = supports(decoder)?;
        for weight in decoder.weight_refs() {
            weights.matrix(weight)?;
        }
        let context = options.context.unwrap_or(decoder.max_context);
        fits_context(context, decoder.max_context)?;
        let threads =
            options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let team = Team::new(threads).map_err(|error| EngineError::Device(error.to_string()))?;

        let layouts = kv_layouts(decoder, options.kv);
        let kv_bytes_per_token = layouts.iter().map(|l| l.block_bytes() / KV_BLOCK).sum::<usize>() as u64;
        let weight_bytes = packed_bytes(decoder, &weights, options.quant)?;
        let scratch = Forward::scratch_bytes(decoder, widths, options.max_step_tokens);
        let one_sequence = kv_bytes_per_token * context.next_multiple_of(KV_BLOCK) as u64;
        let available = options.memory_budget.or_else(available_memory).unwrap_or(u64::MAX);
        let needed = weight_bytes + scratch + one_sequence;
        if needed > available {
            return Err(EngineError::OutOfMemory {
                what: format!(
                    "this model ({weight_bytes} bytes of weights, {one_sequence} of KV for a context of {context}, \
                     {scratch} of working memory)"
                ),
                needed,
                available,
                hint: "shorten --context, quantize with --quant q4, take a smaller model or raise --memory-budget".into(),
            });
        }
        let (model, ropes) = lower(decoder, &weights, &team, options.quant, progress)?;
        let capabilities = Capabilities {
            engine: "cpu".into(),
            device: format!("{threads} threads, {} kernels", team.path().name()),
            kind: Kind::Dynamic { max_step_tokens: options.max_step_tokens },
            context,
            vocab_size: decoder.vocab_size,
            max_batch: options.max_batch,
            exact_fork: true,
            exact_truncate: true,
            snapshots: true,
            batch_invariant: true,
            overlaps: false,
            kv_bytes_per_token,
        };
        Ok(Self {
            capabilities,
            weight_bytes,
            ropes: Ropes::new(ropes),
            kv_type: options.kv,
            blocks: Blocks::new(layouts, available - weight_bytes - scratch),
            forward: Forward::new(model, Arc::clone(&weights), widths, team, options.quantize_activations),
            weights,
            sequences: BTreeMap::new(),
            outputs: BTreeMap::new(),
            opened: 0,
            submitted: 0,
        })
    }

    fn seq(&self, seq: SeqId) -> Result<&Sequence, EngineError> {
        self.sequences.get(&seq).ok_or(EngineError::UnknownSequence(seq))
    }

    fn insert(&mut self, max_len: usize, turns: Arc<Turns>, tokens: Vec<u32>, blocks: Vec<BlockId>) -> SeqId {
        self.opened += 1;
        let sequence = Sequence { max_len, tokens, blocks, turns, sampled: None };
        self.sequences.insert(SeqId(self.opened), sequence);
        SeqId(self.opened)
    }

    fn check_max_len(&self, len: usize, max_len: usize) -> Result<(), EngineError> {
        fits_context(max_len, self.capabilities.context)?;
        fits_context(len, max_len)
    }

    /// Blocks that feeding a row takes: new ones, and a copy of a last one that others hold too.
    fn blocks_needed(&self, sequence: &Sequence, count: usize) -> usize {
        let new = blocks_for(sequence.tokens.len() + count) - sequence.blocks.len();
        new + usize::from(self.writes_into_shared(sequence))
    }

    fn writes_into_shared(&self, sequence: &Sequence) -> bool {
        let partial = !sequence.tokens.len().is_multiple_of(KV_BLOCK);
        partial && sequence.blocks.last().is_some_and(|block| self.blocks.is_shared(*block))
    }

    /// Appends tokens and the blocks they fill, which have been reserved.
    fn grow(&mut self, seq: SeqId, tokens: &[u32]) -> Result<(), EngineError> {
        let shared = self.writes_into_shared(self.seq(seq)?);
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        if let (true, Some(last)) = (shared, sequence.blocks.last_mut()) {
            *last = self.blocks.copy_on_write(*last, sequence.tokens.len() % KV_BLOCK);
        }
        sequence.tokens.extend(tokens);
        while sequence.blocks.len() < blocks_for(sequence.tokens.len()) {
            sequence.blocks.push(self.blocks.take());
        }
        Ok(())
    }

    /// Computes the rows of a step that has been checked and whose sequences have grown.
    fn run(&mut self, rows: &[Row], counts: &[usize]) -> Result<Vec<RowOut>, EngineError> {
        let mut parts = Vec::with_capacity(rows.len());
        for (row, &count) in rows.iter().zip(counts) {
            let Sequence { tokens, blocks, turns, .. } =
                self.sequences.get(&row.seq).ok_or(EngineError::UnknownSequence(row.seq))?;
            let logits = match row.want {
                Want::Nothing => 0,
                Want::Sample(_) | Want::Logits(Which::Last) => 1,
                Want::Logits(Which::All) => count,
            };
            parts.push(Part { tokens, count, blocks, logits, ropes: &turns.tables });
        }
        self.forward.run(&parts, &mut self.blocks);
        let wanted: Vec<usize> = parts.iter().map(|part| part.logits).collect();
        let mut logits = self.forward.logits();
        let vocab = self.capabilities.vocab_size;
        let mut outputs = Vec::with_capacity(rows.len());
        for (row, wanted) in rows.iter().zip(wanted) {
            let sequence = self.sequences.get_mut(&row.seq).ok_or(EngineError::UnknownSequence(row.seq))?;
            let (mine, rest) = logits.split_at(wanted * vocab);
            logits = rest;
            let sampled = match &row.want {
                Want::Sample(spec) => self.forward.sample(spec, mine, &sequence.tokens),
                _ => None,
            };
            sequence.sampled = sampled.as_ref().map(|sampled| sampled.token);
            outputs.push(match (&row.want, sampled) {
                (Want::Nothing, _) => RowOut::Nothing,
                (Want::Logits(_), _) => RowOut::Logits(Logits { vocab, values: mine.to_vec() }),
                (Want::Sample(_), Some(sampled)) => RowOut::Sampled(sampled),
                (Want::Sample(_), None) => RowOut::Failed(EngineError::NotFinite(row.seq)),
            });
        }
        Ok(outputs)
    }

    fn check_snapshot(&self, snapshot: &KvSnapshot, turns: &Turns) -> Result<(), EngineError> {
        snapshot.check_origin(self.weights.hash(), &turns.fingerprint)?;
        let vocab = self.capabilities.vocab_size;
        if let Some(&token) = snapshot.tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(EngineError::TokenOutOfRange { token, vocab });
        }
        let mismatch = |field: String, expected: String, found: String| {
            if expected == found {
                Ok(())
            } else {
                Err(EngineError::SnapshotMismatch { field, expected, found })
            }
        };
        let layouts = self.blocks.layers();
        mismatch("layers".into(), layouts.len().to_string(), snapshot.layers.len().to_string())?;
        for (i, (layer, layout)) in snapshot.layers.iter().zip(layouts).enumerate() {
            let LayerKv { start, length, kv_heads, head_dim, dtype, k, v } = layer;
            let bytes = snapshot.tokens.len() * layout.row_bytes();
            for (field, expected, found) in [
                ("start", 0, *start),
                ("length", snapshot.tokens.len(), *length),
                ("kv_heads", layout.kv_heads, *kv_heads),
                ("head_dim", layout.head_dim, *head_dim),
                ("bytes of k", bytes, k.len()),
                ("bytes of v", bytes, v.len()),
            ] {
                mismatch(format!("{field} of layer {i}"), expected.to_string(), found.to_string())?;
            }
            mismatch(format!("dtype of layer {i}"), self.kv_type.name().into(), dtype.name().into())?;
        }
        Ok(())
    }
}

fn kv_layouts(decoder: &Decoder, kv: KvType) -> Vec<KvLayout> {
    let dtype = match kv {
        KvType::F16 => kv::KvType::F16,
        KvType::F32 => kv::KvType::F32,
    };
    let layouts = decoder.layers.iter().map(|layer| {
        let Mixer::Attention(attention) = &layer.mixer;
        KvLayout { kv_heads: attention.kv_heads, head_dim: attention.head_dim, dtype }
    });
    layouts.collect()
}

impl Engine for CpuEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn open(&mut self, max_len: usize, adapter: Option<AdapterId>) -> Result<SeqId, EngineError> {
        if adapter.is_some() {
            let (engine, feature) = ("cpu".into(), "adapters".into());
            return Err(EngineError::Unsupported {
                engine,
                feature,
                hint: "merge the adapter into the weights".into(),
            });
        }
        self.check_max_len(0, max_len)?;
        let turns = self.ropes.turns(max_len);
        Ok(self.insert(max_len, turns, Vec::new(), Vec::new()))
    }

    fn len(&self, seq: SeqId) -> Result<usize, EngineError> {
        Ok(self.seq(seq)?.tokens.len())
    }

    fn submit(&mut self, rows: &[Row]) -> Result<Ticket, EngineError> {
        check_step(&self.capabilities, rows, |seq| {
            let sequence = self.sequences.get(&seq)?;
            let (len, max_len) = (sequence.tokens.len(), sequence.max_len);
            Some(SeqState { len, max_len, sampled: sequence.sampled.is_some() })
        })?;
        let mut fed = Vec::with_capacity(rows.len());
        let mut needed = 0;
        for row in rows {
            let sequence = self.seq(row.seq)?;
            let tokens = match &row.input {
                Input::Tokens(tokens) => tokens.clone(),
                Input::PreviousSample => sequence.sampled.into_iter().collect(),
            };
            needed += self.blocks_needed(sequence, tokens.len());
            fed.push(tokens);
        }
        self.blocks.reserve(needed)?;
        for (row, tokens) in rows.iter().zip(&fed) {
            self.grow(row.seq, tokens)?;
        }
        let counts: Vec<usize> = fed.iter().map(Vec::len).collect();
        let outputs = self.run(rows, &counts)?;
        self.submitted += 1;
        self.outputs.insert(Ticket(self.submitted), outputs);
        Ok(Ticket(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<RowOut>, EngineError> {
        self.outputs.remove(&ticket).ok_or(EngineError::UnknownTicket(ticket))
    }

    fn fork(&mut self, seq: SeqId, at: usize, max_len: usize) -> Result<Fork, EngineError> {
        let source = self.seq(seq)?;
        let len = source.tokens.len();
        let tokens = source.tokens.get(..at).ok_or(EngineError::BeyondEnd { seq, at, len })?.to_vec();
        self.check_max_len(at, max_len)?;
        let turns = self.ropes.turns(max_len);
        // Keys are cached after rope: under other factors they would be other keys.
        if at > 0 && turns.fingerprint != source.turns.fingerprint {
            return Ok(Fork::Inexact);
        }
        let blocks = source.blocks[..blocks_for(at)].to_vec();
        blocks.iter().for_each(|block| self.blocks.hold(*block));
        Ok(Fork::Exact(self.insert(max_len, turns, tokens, blocks)))
    }

    fn truncate(&mut self, seq: SeqId, len: usize) -> Result<bool, EngineError> {
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        if len > sequence.tokens.len() {
            return Err(EngineError::BeyondEnd { seq, at: len, len: sequence.tokens.len() });
        }
        sequence.tokens.truncate(len);
        sequence.sampled = None;
        for block in sequence.blocks.drain(blocks_for(len)..) {
            self.blocks.give_back(block);
        }
        Ok(true)
    }

    fn close(&mut self, seq: SeqId) -> Result<(), EngineError> {
        let sequence = self.sequences.remove(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        sequence.blocks.iter().for_each(|block| self.blocks.give_back(*block));
        Ok(())
    }

    fn export(&mut self, seq: SeqId) -> Result<KvSnapshot, EngineError> {
        let Sequence { tokens, blocks, turns, .. } = self.seq(seq)?;
        let mut layers = Vec::with_capacity(self.blocks.layers().len());
        for (i, layout) in self.blocks.layers().iter().enumerate() {
            let row = layout.row_bytes();
            let (mut k, mut v) = (vec![0; row * tokens.len()], vec![0; row * tokens.len()]);
            for (at, (k, v)) in k.chunks_exact_mut(row).zip(v.chunks_exact_mut(row)).enumerate() {
                layout.export(self.blocks.part(i, blocks[at / KV_BLOCK]), at % KV_BLOCK, k, v);
            }
            let KvLayout { kv_heads, head_dim, .. } = *layout;
            layers.push(LayerKv {
                start: 0,
                length: tokens.len(),
                kv_heads,
                head_dim,
                dtype: self.kv_type,
                k,
                v,
            });
        }
        let (model, rope) = (self.weights.hash().to_owned(), turns.fingerprint.clone());
        Ok(KvSnapshot { model, adapter: None, rope, tokens: tokens.clone(), layers })
    }

    fn import(&mut self, snapshot: &KvSnapshot, max_len: usize) -> Result<SeqId, EngineError> {
        self.check_max_len(snapshot.tokens.len(), max_len)?;
        let turns = self.ropes.turns(max_len);
        self.check_snapshot(snapshot, &turns)?;
        let count = blocks_for(snapshot.tokens.len());
        self.blocks.reserve(count)?;
        let blocks: Vec<BlockId> = (0..count).map(|_| self.blocks.take()).collect();
        for (i, layer) in snapshot.layers.iter().enumerate() {
            let layout = self.blocks.layers()[i];
            let rows = layer.k.chunks_exact(layout.row_bytes()).zip(layer.v.chunks_exact(layout.row_bytes()));
            for (at, (k, v)) in rows.enumerate() {
                if let [part] =
                    self.blocks.parts_mut(i, std::iter::once(blocks[at / KV_BLOCK])).as_mut_slice()
                {
                    layout.import(part, at % KV_BLOCK, k, v);
                }
            }
        }
        Ok(self.insert(max_len, turns, snapshot.tokens.clone(), blocks))
    }

    fn memory(&self) -> Memory {
        let (exclusive, shared, free) = self.blocks.counts();
        let block = self.blocks.block_bytes();
        Memory {
            weights: self.weight_bytes,
            kv_exclusive: exclusive * block,
            kv_shared: shared * block,
            kv_free: free * block,
            kv_limit: self.blocks.limit_bytes(),
            scratch: self.forward.held_bytes(),
        }
    }

    fn sequence_bytes(&self, seq: SeqId) -> Result<SeqBytes, EngineError> {
        let blocks = &self.seq(seq)?.blocks;
        let shared = blocks.iter().filter(|block| self.blocks.is_shared(**block)).count() as u64;
        let block = self.blocks.block_bytes();
        Ok(SeqBytes { exclusive: (blocks.len() as u64 - shared) * block, shared: shared * block })
    }
}
