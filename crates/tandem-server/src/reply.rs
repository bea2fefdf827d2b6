//! Answers in the shapes of OpenAI's two endpoints. What OpenAI has no field for stands under `tandem`.

use serde_json::{Map, Value, json};
use tandem_model::Tokenizer;
use tandem_runtime::{Done, Reason, Token, Usage};

use crate::calls::{Call, CallsEnd};
use crate::request::Tier;

/// Which shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// How a choice ended, and what became of its calls.
pub(crate) type End<'a> = (&'a Done, Option<CallsEnd>);

/// What a streamed choice grew by.
#[derive(Debug)]
pub(crate) enum Grown<'a> {
    Text(&'a str),
    /// As [`Call::parts`] gives it.
    Call(Value),
}

/// What every object of an answer begins with.
#[derive(Debug)]
pub(crate) struct Head {
    pub endpoint: Endpoint,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
    /// Where the request names one.
    pub tier: Option<Tier>,
}

impl Head {
    /// The answer as one object.
    pub fn whole(&self, choices: &[Value], usage: &Usage) -> Value {
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion",
            Endpoint::Completion => "text_completion",
        };
        let mut whole = self.object(object, choices);
        whole.insert("usage".to_owned(), usage_json(usage));
        whole.into()
    }

    /// A piece of a streamed answer. `usage` is null in all but the last where it was asked for, else not there.
    pub fn chunk(&self, choices: &[Value], usage: Option<Value>) -> Value {
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completion => "text_completion",
        };
        let mut chunk = self.object(object, choices);
        chunk.extend(usage.map(|usage| ("usage".to_owned(), usage)));
        chunk.into()
    }

    /// What both begin with.
    fn object(&self, object: &str, choices: &[Value]) -> Map<String, Value> {
        let mut fields = Map::from_iter([
            ("id".to_owned(), self.id.clone().into()),
            ("object".to_owned(), object.into()),
            ("created".to_owned(), self.created.into()),
            ("model".to_owned(), self.model.clone().into()),
            ("choices".to_owned(), choices.into()),
        ]);
        fields.extend(self.tier.map(|tier| ("service_tier".to_owned(), tier.name().into())));
        fields
    }

    /// A complete choice: what was said and called, and how it ended.
    pub fn choice(&self, index: usize, said: (&str, &[Call]), logprobs: &Value, end: End) -> Value {
        let mut choice = json!({ "index": index });
        let (text, calls) = said;
        match self.endpoint {
            Endpoint::Chat => {
                choice["message"] = json!({ "role": "assistant", "content": text, "refusal": null });
                if !calls.is_empty() {
                    choice["message"]["content"] = content(text);
                    choice["message"]["tool_calls"] = calls.iter().map(Call::json).collect();
                }
            }
            Endpoint::Completion => choice["text"] = text.into(),
        }
        choice["logprobs"] = logprobs.clone();
        put_end(&mut choice, end);
        choice
    }

    /// What a choice grew by: text, or a part of a call. `first` begins it.
    pub fn piece(&self, index: usize, grown: &Grown, first: bool, logprobs: Value) -> Value {
        let mut choice = json!({ "index": index });
        match self.endpoint {
            Endpoint::Chat => {
                let mut delta = match grown {
                    Grown::Text(text) => json!({ "content": text }),
                    Grown::Call(part) => json!({ "tool_calls": [part] }),
                };
                if first {
                    delta["role"] = "assistant".into();
                    if matches!(grown, Grown::Call(_)) {
                        delta["content"] = Value::Null;
                    }
                }
                choice["delta"] = delta;
            }
            Endpoint::Completion => {
                choice["text"] = match grown {
                    Grown::Text(text) => (*text).into(),
                    Grown::Call(_) => "".into(),
                }
            }
        }
        choice["logprobs"] = logprobs;
        choice["finish_reason"] = Value::Null;
        choice
    }

    /// The end of a streamed choice.
    pub fn last(&self, index: usize, end: End) -> Value {
        let mut choice = json!({ "index": index });
        match self.endpoint {
            Endpoint::Chat => choice["delta"] = json!({}),
            Endpoint::Completion => choice["text"] = "".into(),
        }
        choice["logprobs"] = Value::Null;
        put_end(&mut choice, end);
        choice
    }

    /// Log-probabilities of tokens; `offset` is where their text begins in the choice, in characters, and is moved on.
    pub fn logprobs(&self, tokens: &[Token], tokenizer: &Tokenizer, offset: &mut usize) -> Value {
        match self.endpoint {
            Endpoint::Chat => {
                let entries: Vec<Value> = tokens.iter().map(|t| chat_entry(t, tokenizer)).collect();
                json!({ "content": entries, "refusal": null })
            }
            Endpoint::Completion => {
                let (mut texts, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
                for token in tokens {
                    let text = text_of(token.id, tokenizer);
                    offsets.push(*offset);
                    *offset += text.chars().count();
                    texts.push(text);
                    logprobs.push(finite(token.logprob.unwrap_or(f32::NEG_INFINITY)));
                    let top = token.top.iter().map(|&(id, p)| (text_of(id, tokenizer), finite(p).into()));
                    tops.push(top.collect::<Map<String, Value>>());
                }
                json!({ "tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets })
            }
        }
    }
}

/// Tokens of a request.
pub(crate) fn usage_json(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": { "cached_tokens": usage.cached },
    })
}

/// What stands beside calls: nothing, rather than an empty text.
fn content(text: &str) -> Value {
    if text.is_empty() { Value::Null } else { text.into() }
}

fn put_end(choice: &mut Value, (done, calls): End) {
    choice["finish_reason"] = match &done.reason {
        Reason::Stop { .. } | Reason::StopString { .. } | Reason::Interrupted
            if calls.is_some_and(|calls| calls.any) =>
        {
            "tool_calls"
        }
        Reason::Stop { .. } | Reason::StopString { .. } => "stop",
        Reason::Length | Reason::Interrupted => "length",
    }
    .into();
    let stop = match &done.reason {
        Reason::StopString { text } => Some(text),
        _ => None,
    };
    choice["tandem"] = json!({
        "reason": done.reason.name(), "stop": stop, "timing": done.timing, "route": done.route,
    });
    if let Some(calls) = calls {
        choice["tandem"]["tool_parse_error"] = calls.failed.into();
    }
}

fn chat_entry(token: &Token, tokenizer: &Tokenizer) -> Value {
    let entry = |id, logprob| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        json!({ "token": text_of(id, tokenizer), "logprob": finite(logprob), "bytes": bytes })
    };
    let mut chosen = entry(token.id, token.logprob.unwrap_or(f32::NEG_INFINITY));
    chosen["top_logprobs"] = token.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
    chosen
}

fn text_of(id: u32, tokenizer: &Tokenizer) -> String {
    String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default()).into_owned()
}

/// JSON has no infinity; OpenAI writes this for what cannot happen.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
