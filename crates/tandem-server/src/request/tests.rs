use proptest::prelude::*;
use serde_json::json;

use super::*;

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("(type|text|role|content|include_usage|1|function|name|tool_calls|tool_call_id|id|arguments)", inner), 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

const NAMES: &[&str] = &[
    "messages",
    "prompt",
    "n",
    "stop",
    "stream",
    "stream_options",
    "seed",
    "logit_bias",
    "temperature",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "max_completion_tokens",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "echo",
    "best_of",
    "user",
    "service_tier",
    "other",
];

proptest! {
    #[test]
    fn any_value_in_any_field_is_read_or_refused_by_that_name(
        fields in prop::collection::vec((prop::sample::select(NAMES), value()), 0..4),
    ) {
        let fields: serde_json::Map<_, _> = fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        let body = Value::Object(fields.clone()).to_string();
        for error in [chat(body.as_bytes()).err(), completion(body.as_bytes()).err()].into_iter().flatten() {
            let param = error.param.unwrap();
            let root = param.split(['.', '[']).next().unwrap();
            prop_assert!(NAMES.contains(&root), "{param}");
        }
        let _ = (question(body.as_bytes()), tokenize(body.as_bytes()), detokenize(body.as_bytes()));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = (chat(&bytes), completion(&bytes), question(&bytes), tokenize(&bytes), detokenize(&bytes));
    }
}

#[test]
fn all_fields_arrive() {
    let body = json!({
        "model": "m", "engine": "e", "messages": [{"role": "user", "content": "hi"}], "n": 2, "max_completion_tokens": 9,
        "stop": "x", "ignore_eos": true, "logprobs": true, "top_logprobs": 4, "temperature": 0.5, "top_p": 0.25,
        "top_k": 3, "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2,
        "logit_bias": {"7": -2}, "seed": -2, "stream": true, "stream_options": {"include_usage": true},
        "service_tier": "flex",
    });
    let sampling = Sampling {
        temperature: Some(0.5),
        top_p: Some(0.25),
        top_k: Some(3),
        min_p: Some(0.125),
        repetition_penalty: Some(1.5),
        presence_penalty: Some(-1.0),
        frequency_penalty: Some(2.0),
        logit_bias: Some(vec![(7, -2.0)]),
        seed: Some(u64::MAX - 1),
    };
    let ask = Ask {
        model: Some("m".to_owned()),
        engine: Some("e".to_owned()),
        n: 2,
        max_tokens: Some(9),
        stop: vec!["x".to_owned()],
        ignore_eos: true,
        logprobs: Some(4),
        sampling,
        stream: true,
        include_usage: true,
        tier: Some(Tier::Flex),
        tools: None,
    };
    let messages = vec![Message::new("user", "hi")];
    assert_eq!(chat(body.to_string().as_bytes()).unwrap(), Chat { messages, ask });
}

#[test]
fn what_a_request_does_not_say_is_the_models_default() {
    let defaults = SampleSpec { temperature: 0.3, top_k: 9, seed: 4, ..SampleSpec::greedy() };
    let asked = completion(br#"{"prompt": "x", "top_k": 5, "logprobs": 2}"#).unwrap().ask;
    let expected = SampleSpec { top_k: 5, seed: 6, top_logprobs: Some(2), ..defaults.clone() };
    assert_eq!(asked.sample(&defaults, 2), expected);
    assert_eq!(asked.max_tokens, Some(16));
}

fn chat_error(body: &Value) -> (Option<String>, String) {
    let error = chat(body.to_string().as_bytes()).unwrap_err();
    (error.param, error.message)
}

fn weather() -> Value {
    json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}})
}

#[test]
fn tools_arrive_as_templates_want_them() {
    let hi = json!([{"role": "user", "content": "hi"}]);
    let mut bare =
        json!({"type": "function", "function": {"name": "f", "strict": false, "description": "d"}});
    let body = json!({"messages": hi, "tools": [weather(), bare], "tool_choice": "auto", "parallel_tool_calls": false});
    let tools = chat(body.to_string().as_bytes()).unwrap().ask.tools.unwrap();
    bare["function"] =
        json!({"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}});
    assert_eq!(tools.tools, [weather(), bare]);
    assert_eq!(tools.names().collect::<Vec<_>>(), ["get_weather", "f"]);
    assert!(!tools.parallel);

    for none in [json!({"tools": [weather()], "tool_choice": "none"}), json!({"tools": []}), json!({})] {
        let mut body = none;
        body["messages"] = hi.clone();
        assert_eq!(chat(body.to_string().as_bytes()).unwrap().ask.tools, None);
    }
}

#[test]
fn tools_that_would_not_be_honoured_are_refused_by_name() {
    let hi = json!([{"role": "user", "content": "hi"}]);
    for (fields, param) in [
        (json!({"tools": [weather()], "tool_choice": "required"}), "tool_choice"),
        (
            json!({"tools": [weather()], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
            "tool_choice",
        ),
        (json!({"tools": [weather()], "tool_choice": "perhaps"}), "tool_choice"),
        (json!({"tools": [{"type": "custom", "custom": {}}]}), "tools[0].type"),
        (json!({"tools": [weather(), {"type": "function"}]}), "tools[1].function"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}),
            "tools[0].function.name",
        ),
        (json!({"tools": [weather(), weather()]}), "tools[1].function.name"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true}}]}),
            "tools[0].function.strict",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}),
            "tools[0].function.parameters",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "other": 1}}]}),
            "tools[0].function.other",
        ),
        (json!({"tools": "x"}), "tools"),
        (json!({"functions": []}), "functions"),
        (json!({"function_call": "auto"}), "function_call"),
    ] {
        let mut body = fields;
        body["messages"] = hi.clone();
        assert_eq!(chat_error(&body).0.as_deref(), Some(param), "{body}");
    }
}

#[test]
fn calls_and_their_results_become_messages() {
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1.0}"}});
    let body = json!({"messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
    ]});
    let messages = chat(body.to_string().as_bytes()).unwrap().messages;
    assert_eq!(messages[1].content, Some(Value::Null));
    // Templates print arguments as JSON, so they are given as what they say.
    let seen = json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1.0}}}]);
    assert_eq!(messages[1].extra["tool_calls"], seen);
    assert_eq!(messages[2].role, "tool");
    assert_eq!(messages[2].content, Some("sunny".into()));
    assert_eq!(messages[2].extra["tool_call_id"], "1");

    let broken = |pointer: &str, value: Value| {
        let mut body = body.clone();
        *body.pointer_mut(pointer).unwrap() = value;
        chat_error(&body).0.unwrap()
    };
    let of_call = "/messages/1/tool_calls/0/";
    for (pointer, value, param) in [
        (format!("{of_call}function/arguments"), json!("{"), "messages[1].tool_calls[0].function.arguments"),
        (format!("{of_call}function/arguments"), json!("[]"), "messages[1].tool_calls[0].function.arguments"),
        (format!("{of_call}function/name"), json!(null), "messages[1].tool_calls[0].function.name"),
        (format!("{of_call}type"), json!("custom"), "messages[1].tool_calls[0].type"),
        (format!("{of_call}id"), json!(null), "messages[1].tool_calls[0].id"),
        ("/messages/2/tool_call_id".into(), json!("2"), "messages[2].tool_call_id"),
        ("/messages/2/tool_call_id".into(), json!(null), "messages[2].tool_call_id"),
        ("/messages/2/content".into(), json!(null), "messages[2].content"),
        ("/messages/1/role".into(), json!("user"), "messages[1].content"),
        ("/messages/1/tool_calls".into(), json!(null), "messages[1].content"),
    ] {
        assert_eq!(broken(&pointer, value), param, "{pointer}");
    }
}
