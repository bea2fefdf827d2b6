//! What an export may be asked for, and which wishes go together.

use crate::dtype::DType;
use crate::error::CoremlError;

/// What to export.
#[derive(Debug, Clone, PartialEq)]
pub struct ExportOptions {
    /// Which unit the graph is made for.
    pub target: Target,
    /// Tokens that the KV cache holds.
    pub context: usize,
    /// Tokens of one call of the prefill function; divides `context`.
    pub prefill: usize,
    /// How matrices are stored.
    pub quant: Quant,
    /// Output channels that share a table, with [`Quant::Lut`]: the largest divisor of a matrix's rows up to this.
    pub group: usize,
    /// Packages that the layers are spread over; by size if not said.
    pub chunks: Option<usize>,
    /// Where the KV cache lives.
    pub kv: KvForm,
    /// Parts of the head; by the engine's limit on an axis if not said.
    pub head_parts: Option<usize>,
    /// Which systems the package is for.
    pub opset: Opset,
}

/// Which unit a graph is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The Neural Engine: static shapes, channels before places.
    Ane,
    /// The GPU: any number of tokens a call, fused attention.
    Gpu,
}

impl Target {
    /// `ane` or `gpu`.
    pub fn name(self) -> &'static str {
        match self {
            Target::Ane => "ane",
            Target::Gpu => "gpu",
        }
    }
}

/// How matrices are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quant {
    /// As fp16.
    None,
    /// As indices of so many bits (4, 6 or 8) into tables.
    Lut(u8),
    /// As integers of so many bits (4 or 8) under scales of blocks.
    Int(u8),
}

impl Quant {
    /// `none`, `lut4`, `int8`, ...
    pub fn name(self) -> String {
        match self {
            Quant::None => "none".into(),
            Quant::Lut(bits) => format!("lut{bits}"),
            Quant::Int(bits) => format!("int{bits}"),
        }
    }

    /// Bits of one stored value.
    pub(crate) fn bits(self) -> usize {
        match self {
            Quant::None => 16,
            Quant::Lut(bits) | Quant::Int(bits) => usize::from(bits),
        }
    }

    /// Element type of its indices or integers.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Quant::Lut(4) => DType::U4,
            Quant::Lut(6) => DType::U6,
            Quant::Lut(_) => DType::U8,
            Quant::Int(4) => DType::I4,
            Quant::Int(_) => DType::I8,
            Quant::None => DType::F16,
        }
    }
}

/// Where the KV cache lives between calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvForm {
    /// In states of the model.
    State,
    /// With the caller: the cache is an input, the new rows are an output.
    Io,
}

/// Which systems a package is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opset {
    /// iOS 18 and macOS 15.
    Ios18,
    /// iOS 26 and macOS 26.
    Ios26,
}

impl Opset {
    /// Name of the operator set.
    pub fn name(self) -> &'static str {
        match self {
            Opset::Ios18 => "CoreML8",
            Opset::Ios26 => "CoreML9",
        }
    }

    /// Version of the format.
    pub fn specification(self) -> i32 {
        match self {
            Opset::Ios18 => 9,
            Opset::Ios26 => 10,
        }
    }
}

impl ExportOptions {
    /// What is usual for `target`: a context of 2048 tokens in a state, 64 tokens of prefill, weights as fp16.
    pub fn new(target: Target) -> Self {
        Self {
            target,
            context: 2048,
            prefill: 64,
            quant: Quant::None,
            group: 16,
            chunks: None,
            kv: KvForm::State,
            head_parts: None,
            opset: Opset::Ios18,
        }
    }

    /// Refuses what does not go together.
    ///
    /// # Errors
    /// [`CoremlError::Refused`].
    pub fn check(&self) -> Result<(), CoremlError> {
        let Self { target, context, prefill, quant, group, chunks, kv, head_parts, opset: _ } = self;
        let refuse = |what: String, hint: &str| Err(CoremlError::refused(what, hint));
        if *context == 0 || *prefill == 0 || !context.is_multiple_of(*prefill) {
            return refuse(
                format!("a context of {context} tokens is not made of whole prefill calls of {prefill}"),
                "choose a prefill that divides the context, such as 64",
            );
        }
        match (target, quant) {
            (Target::Ane, Quant::Int(bits)) => {
                return refuse(
                    format!(
                        "int{bits} for the Neural Engine: blocks with scales give wrong results there or leave it"
                    ),
                    "use --quant lut4, lut6 or lut8, or --for gpu",
                );
            }
            (Target::Gpu, Quant::Lut(6 | 8)) => {
                return refuse(
                    format!("{} for the GPU: it is meant for the Neural Engine", quant.name()),
                    "use --quant int4, int8 or lut4, or --for ane",
                );
            }
            (_, Quant::None | Quant::Lut(4 | 6 | 8) | Quant::Int(4 | 8)) => {}
            _ => {
                return refuse(
                    format!("weights as {}", quant.name()),
                    "tables have 4, 6 or 8 bits, blocks 4 or 8",
                );
            }
        }
        if *group == 0 || *chunks == Some(0) || *head_parts == Some(0) {
            return refuse("groups, chunks and parts of 0".into(), "there is at least one of each");
        }
        if *target == Target::Gpu && *kv == KvForm::Io {
            return refuse("--kv io for the GPU is not exported yet".into(), "use --kv state, or --for ane");
        }
        if *target == Target::Gpu && (chunks.is_some_and(|n| n > 1) || head_parts.is_some_and(|n| n > 1)) {
            return refuse(
                "chunks and a split head for the GPU are not exported yet".into(),
                "leave --chunks and --head-split out, or use --for ane",
            );
        }
        Ok(())
    }
}
