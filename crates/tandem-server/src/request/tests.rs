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
            prop::collection::vec(("(type|text|role|content|include_usage|1)", inner), 0..4)
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
    "echo",
    "best_of",
    "user",
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
