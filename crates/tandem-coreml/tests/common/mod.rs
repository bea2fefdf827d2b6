//! Exports of the tiny golden checkpoints, and the judges that read them.

#![allow(clippy::unwrap_used, dead_code, reason = "tests")]

pub mod dequantized;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use tandem_coreml::CoremlError;
use tandem_coreml::export::manifest::Manifest;
use tandem_coreml::export::{ExportOptions, Sample, Source, Target, export};
use tandem_model::decoder::Decoder;
use tandem_model::{Checkpoint, Weights};

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// Names of the folders that hold a checkpoint and golden logits.
pub fn names() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(fixtures())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| fixtures().join(name).join("golden.safetensors").exists())
        .filter(|name| fixtures().join(name).join("config.json").exists())
        .collect();
    names.sort();
    assert!(names.len() >= 17, "{names:?}");
    names
}

/// Enough for the golden sequences of 113 tokens.
pub fn tiny(target: Target) -> ExportOptions {
    ExportOptions { context: 128, prefill: 16, ..ExportOptions::new(target) }
}

pub fn try_export(name: &str, out: &Path, options: &ExportOptions) -> Result<Manifest, CoremlError> {
    let (decoder, weights) = Checkpoint::open_network(&fixtures().join(name))?;
    export(source(&decoder, &weights), out, options, &mut |_, _| {})
}

/// A network whose weights are random, and so are the tokens that its range is traced on.
pub fn source<'a>(decoder: &'a Decoder, weights: &'a Weights) -> Source<'a> {
    Source { decoder, weights, sample: Sample::Tokens(&[3, 1, 4, 1, 5, 9, 2, 6]), companions: &[] }
}

/// A network that adds `factor` times as much to its residual stream.
pub fn scaled(decoder: &Decoder, factor: f32) -> Decoder {
    let mut decoder = decoder.clone();
    decoder.layers.iter_mut().for_each(|layer| layer.residual_scale *= factor);
    decoder
}

/// The Python of the judged tier, or `None` outside it.
pub fn judge() -> Option<PathBuf> {
    if std::env::var_os("TANDEM_JUDGED").is_none_or(|judged| judged != "1") {
        return None;
    }
    Some(PathBuf::from(
        std::env::var_os("TANDEM_JUDGE_PYTHON").expect("TANDEM_JUDGE_PYTHON in the judged tier"),
    ))
}

pub fn python(python: &Path, script: &str, arguments: &[&Path]) -> (bool, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/judges").join(script);
    let output = Command::new(python).arg(script).args(arguments).env("TQDM_DISABLE", "1").output().unwrap();
    let (out, error) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        eprintln!("{error}");
    }
    (output.status.success(), out)
}

/// What `run_export.py` says of one export.
#[derive(Debug, Deserialize)]
pub struct Verdict {
    pub export: String,
    pub invalid: Vec<String>,
    #[serde(default)]
    pub cosine: f64,
    #[serde(default)]
    pub compared: usize,
    #[serde(default)]
    pub greedy: bool,
}

/// Judges exports against golden files, and fails with all that are wrong.
pub fn assert_exports(python_path: &Path, pairs: &[(PathBuf, PathBuf)], least_cosine: f64) {
    let arguments: Vec<&Path> =
        pairs.iter().flat_map(|(export, golden)| [export.as_path(), golden]).collect();
    let (success, out) = python(python_path, "run_export.py", &arguments);
    println!("{out}");
    assert!(success, "the judge failed");
    let verdicts: Vec<Verdict> = out
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(verdicts.len(), pairs.len());
    let wrong: Vec<&Verdict> = verdicts
        .iter()
        .filter(|v| !(v.invalid.is_empty() && v.cosine >= least_cosine && v.compared >= 3 && v.greedy))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
