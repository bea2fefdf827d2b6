//! Granite 3 (`GraniteForCausalLM`): Llama with a multiplier on the embedding, the attention scores, what each block
//! adds, and the logits.

use super::Architecture;
use super::common::{Biases, Defaults, Shape, Skeleton, layers};
use super::rope::{gguf_rope, rope};
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::weights::Weights;

pub(super) const GRANITE: Architecture =
    Architecture::new("granite", "GraniteForCausalLM", from_config).with_gguf("granite", from_gguf);

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.expect("hidden_act", "silu")?;
    config.ignore(&["attention_dropout"]);
    let bias = config.flag_or("attention_bias", false)?;
    let biases = Biases { qkv: bias, o: bias, mlp: config.flag_or("mlp_bias", false)? };
    let shape = Shape::from_config(config, &Defaults::LLAMA)?;
    let rope = rope(config, &shape, 10_000.0)?;
    let mut decoder = Skeleton::hugging_face(&shape, biases).decoder("granite", &rope);
    decoder.embedding_scale = config.positive_or("embedding_multiplier", 1.0)?;
    decoder.logit_scale = 1.0 / config.positive_or("logits_scaling", 1.0)?;
    let scale = config.positive_or("attention_multiplier", 1.0)?;
    layers(&mut decoder).for_each(|(_, attention)| attention.scale = scale);
    let residual_scale = config.positive_or("residual_multiplier", 1.0)?;
    decoder.layers.iter_mut().for_each(|layer| layer.residual_scale = residual_scale);
    Ok(decoder)
}

fn from_gguf(config: &Config, weights: &Weights) -> Result<Decoder, ModelError> {
    // llama.cpp switches rope off by this key.
    config.expect("rope.scaling.finetuned", true)?;
    let shape = Shape::from_gguf(config, weights)?;
    let rope = gguf_rope(config, weights, &shape)?;
    let mut decoder = Skeleton::gguf(&shape, weights, true).decoder("granite", &rope);
    decoder.embedding_scale = config.positive_or("embedding_scale", 1.0)?;
    decoder.logit_scale = 1.0 / config.positive("logit_scale")?;
    if let Some(scale) = config.optional_positive("attention.scale")? {
        layers(&mut decoder).for_each(|(_, attention)| attention.scale = scale);
    }
    let residual_scale = config.positive_or("residual_scale", 1.0)?;
    decoder.layers.iter_mut().for_each(|layer| layer.residual_scale = residual_scale);
    Ok(decoder)
}
