#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tandem_model::gguf;
use tandem_model::tokenizer::Tokenizer;

fuzz_target!(|data: &[u8]| {
    let path = Path::new("fuzz");
    let tokenizer = if data.starts_with(b"GGUF") {
        let Ok(gguf) = gguf::parse(path, data) else { return };
        let Some(tokens) = gguf.array("tokenizer.ggml.tokens") else { return };
        Tokenizer::from_gguf(path, &gguf, tokens.len)
    } else {
        Tokenizer::from_json(path, data, 1 << 20)
    };
    let Ok(tokenizer) = tokenizer else { return };
    if let Ok(ids) = tokenizer.encode("Hello, 12 worlds!\n é", true) {
        let _ = tokenizer.decode(&ids, false);
    }
});
