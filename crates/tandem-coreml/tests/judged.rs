//! Exports as coremltools judges them: valid, and giving the logits that transformers computed. Runs in the judged tier
//! (`TANDEM_JUDGED=1`).

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::{Path, PathBuf};

use common::{assert_exports, fixtures, judge, names, tiny, try_export};
use tandem_coreml::export::{ExportOptions, KvForm, Target};

/// Least cosine between the logits of an fp16 package and transformers' in f32.
const COSINE: f64 = 0.9999;

/// Exports `name` and pairs it with its golden file.
fn export_to(folder: &Path, name: &str, label: &str, options: &ExportOptions) -> (PathBuf, PathBuf) {
    let out = folder.join(format!("{name}-{label}"));
    try_export(name, &out, options).unwrap_or_else(|error| panic!("{name}: {error}"));
    (out, fixtures().join(name).join("golden.safetensors"))
}

#[test]
fn judged_every_architecture_computes_what_transformers_does() {
    let Some(python) = judge() else { return };
    let folder = tempfile::tempdir().unwrap();
    let pairs: Vec<_> = names()
        .iter()
        .map(|name| {
            // The frequencies of dynamic rope are those of the longest sequence a package holds.
            let options = match name.as_str() {
                "llama-dynamic" => ExportOptions { context: 113, prefill: 113, ..tiny(Target::Ane) },
                _ => tiny(Target::Ane),
            };
            export_to(folder.path(), name, "ane", &options)
        })
        .collect();
    assert_exports(&python, &pairs, COSINE);
}

#[test]
fn judged_chunks_and_caches_outside_compute_the_same() {
    let Some(python) = judge() else { return };
    let folder = tempfile::tempdir().unwrap();
    let io = ExportOptions { kv: KvForm::Io, ..tiny(Target::Ane) };
    let chunks = ExportOptions { chunks: Some(2), head_parts: Some(3), ..tiny(Target::Ane) };
    let both = ExportOptions { chunks: Some(2), prefill: 32, ..io.clone() };
    let pairs: Vec<_> = ["llama-gqa", "gemma3", "mistral-window", "phi3-longrope"]
        .into_iter()
        .flat_map(|name| {
            [("io", &io), ("chunks", &chunks), ("io-chunks", &both)]
                .map(|(label, options)| export_to(folder.path(), name, label, options))
        })
        .collect();
    assert_exports(&python, &pairs, COSINE);
}
