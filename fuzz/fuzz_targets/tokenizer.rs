#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tandem_model::gguf::{self, Value};
use tandem_model::tokenizer::Tokenizer;

/// A GGUF file starts with its magic; anything else is a tokenizer.json.
fn read(data: &[u8]) -> Option<Tokenizer> {
    let path = Path::new("fuzz");
    if !data.starts_with(b"GGUF") {
        return Tokenizer::from_json(path, data, 1 << 20).ok();
    }
    let gguf = gguf::parse(path, data).ok()?;
    let Some(Value::Array(tokens)) = gguf.metadata.get("tokenizer.ggml.tokens") else { return None };
    Tokenizer::from_gguf(path, &gguf, tokens.len).ok()
}

fuzz_target!(|data: &[u8]| {
    let Some(tokenizer) = read(data) else { return };
    for text in ["Hello, 12 worlds!\n é", "a<s>  b</s>\0🙂", ""] {
        if let Ok(ids) = tokenizer.encode(text, true) {
            let _ = tokenizer.decode(&ids, false);
        }
    }
    let _ = tokenizer.decode(&[0, 1, 2, 3, 300], true);
});
