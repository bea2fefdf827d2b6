//! Llama (`LlamaForCausalLM`): Llama 2 and 3, SmolLM and SmolLM2, TinyLlama and other models of that shape.
//!
//! Pre-norm blocks of grouped-query attention with rope over the whole head, and a SiLU-gated MLP.

use super::Architecture;
use super::common::{Biases, Defaults, Shape, Skeleton, gguf_window, layers};
use super::rope::{gguf_rope, rope};
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::weights::Weights;

pub(super) const LLAMA: Architecture =
    Architecture::new("llama", "LlamaForCausalLM", from_config).with_gguf("llama", from_gguf);

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.expect("hidden_act", "silu")?;
    config.expect("pretraining_tp", 1)?;
    config.expect("rope_interleaved", false)?;
    config.ignore(&["attention_dropout", "is_llama_config"]);
    let attention = config.flag_or("attention_bias", false)?;
    let biases = Biases { qkv: attention, o: attention, mlp: config.flag_or("mlp_bias", false)? };
    let shape = Shape::from_config(config, &Defaults::LLAMA)?;
    let rope = rope(config, &shape, 10_000.0)?;
    Ok(Skeleton::hugging_face(&shape, biases).decoder("llama", &rope))
}

/// Mistral's files too call themselves llama.
fn from_gguf(config: &Config, weights: &Weights) -> Result<Decoder, ModelError> {
    let shape = Shape::from_gguf(config, weights)?;
    let rope = gguf_rope(config, weights, &shape)?;
    let window = gguf_window(config)?;
    let mut decoder = Skeleton::gguf(&shape, weights, true).decoder("llama", &rope);
    layers(&mut decoder).for_each(|(_, attention)| attention.window = window);
    Ok(decoder)
}
