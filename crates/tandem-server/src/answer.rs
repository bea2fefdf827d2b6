//! The choices of one request as one stream.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tandem_model::Detokenizer;
use tandem_runtime::{Done, Reason, RuntimeError, TextEvent, TextStream, Token, TokenStream, Usage};

use crate::calls::{Call, Calls, CallsEnd};
use crate::metrics::{Ongoing, Outcome, Series};
use crate::request::Ask;
use crate::{ApiError, Model};

/// What comes next of an answer.
#[derive(Debug)]
pub(crate) enum Step {
    /// A choice grew.
    Piece {
        /// Which.
        index: usize,
        /// By this text.
        text: String,
        /// And by these calls of tools, each whole.
        calls: Vec<Call>,
        /// The tokens of it, where log-probabilities were asked for.
        tokens: Vec<Token>,
    },
    /// A choice is complete.
    Done {
        /// Which.
        index: usize,
        /// How.
        done: Done,
        /// What was called, where the request has tools.
        calls: Option<CallsEnd>,
    },
}

/// An answer that is being generated. Dropping it cancels what is left of it.
#[derive(Debug)]
pub(crate) struct Answer {
    choices: Vec<Choice>,
    /// Choices of each prompt.
    n: usize,
    logprobs: bool,
    /// Where polling begins, so that none of the choices starves.
    turn: usize,
    ready: VecDeque<Result<Step, ApiError>>,
    arrived: Instant,
    pub ongoing: Ongoing,
    /// Those of the engine that serves.
    pub series: Arc<Series>,
}

#[derive(Debug)]
struct Choice {
    /// `None` after its end.
    stream: Option<TextStream>,
    /// Tokens none of whose text has come out yet, and where it begins: they may turn out to belong to a stop string.
    held: Vec<(usize, Token)>,
    /// Tokens whose text has come out of the stream, but not yet as text or as a call.
    undecided: Vec<Token>,
    /// Where the request has tools.
    calls: Option<Calls>,
    /// Bytes of text that came out.
    shown: usize,
    /// Bytes of text in all.
    length: usize,
    last_token: Option<Instant>,
    usage: Usage,
}

impl Answer {
    /// Reads `streams`, one for each choice.
    ///
    /// # Errors
    /// A stop string that would stop everything.
    pub fn new(
        streams: Vec<TokenStream>,
        model: &Model,
        ask: &Ask,
        arrived: Instant,
        ongoing: Ongoing,
        series: Arc<Series>,
    ) -> Result<Self, (ApiError, Ongoing)> {
        let choice = |tokens| {
            let calls = model.calls(ask);
            let marks = calls.iter().flat_map(Calls::marks);
            let detokenizer = Detokenizer::new(&model.tokenizer, true).showing(marks);
            let stream = Some(TextStream::new(tokens, detokenizer, ask.stop.iter().cloned())?);
            Ok(Choice {
                stream,
                held: Vec::new(),
                undecided: Vec::new(),
                calls,
                shown: 0,
                length: 0,
                last_token: None,
                usage: Usage::default(),
            })
        };
        match streams.into_iter().map(choice).collect::<Result<_, RuntimeError>>() {
            Err(error) => Err((error.into(), ongoing)),
            Ok(choices) => Ok(Self {
                choices,
                n: ask.n,
                logprobs: ask.logprobs.is_some(),
                turn: 0,
                ready: VecDeque::new(),
                arrived,
                ongoing,
                series,
            }),
        }
    }

    /// Ends it as answered.
    pub fn complete(self) {
        self.series.tokens(&self.usage());
        self.ongoing.end(Outcome::Completed);
    }

    /// How many choices there are.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// The next step; `None` when all choices are complete. Nothing follows an error.
    pub async fn next(&mut self) -> Option<Result<Step, ApiError>> {
        if let Some(step) = self.ready.pop_front() {
            return Some(step);
        }
        poll_fn(|context| self.poll(context)).await
    }

    /// Waits for the first step, but not long: an answer that is refused before it begins is an HTTP status, and a long
    /// prefill must not keep a client without a sign of life.
    pub async fn begin(&mut self, patience: Duration) -> Result<(), ApiError> {
        match tokio::time::timeout(patience, self.next()).await {
            Ok(Some(Err(error))) => Err(error),
            Ok(Some(step)) => {
                self.ready.push_back(step);
                Ok(())
            }
            Ok(None) | Err(_) => Ok(()),
        }
    }

    /// Tokens of the whole request. The choices of a prompt have it in common, so it counts once, and what was cached of
    /// it is what was cached for each of them.
    pub fn usage(&self) -> Usage {
        let mut sum = Usage::default();
        for choices in self.choices.chunks(self.n) {
            sum.prompt += choices.iter().map(|c| c.usage.prompt).max().unwrap_or(0);
            sum.cached += choices.iter().map(|c| c.usage.cached).min().unwrap_or(0);
            sum.generated += choices.iter().map(|c| c.usage.generated).sum::<usize>();
        }
        sum
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Step, ApiError>>> {
        let count = self.choices.len();
        for index in (0..count).map(|i| (self.turn + i) % count) {
            let choice = &mut self.choices[index];
            while let Some(stream) = &mut choice.stream {
                let Poll::Ready(event) = stream.poll_next(context) else { break };
                let still_held = stream.held();
                let event = event.unwrap_or(TextEvent::Error(RuntimeError::ShutDown));
                let step = match event {
                    TextEvent::Error(error) => {
                        // The other choices go with it.
                        self.choices.iter_mut().for_each(|c| c.stream = None);
                        return Poll::Ready(Some(Err(error.into())));
                    }
                    TextEvent::Piece { text, token } => {
                        if token.is_some() {
                            choice.tick(&self.series, self.arrived);
                        }
                        let begins = choice.length;
                        choice.shown += text.len();
                        choice.length = choice.shown + still_held;
                        choice.held.extend(token.filter(|_| self.logprobs).map(|token| (begins, token)));
                        if text.is_empty() {
                            continue;
                        }
                        let out = choice.held.partition_point(|(begins, _)| *begins < choice.shown);
                        choice.undecided.extend(choice.held.drain(..out).map(|(_, token)| token));
                        let (text, calls) = match &mut choice.calls {
                            None => (text, Vec::new()),
                            Some(calls) => calls.push(&text),
                        };
                        if choice.calls.as_ref().is_some_and(Calls::complete)
                            && let Some(stream) = &choice.stream
                        {
                            stream.control().finish(Reason::Interrupted);
                        }
                        if text.is_empty() && calls.is_empty() {
                            continue;
                        }
                        Step::Piece { index, text, calls, tokens: std::mem::take(&mut choice.undecided) }
                    }
                    TextEvent::Done(done) => {
                        (choice.stream, choice.usage) = (None, done.usage);
                        let mut tokens = std::mem::take(&mut choice.undecided);
                        if !matches!(done.reason, Reason::StopString { .. }) {
                            tokens.extend(choice.held.drain(..).map(|(_, token)| token));
                        }
                        let (text, calls, end) = match choice.calls.take() {
                            None => (String::new(), Vec::new(), None),
                            Some(reading) => {
                                let (text, calls, end) = reading.finish();
                                (text, calls, Some(end))
                            }
                        };
                        let done = Step::Done { index, done, calls: end };
                        if text.is_empty() && calls.is_empty() && tokens.is_empty() {
                            done
                        } else {
                            self.ready.push_back(Ok(done));
                            Step::Piece { index, text, calls, tokens }
                        }
                    }
                };
                self.turn = index + 1;
                return Poll::Ready(Some(Ok(step)));
            }
        }
        if self.choices.iter().all(|c| c.stream.is_none()) { Poll::Ready(None) } else { Poll::Pending }
    }
}

impl Choice {
    /// A token has come.
    fn tick(&mut self, series: &Series, arrived: Instant) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            None => series.ttft.observe(now - arrived),
            Some(last) => series.inter_token.observe(now - last),
        }
    }
}
