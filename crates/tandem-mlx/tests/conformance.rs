//! The MLX engine keeps the contract, for every architecture of the fixtures and every kind of stored weights.

#![cfg(tandem_mlx)]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{exact, fixtures, load, options};
use tandem_engine::Engine;
use tandem_mlx::MlxOptions;
use tandem_model::Checkpoint;

fn engine(path: &str, options: &MlxOptions) -> Box<dyn Engine> {
    let path = fixtures().join(path);
    let (mut decoder, weights) = if path.is_dir() {
        Checkpoint::open_network(&path).unwrap()
    } else {
        let Checkpoint { decoder, weights, .. } = Checkpoint::open(&path).unwrap();
        (decoder, weights)
    };
    decoder.max_context = decoder.max_context.max(256);
    Box::new(load(&decoder, &weights, options))
}

macro_rules! conform {
    ($($name:ident: $path:literal, $options:expr, $tolerance:expr;)*) => {
        $(mod $name {
            use super::*;
            tandem_engine::conformance_tests!(|| engine($path, &$options), tolerance = $tolerance);
        })*
    };
}

conform! {
    gemma3: "gemma3", exact(), 1e-5;
    gemma3_vision: "gemma3-vision", exact(), 1e-5;
    granite: "granite", exact(), 1e-5;
    llama_dynamic: "llama-dynamic", exact(), 1e-5;
    llama_gqa: "llama-gqa", exact(), 1e-5;
    llama_gqa_bf16: "llama-gqa", options(), 3e-2;
    llama_gqa_4_bit: "mlx-llama-gqa", options(), 3e-2;
    llama_gqa_4_bit_exact: "mlx-llama-gqa", exact(), 1e-5;
    llama_gqa_q4_0: "gguf/llama-gqa-q4_0.gguf", options(), 1e-5;
    llama_linear: "llama-linear", exact(), 1e-5;
    llama_tied_bias: "llama-tied-bias", exact(), 1e-5;
    llama_yarn: "llama-yarn", exact(), 1e-5;
    llama3_rope: "llama3-rope", exact(), 1e-5;
    llama3_rope_f16: "llama3-rope", options(), 1e-2;
    mistral_window: "mistral-window", exact(), 1e-5;
    olmo2: "olmo2", exact(), 1e-5;
    phi3_longrope: "phi3-longrope", exact(), 1e-5;
    phi3_window: "phi3-window", exact(), 1e-5;
    qwen2_window: "qwen2-window", exact(), 1e-5;
    qwen2_yarn: "qwen2-yarn", exact(), 1e-5;
    qwen3: "qwen3", exact(), 1e-5;
    smollm3: "smollm3", exact(), 1e-5;
}
