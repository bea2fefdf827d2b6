//! Logits against Hugging Face transformers: every fixture that `scripts/golden.py` and `scripts/tiny_gguf.py` made.
//!
//! The reference ran in f32 over the stored weights (dequantized, for quantized files).

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::conformance::relative_error;
use tandem_engine::{Engine, Input, KvType, Row, RowOut, Want, Which};
use tandem_model::Checkpoint;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    fn open(path: &Path) -> Self {
        Self { bytes: std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())) }
    }

    fn values<T>(&self, name: &str, read: fn([u8; 4]) -> T) -> Vec<T> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        tensor.data().as_chunks::<4>().0.iter().map(|bytes| read(*bytes)).collect()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.values(name, u32::from_le_bytes)
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.values(name, f32::from_le_bytes)
    }
}

/// The largest relative error over the golden's two sequences, each at its positions.
fn worst(checkpoint: &Path, golden: &Golden, prefix: &str, options: &CpuOptions) -> f32 {
    let (decoder, weights) = if checkpoint.is_dir() {
        Checkpoint::open_network(checkpoint).unwrap()
    } else {
        let Checkpoint { decoder, weights, .. } = Checkpoint::open(checkpoint).unwrap();
        (decoder, weights)
    };
    let mut engine = CpuEngine::load(&decoder, weights, options, &mut (Box::new(|_| ()) as _)).unwrap();
    let vocab = decoder.vocab_size;
    let mut worst = 0.0f32;
    for sequence in 0..2 {
        let ids = golden.ids(&format!("ids.{sequence}"));
        let positions = golden.ids(&format!("positions.{sequence}"));
        let reference = golden.floats(&format!("{prefix}logits.{sequence}"));
        assert_eq!(reference.len(), positions.len() * vocab);
        let seq = engine.open(ids.len(), None).unwrap();
        let row = Row { seq, input: Input::Tokens(ids), want: Want::Logits(Which::All) };
        let ticket = engine.submit(&[row]).unwrap();
        let RowOut::Logits(logits) = engine.collect(ticket).unwrap().remove(0) else { panic!("no logits") };
        let got: Vec<f32> = positions
            .iter()
            .flat_map(|position| logits.values[*position as usize * vocab..][..vocab].to_vec())
            .collect();
        worst = worst.max(relative_error(&got, &reference));
    }
    worst
}

fn options() -> CpuOptions {
    CpuOptions { threads: Some(2), memory_budget: Some(256 << 20), ..CpuOptions::default() }
}

#[test]
fn llama_family_equals_transformers() {
    for name in ["llama-gqa", "llama-tied-bias", "llama3-rope"] {
        let folder = fixtures().join(name);
        let golden = Golden::open(&folder.join("golden.safetensors"));
        let exact = worst(&folder, &golden, "", &options().exact());
        let half_kv = worst(&folder, &golden, "", &CpuOptions { kv: KvType::F16, ..options().exact() });
        println!("{name}: relative error {exact:.2e} in f32, {half_kv:.2e} with an f16 KV cache");
        assert!(exact < 1e-3, "{name}: {exact} in f32");
        assert!(half_kv < 5e-3, "{name}: {half_kv} with an f16 KV cache");
    }
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
            let exact = worst(&file, &golden, &format!("{format}."), &options().exact());
            let fast = worst(&file, &golden, &format!("{format}."), &options());
            println!(
                "{format}: relative error {exact:.2e} exact, {fast:.2e} with 8-bit activations and f16 KV"
            );
            assert!(exact < 1e-3, "{format}: {exact} exact");
            assert!(fast < 5e-2, "{format}: {fast} with 8-bit activations");
        }
    }
}

#[test]
fn mlx_folder_equals_transformers_on_the_dequantized_weights() {
    let folder = fixtures().join("mlx-llama-gqa");
    let golden = Golden::open(&folder.join("golden.safetensors"));
    let exact = worst(&folder, &golden, "", &options().exact());
    let fast = worst(&folder, &golden, "", &options());
    println!("MLX: relative error {exact:.2e} exact, {fast:.2e} with 8-bit activations and f16 KV");
    assert!(exact < 1e-3, "{exact} exact");
    assert!(fast < 5e-2, "{fast} with 8-bit activations");
}

#[test]
fn gguf_and_safetensors_of_the_same_weights_give_the_same_logits() {
    let golden = Golden::open(&fixtures().join("llama-gqa/golden.safetensors"));
    let file = fixtures().join("gguf/llama-gqa-f16.gguf");
    let error = worst(&file, &golden, "", &options().exact());
    println!("relative error {error:.2e}");
    assert!(error < 1e-5, "{error}");
}
