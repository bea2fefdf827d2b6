#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tandem_model::gguf::{self, Value};
use tandem_model::tokenizer::Tokenizer;

fuzz_target!(|data: &[u8]| {
    let path = Path::new("fuzz");
    let Ok(gguf) = gguf::parse(path, data) else { return };
    for tensor in gguf.tensors.values() {
        assert!(tensor.range.start <= tensor.range.end && tensor.range.end <= data.len());
    }
    for value in gguf.metadata.values() {
        if let Value::Array(array) = value {
            // The reader has walked every array, so walking it again reaches the end.
            if let Some(texts) = array.texts() {
                assert_eq!(texts.count(), array.len);
            }
            array.integers().map(Iterator::count);
        }
    }
    if let Some(Value::Array(tokens)) = gguf.metadata.get("tokenizer.ggml.tokens")
        && let Ok(tokenizer) = Tokenizer::from_gguf(path, &gguf, tokens.len)
        && let Ok(ids) = tokenizer.encode("Hello, 12 worlds!\n é", true)
    {
        let _ = tokenizer.decode(&ids, false);
    }
});
