//! An answer as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tandem_model::Tokenizer;

use crate::answer::{Answer, Step};
use crate::metrics::Outcome;
use crate::reply::{Head, usage_json};
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
                Some(Ok(Step::Piece { index, text, tokens })) => {
                    let choice = &mut self.choices[index];
                    let logprobs = if self.logprobs {
                        self.head.logprobs(&tokens, &self.tokenizer, &mut choice.offset)
                    } else {
                        Value::Null
                    };
                    let first = !std::mem::replace(&mut choice.begun, true);
                    let piece = self.head.piece(index, &text, first, logprobs);
                    self.chunk(&[piece], Value::Null);
                }
                Some(Ok(Step::Done { index, done })) => {
                    if !std::mem::replace(&mut self.choices[index].begun, true) {
                        let empty = self.head.piece(index, "", true, Value::Null);
                        self.chunk(&[empty], Value::Null);
                    }
                    let last = self.head.last(index, &done);
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

    fn chunk(&mut self, choices: &[Value], usage: Value) {
        let usage = self.include_usage.then_some(usage);
        self.ready.push_back(self.head.chunk(choices, usage).to_string());
    }
}
