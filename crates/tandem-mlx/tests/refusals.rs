//! What the engine refuses, and what its errors say.

#![cfg(tandem_mlx)]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::{exact, fixtures, load, options};
use tandem_engine::{Engine, EngineError, Fork, Input, Row, Want};
use tandem_mlx::{MlxEngine, MlxOptions};
use tandem_model::{Checkpoint, Decoder, Weights};

fn llama() -> (Decoder, Arc<Weights>) {
    Checkpoint::open_network(&fixtures().join("llama-gqa")).unwrap()
}

fn refusal(decoder: &Decoder, weights: &Arc<Weights>, options: &MlxOptions) -> EngineError {
    match MlxEngine::load(decoder, Arc::clone(weights), options, &mut (Box::new(|_| ()) as _)) {
        Ok(_) => panic!("must be refused"),
        Err(error) => error,
    }
}

fn feed(engine: &mut MlxEngine, seq: tandem_engine::SeqId, count: usize) -> Result<(), EngineError> {
    let row = Row { seq, input: Input::Tokens(vec![1; count]), want: Want::Nothing };
    let ticket = engine.submit(&[row])?;
    engine.collect(ticket).map(drop)
}

#[test]
fn a_model_too_large_for_the_budget_is_refused_before_loading_with_the_numbers() {
    let (decoder, weights) = llama();
    let error = refusal(&decoder, &weights, &MlxOptions { memory_budget: Some(100_000), ..options() });
    let EngineError::OutOfMemory { needed, available, .. } = &error else { panic!("{error}") };
    assert!(*needed > 100_000 && *available == 100_000);
    let text = error.to_string();
    assert!(text.contains("bytes of weights") && text.contains("hint:"), "{text}");
}

#[test]
fn kv_beyond_the_budget_is_refused_and_nothing_changes() {
    let (mut decoder, weights) = llama();
    decoder.max_context = 512;
    let probe = load(&decoder, &weights, &exact());
    let one = 512 * probe.capabilities().kv_bytes_per_token;
    let scratch = (1 << 30) - probe.memory().weights - probe.memory().kv_limit;
    let budget = probe.memory().weights + scratch + 2 * one;
    let mut engine = load(&decoder, &weights, &MlxOptions { memory_budget: Some(budget), ..exact() });
    let limit = engine.memory().kv_limit;
    let mut opened = 0;
    let (error, seq) = loop {
        let seq = engine.open(512, None).unwrap();
        match feed(&mut engine, seq, 200) {
            Ok(()) => opened += 1,
            Err(error) => break (error, seq),
        }
    };
    assert!(matches!(error, EngineError::OutOfMemory { .. }), "{error}");
    assert!(opened >= 2);
    assert_eq!(engine.len(seq), Ok(0));
    assert!(engine.memory().kv_exclusive <= limit);
}

#[test]
fn contexts_and_adapters_are_refused_by_name() {
    let (decoder, weights) = llama();
    let beyond = decoder.max_context + 1;
    let error = refusal(&decoder, &weights, &MlxOptions { context: Some(beyond), ..options() });
    assert_eq!(error, EngineError::ContextOverflow { needed: beyond, limit: decoder.max_context });
    let mut engine = load(&decoder, &weights, &options());
    let error = engine.open(10, Some(tandem_engine::AdapterId(1))).unwrap_err();
    assert!(error.to_string().contains("adapters"), "{error}");
    let mut bad = decoder.clone();
    bad.final_norm.weight.tensor = "elsewhere".into();
    assert!(refusal(&bad, &weights, &options()).to_string().contains("tensor elsewhere is missing"));
    bad = decoder;
    bad.layers.clear();
    assert!(refusal(&bad, &weights, &options()).to_string().contains("a model without layers"));
}

#[test]
fn a_fork_is_copied_once_by_the_side_that_writes() {
    let (mut decoder, weights) = llama();
    decoder.max_context = 1024;
    let mut engine = load(&decoder, &weights, &MlxOptions { max_step_tokens: 600, ..exact() });
    let source = engine.open(1024, None).unwrap();
    feed(&mut engine, source, 300).unwrap();
    let whole = engine.sequence_bytes(source).unwrap().exclusive;
    let Fork::Exact(fork) = engine.fork(source, 200, 1024).unwrap() else { panic!("inexact") };
    assert_eq!(engine.memory().kv_shared, whole);
    feed(&mut engine, fork, 1).unwrap();
    // The fork has taken the 200 tokens it shares, in one chunk; the source has what it had.
    let own = engine.sequence_bytes(fork).unwrap().exclusive;
    assert_eq!(own, 256 * engine.capabilities().kv_bytes_per_token);
    assert_eq!(engine.sequence_bytes(source).unwrap().exclusive, whole);
    feed(&mut engine, fork, 1).unwrap();
    assert_eq!(engine.sequence_bytes(fork).unwrap().exclusive, own);
}
