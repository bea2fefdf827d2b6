use tandem_engine::SampleSpec;
use tandem_runtime::{Done, Route, StreamControl, TextEvent, TextStream};

use super::Error;

/// How to answer. The default is the model's own way, until it ends or the context is full.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ask {
    /// Most tokens to generate.
    pub max_tokens: Option<usize>,
    /// How to choose tokens; `None` is [`super::Model::sampling`].
    pub sample: Option<SampleSpec>,
    /// Texts that end the answer and are left out.
    pub stop: Vec<String>,
    /// Go on when the model ends.
    pub ignore_eos: bool,
    /// Only by this engine, or not at all.
    pub engine: Option<String>,
    /// Who comes first where not all can: higher before lower, 0 is normal.
    pub priority: i8,
}

/// An answer as it is generated: pieces of text, whole characters each. Waits for each. Dropping it cancels the request.
#[derive(Debug)]
pub struct Answer {
    stream: TextStream,
    route: Route,
    done: Option<Done>,
}

impl Answer {
    pub(super) fn new(stream: TextStream, route: Route) -> Self {
        Self { stream, route, done: None }
    }

    /// Which engine serves it, and why that one.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// How it ended, with its tokens and times; `None` before the last piece has been read, or after an error.
    pub fn done(&self) -> Option<&Done> {
        self.done.as_ref()
    }

    /// Something to end it with from elsewhere, such as a signal handler.
    pub fn control(&self) -> StreamControl {
        self.stream.control()
    }
}

impl Iterator for Answer {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.stream.next()? {
                TextEvent::Piece { text, .. } if text.is_empty() => {}
                TextEvent::Piece { text, .. } => return Some(Ok(text)),
                TextEvent::Error(error) => return Some(Err(error.into())),
                TextEvent::Done(done) => {
                    self.done = Some(done);
                    return None;
                }
            }
        }
    }
}
