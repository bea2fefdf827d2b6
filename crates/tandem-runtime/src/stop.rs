//! Finding stop strings in text that arrives in pieces.
//!
//! Text leaves the matcher only once it can no longer be part of a stop string, and the result does not depend on how
//! the text was cut: the match that *ends* first wins, the longest among those that end together, and everything before
//! it comes out. Each stop string is followed by its Knuth-Morris-Pratt automaton, whose state is the length of the
//! longest start of that string which the text ends with; the longest state is what must be held back. A byte costs
//! amortised constant time per stop string, whatever their lengths.

use crate::RuntimeError;

/// Follows a text and cuts it at the first stop string.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    held: String,
}

/// A stop string was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopped {
    /// What came before it and was still held back.
    pub text: String,
    /// The stop string.
    pub stop: String,
}

#[derive(Debug, Clone)]
struct Pattern {
    text: String,
    /// `failure[i]`: length of the longest proper prefix of `text[..=i]` that is also its suffix.
    failure: Vec<usize>,
    /// Bytes of `text` that the input ends with.
    matched: usize,
}

impl StopMatcher {
    /// A matcher at the beginning of a text.
    ///
    /// # Errors
    /// [`RuntimeError::EmptyStop`].
    pub fn new(stops: impl IntoIterator<Item = String>) -> Result<Self, RuntimeError> {
        let patterns = stops.into_iter().map(Pattern::new).collect::<Result<_, _>>()?;
        Ok(Self { patterns, held: String::new() })
    }

    /// Takes the next piece and gives what is safe to show.
    ///
    /// # Errors
    /// [`Stopped`] at the first stop string. What follows it in `piece` is dropped, and the matcher is as new.
    pub fn push(&mut self, piece: &str) -> Result<String, Stopped> {
        let before = self.held.len();
        self.held.push_str(piece);
        for end in before..self.held.len() {
            let byte = self.held.as_bytes()[end];
            let mut found: Option<&Pattern> = None;
            for pattern in &mut self.patterns {
                let longer = found.is_none_or(|f| f.text.len() < pattern.text.len());
                if pattern.step(byte) && longer {
                    found = Some(pattern);
                }
            }
            if let Some(pattern) = found {
                let stop = pattern.text.clone();
                self.held.truncate(end + 1 - stop.len());
                self.patterns.iter_mut().for_each(|p| p.matched = 0);
                return Err(Stopped { text: std::mem::take(&mut self.held), stop });
            }
        }
        let hold = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        let safe = self.held.len() - hold;
        Ok(self.held.drain(..safe).collect())
    }

    /// Bytes held back now.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// The text has ended: gives what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

impl Pattern {
    fn new(text: String) -> Result<Self, RuntimeError> {
        if text.is_empty() {
            return Err(RuntimeError::EmptyStop);
        }
        let bytes = text.as_bytes();
        let mut failure = vec![0; bytes.len()];
        for i in 1..bytes.len() {
            let mut k = failure[i - 1];
            while k > 0 && bytes[i] != bytes[k] {
                k = failure[k - 1];
            }
            failure[i] = k + usize::from(bytes[i] == bytes[k]);
        }
        Ok(Self { text, failure, matched: 0 })
    }

    /// Feeds one byte; whether the input now ends with the whole pattern. `matched` is then reset before the next.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.failure[self.matched - 1];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        self.matched == bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, by search over the whole text.
    fn whole(text: &str, stops: &[String]) -> (String, Option<String>) {
        let matches = stops.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at, s)));
        match matches.min_by_key(|(end, at, _)| (*end, *at)) {
            Some((_, at, stop)) => (text[..at].to_owned(), Some(stop.clone())),
            None => (text.to_owned(), None),
        }
    }

    fn pieces(text: &str, stops: &[String], cuts: &[bool]) -> (String, Option<String>) {
        let mut matcher = StopMatcher::new(stops.to_vec()).unwrap();
        let mut out = String::new();
        let mut piece = String::new();
        for (i, c) in text.chars().enumerate() {
            piece.push(c);
            if cuts[i % cuts.len()] {
                match matcher.push(&std::mem::take(&mut piece)) {
                    Ok(text) => out.push_str(&text),
                    Err(s) => return (out + &s.text, Some(s.stop)),
                }
            }
        }
        match matcher.push(&piece) {
            Ok(text) => (out + &text + &matcher.finish(), None),
            Err(s) => (out + &s.text, Some(s.stop)),
        }
    }

    proptest! {
        #[test]
        fn any_split_equals_a_search_of_the_whole_text(
            text in "[abé🦀]{0,40}",
            stops in prop::collection::vec("[abé🦀]{1,6}", 0..4),
            cuts in prop::collection::vec(any::<bool>(), 1..12),
        ) {
            prop_assert_eq!(pieces(&text, &stops, &cuts), whole(&text, &stops));
        }
    }

    #[test]
    fn holds_back_only_what_may_be_a_stop_string() {
        let mut matcher = StopMatcher::new(["</s>".to_owned(), "\n\nUser".to_owned()]).unwrap();
        assert_eq!(matcher.push("a < b").unwrap(), "a < b");
        assert_eq!(matcher.push("\n").unwrap(), "");
        assert_eq!(matcher.push("c</").unwrap(), "\nc");
        assert_eq!(
            matcher.push("s>d").unwrap_err(),
            Stopped { text: String::new(), stop: "</s>".to_owned() }
        );
    }

    #[test]
    fn a_stop_string_that_never_comes_is_not_lost_text() {
        let mut matcher = StopMatcher::new(["END".to_owned()]).unwrap();
        assert_eq!(matcher.push("the EN").unwrap(), "the ");
        assert_eq!(matcher.finish(), "EN");
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        assert_eq!(StopMatcher::new([String::new()]).unwrap_err(), RuntimeError::EmptyStop);
    }

    /// Found by reading llama.cpp's issues: very long stop strings must not make generation quadratic.
    #[test]
    fn a_stop_string_of_100_000_characters_is_followed_in_linear_time() {
        let stop = "ab".repeat(50_000);
        let mut matcher = StopMatcher::new([stop.clone()]).unwrap();
        for _ in 0..49_999 {
            assert_eq!(matcher.push("ab").unwrap(), "");
        }
        assert_eq!(matcher.push("xx").unwrap(), format!("{}xx", "ab".repeat(49_999)));
        assert_eq!(matcher.push(&format!("y{stop}")).unwrap_err().text, "y");
    }
}
