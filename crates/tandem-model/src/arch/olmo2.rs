//! OLMo 2 (`Olmo2ForCausalLM`): norms stand after attention and MLP instead of before, and queries and keys are normed
//! over their full width.

use super::Architecture;
use super::common::{Biases, Defaults, Shape, Skeleton, layers};
use super::rope::{gguf_rope, rope};
use crate::config::Config;
use crate::decoder::{Decoder, QkNormOver, Rope};
use crate::error::ModelError;
use crate::weights::Weights;

pub(super) const OLMO2: Architecture =
    Architecture::new("olmo2", "Olmo2ForCausalLM", from_config).with_gguf("olmo2", from_gguf);

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.expect("hidden_act", "silu")?;
    config.ignore(&["attention_dropout"]);
    let bias = config.flag_or("attention_bias", false)?;
    let shape = Shape::from_config(config, &Defaults { eps: 1e-5, ..Defaults::LLAMA })?;
    let rope = rope(config, &shape, 10_000.0)?;
    let biases = Biases { qkv: bias, o: bias, mlp: false };
    Ok(decoder(&Skeleton::hugging_face(&shape, biases), &rope))
}

fn from_gguf(config: &Config, weights: &Weights) -> Result<Decoder, ModelError> {
    let shape = Shape::from_gguf(config, weights)?;
    let rope = gguf_rope(config, weights, &shape)?;
    Ok(decoder(&Skeleton::gguf(&shape, weights, false), &rope))
}

fn decoder(skeleton: &Skeleton<'_>, rope: &Rope) -> Decoder {
    let mut decoder = skeleton.decoder("olmo2", rope);
    for (i, attention) in layers(&mut decoder) {
        attention.qk_norm = Some(skeleton.qk_norm(i, QkNormOver::FullWidth));
    }
    for (i, layer) in decoder.layers.iter_mut().enumerate() {
        layer.mixer_pre_norm = None;
        layer.mixer_post_norm = Some(skeleton.layer_norm(i, skeleton.names.mixer_post_norm));
        layer.mlp_pre_norm = None;
        layer.mlp_post_norm = Some(skeleton.layer_norm(i, skeleton.names.mlp_post_norm));
    }
    decoder
}
