//! A checkpoint in one GGUF file.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value as Json};

use super::{Checkpoint, verify};
use crate::arch;
use crate::chat::ChatTemplate;
use crate::config::Config;
use crate::error::ModelError;
use crate::generation::GenerationConfig;
use crate::gguf::{self, Gguf, Value};
use crate::tokenizer::Tokenizer;
use crate::weights::{Bytes, MappedFile, Source, Tensor, Weights};

pub(super) fn open(path: &Path) -> Result<Checkpoint, ModelError> {
    let file = MappedFile::open(path)?;
    let gguf = gguf::parse(path, file.bytes())?;
    let tensors = gguf.tensors.iter().map(|(name, info)| {
        let tensor = Tensor {
            format: info.format,
            shape: info.shape.clone(),
            values: Bytes { source: Source::Mapped(file.clone()), range: info.range.clone() },
            groups: None,
        };
        ((*name).to_owned(), tensor)
    });
    let weights = Weights::new(tensors.collect());

    if let Some(kind) = gguf.text("general.type").filter(|kind| *kind != "model") {
        return Err(ModelError::unsupported(path, "general.type", kind, "give the file of a whole model"));
    }
    let name = gguf.text("general.architecture").ok_or_else(|| {
        ModelError::malformed(
            path,
            "general.architecture is not there",
            "download the file again, or convert it anew",
        )
    })?;
    let (architecture, decoder) =
        arch::decoder_from_gguf(path, name, &below(path, &gguf, &format!("{name}.")), &weights)?;
    verify(&decoder, &weights, architecture)?;

    let tokenizer = Tokenizer::from_gguf(path, &gguf, decoder.vocab_size)?;
    let mut generation = GenerationConfig::default();
    generation.add_eos(["eos", "eot", "eom"].iter().filter_map(|which| gguf.token_id(which)));
    let chat = chat(&gguf, &tokenizer);
    if let Some(template) = chat.as_ref().and_then(|chat| chat.source(false).ok()) {
        generation.add_turn_ends(&tokenizer, template);
    }
    Ok(Checkpoint {
        decoder,
        weights: Arc::new(weights),
        tokenizer,
        chat,
        generation,
        source: path.to_owned(),
    })
}

/// The metadata below `prefix` as settings.
fn below(path: &Path, gguf: &Gguf<'_>, prefix: &str) -> Config {
    let settings = gguf.metadata.iter().filter_map(|(key, value)| {
        let key = key.strip_prefix(prefix)?;
        let value = match *value {
            Value::Unsigned(n) => n.into(),
            Value::Signed(n) => n.into(),
            Value::Float(x) => x.into(),
            Value::Bool(flag) => flag.into(),
            Value::Text(text) => text.into(),
            Value::Array(array) => match array.flags() {
                Some(flags) => flags.collect(),
                None => Json::String(format!("(a list of {})", array.len)),
            },
        };
        Some((key.to_owned(), value))
    });
    Config::new(path, prefix, settings.collect::<Map<_, _>>())
}

/// `tokenizer.chat_template` and `tokenizer.chat_template.NAME`.
fn chat(gguf: &Gguf<'_>, tokenizer: &Tokenizer) -> Option<ChatTemplate> {
    let mut named = BTreeMap::new();
    for (key, value) in &gguf.metadata {
        if let (Some(name), Value::Text(source)) = (key.strip_prefix("tokenizer.chat_template"), value) {
            let name = name.strip_prefix('.').unwrap_or("default");
            named.insert(name.to_owned(), (*source).to_owned());
        }
    }
    let special =
        [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")];
    let special = special.iter().filter_map(|(variable, which)| {
        Some(((*variable).to_owned(), tokenizer.token_text(gguf.token_id(which)?)?))
    });
    (!named.is_empty()).then(|| ChatTemplate::with_named(named, special.collect()))
}
