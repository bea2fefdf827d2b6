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
use super::{Encoder, Pieces, Tokenizer};
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
        let malformed = |what: String| ModelError::malformed(path, what, HINT);
        let file: File = serde_json::from_slice(json).map_err(|error| match model_kind(json) {
            Some(kind) if kind != "BPE" => unsupported(path, "model.type", kind),
            _ => malformed(format!("not a tokenizer.json: {error}")),
        })?;
        file.model.refuse_variants(path)?;
        let (spelling, leading_space) =
            spelling::of_decoder(&file.decoder).map_err(|what| unsupported(path, "decoder", what))?;
        let mut texts = by_id(&file.model.vocab, &file.added_tokens).map_err(malformed)?;
        if let Some((text, id)) = file.model.vocab.iter().find(|(_, id)| **id as usize >= rows) {
            return Err(ModelError::malformed(
                path,
                format!("token {id} ({text}) has no row among the model's {rows} embeddings"),
                "the tokenizer and the weights do not belong together",
            ));
        }

        let mut tokenizers =
            tokenizers::Tokenizer::new(ModelWrapper::BPE(file.model.build().map_err(malformed)?));
        let normalizer: Option<NormalizerWrapper> = part("normalizer", file.normalizer).map_err(malformed)?;
        tokenizers.with_normalizer(normalizer).map_err(|error| malformed(format!("normalizer: {error}")))?;
        let pre_tokenizer: Option<PreTokenizerWrapper> =
            part("pre_tokenizer", file.pre_tokenizer).map_err(malformed)?;
        tokenizers.with_pre_tokenizer(pre_tokenizer);
        check_templates(&file.post_processor).map_err(malformed)?;
        let post_processor: Option<PostProcessorWrapper> =
            part("post_processor", file.post_processor).map_err(malformed)?;
        tokenizers.with_post_processor(post_processor);
        tokenizers
            .add_tokens(file.added_tokens.iter().map(|added| added.token.clone()))
            .map_err(|error| malformed(format!("added_tokens: {error}")))?;

        for Added { id, token } in &file.added_tokens {
            if tokenizers.token_to_id(&token.content) != Some(*id) {
                let what = format!(
                    "the added token {} has id {id}, which its place in the list is not",
                    token.content
                );
                return Err(malformed(what));
            }
            // What the decoder sees: the spelling of a normalised token is not its text.
            let spelled = tokenizers.get_added_vocabulary().simple_id_to_token(*id);
            texts[*id as usize] = spelled.or_else(|| Some(token.content.clone()));
        }
        let bytes = texts.iter().map(|text| text.as_ref().map(|text| spelling.bytes(text)));
        let mut pieces = Pieces::build(bytes, 0);
        for Added { id, token } in &file.added_tokens {
            pieces.special[*id as usize] = token.special;
        }
        Ok(Self::new(Encoder::Tokenizers(Box::new(tokenizers)), pieces, leading_space, rows))
    }
}

fn unsupported(path: &Path, key: &str, value: impl Into<String>) -> ModelError {
    ModelError::unsupported(
        path,
        key,
        value,
        "Tandem reads BPE tokenizers as Llama, Qwen and Gemma have them",
    )
}

impl Model {
    /// Refuses what changes the tokens and is not computed.
    fn refuse_variants(&self, path: &Path) -> Result<(), ModelError> {
        if let Some(kind) = self.kind.as_ref().filter(|kind| *kind != "BPE") {
            return Err(unsupported(path, "model.type", kind));
        }
        if let Some(dropout) = self.dropout.filter(|dropout| *dropout != 0.0) {
            return Err(unsupported(path, "model.dropout", dropout.to_string()));
        }
        let affixes = [
            ("model.continuing_subword_prefix", &self.continuing_subword_prefix),
            ("model.end_of_word_suffix", &self.end_of_word_suffix),
        ];
        match affixes
            .iter()
            .find_map(|(key, affix)| Some((key, affix.as_ref().filter(|affix| !affix.is_empty())?)))
        {
            None => Ok(()),
            Some((key, affix)) => Err(unsupported(path, key, affix)),
        }
    }

    fn build(self) -> Result<BPE, String> {
        let merges = self.merges.into_pairs()?;
        check_merges(&self.vocab, &merges)?;
        let mut builder = BPE::builder()
            .fuse_unk(self.fuse_unk)
            .byte_fallback(self.byte_fallback)
            .ignore_merges(self.ignore_merges)
            .vocab_and_merges(self.vocab, merges);
        if let Some(unk_token) = self.unk_token {
            builder = builder.unk_token(unk_token);
        }
        builder.build().map_err(|error| error.to_string())
    }
}

impl Merges {
    fn into_pairs(self) -> Result<Vec<(String, String)>, String> {
        let lines = match self {
            Merges::Pairs(pairs) => return Ok(pairs),
            Merges::Lines(lines) => lines,
        };
        let pairs = lines.iter().map(|line| match line.split_once(' ') {
            Some((a, b)) => Ok((a.to_owned(), b.to_owned())),
            None => Err(format!("the merge {line:?} is no pair")),
        });
        pairs.collect()
    }
}

/// The vocabulary's texts by id. Ids may have gaps, but not absurd ones.
fn by_id(vocab: &Vocab, added: &[Added]) -> Result<Vec<Option<String>>, String> {
    let largest =
        vocab.values().copied().chain(added.iter().map(|added| added.id)).max().unwrap_or(0) as usize;
    if largest > 4 * vocab.len() + (1 << 16) {
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
/// What `tokenizers` would panic on when it puts tokens around a text: one that the template names and nobody defines,
/// and a second text where there is one.
fn check_templates(processor: &Value) -> Result<(), String> {
    let fields = match processor {
        Value::Array(parts) => return parts.iter().try_for_each(check_templates),
        Value::Object(fields) => fields,
        _ => return Ok(()),
    };
    let defined =
        |token: &str| fields.get("special_tokens").is_some_and(|tokens| tokens.get(token).is_some());
    for piece in fields.get("single").and_then(Value::as_array).into_iter().flatten() {
        let id = |kind: &str| piece.get(kind)?.get("id")?.as_str();
        match id("SpecialToken") {
            Some(token) if defined(token) => {}
            Some(token) => return Err(format!("post_processor: {token} is not among its special_tokens")),
            None if id("Sequence") == Some("A") => {}
            None => return Err(format!("post_processor: {piece} has no place around a single text")),
        }
    }
    fields.values().try_for_each(check_templates)
}

fn part<T: DeserializeOwned>(key: &str, value: Value) -> Result<Option<T>, String> {
    serde_json::from_value(value).map_err(|error| format!("{key}: {error}"))
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
