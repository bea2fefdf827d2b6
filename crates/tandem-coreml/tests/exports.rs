//! Exports of the tiny golden checkpoints: two are the same bytes, wishes that cannot be granted are refused by name, and
//! (in the judged tier) coremltools finds them valid and computes transformers' logits from them.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};

use tandem_coreml::export::{ExportOptions, KvForm, Quant, Target, export};
use tandem_model::Checkpoint;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn tiny() -> ExportOptions {
    ExportOptions { context: 128, prefill: 16, ..ExportOptions::new(Target::Ane) }
}

fn export_fixture(name: &str, out: &Path, options: &ExportOptions) {
    let (decoder, weights) = Checkpoint::open_network(&fixtures().join(name)).unwrap();
    export(&decoder, &weights, &[], out, options, &mut |_, _| {}).unwrap_or_else(|error| panic!("{name}: {error}"));
}

#[test]
fn scratch() {
    let out = PathBuf::from(std::env::var("SCRATCH_OUT").unwrap());
    let mut options = tiny();
    if std::env::var("SCRATCH_IO").is_ok() {
        options.kv = KvForm::Io;
    }
    if let Ok(bits) = std::env::var("SCRATCH_LUT") {
        options.quant = Quant::Lut(bits.parse().unwrap());
    }
    export_fixture(&std::env::var("SCRATCH_NAME").unwrap(), &out, &options);
}
