//! Writing a package.

use std::path::{Path, PathBuf};

use prost::Message;

use super::manifest;
use super::staging::Staging;
use crate::blob::BlobWriter;
use crate::error::CoremlError;
use crate::mil::{BlobRef, Model};

const WEIGHT_FILE: &str = "@model_path/weights/weight.bin";

/// A package under construction, in a folder of a temporary name beside its target. Dropped before
/// [`PackageWriter::finish`], nothing of it remains.
#[derive(Debug)]
pub struct PackageWriter {
    target: PathBuf,
    staging: Staging,
    /// For the weights, while the program is built.
    pub weights: BlobWriter,
}

impl PackageWriter {
    /// Starts a package that will lie at `target`, which must not exist; the folder it lies in must.
    ///
    /// # Errors
    /// [`CoremlError::Refused`] if `target` exists; [`CoremlError::Io`].
    pub fn create(target: &Path) -> Result<Self, CoremlError> {
        let staging = Staging::create(target)?;
        let weights = Path::new("Data").join(manifest::WEIGHTS);
        staging.folder(&weights.to_string_lossy())?;
        let weights = BlobWriter::create(&staging.path().join(weights).join("weight.bin"))?;
        Ok(Self { target: target.to_owned(), staging, weights })
    }

    /// How a program names the record at `offset`.
    pub fn reference(offset: u64) -> BlobRef {
        BlobRef { file: WEIGHT_FILE.into(), offset }
    }

    /// Writes program and manifest, syncs everything and gives the package its name.
    ///
    /// # Errors
    /// [`CoremlError::Io`]; nothing is left behind then.
    pub fn finish(self, model: &Model) -> Result<(), CoremlError> {
        let Self { target, staging, weights } = self;
        weights.finish()?;
        staging.write(&format!("Data/{}", manifest::PROGRAM), &model.to_proto().encode_to_vec())?;
        staging.write("Manifest.json", manifest::render().as_bytes())?;
        staging.commit(&target)
    }
}
