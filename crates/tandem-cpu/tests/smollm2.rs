//! SmolLM2-135M, the real thing: greedy tokens against transformers and llama.cpp, likelihood of a text, and what 8-bit
//! activations cost. Runs in the judged tier (`TANDEM_JUDGED=1`), on the model in the store.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::{Engine, Input, KvType, Row, RowOut, SampleSpec, Want, Which};
use tandem_model::Checkpoint;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

fn json(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(path)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The model, or `None` outside the judged tier.
fn model() -> Option<Checkpoint> {
    if std::env::var_os("TANDEM_JUDGED").is_none() {
        eprintln!("skipped: TANDEM_JUDGED is not set");
        return None;
    }
    let home = PathBuf::from(std::env::var_os("TANDEM_HOME").expect("TANDEM_HOME in the judged tier"));
    Some(Checkpoint::open(&home.join("models/smollm2.gguf")).unwrap())
}

fn engine(model: &Checkpoint, options: &CpuOptions) -> CpuEngine {
    let options = CpuOptions { context: Some(2048), ..options.clone() };
    CpuEngine::load(&model.decoder, model.weights.clone(), &options, &mut (Box::new(|_| ()) as _)).unwrap()
}

/// Greedy tokens, up to `count` or the end token.
fn greedy(engine: &mut CpuEngine, prompt: &[u32], count: usize, end: u32) -> Vec<u32> {
    let seq = engine.open(prompt.len() + count, None).unwrap();
    let mut input = Input::Tokens(prompt.to_vec());
    let mut tokens = Vec::new();
    while tokens.len() < count && tokens.last() != Some(&end) {
        let row = Row { seq, input, want: Want::Sample(SampleSpec::greedy()) };
        let ticket = engine.submit(&[row]).unwrap();
        let RowOut::Sampled(sampled) = engine.collect(ticket).unwrap().remove(0) else { panic!("no sample") };
        tokens.push(sampled.token);
        input = Input::PreviousSample;
    }
    engine.close(seq).unwrap();
    tokens
}

/// Log-probabilities of every next token, `[tokens, vocab]`.
fn log_probabilities(engine: &mut CpuEngine, tokens: &[u32]) -> Vec<Vec<f64>> {
    let seq = engine.open(tokens.len(), None).unwrap();
    let mut out = Vec::new();
    for part in tokens.chunks(256) {
        let row = Row { seq, input: Input::Tokens(part.to_vec()), want: Want::Logits(Which::All) };
        let ticket = engine.submit(&[row]).unwrap();
        let RowOut::Logits(logits) = engine.collect(ticket).unwrap().remove(0) else { panic!("no logits") };
        for logits in logits.values.chunks(logits.vocab) {
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
            out.push(logits.iter().map(|l| f64::from(l - max) - sum.ln()).collect());
        }
    }
    engine.close(seq).unwrap();
    out
}

/// A folder of the judged tier, made by a Python script once.
fn made(name: &str, script: &str, arguments: impl FnOnce(&Path) -> Vec<PathBuf>) -> PathBuf {
    let home = PathBuf::from(std::env::var_os("TANDEM_HOME").unwrap());
    let folder = home.join(name);
    if !folder.join("model.safetensors").exists() {
        let python = std::env::var_os("TANDEM_JUDGE_PYTHON").expect("TANDEM_JUDGE_PYTHON in the judged tier");
        let mut command = std::process::Command::new(python);
        command.arg(fixture("../scripts").join(script)).args(arguments(&home)).arg(&folder);
        assert!(command.status().unwrap().success());
    }
    folder
}

/// The Hugging Face folder with the GGUF's dequantized weights.
fn folder() -> PathBuf {
    made("smollm2-f32", "smollm2_folder.py", |home| vec![home.join("models/smollm2.gguf")])
}

/// That folder as mlx-lm quantizes it to 4 bits.
fn mlx_folder() -> PathBuf {
    made("smollm2-mlx-4bit", "smollm2_mlx.py", |_| vec!["convert".into(), folder()])
}

fn greedy_equals_the_references(model: &Checkpoint) {
    let mut engine = engine(model, &CpuOptions::default().exact());
    let llama_cpp = &json("smollm2/greedy_llama_cpp.json")["f32"];
    for prompt in json("smollm2/greedy.json").as_array().unwrap() {
        let name = prompt["name"].as_str().unwrap();
        let text = prompt["prompt"].as_str().unwrap();
        assert_eq!(model.tokenizer.encode(text, false).unwrap(), ids(&prompt["ids"]), "{name}: prompt ids");
        let tokens = greedy(&mut engine, &ids(&prompt["ids"]), 32, 2);
        assert_eq!(tokens, ids(&prompt["greedy"]), "{name}: against transformers");
        assert_eq!(tokens, ids(&llama_cpp[name]), "{name}: against llama.cpp on the dequantized weights");
    }
}

#[test]
fn judged_greedy_tokens_of_the_gguf_equal_transformers_and_llama_cpp() {
    let Some(model) = model() else { return };
    greedy_equals_the_references(&model);
}

#[test]
fn judged_greedy_tokens_of_the_dequantized_folder_equal_transformers_and_llama_cpp() {
    if model().is_none() {
        return;
    }
    greedy_equals_the_references(&Checkpoint::open(&folder()).unwrap());
}

#[test]
fn judged_greedy_tokens_of_the_mlx_folder_equal_mlx_lm() {
    if model().is_none() {
        return;
    }
    let model = Checkpoint::open(&mlx_folder()).unwrap();
    let mut engine = engine(&model, &CpuOptions::default().exact());
    let prompts = json("smollm2/greedy.json");
    for (prompt, reference) in
        prompts.as_array().unwrap().iter().zip(json("smollm2/greedy_mlx.json").as_array().unwrap())
    {
        let name = reference["name"].as_str().unwrap();
        assert_eq!(prompt["name"], name);
        let (tokens, theirs) = (greedy(&mut engine, &ids(&prompt["ids"]), 32, 2), ids(&reference["greedy"]));
        if let Some(step) = (0..theirs.len()).find(|&i| tokens.get(i) != Some(&theirs[i])) {
            let gap = reference["gaps"][step].as_f64().unwrap();
            println!("{name}: parts from mlx-lm at step {step}, where its top two are {gap} apart");
            assert!(gap < 1e-3, "{name}: {tokens:?} against {theirs:?}");
        }
    }
}

#[test]
fn judged_text_likelihood_equals_transformers_and_int8_activations_cost_little() {
    let Some(model) = model() else { return };
    let text = std::fs::read_to_string(fixture("text/persuasion.txt")).unwrap();
    let tokens = model.tokenizer.encode(&text, false).unwrap();
    let reference = json("smollm2/nll.json");
    assert_eq!(tokens.len() as u64, reference["tokens"].as_u64().unwrap());

    let exact = log_probabilities(&mut engine(&model, &CpuOptions::default().exact()), &tokens);
    let scored = tokens.len() - 1;
    let nll = (0..scored).map(|i| -exact[i][tokens[i + 1] as usize]).sum::<f64>() / scored as f64;
    println!("mean NLL {nll:.6}, transformers {}", reference["mean_nll"]);
    assert!((nll - reference["mean_nll"].as_f64().unwrap()).abs() < 1e-4);

    let only_kv = |kv| CpuOptions { kv, ..CpuOptions::default().exact() };
    let only_int8 = CpuOptions { kv: KvType::F32, ..CpuOptions::default() };
    for (name, options, bound) in [
        ("f16 KV", only_kv(KvType::F16), 1e-4),
        ("int8 activations", only_int8, 0.01),
        ("default", CpuOptions::default(), 0.01),
        ("8-bit KV", only_kv(KvType::Q8), 0.01),
        ("default with 8-bit KV", CpuOptions { kv: KvType::Q8, ..CpuOptions::default() }, 0.01),
    ] {
        let fast = log_probabilities(&mut engine(&model, &options), &tokens);
        let kl: Vec<f64> = exact
            .iter()
            .zip(&fast)
            .map(|(p, q)| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum())
            .collect();
        let mean = kl.iter().sum::<f64>() / kl.len() as f64;
        println!("{name}: mean KL {mean:.5} nats, largest {:.3}", kl.iter().copied().fold(0.0, f64::max));
        assert!(mean < bound, "{name}: mean KL {mean}");
    }
}

/// The mean negative log-likelihood of each token after the first of its window.
fn mean_nll(engine: &mut CpuEngine, tokens: &[u32], window: usize) -> f64 {
    let (mut sum, mut scored) = (0.0, 0);
    for window in tokens.chunks(window) {
        let seq = engine.open(window.len(), None).unwrap();
        let mut next = window[1..].iter();
        for part in window.chunks(256) {
            let row = Row { seq, input: Input::Tokens(part.to_vec()), want: Want::Logits(Which::All) };
            let ticket = engine.submit(&[row]).unwrap();
            let RowOut::Logits(logits) = engine.collect(ticket).unwrap().remove(0) else {
                panic!("no logits")
            };
            for (logits, token) in logits.values.chunks(logits.vocab).zip(next.by_ref()) {
                let max = logits.iter().copied().fold(f32::MIN, f32::max);
                let total: f64 = logits.iter().map(|l| f64::from((l - max).exp())).sum();
                sum += total.ln() - f64::from(logits[*token as usize] - max);
                scored += 1;
            }
        }
        engine.close(seq).unwrap();
    }
    sum / f64::from(scored)
}

#[test]
fn judged_perplexity_is_that_of_the_weights() {
    const TOKENS: usize = 8192;
    const WINDOW: usize = 2048;
    let Some(model) = model() else { return };
    let text = std::fs::read_to_string(fixture("text/persuasion-long.txt")).unwrap();
    let tokens = model.tokenizer.encode(&text, false).unwrap();
    assert!(tokens.len() >= TOKENS, "{} tokens", tokens.len());
    let perplexity =
        |options: &CpuOptions| mean_nll(&mut engine(&model, options), &tokens[..TOKENS], WINDOW).exp();
    let exact = perplexity(&CpuOptions::default().exact());
    let default = perplexity(&CpuOptions::default());
    println!("perplexity {exact:.4} exact, {default:.4} by default");
    assert!((default / exact - 1.0).abs() < 0.005, "{default} for {exact}");
}
