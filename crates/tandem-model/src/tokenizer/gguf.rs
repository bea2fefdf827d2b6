//! The tokenizer in a GGUF file's metadata: kind `gpt2`, a byte-level BPE.

use std::path::Path;

use tokenizers::models::bpe::Vocab;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::json::byte_level_bpe;
use super::spelling::{LeadingSpace, Spelling};
use super::{Inner, Pieces, Tokenizer};
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

impl Tokenizer {
    /// Reads the `tokenizer.ggml.*` keys of a model with `rows` embeddings. `path` is for messages.
    ///
    /// # Errors
    /// [`ModelError::Malformed`], or [`ModelError::Unsupported`] naming the kind that is not understood.
    pub fn from_gguf(path: &Path, gguf: &Gguf<'_>, rows: usize) -> Result<Self, ModelError> {
        read(path, gguf, rows)
    }
}

fn read(path: &Path, gguf: &Gguf<'_>, rows: usize) -> Result<Tokenizer, ModelError> {
    let malformed =
        |what: String| ModelError::malformed(path, what, "download the file again, or convert it anew");
    let text = |key: &str| match gguf.metadata.get(key) {
        Some(Value::Text(text)) => Some(*text),
        _ => None,
    };
    let array = |key: &str| match gguf.metadata.get(key) {
        Some(Value::Array(array)) => Some(*array),
        _ => None,
    };
    let Some(kind) = text("tokenizer.ggml.model") else {
        return Err(malformed("there is no tokenizer (tokenizer.ggml.model)".into()));
    };
    if kind != "gpt2" {
        return Err(ModelError::unsupported(
            path,
            "tokenizer.ggml.model",
            kind,
            "Tandem reads GGUF tokenizers of kind gpt2; use the model's Hugging Face folder instead",
        ));
    }
    let (pre_tokenizer, ignore_merges, bos_by_default) =
        pre_tokenizer(path, text("tokenizer.ggml.pre").unwrap_or("gpt-2"))?;

    let tokens = array("tokenizer.ggml.tokens").and_then(Array::texts);
    let tokens: Vec<&str> =
        tokens.ok_or_else(|| malformed("tokenizer.ggml.tokens is no list of strings".into()))?.collect();
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
    let lines = array("tokenizer.ggml.merges").and_then(Array::texts);
    let lines = lines.ok_or_else(|| malformed("tokenizer.ggml.merges is no list of strings".into()))?;
    let merges = lines
        .map(|line| match line.split_once(' ') {
            Some((a, b)) => Ok((a.to_owned(), b.to_owned())),
            None => Err(malformed(format!("the merge {line:?} is no pair"))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut tokenizers =
        byte_level_bpe(vocab, merges, ignore_merges, Some(pre_tokenizer)).map_err(malformed)?;
    if text("tokenizer.ggml.pre") == Some("qwen2") {
        tokenizers.with_normalizer(Some(NFC)).map_err(|error| ModelError::Tokenizer(error.to_string()))?;
    }

    let types: Vec<i64> = match array("tokenizer.ggml.token_type").map(Array::integers) {
        None => Vec::new(),
        Some(None) => return Err(malformed("tokenizer.ggml.token_type is no list of numbers".into())),
        Some(Some(types)) => types.collect(),
    };
    const CONTROL: i64 = 3;
    const USER_DEFINED: i64 = 4;
    let kind_of = |id: usize| types.get(id).copied().unwrap_or(1);
    let bytes = tokens.iter().enumerate().map(|(id, token)| {
        let verbatim = [CONTROL, USER_DEFINED].contains(&kind_of(id));
        Some(if verbatim { token.as_bytes().to_vec() } else { Spelling::ByteLevel.bytes(token) })
    });
    let mut pieces = Pieces::build(bytes, 0);
    let added = tokens.iter().enumerate().filter(|(id, _)| [CONTROL, USER_DEFINED].contains(&kind_of(*id)));
    let added = added.map(|(id, token)| {
        let special = kind_of(id) == CONTROL;
        pieces.special[id] = special;
        AddedToken::from(*token, special).normalized(false)
    });
    tokenizers.add_tokens(added).map_err(|error| ModelError::Tokenizer(error.to_string()))?;

    let id = |key: &str| match gguf.metadata.get(key) {
        None => Ok(None),
        Some(Value::Unsigned(id)) if (*id as usize) < tokens.len() => Ok(Some(*id as u32)),
        Some(other) => Err(malformed(format!("{key} is {other:?}, not a token id"))),
    };
    let flag = |key: &str, default: bool| match gguf.metadata.get(key) {
        None => Ok(default),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(malformed(format!("{key} is {other:?}, not a boolean"))),
    };
    let (bos, eos) = (id("tokenizer.ggml.bos_token_id")?, id("tokenizer.ggml.eos_token_id")?);
    let around = |wanted: bool, id: Option<u32>| if wanted { id.into_iter().collect() } else { Vec::new() };
    Ok(Tokenizer {
        inner: std::sync::Arc::new(Inner {
            prefix: around(flag("tokenizer.ggml.add_bos_token", bos_by_default)?, bos),
            suffix: around(flag("tokenizer.ggml.add_eos_token", false)?, eos),
            tokenizers,
            pieces,
            leading_space: LeadingSpace::Keep,
            bos,
            eos,
            rows,
        }),
    })
}

/// The pre-tokenizer called `name`, whether whole words bypass the merges, and whether a begin token is usual. The
/// patterns are those of the models' own tokenizer.json files.
fn pre_tokenizer(path: &Path, name: &str) -> Result<(PreTokenizerWrapper, bool, bool), ModelError> {
    let gpt2 = || PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true));
    let bytes_only = || PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false));
    let sequence = |parts| PreTokenizerWrapper::Sequence(Sequence::new(parts));
    let split = |pattern: &str| {
        Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false)
            .map(PreTokenizerWrapper::Split)
            .map_err(|error| ModelError::Tokenizer(error.to_string()))
    };
    Ok(match name {
        "gpt-2" => (gpt2(), false, false),
        "smollm" => (sequence(vec![PreTokenizerWrapper::Digits(Digits::new(true)), gpt2()]), false, false),
        "llama-bpe" | "llama3" | "llama-v3" => {
            (sequence(vec![split(llama3_pattern!(r"\p{N}{1,3}"))?, bytes_only()]), true, true)
        }
        "qwen2" => (sequence(vec![split(llama3_pattern!(r"\p{N}"))?, bytes_only()]), false, false),
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
