//! What is refused, and how.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use tandem_server::Options;

use crate::harness::{Reply, echo_with, fake, fake_with, hello, judge, with};

fn check(reply: &Reply, status: u16, param: impl Into<Value>, word: &str) {
    assert_eq!(reply.status, status, "{}", reply.text);
    let error = &reply.json()["error"];
    assert_eq!(error["param"], param.into(), "{}", reply.text);
    assert!(error["message"].as_str().unwrap().contains(word), "{word} is not in {}", reply.text);
    assert!(error["type"].is_string() && error["code"].is_string());
}

#[test]
fn a_bad_field_is_named() {
    let server = fake();
    let long_stop = "x".repeat(100_000);
    let long_name = "y".repeat(100_000);
    for (fields, param, word) in [
        (json!({"messages": []}), "messages", "at least one"),
        (json!({"messages": null}), "messages", "at least one"),
        (json!({"messages": "Hello"}), "messages", "an array, not a string"),
        (json!({"messages": ["Hello"]}), "messages[0]", "an object"),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role", "no `role`"),
        (
            json!({"messages": [{"role": "wizard", "content": "x"}]}),
            "messages[0].role",
            "system, developer, user",
        ),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].tool_call_id", "must be"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content", "missing"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content", "not 5"),
        (
            json!({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}),
            "messages[0].tool_calls",
            "not supported",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
            "messages[0].content[0].type",
            "no images",
        ),
        (json!({"max_tokens": -1}), "max_tokens", "not -1"),
        (json!({"max_tokens": 0}), "max_tokens", "from 1"),
        (json!({"max_tokens": 1.5}), "max_tokens", "whole number"),
        (json!({"max_tokens": 5, "max_completion_tokens": 6}), "max_tokens", "give one"),
        (json!({"service_tier": "first"}), "service_tier", "flex"),
        (json!({"n": 0}), "n", "1 to 128"),
        (json!({"n": 100_000}), "n", "1 to 128"),
        (json!({"stop": long_stop}), "stop", "100000 bytes"),
        (json!({"stop": ""}), "stop", "empty"),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop", "5 strings"),
        (json!({"stop": [7]}), "stop[0]", "a string, not 7"),
        (json!({"temperature": -1}), "temperature", "0 or above"),
        (json!({"temperature": 1e300}), "temperature", "0 or above"),
        (json!({"temperature": "hot"}), "temperature", "a number, not a string"),
        (json!({"top_p": 0}), "top_p", "above 0"),
        (json!({"min_p": 2}), "min_p", "0 to 1"),
        (json!({"top_k": -1}), "top_k", "whole number"),
        (json!({"repetition_penalty": 0}), "repetition_penalty", "above 0"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias", "token ids"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias.5", "-100 to 100"),
        (json!({"seed": 1.5}), "seed", "64 bits"),
        (json!({"stream": "yes"}), "stream", "true or false"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options", "needs `stream`"),
        (json!({"stream": true, "stream_options": {"x": 1}}), "stream_options.x", "not supported"),
        (json!({"logprobs": 5}), "logprobs", "true or false"),
        (json!({"top_logprobs": 5}), "top_logprobs", "needs `logprobs`"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", "to 20"),
        (json!({"response_format": {"type": "json_object"}}), "response_format", "not supported"),
        (json!({"functions": []}), "functions", "not supported"),
        (json!({"grammar": "x"}), "grammar", "not supported"),
        (json!({"user": 5}), "user", "a string"),
    ] {
        check(&server.post("/v1/chat/completions", &with(hello(), &fields)), 400, param, word);
    }
    let reply = server.post("/v1/chat/completions", &with(hello(), &json!({long_name: 1})));
    assert!(reply.status == 400 && reply.text.len() < 1000);
    // What says nothing is not refused.
    server.chat(&json!({"tools": null, "grammar": null, "response_format": {"type": "text"}, "user": "me"}));

    for (body, param, word) in [
        (json!({}), "prompt", "missing"),
        (json!({"prompt": []}), "prompt", "empty array"),
        (json!({"prompt": [1, "x"]}), "prompt[1]", "a token id"),
        (json!({"prompt": ["x", 5]}), "prompt[1]", "not 5"),
        (json!({"prompt": "x", "echo": true}), "echo", "not supported"),
        (json!({"prompt": "x", "best_of": 3}), "best_of", "not supported"),
        (json!({"prompt": "x", "suffix": "y"}), "suffix", "not supported"),
        (json!({"prompt": ["x", "y"], "n": 100}), "n", "200 choices"),
    ] {
        check(&server.post("/v1/completions", &body), 400, param, word);
    }
    for (body, word) in [
        (json!({"prompt": [384]}), "outside the vocabulary"),
        (json!({"prompt": [[]]}), "at least one token"),
    ] {
        check(&server.post("/v1/completions", &body), 400, Value::Null, word);
    }
    check(&server.post("/tokenize", &json!({"text": "x"})), 400, "text", "not supported");
    check(&server.post("/detokenize", &json!({"tokens": [5, 9999]})), 400, "tokens[1]", "no token 9999");
    server.chat(&json!({}));
}

#[test]
fn a_body_that_is_no_json_object_is_refused() {
    let server = fake();
    let deep = "[".repeat(100_000);
    for body in [&b""[..], b"{", b"[]", b"null", b"{\"messages\": \"\xff\xfe\"}", b"\xff", deep.as_bytes()] {
        check(&server.post_bytes("/v1/chat/completions", body), 400, Value::Null, "JSON");
    }
    let huge = format!("{{\"prompt\": \"{}\"}}", "x".repeat(20 << 20));
    check(&server.post_bytes("/v1/completions", huge.as_bytes()), 413, Value::Null, "longer than 16777216");
    server.chat(&json!({}));
}

/// Browsers send other types across origins without asking.
#[test]
fn a_body_of_another_type_is_refused() {
    let server = fake();
    let agent = ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build().new_agent();
    let body = hello().to_string();
    let sent =
        agent.post(server.url("/v1/chat/completions")).header("content-type", "text/plain").send(&body);
    check(&sent.unwrap().into(), 415, Value::Null, "application/json");
}

#[test]
fn an_unknown_model_path_or_method_is_refused() {
    let server = fake();
    let reply = server.post("/v1/chat/completions", &with(hello(), &json!({"model": "gpt-9"})));
    check(&reply, 404, "model", "no model `gpt-9` here, only `tiny`");
    check(&server.get("/v1/models/gpt-9"), 404, "model", "gpt-9");
    check(&server.get("/v2/chat"), 404, Value::Null, "nothing at this path");
    check(&server.get("/v1/chat/completions"), 405, Value::Null, "another method");
    let mut unnamed = hello();
    unnamed.as_object_mut().unwrap().remove("model");
    server.ok("/v1/chat/completions", &unnamed);
}

#[test]
fn a_wrong_key_is_refused() {
    let options = Options { api_key: Some("secret".to_owned()), ..Options::default() };
    let server = fake_with(1000, &tandem_runtime::Options::default(), options);
    for key in ["Bearer wrong!", "Bearer secre", "Bearer secret2", "secret", "Basic secret", "Bearer "] {
        check(&server.get_with_key("/v1/models", key), 401, Value::Null, "Authorization");
    }
    check(&server.get("/metrics"), 401, Value::Null, "Authorization");
    check(&server.post("/v1/chat/completions", &hello()), 401, Value::Null, "Authorization");
    assert_eq!(server.get_with_key("/v1/models", "Bearer secret").status, 200);
    assert_eq!(server.get("/health").status, 200);
}

/// ollama #3839: a prompt was cut and answered with 200.
#[test]
fn context_overflow_names_both_numbers() {
    let server = fake();
    for stream in [false, true] {
        let asked = json!({"prompt": vec![5; 600], "max_tokens": 10, "stream": stream});
        let reply = server.post("/v1/completions", &asked);
        check(&reply, 400, Value::Null, "610 tokens do not fit the context of 512");
        assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
    }
    let reply = server.post("/v1/completions", &json!({"prompt": [5, 6], "max_tokens": 4_000_000_000u64}));
    check(&reply, 400, Value::Null, "4000000002 tokens");
}

#[test]
fn what_can_never_fit_the_memory_is_refused_with_numbers() {
    let server = fake_with(100, &tandem_runtime::Options::default(), Options::default());
    for stream in [false, true] {
        let asked = json!({"prompt": vec![5; 90], "max_tokens": 20, "stream": stream});
        let reply = server.post("/v1/completions", &asked);
        check(&reply, 413, Value::Null, "7040 bytes needed, 6400 available");
    }
}

#[test]
fn a_full_queue_is_429_with_a_time_to_retry() {
    let few = tandem_runtime::Options { max_requests: 2, ..Default::default() };
    let server = fake_with(100_000, &few, Options::default());
    server.knobs.delay_ms.store(20, Ordering::Relaxed);
    let long = with(hello(), &json!({"max_tokens": 300, "n": 2, "stream": true})).to_string();
    let held = server.open("/v1/chat/completions", long.as_bytes());
    let reply = server.post("/v1/chat/completions", &hello());
    check(&reply, 429, Value::Null, "2 requests are running or waiting");
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    assert!(reply.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    drop(held);
    server.until("places are free", |s| s.post("/v1/chat/completions", &hello()).status == 200);
    // More than there is ever room for: coming again would not help.
    let reply = server.post("/v1/chat/completions", &with(hello(), &json!({"n": 3})));
    check(&reply, 413, Value::Null, "3 answers were asked for, and it takes 2 requests");
    assert!(reply.headers.get("retry-after").is_none());
}

#[test]
fn judged_openais_client_knows_each_error() {
    let Some(python) = judge() else { return };
    let one_at_a_time = tandem_runtime::Options { max_requests: 2, ..Default::default() };
    let slow = echo_with(None, &one_at_a_time, Options::default());
    slow.knobs.delay_ms.store(30, Ordering::Relaxed);
    let keyed = Options { api_key: Some("secret".to_owned()), ..Options::default() };
    let keyed = echo_with(None, &tandem_runtime::Options::default(), keyed);
    // The pause is long enough for the judge to come first.
    let patient = tandem_runtime::Options { pause: Duration::from_secs(60), ..Default::default() };
    let broken = echo_with(None, &patient, Options::default());
    broken.knobs.unbuildable.store(true, Ordering::Relaxed);
    broken.knobs.panic.store(true, Ordering::Relaxed);
    assert_eq!(broken.post("/v1/chat/completions", &hello()).status, 503);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/judge_errors.py");
    let mut command = std::process::Command::new(python);
    command.arg(script).args([slow.url(""), broken.url(""), keyed.url("")]).env("no_proxy", "*");
    assert!(command.status().unwrap().success());
}
