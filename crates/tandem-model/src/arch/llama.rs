//! Llama (`LlamaForCausalLM`): Llama 2 and 3, SmolLM and SmolLM2, TinyLlama and other models of that shape.
//!
//! Pre-norm blocks of grouped-query attention with rope over the whole head, and a SiLU-gated MLP.

use super::Architecture;
use super::rope::rope;
use crate::config::Config;
use crate::decoder::{
    Activation, Attention, Decoder, Layer, Linear, Mixer, Mlp, Norm, Rope, RopeScaling, RowOrder, WeightRef,
};
use crate::error::ModelError;
use crate::weights::Weights;

pub(super) const LLAMA: Architecture = Architecture {
    model_type: "llama",
    class: "LlamaForCausalLM",
    gguf: "llama",
    from_config,
    from_gguf,
    // Old checkpoints store the rope frequencies, which are computed from the config; GGUF's factors become part of the
    // decoder itself.
    not_weights: |name| name.ends_with(".rotary_emb.inv_freq") || name == ROPE_FACTORS,
};

/// More layers than any model has; keeps a lying file from making the reader build millions.
const MAX_LAYERS: usize = 4096;

/// Divisors of the rope frequencies in a GGUF file.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The numbers both file formats state.
struct Sizes {
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f32,
}

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.expect("hidden_act", "silu")?;
    config.expect("pretraining_tp", 1)?;
    config.expect("rope_interleaved", false)?;
    config.ignore(&["attention_dropout", "is_llama_config"]);

    let hidden = config.size("hidden_size")?;
    let heads = config.size("num_attention_heads")?;
    let sizes = Sizes {
        intermediate: config.size("intermediate_size")?,
        layers: config.size_up_to("num_hidden_layers", MAX_LAYERS)?,
        heads,
        kv_heads: config.size_or("num_key_value_heads", heads)?,
        head_dim: match config.get("head_dim") {
            Some(_) => config.size("head_dim")?,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(config.malformed("num_attention_heads", "does not divide hidden_size")),
        },
        eps: config.positive_or("rms_norm_eps", 1e-6)?,
    };
    check(config, &sizes, "num_key_value_heads", "head_dim")?;
    let rope = rope(config, sizes.head_dim)?;
    let attention_bias = config.flag_or("attention_bias", false)?;
    let mlp_bias = config.flag_or("mlp_bias", false)?;
    let tied = config.flag_or("tie_word_embeddings", false)?;

    let linear = |name: String, bias: bool| Linear {
        weight: WeightRef::whole(format!("{name}.weight")),
        bias: bias.then(|| WeightRef::whole(format!("{name}.bias"))),
    };
    let norm = |name: String| Norm { weight: WeightRef::whole(name), eps: sizes.eps, offset: 0.0 };
    let layers = (0..sizes.layers)
        .map(|i| {
            let attention =
                |part: &str| linear(format!("model.layers.{i}.self_attn.{part}_proj"), attention_bias);
            let mlp = |part: &str| linear(format!("model.layers.{i}.mlp.{part}_proj"), mlp_bias);
            layer(
                &sizes,
                &rope,
                [
                    norm(format!("model.layers.{i}.input_layernorm.weight")),
                    norm(format!("model.layers.{i}.post_attention_layernorm.weight")),
                ],
                ["q", "k", "v", "o"].map(attention),
                ["gate", "up", "down"].map(mlp),
            )
        })
        .collect();
    let embedding = WeightRef::whole("model.embed_tokens.weight");
    Ok(Decoder {
        architecture: "llama".into(),
        vocab_size: config.size("vocab_size")?,
        hidden_size: hidden,
        max_context: config.size_or("max_position_embeddings", 2048)?,
        head: if tied {
            Linear { weight: embedding.clone(), bias: None }
        } else {
            linear("lm_head".into(), false)
        },
        embedding,
        embedding_scale: 1.0,
        layers,
        final_norm: norm("model.norm.weight".into()),
        logit_scale: 1.0,
        logit_softcap: None,
    })
}

/// GGUF says with a tensor's presence what config.json says with a flag: biases, an untied head, rope factors.
fn from_gguf(config: &Config, weights: &Weights) -> Result<Decoder, ModelError> {
    config.ignore(&["rope.scaling.finetuned", "rope.scaling.original_context_length"]);
    config.expect("expert_count", 0)?;
    config.expect("expert_used_count", 0)?;

    let hidden = config.size("embedding_length")?;
    let heads = config.size("attention.head_count")?;
    let head_dim = match config.get("attention.key_length") {
        Some(_) => config.size("attention.key_length")?,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(config.malformed("attention.head_count", "does not divide embedding_length")),
    };
    config.expect("attention.value_length", head_dim)?;
    config.expect("rope.dimension_count", head_dim)?;
    let sizes = Sizes {
        intermediate: config.size("feed_forward_length")?,
        layers: config.size_up_to("block_count", MAX_LAYERS)?,
        heads,
        kv_heads: config.size_or("attention.head_count_kv", heads)?,
        head_dim,
        eps: config.positive("attention.layer_norm_rms_epsilon")?,
    };
    check(config, &sizes, "attention.head_count_kv", "attention.key_length")?;
    let rope = Rope {
        theta: config.positive_or("rope.freq_base", 10_000.0)?,
        rotary_dim: head_dim,
        scaling: gguf_scaling(config, weights, head_dim)?,
    };

    let linear = |name: String, order: RowOrder| {
        let part = |kind: &str| WeightRef { tensor: format!("{name}.{kind}"), rows: None, order };
        Linear {
            weight: part("weight"),
            bias: weights.contains(&format!("{name}.bias")).then(|| part("bias")),
        }
    };
    let norm = |name: String| Norm { weight: WeightRef::whole(name), eps: sizes.eps, offset: 0.0 };
    let rope_pairs = RowOrder::RopePairs { head_dim };
    let layers = (0..sizes.layers)
        .map(|i| {
            let attention = [
                ("attn_q", rope_pairs),
                ("attn_k", rope_pairs),
                ("attn_v", RowOrder::Stored),
                ("attn_output", RowOrder::Stored),
            ];
            layer(
                &sizes,
                &rope,
                [norm(format!("blk.{i}.attn_norm.weight")), norm(format!("blk.{i}.ffn_norm.weight"))],
                attention.map(|(part, order)| linear(format!("blk.{i}.{part}"), order)),
                ["ffn_gate", "ffn_up", "ffn_down"]
                    .map(|part| linear(format!("blk.{i}.{part}"), RowOrder::Stored)),
            )
        })
        .collect();
    let embedding = WeightRef::whole("token_embd.weight");
    let stored_vocab = weights.tensor("token_embd.weight")?.shape.first().copied().unwrap_or(0);
    Ok(Decoder {
        architecture: "llama".into(),
        vocab_size: config.size_or("vocab_size", stored_vocab)?,
        hidden_size: hidden,
        max_context: config.size("context_length")?,
        head: if weights.contains("output.weight") {
            linear("output".into(), RowOrder::Stored)
        } else {
            Linear { weight: embedding.clone(), bias: None }
        },
        embedding,
        embedding_scale: 1.0,
        layers,
        final_norm: norm("output_norm.weight".into()),
        logit_scale: 1.0,
        logit_softcap: None,
    })
}

/// `rope_freqs.weight` holds Llama 3.1's factors, worked out by the converter.
fn gguf_scaling(config: &Config, weights: &Weights, head_dim: usize) -> Result<RopeScaling, ModelError> {
    let kind = config.text("rope.scaling.type")?.unwrap_or("linear");
    let old = config.positive_or("rope.scale_linear", 1.0)?;
    let factor = config.positive_or("rope.scaling.factor", old)?;
    let linear = match kind {
        "none" => 1.0,
        "linear" => factor,
        _ => return Err(config.unsupported("rope.scaling.type", "Tandem computes none and linear here")),
    };
    if !weights.contains(ROPE_FACTORS) {
        return Ok(if linear == 1.0 { RopeScaling::Default } else { RopeScaling::Linear { factor: linear } });
    }
    if linear != 1.0 {
        return Err(config.unsupported("rope.scaling.type", "the file holds rope_freqs.weight besides"));
    }
    let stored = weights.tensor(ROPE_FACTORS)?;
    if stored.shape != [head_dim / 2] {
        return Err(ModelError::Shape {
            name: ROPE_FACTORS.into(),
            expected: vec![head_dim / 2],
            found: stored.shape.clone(),
        });
    }
    let factors = weights.vector(&WeightRef::whole(ROPE_FACTORS))?;
    if factors.iter().any(|&factor| !(factor.is_finite() && factor > 0.0)) {
        return Err(
            config.malformed("rope.scaling", "has factors in rope_freqs.weight that are not positive")
        );
    }
    Ok(RopeScaling::Factors(factors))
}

fn check(config: &Config, sizes: &Sizes, kv_key: &str, dim_key: &str) -> Result<(), ModelError> {
    if !sizes.heads.is_multiple_of(sizes.kv_heads) {
        return Err(
            config.malformed(kv_key, &format!("= {} does not divide {} heads", sizes.kv_heads, sizes.heads))
        );
    }
    if !sizes.head_dim.is_multiple_of(2) {
        return Err(
            config.malformed(dim_key, &format!("= {} is odd, but rope rotates pairs", sizes.head_dim))
        );
    }
    if sizes.heads.checked_mul(sizes.head_dim).is_none_or(|rows| rows > 1 << 30) {
        return Err(
            config.malformed(dim_key, &format!("= {} is absurd for {} heads", sizes.head_dim, sizes.heads))
        );
    }
    Ok(())
}

fn layer(
    sizes: &Sizes,
    rope: &Rope,
    [mixer_pre, mlp_pre]: [Norm; 2],
    [q, k, v, o]: [Linear; 4],
    [gate, up, down]: [Linear; 3],
) -> Layer {
    Layer {
        mixer_pre_norm: Some(mixer_pre),
        mixer: Mixer::Attention(Attention {
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            head_dim: sizes.head_dim,
            q,
            k,
            v,
            o,
            qk_norm: None,
            rope: Some(rope.clone()),
            window: None,
            scale: 1.0 / (sizes.head_dim as f32).sqrt(),
            softcap: None,
        }),
        mixer_post_norm: None,
        mlp_pre_norm: Some(mlp_pre),
        mlp: Mlp { intermediate: sizes.intermediate, gate, up, down, activation: Activation::Silu },
        mlp_post_norm: None,
        residual_scale: 1.0,
    }
}
