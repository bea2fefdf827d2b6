//! Which engine and which model serve, and what is said about it.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use tandem_engine::SampleSpec;

use crate::harness::{Reply, Server, decode, expected, fake, hello, hello_tokens, pair, two_models, with};

fn both() -> Server {
    pair(&tandem_runtime::Options::default())
}

fn route(reply: &Reply) -> &str {
    reply.headers["x-tandem-route"].to_str().unwrap()
}

#[test]
fn the_route_stands_in_the_header_and_in_each_choice() {
    let server = both();
    let prompt = hello_tokens().len();
    let short = format!("{} tokens of prompt and answer, below 1024, and alone", prompt + 12);
    for (fields, engine, reason) in [
        (json!({}), "ane", short.as_str()),
        (json!({"n": 2}), "fake", "2 answers run as one batch"),
        (
            json!({"max_tokens": null, "logit_bias": {"2": 100}, "ignore_eos": false}),
            "fake",
            "the answer may fill the context",
        ),
        (json!({"engine": "fake"}), "fake", "asked for by name"),
        (json!({"engine": "ane", "n": 2}), "ane", "asked for by name"),
    ] {
        let body = with(hello(), &fields);
        let reply = server.post("/v1/chat/completions", &body);
        assert_eq!(
            (reply.status, route(&reply)),
            (200, format!("{engine}; {reason}").as_str()),
            "{}",
            reply.text
        );
        let wanted = json!({"engine": engine, "reason": reason});
        for choice in reply.json()["choices"].as_array().unwrap() {
            assert_eq!(choice["tandem"]["route"], wanted);
        }
        let streamed =
            server.open("/v1/chat/completions", with(body, &json!({"stream": true})).to_string().as_bytes());
        assert_eq!(streamed.headers()["x-tandem-route"], format!("{engine}; {reason}"));
        let (events, _) = crate::harness::read_events(streamed);
        let last = events.iter().rev().find(|e| e["choices"][0]["tandem"].is_object()).unwrap();
        assert_eq!(last["choices"][0]["tandem"]["route"], wanted);
        server.until("it is idle", idle);
    }
    // Both engines give the answer there is by definition.
    for engine in ["ane", "fake"] {
        let answer = server.chat(&json!({"engine": engine}));
        let text = decode(&expected(&hello_tokens(), &SampleSpec::greedy(), 12));
        assert_eq!(answer["choices"][0]["message"]["content"], text);
    }
    let page = server.get("/metrics").text;
    for (engine, kind) in [("ane", "short"), ("ane", "asked"), ("fake", "batch"), ("fake", "unbounded")] {
        let start = format!("tandem_routes_total{{model=\"tiny\",engine=\"{engine}\",reason=\"{kind}\"}} ");
        assert!(page.lines().any(|line| line.starts_with(&start)), "{start} is not in\n{page}");
    }
}

fn idle(server: &Server) -> bool {
    let health = server.get("/health").json();
    let engines = health["models"][0]["engines"].as_array().unwrap();
    engines.iter().all(|e| e["running"] == 0 && e["waiting"] == 0)
}

#[test]
fn an_engine_that_cannot_is_refused_by_name_with_the_reason() {
    let server = both();
    let asked = |fields: Value| server.post("/v1/chat/completions", &with(hello(), &fields));
    let reply = asked(json!({"engine": "gpu"}));
    let error = &reply.json()["error"];
    assert_eq!(
        (reply.status, &error["param"], &error["code"]),
        (400, &json!("engine"), &json!("engine_not_found"))
    );
    assert!(error["message"].as_str().unwrap().contains("no engine `gpu` here, only `ane`, `fake`"));

    let reply = asked(json!({"engine": "ane", "max_tokens": 300}));
    let error = &reply.json()["error"];
    assert_eq!((reply.status, &error["code"]), (400, &json!("context_length_exceeded")));
    let needed = hello_tokens().len() + 300;
    let message = format!("`ane` cannot serve this: {needed} tokens do not fit the context of 256");
    assert!(error["message"].as_str().unwrap().contains(&message), "{error}");
    // Left to itself, the server knows one that can.
    let reply = asked(json!({"max_tokens": 300}));
    assert_eq!(route(&reply), format!("fake; ane cannot: {needed} tokens do not fit the context of 256"));
    // Neither can: each with its numbers.
    let reply = asked(json!({"max_tokens": 3000}));
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(reply.status == 400 && message.contains("context of 256") && message.contains("context of 512"));
}

#[test]
fn a_full_engine_gives_way_to_the_other() {
    let few = tandem_runtime::Options { max_requests: 1, ..Default::default() };
    let server = pair(&few);
    server.knobs.delay_ms.store(20, Ordering::Relaxed);
    let long = with(hello(), &json!({"engine": "ane", "max_tokens": 200, "stream": true})).to_string();
    let held = server.open("/v1/chat/completions", long.as_bytes());
    let reply = server.post("/v1/chat/completions", &hello());
    assert_eq!(route(&reply), "fake; ane has 1 request already");
    let reply = server.post("/v1/chat/completions", &with(hello(), &json!({"engine": "ane"})));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (429, &json!("queue_full")));
    assert!(reply.headers.contains_key("retry-after"));
    drop(held);
}

#[test]
fn an_engine_that_broke_is_passed_by_until_it_is_mended() {
    let soon = tandem_runtime::Options { pause: std::time::Duration::from_millis(300), ..Default::default() };
    let server = pair(&soon);
    server.knobs.unbuildable.store(true, Ordering::Relaxed);
    server.knobs.panic.store(true, Ordering::Relaxed);
    let reply = server.post("/v1/chat/completions", &hello());
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("engine_crashed")));
    server
        .until("it has failed", |s| s.get("/health").json()["models"][0]["engines"][0]["state"] == "failed");
    let health = server.get("/health");
    // The other one serves.
    assert_eq!(health.status, 200);
    let engine = &health.json()["models"][0]["engines"][0];
    assert_eq!(engine["last_error"], "engine failure: told not to be built");
    assert!(engine["retry_in"].as_f64().is_some());
    let reply = server.post("/v1/chat/completions", &hello());
    assert_eq!(reply.status, 200);
    assert!(route(&reply).starts_with("fake; ane "), "{}", route(&reply));
    server.knobs.unbuildable.store(false, Ordering::Relaxed);
    server.until("it is mended", |s| route(&s.post("/v1/chat/completions", &hello())).starts_with("ane; "));
    assert!(server.get("/health").json()["models"][0]["engines"][0]["last_error"].is_string());
}

#[test]
fn a_route_can_be_asked_for_without_running_anything() {
    let server = both();
    let ask = |body: &Value| server.ok("/v1/route", body);
    let answer = ask(&hello());
    let prompt = hello_tokens().len();
    assert_eq!(
        (&answer["model"], &answer["route"]["engine"], &answer["kind"]),
        (&json!("tiny"), &json!("ane"), &json!("short"))
    );
    assert_eq!(
        (&answer["prompt_tokens"], &answer["max_tokens"], &answer["choices"]),
        (&json!(prompt), &json!(12), &json!(1))
    );
    assert_eq!(answer["error"], Value::Null);
    let told = server.post("/v1/chat/completions", &hello());
    assert_eq!(format!("ane; {}", answer["route"]["reason"].as_str().unwrap()), route(&told));

    let answer = ask(&json!({"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 300, "n": 2}));
    assert_eq!(
        (&answer["route"]["engine"], &answer["choices"], &answer["prompt_tokens"]),
        (&json!("fake"), &json!(4), &json!(5))
    );
    assert_eq!(
        answer["engines"][0]["refusal"].as_str().unwrap().split(". ").next(),
        Some("303 tokens do not fit the context of 256")
    );
    assert_eq!(answer["engines"][1]["refusal"], Value::Null);

    // That nobody can is an answer too; a bad request is refused as it would be.
    let answer = ask(&json!({"prompt": "x", "max_tokens": 9000}));
    assert_eq!(
        (&answer["route"], &answer["error"]["code"]),
        (&Value::Null, &json!("context_length_exceeded"))
    );
    for (body, param) in [
        (json!({}), "messages"),
        (json!({"prompt": "x", "engine": "gpu"}), "engine"),
        (json!({"prompt": "x", "temperature": -1}), "temperature"),
        (json!({"prompt": "x", "n": 0}), "n"),
    ] {
        let reply = server.post("/v1/route", &body);
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
    let page = server.get("/metrics").text;
    assert!(page.contains("tandem_requests_total{outcome=\"completed\"} 1\n"), "{page}");
}

#[test]
fn models_are_served_beside_each_other_under_their_names() {
    let server = two_models();
    let list = server.get("/v1/models").json();
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["tiny", "other"]);
    assert_eq!(
        (&list["data"][0]["aliases"], &list["data"][1]["context_length"]),
        (&json!(["small"]), &json!(64))
    );
    assert_eq!(server.get("/v1/models/small").json()["id"], "tiny");
    for (name, id) in [("tiny", "tiny"), ("small", "tiny"), ("other", "other")] {
        assert_eq!(server.chat(&json!({"model": name}))["model"], id);
    }
    let mut unnamed = hello();
    unnamed.as_object_mut().unwrap().remove("model");
    let reply = server.post("/v1/chat/completions", &unnamed);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("model")));
    assert!(reply.text.contains("there are `tiny`, `other`"));
    let reply = server.post("/v1/chat/completions", &with(hello(), &json!({"model": "third"})));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (404, &json!("model_not_found")));
    // The limits are those of the model that was named.
    let long = json!({"prompt": "x", "max_tokens": 100});
    assert_eq!(server.post("/v1/completions", &with(long.clone(), &json!({"model": "other"}))).status, 400);
    server.complete(&with(long, &json!({"model": "tiny"})));
    for path in ["/tokenize", "/detokenize"] {
        let what = if path == "/tokenize" { json!({"content": "Hello"}) } else { json!({"tokens": [5]}) };
        server.ok(path, &with(what.clone(), &json!({"model": "small"})));
        assert_eq!(server.post(path, &with(what.clone(), &json!({"model": "third"}))).status, 404);
        assert_eq!(server.post(path, &what).status, 400);
    }
    // One model that cannot be served is enough to be unwell.
    assert_eq!(server.get("/health").status, 200);
    server.knobs.unbuildable.store(true, Ordering::Relaxed);
    server.knobs.panic.store(true, Ordering::Relaxed);
    assert_eq!(server.post("/v1/chat/completions", &hello()).status, 503);
    server.until("it shows", |s| s.get("/health").status == 503);
    let health = server.get("/health").json();
    assert_eq!(
        (&health["models"][0]["status"], &health["models"][1]["status"]),
        (&json!("unavailable"), &json!("ok"))
    );
    server
        .until("it has failed", |s| s.get("/health").json()["models"][0]["engines"][0]["state"] == "failed");
    let reply = server.post("/v1/chat/completions", &hello());
    assert!(reply.status == 503 && reply.headers.contains_key("retry-after"), "{}", reply.text);
    server.chat(&json!({"model": "other"}));
}

#[test]
fn an_engine_of_that_name_may_be_asked_of_a_server_with_one() {
    let server = fake();
    let reply = server.post("/v1/chat/completions", &with(hello(), &json!({"engine": "fake"})));
    assert_eq!(route(&reply), "fake; asked for by name");
    assert_eq!(server.post("/v1/chat/completions", &with(hello(), &json!({"engine": 5}))).status, 400);
}
