//! The text tower of a multimodal checkpoint: the language model lies in config.json's `text_config`, its tensors below
//! a prefix. It is read as the architecture that `text_config` names; the other towers are left alone.

use super::{ALL, Architecture, COMMON};
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::ModelError;

pub(super) const GEMMA3: Architecture =
    Architecture::new("gemma3", "Gemma3ForConditionalGeneration", from_config).inside_multimodal();

/// Prefixes of the language model, and what its tensors are called alone: as on the hub, and as transformers holds it.
const PREFIXES: [(&str, &str); 3] = [
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
];

/// Where the other towers lie.
const BESIDE: [&str; 2] = ["vision_tower.", "multi_modal_projector."];

fn from_config(config: &Config) -> Result<Decoder, ModelError> {
    config.ignore(&[
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "mm_tokens_per_image",
        "vision_config",
    ]);
    let mut text = config
        .object("text_config")?
        .ok_or_else(|| config.malformed("text_config", "is not there, and holds the language model"))?;
    text.inherit(config, &["dtype", "torch_dtype"]);
    let model_type = text.text("model_type")?.unwrap_or("gemma3_text");
    let inner = ALL.iter().find(|known| known.model_type == model_type && !known.is_tower);
    let inner = inner.ok_or_else(|| {
        text.unsupported("model_type", "Tandem does not know this language model inside a multimodal one")
    })?;
    text.ignore(COMMON);
    text.ignore(&["architectures"]);
    let decoder = (inner.from_config)(&text)?;
    text.finish()?;
    if decoder.logit_softcap.is_some() {
        let hint = "transformers leaves it out inside a multimodal model; set it to null to do the same";
        return Err(text.unsupported("final_logit_softcapping", hint));
    }
    let tied = decoder.head.weight == decoder.embedding;
    if config.flag_or("tie_word_embeddings", tied)? != tied {
        return Err(
            config.unsupported("tie_word_embeddings", "text_config says something else; make them agree")
        );
    }
    Ok(decoder)
}

pub(super) fn known_name(stored: String) -> String {
    for (prefix, alone) in PREFIXES {
        if let Some(rest) = stored.strip_prefix(prefix) {
            return format!("{alone}{rest}");
        }
    }
    stored
}

pub(super) fn is_beside(tensor: &str) -> bool {
    let tensor = tensor.strip_prefix("model.").unwrap_or(tensor);
    BESIDE.iter().any(|prefix| tensor.starts_with(prefix))
}
