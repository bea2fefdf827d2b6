//! Writers of small files, right and wrong, and what tests of real models share.

#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used)] // helpers are tests too

use std::path::{Path, PathBuf};

use tandem_model::{Detokenizer, Tokenizer};

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// A copy of a fixture folder that a test may damage.
pub fn copy_of(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "golden.safetensors" {
            std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
    }
    copy
}

/// Rewrites a JSON file of a folder.
pub fn edit(folder: &Path, file: &str, change: impl FnOnce(&mut serde_json::Value)) {
    let path = folder.join(file);
    let mut json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(path, serde_json::to_vec(&json).unwrap()).unwrap();
}

/// A safetensors file with this header.
pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out
}

/// Writes a GGUF file piece by piece; counts are filled in by `finish`.
#[derive(Default)]
pub struct Gguf {
    metadata: Vec<u8>,
    entries: u64,
    infos: Vec<u8>,
    tensors: u64,
}

impl Gguf {
    pub fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        push_text(&mut self.metadata, key);
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend_from_slice(value);
        self.entries += 1;
        self
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        let mut bytes = Vec::new();
        push_text(&mut bytes, value);
        self.entry(key, 8, &bytes)
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.entry(key, 6, &value.to_le_bytes())
    }

    pub fn bool(self, key: &str, value: bool) -> Self {
        self.entry(key, 7, &[value.into()])
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Self {
        let mut bytes = 8u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        for value in values {
            push_text(&mut bytes, value);
        }
        self.entry(key, 9, &bytes)
    }

    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let mut bytes = 6u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.entry(key, 9, &bytes)
    }

    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let mut bytes = 5u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.entry(key, 9, &bytes)
    }

    /// `dims` count from the fastest, as in the file.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        push_text(&mut self.infos, name);
        self.infos.extend((dims.len() as u32).to_le_bytes());
        self.infos.extend(dims.iter().flat_map(|n| n.to_le_bytes()));
        self.infos.extend(kind.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self.tensors += 1;
        self
    }

    pub fn finish(self, data: &[u8]) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensors.to_le_bytes());
        out.extend(self.entries.to_le_bytes());
        out.extend(self.metadata);
        out.extend(self.infos);
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend_from_slice(data);
        out
    }
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// Asserts that an error says each of `parts`, and gives a hint.
#[track_caller]
pub fn says<T: std::fmt::Debug>(result: Result<T, tandem_model::ModelError>, parts: &[&str]) {
    let error = result.expect_err("should be refused").to_string();
    for part in parts.iter().chain(&["hint: "]) {
        assert!(error.contains(part), "{part:?} is missing in: {error}");
    }
}

/// The pieces that the detokenizer emits, and each of them whole characters.
pub fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut detokenizer = Detokenizer::new(tokenizer, skip_special);
    let mut text = String::new();
    for &id in ids {
        if let Some(piece) = detokenizer.push(id) {
            assert!(!piece.is_empty());
            text.push_str(&piece);
        }
    }
    text.extend(detokenizer.finish());
    text
}

/// Whether a judged test may run; a missing file is a loud skip, and in the judged tier a failure where none is allowed.
pub fn judged(what: &str, found: Option<PathBuf>) -> Option<PathBuf> {
    if found.is_none() {
        let set = |variable: &str| std::env::var_os(variable).is_some();
        assert!(!(set("TANDEM_JUDGED") && set("TANDEM_NO_SKIP")), "{what} is not here");
        eprintln!("SKIPPED: {what} is not here");
    }
    found
}

pub fn find(folder: &Path, ending: &str) -> Option<PathBuf> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries.into_iter().find_map(|path| {
        if path.is_dir() { find(&path, ending) } else { path.to_str()?.ends_with(ending).then_some(path) }
    })
}
