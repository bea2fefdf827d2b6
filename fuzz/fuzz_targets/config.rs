#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tandem_model::arch::decoder_from_config;

fuzz_target!(|data: &[u8]| {
    if let Ok((_, decoder)) = decoder_from_config(Path::new("fuzz"), data) {
        assert!(!decoder.weight_uses().is_empty());
    }
});
