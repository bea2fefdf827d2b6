//! What a network *is*: plain data that every engine lowers into its own form.
//!
//! A `Decoder` is not a graph of operators. It names whole blocks (an attention mixer, a gated MLP) with every feature
//! that changes the mathematics as a field, so that an engine sees what it may fuse and never has to recognise a
//! pattern. Lowerings destructure these structs without `..`: a new field is then a compile error in each engine until
//! it says how it computes the feature, or refuses it by name.
//!
//! Shapes: a linear layer's weight is stored as `[out_features, in_features]`, one row per output, and computes
//! `y = W x + b`.

use std::ops::Range;

pub use crate::rope::{Rope, RopeFactors, RopeScaling};

/// A decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoder {
    /// Architecture name as the checkpoint spells it (`llama`), for messages.
    pub architecture: String,
    /// Rows of the embedding and of the head: ids run from 0 to `vocab_size - 1`.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Longest sequence the checkpoint says it handles (`max_position_embeddings`), in tokens.
    pub max_context: usize,
    /// Token embedding, `[vocab_size, hidden_size]`.
    pub embedding: WeightRef,
    /// Factor on the embedding's output (Gemma's `sqrt(hidden_size)`, Granite's `embedding_multiplier`); 1 for most.
    pub embedding_scale: f32,
    /// The blocks, first to last.
    pub layers: Vec<Layer>,
    /// Norm before the head.
    pub final_norm: Norm,
    /// Output projection, `[vocab_size, hidden_size]`; the same tensor as `embedding` where the two are tied.
    pub head: Linear,
    /// Factor on the logits (Granite divides by `logits_scaling`); 1 for most.
    pub logit_scale: f32,
    /// `cap * tanh(logit / cap)` after the head, where set.
    pub logit_softcap: Option<f32>,
}

/// One block: `x += m * post(mixer(pre(x)))`, then the same with the MLP; `m` is `residual_scale`.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Norm before the mixer.
    pub mixer_pre_norm: Option<Norm>,
    /// What mixes along the sequence.
    pub mixer: Mixer,
    /// Norm on the mixer's output, before it joins the residual stream.
    pub mixer_post_norm: Option<Norm>,
    /// Norm before the MLP.
    pub mlp_pre_norm: Option<Norm>,
    /// The feed-forward part.
    pub mlp: Mlp,
    /// Norm on the MLP's output, before it joins the residual stream.
    pub mlp_post_norm: Option<Norm>,
    /// Factor on what each half adds to the residual stream (Granite's `residual_multiplier`); 1 for most.
    pub residual_scale: f32,
}

/// What mixes information along the sequence.
#[derive(Debug, Clone, PartialEq)]
pub enum Mixer {
    /// Softmax attention with grouped key/value heads.
    Attention(Attention),
}

/// Grouped-query attention: query head `h` reads key/value head `h / (heads / kv_heads)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Query projection, `[heads * head_dim, hidden]`.
    pub q: Linear,
    /// Key projection, `[kv_heads * head_dim, hidden]`.
    pub k: Linear,
    /// Value projection, `[kv_heads * head_dim, hidden]`.
    pub v: Linear,
    /// Output projection, `[hidden, heads * head_dim]`.
    pub o: Linear,
    /// RMS norms of queries and keys before rope.
    pub qk_norm: Option<QkNorm>,
    /// Rotary position embedding; `None` for a layer without positions (SmolLM3).
    pub rope: Option<Rope>,
    /// Sliding window: a query at position `p` sees keys at `p - window + 1 ..= p`.
    pub window: Option<usize>,
    /// Factor on `q · k`, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// `cap * tanh(score / cap)` on scaled scores, where set.
    pub softcap: Option<f32>,
}

/// Norms of queries and keys.
#[derive(Debug, Clone, PartialEq)]
pub struct QkNorm {
    /// The query norm.
    pub q: Norm,
    /// The key norm.
    pub k: Norm,
    /// What one norm runs over.
    pub over: QkNormOver,
}

/// What a query or key norm runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormOver {
    /// Each head by itself (Qwen3, Gemma 3): weight `[head_dim]`.
    Head,
    /// All heads together (OLMo 2): weight `[heads * head_dim]`.
    FullWidth,
}

/// RMS norm: `x / sqrt(mean(x²) + eps) * (weight + offset)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// Weight vector.
    pub weight: WeightRef,
    /// Added to the mean square.
    pub eps: f32,
    /// Added to the weight: 1 for Gemma's `(1 + w)` norms, else 0.
    pub offset: f32,
}

/// `y = W x + b`.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear {
    /// `[out_features, in_features]`.
    pub weight: WeightRef,
    /// `[out_features]`.
    pub bias: Option<WeightRef>,
}

/// Gated MLP: `down(act(gate(x)) * up(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    /// Width between the two halves.
    pub intermediate: usize,
    /// `[intermediate, hidden]`.
    pub gate: Linear,
    /// `[intermediate, hidden]`.
    pub up: Linear,
    /// `[hidden, intermediate]`.
    pub down: Linear,
    /// On the gate.
    pub activation: Activation,
}

/// An activation function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU in its tanh approximation (`gelu_pytorch_tanh`).
    GeluTanh,
}

/// Where a weight lies: some rows of a stored tensor, in an order.
///
/// This lets fused projections, GGUF's rope order and (later) stacked experts be read in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightRef {
    /// Name of the stored tensor.
    pub tensor: String,
    /// Which of its rows; `None` for all. A vector counts as a tensor whose rows are single values.
    pub rows: Option<Range<usize>>,
    /// How logical rows map onto the stored ones.
    pub order: RowOrder,
}

/// The order of stored rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// As the engine wants them.
    Stored,
    /// GGUF's rope order for the Llama family: within each head of `head_dim` rows, the pair `(j, j + head_dim / 2)`
    /// of the half-split order is stored at `(2j, 2j + 1)`.
    RopePairs {
        /// Rows per head.
        head_dim: usize,
    },
}

impl WeightRef {
    /// A whole tensor as it is stored.
    pub fn whole(tensor: impl Into<String>) -> Self {
        Self { tensor: tensor.into(), rows: None, order: RowOrder::Stored }
    }
}

impl RowOrder {
    /// The stored row that holds logical row `row`; both count from the start of the `WeightRef`'s range.
    pub fn stored_row(self, row: usize) -> usize {
        match self {
            RowOrder::Stored => row,
            RowOrder::RopePairs { head_dim } => {
                let (head, at) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (at % half) + at / half
            }
        }
    }
}

/// One weight that a forward pass reads.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightUse<'a> {
    /// Where it lies.
    pub weight: &'a WeightRef,
    /// The shape it must have, slowest dimension first.
    pub shape: Vec<usize>,
    /// What it does.
    pub role: Role,
}

/// What a weight does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Role {
    /// Embedding, projection or head.
    Matrix,
    /// Added after a projection.
    Bias,
    /// A norm's weight.
    Norm {
        /// As [`Norm::offset`].
        offset: f32,
    },
}

impl Decoder {
    /// Every weight the network reads, in the order a forward pass meets them (the head last, also when tied).
    pub fn weight_refs(&self) -> Vec<&WeightRef> {
        self.weight_uses().into_iter().map(|used| used.weight).collect()
    }

    /// [`Decoder::weight_refs`] with the shape and role of each.
    pub fn weight_uses(&self) -> Vec<WeightUse<'_>> {
        let hidden = self.hidden_size;
        let mut uses = Uses(Vec::new());
        uses.push(&self.embedding, vec![self.vocab_size, hidden], Role::Matrix);
        for layer in &self.layers {
            let Layer {
                mixer_pre_norm,
                mixer: Mixer::Attention(attention),
                mixer_post_norm,
                mlp_pre_norm,
                mlp: Mlp { intermediate, gate, up, down, activation: _ },
                mlp_post_norm,
                residual_scale: _,
            } = layer;
            uses.norm(mixer_pre_norm.as_ref(), hidden);
            let q_rows = attention.heads * attention.head_dim;
            let kv_rows = attention.kv_heads * attention.head_dim;
            uses.linear(&attention.q, q_rows, hidden);
            uses.linear(&attention.k, kv_rows, hidden);
            uses.linear(&attention.v, kv_rows, hidden);
            if let Some(QkNorm { q, k, over }) = &attention.qk_norm {
                let (q_len, k_len) = match over {
                    QkNormOver::Head => (attention.head_dim, attention.head_dim),
                    QkNormOver::FullWidth => (q_rows, kv_rows),
                };
                uses.norm(Some(q), q_len);
                uses.norm(Some(k), k_len);
            }
            uses.linear(&attention.o, hidden, q_rows);
            uses.norm(mixer_post_norm.as_ref(), hidden);
            uses.norm(mlp_pre_norm.as_ref(), hidden);
            uses.linear(gate, *intermediate, hidden);
            uses.linear(up, *intermediate, hidden);
            uses.linear(down, hidden, *intermediate);
            uses.norm(mlp_post_norm.as_ref(), hidden);
        }
        uses.norm(Some(&self.final_norm), hidden);
        uses.linear(&self.head, self.vocab_size, hidden);
        uses.0
    }
}

/// Collects [`Decoder::weight_uses`].
struct Uses<'a>(Vec<WeightUse<'a>>);

impl<'a> Uses<'a> {
    fn push(&mut self, weight: &'a WeightRef, shape: Vec<usize>, role: Role) {
        self.0.push(WeightUse { weight, shape, role });
    }

    fn norm(&mut self, norm: Option<&'a Norm>, len: usize) {
        if let Some(Norm { weight, eps: _, offset }) = norm {
            self.push(weight, vec![len], Role::Norm { offset: *offset });
        }
    }

    fn linear(&mut self, Linear { weight, bias }: &'a Linear, rows: usize, cols: usize) {
        self.push(weight, vec![rows, cols], Role::Matrix);
        if let Some(bias) = bias {
            self.push(bias, vec![rows], Role::Bias);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rope_pairs_undo_the_gguf_permutation() {
        // llama.cpp's conversion reshapes a head's rows to (2, head_dim / 2) and swaps the two axes.
        let head_dim = 8;
        let mut stored = [0; 16];
        for head in 0..2 {
            for part in 0..2 {
                for j in 0..4 {
                    stored[head * head_dim + j * 2 + part] = head * head_dim + part * 4 + j;
                }
            }
        }
        let order = RowOrder::RopePairs { head_dim };
        for logical in 0..16 {
            assert_eq!(stored[order.stored_row(logical)], logical);
        }
    }
}
