//! What operators and browsers ask.

use serde_json::json;
use tandem_server::Options;

use crate::harness::{CONTEXT, checkpoint, fake, fake_with, tiny};

#[test]
fn models_are_listed() {
    let server = fake();
    let list = server.get("/v1/models").json();
    assert_eq!((&list["object"], list["data"].as_array().unwrap().len()), (&json!("list"), 1));
    let model = server.get("/v1/models/tiny").json();
    assert_eq!(model, list["data"][0]);
    assert_eq!((&model["id"], &model["object"]), (&json!("tiny"), &json!("model")));
    assert_eq!(model["context_length"], CONTEXT);
}

#[test]
fn text_becomes_tokens_and_back() {
    let server = fake();
    let text = "Hello, 世界!\n";
    let tokens = server.ok("/tokenize", &json!({"content": text}));
    assert_eq!(tokens["tokens"], json!(checkpoint().tokenizer.encode(text, false).unwrap()));
    let back = server.ok("/detokenize", &tokens);
    assert_eq!(back, json!({"content": text}));
    let special = server.ok("/tokenize", &json!({"content": text, "add_special": true}));
    assert_eq!(special["tokens"], json!(checkpoint().tokenizer.encode(text, true).unwrap()));
}

#[test]
fn health_and_metrics_tell_how_the_engine_is() {
    let server = tiny();
    server.chat(&json!({"max_tokens": 5}));
    let health = server.get("/health").json();
    let model = &health["models"][0];
    assert_eq!(
        (&health["status"], &model["id"], &model["status"]),
        (&json!("ok"), &json!("tiny"), &json!("ok"))
    );
    let engine = &model["engines"][0];
    assert_eq!((&engine["engine"], &engine["state"]), (&json!("cpu"), &json!("ready")));
    assert_eq!((&engine["restarts"], &engine["last_error"]), (&json!(0), &json!(null)));
    assert!(engine["kv_used_bytes"].as_u64() > Some(0) && engine["weights_bytes"].as_u64() > Some(0));
    let page = server.get("/metrics");
    assert_eq!(page.headers["content-type"], "text/plain; version=0.0.4");
    for (name, more, value) in [
        ("generated_tokens_total", "", "5"),
        ("cached_tokens_total", "", "0"),
        ("time_to_first_token_seconds_count", "", "1"),
        ("inter_token_seconds_count", "", "4"),
        ("routes_total", ",reason=\"only\"", "1"),
        ("requests_running", "", "0"),
        ("requests_waiting", "", "0"),
        ("engine_restarts_total", "", "0"),
        ("engine_up", "", "1"),
    ] {
        let line = format!("tandem_{name}{{model=\"tiny\",engine=\"cpu\"{more}}} {value}");
        assert!(page.text.lines().any(|l| l == line), "{line} is not in\n{}", page.text);
    }
    assert!(page.text.contains("tandem_requests_total{outcome=\"completed\"} 1\n"));
    // Each line is a comment, or a name with a number.
    for line in page.text.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(name.starts_with("tandem_") && value.parse::<f64>().is_ok(), "{line}");
    }
}

#[test]
fn pages_of_other_origins_are_told_only_what_the_operator_allows() {
    assert!(fake().get("/health").headers.get("access-control-allow-origin").is_none());
    let options = Options {
        cors: Some("https://example.org".to_owned()),
        api_key: Some("k".to_owned()),
        ..Options::default()
    };
    let server = fake_with(1000, &tandem_runtime::Options::default(), options);
    let reply = server.get("/v1/models");
    assert_eq!(
        (reply.status, &reply.headers["access-control-allow-origin"]),
        (401, &"https://example.org".parse().unwrap())
    );
    // A browser asks without the key.
    let agent = ureq::Agent::config_builder().proxy(None).build().new_agent();
    let preflight = agent.options(server.url("/v1/chat/completions")).call().unwrap();
    assert_eq!(preflight.status(), 204);
    assert!(preflight.headers()["access-control-allow-headers"].to_str().unwrap().contains("authorization"));
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let options = Options { api_key: Some("k".to_owned()), ..Options::default() };
    let server = fake_with(1000, &tandem_runtime::Options::default(), options);
    let mut files = vec!["/".to_owned()];
    let own = |text: &str, mark: &str| -> Vec<String> {
        text.split(mark).skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()).collect()
    };
    for mark in ["src=\"", "href=\""] {
        files.extend(
            own(&server.get("/").text, mark)
                .into_iter()
                .filter(|file| file != "data:,")
                .map(|f| format!("/{f}")),
        );
    }
    assert_eq!(files, ["/", "/page.js", "/page.css"]);
    for (file, kind) in files.iter().zip(["text/html", "text/javascript", "text/css"]) {
        let page = server.get(file);
        assert_eq!(
            (page.status, page.headers["content-type"].to_str().unwrap()),
            (200, format!("{kind}; charset=utf-8").as_str())
        );
        let policy = page.headers["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"));
        for reference in ["http:", "https:", "//cdn", "@import", "url(", "WebSocket", "import("] {
            assert!(!page.text.contains(reference), "{file}: {reference}");
        }
    }
}
