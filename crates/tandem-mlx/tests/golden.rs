//! Logits against Hugging Face transformers, on every fixture that `scripts/golden.py`, `scripts/tiny_gguf.py`,
//! `scripts/tiny_kquants.py` and `scripts/mlx_folder.py` made. The reference ran in f32 over the stored weights
//! (dequantized, for quantized files).

#![cfg(tandem_mlx)]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Golden, all_logits, exact, fixtures, load, options};
use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::conformance::{prompt, relative_error};
use tandem_mlx::MlxOptions;
use tandem_model::Checkpoint;
use tandem_model::decoder::Mixer;

/// Largest relative error in f32; a change of the mathematics costs 1e-4 and more.
const TOLERANCE: f32 = 1e-5;

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
        let in_f32 = golden.error(&mut load(&decoder, &weights, &exact()), "");
        let stored = golden.error(&mut load(&decoder, &weights, &options()), "");
        println!("{name}: relative error {in_f32:.2e} in f32, {stored:.2e} in the stored format");
        if !(in_f32 < TOLERANCE && stored < 3e-2) {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn repacked_gguf_equals_transformers_on_the_dequantized_weights() {
    let ways = [
        ("golden", "llama-gqa", ["f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"].as_slice()),
        ("golden_k", "llama-256", ["q5_k_m", "q4_k_m"].as_slice()),
    ];
    for (golden, model, formats) in ways {
        let golden = Golden::open(&fixtures().join(format!("gguf/{golden}.safetensors")));
        for format in formats {
            let file = fixtures().join(format!("gguf/{model}-{format}.gguf"));
            let Checkpoint { decoder, weights, .. } = Checkpoint::open(&file).unwrap();
            let error = golden.error(&mut load(&decoder, &weights, &exact()), &format!("{format}."));
            println!("{format}: relative error {error:.2e}");
            // The K files hold Q6_K matrices, which are rounded to 8 bits.
            let bound = if format.contains("_k_") { 3e-2 } else { TOLERANCE };
            assert!(error < bound, "{format}: {error}");
        }
    }
}

#[test]
fn float_weights_quantized_at_load_are_near() {
    let folder = fixtures().join("llama-gqa");
    let golden = Golden::open(&folder.join("golden.safetensors"));
    let (decoder, weights) = Checkpoint::open_network(&folder).unwrap();
    for (quant, bound) in [(tandem_mlx::Quant::Q8, 2e-2), (tandem_mlx::Quant::Q4, 0.4)] {
        let options = MlxOptions { quant: Some(quant), ..exact() };
        let error = golden.error(&mut load(&decoder, &weights, &options), "");
        println!("{quant:?}: relative error {error:.2e}");
        assert!(error > 1e-4, "{quant:?} must have quantized");
        assert!(error < bound, "{quant:?}: {error}");
    }
}

#[test]
fn capped_scores_equal_the_cpu_engine() {
    // No fixture has them; the CPU engine's mathematics is tested against transformers elsewhere.
    for name in ["llama-gqa", "mistral-window"] {
        let (mut decoder, weights) = Checkpoint::open_network(&fixtures().join(name)).unwrap();
        for layer in &mut decoder.layers {
            let Mixer::Attention(attention) = &mut layer.mixer;
            attention.softcap = Some(0.5);
        }
        let ids = prompt(3, 50, decoder.vocab_size);
        let cpu = CpuOptions { threads: Some(1), ..CpuOptions::default().exact() };
        let mut cpu = CpuEngine::load(&decoder, weights.clone(), &cpu, &mut (Box::new(|_| ()) as _)).unwrap();
        let expected = all_logits(&mut cpu, ids.clone());
        let got = all_logits(&mut load(&decoder, &weights, &exact()), ids.clone());
        let error = relative_error(&got, &expected);
        assert!(error < TOLERANCE, "{name}: {error}");
        for layer in &mut decoder.layers {
            let Mixer::Attention(attention) = &mut layer.mixer;
            attention.softcap = None;
        }
        let uncapped = all_logits(&mut load(&decoder, &weights, &exact()), ids);
        assert!(relative_error(&uncapped, &expected) > 1e-3, "{name}: the cap must matter");
    }
}
