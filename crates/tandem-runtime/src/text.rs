//! Tokens to text, on the reader's side.

use std::task::{Context, Poll, ready};

use tandem_model::Detokenizer;

use crate::message::{Done, Event, Reason, Token};
use crate::{RuntimeError, StopMatcher, Stopped, StreamControl, TokenStream};

/// What a [`TextStream`] gives. The last is `Done` or `Error`.
#[derive(Debug, Clone, PartialEq)]
pub enum TextEvent {
    /// A token, and the text that became certain with it.
    Piece {
        /// Whole characters, none of them part of a stop string; may be empty, and may hold text that earlier tokens
        /// began.
        text: String,
        /// `None` for text that was held back when the answer ended.
        token: Option<Token>,
    },
    /// The answer is complete.
    Done(Done),
    /// There will be no more of it.
    Error(RuntimeError),
}

/// The text of a [`TokenStream`].
///
/// Nothing is given before a character is whole, and no part of a stop string ever is: a suffix that may be the start
/// of one is held back. When one is found the request is finished, which keeps its KV for the next turn; tokens that
/// were already under way are counted in its usage and dropped here.
#[derive(Debug)]
pub struct TextStream {
    tokens: TokenStream,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    found: Option<Reason>,
    /// Follows the last piece.
    done: Option<Done>,
}

impl TextStream {
    /// Reads `tokens`, from their beginning, up to the first of `stops`.
    ///
    /// # Errors
    /// [`RuntimeError::EmptyStop`].
    pub fn new(
        tokens: TokenStream,
        detokenizer: Detokenizer,
        stops: impl IntoIterator<Item = String>,
    ) -> Result<Self, RuntimeError> {
        let stops = StopMatcher::new(stops)?;
        Ok(Self { tokens, detokenizer, stops, found: None, done: None })
    }

    /// Something to end it with.
    pub fn control(&self) -> StreamControl {
        self.tokens.control()
    }

    /// What `text` shows, and whether it ends with a stop string.
    fn show(&mut self, text: &str) -> String {
        match self.stops.push(text) {
            Ok(text) => text,
            Err(Stopped { text, stop }) => {
                let reason = Reason::StopString { text: stop };
                self.tokens.control().finish(reason.clone());
                self.found = Some(reason);
                text
            }
        }
    }

    /// What was held back when the tokens ended.
    fn rest(&mut self) -> String {
        let half = self.detokenizer.finish().unwrap_or_default();
        let shown = self.show(&half);
        shown + &self.stops.finish()
    }
}

impl Iterator for TextStream {
    type Item = TextEvent;

    fn next(&mut self) -> Option<TextEvent> {
        loop {
            if let Some(done) = self.end() {
                return Some(done);
            }
            let event = self.tokens.next()?;
            if let Some(event) = self.read(event) {
                return Some(event);
            }
        }
    }
}

impl TextStream {
    /// The next event for an asynchronous task, which is woken when there is one; `None` after the last.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<TextEvent>> {
        loop {
            if let Some(done) = self.end() {
                return Poll::Ready(Some(done));
            }
            let Some(event) = ready!(self.tokens.poll_next(context)) else { return Poll::Ready(None) };
            if let Some(event) = self.read(event) {
                return Poll::Ready(Some(event));
            }
        }
    }

    /// The end, once it has come.
    fn end(&mut self) -> Option<TextEvent> {
        let mut done = self.done.take()?;
        // The engine may have met its own end first.
        done.reason = self.found.take().unwrap_or(done.reason);
        Some(TextEvent::Done(done))
    }

    /// What an event shows; nothing where only the end is left to come.
    fn read(&mut self, event: Event) -> Option<TextEvent> {
        match event {
            Event::Token(_) if self.found.is_some() => None,
            Event::Token(token) => {
                let text = self.detokenizer.push(token.id).unwrap_or_default();
                Some(TextEvent::Piece { text: self.show(&text), token: Some(token) })
            }
            Event::Done(done) => {
                self.done = Some(done);
                let text = if self.found.is_none() { self.rest() } else { String::new() };
                (!text.is_empty()).then_some(TextEvent::Piece { text, token: None })
            }
            Event::Error(error) => Some(TextEvent::Error(error)),
        }
    }
}
