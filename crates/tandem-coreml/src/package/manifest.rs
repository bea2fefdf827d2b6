//! `Manifest.json`: which file of the package is the program.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::CoremlError;

/// Where the program lies below `Data/`.
pub(super) const PROGRAM: &str = "com.apple.CoreML/model.mlmodel";
/// Where the weight files lie below `Data/`.
pub(super) const WEIGHTS: &str = "com.apple.CoreML/weights";

const AUTHOR: &str = "com.apple.CoreML";
// Identifiers only have to differ from each other; fixed ones make packages reproducible.
const PROGRAM_ID: &str = "6F2A9D3C-5B1E-4C77-9E0B-7D8A4C1F0001";
const WEIGHTS_ID: &str = "6F2A9D3C-5B1E-4C77-9E0B-7D8A4C1F0002";

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    file_format_version: String,
    item_info_entries: BTreeMap<String, Item>,
    root_model_identifier: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Item {
    author: String,
    description: String,
    name: String,
    path: String,
}

/// The manifest of a package as Tandem writes it.
pub(super) fn render() -> String {
    let item = |description: &str, name: &str, path: &str| Item {
        author: AUTHOR.into(),
        description: description.into(),
        name: name.into(),
        path: path.into(),
    };
    let manifest = Manifest {
        file_format_version: "1.0.0".into(),
        item_info_entries: BTreeMap::from([
            (PROGRAM_ID.into(), item("CoreML Model Specification", "model.mlmodel", PROGRAM)),
            (WEIGHTS_ID.into(), item("CoreML Model Weights", "weights", WEIGHTS)),
        ]),
        root_model_identifier: PROGRAM_ID.into(),
    };
    serde_json::to_string_pretty(&manifest).expect("strings and maps of strings") + "\n"
}

/// The program's file in the package at `path`.
pub(super) fn find_program(path: &Path) -> Result<PathBuf, CoremlError> {
    let not = |what: &str, hint: &str| Err(CoremlError::not_a_package(path, what, hint));
    let found = std::fs::metadata(path).map_err(CoremlError::reading(path))?;
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    if extension == "mlmodelc" {
        return not("it is a compiled model", "give the .mlpackage it was compiled from");
    }
    if !found.is_dir() && extension == "mlmodel" {
        return not("it is a bare .mlmodel file", "save it as a .mlpackage, which holds ML Programs");
    }
    if !found.is_dir() {
        return not("it is a file", "give a .mlpackage, which is a folder");
    }
    let manifest_path = path.join("Manifest.json");
    let json = match std::fs::read(&manifest_path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return not("it has no Manifest.json", "give a .mlpackage folder");
        }
        other => other.map_err(CoremlError::reading(&manifest_path))?,
    };
    let wrong = |what: String| CoremlError::malformed(&manifest_path, what);
    let manifest: Manifest = serde_json::from_slice(&json).map_err(|error| wrong(error.to_string()))?;
    let major = manifest.file_format_version.split('.').next();
    if major != Some("1") {
        return Err(wrong(format!("version {} of packages, not 1", manifest.file_format_version)));
    }
    let root = &manifest.root_model_identifier;
    let item = manifest
        .item_info_entries
        .get(root)
        .ok_or_else(|| wrong(format!("there is no item {root}, the model")))?;
    if !is_plain(&item.path) {
        return Err(wrong(format!("the model's path {:?} leaves the package", item.path)));
    }
    Ok(path.join("Data").join(&item.path))
}

/// Whether a relative path stays below where it starts.
pub(super) fn is_plain(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}
