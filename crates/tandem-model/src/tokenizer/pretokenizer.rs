//! What the name in `tokenizer.ggml.pre` stands for: how a byte-level BPE cuts a text before it merges.
//!
//! The patterns are those of the models' own tokenizer.json files. llama.cpp has its own spelling of them, which
//! differs for rare characters; where the two disagree, ids here are those that the model was trained with.

use std::path::Path;

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

use crate::error::ModelError;

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

/// The pattern that tells upper from lower case: GPT-4o with English endings, Tekken without.
macro_rules! cased_pattern {
    ($endings:literal, $digits:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $endings,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $endings,
            "|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

/// What a kind of pre-tokenizer implies.
pub(super) struct Stages {
    pub(super) normalizer: Option<NFC>,
    pub(super) pre_tokenizer: PreTokenizerWrapper,
    /// Whether a word that is in the vocabulary is taken whole.
    pub(super) ignore_merges: bool,
    /// Whether a begin token is usual, where the file does not say.
    pub(super) bos: bool,
}

/// The stages of pre-tokenizer `name`.
pub(super) fn stages(path: &Path, name: Option<&str>) -> Result<Stages, ModelError> {
    let byte_level = |use_regex| PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, use_regex));
    let sequence = |parts| PreTokenizerWrapper::Sequence(Sequence::new(parts));
    let split = |pattern: &str| {
        Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false)
            .map(|split| sequence(vec![PreTokenizerWrapper::Split(split), byte_level(false)]))
            .map_err(|error| ModelError::Tokenizer(error.to_string()))
    };
    let plain = |pre_tokenizer| Stages { normalizer: None, pre_tokenizer, ignore_merges: false, bos: false };
    Ok(match name.unwrap_or_default() {
        "gpt-2" | "olmo" => plain(byte_level(true)),
        // Granite's is called refact.
        "smollm" | "refact" | "starcoder" => {
            plain(sequence(vec![PreTokenizerWrapper::Digits(Digits::new(true)), byte_level(true)]))
        }
        "llama-bpe" | "llama3" | "llama-v3" => {
            Stages { ignore_merges: true, bos: true, ..plain(split(llama3_pattern!(r"\p{N}{1,3}"))?) }
        }
        // OLMo 2 and Phi-4 come as dbrx, SmolLM3 as smaug-bpe.
        "dbrx" | "smaug-bpe" => plain(split(llama3_pattern!(r"\p{N}{1,3}"))?),
        // Qwen 3's too.
        "qwen2" | "deepseek-r1-qwen" => {
            Stages { normalizer: Some(NFC), ..plain(split(llama3_pattern!(r"\p{N}"))?) }
        }
        // Phi-4-mini's.
        "gpt-4o" => plain(split(cased_pattern!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"))?),
        // Mistral's since Nemo.
        "tekken" => Stages { ignore_merges: true, bos: true, ..plain(split(cased_pattern!("", r"\p{N}"))?) },
        _ => {
            return Err(ModelError::unsupported(
                path,
                "tokenizer.ggml.pre",
                name.unwrap_or("absent"),
                "Tandem knows gpt-2, olmo, smollm, refact, starcoder, llama-bpe, dbrx, smaug-bpe, qwen2, gpt-4o and \
                 tekken; use the model's Hugging Face folder instead",
            ));
        }
    })
}
