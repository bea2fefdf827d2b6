//! SmolLM2-135M as mlx-lm quantizes it to 4 bits: greedy tokens against mlx-lm's. Runs in the judged tier
//! (`TANDEM_JUDGED=1`), on the folder that the CPU engine's judged tests made.

#![cfg(tandem_mlx)]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::PathBuf;

use common::{fixtures, load};
use serde_json::Value;
use tandem_engine::{Engine, Input, Row, RowOut, SampleSpec, Want};
use tandem_mlx::MlxOptions;
use tandem_model::Checkpoint;

/// Tokens of each prompt that are compared: MLX's CPU backend manages a few a second.
const TOKENS: usize = 8;

fn json(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join(path)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn judged_greedy_tokens_equal_mlx_lm() {
    if std::env::var_os("TANDEM_JUDGED").is_none() {
        eprintln!("skipped: TANDEM_JUDGED is not set");
        return;
    }
    let home = PathBuf::from(std::env::var_os("TANDEM_HOME").expect("TANDEM_HOME in the judged tier"));
    let (decoder, weights) = Checkpoint::open_network(&home.join("smollm2-mlx-4bit")).unwrap();
    let options = MlxOptions { context: Some(512), ..MlxOptions::default() };
    let mut engine = load(&decoder, &weights, &options);
    let (prompts, references) = (json("smollm2/greedy.json"), json("smollm2/greedy_mlx.json"));
    let prompts = prompts.as_array().unwrap();
    let references = references.as_array().unwrap();
    assert_eq!(prompts.len(), 10);

    // All ten decode in one ragged batch, the next step submitted before the last is collected.
    let (mut seqs, mut tickets) = (Vec::new(), Vec::new());
    for prompt in prompts {
        let prompt = ids(&prompt["ids"]);
        let seq = engine.open(prompt.len() + TOKENS, None).unwrap();
        let want = Want::Sample(SampleSpec::greedy());
        let ticket = engine.submit(&[Row { seq, input: Input::Tokens(prompt), want }]).unwrap();
        seqs.push(seq);
        tickets.push(vec![ticket]);
    }
    let mut tokens: Vec<Vec<u32>> = vec![Vec::new(); seqs.len()];
    let token = |out: &RowOut| match out {
        RowOut::Sampled(sampled) => sampled.token,
        other => panic!("no sample: {other:?}"),
    };
    for (tokens, tickets) in tokens.iter_mut().zip(tickets) {
        for ticket in tickets {
            tokens.extend(engine.collect(ticket).unwrap().iter().map(token));
        }
    }
    let mut steps = Vec::new();
    for _ in 1..TOKENS {
        let rows: Vec<Row> = seqs
            .iter()
            .map(|&seq| Row { seq, input: Input::PreviousSample, want: Want::Sample(SampleSpec::greedy()) })
            .collect();
        steps.push(engine.submit(&rows).unwrap());
    }
    for step in steps {
        for (tokens, out) in tokens.iter_mut().zip(engine.collect(step).unwrap()) {
            tokens.push(token(&out));
        }
    }

    for ((prompt, reference), tokens) in prompts.iter().zip(references).zip(tokens) {
        let name = reference["name"].as_str().unwrap();
        assert_eq!(prompt["name"], name);
        let theirs = ids(&reference["greedy"]);
        if let Some(step) = (0..theirs.len().min(TOKENS)).find(|&i| tokens[i] != theirs[i]) {
            let gap = reference["gaps"][step].as_f64().unwrap();
            println!("{name}: parts from mlx-lm at step {step}, where its top two are {gap} apart");
            assert!(gap < 1e-3, "{name}: {tokens:?} against {theirs:?}");
        }
    }
}
