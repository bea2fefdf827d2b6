//! Logits against Hugging Face transformers: every fixture that `scripts/golden.py` and `scripts/tiny_gguf.py` made.
//!
//! The reference ran in f32 over the stored weights (dequantized, for quantized files).

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::golden::{Golden, TOLERANCE, error, fixtures, options};
use tandem_cpu::CpuOptions;
use tandem_engine::KvType;
use tandem_model::Checkpoint;

#[test]
fn every_folder_equals_transformers() {
    let mut names: Vec<String> = std::fs::read_dir(fixtures())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| fixtures().join(name).join("config.json").exists())
        .collect();
    names.sort();
    assert!(names.len() >= 17, "{names:?}");
    let mut wrong = Vec::new();
    for name in names {
        let folder = fixtures().join(&name);
        let golden = Golden::open(&folder.join("golden.safetensors"));
        let (decoder, weights) = Checkpoint::open_network(&folder).unwrap();
        let exact = error(&decoder, &weights, &golden, "", &options().exact());
        let half = CpuOptions { kv: KvType::F16, ..options().exact() };
        let half_kv = error(&decoder, &weights, &golden, "", &half);
        println!("{name}: relative error {exact:.2e} in f32, {half_kv:.2e} with an f16 KV cache");
        if !(exact < TOLERANCE && half_kv < 5e-3) {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn gguf_equals_transformers_on_the_dequantized_weights() {
    let ways = [
        ("golden", "llama-gqa", ["f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"].as_slice()),
        ("golden_k", "llama-256", ["q5_k_m", "q4_k_m"].as_slice()),
    ];
    for (golden, model, formats) in ways {
        let golden = Golden::open(&fixtures().join(format!("gguf/{golden}.safetensors")));
        for format in formats {
            let file = fixtures().join(format!("gguf/{model}-{format}.gguf"));
            let Checkpoint { decoder, weights, .. } = Checkpoint::open(&file).unwrap();
            let prefix = format!("{format}.");
            let exact = error(&decoder, &weights, &golden, &prefix, &options().exact());
            let fast = error(&decoder, &weights, &golden, &prefix, &options());
            println!(
                "{format}: relative error {exact:.2e} exact, {fast:.2e} with 8-bit activations and f16 KV"
            );
            assert!(exact < TOLERANCE, "{format}: {exact} exact");
            assert!(fast < 5e-2, "{format}: {fast} with 8-bit activations");
        }
    }
}

#[test]
fn mlx_folder_is_near_transformers_with_8_bit_activations() {
    let folder = fixtures().join("mlx-llama-gqa");
    let golden = Golden::open(&folder.join("golden.safetensors"));
    let (decoder, weights) = Checkpoint::open_network(&folder).unwrap();
    let fast = error(&decoder, &weights, &golden, "", &options());
    println!("MLX: relative error {fast:.2e} with 8-bit activations and f16 KV");
    assert!(fast < 5e-2, "{fast} with 8-bit activations");
}

#[test]
fn gguf_files_equal_transformers_on_the_folder_of_the_same_weights() {
    let of_llama_cpp =
        ["qwen2-yarn", "qwen3", "gemma3-vision", "phi3-longrope", "smollm3", "olmo2", "granite"];
    let files = of_llama_cpp.map(|name| (name, name.to_owned()));
    for (name, file) in files.into_iter().chain([("llama-gqa", "llama-gqa-f16".to_owned())]) {
        let golden = Golden::open(&fixtures().join(name).join("golden.safetensors"));
        let file = fixtures().join(format!("gguf/{file}.gguf"));
        let Checkpoint { decoder, weights, .. } = Checkpoint::open(&file).unwrap();
        let exact = error(&decoder, &weights, &golden, "", &options().exact());
        println!("{name}: relative error {exact:.2e}");
        assert!(exact < TOLERANCE, "{name}: {exact}");
    }
}
