//! One step: a ragged batch of tokens through the layers.
//!
//! The tokens of all rows lie one after the other in one matrix, `[tokens, hidden]`. Everything but attention treats
//! its lines alike, whichever sequence they belong to; attention gets the rows' positions and blocks. Each operation
//! forks over the thread team and joins before the next.

use std::ops::Range;
use std::sync::Arc;

use tandem_engine::{SampleSpec, Sampled, sampler};
use tandem_kernels::activations::Activations;
use tandem_kernels::attention::{AttentionRow, AttentionShape, attention};
use tandem_kernels::elementwise;
use tandem_kernels::kv::{KV_BLOCK, KvWrite, write_kv};
use tandem_kernels::logits::argmax;
use tandem_kernels::matrix::{Mode, gate_up, matmul, matmul_each};
use tandem_kernels::norm;
use tandem_kernels::rope::{RopeTable, Rotations, rope};
use tandem_kernels::rows::Rows;
use tandem_kernels::team::Team;
use tandem_model::Weights;
use tandem_model::decoder::Decoder;

use crate::blocks::{BlockId, Blocks};
use crate::lower::{Attention, Layer, Linear, Mlp, Model, Norm, QkNorm, Widths};

/// One sequence's part of a step.
pub(crate) struct Part<'a> {
    /// Its whole history, the new tokens included.
    pub tokens: &'a [u32],
    /// How many of them are new.
    pub count: usize,
    /// Its blocks, which have room for the new tokens and are its own where these will be written.
    pub blocks: &'a [BlockId],
    /// For how many of the last new tokens logits are wanted.
    pub logits: usize,
    /// What fixes its angles, by the model's ropes.
    pub ropes: &'a [RopeTable],
}

/// What all layers need to know of a step.
struct Step<'a> {
    parts: &'a [Part<'a>],
    tokens: usize,
    /// By the model's ropes.
    rotations: Vec<Rotations>,
    /// In ascending order of blocks.
    writes: Vec<Write>,
}

/// New tokens that go to one block.
struct Write {
    block: BlockId,
    slot: usize,
    /// Lines of the step's matrices.
    lines: Range<usize>,
}

/// The network and the working memory of a step.
pub(crate) struct Forward {
    model: Model,
    weights: Arc<Weights>,
    team: Team,
    quantize: bool,
    widths: Widths,
    /// The residual stream, `[tokens, hidden]`.
    x: Vec<f32>,
    /// Normed input of a projection.
    normed: Activations,
    /// Queries, keys and values side by side, `[tokens, q + 2 kv]`.
    qkv: Vec<f32>,
    /// Output of attention.
    attended: Activations,
    /// Output of the gated half of the MLP.
    gated: Activations,
    /// What a block adds to the residual stream, where it is not added at once.
    added: Vec<f32>,
    /// `[wanted, vocab]`.
    logits: Vec<f32>,
}

impl Forward {
    pub(crate) fn new(
        model: Model,
        weights: Arc<Weights>,
        widths: Widths,
        team: Team,
        quantize: bool,
    ) -> Self {
        Self {
            weights,
            team,
            quantize,
            widths,
            x: Vec::new(),
            normed: Activations::new(model.hidden),
            qkv: Vec::new(),
            attended: Activations::new(widths.q),
            gated: Activations::new(widths.intermediate),
            added: Vec::new(),
            logits: Vec::new(),
            model,
        }
    }

    /// Most bytes of working memory for steps of `tokens` tokens that want few logits.
    pub(crate) fn scratch_bytes(decoder: &Decoder, widths: Widths, tokens: usize) -> u64 {
        let Widths { q, kv, intermediate } = widths;
        // Activations are held in f32 and in 8 bits with a scale and two sums per 32 values: 1.375 bytes.
        let floats = 2 * decoder.hidden_size + q + 2 * kv + 2 * (decoder.hidden_size + q + intermediate);
        (4 * floats * tokens + 4 * decoder.vocab_size) as u64
    }

    /// Bytes of working memory held now.
    pub(crate) fn held_bytes(&self) -> u64 {
        let floats = [&self.x, &self.qkv, &self.added, &self.logits].map(Vec::capacity).iter().sum::<usize>();
        let activations =
            [&self.normed, &self.attended, &self.gated].map(Activations::bytes).iter().sum::<usize>();
        (4 * floats + activations) as u64
    }

    /// Writes the new tokens' keys and values and computes the wanted logits.
    pub(crate) fn run(&mut self, parts: &[Part<'_>], blocks: &mut Blocks) {
        let mut wanted = Vec::new();
        let mut positions = Vec::new();
        let mut writes = Vec::new();
        for part in parts {
            let (line, first) = (positions.len(), part.tokens.len() - part.count);
            positions.extend(first..part.tokens.len());
            wanted.extend(line + part.count - part.logits..line + part.count);
            push_writes(part, line, first, &mut writes);
        }
        writes.sort_unstable_by_key(|write| write.block);
        let step = Step { parts, tokens: positions.len(), rotations: rotations(parts), writes };

        self.embed(&step);
        let layers = std::mem::take(&mut self.model.layers);
        for (i, layer) in layers.iter().enumerate() {
            self.mix(i, layer, &step, blocks);
            self.feed_forward(layer);
        }
        self.model.layers = layers;
        self.project_logits(&wanted);
    }

    /// The logits that the last step wanted, `[wanted, vocab]`, in order of the parts.
    pub(crate) fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// As [`sampler::sample`]; the largest logit, where nothing else is asked for, is found by the whole team.
    pub(crate) fn sample(&self, spec: &SampleSpec, logits: &[f32], history: &[u32]) -> Option<Sampled> {
        if !spec.is_argmax() {
            return sampler::sample(spec, logits, history);
        }
        let best = argmax(&self.team, logits).filter(|best| logits[*best].is_finite())?;
        Some(Sampled { token: u32::try_from(best).ok()?, logprob: None, top: Vec::new() })
    }

    fn embed(&mut self, step: &Step<'_>) {
        let Model { hidden, embedding, embedding_scale, .. } = &self.model;
        self.x.resize(step.tokens * hidden, 0.0);
        let table =
            self.weights.matrix(embedding).expect("the embedding was read when the model was lowered");
        let new = step.parts.iter().flat_map(|part| &part.tokens[part.tokens.len() - part.count..]);
        for (token, x) in new.zip(self.x.chunks_exact_mut(*hidden)) {
            table.row_f32(*token as usize, x);
            if *embedding_scale != 1.0 {
                x.iter_mut().for_each(|x| *x *= embedding_scale);
            }
        }
    }

    /// The attention half of a layer.
    fn mix(&mut self, index: usize, layer: &Layer, step: &Step<'_>, blocks: &mut Blocks) {
        let Attention { heads, kv_heads, head_dim, q, k, v, o, qk_norm, rope: table, window, scale, softcap } =
            &layer.attention;
        self.norm(layer.mixer_pre_norm.as_ref(), [q, k, v]);
        let Widths { q: q_width, kv: kv_width, .. } = self.widths;
        let stride = q_width + 2 * kv_width;
        self.qkv.resize(step.tokens * stride, 0.0);
        let parts = [(q, 0), (k, q_width), (v, q_width + kv_width)];
        project_each(&self.team, &parts, &self.normed, &mut self.qkv, stride);
        if let Some(QkNorm { q, k }) = qk_norm {
            for (norm, offset, heads) in [(q, 0, *heads), (k, q_width, *kv_heads)] {
                norm::rms_norm_columns(
                    &self.team,
                    &mut self.qkv,
                    stride,
                    offset..offset + heads * head_dim,
                    &norm.weight,
                    norm.eps,
                );
            }
        }
        if let Some(table) = table {
            // Keys lie behind queries, so one pass turns both.
            rope(&self.team, &mut self.qkv, stride, heads + kv_heads, *head_dim, &step.rotations[*table]);
        }
        let layout = blocks.layers()[index];
        let keys = Rows::columns(&self.qkv, stride, q_width, kv_width);
        let values = Rows::columns(&self.qkv, stride, q_width + kv_width, kv_width);
        let mut slots: Vec<KvWrite<'_>> = blocks
            .parts_mut(index, step.writes.iter().map(|write| write.block))
            .into_iter()
            .zip(&step.writes)
            .map(|(block, write)| KvWrite { block, slot: write.slot, tokens: write.lines.clone() })
            .collect();
        write_kv(&self.team, &layout, keys, values, &mut slots);

        let cached: Vec<Vec<&[u8]>> = step
            .parts
            .iter()
            .map(|part| part.blocks.iter().map(|block| blocks.part(index, *block)).collect())
            .collect();
        let rows: Vec<AttentionRow<'_>> = step
            .parts
            .iter()
            .zip(&cached)
            .map(|(part, blocks)| AttentionRow {
                tokens: part.count,
                position: part.tokens.len() - part.count,
                blocks,
            })
            .collect();
        let shape =
            AttentionShape { heads: *heads, kv: layout, scale: *scale, window: *window, softcap: *softcap };
        let queries = Rows::columns(&self.qkv, stride, 0, q_width);
        self.attended.resize(step.tokens);
        attention(&self.team, &shape, queries, &rows, self.attended.values_mut());
        if self.quantize && o.matrix.format().is_quantized() {
            self.attended.quantize(&self.team);
        }
        let (post, scale) = (layer.mixer_post_norm.as_ref(), layer.residual_scale);
        add_projected(&self.team, o, &self.attended, post, scale, &mut self.x, &mut self.added);
    }

    /// The MLP half of a layer.
    fn feed_forward(&mut self, layer: &Layer) {
        let Mlp { gate, up, down, activation } = &layer.mlp;
        self.norm(layer.mlp_pre_norm.as_ref(), [gate, up]);
        let quantize = self.quantize && down.matrix.format().is_quantized();
        match (&gate.bias, &up.bias) {
            (None, None) => {
                let (team, normed) = (&self.team, &self.normed);
                gate_up(team, &gate.matrix, &up.matrix, normed, *activation, &mut self.gated, quantize);
            }
            _ => {
                let width = self.widths.intermediate;
                self.added.resize(self.normed.rows() * width, 0.0);
                self.gated.resize(self.normed.rows());
                project(&self.team, gate, &self.normed, self.gated.values_mut(), width, 0);
                project(&self.team, up, &self.normed, &mut self.added, width, 0);
                let (path, up) = (self.team.path(), &self.added);
                self.gated.fill_rows(&self.team, quantize, |row, gate| {
                    activation.gate(path, gate, &up[row * width..][..width]);
                });
            }
        }
        let (post, scale) = (layer.mlp_post_norm.as_ref(), layer.residual_scale);
        add_projected(&self.team, down, &self.gated, post, scale, &mut self.x, &mut self.added);
    }

    /// The residual stream, normed where there is a norm, as input for `consumers`.
    fn norm<const N: usize>(&mut self, norm: Option<&Norm>, consumers: [&Linear; N]) {
        let quantize = self.quantize && consumers.iter().any(|linear| linear.matrix.format().is_quantized());
        match norm {
            Some(Norm { weight, eps }) => {
                norm::rms_norm(&self.team, &self.x, weight, *eps, &mut self.normed, quantize);
            }
            None => {
                let (hidden, x) = (self.model.hidden, &self.x);
                self.normed.resize(x.len() / hidden);
                self.normed.fill_rows(&self.team, quantize, |row, out| {
                    out.copy_from_slice(&x[row * hidden..][..hidden]);
                });
            }
        }
    }

    fn project_logits(&mut self, wanted: &[usize]) {
        let Model { hidden, vocab, final_norm, head, logit_scale, logit_softcap, .. } = &self.model;
        let (path, x) = (self.team.path(), &self.x);
        self.normed.resize(wanted.len());
        let quantize = self.quantize && head.matrix.format().is_quantized();
        self.normed.fill_rows(&self.team, quantize, |row, out| {
            out.copy_from_slice(&x[wanted[row] * hidden..][..*hidden]);
            norm::rms_norm_rows(path, out, &final_norm.weight, final_norm.eps);
        });
        self.logits.resize(wanted.len() * vocab, 0.0);
        project(&self.team, head, &self.normed, &mut self.logits, *vocab, 0);
        if *logit_scale != 1.0 {
            self.logits.iter_mut().for_each(|logit| *logit *= logit_scale);
        }
        if let Some(cap) = logit_softcap {
            self.logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
        }
    }
}

/// The turns of all new tokens, one entry for each of the model's ropes.
fn rotations(parts: &[Part<'_>]) -> Vec<Rotations> {
    let mut all: Vec<Rotations> = Vec::new();
    for part in parts {
        let positions = part.tokens.len() - part.count..part.tokens.len();
        for (i, table) in part.ropes.iter().enumerate() {
            match all.get_mut(i) {
                Some(rotations) => rotations.extend(table, positions.clone()),
                None => all.push(table.rotations(positions.clone())),
            }
        }
    }
    all
}

/// Where a part's new tokens go, block by block.
fn push_writes(part: &Part<'_>, line: usize, first: usize, writes: &mut Vec<Write>) {
    let mut position = first;
    while position < part.tokens.len() {
        let end = part.tokens.len().min((position / KV_BLOCK + 1) * KV_BLOCK);
        let lines = line + position - first..line + end - first;
        writes.push(Write { block: part.blocks[position / KV_BLOCK], slot: position % KV_BLOCK, lines });
        position = end;
    }
}

/// `out[:, offset..] = W x + b`, lines of `out` being `stride` apart.
fn project(team: &Team, linear: &Linear, x: &Activations, out: &mut [f32], stride: usize, offset: usize) {
    project_each(team, &[(linear, offset)], x, out, stride);
}

/// [`project`] with several matrices at their offsets.
fn project_each<const N: usize>(
    team: &Team,
    linears: &[(&Linear, usize); N],
    x: &Activations,
    out: &mut [f32],
    stride: usize,
) {
    let weights = linears.map(|(linear, offset)| (&linear.matrix, offset));
    matmul_each(team, &weights, x, out, stride, Mode::Store);
    for (linear, offset) in linears {
        if let Some(bias) = &linear.bias {
            for line in out.chunks_exact_mut(stride) {
                line[*offset..].iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
}

/// `x += scale * post(W input + b)`.
fn add_projected(
    team: &Team,
    linear: &Linear,
    input: &Activations,
    post: Option<&Norm>,
    scale: f32,
    x: &mut [f32],
    added: &mut Vec<f32>,
) {
    let hidden = linear.matrix.rows();
    if post.is_none() && linear.bias.is_none() && scale == 1.0 {
        return matmul(team, &linear.matrix, input, x, hidden, 0, Mode::Add);
    }
    added.resize(x.len(), 0.0);
    project(team, linear, input, added, hidden, 0);
    if let Some(Norm { weight, eps }) = post {
        norm::rms_norm_columns(team, added, hidden, 0..hidden, weight, *eps);
    }
    elementwise::add_scaled(team, x, added, scale);
}
