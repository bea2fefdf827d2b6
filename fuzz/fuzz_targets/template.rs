#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::json;
use tandem_model::{ChatTemplate, Message, RenderOptions};

fuzz_target!(|source: &str| {
    let messages: Vec<Message> = serde_json::from_value(json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Où?"}, {"type": "image"}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, true]}}}
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "{}"}
    ]))
    .unwrap_or_default();
    let chat = ChatTemplate::new(source, [("bos_token".to_owned(), "<s>".to_owned())].into());
    let options = RenderOptions {
        add_generation_prompt: true,
        tools: Some(vec![json!({"type": "function", "function": {"name": "f", "parameters": {}}})]),
        ..RenderOptions::default()
    };
    let _ = chat.render(&messages, &options);
});
