//! Tokens to text as they come.

use super::{LeadingSpace, Tokenizer};

/// Turns a stream of tokens into text that only ever grows: a character is emitted once it is whole.
///
/// The pieces joined together are exactly [`Tokenizer::decode`] of all tokens. As there, some vocabularies lose the
/// space at the very start.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Special tokens that are not left out.
    shown: Vec<u32>,
    at_start: bool,
    /// The first bytes of a character whose others have not come yet; at most 3.
    tail: Vec<u8>,
}

impl Detokenizer {
    /// For a new text. With `skip_special`, special tokens are left out.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        let (tokenizer, shown) = (tokenizer.clone(), Vec::new());
        Self { tokenizer, skip_special, shown, at_start: true, tail: Vec::new() }
    }

    /// Leaves in those special tokens that are spelled like one of `marks`.
    #[must_use]
    pub fn showing<'a>(mut self, marks: impl IntoIterator<Item = &'a str>) -> Self {
        self.shown.extend(marks.into_iter().filter_map(|mark| self.tokenizer.id_of(mark)));
        self
    }

    /// The text that became certain with token `id`, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let mut bytes = std::mem::take(&mut self.tail);
        bytes.extend_from_slice(&self.bytes_of(id));
        let mut text = String::with_capacity(bytes.len());
        let mut rest = &bytes[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(whole) => {
                    text.push_str(whole);
                    break;
                }
                Err(error) => {
                    let (good, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(good));
                    let Some(len) = error.error_len() else {
                        self.tail = bad.to_vec();
                        break;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &bad[len..];
                }
            }
        }
        (!text.is_empty()).then_some(text)
    }

    /// Ends the text: U+FFFD if a character was left half.
    pub fn finish(&mut self) -> Option<String> {
        let tail = std::mem::take(&mut self.tail);
        (!tail.is_empty()).then(|| String::from_utf8_lossy(&tail).into_owned())
    }

    /// The bytes that `id` contributes at this place of the text.
    pub(super) fn bytes_of(&mut self, id: u32) -> Vec<u8> {
        let Some(bytes) = self.tokenizer.token_bytes(id) else { return Vec::new() };
        let left_out = self.skip_special && self.tokenizer.is_special(id) && !self.shown.contains(&id);
        if left_out || bytes.is_empty() {
            return Vec::new();
        }
        let first = std::mem::replace(&mut self.at_start, false);
        match self.tokenizer.inner.leading_space {
            LeadingSpace::DropOne if first => bytes.strip_prefix(b" ").unwrap_or(bytes).to_vec(),
            LeadingSpace::DropAllOfFirstToken if first => {
                bytes.iter().copied().filter(|&b| b != b' ').collect()
            }
            _ => bytes.to_vec(),
        }
    }
}
