use proptest::prelude::*;
use serde_json::{Map, json};

use super::*;

const FORMATS: [CallFormat; 6] = [TAGGED, TAGGED_TOGETHER, TAGGED_LOUDLY, LISTED, MISTRAL, LLAMA];

/// What comes out of a text that is cut where `cuts` say, texts joined.
fn parse(format: CallFormat, pieces: impl IntoIterator<Item = String>) -> (Vec<CallPiece>, bool) {
    let mut parser = CallParser::new(format, ["f", "get_weather"].map(str::to_owned));
    let mut all: Vec<CallPiece> = pieces.into_iter().flat_map(|piece| parser.push(&piece)).collect();
    all.extend(parser.finish());
    let mut joined: Vec<CallPiece> = Vec::new();
    for piece in all {
        match (joined.last_mut(), piece) {
            (Some(CallPiece::Text(before)), CallPiece::Text(text)) => before.push_str(&text),
            (_, piece) => joined.push(piece),
        }
    }
    (joined, parser.failed())
}

fn whole(format: CallFormat, text: &str) -> (Vec<CallPiece>, bool) {
    parse(format, [text.to_owned()])
}

fn call(name: &str, arguments: &str) -> CallPiece {
    CallPiece::Call(ToolCall { id: None, name: name.to_owned(), arguments: arguments.to_owned() })
}

fn text(text: &str) -> CallPiece {
    CallPiece::Text(text.to_owned())
}

#[test]
fn each_family_is_read() {
    let (f, g) = (call("f", r#"{"a": 1}"#), call("g", "{}"));
    for (format, written, expected) in [
        (TAGGED, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>", vec![f.clone()]),
        (
            TAGGED,
            "Let me see.\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>\n<tool_call>{\"name\": \"g\"}</tool_call>\n",
            vec![text("Let me see."), f.clone(), g.clone()],
        ),
        // Models forget the end.
        (TAGGED, r#"<tool_call>{"name": "f", "arguments": {"a": 1}}"#, vec![f.clone()]),
        (TAGGED, r#"<tool_call>{"name": "f", "arguments": {"a": 1}}</tool"#, vec![f.clone()]),
        (
            TAGGED,
            r#"<tool_call>{"name": "g", "arguments": "{}"}</tool_call> done"#,
            vec![g.clone(), text(" done")],
        ),
        (
            TAGGED,
            r#"<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>"#,
            vec![f.clone()],
        ),
        (
            TAGGED_TOGETHER,
            r#"<tool_calls>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_calls>"#,
            vec![f.clone(), g.clone()],
        ),
        (
            TAGGED_TOGETHER,
            "<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n{\"name\": \"g\"}\n</tool_calls>",
            vec![f.clone(), g.clone()],
        ),
        (TAGGED_LOUDLY, r#"<TOOLCALL>[{"name": "g"}]</TOOLCALL>"#, vec![g.clone()]),
        (LISTED, r#"<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]"#, vec![f.clone()]),
        (LISTED, r#"<|tool_call|>[{"name": "g"}]<|/tool_call|>"#, vec![g.clone()]),
        (LISTED, r#"functools[{"name": "f", "arguments": {"a": 1}}]"#, vec![f.clone()]),
        (LISTED, "Use functools, it is a module.", vec![text("Use functools, it is a module.")]),
        (MISTRAL, r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]"#, vec![f.clone()]),
        (MISTRAL, r#"[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}"#, vec![f.clone(), g.clone()]),
        (MISTRAL, r#"[TOOL_CALLS]f{"a": 1}"#, vec![f.clone()]),
        (LLAMA, r#"{"name": "f", "parameters": {"a": 1}}"#, vec![f.clone()]),
        (LLAMA, r#"<|python_tag|>{"name": "g", "parameters": {}}"#, vec![g.clone()]),
        (
            LLAMA,
            r#" {"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}"#,
            vec![f.clone(), call("get_weather", "{}")],
        ),
        (LLAMA, r#"Sure. <|python_tag|>{"name": "g", "parameters": {}}"#, vec![text("Sure."), g.clone()]),
    ] {
        assert_eq!(whole(format, written), (expected, false), "{written}");
    }
}

#[test]
fn ids_that_a_model_gives_are_kept() {
    for written in [
        r#"[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]"#,
        r#"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}"#,
    ] {
        let expected = ToolCall { id: Some("abcdefghi".into()), name: "f".into(), arguments: "{}".into() };
        assert_eq!(whole(MISTRAL, written), (vec![CallPiece::Call(expected)], false));
    }
}

#[test]
fn what_is_no_call_comes_out_as_it_was_written_and_is_told() {
    for (format, written, told) in [
        (TAGGED, "<tool_call>{\"name\": \"f\", oops</tool_call>", true),
        (TAGGED, "<tool_call>get_weather(city='Paris')</tool_call>", true),
        (TAGGED, "<tool_call></tool_call>", true),
        (TAGGED, "<tool_call>[]</tool_call>", true),
        (TAGGED, "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>", true),
        (TAGGED, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"end", true),
        (TAGGED, "<tool_cal", false),
        (TAGGED, "a < b and <tool> \n", false),
        (LISTED, "<|tool_call|>I cannot.", true),
        (MISTRAL, "[TOOL_CALLS]", true),
        (MISTRAL, "[TOOL_CALLS]two words[ARGS]{}", true),
        (LLAMA, "<|python_tag|>brave_search.call(query=\"x\")", true),
        // An object that names no tool of the request is an answer in JSON; one that begins to is told.
        (LLAMA, "{\"colour\": \"red\"}", false),
        (LLAMA, "{\"name\": \"Bob\", \"parameters\": {}}", true),
        (LLAMA, "{\"name\": \"f\", \"parameters\": {\"a\"", true),
        (LLAMA, "  {", false),
    ] {
        assert_eq!(whole(format, written), (vec![text(written)], told), "{written}");
    }
}

#[test]
fn a_call_after_a_broken_one_is_still_read() {
    let written = "<tool_call>{oops}</tool_call>\n<tool_call><tool_call>{\"name\": \"g\"}</tool_call>";
    let (pieces, failed) = whole(TAGGED, written);
    assert!(failed);
    assert_eq!(pieces, [text("<tool_call>{oops}</tool_call>\n<tool_call>"), call("g", "{}")]);
}

#[test]
fn text_is_not_held_longer_than_it_may_begin_a_call() {
    let mut parser = CallParser::new(TAGGED, []);
    assert_eq!(parser.push("Hello"), [text("Hello")]);
    assert_eq!(parser.push(" <to"), []);
    assert_eq!(parser.push("day"), [text(" <today")]);
    assert_eq!(parser.push("<tool_call>{\"name\": \"g\"}"), [call("g", "{}")]);
    let mut parser = CallParser::new(LLAMA, []);
    assert_eq!(parser.push("{x"), [text("{"), text("x")]);
    assert_eq!(parser.push("y"), [text("y")]);
}

#[test]
fn half_a_million_bytes_of_marks_take_no_time() {
    let begun = std::time::Instant::now();
    for unit in [
        "<tool_call>",
        "<tool_call>{",
        "<tool_call>[\"",
        "<tool_call>{\"a\":\"<tool_call>[1,",
        "{",
        "[TOOL_CALLS]a",
    ] {
        for format in FORMATS {
            let written = unit.repeat(500_000 / unit.len());
            let pieces =
                written.as_bytes().chunks(7).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
            let (joined, _) = parse(format, pieces);
            assert_eq!(joined, [text(&written)]);
        }
    }
    assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
}

/// Pieces of calls, well and badly put together.
fn fragments() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "<tool_calls>",
        "</tool_calls>",
        "<TOOLCALL>",
        "</TOOLCALL>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "functools",
        "[",
        "]",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "abcdefghi",
        "<|python_tag|>",
        "{\"name\": \"f\", \"arguments\": {\"é\": \"🦀 \\\" } ]\"}}",
        "{\"name\": \"f\", \"parameters\": {}}",
        "{\"name\"",
        "{",
        "}",
        "\"",
        "\\",
        ", ",
        "; ",
        "\n",
        " ",
        "text",
        "é",
        "🦀",
        "<",
        "f",
        "{}",
    ]);
    prop::collection::vec(fragment, 0..12).prop_map(|parts| parts.concat())
}

fn cut(text: &str, cuts: &[bool]) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for (i, c) in text.chars().enumerate() {
        if cuts[i % cuts.len()] {
            pieces.push(String::new());
        }
        pieces.last_mut().unwrap().push(c);
    }
    pieces
}

fn some_calls() -> impl Strategy<Value = Vec<ToolCall>> {
    let value = prop_oneof![
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[ -~é🦀\n\"\\\\<>{}\\[\\]]{0,12}".prop_map(Value::from),
        prop::collection::vec(any::<u8>(), 0..3).prop_map(Value::from),
        Just(json!({"deep": [{"er": null}]})),
    ];
    let call = (prop::collection::vec(("[a-z\"é]{1,4}", value), 0..4), "(f|get_weather)").prop_map(
        |(fields, name)| {
            let arguments = Value::Object(fields.into_iter().collect::<Map<_, _>>()).to_string();
            ToolCall { id: None, name, arguments }
        },
    );
    prop::collection::vec(call, 1..4)
}

proptest! {
    #[test]
    fn any_split_gives_the_same(
        format in prop::sample::select(FORMATS.to_vec()),
        written in prop_oneof![fragments(), any::<String>()],
        cuts in prop::collection::vec(any::<bool>(), 1..12),
    ) {
        let expected = whole(format, &written);
        prop_assert_eq!(parse(format, cut(&written, &cuts)), expected.clone());
        // Without a call, nothing is lost.
        if !expected.0.iter().any(|piece| matches!(piece, CallPiece::Call(_))) {
            let all: String = expected.0.iter().map(|p| match p { CallPiece::Text(t) => t.as_str(), CallPiece::Call(_) => "" }).collect();
            prop_assert_eq!(all, written);
        }
    }

    #[test]
    fn what_is_written_is_read(
        format in prop::sample::select(FORMATS.to_vec()),
        calls in some_calls(),
        before in "([A-Z][a-z ]{0,10}[a-z])?",
        cuts in prop::collection::vec(any::<bool>(), 1..12),
    ) {
        let before = if format == LLAMA { String::new() } else { before };
        let written = format!("{before}\n{}", format.write(&calls));
        let mut expected: Vec<CallPiece> = calls.into_iter().map(CallPiece::Call).collect();
        if !before.is_empty() {
            expected.insert(0, CallPiece::Text(before));
        }
        prop_assert_eq!(parse(format, cut(&written, &cuts)), (expected, false));
    }
}

#[test]
fn a_family_is_known_by_what_its_template_or_vocabulary_shows() {
    let none = |_: &str| false;
    assert_eq!(CallFormat::find("... <tool_call>{\"name\": ...", none), Some(TAGGED));
    assert_eq!(CallFormat::find("<tool_call>\n<function=name>", none), None);
    assert_eq!(CallFormat::find("respond with functools[...]", none), Some(LISTED));
    assert_eq!(CallFormat::find("{{ tools }}", |token| token == "<|tool_call|>"), Some(LISTED));
    assert_eq!(CallFormat::find("[AVAILABLE_TOOLS]", |token| token == "[TOOL_CALLS]"), Some(MISTRAL));
    assert_eq!(CallFormat::find("{{ messages }}", none), None);
}
