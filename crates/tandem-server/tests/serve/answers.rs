//! What is answered.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use tandem_engine::SampleSpec;
use tandem_engine::fake::FakeEngine;
use tandem_server::Options;

use crate::harness::{
    CONTEXT, VOCAB, checkpoint, decode, expected, fake, fake_with, hello, hello_tokens, tiny, with,
};

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

#[test]
fn a_chat_is_answered_in_openais_shape() {
    let server = fake();
    let reply = server.post("/v1/chat/completions", &hello());
    assert_eq!(reply.headers["x-tandem-route"], "fake; the only engine");
    let answer = reply.json();
    let tokens = expected(&hello_tokens(), &SampleSpec::greedy(), 12);
    assert_eq!(text(&answer), decode(&tokens));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("chat.completion"), &json!("tiny")));
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-") && answer["created"].as_u64() > Some(1));
    let choice = &answer["choices"][0];
    assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(0), &json!("length")));
    assert_eq!((&choice["message"]["role"], &choice["logprobs"]), (&json!("assistant"), &Value::Null));
    assert_eq!(choice["tandem"]["route"], json!({"engine": "fake", "reason": "the only engine"}));
    assert!(choice["tandem"]["timing"]["ttft"].as_f64() > Some(0.0));
    let prompt = hello_tokens().len();
    let details = |cached: usize| {
        json!({"prompt_tokens": prompt, "completion_tokens": 12,
        "total_tokens": prompt + 12, "prompt_tokens_details": {"cached_tokens": cached}})
    };
    assert_eq!(answer["usage"], details(0));
    assert_eq!(server.chat(&json!({}))["usage"], details(prompt - 1));
}

#[test]
fn every_sampling_parameter_is_honoured() {
    let server = fake();
    let prompt: Vec<u32> = (10..30).collect();
    let base = SampleSpec { temperature: 1.0, seed: 7, ..SampleSpec::greedy() };
    let mut answers = BTreeSet::new();
    for (fields, spec) in [
        (json!({}), base.clone()),
        (json!({"temperature": 0}), SampleSpec::greedy()),
        (json!({"seed": 8}), SampleSpec { seed: 8, ..base.clone() }),
        (json!({"seed": -1}), SampleSpec { seed: u64::MAX, ..base.clone() }),
        (json!({"top_p": 0.2}), SampleSpec { top_p: 0.2, ..base.clone() }),
        (json!({"top_k": 3}), SampleSpec { top_k: 3, ..base.clone() }),
        (json!({"min_p": 0.5}), SampleSpec { min_p: 0.5, ..base.clone() }),
        (json!({"repetition_penalty": 30.0}), SampleSpec { repetition_penalty: 30.0, ..base.clone() }),
        (json!({"presence_penalty": 1.5}), SampleSpec { presence_penalty: 1.5, ..base.clone() }),
        (json!({"frequency_penalty": -9.0}), SampleSpec { frequency_penalty: -9.0, ..base.clone() }),
        (
            json!({"logit_bias": {"50": 5, "51": -100}}),
            SampleSpec { logit_bias: vec![(50, 5.0), (51, -100.0)], ..base.clone() },
        ),
    ] {
        let asked =
            json!({"prompt": prompt, "max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": true});
        let answer = server.complete(&with(asked, &fields));
        let answer = answer["choices"][0]["text"].as_str().unwrap();
        assert_eq!(answer, decode(&expected(&prompt, &spec, 40)), "{fields}");
        answers.insert(answer.to_owned());
    }
    assert!(answers.len() >= 10, "some parameter made no difference, so this proves little");
}

#[test]
fn a_stream_is_the_same_answer_in_pieces() {
    let server = fake();
    let asked = with(hello(), &json!({"n": 2, "temperature": 1.0, "max_tokens": 30}));
    let whole = server.chat(&asked);
    let (events, done) = server.events(
        "/v1/chat/completions",
        &with(asked.clone(), &json!({"stream_options": {"include_usage": true}})),
    );
    assert!(done);
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(60)));
    let mut texts = [String::new(), String::new()];
    let mut ended = [false, false];
    for chunk in chunks {
        assert_eq!((&chunk["object"], &chunk["id"]), (&json!("chat.completion.chunk"), &last["id"]));
        assert!(chunk.as_object().unwrap().contains_key("usage") && chunk["usage"].is_null());
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        assert!(!ended[index]);
        let first = texts[index].is_empty();
        assert_eq!(choice["delta"]["role"], if first { json!("assistant") } else { Value::Null });
        texts[index] += choice["delta"]["content"].as_str().unwrap_or_default();
        ended[index] = !choice["finish_reason"].is_null();
    }
    assert_eq!(ended, [true, true]);
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(*text, whole["choices"][index]["message"]["content"]);
    }

    // Without usage, there is no such field at all; the other endpoint streams too.
    let (events, done) = server.events("/v1/completions", &json!({"prompt": "a", "ignore_eos": true}));
    assert!(done && events.iter().all(|e| e.get("usage").is_none()));
    let text: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    let whole = server.complete(&json!({"prompt": "a", "ignore_eos": true}));
    assert_eq!(
        (json!(text), &whole["usage"]["completion_tokens"]),
        (whole["choices"][0]["text"].clone(), &json!(16))
    );
}

#[test]
fn choices_differ_by_their_seeds_and_usage_is_summed() {
    let server = fake();
    let answer = server.chat(&json!({"n": 3, "seed": 5, "temperature": 1.0}));
    for (index, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
        let spec = SampleSpec { temperature: 1.0, seed: 5 + index as u64, ..SampleSpec::greedy() };
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"]["content"], decode(&expected(&hello_tokens(), &spec, 12)));
    }
    let usage = &answer["usage"];
    assert_eq!(
        (&usage["completion_tokens"], &usage["prompt_tokens"]),
        (&json!(36), &json!(hello_tokens().len()))
    );

    let prompts = json!({"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 4, "ignore_eos": true});
    let answer = server.complete(&prompts);
    let indices: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|c| c["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(answer["choices"][2]["text"], decode(&expected(&[8, 9], &SampleSpec::greedy(), 4)));
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(5), &json!(16))
    );
}

#[test]
fn a_stop_string_ends_the_answer_wherever_tokens_split_it() {
    let server = fake();
    // Plain letters, so that the text has the bytes of its tokens.
    let tokenizer = checkpoint().tokenizer;
    let plain = |id: &u32| tokenizer.token_bytes(*id).is_some_and(<[u8]>::is_ascii);
    let bias: serde_json::Map<_, _> =
        (3..VOCAB as u32).filter(plain).map(|id| (id.to_string(), json!(50))).collect();
    let base = json!({"max_tokens": 40, "logit_bias": bias});
    let full = server.chat(&base);
    let full = text(&full).to_owned();
    let starts: Vec<usize> = full.char_indices().map(|(i, _)| i).collect();
    let mut split = 0;
    for window in starts.windows(6).step_by(3) {
        let stop = &full[window[0]..window[5]];
        let before = &full[..full.find(stop).unwrap()];
        let fields = with(base.clone(), &json!({"stop": ["never there", stop], "logprobs": true}));
        let answer = server.chat(&fields);
        let choice = &answer["choices"][0];
        assert_eq!((text(&answer), &choice["finish_reason"]), (before, &json!("stop")), "{stop:?}");
        assert_eq!(choice["tandem"]["stop"], stop);
        // The tokens reported are those of the text shown.
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        let sizes: Vec<usize> = tokens.iter().map(|t| t["bytes"].as_array().unwrap().len()).collect();
        if before.is_empty() {
            assert!(sizes.is_empty());
        } else {
            let all: usize = sizes.iter().sum();
            assert!(
                all >= before.len() && all - sizes.last().unwrap() < before.len(),
                "{before:?} {sizes:?}"
            );
        }
        split += usize::from(tokens.len() < 40);

        let (events, _) = server.events("/v1/chat/completions", &with(hello(), &fields));
        let streamed: String =
            events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(streamed, before);
    }
    assert!(split > 3);
    // A single string is a list of one.
    let stop = &full[starts[3]..starts[8]];
    assert_eq!(server.chat(&with(base, &json!({"stop": stop})))["choices"][0]["finish_reason"], "stop");
}

#[test]
fn an_end_token_ends_the_answer_unless_it_is_to_be_ignored() {
    let server = fake();
    let ends = json!({"logit_bias": {"2": 100}, "ignore_eos": false});
    let answer = server.chat(&ends);
    assert_eq!((text(&answer), &answer["choices"][0]["finish_reason"]), ("", &json!("stop")));
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    let answer = server.chat(&with(ends.clone(), &json!({"ignore_eos": true})));
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    // Also as a stream, which still names the role.
    let (events, done) = server.events("/v1/chat/completions", &with(hello(), &ends));
    assert!(done && events[0]["choices"][0]["delta"]["role"] == "assistant");
}

#[test]
fn log_probabilities_are_the_models_own() {
    let server = fake();
    let fields = json!({"logprobs": true, "top_logprobs": 3, "temperature": 1.0, "seed": 3});
    let answer = server.chat(&fields);
    let spec = SampleSpec { temperature: 1.0, seed: 3, ..SampleSpec::greedy() };
    let mut history = hello_tokens();
    let tokens = expected(&history, &spec, 12);
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 12);
    for (entry, token) in content.iter().zip(tokens) {
        let logits = FakeEngine::logits(&history, VOCAB);
        let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let logprob = f64::from(logits[token as usize]) - sum.ln();
        assert!((entry["logprob"].as_f64().unwrap() - logprob).abs() < 1e-5);
        let bytes: Vec<u8> = serde_json::from_value(entry["bytes"].clone()).unwrap();
        assert_eq!(bytes, checkpoint().tokenizer.token_bytes(token).unwrap());
        let top: Vec<f64> = entry["top_logprobs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t["logprob"].as_f64().unwrap())
            .collect();
        let mut sorted = logits.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        for (top, logit) in top.iter().zip(&sorted[..3]) {
            assert!((top - (f64::from(*logit) - sum.ln())).abs() < 1e-5);
        }
        history.push(token);
    }
    // The stream reports the same tokens, the older endpoint the same figures in its shape.
    let (events, _) = server.events("/v1/chat/completions", &with(hello(), &fields));
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(streamed, *content);
    let asked = json!({"prompt": hello_tokens(), "max_tokens": 12, "ignore_eos": true, "logprobs": 2,
        "temperature": 1.0, "seed": 3});
    let legacy = &server.complete(&asked)["choices"][0]["logprobs"];
    let of = |name: &str| content.iter().map(|e| e[name].clone()).collect::<Vec<_>>();
    assert_eq!(legacy["tokens"], json!(of("token")));
    assert_eq!(legacy["token_logprobs"], json!(of("logprob")));
    assert!(legacy["top_logprobs"].as_array().unwrap().iter().all(|t| t.as_object().unwrap().len() <= 2));
    assert_eq!(
        (legacy["text_offset"][0].as_u64(), legacy["text_offset"].as_array().unwrap().len()),
        (Some(0), 12)
    );
}

#[test]
fn content_may_come_in_parts_and_a_developer_is_a_system() {
    let server = fake();
    let answer =
        |messages: Value| server.chat(&json!({"messages": messages}))["usage"]["prompt_tokens"].clone();
    let whole = answer(
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]),
    );
    let parts = json!([{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]);
    let split = answer(
        json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": null}]),
    );
    assert_eq!(whole, split);
}

#[test]
fn without_max_tokens_an_answer_fills_the_context() {
    let server = fake();
    let answer = server.chat(&json!({"max_tokens": null}));
    assert_eq!(answer["usage"]["total_tokens"], CONTEXT);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[test]
fn requests_beside_each_other_are_answered_as_if_alone() {
    let server = tiny();
    let asked = |seed: u64| json!({"seed": seed, "temperature": 1.0, "max_tokens": 24, "logprobs": true});
    let choice = |seed| server.chat(&asked(seed))["choices"][0]["logprobs"].clone();
    let alone: Vec<Value> = (0..6).map(choice).collect();
    assert_ne!(alone[0], alone[1]);
    std::thread::scope(|scope| {
        let together: Vec<_> = (0..6).map(|seed| scope.spawn(move || choice(seed))).collect();
        for (answer, alone) in together.into_iter().zip(&alone) {
            assert_eq!(answer.join().unwrap(), *alone);
        }
    });
}

#[test]
fn a_service_tier_says_who_comes_first() {
    let whole = hello_tokens().len() + 40;
    // Room for one at a time.
    let server = fake_with(whole + 8, &tandem_runtime::Options::default(), Options::default());
    server.knobs.delay_ms.store(4, Ordering::Relaxed);
    let ended = Mutex::new(Vec::new());
    let ask = &|tier: &'static str| {
        let answer = server.chat(&json!({"service_tier": tier, "max_tokens": 40}));
        assert_eq!(answer["service_tier"], if tier == "auto" { "default" } else { tier });
        ended.lock().unwrap().push(tier);
    };
    std::thread::scope(|scope| {
        for (waiting, tier) in ["priority", "flex", "auto", "priority"].into_iter().enumerate() {
            scope.spawn(move || ask(tier));
            server.until("it has come", |server| {
                let engine = &server.get("/health").json()["models"][0]["engines"][0];
                (&engine["running"], &engine["waiting"]) == (&json!(1), &json!(waiting))
            });
        }
    });
    assert_eq!(*ended.lock().unwrap(), ["priority", "priority", "auto", "flex"]);
    assert_eq!(server.chat(&json!({}))["service_tier"], Value::Null);
}
