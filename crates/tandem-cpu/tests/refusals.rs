//! What the engine refuses to load, and what its errors say.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::{Features, Tiny, options};
use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::{Engine, EngineError, Input, Row, Want};
use tandem_model::decoder::Mixer;
use tandem_model::format::Format;

fn refusal(tiny: &Tiny, options: &CpuOptions) -> EngineError {
    let progress = &mut (Box::new(|_| ()) as _);
    match CpuEngine::load(&tiny.decoder, Arc::clone(&tiny.weights), options, progress) {
        Ok(_) => panic!("must be refused"),
        Err(error) => error,
    }
}

#[test]
fn a_model_too_large_for_the_budget_is_refused_before_loading_with_the_numbers() {
    let tiny = Tiny::new(Format::F32, Features::default());
    let error = refusal(&tiny, &CpuOptions { memory_budget: Some(100_000), ..options(1) });
    let EngineError::OutOfMemory { needed, available, .. } = &error else { panic!("{error}") };
    assert!(*needed > 100_000 && *available == 100_000);
    let text = error.to_string();
    assert!(
        text.contains("bytes of weights") && text.contains("context of 512") && text.contains("hint:"),
        "{text}"
    );
}

#[test]
fn kv_beyond_the_budget_is_refused_and_nothing_changes() {
    let tiny = Tiny::new(Format::F32, Features::default());
    let mut probe = tiny.engine(&options(1));
    let needed = probe.memory().weights + 512 * probe.capabilities().kv_bytes_per_token;
    let scratch = 700_000;
    let mut engine = tiny.engine(&CpuOptions { memory_budget: Some(needed + scratch), ..options(1) });
    let limit = engine.memory().kv_limit;
    let mut opened = Vec::new();
    let error = loop {
        let seq = engine.open(512, None).unwrap();
        let row = Row { seq, input: Input::Tokens(vec![1; 200]), want: Want::Nothing };
        match engine.submit(&[row]) {
            Ok(ticket) => engine.collect(ticket).map(drop).unwrap(),
            Err(error) => break (error, engine.len(seq)),
        }
        opened.push(seq);
    };
    assert!(matches!(error.0, EngineError::OutOfMemory { .. }), "{}", error.0);
    assert_eq!(error.1, Ok(0));
    assert!(engine.memory().kv_exclusive <= limit);
    assert!(probe.open(513, None).is_err());
}

#[test]
fn contexts_threads_and_shapes_out_of_range_are_named() {
    let mut tiny = Tiny::new(Format::F32, Features::default());
    let error = refusal(&tiny, &CpuOptions { context: Some(1000), ..options(1) });
    assert_eq!(error, EngineError::ContextOverflow { needed: 1000, limit: 512 });
    assert!(refusal(&tiny, &options(0)).to_string().contains("thread"));
    let Mixer::Attention(attention) = &mut tiny.decoder.layers[1].mixer;
    attention.head_dim = 12;
    let error = refusal(&tiny, &options(1)).to_string();
    assert!(error.contains("head dimension of 12 (layer 1)"), "{error}");
}

#[test]
fn a_missing_tensor_is_named() {
    let mut tiny = Tiny::new(Format::F32, Features::default());
    tiny.decoder.final_norm.weight.tensor = "elsewhere".into();
    assert!(refusal(&tiny, &options(1)).to_string().contains("tensor elsewhere is missing"));
}
