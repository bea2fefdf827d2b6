//! SentencePiece's BPE over scores: GGUF's kind `llama`.
//!
//! A GGUF file of this kind has no list of merges, only a score for each token: of all neighbours that join to a token
//! the pair whose token scores highest joins first, the leftmost of equals. (Lists of merges, as tokenizer.json has
//! them, rank *pairs*; where a token can be made in several ways the two do not always agree.) The algorithm and its
//! order are those of llama.cpp's `llm_tokenizer_spm`, the reader of these files that everybody measures against.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::hash::{BuildHasher, RandomState};

use aho_corasick::{AhoCorasick, MatchKind};
use hashbrown::HashTable;

/// How the vocabulary spells a space.
pub(super) const SPACE: char = '▁';

/// A vocabulary with scores.
pub(super) struct SentencePiece {
    texts: Texts,
    scores: Vec<f32>,
    /// Tokens `<0x00>` to `<0xFF>`.
    bytes: Vec<Option<u32>>,
    unknown: Option<u32>,
    verbatim: Option<AhoCorasick>,
    /// The token of each of its patterns, and whether it takes the white space behind it.
    verbatim_ids: Vec<(u32, bool)>,
    space_prefix: bool,
}

/// A token that is found in a text before anything is merged.
pub(super) struct Verbatim {
    pub(super) id: u32,
    /// Whether white space behind it belongs to it.
    pub(super) strips_right: bool,
}

impl SentencePiece {
    /// `scores` are as many as `tokens`. `unknown` stands for a byte that has no token. With `space_prefix` a text
    /// starts with a space, and so does what follows a token of `verbatim`.
    pub(super) fn new(
        tokens: &[&str],
        scores: Vec<f32>,
        verbatim: &[Verbatim],
        unknown: Option<u32>,
        space_prefix: bool,
    ) -> Result<Self, String> {
        let texts = Texts::new(tokens);
        let byte = |byte: u8| {
            let hex = texts.id(&format!("<0x{byte:02X}>"));
            hex.or_else(|| texts.id(std::str::from_utf8(&[byte]).ok()?))
        };
        let bytes = (0..=255).map(byte).collect();
        let verbatim: Vec<_> = verbatim.iter().filter(|one| !tokens[one.id as usize].is_empty()).collect();
        let patterns = verbatim.iter().map(|one| tokens[one.id as usize]);
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(patterns);
        Ok(Self {
            bytes,
            unknown,
            verbatim: if verbatim.is_empty() {
                None
            } else {
                Some(automaton.map_err(|error| error.to_string())?)
            },
            verbatim_ids: verbatim.iter().map(|one| (one.id, one.strips_right)).collect(),
            space_prefix,
            texts,
            // -0.0 and 0.0 are the same score, though not in the total order used below.
            scores: scores.into_iter().map(|score| score + 0.0).collect(),
        })
    }

    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.texts.text(id)
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.texts.id(text)
    }

    /// `Err` holds a byte for which there is no token.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, u8> {
        let mut ids = Vec::new();
        let (mut at, mut after_verbatim) = (0, true);
        for found in self.verbatim.iter().flat_map(|verbatim| verbatim.find_iter(text)) {
            // The white space that a token took may hold the start of another.
            if found.start() < at {
                continue;
            }
            self.merge(&text[at..found.start()], &mut after_verbatim, &mut ids)?;
            let (id, strips_right) = self.verbatim_ids[found.pattern().as_usize()];
            ids.push(id);
            after_verbatim = true;
            at = found.end();
            if strips_right {
                let rest = text[at..].trim_start_matches(|c: char| c.is_ascii_whitespace() || c == '\x0b');
                at = text.len() - rest.len();
            }
        }
        self.merge(&text[at..], &mut after_verbatim, &mut ids)?;
        Ok(ids)
    }

    /// Tokens of a text without verbatim ones.
    fn merge(&self, text: &str, after_verbatim: &mut bool, ids: &mut Vec<u32>) -> Result<(), u8> {
        if text.is_empty() {
            return Ok(());
        }
        let prefix = if self.space_prefix && *after_verbatim { " " } else { "" };
        *after_verbatim = false;
        let text = format!("{prefix}{text}").replace(' ', SPACE.encode_utf8(&mut [0; 4]));
        let mut symbols = Symbols::new(&text);
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.0.len() as u32 {
            queue.extend(self.pair(&text, &symbols, right - 1, right));
        }
        while let Some(pair) = queue.pop() {
            if symbols.len(pair.left) == 0
                || symbols.len(pair.right) == 0
                || symbols.len(pair.left) + symbols.len(pair.right) != pair.len
            {
                continue;
            }
            symbols.join(pair.left, pair.right);
            let Symbol { previous, next, .. } = symbols.0[pair.left as usize];
            if previous != NONE {
                queue.extend(self.pair(&text, &symbols, previous, pair.left));
            }
            if next != NONE {
                queue.extend(self.pair(&text, &symbols, pair.left, next));
            }
        }
        for symbol in symbols.0.iter().filter(|symbol| symbol.len > 0) {
            let text = &text[symbol.start as usize..][..symbol.len as usize];
            match self.texts.id(text) {
                Some(id) => ids.push(id),
                None => {
                    for byte in text.bytes() {
                        ids.push(self.bytes[usize::from(byte)].or(self.unknown).ok_or(byte)?);
                    }
                }
            }
        }
        Ok(())
    }

    /// The neighbours `left` and `right`, if they join to a token.
    fn pair(&self, text: &str, symbols: &Symbols, left: u32, right: u32) -> Option<Pair> {
        let len = symbols.len(left) + symbols.len(right);
        let start = symbols.0[left as usize].start as usize;
        let id = self.texts.id(&text[start..start + len as usize])?;
        Some(Pair { score: self.scores[id as usize], left, right, len })
    }
}

const NONE: u32 = u32::MAX;

/// A piece of the text; of length 0 once it was joined to the one before it.
struct Symbol {
    start: u32,
    len: u32,
    previous: u32,
    next: u32,
}

/// A text's pieces, a doubly linked list.
struct Symbols(Vec<Symbol>);

impl Symbols {
    /// One for each character.
    fn new(text: &str) -> Self {
        let mut symbols: Vec<_> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Symbol {
                start: start as u32,
                len: c.len_utf8() as u32,
                previous: (i as u32).wrapping_sub(1),
                next: i as u32 + 1,
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        Self(symbols)
    }

    fn len(&self, at: u32) -> u32 {
        self.0[at as usize].len
    }

    fn join(&mut self, left: u32, right: u32) {
        let joined = &mut self.0[right as usize];
        let (len, next) = (std::mem::take(&mut joined.len), joined.next);
        let symbol = &mut self.0[left as usize];
        symbol.len += len;
        symbol.next = next;
        if next != NONE {
            self.0[next as usize].previous = left;
        }
    }
}

/// Neighbours that may join. The greatest joins first.
struct Pair {
    score: f32,
    left: u32,
    right: u32,
    /// Of both together, in bytes: another length says that one of them has changed since.
    len: u32,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// Ids by text and texts by id, in few large pieces of memory: a vocabulary may have a quarter of a million tokens.
struct Texts {
    bytes: String,
    ends: Vec<u32>,
    longest: usize,
    table: HashTable<u32>,
    hasher: RandomState,
}

impl Texts {
    /// Of tokens with the same text the last counts.
    fn new(tokens: &[&str]) -> Self {
        let mut texts = Self {
            bytes: tokens.concat(),
            ends: Vec::with_capacity(tokens.len()),
            longest: tokens.iter().map(|token| token.len()).max().unwrap_or(0),
            table: HashTable::with_capacity(tokens.len()),
            hasher: RandomState::new(),
        };
        let mut end = 0;
        for token in tokens {
            end += token.len();
            texts.ends.push(end as u32);
        }
        let Self { bytes, ends, table, hasher, .. } = &mut texts;
        for (id, token) in (0u32..).zip(tokens) {
            let hash = hasher.hash_one(*token);
            match table.find_mut(hash, |&other| slice(bytes, ends, other) == *token) {
                Some(other) => *other = id,
                None => {
                    table.insert_unique(hash, id, |&other| hasher.hash_one(slice(bytes, ends, other)));
                }
            }
        }
        texts
    }

    fn text(&self, id: u32) -> Option<&str> {
        ((id as usize) < self.ends.len()).then(|| slice(&self.bytes, &self.ends, id))
    }

    fn id(&self, text: &str) -> Option<u32> {
        if text.len() > self.longest {
            return None;
        }
        let same = |&id: &u32| slice(&self.bytes, &self.ends, id) == text;
        self.table.find(self.hasher.hash_one(text), same).copied()
    }
}

/// The text of token `id`, which there is.
fn slice<'a>(bytes: &'a str, ends: &[u32], id: u32) -> &'a str {
    let start = if id == 0 { 0 } else { ends[id as usize - 1] };
    &bytes[start as usize..ends[id as usize] as usize]
}
