//! A package on the disk: a folder with a manifest, the program and its weight files.

mod kind;
mod manifest;
mod staging;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use prost::Message;

use crate::blob::{Blob, BlobFile};
use crate::error::CoremlError;
use crate::mil::{BlobRef, Data, Function, Model, Value};
use crate::proto::model;

pub(crate) use staging::Staging;
pub use write::PackageWriter;

/// How programs spell the folder of the program itself.
const MODEL_PATH: &str = "@model_path/";

/// An opened package.
#[derive(Debug)]
pub struct Package {
    path: PathBuf,
    model: Model,
    /// By the name programs use.
    weights: BTreeMap<String, BlobFile>,
}

impl Package {
    /// Opens a package. The program is read and every reference into a weight file is checked against the record's
    /// header; the weights themselves are mapped and not read.
    ///
    /// # Errors
    /// [`CoremlError::NotAPackage`] for something else (a neural network, a bare or compiled model, ...);
    /// [`CoremlError::Malformed`] for damage; [`CoremlError::Io`].
    pub fn open(path: &Path) -> Result<Self, CoremlError> {
        let program = manifest::find_program(path)?;
        let bytes = std::fs::read(&program).map_err(CoremlError::reading(&program))?;
        kind::check(path, &program, &bytes)?;
        let wrong = |what: String| CoremlError::malformed(&program, what);
        let message = model::Model::decode(bytes.as_slice()).map_err(|error| wrong(error.to_string()))?;
        drop(bytes);
        let model = Model::from_proto(message).map_err(wrong)?;
        let mut package = Self { path: path.to_owned(), model, weights: BTreeMap::new() };
        package.map_weights(&program)?;
        package.check_weights(&program)?;
        Ok(package)
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The program.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// A function by name, or the default one.
    ///
    /// # Errors
    /// [`CoremlError::Refused`], naming those there are.
    pub fn function(&self, name: Option<&str>) -> Result<(&str, &Function), CoremlError> {
        let name = name.unwrap_or(&self.model.default_function);
        let found = self.model.functions.get_key_value(name);
        found.map(|(name, function)| (name.as_str(), function)).ok_or_else(|| {
            let names: Vec<&str> = self.model.functions.keys().map(String::as_str).collect();
            CoremlError::refused(
                format!("{} has no function {name}", self.path.display()),
                format!("it has {}", names.join(", ")),
            )
        })
    }

    /// The weight files, by the name that programs use (`@model_path/weights/weight.bin`).
    pub fn weight_files(&self) -> impl Iterator<Item = (&str, &BlobFile)> {
        self.weights.iter().map(|(name, file)| (name.as_str(), file))
    }

    /// The record that `blob` names.
    ///
    /// # Errors
    /// [`CoremlError::Malformed`]; none for a reference of this package's own program.
    pub fn blob(&self, blob: &BlobRef) -> Result<Blob<'_>, CoremlError> {
        let file = self.weights.get(&blob.file).ok_or_else(|| {
            CoremlError::malformed(&self.path, format!("the program names the weight file {}", blob.file))
        })?;
        file.record(blob.offset)
    }

    /// The packed bytes of a constant, wherever they lie; `None` for one that is not kept as bytes (`int32`, `fp32`,
    /// `bool`, strings and 64-bit types, given in place).
    ///
    /// # Errors
    /// As [`Package::blob`].
    pub fn bytes<'a>(&'a self, value: &'a Value) -> Result<Option<&'a [u8]>, CoremlError> {
        match &value.data {
            Data::Blob(blob) => Ok(Some(self.blob(blob)?.bytes)),
            Data::Bytes(bytes) => Ok(Some(bytes)),
            _ => Ok(None),
        }
    }

    /// Every constant of every function, those of nested blocks too.
    pub fn values(&self) -> impl Iterator<Item = &Value> {
        let blocks = self.model.functions.values().map(|function| &function.block);
        blocks.flat_map(|block| block.walk()).flat_map(|op| op.values().map(|(_, value)| value))
    }

    fn map_weights(&mut self, program: &Path) -> Result<(), CoremlError> {
        let mut names: Vec<String> = self
            .values()
            .filter_map(|value| match &value.data {
                Data::Blob(blob) => Some(blob.file.clone()),
                _ => None,
            })
            .collect();
        names.sort();
        names.dedup();
        for name in names {
            let relative = name.strip_prefix(MODEL_PATH).filter(|path| manifest::is_plain(path));
            let relative = relative.ok_or_else(|| {
                CoremlError::malformed(
                    program,
                    format!("a weight file is called {name:?}, not {MODEL_PATH}..."),
                )
            })?;
            let path = program.parent().unwrap_or(Path::new(".")).join(relative);
            self.weights.insert(name, BlobFile::open(&path)?);
        }
        Ok(())
    }

    /// Every reference names a record of the type and size that the program expects.
    fn check_weights(&self, program: &Path) -> Result<(), CoremlError> {
        for function in self.model.functions.values() {
            for op in function.block.walk() {
                for (key, value) in op.values() {
                    let Data::Blob(reference) = &value.data else { continue };
                    let blob = self.blob(reference)?;
                    let wrong = |what: String| {
                        let at = format!("operator {} {}, {key}", op.kind, op.name());
                        CoremlError::malformed(program, format!("{at}: {what}"))
                    };
                    let ty = value.ty.tensor().ok_or_else(|| wrong("weights that are no tensor".into()))?;
                    let bytes = ty.elements().and_then(|count| ty.dtype.bytes(count));
                    if blob.dtype != ty.dtype || bytes != Some(blob.bytes.len()) {
                        return Err(wrong(format!(
                            "{ty} at offset {} of {}, where {} bytes of {} lie",
                            reference.offset,
                            reference.file,
                            blob.bytes.len(),
                            blob.dtype.name()
                        )));
                    }
                }
            }
        }
        Ok(())
    }
}
