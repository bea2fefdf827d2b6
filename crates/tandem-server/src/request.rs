//! Bodies of requests, read by pure functions that are safe on any input.
//!
//! Every field that is accepted is honoured, and any other is refused by name: an option that changes nothing is worse
//! than an error. The one exception is `user`, which by OpenAI's definition changes no answer.

use serde_json::Value;
use tandem_engine::SampleSpec;
use tandem_model::Message;

use crate::ApiError;
use crate::fields::{Fields, wrong};

mod messages;
mod tier;
mod tools;

pub use tier::Tier;
pub use tools::Tools;

/// Most answers that one request may ask for.
const MAX_CHOICES: u64 = 128;

/// Most stop strings, as OpenAI has it.
const MAX_STOPS: usize = 4;

/// Longest stop string in bytes.
const MAX_STOP_BYTES: usize = 1024;

/// Most likeliest tokens reported beside the chosen one.
const MAX_TOP_LOGPROBS: u64 = 20;

/// Most tokens of `/v1/completions` where the request does not say, as OpenAI has it.
const COMPLETION_TOKENS: usize = 16;

/// What `/v1/chat/completions` is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    /// The conversation; at least one message.
    pub messages: Vec<Message>,
    /// How to answer it.
    pub ask: Ask,
}

/// What `/v1/completions` is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// What to continue; at least one.
    pub prompts: Vec<Prompt>,
    /// How to.
    pub ask: Ask,
}

/// A text to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Still to be encoded.
    Text(String),
    /// As tokens.
    Tokens(Vec<u32>),
}

/// What both have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// The model; `None` where the request names none.
    pub model: Option<String>,
    /// The engine; `None` leaves the choice to the server.
    pub engine: Option<String>,
    /// Choices for each prompt.
    pub n: usize,
    /// Most tokens of each choice; `None` goes on until the context is full.
    pub max_tokens: Option<usize>,
    /// Texts that end a choice.
    pub stop: Vec<String>,
    /// Go on when the model ends.
    pub ignore_eos: bool,
    /// Log-probabilities, with those of so many likeliest tokens.
    pub logprobs: Option<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Answer in events.
    pub stream: bool,
    /// A last event with the usage.
    pub include_usage: bool,
    /// Before or after whom it is answered; `None` where the request does not say.
    pub tier: Option<Tier>,
    /// What the model may call.
    pub tools: Option<Tools>,
}

/// Parameters of a [`SampleSpec`]. `None` is the model's default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Share of probability that stays.
    pub top_p: Option<f32>,
    /// Tokens that stay.
    pub top_k: Option<u32>,
    /// Least share of the likeliest that stays.
    pub min_p: Option<f32>,
    /// Over prompt and answer.
    pub repetition_penalty: Option<f32>,
    /// Over the answer.
    pub presence_penalty: Option<f32>,
    /// Over the answer, times the count.
    pub frequency_penalty: Option<f32>,
    /// Added to logits.
    pub logit_bias: Option<Vec<(u32, f32)>>,
    /// Key of the randomness.
    pub seed: Option<u64>,
}

impl Ask {
    /// How choice `index` of a prompt chooses its tokens. Each has a seed of its own, the first the request's.
    pub fn sample(&self, defaults: &SampleSpec, index: usize) -> SampleSpec {
        let said = &self.sampling;
        SampleSpec {
            temperature: said.temperature.unwrap_or(defaults.temperature),
            top_p: said.top_p.unwrap_or(defaults.top_p),
            top_k: said.top_k.unwrap_or(defaults.top_k),
            min_p: said.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: said.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: said.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: said.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            logit_bias: said.logit_bias.clone().unwrap_or_else(|| defaults.logit_bias.clone()),
            seed: said.seed.unwrap_or(defaults.seed).wrapping_add(index as u64),
            top_logprobs: self.logprobs,
            generated_from: 0,
        }
    }

    /// Takes the fields of both endpoints.
    fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let stream = fields.flag("stream")?.unwrap_or(false);
        let include_usage = match fields.object("stream_options")? {
            None => false,
            Some(_) if !stream => {
                return Err(ApiError::field("stream_options", "`stream_options` needs `stream`: true"));
            }
            Some(mut options) => {
                let include_usage = options.flag("include_usage")?.unwrap_or(false);
                options.finish()?;
                include_usage
            }
        };
        fields.string("user")?;
        Ok(Self {
            model: fields.string("model")?,
            engine: fields.string("engine")?,
            n: fields.integer("n", 1, MAX_CHOICES)?.unwrap_or(1) as usize,
            max_tokens: fields.integer("max_tokens", 1, u64::from(u32::MAX))?.map(|n| n as usize),
            stop: stop(fields)?,
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            logprobs: None,
            sampling: Sampling::take(fields)?,
            stream,
            include_usage,
            tier: Tier::take(fields)?,
            tools: None,
        })
    }
}

impl Sampling {
    fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        Ok(Self {
            temperature: fields.number("temperature")?,
            top_p: fields.number("top_p")?,
            top_k: fields.integer("top_k", 0, u64::from(u32::MAX))?.map(|k| k as u32),
            min_p: fields.number("min_p")?,
            repetition_penalty: fields.number("repetition_penalty")?,
            presence_penalty: fields.number("presence_penalty")?,
            frequency_penalty: fields.number("frequency_penalty")?,
            logit_bias: logit_bias(fields)?,
            seed: seed(fields)?,
        })
    }
}

/// Reads the body of `/v1/chat/completions`.
///
/// # Errors
/// The first field that is missing, wrong or not supported, by name.
pub fn chat(body: &[u8]) -> Result<Chat, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut ask = Ask::take(&mut fields)?;
    let newer = fields.integer("max_completion_tokens", 1, u64::from(u32::MAX))?.map(|n| n as usize);
    if let (Some(older), Some(newer)) = (ask.max_tokens, newer)
        && older != newer
    {
        let message = format!("`max_tokens` is {older} and `max_completion_tokens` {newer}. hint: give one");
        return Err(ApiError::field("max_tokens", message));
    }
    ask.max_tokens = newer.or(ask.max_tokens);

    let logprobs = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
    if top.is_some() && !logprobs {
        return Err(ApiError::field("top_logprobs", "`top_logprobs` needs `logprobs`: true"));
    }
    ask.logprobs = logprobs.then(|| top.unwrap_or(0) as u32);

    if let Some(mut format) = fields.object("response_format")? {
        let kind = format.string("type")?;
        if kind.as_deref() != Some("text") {
            let message =
                "`response_format` other than {\"type\": \"text\"} is not supported. hint: leave it out";
            let error = ApiError::field("response_format", message);
            return Err(ApiError { code: Some("unsupported_parameter"), ..error });
        }
        format.finish()?;
    }

    ask.tools = Tools::take(&mut fields)?;
    let messages = fields.array("messages")?.unwrap_or_default();
    fields.finish()?;
    if messages.is_empty() {
        return Err(ApiError::field("messages", "`messages` must hold at least one message"));
    }
    Ok(Chat { messages: messages::read(messages)?, ask })
}

/// Reads the body of `/v1/completions`.
///
/// # Errors
/// As [`chat`].
pub fn completion(body: &[u8]) -> Result<Completion, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut ask = Ask::take(&mut fields)?;
    ask.max_tokens = ask.max_tokens.or(Some(COMPLETION_TOKENS));
    ask.logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)?.map(|n| n as u32);
    if fields.flag("echo")? == Some(true) {
        return Err(ApiError::field("echo", "`echo` is not supported. hint: leave it out"));
    }
    let best_of = fields.integer("best_of", 1, MAX_CHOICES)?;
    if best_of.is_some_and(|best_of| best_of != ask.n as u64) {
        return Err(ApiError::field(
            "best_of",
            "`best_of` other than `n` is not supported. hint: leave it out",
        ));
    }
    let prompts = match fields.take("prompt") {
        None => return Err(ApiError::field("prompt", "`prompt` is missing")),
        Some(prompt) => prompts(prompt)?,
    };
    fields.finish()?;
    let choices = prompts.len() * ask.n;
    if choices as u64 > MAX_CHOICES {
        let message = format!(
            "{} prompts with `n` = {} are {choices} choices; a request may have {MAX_CHOICES}",
            prompts.len(),
            ask.n
        );
        return Err(ApiError::field("n", message));
    }
    Ok(Completion { prompts, ask })
}

/// What `/v1/route` is asked about.
#[derive(Debug, Clone, PartialEq)]
pub enum Question {
    /// A conversation to answer.
    Chat(Chat),
    /// Texts to continue.
    Completion(Completion),
}

/// Reads the body of `/v1/route`, which is one of the bodies above: one with `prompt` of `/v1/completions`, any other of
/// `/v1/chat/completions`.
///
/// # Errors
/// As [`chat`].
pub fn question(body: &[u8]) -> Result<Question, ApiError> {
    if Fields::parse(body)?.take("prompt").is_some() {
        completion(body).map(Question::Completion)
    } else {
        chat(body).map(Question::Chat)
    }
}

/// What `/tokenize` is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokenize {
    /// The model; `None` where the request names none.
    pub model: Option<String>,
    /// The text.
    pub content: String,
    /// Put the model's special tokens around it.
    pub add_special: bool,
}

/// Reads the body of `/tokenize`.
///
/// # Errors
/// As [`chat`].
pub fn tokenize(body: &[u8]) -> Result<Tokenize, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.string("model")?;
    let content = fields.string("content")?;
    let add_special = fields.flag("add_special")?.unwrap_or(false);
    fields.finish()?;
    let content = content.ok_or_else(|| ApiError::field("content", "`content` is missing"))?;
    Ok(Tokenize { model, content, add_special })
}

/// What `/detokenize` is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detokenize {
    /// The model; `None` where the request names none.
    pub model: Option<String>,
    /// Ids of tokens.
    pub tokens: Vec<u32>,
}

/// Reads the body of `/detokenize`.
///
/// # Errors
/// As [`chat`].
pub fn detokenize(body: &[u8]) -> Result<Detokenize, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.string("model")?;
    let tokens = fields.array("tokens")?;
    fields.finish()?;
    let tokens = tokens.ok_or_else(|| ApiError::field("tokens", "`tokens` is missing"))?;
    Ok(Detokenize { model, tokens: token_ids(tokens, "tokens")? })
}

fn prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    let prompts = match value {
        Value::String(text) => vec![Prompt::Text(text)],
        Value::Array(items) if items.first().is_some_and(Value::is_number) => {
            vec![Prompt::Tokens(token_ids(items, "prompt")?)]
        }
        Value::Array(items) => {
            let prompt = |(i, item)| match item {
                Value::String(text) => Ok(Prompt::Text(text)),
                Value::Array(ids) => Ok(Prompt::Tokens(token_ids(ids, &format!("prompt[{i}]"))?)),
                other => Err(wrong(format!("prompt[{i}]"), "a string or an array of token ids", &other)),
            };
            items.into_iter().enumerate().map(prompt).collect::<Result<_, _>>()?
        }
        other => return Err(wrong("prompt".to_owned(), "a string or an array", &other)),
    };
    if prompts.is_empty() {
        return Err(ApiError::field("prompt", "`prompt` is an empty array"));
    }
    Ok(prompts)
}

fn token_ids(items: Vec<Value>, path: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(i, item): (usize, Value)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| wrong(format!("{path}[{i}]"), "a token id", &item))
    };
    items.into_iter().enumerate().map(id).collect()
}

fn stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let stops = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(items)) => {
            let text = |(i, item)| match item {
                Value::String(text) => Ok(text),
                other => Err(wrong(format!("stop[{i}]"), "a string", &other)),
            };
            items.into_iter().enumerate().map(text).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong("stop".to_owned(), "a string or an array of strings", &other)),
    };
    if stops.len() > MAX_STOPS {
        let message = format!("`stop` holds {} strings; there may be {MAX_STOPS}", stops.len());
        return Err(ApiError::field("stop", message));
    }
    for text in &stops {
        if text.is_empty() {
            return Err(ApiError::field("stop", "`stop` holds an empty string. hint: leave it out"));
        }
        if text.len() > MAX_STOP_BYTES {
            let message =
                format!("`stop` holds a string of {} bytes; it may have {MAX_STOP_BYTES}", text.len());
            return Err(ApiError::field("stop", message));
        }
    }
    Ok(stops)
}

fn logit_bias(fields: &mut Fields) -> Result<Option<Vec<(u32, f32)>>, ApiError> {
    let Some(mut biases) = fields.object("logit_bias")? else { return Ok(None) };
    let bias = |(id, value): (String, Value)| {
        let Ok(token) = id.parse::<u32>() else {
            return Err(ApiError::field(
                "logit_bias",
                "`logit_bias` maps token ids, such as \"42\", to numbers",
            ));
        };
        match value.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((token, bias as f32)),
            _ => Err(wrong(format!("logit_bias.{token}"), "a number from -100 to 100", &value)),
        }
    };
    biases.rest().into_iter().map(bias).collect::<Result<_, _>>().map(Some)
}

/// Any whole number of 64 bits; a negative one stands for its bits.
fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| wrong("seed".to_owned(), "a whole number of 64 bits", &value))
}

#[cfg(test)]
mod tests;
