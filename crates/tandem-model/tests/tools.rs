//! Calls as real chat templates write them, read back.

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;

use common::judged;
use serde_json::{Map, Value, json};
use tandem_model::{CallFormat, CallParser, CallPiece, ChatTemplate, Message, RenderOptions};

/// What ends an assistant's turn in these templates; no model's text holds it.
const ENDS: [&str; 9] = [
    "<sep>",
    "<|im_end|>",
    "<|eot_id|>",
    "</s>",
    "<|end_of_text|>",
    "<|end|>",
    "<SPECIAL_12>",
    "<|eom_id|>",
    "<end_of_sentence>",
];

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {
        "name": name, "description": "Does it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}, "required": ["city"]},
    }})
}

/// Renders an assistant's turn that calls `calls`, and gives what the model would have written there.
fn turn(chat: &ChatTemplate, content: &Value, calls: &[(&str, Value)]) -> Result<String, String> {
    let call = |(i, (name, arguments)): (usize, &(&str, Value))| json!({"id": format!("abcdefgh{i}"), "type": "function", "function": {"name": name, "arguments": arguments}});
    let calls: Vec<Value> = calls.iter().enumerate().map(call).collect();
    let mut assistant = Message::new("assistant", "");
    assistant.content = Some(content.clone());
    assistant.extra = Map::from_iter([("tool_calls".to_owned(), Value::from(calls))]);
    let mut messages = vec![Message::new("user", "What is the weather?")];
    let mut options = RenderOptions {
        add_generation_prompt: true,
        tools: Some(vec![tool("get_weather"), tool("f")]),
        ..RenderOptions::default()
    };
    let before = chat.render(&messages, &options).map_err(|error| error.to_string())?;
    messages.push(assistant);
    options.add_generation_prompt = false;
    let all = chat.render(&messages, &options).map_err(|error| error.to_string())?;
    let same = before.bytes().zip(all.bytes()).take_while(|(a, b)| a == b).count();
    // A mark that both only begin alike is the turn's.
    let same = all[..same].rfind('<').filter(|at| !all[*at..same].contains('>')).unwrap_or(same);
    let rest = all.get(same..).ok_or("cut in a character")?;
    Ok(rest[..ENDS.iter().filter_map(|end| rest.find(end)).min().unwrap_or(rest.len())].to_owned())
}

/// The calls in a text, and the text around them.
fn read(format: CallFormat, written: &str) -> (Vec<(String, Value)>, String, bool) {
    let mut parser = CallParser::new(format, ["get_weather", "f"].map(str::to_owned));
    let mut pieces: Vec<CallPiece> =
        written.split_inclusive(' ').flat_map(|piece| parser.push(piece)).collect();
    pieces.extend(parser.finish());
    let (mut calls, mut text) = (Vec::new(), String::new());
    for piece in pieces {
        match piece {
            CallPiece::Text(more) => text += &more,
            CallPiece::Call(call) => calls.push((call.name, serde_json::from_str(&call.arguments).unwrap())),
        }
    }
    (calls, text, parser.failed())
}

/// Templates whose calls must be read back; others of llama.cpp's collection may be, and then must come back too.
const MUST: [&str; 15] = [
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen-QwQ-32B",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "ibm-granite-granite-4.0",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "unsloth-mistral-Devstral-Small-2507",
    "NVIDIA-Nemotron-Nano-v2",
    "Apriel-1.6-15b-Thinker-fixed",
];

/// The templates of real models that llama.cpp keeps for its own tests: what they write for an assistant's calls is what
/// their models were taught to write.
#[test]
fn judged_calls_that_real_templates_write_are_read_back() {
    let vocabularies = std::env::var_os("TANDEM_LLAMA_VOCABS").map(PathBuf::from);
    let Some(vocabularies) = judged("llama.cpp's models folder", vocabularies) else { return };
    let (mut known, mut faults) = (Vec::new(), Vec::new());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(vocabularies.join("templates")).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "jinja")) {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let source = std::fs::read_to_string(file).unwrap();
        let Some(format) = CallFormat::find(&source, |_| false) else { continue };
        // Where calls of the past have no place, the server writes them itself.
        if !source.contains("tool_calls") {
            continue;
        }
        let special =
            [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        let chat = ChatTemplate::new(&source, BTreeMap::from(special));
        let one = [("get_weather", json!({"city": "Zürich \"x\" } ] <b>", "days": [1, 2.5, null]}))];
        let two = [one[0].clone(), ("f", json!({}))];
        let (mut back, mut refused) = (0, String::new());
        for (calls, content) in
            [(&one[..], json!(null)), (&one, json!("")), (&two, json!("")), (&one, json!("I look."))]
        {
            let written = match turn(&chat, &content, calls) {
                // One drops the calls beside a text.
                Ok(written) if !written.contains("get_weather") => continue,
                Ok(written) => written,
                Err(error) => {
                    refused = error;
                    continue;
                }
            };
            let expected: Vec<(String, Value)> =
                calls.iter().map(|(n, a)| ((*n).to_owned(), a.clone())).collect();
            let (got, text, failed) = read(format, &written);
            // Some templates put an empty thought first, some drop the text.
            let text = text.replace("<think>", "").replace("</think>", "");
            let clean = text.trim().is_empty() || text.trim() == content;
            if got == expected && clean && !failed {
                back += 1;
            } else {
                faults.push(format!("{name}: {written:?}\n   text {text:?} calls {got:?}"));
            }
        }
        if back > 0 {
            known.push(name);
        } else if MUST.contains(&name.as_str()) {
            faults.push(format!("{name}: nothing was read back; it refuses: {refused}"));
        }
    }
    println!("read back: {}", known.join(", "));
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let missing: Vec<_> = MUST.iter().filter(|must| !known.iter().any(|name| name == *must)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
