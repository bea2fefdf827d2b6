//! Sampling defaults and end tokens that a checkpoint recommends.

use serde_json::Value;

use crate::config::Config;
use crate::error::ModelError;
use crate::tokenizer::Tokenizer;

/// What generation_config.json (or a GGUF file's metadata) says. `None`: it says nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// Any of these ends the answer; ascending. May be empty.
    pub eos_token_ids: Vec<u32>,
    /// Whether the authors sample; `Some(false)` or a lone temperature of 0 means greedy.
    pub do_sample: Option<bool>,
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Nucleus mass.
    pub top_p: Option<f32>,
    /// Candidates kept.
    pub top_k: Option<u32>,
    /// Least probability relative to the best candidate.
    pub min_p: Option<f32>,
    /// Divisor of positive and factor of negative logits of tokens already seen.
    pub repetition_penalty: Option<f32>,
    /// Keys of generation_config.json that change how transformers generates and that nothing here reads.
    pub not_read: Vec<String>,
}

/// Tokens that end a turn in the common chat formats. They count where the chat template writes them.
const END_OF_TURN: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<|return|>",
    "<EOT>",
    "</s>",
];

/// Keys of generation_config.json without influence on which tokens come out.
const HARMLESS: &[&str] = &[
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "max_length",
    "max_new_tokens",
    "pad_token_id",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
];

impl GenerationConfig {
    /// Reads generation_config.json.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] naming the key.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let optional = |key: &str| -> Result<Option<f32>, ModelError> {
            match config.get(key) {
                None => Ok(None),
                Some(value) => match value.as_f64().map(|v| v as f32) {
                    Some(v) if v.is_finite() && v >= 0.0 => Ok(Some(v)),
                    _ => Err(config.malformed(key, "is not a number of at least 0")),
                },
            }
        };
        let mut read = Self {
            eos_token_ids: token_ids(config, "eos_token_id")?,
            do_sample: config.get("do_sample").map(|_| config.flag_or("do_sample", false)).transpose()?,
            temperature: optional("temperature")?,
            top_p: optional("top_p")?,
            top_k: optional("top_k")?.map(|k| k as u32),
            min_p: optional("min_p")?,
            repetition_penalty: optional("repetition_penalty")?,
            not_read: Vec::new(),
        };
        config.ignore(HARMLESS);
        read.not_read = config.unread();
        Ok(read)
    }

    /// Adds end tokens, keeping the list sorted and without doubles.
    pub(crate) fn add_eos(&mut self, ids: impl IntoIterator<Item = u32>) {
        self.eos_token_ids.extend(ids);
        self.eos_token_ids.sort_unstable();
        self.eos_token_ids.dedup();
    }

    /// Adds the tokens that end a turn in `template`.
    ///
    /// A fine-tune's template often closes turns with a token that its generation_config.json forgot; without it the
    /// model would go on and write the user's part too. Whether the token is marked special does not matter: converters
    /// forget that too.
    pub(crate) fn add_turn_ends(&mut self, tokenizer: &Tokenizer, template: &str) {
        let used = END_OF_TURN.iter().filter(|text| template.contains(**text));
        self.add_eos(used.filter_map(|text| tokenizer.id_of(text)));
    }
}

/// One id or a list of them.
pub(crate) fn token_ids(config: &Config, key: &str) -> Result<Vec<u32>, ModelError> {
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| config.malformed(key, "is not a token id or a list of them"))
    };
    match config.get(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}
