//! Qwen 2 and 2.5 (`Qwen2ForCausalLM`): Llama with biases on q, k and v, and optionally a sliding window in the upper
//! layers.

use super::Architecture;
use super::common::{Biases, Defaults, Shape, Skeleton, layers, sliding_layers};
use super::rope::{gguf_rope, rope};
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::weights::Weights;

pub(super) const QWEN2: Architecture =
    Architecture::new("qwen2", "Qwen2ForCausalLM", from_config).with_gguf("qwen2", from_gguf);

pub(super) const DEFAULTS: Defaults = Defaults { kv_heads: Some(32), context: 32_768, ..Defaults::LLAMA };

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.expect("hidden_act", "silu")?;
    config.expect("use_mrope", false)?;
    config.ignore(&["attention_dropout"]);
    let shape = Shape::from_config(config, &DEFAULTS)?;
    let rope = rope(config, &shape, 10_000.0)?;
    let windows = windows(config, shape.layers)?;
    let biases = Biases { qkv: true, ..Biases::default() };
    let mut decoder = Skeleton::hugging_face(&shape, biases).decoder("qwen2", &rope);
    layers(&mut decoder).for_each(|(i, attention)| attention.window = windows[i]);
    Ok(decoder)
}

fn from_gguf(config: &Config, weights: &Weights) -> Result<Decoder, ModelError> {
    let shape = Shape::from_gguf(config, weights)?;
    let rope = gguf_rope(config, weights, &shape)?;
    Ok(Skeleton::gguf(&shape, weights, false).decoder("qwen2", &rope))
}

/// Each layer's window: where `use_sliding_window` is set, layers from `max_window_layers` on slide unless `layer_types`
/// says which.
pub(super) fn windows(config: &Config, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let used = config.flag_or("use_sliding_window", false)?;
    let window = config.optional_size("sliding_window", Some(4096))?.filter(|_| used);
    // It may be 0, so it is no size.
    let first = config.get("max_window_layers").map_or(Some(28), serde_json::Value::as_u64);
    let first = first.ok_or_else(|| config.malformed("max_window_layers", "is not a whole number"))?;
    let sliding = sliding_layers(config, layers)?;
    if window.is_none() && sliding.iter().flatten().any(|sliding| *sliding) {
        return Err(config.unsupported("layer_types", "it names sliding layers, but no window is in use"));
    }
    let slides = |i: usize| sliding.as_ref().map_or(i as u64 >= first, |sliding| sliding[i]);
    Ok((0..layers).map(|i| window.filter(|_| slides(i))).collect())
}
