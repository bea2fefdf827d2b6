//! The tokenizer in a GGUF file's metadata: kind `gpt2`, a byte-level BPE, and kind `llama`, SentencePiece's.

use std::path::Path;
use std::sync::Arc;

use tokenizers::AddedToken;
use tokenizers::models::bpe::Vocab;

use super::json::byte_level_bpe;
use super::pretokenizer::stages;
use super::sentencepiece::{SPACE, SentencePiece, Verbatim};
use super::spelling::{LeadingSpace, Spelling};
use super::{Encoder, Pieces, Tokenizer};
use crate::error::ModelError;
use crate::gguf::{Array, Gguf, Value};

/// Token types, numbered as in the file.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Most bytes of all tokens together; the largest vocabularies have 3 MB.
const MAX_TEXT: usize = 1 << 30;

impl Tokenizer {
    /// Reads the `tokenizer.ggml.*` keys of a model with `rows` embeddings. `path` is for messages.
    ///
    /// # Errors
    /// [`ModelError::Malformed`], or [`ModelError::Unsupported`] naming the kind that is not understood.
    pub fn from_gguf(path: &Path, gguf: &Gguf<'_>, rows: usize) -> Result<Self, ModelError> {
        let file = File { path, gguf };
        let kind = gguf.text("tokenizer.ggml.model");
        let kind =
            kind.ok_or_else(|| file.malformed("there is no tokenizer (tokenizer.ggml.model)".into()))?;
        if !["gpt2", "llama"].contains(&kind) {
            return Err(ModelError::unsupported(
                path,
                "tokenizer.ggml.model",
                kind,
                "Tandem reads GGUF tokenizers of kind gpt2 and llama; use the model's Hugging Face folder instead",
            ));
        }
        let tokens: Vec<&str> = file.texts("tokenizer.ggml.tokens")?;
        if tokens.len() != rows {
            return Err(ModelError::malformed(
                path,
                format!("the vocabulary has {} tokens, but the model has {rows} embeddings", tokens.len()),
                "the tokenizer and the weights do not belong together",
            ));
        }
        if tokens.iter().map(|token| token.len()).sum::<usize>() > MAX_TEXT {
            return Err(file.malformed("the tokens are longer than a gigabyte".into()));
        }
        let types = file.types()?;
        let (bos_by_default, mut tokenizer) = match kind {
            "gpt2" => file.byte_level(&tokens, &types, rows)?,
            _ => (true, file.sentencepiece(&tokens, &types, rows)?),
        };
        let (bos, eos) = (file.token_id("bos", rows)?, file.token_id("eos", rows)?);
        let add_bos = file.flag("tokenizer.ggml.add_bos_token", bos_by_default)?;
        let add_eos = file.flag("tokenizer.ggml.add_eos_token", false)?;
        if let Some(inner) = Arc::get_mut(&mut tokenizer.inner) {
            inner.prefix.extend(bos.filter(|_| add_bos));
            inner.suffix.extend(eos.filter(|_| add_eos));
            (inner.bos, inner.eos) = (bos, eos);
        }
        Ok(tokenizer)
    }
}

/// The types of the tokens; those that the file does not name are normal.
struct Types(Vec<i64>);

impl Types {
    fn get(&self, id: usize) -> i64 {
        self.0.get(id).copied().unwrap_or(NORMAL)
    }

    /// Whether the token is found in a text before anything is merged, and stands for its spelling.
    fn verbatim(&self, id: usize) -> bool {
        matches!(self.get(id), UNKNOWN | CONTROL | USER_DEFINED)
    }

    fn special(&self, id: usize) -> bool {
        matches!(self.get(id), UNKNOWN | CONTROL)
    }
}

struct File<'a> {
    path: &'a Path,
    gguf: &'a Gguf<'a>,
}

impl<'a> File<'a> {
    /// Whether a begin token is usual, and the tokenizer of kind `gpt2`.
    fn byte_level(
        &self,
        tokens: &[&str],
        types: &Types,
        rows: usize,
    ) -> Result<(bool, Tokenizer), ModelError> {
        let malformed = |what| self.malformed(what);
        let stages = stages(self.path, self.gguf.text("tokenizer.ggml.pre"))?;
        let mut vocab = Vocab::with_capacity(tokens.len());
        for (id, token) in (0..).zip(tokens) {
            if let Some(other) = vocab.insert((*token).to_owned(), id) {
                return Err(malformed(format!("the tokens {other} and {id} are both spelled {token:?}")));
            }
        }
        let merges = self.texts("tokenizer.ggml.merges")?;
        let merges = merges.into_iter().map(|line| match line.split_once(' ') {
            Some((a, b)) => Ok((a.to_owned(), b.to_owned())),
            None => Err(malformed(format!("the merge {line:?} is no pair"))),
        });
        let merges = merges.collect::<Result<Vec<_>, _>>()?;
        let mut tokenizers = byte_level_bpe(vocab, merges, stages.ignore_merges, Some(stages.pre_tokenizer))
            .map_err(malformed)?;
        tokenizers.with_normalizer(stages.normalizer).map_err(|error| malformed(error.to_string()))?;
        let added = tokens.iter().enumerate().filter(|(id, _)| types.verbatim(*id));
        let added = added.map(|(id, token)| AddedToken::from(*token, types.special(id)).normalized(false));
        tokenizers.add_tokens(added).map_err(|error| malformed(error.to_string()))?;
        let pieces = pieces(tokens, types, &Spelling::ByteLevel);
        let encoder = Encoder::Tokenizers(Box::new(tokenizers));
        Ok((stages.bos, Tokenizer::new(encoder, pieces, LeadingSpace::Keep, rows)))
    }

    /// The tokenizer of kind `llama`.
    fn sentencepiece(&self, tokens: &[&str], types: &Types, rows: usize) -> Result<Tokenizer, ModelError> {
        let key = "tokenizer.ggml.scores";
        let scores: Option<Vec<f32>> =
            self.gguf.array(key).and_then(Array::floats).map(|scores| scores.map(|x| x as f32).collect());
        let scores = scores.filter(|scores| scores.len() == tokens.len());
        let scores =
            scores.ok_or_else(|| self.malformed(format!("{key} is no list of {} numbers", tokens.len())))?;
        let space_prefix = self.flag("tokenizer.ggml.add_space_prefix", true)?;
        let strips_right = self.phi3_tokens();
        let verbatim = tokens.iter().enumerate().filter(|(id, _)| types.verbatim(*id));
        let verbatim: Vec<_> = verbatim
            .map(|(id, token)| Verbatim { id: id as u32, strips_right: strips_right(token) })
            .collect();
        let unknown = self.token_id("unknown", rows)?;
        let encoder = SentencePiece::new(tokens, scores, &verbatim, unknown, space_prefix)
            .map_err(|what| self.malformed(what))?;
        let spelling =
            Spelling::Text { replace: vec![(SPACE.to_string(), " ".to_owned())], byte_fallback: true };
        let leading_space = if space_prefix { LeadingSpace::DropOne } else { LeadingSpace::Keep };
        let pieces = pieces(tokens, types, &spelling);
        Ok(Tokenizer::new(Encoder::SentencePiece(Box::new(encoder)), pieces, leading_space, rows))
    }

    /// Whether a verbatim token takes the white space behind it. The file cannot say so; Phi-3's do, but for three,
    /// and llama.cpp knows them by the model's name.
    fn phi3_tokens(&self) -> impl Fn(&str) -> bool {
        let name = self.gguf.text("general.name").unwrap_or_default().to_lowercase();
        let phi3 = name.contains("phi-3") || name.contains("phi3");
        move |token| phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&token)
    }

    fn types(&self) -> Result<Types, ModelError> {
        match self.gguf.array("tokenizer.ggml.token_type").map(Array::integers) {
            None => Ok(Types(Vec::new())),
            Some(None) => Err(self.malformed("tokenizer.ggml.token_type is no list of numbers".into())),
            Some(Some(types)) => Ok(Types(types.collect())),
        }
    }

    fn texts(&self, key: &str) -> Result<Vec<&'a str>, ModelError> {
        let texts = self.gguf.array(key).and_then(Array::texts);
        texts.map(Iterator::collect).ok_or_else(|| self.malformed(format!("{key} is no list of strings")))
    }

    fn token_id(&self, which: &str, tokens: usize) -> Result<Option<u32>, ModelError> {
        match self.gguf.token_id(which) {
            Some(id) if id as usize >= tokens => {
                Err(self.malformed(format!("tokenizer.ggml.{which}_token_id = {id} is not a token id")))
            }
            id => Ok(id),
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.gguf.metadata.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.malformed(format!("{key} is {other:?}, not a boolean"))),
        }
    }

    fn malformed(&self, what: String) -> ModelError {
        ModelError::malformed(self.path, what, "download the file again, or convert it anew")
    }
}

fn pieces(tokens: &[&str], types: &Types, spelling: &Spelling) -> Pieces {
    let bytes = tokens.iter().enumerate().map(|(id, token)| {
        Some(if types.verbatim(id) { token.as_bytes().to_vec() } else { spelling.bytes(token) })
    });
    let mut pieces = Pieces::build(bytes, 0);
    for id in 0..tokens.len() {
        pieces.special[id] = types.special(id);
    }
    pieces
}
