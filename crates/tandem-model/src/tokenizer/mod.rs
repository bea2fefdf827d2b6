//! Text to token ids and back.
//!
//! Splitting and merging is the `tokenizers` crate's, so ids agree with transformers; vocabularies with scores in place
//! of merges are merged here, as llama.cpp does. The way back is our own table of
//! the exact bytes that each token contributes: a stream, a stop string and a grammar all work on bytes, and a token
//! may hold a part of a character.

mod gguf;
mod json;
mod pretokenizer;
mod sentencepiece;
mod spelling;
mod stream;

use std::sync::Arc;

use crate::error::ModelError;
use sentencepiece::SentencePiece;
use spelling::{LeadingSpace, Spelling};

pub use stream::Detokenizer;

/// Longest text that is encoded, in bytes: a thousand times what the longest contexts hold.
const MAX_TEXT: usize = 1 << 30;

/// A tokenizer. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

/// What makes ids of a text.
enum Encoder {
    Tokenizers(Box<tokenizers::Tokenizer>),
    SentencePiece(Box<SentencePiece>),
}

struct Inner {
    encoder: Encoder,
    pieces: Pieces,
    leading_space: LeadingSpace,
    /// Put around the text when special tokens are asked for, where the encoder does not do it itself.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Rows of the embedding: larger ids cannot be fed to the model.
    rows: usize,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    fn new(encoder: Encoder, pieces: Pieces, leading_space: LeadingSpace, rows: usize) -> Self {
        let inner = Inner {
            encoder,
            pieces,
            leading_space,
            prefix: Vec::new(),
            suffix: Vec::new(),
            bos: None,
            eos: None,
            rows,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Stands in where there is no tokenizer (`--dummy-weights`): ids 0 to 255 are the bytes, the others are empty.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`], only if `tokenizers` refuses the byte alphabet.
    pub fn bytes(rows: usize) -> Result<Self, ModelError> {
        let texts: Vec<String> = (0..=255).map(|byte| spelling::char_of(byte).to_string()).collect();
        let vocab = texts.iter().cloned().zip(0..).collect();
        let tokenizers =
            json::byte_level_bpe(vocab, Vec::new(), false, None).map_err(ModelError::Tokenizer)?;
        let pieces =
            Pieces::build(texts.iter().map(|text| Some(Spelling::ByteLevel.bytes(text))), rows.max(256));
        let encoder = Encoder::Tokenizers(Box::new(tokenizers));
        Ok(Self::new(encoder, pieces, LeadingSpace::Keep, rows))
    }

    /// Sets the begin and end tokens by their texts; a text that is no token gives none.
    pub(crate) fn with_ends(mut self, bos: Option<&String>, eos: Option<&String>) -> Self {
        let id = |text: Option<&String>| text.and_then(|text| self.id_of(text));
        let (bos, eos) = (id(bos), id(eos));
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            (inner.bos, inner.eos) = (bos, eos);
        }
        self
    }

    /// Token ids of `text`.
    ///
    /// With `add_special` the tokens that the model's authors put around a plain text (often a begin-of-text token)
    /// are added; a prompt rendered from a chat template has them already and wants `false`. Special tokens spelled out
    /// in `text` are recognised in either case, as transformers does.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`], also for a token that the model has no embedding for.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelError> {
        let inner = &*self.inner;
        if text.len() > MAX_TEXT {
            let what = format!(
                "the text has {} bytes. hint: give at most {} MiB at once",
                text.len(),
                MAX_TEXT >> 20
            );
            return Err(ModelError::Tokenizer(what));
        }
        let mut ids = Vec::new();
        if add_special {
            ids.extend(&inner.prefix);
        }
        match &inner.encoder {
            Encoder::Tokenizers(tokenizers) => {
                let encoding = tokenizers.encode_fast(text, add_special);
                let encoding = encoding.map_err(|error| ModelError::Tokenizer(error.to_string()))?;
                ids.extend(encoding.get_ids());
            }
            Encoder::SentencePiece(vocabulary) => {
                ids.extend(vocabulary.encode(text).map_err(|byte| {
                    ModelError::Tokenizer(format!(
                        "the vocabulary has no token for the byte {byte:#04x} and none for what is unknown. hint:                          convert the model anew"
                    ))
                })?);
            }
        }
        if add_special {
            ids.extend(&inner.suffix);
        }
        match ids.iter().find(|&&id| id as usize >= inner.rows) {
            None => Ok(ids),
            Some(&id) => Err(ModelError::Tokenizer(format!(
                "the text holds token {id} ({}), but the model has only {} embeddings. hint: leave that token out; the \
                 tokenizer was made for another checkpoint",
                self.token_text(id).unwrap_or_default(),
                inner.rows
            ))),
        }
    }

    /// Text of `ids`; bytes that are no UTF-8 become U+FFFD. With `skip_special`, special tokens are left out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(self, skip_special);
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(&detokenizer.bytes_of(id));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The exact bytes that token `id` contributes to a text, special tokens by their spelling; `None` for an id
    /// without a token. (A text's very first token may lose a leading space, see [`Detokenizer`].)
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.inner.pieces.get(id)
    }

    /// Token `id` as the vocabulary spells it (`Ġhello`).
    pub fn token_text(&self, id: u32) -> Option<String> {
        match &self.inner.encoder {
            Encoder::Tokenizers(tokenizers) => tokenizers.id_to_token(id),
            Encoder::SentencePiece(vocabulary) => vocabulary.text(id).map(str::to_owned),
        }
    }

    /// The id of a token as the vocabulary spells it.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        match &self.inner.encoder {
            Encoder::Tokenizers(tokenizers) => tokenizers.token_to_id(text),
            Encoder::SentencePiece(vocabulary) => vocabulary.id(text),
        }
    }

    /// Whether `id` is a control token rather than text.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.pieces.special.get(id as usize).copied().unwrap_or(false)
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.inner.pieces.ends.len()
    }

    /// Begin-of-text token.
    pub fn bos(&self) -> Option<u32> {
        self.inner.bos
    }

    /// End-of-text token. [`crate::GenerationConfig::eos_token_ids`] is the list that ends an answer.
    pub fn eos(&self) -> Option<u32> {
        self.inner.eos
    }
}

/// Bytes of every token, one after the other.
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    present: Vec<bool>,
    special: Vec<bool>,
}

impl Pieces {
    /// From the bytes of ids 0, 1, ...; padded with absent ids up to `at_least`.
    fn build(tokens: impl Iterator<Item = Option<Vec<u8>>>, at_least: usize) -> Self {
        let (mut bytes, mut ends, mut present) = (Vec::new(), Vec::new(), Vec::new());
        for token in tokens {
            present.push(token.is_some());
            bytes.extend(token.unwrap_or_default());
            ends.push(bytes.len() as u32);
        }
        let len = ends.len().max(at_least);
        ends.resize(len, bytes.len() as u32);
        present.resize(len, false);
        Self { bytes, ends, present, special: vec![false; len] }
    }

    fn get(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        if !*self.present.get(id)? {
            return None;
        }
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        self.bytes.get(start as usize..self.ends[id] as usize)
    }
}
