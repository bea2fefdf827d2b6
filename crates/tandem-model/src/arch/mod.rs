//! The architectures: one short file each, config keys one to one.
//!
//! A new one made of known features is one file here, one line in `ALL` and a golden fixture.

mod common;
mod gemma3;
mod granite;
mod llama;
mod mistral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod rope;
mod smollm3;
mod tower;

use std::path::Path;

use crate::checkpoint::mlx;
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::weights::Weights;

const ALL: &[Architecture] = &[
    llama::LLAMA,
    mistral::MISTRAL,
    qwen2::QWEN2,
    qwen3::QWEN3,
    gemma3::GEMMA3,
    tower::GEMMA3,
    phi3::PHI3,
    smollm3::SMOLLM3,
    olmo2::OLMO2,
    granite::GRANITE,
];

type FromConfig = fn(&Config) -> Result<Decoder, ModelError>;
type FromGguf = fn(&Config, &Weights) -> Result<Decoder, ModelError>;

/// How an architecture is recognised and read.
pub struct Architecture {
    /// `model_type` in config.json.
    model_type: &'static str,
    /// In config.json's `architectures`.
    class: &'static str,
    from_config: FromConfig,
    /// `general.architecture` of a GGUF file, and its reader.
    gguf: Option<(&'static str, FromGguf)>,
    /// Whether config.json nests the language model beside others, see [`tower`].
    is_tower: bool,
}

impl Architecture {
    const fn new(model_type: &'static str, class: &'static str, from_config: FromConfig) -> Self {
        Self { model_type, class, from_config, gguf: None, is_tower: false }
    }

    const fn with_gguf(mut self, name: &'static str, from_gguf: FromGguf) -> Self {
        self.gguf = Some((name, from_gguf));
        self
    }

    const fn inside_multimodal(mut self) -> Self {
        self.is_tower = true;
        self
    }

    /// The name by which the decoder knows a tensor of the file.
    pub(crate) fn known_name(&self, stored: String) -> String {
        if self.is_tower { tower::known_name(stored) } else { stored }
    }

    /// Whether a tensor that the decoder does not read may be there all the same. Old checkpoints store the rope
    /// frequencies, which are computed from the config; GGUF's divisors of them are part of the decoder itself.
    pub(crate) fn tolerates(&self, tensor: &str) -> bool {
        tensor.ends_with(".rotary_emb.inv_freq")
            || rope::DIVISORS.contains(&tensor)
            || self.is_tower && tower::is_beside(tensor)
    }
}

/// Keys of config.json that transformers writes for every model and that do not change inference. Generation settings
/// in config.json are a leftover of old versions; generation_config.json is where they are read from.
const COMMON: &[&str] = &[
    "_name_or_path",
    "_attn_implementation_autoset",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_length",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Reads config.json. Pure: touches no file; `path` is for messages.
///
/// # Errors
/// [`ModelError::Malformed`] or [`ModelError::Unsupported`], naming the key.
pub fn decoder_from_config(path: &Path, json: &[u8]) -> Result<(&'static Architecture, Decoder), ModelError> {
    let config = Config::parse(path, json)?;
    let architecture = recognise(&config)?;
    config.ignore(COMMON);
    // How the weights are stored is for the reader of the folder.
    config.ignore(&mlx::KEYS);
    let decoder = (architecture.from_config)(&config)?;
    config.finish()?;
    Ok((architecture, decoder))
}

/// Reads the metadata below `{architecture}.` of a GGUF file.
///
/// # Errors
/// As [`decoder_from_config`], and [`ModelError::MissingTensor`].
pub(crate) fn decoder_from_gguf(
    path: &Path,
    architecture: &str,
    metadata: &Config,
    weights: &Weights,
) -> Result<(&'static Architecture, Decoder), ModelError> {
    for found in ALL {
        if let Some((_, from_gguf)) = found.gguf.filter(|(name, _)| *name == architecture) {
            let decoder = from_gguf(metadata, weights)?;
            metadata.finish()?;
            return Ok((found, decoder));
        }
    }
    let names = known(|a| a.gguf.map(|(name, _)| name));
    Err(ModelError::unsupported(path, "general.architecture", architecture, names))
}

fn recognise(config: &Config) -> Result<&'static Architecture, ModelError> {
    let model_type = config.text("model_type")?;
    let classes = config.get("architectures").and_then(|value| value.as_array());
    let class = classes.and_then(|classes| classes.first()).and_then(|class| class.as_str());
    match (class, model_type) {
        (Some(class), model_type) => {
            let found = ALL.iter().find(|known| known.class == class);
            let found =
                found.ok_or_else(|| config.unsupported("architectures", &known(|a| Some(a.class))))?;
            if model_type.is_some_and(|model_type| model_type != found.model_type) {
                return Err(config.unsupported(
                    "model_type",
                    &format!("the class {class} goes with model_type {}", found.model_type),
                ));
            }
            Ok(found)
        }
        (None, Some(model_type)) => {
            let found = ALL.iter().find(|known| known.model_type == model_type);
            found.ok_or_else(|| config.unsupported("model_type", &known(|a| Some(a.model_type))))
        }
        (None, None) => Err(config.malformed("model_type", "is not there, and neither is architectures")),
    }
}

fn known(name: impl Fn(&Architecture) -> Option<&str>) -> String {
    let names: Vec<&str> = ALL.iter().filter_map(name).collect();
    format!("Tandem knows {}", names.join(", "))
}
