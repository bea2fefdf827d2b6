#![no_main]

use libfuzzer_sys::fuzz_target;
use tandem_server::request;

fuzz_target!(|data: &[u8]| {
    let _ = (request::chat(data), request::completion(data), request::question(data));
    let _ = (request::tokenize(data), request::detokenize(data));
});
