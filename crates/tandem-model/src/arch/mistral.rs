//! Mistral (`MistralForCausalLM`): Llama with a sliding window in every layer. GGUF files of it are read as Llama.

use super::Architecture;
use super::common::{Biases, Defaults, Shape, Skeleton, layers};
use super::rope::rope;
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::ModelError;

pub(super) const MISTRAL: Architecture = Architecture::new("mistral", "MistralForCausalLM", from_config);

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.expect("hidden_act", "silu")?;
    config.ignore(&["attention_dropout"]);
    let shape =
        Shape::from_config(config, &Defaults { kv_heads: Some(8), context: 131_072, ..Defaults::LLAMA })?;
    let rope = rope(config, &shape, 10_000.0)?;
    let window = config.optional_size("sliding_window", Some(4096))?;
    let mut decoder = Skeleton::hugging_face(&shape, Biases::default()).decoder("mistral", &rope);
    layers(&mut decoder).for_each(|(_, attention)| attention.window = window);
    Ok(decoder)
}
