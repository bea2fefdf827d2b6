#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tandem_model::tokenizer::Tokenizer;

fuzz_target!(|data: &[u8]| {
    if let Ok(tokenizer) = Tokenizer::from_json(Path::new("fuzz"), data, 1 << 20)
        && let Ok(ids) = tokenizer.encode("Hello, 12 worlds!\n é", true)
    {
        let _ = tokenizer.decode(&ids, false);
    }
});
