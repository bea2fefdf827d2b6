//! How a vocabulary spells bytes.

use serde_json::Value;

/// How the text of a token stands for bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2's: each byte is one printable character (`Ġ` is the space).
    ByteLevel,
    /// SentencePiece's: UTF-8 with some strings replaced (`▁` is the space), and `<0xAB>` for single bytes.
    Text {
        /// What is replaced by what, in order.
        replace: Vec<(String, String)>,
        /// Whether `<0xAB>` stands for a byte.
        byte_fallback: bool,
    },
}

/// What happens to the space at the very start of a decoded text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeadingSpace {
    /// It stays.
    Keep,
    /// One is dropped (decoder `Strip`).
    DropOne,
    /// All of the first token's are dropped (decoder `Metaspace`).
    DropAllOfFirstToken,
}

impl Spelling {
    /// The bytes of a token spelled `text`.
    pub(super) fn bytes(&self, text: &str) -> Vec<u8> {
        match self {
            Spelling::ByteLevel => match text.chars().map(byte_of).collect() {
                Some(bytes) => bytes,
                // A token outside the alphabet (an added one) stands for itself.
                None => text.as_bytes().to_vec(),
            },
            Spelling::Text { replace, byte_fallback } => {
                let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                if let (true, Some(hex)) = (*byte_fallback, hex.filter(|hex| hex.len() == 2))
                    && let Ok(byte) = u8::from_str_radix(hex, 16)
                {
                    return vec![byte];
                }
                let replaced =
                    replace.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
                replaced.into_bytes()
            }
        }
    }
}

/// Reads the `decoder` of tokenizer.json. `Err` names the part that is not understood.
pub(super) fn of_decoder(decoder: &Value) -> Result<(Spelling, LeadingSpace), String> {
    let steps = match decoder["type"].as_str() {
        Some("Sequence") => decoder["decoders"].as_array().map_or(&[][..], Vec::as_slice),
        Some(_) => std::slice::from_ref(decoder),
        None => return Err("null".to_owned()),
    };
    let mut leading_space = LeadingSpace::Keep;
    let (mut byte_level, mut byte_fallback, mut replace) = (false, false, Vec::new());
    for step in steps {
        match step["type"].as_str() {
            Some("ByteLevel") => byte_level = true,
            Some("ByteFallback") => byte_fallback = true,
            Some("Fuse") => {}
            Some("Replace") => match (step["pattern"]["String"].as_str(), step["content"].as_str()) {
                (Some(from), Some(to)) if !from.is_empty() => replace.push((from.to_owned(), to.to_owned())),
                _ => return Err(step.to_string()),
            },
            Some("Strip") if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => {
                leading_space = LeadingSpace::DropOne;
            }
            Some("Metaspace") => {
                let from = step["replacement"].as_str().unwrap_or("▁");
                replace.push((from.to_owned(), " ".to_owned()));
                let never = step["prepend_scheme"] == "never" || step["add_prefix_space"] == false;
                leading_space = if never { LeadingSpace::Keep } else { LeadingSpace::DropAllOfFirstToken };
            }
            _ => return Err(step.to_string()),
        }
    }
    if byte_level {
        // Any other step beside it would work on its output; no known model has that.
        let alone = !byte_fallback && replace.is_empty() && leading_space == LeadingSpace::Keep;
        return if alone { Ok((Spelling::ByteLevel, leading_space)) } else { Err(decoder.to_string()) };
    }
    Ok((Spelling::Text { replace, byte_fallback }, leading_space))
}

/// GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order.
fn byte_of(c: char) -> Option<u8> {
    let code = match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code,
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(code).ok()
}

/// The inverse of [`byte_of`].
pub(super) fn char_of(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
        0..=0x20 => u32::from(byte) + 0x100,
        0x7f..=0xa0 => u32::from(byte) - 0x7f + 0x121,
        0xad => 0x143,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection_and_the_one_tokenizers_has() {
        let theirs = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        for byte in 0..=255 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
            assert!(theirs.contains(&char_of(byte)));
        }
        assert_eq!(char_of(b' '), 'Ġ');
        assert_eq!(char_of(b'\n'), 'Ċ');
    }

    #[test]
    fn tokens_outside_the_alphabet_stand_for_themselves() {
        assert_eq!(Spelling::ByteLevel.bytes("a b"), b"a b");
        assert_eq!(Spelling::ByteLevel.bytes("<|im_end|>"), b"<|im_end|>");
    }
}
