//! Qwen 3 (`Qwen3ForCausalLM`): Qwen 2 without the biases, queries and keys normed head by head.

use super::Architecture;
use super::common::{Biases, Defaults, Shape, Skeleton, layers};
use super::qwen2;
use super::rope::{gguf_rope, rope};
use crate::config::Config;
use crate::decoder::{Decoder, QkNormOver};
use crate::error::ModelError;
use crate::weights::Weights;

pub(super) const QWEN3: Architecture =
    Architecture::new("qwen3", "Qwen3ForCausalLM", from_config).with_gguf("qwen3", from_gguf);

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.expect("hidden_act", "silu")?;
    config.ignore(&["attention_dropout"]);
    let bias = config.flag_or("attention_bias", false)?;
    let shape = Shape::from_config(config, &Defaults { head_dim: Some(128), ..qwen2::DEFAULTS })?;
    let rope = rope(config, &shape, 10_000.0)?;
    let windows = qwen2::windows(config, shape.layers)?;
    let skeleton = Skeleton::hugging_face(&shape, Biases { qkv: bias, o: bias, mlp: false });
    let mut decoder = skeleton.decoder("qwen3", &rope);
    for (i, attention) in layers(&mut decoder) {
        attention.window = windows[i];
        attention.qk_norm = Some(skeleton.qk_norm(i, QkNormOver::Head));
    }
    Ok(decoder)
}

fn from_gguf(config: &Config, weights: &Weights) -> Result<Decoder, ModelError> {
    let shape = Shape::from_gguf(config, weights)?;
    let rope = gguf_rope(config, weights, &shape)?;
    let skeleton = Skeleton::gguf(&shape, weights, false);
    let mut decoder = skeleton.decoder("qwen3", &rope);
    for (i, attention) in layers(&mut decoder) {
        attention.qk_norm = Some(skeleton.qk_norm(i, QkNormOver::Head));
    }
    Ok(decoder)
}
