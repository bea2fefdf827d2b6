//! What the architectures share: nearly all are the Llama block with a few differences.
//!
//! [`Shape`] holds the numbers that both file formats state, [`Names`] what each calls the tensors, and
//! [`Skeleton::decoder`] makes the Llama decoder of them. An architecture's file reads its own keys and then says, layer
//! by layer, where it differs.

use crate::config::Config;
use crate::decoder::{
    Activation, Attention, Decoder, Layer, Linear, Mixer, Mlp, Norm, QkNorm, QkNormOver, Rope, RowOrder,
    WeightRef,
};
use crate::error::ModelError;
use crate::weights::Weights;

/// More layers than any model has; keeps a lying file from making the reader build millions.
const MAX_LAYERS: usize = 4096;

/// The numbers that both file formats state.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub eps: f32,
    /// As the file states it.
    pub context: usize,
    /// Whether the head is the embedding.
    pub tied: bool,
}

/// What transformers assumes where config.json leaves a key out. `None`: the key must be there, or, for key/value heads
/// and the head dimension, follows from the others.
pub(super) struct Defaults {
    pub vocab: Option<usize>,
    pub heads: Option<usize>,
    pub kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub eps: f32,
    pub context: usize,
    pub tied: bool,
}

impl Defaults {
    pub const LLAMA: Self = Self {
        vocab: None,
        heads: None,
        kv_heads: None,
        head_dim: None,
        eps: 1e-6,
        context: 2048,
        tied: false,
    };
}

impl Shape {
    /// From the keys of config.json.
    pub fn from_config(config: &Config, defaults: &Defaults) -> Result<Self, ModelError> {
        let size = |key: &str, default: Option<usize>| match default {
            Some(default) => config.size_or(key, default),
            None => config.size(key),
        };
        let hidden = config.size("hidden_size")?;
        let heads = size("num_attention_heads", defaults.heads)?;
        let shape = Self {
            vocab: size("vocab_size", defaults.vocab)?,
            hidden,
            intermediate: config.size("intermediate_size")?,
            layers: config.size_up_to("num_hidden_layers", MAX_LAYERS)?,
            heads,
            kv_heads: config.size_or("num_key_value_heads", defaults.kv_heads.unwrap_or(heads))?,
            head_dim: match (config.get("head_dim"), defaults.head_dim) {
                (Some(_), _) => config.size("head_dim")?,
                (None, Some(default)) => default,
                (None, None) if hidden.is_multiple_of(heads) => hidden / heads,
                (None, None) => {
                    return Err(config.malformed("num_attention_heads", "does not divide hidden_size"));
                }
            },
            eps: config.positive_or("rms_norm_eps", defaults.eps)?,
            context: config.size_or("max_position_embeddings", defaults.context)?,
            tied: config.flag_or("tie_word_embeddings", defaults.tied)?,
        };
        shape.check(config, "num_key_value_heads", "head_dim")?;
        Ok(shape)
    }

    /// From the metadata of a GGUF file. It says with a tensor's presence what config.json says with a flag.
    pub fn from_gguf(config: &Config, weights: &Weights) -> Result<Self, ModelError> {
        config.expect("expert_count", 0)?;
        config.expect("expert_used_count", 0)?;
        config.expect("attention.causal", true)?;
        let hidden = config.size("embedding_length")?;
        let heads = config.size("attention.head_count")?;
        let head_dim = match config.get("attention.key_length") {
            Some(_) => config.size("attention.key_length")?,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(config.malformed("attention.head_count", "does not divide embedding_length")),
        };
        config.expect("attention.value_length", head_dim)?;
        let embedding = weights.tensor(&format!("{}.weight", GGUF.embedding))?;
        let stored_vocab = embedding.shape.first().copied().unwrap_or(0);
        let shape = Self {
            vocab: config.size_or("vocab_size", stored_vocab)?,
            hidden,
            intermediate: config.size("feed_forward_length")?,
            layers: config.size_up_to("block_count", MAX_LAYERS)?,
            heads,
            kv_heads: config.size_or("attention.head_count_kv", heads)?,
            head_dim,
            eps: config.positive("attention.layer_norm_rms_epsilon")?,
            context: config.size("context_length")?,
            tied: !weights.contains(&format!("{}.weight", GGUF.head)),
        };
        shape.check(config, "attention.head_count_kv", "attention.key_length")?;
        Ok(shape)
    }

    fn check(&self, config: &Config, kv_key: &str, dim_key: &str) -> Result<(), ModelError> {
        let Self { heads, kv_heads, head_dim, .. } = self;
        if !heads.is_multiple_of(*kv_heads) {
            return Err(config.malformed(kv_key, &format!("= {kv_heads} does not divide {heads} heads")));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(config.malformed(dim_key, &format!("= {head_dim} is odd, but rope rotates pairs")));
        }
        if heads.checked_mul(*head_dim).is_none_or(|rows| rows > 1 << 30) {
            return Err(config.malformed(dim_key, &format!("= {head_dim} is absurd for {heads} heads")));
        }
        Ok(())
    }
}

/// What a file format calls the tensors, without `.weight`; those of a layer come after `layer` and its number.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    pub embedding: &'static str,
    pub final_norm: &'static str,
    pub head: &'static str,
    pub layer: &'static str,
    pub mixer_pre_norm: &'static str,
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    pub q_norm: &'static str,
    pub k_norm: &'static str,
    pub o: &'static str,
    pub mixer_post_norm: &'static str,
    pub mlp_pre_norm: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    pub mlp_post_norm: &'static str,
}

/// transformers. Its `post_attention_layernorm` stands before the MLP in a model without post-norms.
pub(super) const HUGGING_FACE: Names = Names {
    embedding: "model.embed_tokens",
    final_norm: "model.norm",
    head: "lm_head",
    layer: "model.layers",
    mixer_pre_norm: "input_layernorm",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    o: "self_attn.o_proj",
    mixer_post_norm: "post_attention_layernorm",
    mlp_pre_norm: "post_attention_layernorm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    mlp_post_norm: "post_feedforward_layernorm",
};

/// GGUF, the same for all architectures.
pub(super) const GGUF: Names = Names {
    embedding: "token_embd",
    final_norm: "output_norm",
    head: "output",
    layer: "blk",
    mixer_pre_norm: "attn_norm",
    q: "attn_q",
    k: "attn_k",
    v: "attn_v",
    q_norm: "attn_q_norm",
    k_norm: "attn_k_norm",
    o: "attn_output",
    mixer_post_norm: "post_attention_norm",
    mlp_pre_norm: "ffn_norm",
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    mlp_post_norm: "post_ffw_norm",
};

/// Which projections have a bias.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Biases {
    pub qkv: bool,
    pub o: bool,
    pub mlp: bool,
}

impl Biases {
    /// As the first layer of a GGUF file has them; a layer that differs is refused for a tensor missing or left over.
    pub fn from_gguf(weights: &Weights) -> Self {
        let has = |part: &str| weights.contains(&format!("{}.0.{part}.bias", GGUF.layer));
        Self { qkv: has(GGUF.q), o: has(GGUF.o), mlp: has(GGUF.gate) }
    }
}

/// All that the Llama decoder needs.
pub(super) struct Skeleton<'a> {
    pub shape: &'a Shape,
    pub names: Names,
    pub biases: Biases,
    /// Whether q and k lie in GGUF's rope order.
    pub rope_pairs: bool,
    /// Added to the norms' weights.
    pub norm_offset: f32,
}

impl<'a> Skeleton<'a> {
    /// Of a Hugging Face checkpoint.
    pub fn hugging_face(shape: &'a Shape, biases: Biases) -> Self {
        Self { shape, names: HUGGING_FACE, biases, rope_pairs: false, norm_offset: 0.0 }
    }

    /// Of a GGUF file. llama.cpp's converter reorders the rows of q and k for the architectures it derives from Llama.
    pub fn gguf(shape: &'a Shape, weights: &Weights, rope_pairs: bool) -> Self {
        Self { shape, names: GGUF, biases: Biases::from_gguf(weights), rope_pairs, norm_offset: 0.0 }
    }

    /// The Llama decoder: pre-norm blocks of grouped-query attention, the same rope in each, and a SiLU-gated MLP.
    pub fn decoder(&self, architecture: &str, rope: &Rope) -> Decoder {
        let Self { shape, names, .. } = self;
        let embedding = WeightRef::whole(format!("{}.weight", names.embedding));
        Decoder {
            architecture: architecture.into(),
            vocab_size: shape.vocab,
            hidden_size: shape.hidden,
            max_context: rope.context(shape.context),
            head: Linear {
                weight: if shape.tied {
                    embedding.clone()
                } else {
                    WeightRef::whole(format!("{}.weight", names.head))
                },
                bias: None,
            },
            embedding,
            embedding_scale: 1.0,
            layers: (0..shape.layers).map(|i| self.layer(i, rope)).collect(),
            final_norm: self.norm(names.final_norm),
            logit_scale: 1.0,
            logit_softcap: None,
        }
    }

    fn layer(&self, i: usize, rope: &Rope) -> Layer {
        let Self { shape, names, biases, rope_pairs, .. } = self;
        let order =
            if *rope_pairs { RowOrder::RopePairs { head_dim: shape.head_dim } } else { RowOrder::Stored };
        let linear = |part: &str, bias: bool, order: RowOrder| {
            let named = |kind: &str| WeightRef {
                tensor: format!("{}.{kind}", self.in_layer(i, part)),
                rows: None,
                order,
            };
            Linear { weight: named("weight"), bias: bias.then(|| named("bias")) }
        };
        let stored = |part: &str, bias: bool| linear(part, bias, RowOrder::Stored);
        Layer {
            mixer_pre_norm: Some(self.layer_norm(i, names.mixer_pre_norm)),
            mixer: Mixer::Attention(Attention {
                heads: shape.heads,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                q: linear(names.q, biases.qkv, order),
                k: linear(names.k, biases.qkv, order),
                v: stored(names.v, biases.qkv),
                o: stored(names.o, biases.o),
                qk_norm: None,
                rope: Some(rope.clone()),
                window: None,
                scale: 1.0 / (shape.head_dim as f32).sqrt(),
                softcap: None,
            }),
            mixer_post_norm: None,
            mlp_pre_norm: Some(self.layer_norm(i, names.mlp_pre_norm)),
            mlp: Mlp {
                intermediate: shape.intermediate,
                gate: stored(names.gate, biases.mlp),
                up: stored(names.up, biases.mlp),
                down: stored(names.down, biases.mlp),
                activation: Activation::Silu,
            },
            mlp_post_norm: None,
            residual_scale: 1.0,
        }
    }

    /// A norm of layer `i` by its name in [`Names`].
    pub fn layer_norm(&self, i: usize, part: &str) -> Norm {
        self.norm(&self.in_layer(i, part))
    }

    /// The norms of queries and keys of layer `i`.
    pub fn qk_norm(&self, i: usize, over: QkNormOver) -> QkNorm {
        let Names { q_norm, k_norm, .. } = self.names;
        QkNorm { q: self.layer_norm(i, q_norm), k: self.layer_norm(i, k_norm), over }
    }

    fn in_layer(&self, i: usize, part: &str) -> String {
        format!("{}.{i}.{part}", self.names.layer)
    }

    fn norm(&self, name: &str) -> Norm {
        Norm {
            weight: WeightRef::whole(format!("{name}.weight")),
            eps: self.shape.eps,
            offset: self.norm_offset,
        }
    }
}

/// The layers of a decoder with their numbers and their attention.
pub(super) fn layers(decoder: &mut Decoder) -> impl Iterator<Item = (usize, &mut Attention)> {
    decoder.layers.iter_mut().enumerate().map(|(i, layer)| {
        let Mixer::Attention(attention) = &mut layer.mixer;
        (i, attention)
    })
}

/// `layer_types`: for each layer whether its attention slides, where the key is there.
pub(super) fn sliding_layers(config: &Config, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let what = "sliding_attention and full_attention";
    let sliding = config.list("layer_types", what, |kind| match kind.as_str() {
        Some("sliding_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    })?;
    match sliding {
        Some(sliding) if sliding.len() != layers => {
            Err(config.malformed("layer_types", &format!("names {} layers of {layers}", sliding.len())))
        }
        sliding => Ok(sliding),
    }
}

/// `attention.sliding_window` of a GGUF file, where 0 means none.
pub(super) fn gguf_window(config: &Config) -> Result<Option<usize>, ModelError> {
    const KEY: &str = "attention.sliding_window";
    match config.get(KEY).and_then(serde_json::Value::as_u64) {
        Some(0) => Ok(None),
        _ => config.optional_size(KEY, None),
    }
}
