//! Phi 3, 3.5 and Phi 4 mini (`Phi3ForCausalLM`): Llama with q, k and v stored as one matrix, gate and up as another, and
//! rope over part of the head, stretched by LongRoPE.

use super::Architecture;
use super::common::{Biases, Defaults, Shape, Skeleton, gguf_window};
use super::rope::{gguf_partial_rope, partial_rope};
use crate::config::Config;
use crate::decoder::{Decoder, Mixer, Rope};
use crate::error::ModelError;
use crate::weights::Weights;

pub(super) const PHI3: Architecture =
    Architecture::new("phi3", "Phi3ForCausalLM", from_config).with_gguf("phi3", from_gguf);

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.expect("hidden_act", "silu")?;
    // Phi 4 mini states what its code does not offer.
    for key in ["attention_bias", "mlp_bias", "lm_head_bias"] {
        config.expect(key, false)?;
    }
    config.expect("full_attn_mod", 1)?;
    config.expect("interpolate_factor", 1)?;
    config.ignore(&["attention_dropout", "auto_map", "embd_pdrop", "resid_pdrop"]);
    let shape = Shape::from_config(config, &Defaults { eps: 1e-5, context: 4096, ..Defaults::LLAMA })?;
    let rope = partial_rope(config, &shape, 10_000.0)?;
    let mut skeleton = Skeleton::hugging_face(&shape, Biases::default());
    [skeleton.names.q, skeleton.names.k, skeleton.names.v] = ["self_attn.qkv_proj"; 3];
    [skeleton.names.gate, skeleton.names.up] = ["mlp.gate_up_proj"; 2];
    Ok(decoder(&skeleton, &rope, config.optional_size("sliding_window", None)?))
}

fn from_gguf(config: &Config, weights: &Weights) -> Result<Decoder, ModelError> {
    let shape = Shape::from_gguf(config, weights)?;
    let rope = gguf_partial_rope(config, weights, &shape)?;
    let mut skeleton = Skeleton::gguf(&shape, weights, false);
    [skeleton.names.q, skeleton.names.k, skeleton.names.v] = ["attn_qkv"; 3];
    skeleton.names.gate = skeleton.names.up;
    Ok(decoder(&skeleton, &rope, gguf_window(config)?))
}

fn decoder(skeleton: &Skeleton<'_>, rope: &Rope, window: Option<usize>) -> Decoder {
    let shape = skeleton.shape;
    let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let mut decoder = skeleton.decoder("phi3", rope);
    for layer in &mut decoder.layers {
        let Mixer::Attention(attention) = &mut layer.mixer;
        attention.window = window;
        attention.q.weight.rows = Some(0..q);
        attention.k.weight.rows = Some(q..q + kv);
        attention.v.weight.rows = Some(q + kv..q + 2 * kv);
        layer.mlp.gate.weight.rows = Some(0..shape.intermediate);
        layer.mlp.up.weight.rows = Some(shape.intermediate..2 * shape.intermediate);
    }
    decoder
}
