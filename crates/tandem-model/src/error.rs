//! What can be wrong with a checkpoint. Every message names the file or field and says what to do.

use std::path::{Path, PathBuf};

/// Why a checkpoint could not be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused.
    #[error("cannot read {path}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file does not hold what its format promises.
    #[error("{path} is damaged or not what it seems: {what}. hint: {hint}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, with numbers.
        what: String,
        /// What to do.
        hint: String,
    },
    /// A file that a checkpoint needs is not there.
    #[error("{path} is missing: {what}. hint: {hint}", path = path.display())]
    MissingFile {
        /// The file that was looked for.
        path: PathBuf,
        /// What it is for.
        what: String,
        /// What to do.
        hint: String,
    },
    /// A config key or metadata value that Tandem does not understand or cannot compute.
    #[error("{path}: {key} = {value} is not supported. hint: {hint}", path = path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What would be needed.
        hint: String,
    },
    /// A tensor that the architecture needs is not in the checkpoint.
    #[error(
        "tensor {name} is missing. hint: the checkpoint is incomplete, or its architecture differs from what its config says"
    )]
    MissingTensor {
        /// Its name.
        name: String,
    },
    /// A tensor has another shape than the config says.
    #[error(
        "tensor {name} has shape {found:?}, expected {expected:?}. hint: the config and the weights do not belong together"
    )]
    Shape {
        /// Its name.
        name: String,
        /// From the config; slowest dimension first.
        expected: Vec<usize>,
        /// From the file; slowest dimension first.
        found: Vec<usize>,
    },
    /// Tensors that nothing reads: the architecture is not the one Tandem computes.
    #[error(
        "{count} tensors are in the checkpoint but the {architecture} architecture reads none of them: {names}. hint: these weights would silently be ignored; Tandem refuses instead"
    )]
    UnusedTensors {
        /// The architecture.
        architecture: String,
        /// How many.
        count: usize,
        /// The first few, comma-separated.
        names: String,
    },
    /// The chat template failed.
    #[error("chat template: {0}")]
    Template(String),
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
}

/// Short constructors for the readers.
impl ModelError {
    pub(crate) fn malformed(path: &Path, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), what: what.into(), hint: hint.into() }
    }

    pub(crate) fn unsupported(
        path: &Path,
        key: impl Into<String>,
        value: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self::Unsupported { path: path.to_owned(), key: key.into(), value: value.into(), hint: hint.into() }
    }

    pub(crate) fn missing_file(path: PathBuf, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::MissingFile { path, what: what.into(), hint: hint.into() }
    }
}
