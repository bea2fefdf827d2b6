#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tandem_coreml::Package;

const MANIFEST: &str = r#"{"fileFormatVersion":"1.0.0","rootModelIdentifier":"a","itemInfoEntries":{"a":
{"author":"","description":"","name":"model.mlmodel","path":"com.apple.CoreML/model.mlmodel"}}}"#;

/// A package whose files are written over and over.
static PACKAGE: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("tandem-fuzz-{}.mlpackage", std::process::id()));
    fs::create_dir_all(path.join("Data/com.apple.CoreML/weights")).unwrap();
    fs::write(path.join("Manifest.json"), MANIFEST).unwrap();
    path
});

// Two bytes for the length of the program, the program, the weight file.
fuzz_target!(|data: &[u8]| {
    let Some((len, rest)) = data.split_first_chunk::<2>() else { return };
    let (program, weights) = rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()));
    let folder = PACKAGE.join("Data/com.apple.CoreML");
    fs::write(folder.join("model.mlmodel"), program).unwrap();
    fs::write(folder.join("weights/weight.bin"), weights).unwrap();
    if let Ok(package) = Package::open(&PACKAGE) {
        for value in package.values() {
            package.bytes(value).unwrap();
        }
        for name in package.model().functions.keys() {
            package.function(Some(name)).unwrap();
        }
    }
});
