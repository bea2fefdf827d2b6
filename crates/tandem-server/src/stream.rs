//! An answer as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tandem_model::Tokenizer;

use crate::answer::{Answer, Step};
use crate::calls::Call;
use crate::metrics::Outcome;
use crate::reply::{Grown, Head, usage_json};
use crate::request::Ask;

/// Turns the steps of an answer into events.
struct Events {
    /// `None` after its end.
    answer: Option<Answer>,
    head: Head,
    tokenizer: Tokenizer,
    choices: Vec<Choice>,
    logprobs: bool,
    include_usage: bool,
    ready: VecDeque<String>,
}

#[derive(Default, Clone)]
struct Choice {
    begun: bool,
    /// Characters so far.
    offset: usize,
}

/// The response whose body streams `answer`.
pub(crate) fn response(answer: Answer, head: Head, tokenizer: Tokenizer, ask: &Ask) -> Response {
    let events = Events {
        choices: vec![Choice::default(); answer.choices()],
        answer: Some(answer),
        head,
        tokenizer,
        logprobs: ask.logprobs.is_some(),
        include_usage: ask.include_usage,
        ready: VecDeque::new(),
    };
    let stream = futures_util::stream::unfold(events, |mut events| async move {
        let data = events.next().await?;
        Some((Ok::<_, Infallible>(Event::default().data(data)), events))
    });
    // Comments while nothing comes keep proxies from closing the connection.
    Sse::new(stream).keep_alive(KeepAlive::default()).into_response()
}

impl Events {
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            match self.answer.as_mut()?.next().await {
                Some(Ok(Step::Piece { index, text, calls, tokens })) => {
                    let mut logprobs = if self.logprobs {
                        let offset = &mut self.choices[index].offset;
                        self.head.logprobs(&tokens, &self.tokenizer, offset)
                    } else {
                        Value::Null
                    };
                    if !text.is_empty() || calls.is_empty() {
                        self.piece(index, &Grown::Text(&text), logprobs.take());
                    }
                    for part in calls.iter().flat_map(Call::parts) {
                        self.piece(index, &Grown::Call(part), logprobs.take());
                    }
                }
                Some(Ok(Step::Done { index, done, calls })) => {
                    if !self.choices[index].begun {
                        self.piece(index, &Grown::Text(""), Value::Null);
                    }
                    let last = self.head.last(index, (&done, calls));
                    self.chunk(&[last], Value::Null);
                }
                Some(Err(error)) => {
                    self.ready.push_back(error.json().to_string());
                    self.answer.take()?.ongoing.end(Outcome::Failed);
                }
                None => {
                    let answer = self.answer.take()?;
                    if self.include_usage {
                        self.chunk(&[], usage_json(&answer.usage()));
                    }
                    self.ready.push_back("[DONE]".to_owned());
                    answer.complete();
                }
            }
        }
    }

    fn piece(&mut self, index: usize, grown: &Grown, logprobs: Value) {
        let first = !std::mem::replace(&mut self.choices[index].begun, true);
        let piece = self.head.piece(index, grown, first, logprobs);
        self.chunk(&[piece], Value::Null);
    }

    fn chunk(&mut self, choices: &[Value], usage: Value) {
        let usage = self.include_usage.then_some(usage);
        self.ready.push_back(self.head.chunk(choices, usage).to_string());
    }
}
