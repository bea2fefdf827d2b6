//! Gemma 3 270M, the real thing, from its Q4_K_M file: logits, greedy tokens and likelihood against transformers on the
//! dequantized weights, past the window of 512 and after a fork there. Runs in the judged tier (`TANDEM_JUDGED=1`).

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::PathBuf;

use common::golden::{Golden, fixtures};
use serde_json::Value;
use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::conformance::relative_error;
use tandem_engine::{Engine, Fork, Input, Row, RowOut, SampleSpec, SeqId, Want, Which};
use tandem_model::Checkpoint;

fn json(name: &str) -> Value {
    let path = fixtures().join("gemma3-270m").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The model, or `None` outside the judged tier. A missing file is a loud skip.
fn model() -> Option<Checkpoint> {
    std::env::var_os("TANDEM_JUDGED")?;
    let home = PathBuf::from(std::env::var_os("TANDEM_HOME").expect("TANDEM_HOME in the judged tier"));
    let file = home.join("models/gemma3-270m.gguf");
    if !file.exists() {
        assert!(std::env::var_os("TANDEM_NO_SKIP").is_none(), "{} is missing", file.display());
        eprintln!("!!! SKIPPED: {} is missing; `tandem pull gemma3-270m`", file.display());
        return None;
    }
    Some(Checkpoint::open(&file).unwrap())
}

fn engine(model: &Checkpoint) -> CpuEngine {
    let options = CpuOptions { context: Some(1536), ..CpuOptions::default().exact() };
    CpuEngine::load(&model.decoder, model.weights.clone(), &options, &mut (Box::new(|_| ()) as _)).unwrap()
}

fn feed(engine: &mut CpuEngine, seq: SeqId, input: Input, want: Want) -> RowOut {
    let ticket = engine.submit(&[Row { seq, input, want }]).unwrap();
    engine.collect(ticket).unwrap().remove(0)
}

/// Greedy tokens that follow `input`.
fn greedy(engine: &mut CpuEngine, seq: SeqId, input: &[u32], count: usize) -> Vec<u32> {
    let (head, tail) = input.split_at(input.len().saturating_sub(400));
    head.chunks(400).for_each(|part| {
        feed(engine, seq, Input::Tokens(part.to_vec()), Want::Nothing);
    });
    let mut input = Input::Tokens(tail.to_vec());
    let mut tokens = Vec::new();
    while tokens.len() < count {
        let RowOut::Sampled(sampled) = feed(engine, seq, input, Want::Sample(SampleSpec::greedy())) else {
            panic!("no sample")
        };
        tokens.push(sampled.token);
        input = Input::PreviousSample;
    }
    tokens
}

#[test]
fn judged_greedy_tokens_equal_transformers_cold_and_after_a_prefix_hit() {
    let Some(model) = model() else { return };
    let mut engine = engine(&model);
    for prompt in json("greedy.json").as_array().unwrap() {
        let (name, text) = (prompt["name"].as_str().unwrap(), prompt["prompt"].as_str().unwrap());
        let (input, theirs) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
        assert_eq!(model.tokenizer.encode(text, true).unwrap(), input, "{name}: prompt ids");
        let seq = engine.open(input.len() + theirs.len(), None).unwrap();
        let tokens = greedy(&mut engine, seq, &input, theirs.len());
        println!("{name}: {} + {:?}", input.len(), model.tokenizer.decode(&tokens, true));
        let part = tokens.iter().zip(&theirs).position(|(ours, theirs)| ours != theirs);
        if let Some(at) = part {
            let top = &prompt["top2"][at];
            let gap = top[0][1].as_f64().unwrap() - top[1][1].as_f64().unwrap();
            assert!(gap < 1e-3, "{name}: token {at} differs though the top two are {gap} apart");
        }
        // The same from a prefix that another sequence computed.
        let at = input.len() - 3;
        let Fork::Exact(fork) = engine.fork(seq, at, input.len() + theirs.len()).unwrap() else {
            panic!("inexact")
        };
        assert_eq!(greedy(&mut engine, fork, &input[at..], theirs.len()), tokens, "{name}: after a fork");
        engine.close(seq).unwrap();
        engine.close(fork).unwrap();
    }
}

#[test]
fn judged_logits_and_likelihood_equal_transformers_past_the_window() {
    let Some(model) = model() else { return };
    let mut engine = engine(&model);
    let (reference, golden) = (json("nll.json"), fixtures().join("gemma3-270m/logits.safetensors"));
    let (golden, tokens) = (Golden::open(&golden), ids(&reference["ids"]));
    let (positions, columns) = (golden.ids("positions"), golden.ids("columns"));
    let theirs = golden.floats("logits");
    let seq = engine.open(tokens.len(), None).unwrap();
    let (mut nll, mut worst) = (Vec::new(), 0f32);
    // Parts of 64, as the logits of a whole text take a gigabyte.
    for (part, fed) in tokens.chunks(64).enumerate() {
        let input = Input::Tokens(fed.to_vec());
        let RowOut::Logits(logits) = feed(&mut engine, seq, input, Want::Logits(Which::All)) else {
            panic!("no logits")
        };
        for (i, row) in logits.values.chunks(logits.vocab).enumerate() {
            let position = part * 64 + i;
            if let Some(&next) = tokens.get(position + 1) {
                let max = row.iter().copied().fold(f32::MIN, f32::max);
                let sum: f64 = row.iter().map(|l| f64::from(l - max).exp()).sum();
                nll.push(sum.ln() - f64::from(row[next as usize] - max));
            }
            if let Some(at) = positions.iter().position(|kept| *kept as usize == position) {
                let got: Vec<f32> = columns.iter().map(|column| row[*column as usize]).collect();
                let error = relative_error(&got, &theirs[at * columns.len()..][..columns.len()]);
                println!("position {position}: relative error {error:.1e}");
                worst = worst.max(error);
            }
        }
    }
    assert!(worst < 1e-3, "{worst}");
    let mean = |nll: &[f64]| nll.iter().sum::<f64>() / nll.len() as f64;
    for (ours, key) in [(mean(&nll), "mean_nll"), (mean(&nll[512..]), "mean_nll_past_window")] {
        println!("{key} {ours:.6}, transformers {}", reference[key]);
        assert!((ours - reference[key].as_f64().unwrap()).abs() < 1e-4, "{key}");
    }
}
