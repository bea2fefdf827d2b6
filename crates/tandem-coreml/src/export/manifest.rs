//! `tandem.json`: all that a caller of the packages must know.

use serde::{Deserialize, Serialize};
use tandem_model::decoder::{Rope, RopeScaling};

use crate::audit::{self, Audit, Chip, UnitCounts, Verdict};
use crate::trace::{Activations, LayerRange};

/// Version of the manifest.
pub const FORMAT: u32 = 1;

/// The manifest beside the packages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Manifest {
    pub format: u32,
    pub exporter: String,
    pub model: ModelFacts,
    /// `ane` or `gpu`.
    pub target: String,
    /// `none`, `lut4`, `int4`, ...
    pub quantization: String,
    /// Output channels that share a table, at most.
    pub group: Option<usize>,
    /// Operator set.
    pub opset: String,
    /// `state` or `io`.
    pub kv: String,
    /// Tokens that the cache holds.
    pub context: usize,
    /// Tokens of one prefill call, which starts at a multiple of it. Absent where a call takes any number.
    pub prefill: Option<usize>,
    pub batch: usize,
    /// In order: the `hidden_out` of one is the `hidden` of the next.
    pub packages: Vec<PackageFacts>,
    /// The embedding, where it is outside the graph.
    pub embedding: Option<Embedding>,
    pub caches: Vec<CacheFacts>,
    /// What a mask holds for a row that is not seen; 0 for one that is.
    pub mask_value: f32,
    pub ropes: Vec<RopeFacts>,
    /// The outputs of the last package that hold logits, in order of ids.
    pub logits: Vec<LogitsPart>,
    /// The residual stream is kept at this factor, so that it stays within fp16. It is in the embedding already.
    pub residual_factor: f32,
    /// How large the model's values are, before that factor, on a text.
    pub activations: ActivationFacts,
    /// Files of the checkpoint that lie beside the packages.
    pub tokenizer: Vec<String>,
    /// What the operator audit says of all packages together.
    pub audit: AuditFacts,
}

/// Largest magnitudes on a text, to three digits, or why they are not known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationFacts {
    /// Of the exporter's own text.
    Traced(Activations),
    /// The model was not run, for this reason.
    NotTraced(String),
}

/// The operator audit of the packages. It judges how they fit the Neural Engine, also where they are made for the GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditFacts {
    /// Which state of the rules, see [`RULES_VERSION`](crate::audit::RULES_VERSION).
    pub rules_version: u32,
    /// Largest share that was allowed off the engine, 0 to 1.
    pub max_fallback: f64,
    /// The worst of all chips: `pass`, `over-limit` or `failed`.
    pub verdict: String,
    /// One for each chip.
    pub devices: Vec<DeviceFacts>,
}

/// The audit for one chip: the worst verdict, and operators of all packages and functions by where they are predicted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct DeviceFacts {
    pub device: String,
    pub verdict: String,
    pub ane: u64,
    pub uncertain: u64,
    pub unknown: u64,
    pub gpu_cpu: u64,
}

impl ActivationFacts {
    pub(super) fn traced(range: &Activations) -> Self {
        // Further digits depend on the machine's `exp`, and two exports shall be the same bytes.
        let rounded = |value: f32| -> f32 { format!("{value:.2e}").parse().unwrap_or(value) };
        let layer = |layer: &LayerRange| LayerRange {
            residual: rounded(layer.residual),
            inside: rounded(layer.inside),
            at: layer.at.clone(),
        };
        let layers = range.layers.iter().map(layer).collect();
        Self::Traced(Activations { tokens: range.tokens, embedding: rounded(range.embedding), layers })
    }
}

impl AuditFacts {
    pub(super) fn new(audits: &[Audit], options: &audit::Options) -> Self {
        let functions = || audits.iter().flat_map(|audit| &audit.functions);
        let device = |&chip: &Chip| {
            let here =
                functions().flat_map(|function| &function.devices).filter(|device| device.device == chip);
            let mut facts = DeviceFacts {
                device: chip.name().into(),
                verdict: String::new(),
                ane: 0,
                uncertain: 0,
                unknown: 0,
                gpu_cpu: 0,
            };
            let mut worst = Verdict::Pass;
            for summary in here {
                let UnitCounts { ane, uncertain, unknown, gpu_cpu } = summary.operators;
                facts.ane += ane;
                facts.uncertain += uncertain;
                facts.unknown += unknown;
                facts.gpu_cpu += gpu_cpu;
                worst = worst.max(summary.verdict);
            }
            facts.verdict = worst.name().into();
            facts
        };
        let worst = audits.iter().map(|audit| audit.verdict).max().unwrap_or(Verdict::Failed);
        Self {
            rules_version: audit::RULES_VERSION,
            max_fallback: options.max_fallback,
            verdict: worst.name().into(),
            devices: options.devices.iter().map(device).collect(),
        }
    }
}

/// Which model this is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct ModelFacts {
    pub architecture: String,
    /// BLAKE3 of the checkpoint's tensors.
    pub hash: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub layers: usize,
}

/// One package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct PackageFacts {
    pub file: String,
    pub first_layer: usize,
    pub layers: usize,
    pub functions: Vec<String>,
    pub weight_bytes: u64,
}

/// Rows of fp16, little endian, the model's factors included: `hidden` of a token is its row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Embedding {
    pub file: String,
    pub rows: usize,
    pub columns: usize,
}

/// One kind of KV cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheFacts {
    /// The state; with `io`, the input, and with `_new` after it the output.
    pub name: String,
    /// The input `[1, 1, tokens, slots + tokens]` that says which slots and which new rows each token sees
    /// (`[1, 1, tokens, slots]`, new rows in their slots, for `gpu`).
    pub mask: String,
    /// The input that holds the slot of the first new row, and with `_end` after the name that of the slot after the last
    /// row that a call writes; absent with `io`. For `ane` each is `int32[4]` with the slot third and zeros around it, for
    /// `gpu` `int32[1]`.
    pub slot: Option<String>,
    /// Position `p` lies in slot `p mod slots`.
    pub slots: usize,
    /// How many of the last positions a token sees, itself included; absent if all.
    pub window: Option<usize>,
}

/// Inputs that turn queries and keys, `[1, width, 1, tokens]` (`[1, 1, tokens, width]` for `gpu`).
///
/// Of `width` values for a token at position `p`, with `h = rotary / 2` and the angle `a(i) = p * inverse_frequencies[i]`:
/// `cos[i] = cos(a(i mod h)) * factor` for `i < rotary`, else 1; `sin[i] = -sin(a(i)) * factor` for `i < h`,
/// `sin(a(i - h)) * factor` for `i < rotary`, else 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the formula says it")]
pub struct RopeFacts {
    pub cos: String,
    pub sin: String,
    pub width: usize,
    pub rotary: usize,
    /// By the length that a sequence will have; the first that suffices.
    pub angles: Vec<Angles>,
}

/// The angles of sequences of up to `up_to` tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in `RopeFacts`")]
pub struct Angles {
    pub up_to: usize,
    pub factor: f32,
    pub inverse_frequencies: Vec<f32>,
}

/// Some of the logits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct LogitsPart {
    pub output: String,
    pub first: usize,
    pub count: usize,
}

impl RopeFacts {
    pub(super) fn new(index: usize, rope: &Rope, width: usize, context: usize) -> Self {
        let mut lengths = vec![context];
        // Within the original context neither is stretched. A sequence that leaves it gets the angles of the longest one
        // that fits, as if it were known to fill the cache.
        if let RopeScaling::LongRope { original_context, .. } | RopeScaling::Dynamic { original_context, .. } =
            &rope.scaling
            && *original_context < context
        {
            lengths.insert(0, *original_context);
        }
        let angles = |up_to: usize| {
            let factors = rope.factors(up_to);
            Angles {
                up_to,
                factor: factors.attention_factor,
                inverse_frequencies: factors.inverse_frequencies,
            }
        };
        Self {
            cos: format!("cos_{index}"),
            sin: format!("sin_{index}"),
            width,
            rotary: rope.rotary_dim,
            angles: lengths.into_iter().map(angles).collect(),
        }
    }
}
