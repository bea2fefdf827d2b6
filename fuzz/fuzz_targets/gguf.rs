#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tandem_model::gguf::{self, Value};

fuzz_target!(|data: &[u8]| {
    let Ok(gguf) = gguf::parse(Path::new("fuzz"), data) else { return };
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
});
