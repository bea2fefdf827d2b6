//! Gemma 3, text (`Gemma3ForCausalLM`): norms before and after attention and MLP whose weights lack the 1, a scaled
//! embedding, queries and keys normed head by head, and mostly local layers with a rope base of their own.

use half::{bf16, f16};

use super::Architecture;
use super::common::{Biases, Defaults, Shape, Skeleton, gguf_window, layers, sliding_layers};
use super::rope::{gguf_rope, nested_rope, rope};
use crate::config::Config;
use crate::decoder::{Activation, Decoder, QkNormOver, Rope, RopeScaling};
use crate::error::ModelError;
use crate::weights::Weights;

pub(super) const GEMMA3: Architecture =
    Architecture::new("gemma3_text", "Gemma3ForCausalLM", from_config).with_gguf("gemma3", from_gguf);

/// Every sixth layer is global.
const PATTERN: usize = 6;
const GLOBAL_THETA: f32 = 1_000_000.0;
const LOCAL_THETA: f32 = 10_000.0;

const DEFAULTS: Defaults = Defaults {
    vocab: Some(262_208),
    heads: Some(8),
    kv_heads: Some(4),
    head_dim: Some(256),
    eps: 1e-6,
    context: 131_072,
    tied: true,
};

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    for key in ["hidden_activation", "hidden_act"] {
        config.expect(key, "gelu_pytorch_tanh")?;
    }
    config.expect("use_bidirectional_attention", false)?;
    // transformers has the key from Gemma 2 and does not compute it here.
    config.expect("attn_logit_softcapping", serde_json::Value::Null)?;
    config.ignore(&["attention_dropout", "cache_implementation"]);
    let bias = config.flag_or("attention_bias", false)?;
    let shape = Shape::from_config(config, &DEFAULTS)?;
    let mut skeleton = Skeleton::hugging_face(&shape, Biases { qkv: bias, o: bias, mlp: false });
    skeleton.names.mlp_pre_norm = "pre_feedforward_layernorm";
    skeleton.norm_offset = 1.0;

    let pattern = config.size_or("_sliding_window_pattern", PATTERN)?;
    let pattern = config.size_or("sliding_window_pattern", pattern)?;
    let local = Local {
        layers: sliding_layers(config, shape.layers)?.unwrap_or_else(|| every(pattern, shape.layers)),
        window: config.optional_size("sliding_window", Some(4096))?,
        rope: local_rope(config, &shape)?,
    };
    if local.window.is_none() && local.layers.contains(&true) {
        return Err(config.unsupported("sliding_window", "local layers need a window"));
    }
    let mut decoder = decoder(&skeleton, &global_rope(config, &shape)?, &local);
    decoder.embedding_scale = rounded(decoder.embedding_scale, dtype(config)?);
    decoder.logit_softcap = config.optional_positive("final_logit_softcapping")?;
    let scale = 1.0 / config.positive_or("query_pre_attn_scalar", 256.0)?.sqrt();
    layers(&mut decoder).for_each(|(_, attention)| attention.scale = scale);
    Ok(decoder)
}

/// Norm weights have their 1 already.
fn from_gguf(config: &Config, weights: &Weights) -> Result<Decoder, ModelError> {
    const KEY: &str = "attention.sliding_window_pattern";
    let shape = Shape::from_gguf(config, weights)?;
    let skeleton = Skeleton::gguf(&shape, weights, false);
    let window = gguf_window(config)?;
    let sliding = match config.get(KEY) {
        Some(value) if value.is_array() => config.list(KEY, "true and false", serde_json::Value::as_bool)?,
        _ => Some(every(config.size_or(KEY, PATTERN)?, shape.layers)),
    };
    let sliding = sliding.filter(|sliding| sliding.len() == shape.layers);
    let local = Local {
        layers: sliding.ok_or_else(|| config.malformed(KEY, "does not name as many layers as there are"))?,
        window,
        rope: Rope {
            theta: config.positive_or("rope.freq_base_swa", LOCAL_THETA)?,
            rotary_dim: shape.head_dim,
            scaling: RopeScaling::Default,
        },
    };
    let mut decoder = decoder(&skeleton, &gguf_rope(config, weights, &shape)?, &local);
    decoder.logit_softcap = config.optional_positive("final_logit_softcapping")?;
    // The file does not say; the 27B model alone scales by hidden / heads instead of the head dimension.
    let per_head = if shape.layers == 62 { shape.hidden / shape.heads } else { shape.head_dim };
    let scale = 1.0 / (per_head as f32).sqrt();
    layers(&mut decoder).for_each(|(_, attention)| attention.scale = scale);
    Ok(decoder)
}

/// What sets local layers apart.
struct Local {
    /// Which they are.
    layers: Vec<bool>,
    window: Option<usize>,
    rope: Rope,
}

fn decoder(skeleton: &Skeleton<'_>, global_rope: &Rope, local: &Local) -> Decoder {
    let mut decoder = skeleton.decoder("gemma3", global_rope);
    decoder.embedding_scale = (skeleton.shape.hidden as f32).sqrt();
    for (i, attention) in layers(&mut decoder) {
        attention.qk_norm = Some(skeleton.qk_norm(i, QkNormOver::Head));
        if local.layers[i] && local.window.is_some() {
            attention.window = local.window;
            attention.rope = Some(local.rope.clone());
        }
    }
    for (i, layer) in decoder.layers.iter_mut().enumerate() {
        layer.mixer_post_norm = Some(skeleton.layer_norm(i, skeleton.names.mixer_post_norm));
        layer.mlp_post_norm = Some(skeleton.layer_norm(i, skeleton.names.mlp_post_norm));
        layer.mlp.activation = Activation::GeluTanh;
    }
    decoder
}

/// All but every `pattern`th layer.
fn every(pattern: usize, layers: usize) -> Vec<bool> {
    (1..=layers).map(|number| !number.is_multiple_of(pattern)).collect()
}

/// transformers 5 says `rope_parameters.full_attention`, 4 `rope_theta` and `rope_scaling`.
fn global_rope(config: &Config, shape: &Shape) -> Result<Rope, ModelError> {
    match nested_rope(config, "full_attention", shape, GLOBAL_THETA)? {
        Some(rope) => Ok(rope),
        None => rope(config, shape, GLOBAL_THETA),
    }
}

/// transformers 5 says `rope_parameters.sliding_attention`, 4 `rope_local_base_freq`.
fn local_rope(config: &Config, shape: &Shape) -> Result<Rope, ModelError> {
    let theta = config.positive_or("rope_local_base_freq", LOCAL_THETA)?;
    let plain = Rope { theta, rotary_dim: shape.head_dim, scaling: RopeScaling::Default };
    Ok(nested_rope(config, "sliding_attention", shape, theta)?.unwrap_or(plain))
}

fn dtype(config: &Config) -> Result<Option<&str>, ModelError> {
    Ok(config.text("dtype")?.or(config.text("torch_dtype")?))
}

/// The embedding's factor takes the number format of the weights: `sqrt(640)` is 25.25 in bf16. The model was trained
/// with that.
fn rounded(scale: f32, dtype: Option<&str>) -> f32 {
    match dtype {
        Some("bfloat16") => bf16::from_f32(scale).to_f32(),
        Some("float16") => f16::from_f32(scale).to_f32(),
        _ => scale,
    }
}
