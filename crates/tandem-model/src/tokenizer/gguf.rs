//! The tokenizer in a GGUF file's metadata: kind `gpt2`, a byte-level BPE.

use std::path::Path;
use std::sync::Arc;

use tokenizers::models::bpe::Vocab;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::json::byte_level_bpe;
use super::spelling::{LeadingSpace, Spelling};
use super::{Pieces, Tokenizer};
use crate::error::ModelError;
use crate::gguf::{Array, Gguf, Value};

/// The pattern of Llama 3; Qwen 2 differs in the digits it takes together.
macro_rules! llama3_pattern {
    ($digits:literal) => {
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

/// Token types, numbered as in the file.
const NORMAL: i64 = 1;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

impl Tokenizer {
    /// Reads the `tokenizer.ggml.*` keys of a model with `rows` embeddings. `path` is for messages.
    ///
    /// # Errors
    /// [`ModelError::Malformed`], or [`ModelError::Unsupported`] naming the kind that is not understood.
    pub fn from_gguf(path: &Path, gguf: &Gguf<'_>, rows: usize) -> Result<Self, ModelError> {
        let malformed =
            |what: String| ModelError::malformed(path, what, "download the file again, or convert it anew");
        let kind = gguf.text("tokenizer.ggml.model");
        let kind = kind.ok_or_else(|| malformed("there is no tokenizer (tokenizer.ggml.model)".into()))?;
        if kind != "gpt2" {
            return Err(ModelError::unsupported(
                path,
                "tokenizer.ggml.model",
                kind,
                "Tandem reads GGUF tokenizers of kind gpt2; use the model's Hugging Face folder instead",
            ));
        }
        let stages = stages(path, gguf.text("tokenizer.ggml.pre").unwrap_or("gpt-2"))?;
        let texts = |key: &str| {
            let texts = gguf.array(key).and_then(Array::texts);
            texts.ok_or_else(|| malformed(format!("{key} is no list of strings")))
        };
        let tokens: Vec<&str> = texts("tokenizer.ggml.tokens")?.collect();
        if tokens.len() != rows {
            return Err(ModelError::malformed(
                path,
                format!("the vocabulary has {} tokens, but the model has {rows} embeddings", tokens.len()),
                "the tokenizer and the weights do not belong together",
            ));
        }
        let mut vocab = Vocab::with_capacity(tokens.len());
        for (id, token) in (0..).zip(&tokens) {
            if let Some(other) = vocab.insert((*token).to_owned(), id) {
                return Err(malformed(format!("the tokens {other} and {id} are both spelled {token:?}")));
            }
        }
        let merges = texts("tokenizer.ggml.merges")?.map(|line| match line.split_once(' ') {
            Some((a, b)) => Ok((a.to_owned(), b.to_owned())),
            None => Err(malformed(format!("the merge {line:?} is no pair"))),
        });
        let merges = merges.collect::<Result<Vec<_>, _>>()?;
        let mut tokenizers = byte_level_bpe(vocab, merges, stages.ignore_merges, Some(stages.pre_tokenizer))
            .map_err(malformed)?;
        tokenizers.with_normalizer(stages.normalizer).map_err(|error| malformed(error.to_string()))?;

        let types = match gguf.array("tokenizer.ggml.token_type").map(Array::integers) {
            None => Vec::new(),
            Some(None) => return Err(malformed("tokenizer.ggml.token_type is no list of numbers".into())),
            Some(Some(types)) => types.collect(),
        };
        let type_of = |id: usize| types.get(id).copied().unwrap_or(NORMAL);
        let verbatim = |id: usize| matches!(type_of(id), CONTROL | USER_DEFINED);
        let bytes = tokens.iter().enumerate().map(|(id, token)| {
            Some(if verbatim(id) { token.as_bytes().to_vec() } else { Spelling::ByteLevel.bytes(token) })
        });
        let mut pieces = Pieces::build(bytes, 0);
        let added = tokens.iter().enumerate().filter(|(id, _)| verbatim(*id)).map(|(id, token)| {
            pieces.special[id] = type_of(id) == CONTROL;
            AddedToken::from(*token, type_of(id) == CONTROL).normalized(false)
        });
        tokenizers.add_tokens(added).map_err(|error| malformed(error.to_string()))?;

        let id = |which: &str| match gguf.token_id(which) {
            Some(id) if id as usize >= tokens.len() => {
                Err(malformed(format!("tokenizer.ggml.{which}_token_id = {id} is not a token id")))
            }
            id => Ok(id),
        };
        let flag = |key: &str, default: bool| match gguf.metadata.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(malformed(format!("{key} is {other:?}, not a boolean"))),
        };
        let (bos, eos) = (id("bos")?, id("eos")?);
        let add_bos = flag("tokenizer.ggml.add_bos_token", stages.bos)?;
        let add_eos = flag("tokenizer.ggml.add_eos_token", false)?;
        let mut tokenizer = Self::new(tokenizers, pieces, LeadingSpace::Keep, rows);
        if let Some(inner) = Arc::get_mut(&mut tokenizer.inner) {
            inner.prefix.extend(bos.filter(|_| add_bos));
            inner.suffix.extend(eos.filter(|_| add_eos));
            (inner.bos, inner.eos) = (bos, eos);
        }
        Ok(tokenizer)
    }
}

/// What a kind of pre-tokenizer implies.
struct Stages {
    normalizer: Option<NFC>,
    pre_tokenizer: PreTokenizerWrapper,
    /// Whether a word that is in the vocabulary is taken whole.
    ignore_merges: bool,
    /// Whether a begin token is usual, where the file does not say.
    bos: bool,
}

/// The stages of pre-tokenizer `name`, with the patterns of the models' own tokenizer.json files.
fn stages(path: &Path, name: &str) -> Result<Stages, ModelError> {
    let byte_level = |use_regex| PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, use_regex));
    let sequence = |parts| PreTokenizerWrapper::Sequence(Sequence::new(parts));
    let split = |pattern: &str| {
        Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false)
            .map(|split| sequence(vec![PreTokenizerWrapper::Split(split), byte_level(false)]))
            .map_err(|error| ModelError::Tokenizer(error.to_string()))
    };
    let plain = |pre_tokenizer| Stages { normalizer: None, pre_tokenizer, ignore_merges: false, bos: false };
    Ok(match name {
        "gpt-2" => plain(byte_level(true)),
        "smollm" => plain(sequence(vec![PreTokenizerWrapper::Digits(Digits::new(true)), byte_level(true)])),
        "llama-bpe" => {
            Stages { ignore_merges: true, bos: true, ..plain(split(llama3_pattern!(r"\p{N}{1,3}"))?) }
        }
        "qwen2" => Stages { normalizer: Some(NFC), ..plain(split(llama3_pattern!(r"\p{N}"))?) },
        _ => {
            return Err(ModelError::unsupported(
                path,
                "tokenizer.ggml.pre",
                name,
                "Tandem knows gpt-2, smollm, llama-bpe and qwen2; use the model's Hugging Face folder instead",
            ));
        }
    })
}
