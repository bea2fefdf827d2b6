//! SmolLM 3 (`SmolLM3ForCausalLM`): Llama in which every fourth layer has no rope.

use super::Architecture;
use super::common::{Biases, Defaults, Shape, Skeleton, layers, sliding_layers};
use super::rope::{gguf_rope, rope};
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::weights::Weights;

pub(super) const SMOLLM3: Architecture =
    Architecture::new("smollm3", "SmolLM3ForCausalLM", from_config).with_gguf("smollm3", from_gguf);

const INTERVAL: usize = 4;

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.expect("hidden_act", "silu")?;
    // transformers reads neither.
    config.ignore(&["attention_dropout", "pretraining_tp", "max_window_layers"]);
    let bias = config.flag_or("attention_bias", false)?;
    let biases = Biases { qkv: bias, o: bias, mlp: config.flag_or("mlp_bias", false)? };
    let shape = Shape::from_config(
        config,
        &Defaults { kv_heads: Some(4), context: 32_768, tied: true, ..Defaults::LLAMA },
    )?;
    let rope = rope(config, &shape, 2_000_000.0)?;
    let has_rope = has_rope(config, shape.layers)?;
    let used = config.flag_or("use_sliding_window", false)?;
    let window = config.optional_size("sliding_window", None)?.filter(|_| used);
    let sliding = sliding_layers(config, shape.layers)?;
    if window.is_none() && sliding.iter().flatten().any(|sliding| *sliding) {
        return Err(config.unsupported("layer_types", "it names sliding layers, but no window is in use"));
    }
    let mut decoder = Skeleton::hugging_face(&shape, biases).decoder("smollm3", &rope);
    for (i, attention) in layers(&mut decoder) {
        attention.rope = attention.rope.take().filter(|_| has_rope[i]);
        attention.window = window.filter(|_| sliding.as_ref().map_or(!has_rope[i], |sliding| sliding[i]));
    }
    Ok(decoder)
}

/// `no_rope_layers`, which has a 1 for each layer *with* rope.
fn has_rope(config: &Config, layers: usize) -> Result<Vec<bool>, ModelError> {
    let interval = config.size_or("no_rope_layer_interval", INTERVAL)?;
    let listed = config.list("no_rope_layers", "0 and 1", |has| match has.as_u64() {
        Some(has @ 0..=1) => Some(has == 1),
        _ => None,
    })?;
    match listed {
        Some(listed) if listed.len() < layers => {
            Err(config.malformed("no_rope_layers", &format!("names {} layers of {layers}", listed.len())))
        }
        Some(listed) => Ok(listed),
        None => Ok((1..=layers).map(|number| !number.is_multiple_of(interval)).collect()),
    }
}

/// The file does not say which layers have rope; llama.cpp takes the default.
fn from_gguf(config: &Config, weights: &Weights) -> Result<Decoder, ModelError> {
    let shape = Shape::from_gguf(config, weights)?;
    let rope = gguf_rope(config, weights, &shape)?;
    let mut decoder = Skeleton::gguf(&shape, weights, true).decoder("smollm3", &rope);
    for (i, attention) in layers(&mut decoder) {
        attention.rope = attention.rope.take().filter(|_| !(i + 1).is_multiple_of(INTERVAL));
    }
    Ok(decoder)
}
