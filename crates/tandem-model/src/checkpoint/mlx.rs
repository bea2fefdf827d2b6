//! MLX-quantized folders: what config.json says under `quantization`, and the three tensors of each quantized matrix.
//!
//! A module `x` is quantized when `x.weight` is stored as u32; then `x.scales` and `x.biases` belong to it, and the three
//! become one [`Tensor`] under the name `x.weight`. An embedding is a module like any other. mlx-lm decides the same way,
//! by the presence of scales. Bits and group are those of `quantization`, or those it names for the module: an object,
//! or `false` for a module that was left as it is.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::arch::Architecture;
use crate::config::Config;
use crate::error::ModelError;
use crate::format::{Affine, Format, ScaleType};
use crate::weights::{Bytes, Groups, Tensor};

/// Where config.json may say it. MLX writes both with the same content; transformers knows only the second.
pub(crate) const KEYS: [&str; 2] = ["quantization", "quantization_config"];

/// What all messages end with.
const HINT: &str = "Tandem reads MLX's affine quantization of 4 and 8 bits in groups of 32, 64 and 128; convert the model to one of these";

/// The quantization of a folder.
#[derive(Debug)]
pub(super) struct Quantization {
    default: Width,
    /// By the name of the module's weight; `None` for modules that are not quantized.
    modules: BTreeMap<String, Option<Width>>,
}

/// How one module is quantized.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Width {
    bits: usize,
    group: usize,
}

/// A tensor of packed values whose scales have not been found yet.
#[derive(Debug)]
pub(super) struct Packed {
    /// As stored: `[rows, cols * bits / 32]` of u32.
    pub shape: Vec<usize>,
    pub bytes: Bytes,
}

impl Quantization {
    /// Reads `quantization` or `quantization_config`; `None` if there is neither.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] or [`ModelError::Malformed`] naming the key.
    pub fn read(config: &Config, architecture: &Architecture) -> Result<Option<Self>, ModelError> {
        for key in KEYS {
            if let Some(settings) = config.object(key)? {
                return Self::from_settings(&settings, architecture).map(Some);
            }
        }
        Ok(None)
    }

    fn from_settings(settings: &Config, architecture: &Architecture) -> Result<Self, ModelError> {
        // How transformers names the formats of others: gptq, awq, bitsandbytes, fp8, ...
        if settings.get("quant_method").is_some() {
            return Err(settings.unsupported("quant_method", HINT));
        }
        let default = Width::read(settings)?;
        let mut modules = BTreeMap::new();
        for module in settings.unread() {
            let width = match settings.get(&module) {
                Some(Value::Bool(false)) => None,
                Some(Value::Bool(true)) => Some(default),
                Some(Value::Object(_)) => {
                    let Some(inner) = settings.object(&module)? else { continue };
                    let width = Width::read(&inner)?;
                    inner.finish()?;
                    Some(width)
                }
                _ => return Err(settings.unsupported(&module, HINT)),
            };
            modules.insert(architecture.known_name(format!("{module}.weight")), width);
        }
        Ok(Self { default, modules })
    }

    /// Joins each of `packed` with its scales and biases, which are taken out of `tensors`.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], [`ModelError::Shape`], or [`ModelError::Unsupported`] naming the tensor.
    pub fn join(
        &self,
        config_path: &Path,
        packed: BTreeMap<String, Packed>,
        tensors: &mut BTreeMap<String, Tensor>,
    ) -> Result<(), ModelError> {
        for (name, values) in packed {
            let refused = |key: String, value: &str| ModelError::unsupported(config_path, key, value, HINT);
            let Some(module) = name.strip_suffix(".weight") else {
                return Err(refused(format!("type of tensor {name}"), "U32"));
            };
            let width = match self.modules.get(&name) {
                Some(Some(width)) => *width,
                Some(None) => return Err(refused(format!("quantization.{module}"), "false")),
                None => self.default,
            };
            let mut part = |kind: &str| {
                let name = format!("{module}.{kind}");
                tensors.remove(&name).ok_or(ModelError::MissingTensor { name })
            };
            let (scales, biases) = (part("scales")?, part("biases")?);
            let tensor = width.tensor(config_path, module, values, scales, biases)?;
            tensors.insert(name, tensor);
        }
        Ok(())
    }
}

impl Width {
    fn read(settings: &Config) -> Result<Self, ModelError> {
        settings.expect("mode", "affine")?;
        let width = Self { bits: settings.size("bits")?, group: settings.size("group_size")? };
        if !Affine::BITS.contains(&width.bits) {
            return Err(settings.unsupported("bits", HINT));
        }
        if !Affine::GROUPS.contains(&width.group) {
            return Err(settings.unsupported("group_size", HINT));
        }
        Ok(width)
    }

    /// Checks the three parts against each other.
    fn tensor(
        self,
        config_path: &Path,
        module: &str,
        values: Packed,
        scales: Tensor,
        biases: Tensor,
    ) -> Result<Tensor, ModelError> {
        let Self { bits, group } = self;
        let wrong = |kind: &str, expected: &[usize], found: &[usize]| ModelError::Shape {
            name: format!("{module}.{kind}"),
            expected: expected.to_vec(),
            found: found.to_vec(),
        };
        let [rows @ .., words] = values.shape.as_slice() else {
            return Err(wrong("weight", &[0, 0], &values.shape));
        };
        let cols = words.saturating_mul(32) / bits;
        if !cols.is_multiple_of(group) {
            let key = format!("group_size of {module}");
            let hint = format!("its rows have {cols} values, which do not divide into groups of {group}");
            return Err(ModelError::unsupported(config_path, key, group.to_string(), hint));
        }
        let expected = [rows, &[cols / group]].concat();
        for (kind, tensor) in [("scales", &scales), ("biases", &biases)] {
            if tensor.shape != expected {
                return Err(wrong(kind, &expected, &tensor.shape));
            }
        }
        let scale_type = match scales.format {
            Format::F32 => Some(ScaleType::F32),
            Format::F16 => Some(ScaleType::F16),
            Format::Bf16 => Some(ScaleType::Bf16),
            _ => None,
        };
        let affine = scale_type
            .filter(|_| biases.format == scales.format)
            .and_then(|scales| Affine::new(bits, group, scales));
        let Some(affine) = affine else {
            let value = format!("{} with scales of {}", biases.format.name(), scales.format.name());
            let hint = "scales and biases must have the same type";
            return Err(ModelError::unsupported(
                config_path,
                format!("type of {module}.biases"),
                value,
                hint,
            ));
        };
        Ok(Tensor {
            format: Format::Affine(affine),
            shape: [rows, &[cols]].concat(),
            values: values.bytes,
            groups: Some(Groups { scales: scales.values, biases: biases.values }),
        })
    }
}
