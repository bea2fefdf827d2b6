//! A checkpoint: everything a model is, opened but not computed.
//!
//! Opening maps files and checks every claim in them: after it, an engine can read each weight that the [`Decoder`]
//! names, in the shape the decoder implies.

mod dummy;
mod folder;
mod gguf_file;
pub(crate) mod mlx;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::arch::Architecture;
use crate::chat::ChatTemplate;
use crate::decoder::{Decoder, WeightUse};
use crate::error::ModelError;
use crate::generation::GenerationConfig;
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;

/// An opened checkpoint.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// What the network is.
    pub decoder: Decoder,
    /// Its tensors.
    pub weights: Arc<Weights>,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// How a conversation becomes a prompt, where the checkpoint says so.
    pub chat: Option<ChatTemplate>,
    /// Sampling defaults and end tokens.
    pub generation: GenerationConfig,
    /// The folder or file it was opened from.
    pub source: PathBuf,
}

impl Checkpoint {
    /// Opens a Hugging Face folder or a `.gguf` file. Weights are mapped, not read.
    ///
    /// # Errors
    /// Any [`ModelError`]; each names the file and field and says what to do.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => folder::open(path),
            Ok(_) => gguf_file::open(path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(ModelError::missing_file(
                path.to_owned(),
                "it should be the model",
                "give a folder that holds config.json, or a .gguf file",
            )),
            Err(source) => Err(ModelError::Io { path: path.to_owned(), source }),
        }
    }

    /// Opens only the network of a Hugging Face folder: no tokenizer, no template.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_network(folder: &Path) -> Result<(Decoder, Arc<Weights>), ModelError> {
        folder::network(folder)
    }
}

/// Checks shapes, and that no tensor is left over.
fn verify(decoder: &Decoder, weights: &Weights, architecture: &Architecture) -> Result<(), ModelError> {
    // Each tensor that is read, and the row after the last one read.
    let mut used = BTreeMap::new();
    for WeightUse { weight, shape: expected, role: _ } in decoder.weight_uses() {
        let stored = weights.tensor(&weight.tensor)?;
        let mut found = stored.shape.clone();
        if let (Some(rows), Some(first)) = (&weight.rows, found.first_mut()) {
            *first = rows.len();
        }
        if found != expected {
            return Err(ModelError::Shape {
                name: weight.tensor.clone(),
                expected,
                found: stored.shape.clone(),
            });
        }
        let rows = weights.matrix(weight)?.rows;
        let end = weight.rows.as_ref().map_or(rows, |rows| rows.end);
        let used = used.entry(weight.tensor.as_str()).or_insert(end);
        *used = end.max(*used);
    }
    for (name, rows) in &used {
        let stored = weights.tensor(name)?;
        if stored.shape.first().is_some_and(|first| first > rows) {
            let expected = std::iter::once(*rows).chain(stored.shape.iter().skip(1).copied()).collect();
            return Err(ModelError::Shape { name: (*name).into(), expected, found: stored.shape.clone() });
        }
    }
    let unused: Vec<&str> = weights
        .iter()
        .map(|(name, _)| name)
        .filter(|name| !used.contains_key(name) && !architecture.tolerates(name))
        .collect();
    if unused.is_empty() {
        return Ok(());
    }
    const SHOWN: usize = 5;
    let mut names = unused[..unused.len().min(SHOWN)].join(", ");
    if unused.len() > SHOWN {
        names.push_str(", ...");
    }
    Err(ModelError::UnusedTensors { architecture: decoder.architecture.clone(), count: unused.len(), names })
}
