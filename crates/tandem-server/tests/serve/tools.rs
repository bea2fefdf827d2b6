//! Calls of tools: an engine that says what it is told, under chat templates of several families.

use serde_json::{Value, json};

use super::harness::{Server, echo, judge};

fn weather() -> Value {
    json!([{"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }}])
}

/// A request whose answer is `say`.
fn ask(say: &str) -> Value {
    json!({"messages": [{"role": "user", "content": format!("Say «{say}»")}], "tools": weather()})
}

/// The only choice of the answer, whole; and the same from a stream, put together as clients do.
fn both(server: &Server, body: &Value) -> Value {
    let whole = server.ok("/v1/chat/completions", body)["choices"][0].clone();
    let (events, done) = server.events("/v1/chat/completions", body);
    assert!(done);
    let (mut content, mut calls, mut end) = (None::<String>, Vec::<Value>::new(), Value::Null);
    for (i, event) in events.iter().enumerate() {
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        assert_eq!(delta.get("role").is_some(), i == 0, "{event}");
        if let Some(text) = delta["content"].as_str() {
            content.get_or_insert_default().push_str(text);
        }
        for part in delta["tool_calls"].as_array().unwrap_or(&Vec::new()) {
            let index = part["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                assert_eq!(part["function"]["arguments"], "");
                calls.push(part.clone());
            } else {
                assert!(part.get("id").is_none() && part["function"].get("name").is_none(), "{part}");
                let arguments = &mut calls[index]["function"]["arguments"];
                let grown = format!(
                    "{}{}",
                    arguments.as_str().unwrap(),
                    part["function"]["arguments"].as_str().unwrap()
                );
                *arguments = grown.into();
            }
        }
        if !choice["finish_reason"].is_null() {
            end = choice.clone();
        }
    }
    assert_eq!(end["finish_reason"], whole["finish_reason"]);
    assert_eq!(end["tandem"]["tool_parse_error"], whole["tandem"]["tool_parse_error"]);
    let expected = &whole["message"];
    assert_eq!(json!(content), expected["content"]);
    assert_eq!(calls.len(), expected["tool_calls"].as_array().map_or(0, Vec::len));
    for (call, expected) in calls.iter().zip(expected["tool_calls"].as_array().unwrap_or(&Vec::new())) {
        assert_eq!((&call["type"], &call["function"]), (&expected["type"], &expected["function"]));
        assert!(call["id"].as_str().unwrap().len() == 9);
    }
    whole
}

#[test]
fn calls_of_each_family_are_taken_out_of_the_answer() {
    let paris = r#"{"city": "Paris \"é\""}"#;
    for (style, say) in [
        (
            "qwen2.5",
            format!("<tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {paris}}}\n</tool_call>"),
        ),
        ("hermes-tools", format!("<tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {paris}}}")),
        ("llama3-tools", format!("{{\"name\": \"get_weather\", \"parameters\": {paris}}}")),
        ("llama3-tools", format!("<|python_tag|>{{\"name\": \"get_weather\", \"parameters\": {paris}}}")),
        (
            "mistral-v3",
            format!(
                "[TOOL_CALLS] [{{\"name\": \"get_weather\", \"arguments\": {paris}, \"id\": \"abcdefghi\"}}]"
            ),
        ),
        ("mistral-v3", format!("[TOOL_CALLS]get_weather[ARGS]{paris}")),
    ] {
        let server = echo(Some(style));
        let choice = both(&server, &ask(&say));
        assert_eq!(choice["finish_reason"], "tool_calls", "{style}: {choice}");
        assert_eq!(choice["message"]["content"], Value::Null);
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!(call["function"], json!({"name": "get_weather", "arguments": paris}), "{style}");
        assert_eq!(choice["tandem"]["tool_parse_error"], false);

        // The answer goes back as it came, with the result.
        let mut next = ask(&say);
        let messages = next["messages"].as_array_mut().unwrap();
        messages.push(choice["message"].clone());
        messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "«It is sunny.»"}));
        let choice = both(&server, &next);
        assert_eq!(choice["message"]["content"], "It is sunny.", "{style}");
        assert_eq!(choice["finish_reason"], "stop");
    }
}

#[test]
fn text_streams_and_calls_follow_it() {
    let server = echo(Some("qwen2.5"));
    let call = |name: &str| format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{}}}}</tool_call>");
    let choice = both(&server, &ask(&format!("I look. {}\n{}", call("get_weather"), call("other"))));
    assert_eq!(choice["message"]["content"], "I look.");
    let names =
        choice["message"]["tool_calls"].as_array().unwrap().iter().map(|call| &call["function"]["name"]);
    assert_eq!(names.collect::<Vec<_>>(), ["get_weather", "other"]);

    // No part of a call is ever text, and text before it does not wait for it.
    let mut body = ask(&format!("I look. {}", call("get_weather")));
    body["logprobs"] = true.into();
    let (events, _) = server.events("/v1/chat/completions", &body);
    let texts: Vec<&str> =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert!(texts.len() > 2 && texts.concat() == "I look.", "{texts:?}");
    // Every token has its log-probability, those of the call too.
    let entries =
        |event: &Value| event["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default();
    let bytes = events.iter().flat_map(entries).flat_map(|entry| entry["bytes"].as_array().unwrap().clone());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), format!("I look. {}", call("get_weather")));
}

#[test]
fn what_cannot_be_read_is_text_with_a_flag() {
    let server = echo(Some("qwen2.5"));
    for say in
        ["<tool_call>get_weather(Paris)</tool_call>", "I look. <tool_call>{\"name\": \"get_weather\", \"arg"]
    {
        let choice = both(&server, &ask(say));
        assert_eq!(choice["message"]["content"], say);
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(choice["tandem"]["tool_parse_error"], true);
    }
    let plain = both(&server, &ask("a < b"));
    assert_eq!(
        (&plain["message"]["content"], &plain["tandem"]["tool_parse_error"]),
        (&json!("a < b"), &json!(false))
    );
}

#[test]
fn without_parallel_calls_the_first_ends_the_answer() {
    let server = echo(Some("qwen2.5"));
    let call = "<tool_call>{\"name\": \"get_weather\"}</tool_call>";
    let mut body = ask(&format!("{call}\n{call}\nand so on, for a long time"));
    body["parallel_tool_calls"] = false.into();
    let choice = both(&server, &body);
    assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&Value::Null, &json!("tool_calls"))
    );
    server.until("nothing runs", |server| {
        server.get("/health").json()["models"][0]["engines"][0]["running"] == 0
    });
}

#[test]
fn what_the_model_may_not_call_stays_text() {
    let server = echo(Some("qwen2.5"));
    let say = "<tool_call>{\"name\": \"get_weather\"}</tool_call>";
    let mut body = ask(say);
    body["tool_choice"] = "none".into();
    let choice = both(&server, &body);
    assert_eq!(choice["message"]["content"], say);
    assert!(choice["tandem"].get("tool_parse_error").is_none());
}

#[test]
fn a_template_that_shows_no_way_to_call_refuses_tools_but_not_a_history() {
    let server = echo(None);
    let reply = server.post("/v1/chat/completions", &ask("x"));
    let error = &reply.json()["error"];
    assert_eq!(
        (reply.status, &error["param"], &error["code"]),
        (400, &json!("tools"), &json!("unsupported_parameter"))
    );

    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let history = json!({"messages": [
        {"role": "user", "content": "«x»"}, {"role": "assistant", "content": null, "tool_calls": [call]},
    ]});
    let reply = server.post("/v1/chat/completions", &history);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("messages[1].tool_calls")));
}

#[test]
fn judged_openais_client_reads_calls() {
    let Some(python) = judge() else { return };
    let server = echo(Some("qwen2.5"));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/judge_tools.py");
    let mut command = std::process::Command::new(python);
    assert!(command.arg(script).arg(server.url("")).env("no_proxy", "*").status().unwrap().success());
}
