//! What a package holds: functions, operators, weights, sizes. These structs are what `tandem inspect --json` prints.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;

use crate::error::CoremlError;
use crate::mil::{Data, Feature, FeatureKind, Flexibility, Function};
use crate::package::Package;

/// A package, summed up.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// Version of this form; it changes when a field changes its meaning or goes.
    pub schema: u32,
    /// Version of the format.
    pub specification: i32,
    /// The oldest systems that read it, where Tandem knows.
    pub systems: Option<&'static str>,
    /// Which function a caller gets who names none.
    pub default_function: String,
    /// By name.
    pub functions: Vec<FunctionInspection>,
    /// Constants of all functions by element type; a record that several share counts once.
    pub weights: Vec<WeightInspection>,
    /// Files, largest first.
    pub files: Vec<FileInspection>,
    /// Bytes of all files.
    pub bytes: u64,
    /// What people wrote about it; empty fields are left out.
    pub metadata: BTreeMap<String, String>,
}

/// A function, summed up.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct FunctionInspection {
    pub name: String,
    pub opset: String,
    pub inputs: Vec<FeatureInspection>,
    pub outputs: Vec<FeatureInspection>,
    pub states: Vec<FeatureInspection>,
    /// Kinds of operators with their number, constants among them.
    pub operators: BTreeMap<String, u64>,
}

/// An input, output or state.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FeatureInspection {
    /// Its name.
    pub name: String,
    /// Its type in words: `fp16[1, 64, 1, 8]`; `1..512` or `1..` for a length within bounds, `?` for an open one.
    #[serde(rename = "type")]
    pub ty: String,
    /// The other shapes it may have, if they are listed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shapes: Vec<Vec<i64>>,
}

/// The constants of one element type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct WeightInspection {
    pub dtype: &'static str,
    pub tensors: u64,
    pub elements: u64,
    pub bytes: u64,
}

/// A file of the package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileInspection {
    /// From the package's folder.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// Sums up a package.
///
/// # Errors
/// [`CoremlError::Io`] if its folder cannot be listed.
pub fn inspect(package: &Package) -> Result<Inspection, CoremlError> {
    let model = package.model();
    let mut files = Vec::new();
    list(package.path(), package.path(), &mut files)?;
    files.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.path.cmp(&b.path)));
    let metadata = &model.metadata;
    let written = [
        ("description", &metadata.description),
        ("version", &metadata.version),
        ("author", &metadata.author),
        ("license", &metadata.license),
    ];
    let written = written.map(|(key, text)| (key.to_owned(), text.clone()));
    let all = metadata.user_defined.clone().into_iter().chain(written);
    Ok(Inspection {
        schema: 1,
        specification: model.specification,
        systems: systems(model.specification),
        default_function: model.default_function.clone(),
        functions: model.functions.iter().map(|(name, f)| FunctionInspection::new(name, f)).collect(),
        weights: weights(package),
        bytes: files.iter().map(|file| file.bytes).sum(),
        files,
        metadata: all.filter(|(_, text)| !text.is_empty()).collect(),
    })
}

fn systems(specification: i32) -> Option<&'static str> {
    Some(match specification {
        6 => "iOS 15, macOS 12",
        7 => "iOS 16, macOS 13",
        8 => "iOS 17, macOS 14",
        9 => "iOS 18, macOS 15",
        10 => "iOS 26, macOS 26",
        _ => return None,
    })
}

/// Links are not followed: what they point to is no part of the package.
fn list(root: &Path, folder: &Path, files: &mut Vec<FileInspection>) -> Result<(), CoremlError> {
    for entry in std::fs::read_dir(folder).map_err(CoremlError::reading(folder))? {
        let entry = entry.map_err(CoremlError::reading(folder))?;
        let path = entry.path();
        let found = entry.metadata().map_err(CoremlError::reading(&path))?;
        if found.is_dir() {
            list(root, &path, files)?;
        } else {
            let relative = path.strip_prefix(root).unwrap_or(&path).display().to_string();
            files.push(FileInspection { path: relative, bytes: found.len() });
        }
    }
    Ok(())
}

fn weights(package: &Package) -> Vec<WeightInspection> {
    let mut seen = BTreeSet::new();
    let mut sums: BTreeMap<&'static str, (u64, u64, u64)> = BTreeMap::new();
    for value in package.values() {
        let stored = match &value.data {
            Data::Blob(blob) => seen.insert(blob.clone()),
            Data::Strings(_) | Data::Other(_) => false,
            _ => true,
        };
        let Some(ty) = value.ty.tensor().filter(|ty| stored && !ty.dims.is_empty()) else { continue };
        let elements = ty.elements().unwrap_or(0);
        let bytes = ty.dtype.bytes(elements).unwrap_or(0);
        let sum = sums.entry(ty.dtype.name()).or_default();
        *sum = (sum.0 + 1, sum.1.saturating_add(elements as u64), sum.2.saturating_add(bytes as u64));
    }
    let row = |(dtype, (tensors, elements, bytes))| WeightInspection { dtype, tensors, elements, bytes };
    let mut rows: Vec<WeightInspection> = sums.into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    rows
}

impl FunctionInspection {
    fn new(name: &str, function: &Function) -> Self {
        let mut operators = BTreeMap::new();
        for op in function.block.walk() {
            *operators.entry(op.kind.clone()).or_default() += 1;
        }
        let all = |features: &[Feature]| features.iter().map(FeatureInspection::new).collect();
        Self {
            name: name.to_owned(),
            opset: function.opset.clone(),
            inputs: all(&function.interface.inputs),
            outputs: all(&function.interface.outputs),
            states: all(&function.interface.states),
            operators,
        }
    }
}

impl FeatureInspection {
    fn new(feature: &Feature) -> Self {
        let (ty, shapes) = match &feature.kind {
            FeatureKind::Other(kind) => ((*kind).to_owned(), Vec::new()),
            FeatureKind::Array { dtype, shape, flexibility } => {
                let dims: Vec<String> = match flexibility {
                    Flexibility::Range(bounds) => bounds.iter().map(|bound| length(*bound)).collect(),
                    _ => shape.iter().map(ToString::to_string).collect(),
                };
                let shapes = match flexibility {
                    Flexibility::Enumerated(shapes) => shapes.clone(),
                    _ => Vec::new(),
                };
                let open = dims.is_empty() && matches!(flexibility, Flexibility::Fixed);
                let dims = if open { "?".to_owned() } else { dims.join(", ") };
                (format!("{}[{dims}]", dtype.name()), shapes)
            }
        };
        Self { name: feature.name.clone(), ty, shapes }
    }
}

fn length((least, most): (u64, i64)) -> String {
    match u64::try_from(most) {
        Err(_) => format!("{least}.."),
        Ok(most) if most == least => most.to_string(),
        Ok(most) => format!("{least}..{most}"),
    }
}
