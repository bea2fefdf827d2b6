//! tokenizer.json.
//!
//! The file is taken apart here and handed to `tokenizers` piece by piece, rather than as a whole: its own reader
//! panics on some damaged merges, and the table of bytes needs the vocabulary anyway.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

use super::spelling;
use super::{Pieces, Tokenizer};
use crate::error::ModelError;

const HINT: &str = "download tokenizer.json again, or write it anew with transformers' save_pretrained";

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: Vocab,
    merges: Merges,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merges {
    Pairs(Vec<(String, String)>),
    Lines(Vec<String>),
}

impl Tokenizer {
    /// Reads the bytes of a tokenizer.json for a model with `rows` embeddings. `path` is for messages.
    ///
    /// # Errors
    /// [`ModelError::Malformed`], or [`ModelError::Unsupported`] naming the part that is not understood.
    pub fn from_json(path: &Path, json: &[u8], rows: usize) -> Result<Self, ModelError> {
        read(path, json, rows)
    }
}

fn read(path: &Path, json: &[u8], rows: usize) -> Result<Tokenizer, ModelError> {
    let malformed = |what: String| ModelError::malformed(path, what, HINT);
    let unsupported = |key: &str, value: String| {
        ModelError::unsupported(
            path,
            key,
            value,
            "Tandem reads BPE tokenizers as Llama, Qwen and Gemma have them",
        )
    };
    let file: File = serde_json::from_slice(json).map_err(|error| match model_kind(json) {
        Some(kind) if kind != "BPE" => unsupported("model.type", kind),
        _ => malformed(format!("not a tokenizer.json: {error}")),
    })?;
    let Model { kind, vocab, merges, dropout, .. } = &file.model;
    if kind.as_deref().is_some_and(|kind| kind != "BPE") {
        return Err(unsupported("model.type", kind.clone().unwrap_or_default()));
    }
    if dropout.is_some_and(|p| p != 0.0) {
        return Err(unsupported("model.dropout", format!("{dropout:?}")));
    }
    for (key, affix) in [
        ("model.continuing_subword_prefix", &file.model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &file.model.end_of_word_suffix),
    ] {
        if let Some(affix) = affix.as_ref().filter(|affix| !affix.is_empty()) {
            return Err(unsupported(key, affix.clone()));
        }
    }
    let (spelling, leading_space) =
        spelling::of_decoder(&file.decoder).map_err(|what| unsupported("decoder", what))?;

    let base_len = vocab.len();
    let mut texts = by_id(vocab, file.added_tokens.iter().map(|added| added.id)).map_err(malformed)?;
    let largest = vocab.iter().max_by_key(|(_, id)| **id);
    if let Some((text, id)) = largest.filter(|(_, id)| **id as usize >= rows) {
        return Err(ModelError::malformed(
            path,
            format!("token {id} ({text}) of {base_len}, but the model has only {rows} embeddings"),
            "the tokenizer and the weights do not belong together",
        ));
    }
    let merges = match merges {
        Merges::Pairs(_) => None,
        Merges::Lines(lines) => {
            let pairs = lines.iter().map(|line| {
                let pair = line
                    .split_once(' ')
                    .ok_or_else(|| malformed(format!("the merge {line:?} is no pair")))?;
                Ok((pair.0.to_owned(), pair.1.to_owned()))
            });
            Some(pairs.collect::<Result<Vec<_>, ModelError>>()?)
        }
    };
    let Model { vocab, merges: pairs, unk_token, fuse_unk, byte_fallback, ignore_merges, .. } = file.model;
    let merges = match (merges, pairs) {
        (Some(merges), _) | (None, Merges::Pairs(merges)) => merges,
        (None, Merges::Lines(_)) => Vec::new(),
    };
    check_merges(&vocab, &merges).map_err(malformed)?;
    let mut builder = BPE::builder()
        .fuse_unk(fuse_unk)
        .byte_fallback(byte_fallback)
        .ignore_merges(ignore_merges)
        .vocab_and_merges(vocab, merges);
    if let Some(unk_token) = unk_token {
        builder = builder.unk_token(unk_token);
    }
    let model = builder.build().map_err(|error| malformed(error.to_string()))?;

    let mut tokenizers = tokenizers::Tokenizer::new(ModelWrapper::BPE(model));
    let part = |key: &str, error: String| malformed(format!("{key}: {error}"));
    let normalizer: Option<NormalizerWrapper> = parse(file.normalizer).map_err(|e| part("normalizer", e))?;
    tokenizers.with_normalizer(normalizer).map_err(|e| part("normalizer", e.to_string()))?;
    let pre_tokenizer: Option<PreTokenizerWrapper> =
        parse(file.pre_tokenizer).map_err(|e| part("pre_tokenizer", e))?;
    tokenizers.with_pre_tokenizer(pre_tokenizer);
    let post_processor: Option<PostProcessorWrapper> =
        parse(file.post_processor).map_err(|e| part("post_processor", e))?;
    tokenizers.with_post_processor(post_processor);

    let special: Vec<u32> =
        file.added_tokens.iter().filter(|added| added.token.special).map(|added| added.id).collect();
    let ids: Vec<(u32, String)> =
        file.added_tokens.iter().map(|added| (added.id, added.token.content.clone())).collect();
    tokenizers
        .add_tokens(file.added_tokens.into_iter().map(|added| added.token))
        .map_err(|error| part("added_tokens", error.to_string()))?;
    for (id, text) in ids {
        if tokenizers.token_to_id(&text) != Some(id) {
            return Err(malformed(format!(
                "the added token {text} has id {id}, which its place in the list is not"
            )));
        }
        // The spelling that the decoder sees: a normalised token's is another than its text.
        let spelled = tokenizers.get_added_vocabulary().simple_id_to_token(id).unwrap_or(text);
        texts[id as usize] = Some(spelled);
    }
    let mut pieces =
        Pieces::build(texts.iter().map(|text| text.as_ref().map(|text| spelling.bytes(text))), 0);
    for id in special {
        pieces.special[id as usize] = true;
    }
    Ok(Tokenizer::new(tokenizers, pieces, leading_space, rows))
}

/// The vocabulary's texts by id. Ids may have gaps, but not absurd ones.
fn by_id(vocab: &Vocab, added: impl Iterator<Item = u32> + Clone) -> Result<Vec<Option<String>>, String> {
    let largest = vocab.values().copied().chain(added).max().unwrap_or(0) as usize;
    let sane = 4 * vocab.len() + (1 << 16);
    if largest > sane {
        return Err(format!("token id {largest} is absurd for a vocabulary of {}", vocab.len()));
    }
    let mut texts = vec![None; largest + 1];
    for (text, &id) in vocab {
        if let Some(other) = texts[id as usize].replace(text.clone()) {
            return Err(format!("the tokens {text} and {other} share id {id}"));
        }
    }
    Ok(texts)
}

/// `tokenizers` indexes past a buffer for a merge longer than every token.
fn check_merges(vocab: &Vocab, merges: &[(String, String)]) -> Result<(), String> {
    let longest = vocab.keys().map(String::len).max().unwrap_or(0);
    match merges.iter().find(|(a, b)| a.len() + b.len() > longest) {
        None => Ok(()),
        Some((a, b)) => Err(format!("the merge of {a} and {b} gives no token of the vocabulary")),
    }
}

/// A part that may be `null`.
fn parse<T: DeserializeOwned>(value: Value) -> Result<Option<T>, String> {
    if value.is_null() {
        Ok(None)
    } else {
        serde_json::from_value(value).map(Some).map_err(|e| e.to_string())
    }
}

/// `model.type` of a file whose model has another shape than BPE's.
fn model_kind(json: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct File {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        #[serde(rename = "type")]
        kind: String,
    }
    serde_json::from_slice::<File>(json).ok().map(|file| file.model.kind)
}

/// A byte-level BPE: GGUF's kind `gpt2`, and the stand-in. Without a pre-tokenizer the whole text is one word.
pub(super) fn byte_level_bpe(
    vocab: Vocab,
    merges: Vec<(String, String)>,
    ignore_merges: bool,
    pre_tokenizer: Option<PreTokenizerWrapper>,
) -> Result<tokenizers::Tokenizer, String> {
    check_merges(&vocab, &merges)?;
    let model = BPE::builder().ignore_merges(ignore_merges).vocab_and_merges(vocab, merges).build();
    let model = model.map_err(|error| error.to_string())?;
    let mut tokenizers = tokenizers::Tokenizer::new(ModelWrapper::BPE(model));
    let whole = || PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false));
    tokenizers.with_pre_tokenizer(Some(pre_tokenizer.unwrap_or_else(whole)));
    Ok(tokenizers)
}
