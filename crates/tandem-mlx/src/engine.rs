//! The contract's promises around the graph.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use tandem_engine::checks::{SeqState, check_step, fits_context};
use tandem_engine::{
    AdapterId, Capabilities, Engine, EngineError, EngineFactory, Fork, Input, Kind, KvSnapshot, Logits,
    Memory, Row, RowOut, SeqBytes, SeqId, Ticket, Want, Which, sampler,
};
use tandem_model::Weights;
use tandem_model::decoder::{Decoder, Mixer, Role};

use crate::array::{Array, Dtype, Result, buffer_bytes, evaluate_async, failed};
use crate::device::{computes, device, limit};
use crate::ffi::bridge;
use crate::forward::{self, Forward, How, Part};
use crate::kernels::Kernels;
use crate::kernels::check::{self, Trial};
use crate::kv::{Kv, KvShape, capacity_for};
use crate::load::{bytes_of, compute_type};
use crate::lower::{Model, held_bytes, lower, supports};
use crate::options::{LoadProgress, MlxOptions};
use crate::sequence::{Choices, Sequence, Token, ids, known};
use crate::snapshot;
use crate::turns::{Ropes, Turns};

/// Builds the MLX engine on its actor's thread.
pub struct MlxFactory {
    decoder: Decoder,
    weights: Arc<Weights>,
    options: MlxOptions,
    progress: LoadProgress,
}

impl MlxFactory {
    /// A factory for one checkpoint.
    pub fn new(decoder: Decoder, weights: Arc<Weights>, options: MlxOptions, progress: LoadProgress) -> Self {
        Self { decoder, weights, options, progress }
    }
}

impl EngineFactory for MlxFactory {
    fn build(&mut self) -> Result<Box<dyn Engine>> {
        let weights = Arc::clone(&self.weights);
        Ok(Box::new(MlxEngine::load(&self.decoder, weights, &self.options, &mut self.progress)?))
    }
}

/// A model on MLX's device.
pub struct MlxEngine {
    capabilities: Capabilities,
    weights: Arc<Weights>,
    weight_bytes: u64,
    model: Model,
    ropes: Ropes,
    shape: KvShape,
    kv_limit: u64,
    /// Whether small operations are compiled into one: on a GPU. On a CPU that would need a compiler at run time.
    fuse: bool,
    kernels: Kernels,
    sequences: BTreeMap<SeqId, Sequence>,
    outstanding: BTreeMap<Ticket, Step>,
    /// What MLX kept beside weights and caches when the last step was collected.
    scratch: u64,
    opened: u64,
    submitted: u64,
}

/// A submitted step: its rows' sequences and what they will give.
type Step = Vec<(SeqId, Outcome)>;

enum Outcome {
    /// Known when it was submitted.
    Ready(RowOut),
    /// Logits `[lines, vocab]` in f32, and how many lines.
    Logits(Array, usize),
    /// A line of what the device chose.
    Chosen(Rc<Choices>, usize),
}

impl MlxEngine {
    /// Loads the weights. Memory is checked before it is taken.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] for a feature this engine does not have, [`EngineError::OutOfMemory`] with the numbers,
    /// [`EngineError::Model`] for a checkpoint that does not hold together, [`EngineError::Device`] if MLX is of another
    /// version or fails.
    pub fn load(
        decoder: &Decoder,
        weights: Arc<Weights>,
        options: &MlxOptions,
        progress: &mut LoadProgress,
    ) -> Result<Self> {
        supports(decoder)?;
        let mut formats = Vec::new();
        for used in decoder.weight_uses() {
            let matrix = weights.matrix(used.weight)?;
            if used.role == Role::Matrix {
                formats.push(matrix.format);
            }
        }
        let context = options.context.unwrap_or(decoder.max_context);
        fits_context(context, decoder.max_context)?;
        let device = device()?;
        computes()?;
        let float = compute_type(&formats, options.exact);
        let shape = KvShape { layers: kv_layers(decoder), float };
        let weight_bytes = held_bytes(decoder, &weights, options.quant, float)?;
        let scratch = scratch_bytes(decoder, options.max_step_tokens, bytes_of(float), device.gpu);
        // With the buffers of half the size that the last growth copies from.
        let one_sequence = shape.bytes(capacity_for(context, 0, context)) / 2 * 3;
        let available = options.memory_budget.or(device.usable.filter(|_| device.gpu)).unwrap_or(u64::MAX);
        let needed = weight_bytes.saturating_add(scratch).saturating_add(one_sequence);
        if needed > available {
            return Err(EngineError::OutOfMemory {
                what: format!(
                    "this model on the mlx engine ({weight_bytes} bytes of weights, {one_sequence} of KV for a context of \
                     {context}, {scratch} of working memory)"
                ),
                needed,
                available,
                hint: "shorten --context, quantize with --quant q4, take a smaller model or raise --memory-budget".into(),
            });
        }
        if device.gpu {
            limit(available, available.min(device.usable.unwrap_or(available)), scratch.max(available / 16))?;
        }
        let (model, ropes) = lower(decoder, &weights, float, options.quant, progress)?;
        bridge::clear_cache().map_err(|error| failed(&error))?;
        let weight_bytes = buffer_bytes(model.arrays())?;
        let kv_limit = available.saturating_sub(weight_bytes).saturating_sub(scratch);
        let ropes = Ropes::new(ropes, float)?;
        let chosen = check::choose(&Trial {
            model: &model,
            shape: &shape,
            turns: ropes.turns(context)?,
            architecture: device.architecture.as_deref(),
            choice: options.kernels,
            max_batch: options.max_batch,
            context,
        });
        let check::Chosen { kernels, report } = chosen;
        let name = device.name.unwrap_or_else(|| if device.gpu { "GPU" } else { "CPU" }.to_owned());
        Ok(Self {
            capabilities: Capabilities {
                engine: "mlx".into(),
                device: format!("{name}, MLX {}{report}", device.version),
                kind: Kind::Dynamic { max_step_tokens: options.max_step_tokens },
                context,
                vocab_size: decoder.vocab_size,
                max_batch: options.max_batch,
                exact_fork: true,
                exact_truncate: true,
                snapshots: true,
                batch_invariant: false,
                overlaps: true,
                kv_bytes_per_token: shape.bytes_per_token(),
            },
            weights,
            weight_bytes,
            model,
            ropes,
            shape,
            kv_limit,
            fuse: device.gpu,
            kernels,
            sequences: BTreeMap::new(),
            outstanding: BTreeMap::new(),
            scratch: 0,
            opened: 0,
            submitted: 0,
        })
    }

    fn seq(&self, seq: SeqId) -> Result<&Sequence> {
        self.sequences.get(&seq).ok_or(EngineError::UnknownSequence(seq))
    }

    fn insert(&mut self, max_len: usize, turns: Rc<Turns>, tokens: Vec<Token>, kv: Option<Rc<Kv>>) -> SeqId {
        self.opened += 1;
        let sequence = Sequence { max_len, tokens, kv, turns, sampled: None, lost: false };
        self.sequences.insert(SeqId(self.opened), sequence);
        SeqId(self.opened)
    }

    fn check_max_len(&self, len: usize, max_len: usize) -> Result<()> {
        fits_context(max_len, self.capabilities.context)?;
        fits_context(len, max_len)
    }

    /// KV bytes `(held by one sequence, held by several)`, each buffer counted once.
    fn kv_bytes(&self) -> (u64, u64) {
        let mut seen = Vec::new();
        let (mut exclusive, mut shared) = (0, 0);
        for kv in self.sequences.values().filter_map(|sequence| sequence.kv.as_ref()) {
            let bytes = self.shape.bytes(kv.capacity);
            if Rc::strong_count(kv) == 1 {
                exclusive += bytes;
            } else if !seen.contains(&Rc::as_ptr(kv)) {
                seen.push(Rc::as_ptr(kv));
                shared += bytes;
            }
        }
        (exclusive, shared)
    }

    /// # Errors
    /// [`EngineError::OutOfMemory`] if `more` bytes of KV do not fit the budget.
    fn check_kv(&self, more: u64) -> Result<()> {
        let (exclusive, shared) = self.kv_bytes();
        let available = self.kv_limit.saturating_sub(exclusive + shared);
        if more > available {
            return Err(EngineError::OutOfMemory {
                what: "the KV cache".into(),
                needed: more,
                available,
                hint: "close a sequence, shorten the context or raise --memory-budget".into(),
            });
        }
        Ok(())
    }

    /// The capacity of the new buffers that a sequence needs to be fed `count` tokens: none if its own have room.
    fn new_capacity(sequence: &Sequence, count: usize) -> Option<usize> {
        let needed = sequence.tokens.len() + count;
        let old = sequence.kv.as_ref().map_or(0, |kv| kv.capacity);
        let own = sequence.kv.as_ref().is_some_and(|kv| Rc::strong_count(kv) == 1);
        (!own || old < needed).then(|| capacity_for(needed, if own { old } else { 0 }, sequence.max_len))
    }

    /// Takes the sequences' buffers for a step, with room for the new tokens. All is checked; only MLX can fail.
    fn parts(&mut self, rows: &[Row], fed: &[Vec<Token>]) -> Result<Vec<Part>> {
        for (row, tokens) in rows.iter().zip(fed) {
            let sequence = self.seq(row.seq)?;
            if let Some(capacity) = Self::new_capacity(sequence, tokens.len()) {
                let kv = self.shape.with_room(sequence.kv.as_deref(), sequence.tokens.len(), capacity)?;
                if let Some(sequence) = self.sequences.get_mut(&row.seq) {
                    sequence.kv = Some(Rc::new(kv));
                }
            }
        }
        let mut parts = Vec::with_capacity(rows.len());
        for (row, tokens) in rows.iter().zip(fed) {
            let sequence = self.sequences.get_mut(&row.seq).ok_or(EngineError::UnknownSequence(row.seq))?;
            let kv = sequence.kv.take().and_then(|kv| Rc::try_unwrap(kv).ok());
            parts.push(Part {
                count: tokens.len(),
                position: sequence.tokens.len(),
                kv: kv
                    .ok_or_else(|| EngineError::Device("a sequence's buffers are held elsewhere".into()))?,
                turns: Rc::clone(&sequence.turns),
                logits: match row.want {
                    Want::Nothing => 0,
                    Want::Sample(_) | Want::Logits(Which::Last) => 1,
                    Want::Logits(Which::All) => tokens.len(),
                },
            });
        }
        Ok(parts)
    }

    /// Builds and starts the graph of a step.
    fn start(&self, rows: &[Row], fed: &[Vec<Token>], parts: &mut [Part]) -> Result<Step> {
        let how = How { fuse: self.fuse, kernels: &self.kernels };
        let Forward { logits, last } = forward::run(&self.model, parts, &ids(fed)?, how)?;
        let lines = parts.iter().map(|part| part.logits).sum();
        let greedy = |row: &Row| matches!(&row.want, Want::Sample(spec) if spec.is_argmax());
        let choices = match &logits {
            Some(logits) if rows.iter().any(greedy) => {
                Some(Rc::new(Choices::of(logits, lines, self.model.vocab, &self.kernels)?))
            }
            _ => None,
        };
        let mut line = 0;
        let mut step = Vec::with_capacity(rows.len());
        for (row, part) in rows.iter().zip(parts.iter()) {
            let outcome = match (&logits, &choices) {
                (Some(_), Some(choices)) if greedy(row) => Outcome::Chosen(Rc::clone(choices), line),
                (Some(logits), _) if part.logits > 0 => {
                    let vocab = self.model.vocab;
                    let mine = logits.slice([line, 0], [line + part.logits, vocab])?.as_type(Dtype::F32)?;
                    Outcome::Logits(mine, part.logits)
                }
                _ => Outcome::Ready(RowOut::Nothing),
            };
            step.push((row.seq, outcome));
            line += part.logits;
        }
        let wanted = step.iter().filter_map(|(_, outcome)| match outcome {
            Outcome::Logits(logits, _) => Some(logits),
            _ => None,
        });
        let chosen = choices.iter().flat_map(|choices| choices.arrays());
        let last = Some(&last).filter(|_| logits.is_none());
        evaluate_async(
            parts.iter().flat_map(|part| part.kv.arrays()).chain(wanted).chain(chosen).chain(last),
        )?;
        Ok(step)
    }

    /// Draws, from logits brought to the host, for the rows that the device does not choose for.
    fn draw(&mut self, rows: &[Row], step: &mut Step) -> Result<()> {
        for (row, (seq, outcome)) in rows.iter().zip(step) {
            let (Want::Sample(spec), Outcome::Logits(logits, _)) = (&row.want, &*outcome) else { continue };
            let history = known(&self.seq(*seq)?.tokens)?;
            let logits = logits.read_f32(self.model.vocab)?;
            let sampled = sampler::sample(spec, &logits, &history);
            if let (Some(sampled), Some(sequence)) = (&sampled, self.sequences.get_mut(seq)) {
                sequence.sampled = Some(Token::Known(sampled.token));
            }
            let failed = RowOut::Failed(EngineError::NotFinite(*seq));
            *outcome = Outcome::Ready(sampled.map_or(failed, RowOut::Sampled));
        }
        Ok(())
    }

    /// After a failure on the device nothing is known of these sequences' keys and values.
    fn lose(&mut self, seqs: impl IntoIterator<Item = SeqId>) {
        for seq in seqs {
            if let Some(sequence) = self.sequences.get_mut(&seq) {
                (sequence.lost, sequence.kv, sequence.sampled) = (true, None, None);
            }
        }
    }

    fn answer(&mut self, seq: SeqId, outcome: Outcome) -> Result<RowOut> {
        Ok(match outcome {
            Outcome::Ready(out) => out,
            Outcome::Logits(logits, lines) => {
                let vocab = self.model.vocab;
                RowOut::Logits(Logits { vocab, values: logits.read_f32(lines * vocab)? })
            }
            Outcome::Chosen(choices, line) => {
                let (token, logit) = choices.line(line)?;
                if logit.is_finite() {
                    RowOut::Sampled(tandem_engine::Sampled { token, logprob: None, top: Vec::new() })
                } else {
                    if let Some(sequence) = self.sequences.get_mut(&seq) {
                        sequence.sampled = None;
                    }
                    RowOut::Failed(EngineError::NotFinite(seq))
                }
            }
        })
    }
}

fn kv_layers(decoder: &Decoder) -> Vec<(usize, usize)> {
    let of = |layer: &tandem_model::decoder::Layer| {
        let Mixer::Attention(attention) = &layer.mixer;
        (attention.kv_heads, attention.head_dim)
    };
    decoder.layers.iter().map(of).collect()
}

/// About what a step of `tokens` tokens needs beside weights and KV.
/// `dense`: its largest quantized matrix may be made floats.
fn scratch_bytes(decoder: &Decoder, tokens: usize, float: u64, dense: bool) -> u64 {
    let widest = decoder.layers.iter().map(|layer| {
        let Mixer::Attention(attention) = &layer.mixer;
        2 * (attention.heads + 2 * attention.kv_heads) * attention.head_dim + 3 * layer.mlp.intermediate
    });
    let values = 4 * decoder.hidden_size + widest.max().unwrap_or(0);
    let gates = decoder.layers.iter().map(|layer| 2 * layer.mlp.intermediate * decoder.hidden_size);
    let floats = if dense { gates.max().unwrap_or(0) as u64 * float } else { 0 };
    (values * tokens) as u64 * float + 8 * decoder.vocab_size as u64 + floats
}

impl Engine for MlxEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn open(&mut self, max_len: usize, adapter: Option<AdapterId>) -> Result<SeqId> {
        if adapter.is_some() {
            let (engine, feature) = ("mlx".into(), "adapters".into());
            return Err(EngineError::Unsupported {
                engine,
                feature,
                hint: "merge the adapter into the weights".into(),
            });
        }
        self.check_max_len(0, max_len)?;
        let turns = self.ropes.turns(max_len)?;
        Ok(self.insert(max_len, turns, Vec::new(), None))
    }

    fn len(&self, seq: SeqId) -> Result<usize> {
        Ok(self.seq(seq)?.tokens.len())
    }

    fn submit(&mut self, rows: &[Row]) -> Result<Ticket> {
        check_step(&self.capabilities, rows, |seq| {
            let sequence = self.sequences.get(&seq)?;
            let (len, max_len) = (sequence.tokens.len(), sequence.max_len);
            Some(SeqState { len, max_len, sampled: sequence.sampled.is_some() })
        })?;
        let mut fed = Vec::with_capacity(rows.len());
        let mut more = 0;
        for row in rows {
            let sequence = self.seq(row.seq)?;
            if sequence.lost {
                let what = format!("{:?} lost its KV in a step that failed. hint: close it", row.seq);
                return Err(EngineError::Device(what));
            }
            let tokens: Vec<Token> = match &row.input {
                Input::Tokens(tokens) => tokens.iter().map(|token| Token::Known(*token)).collect(),
                Input::PreviousSample => sequence.sampled.iter().cloned().collect(),
            };
            more +=
                Self::new_capacity(sequence, tokens.len()).map_or(0, |capacity| self.shape.bytes(capacity));
            fed.push(tokens);
        }
        self.check_kv(more)?;
        let seqs: Vec<SeqId> = rows.iter().map(|row| row.seq).collect();
        let mut parts = self.parts(rows, &fed).inspect_err(|_| self.lose(seqs.iter().copied()))?;
        let started = self.start(rows, &fed, &mut parts);
        let mut step = started.inspect_err(|_| self.lose(seqs.iter().copied()))?;
        for ((part, tokens), (seq, outcome)) in parts.into_iter().zip(fed).zip(&step) {
            if let Some(sequence) = self.sequences.get_mut(seq) {
                sequence.kv = Some(Rc::new(part.kv));
                sequence.tokens.extend(tokens);
                sequence.sampled = match outcome {
                    Outcome::Chosen(choices, line) => Some(Token::Chosen(Rc::clone(choices), *line)),
                    _ => None,
                };
            }
        }
        self.draw(rows, &mut step).inspect_err(|_| self.lose(seqs))?;
        self.submitted += 1;
        self.outstanding.insert(Ticket(self.submitted), step);
        Ok(Ticket(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<RowOut>> {
        let step = self.outstanding.remove(&ticket).ok_or(EngineError::UnknownTicket(ticket))?;
        let seqs: Vec<SeqId> = step.iter().map(|(seq, _)| *seq).collect();
        let answers = step.into_iter().map(|(seq, outcome)| self.answer(seq, outcome)).collect();
        self.scratch = bridge::cache_memory() as u64;
        let answers: Result<Vec<RowOut>> = answers;
        answers.inspect_err(|_| self.lose(seqs))
    }

    fn fork(&mut self, seq: SeqId, at: usize, max_len: usize) -> Result<Fork> {
        let source = self.seq(seq)?;
        let len = source.tokens.len();
        let tokens = source.tokens.get(..at).ok_or(EngineError::BeyondEnd { seq, at, len })?.to_vec();
        self.check_max_len(at, max_len)?;
        let turns = self.ropes.turns(max_len)?;
        // Keys are cached after rope: under other factors they would be other keys.
        if at > 0 && (source.lost || turns.fingerprint != source.turns.fingerprint) {
            return Ok(Fork::Inexact);
        }
        let kv = source.kv.as_ref().filter(|_| at > 0).map(Rc::clone);
        Ok(Fork::Exact(self.insert(max_len, turns, tokens, kv)))
    }

    fn truncate(&mut self, seq: SeqId, len: usize) -> Result<bool> {
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        if len > sequence.tokens.len() {
            return Err(EngineError::BeyondEnd { seq, at: len, len: sequence.tokens.len() });
        }
        if sequence.lost && len > 0 {
            return Ok(false);
        }
        sequence.tokens.truncate(len);
        sequence.sampled = None;
        Ok(true)
    }

    fn close(&mut self, seq: SeqId) -> Result<()> {
        self.sequences.remove(&seq).map(drop).ok_or(EngineError::UnknownSequence(seq))
    }

    fn export(&mut self, seq: SeqId) -> Result<KvSnapshot> {
        let sequence = self.seq(seq)?;
        let layers = snapshot::export(&self.shape, sequence.kv.as_deref(), sequence.tokens.len())?;
        let (model, rope) = (self.weights.hash().to_owned(), sequence.turns.fingerprint.clone());
        Ok(KvSnapshot { model, adapter: None, rope, tokens: known(&sequence.tokens)?, layers })
    }

    fn import(&mut self, snapshot: &KvSnapshot, max_len: usize) -> Result<SeqId> {
        let len = snapshot.tokens.len();
        self.check_max_len(len, max_len)?;
        let turns = self.ropes.turns(max_len)?;
        snapshot.check_origin(self.weights.hash(), &turns.fingerprint)?;
        let vocab = self.capabilities.vocab_size;
        if let Some(&token) = snapshot.tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(EngineError::TokenOutOfRange { token, vocab });
        }
        snapshot::check(&self.shape, snapshot)?;
        let kv = if len == 0 {
            None
        } else {
            let capacity = capacity_for(len, 0, max_len);
            self.check_kv(self.shape.bytes(capacity))?;
            Some(Rc::new(snapshot::import(&self.shape, snapshot, capacity)?))
        };
        let tokens = snapshot.tokens.iter().map(|token| Token::Known(*token)).collect();
        Ok(self.insert(max_len, turns, tokens, kv))
    }

    fn memory(&self) -> Memory {
        let (kv_exclusive, kv_shared) = self.kv_bytes();
        Memory {
            weights: self.weight_bytes,
            kv_exclusive,
            kv_shared,
            kv_free: 0,
            kv_limit: self.kv_limit,
            scratch: self.scratch,
        }
    }

    fn sequence_bytes(&self, seq: SeqId) -> Result<SeqBytes> {
        let Some(kv) = &self.seq(seq)?.kv else { return Ok(SeqBytes::default()) };
        let bytes = self.shape.bytes(kv.capacity);
        Ok(if Rc::strong_count(kv) == 1 {
            SeqBytes { exclusive: bytes, shared: 0 }
        } else {
            SeqBytes { exclusive: 0, shared: bytes }
        })
    }
}
