//! A Core ML package of arbitrary bytes: opened, audited, inspected, and its constants read.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tandem_coreml::Package;
use tandem_coreml::audit::{Options, audit};
use tandem_coreml::inspect::inspect;

/// A package whose manifest is good; each run replaces its program and its weights.
static PACKAGE: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("Data/com.apple.CoreML/weights")).unwrap();
    let manifest = r#"{"fileFormatVersion": "1.0.0", "rootModelIdentifier": "a", "itemInfoEntries": {"a": {"author": "",
        "description": "", "name": "", "path": "com.apple.CoreML/model.mlmodel"}}}"#;
    std::fs::write(folder.path().join("Manifest.json"), manifest).unwrap();
    folder
});

fuzz_target!(|data: &[u8]| {
    let Some((length, rest)) = data.split_first_chunk::<8>() else { return };
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX).min(rest.len());
    let (program, weights) = rest.split_at(length);
    let folder = PACKAGE.path();
    let write = |path: &Path, bytes: &[u8]| std::fs::write(folder.join("Data/com.apple.CoreML").join(path), bytes).unwrap();
    write(Path::new("model.mlmodel"), program);
    write(Path::new("weights/weight.bin"), weights);
    let Ok(package) = Package::open(folder) else { return };
    for value in package.values() {
        package.bytes(value).unwrap();
    }
    for name in package.model().functions.keys() {
        package.function(Some(name)).unwrap();
    }
    let _ = audit(&package, &Options::default());
    let _ = inspect(&package);
});
