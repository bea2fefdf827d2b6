#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tandem_model::safetensors;

fuzz_target!(|data: &[u8]| {
    if let Ok(entries) = safetensors::parse(Path::new("fuzz"), data) {
        for entry in entries {
            // What was accepted lies inside the file.
            assert!(entry.range.start <= entry.range.end && entry.range.end <= data.len());
        }
    }
    let _ = safetensors::parse_index(Path::new("fuzz"), data);
});
