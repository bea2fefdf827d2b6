//! Calls of tools in an answer, and in the history of a conversation.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tandem_model::{CallFormat, CallParser, CallPiece, Message, RenderOptions, ToolCall};

use crate::ApiError;
use crate::request::Tools;

/// A call as clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    /// Its place among the calls of its choice.
    index: usize,
    id: String,
    name: String,
    arguments: String,
}

impl Call {
    /// As a whole message has it.
    pub fn json(&self) -> Value {
        let function = json!({ "name": self.name, "arguments": self.arguments });
        json!({ "id": self.id, "type": "function", "function": function })
    }

    /// As a stream has it: the name first, then the arguments.
    pub fn parts(&self) -> [Value; 2] {
        let mut begin = json!({ "index": self.index });
        begin["id"] = self.id.as_str().into();
        begin["type"] = "function".into();
        begin["function"] = json!({ "name": self.name, "arguments": "" });
        [begin, json!({ "index": self.index, "function": { "arguments": self.arguments } })]
    }
}

/// What became of the calls of a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallsEnd {
    /// There are some.
    pub any: bool,
    /// Something began like a call and was none; it is part of the text.
    pub failed: bool,
}

/// Takes the calls out of the text of one choice.
#[derive(Debug)]
pub(crate) struct Calls {
    format: CallFormat,
    parser: CallParser,
    parallel: bool,
    /// Ids given so far.
    ids: Vec<String>,
}

impl Calls {
    pub fn new(format: CallFormat, tools: &Tools) -> Self {
        let parser = CallParser::new(format, tools.names().map(str::to_owned));
        Self { format, parser, parallel: tools.parallel, ids: Vec::new() }
    }

    /// Spellings of tokens that must not be left out of the text.
    pub fn marks(&self) -> impl Iterator<Item = &'static str> {
        self.format.marks()
    }

    /// Takes text, and gives what is text and what are calls of what is decided.
    pub fn push(&mut self, text: &str) -> (String, Vec<Call>) {
        if self.complete() {
            return (String::new(), Vec::new());
        }
        let pieces = self.parser.push(text);
        self.sort(pieces)
    }

    /// Whether there may be no more: what follows a call that must be the only one is dropped.
    pub fn complete(&self) -> bool {
        !self.parallel && !self.ids.is_empty()
    }

    /// The text has ended.
    pub fn finish(mut self) -> (String, Vec<Call>, CallsEnd) {
        let pieces = if self.complete() { Vec::new() } else { self.parser.finish() };
        let (text, calls) = self.sort(pieces);
        (text, calls, CallsEnd { any: !self.ids.is_empty(), failed: self.parser.failed() })
    }

    fn sort(&mut self, pieces: Vec<CallPiece>) -> (String, Vec<Call>) {
        let (mut text, mut calls) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                _ if self.complete() => {}
                CallPiece::Text(more) => text += &more,
                CallPiece::Call(ToolCall { id, name, arguments }) => {
                    let id = id.filter(|id| !self.ids.contains(id)).unwrap_or_else(new_id);
                    calls.push(Call { index: self.ids.len(), id: id.clone(), name, arguments });
                    self.ids.push(id);
                }
            }
        }
        (text, calls)
    }
}

/// Nine letters and digits, as the templates of Mistral want them; no two alike within this server's life.
fn new_id() -> String {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    const IDS: u64 = 62u64.pow(9);
    // Coprime to 62, so that counting by it visits every id before one comes again.
    const STRIDE: u64 = 7_046_029_254_386_353;
    static START: OnceLock<u64> = OnceLock::new();
    static GIVEN: AtomicU64 = AtomicU64::new(0);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64 % IDS);
    let given = u128::from(GIVEN.fetch_add(1, Ordering::Relaxed));
    let place = u128::from(*START.get_or_init(now)) + given * u128::from(STRIDE);
    let mut rest = (place % u128::from(IDS)) as u64;
    let mut id = String::with_capacity(9);
    for _ in 0..9 {
        id.push(char::from(DIGITS[(rest % 62) as usize]));
        rest /= 62;
    }
    id
}

/// What a template is given of tools beside `tools`: some families look for them elsewhere.
pub(crate) fn hand_on(
    messages: &mut Vec<Message>,
    template: &str,
    tools: &Tools,
    options: &mut RenderOptions,
) {
    options.tools = Some(tools.tools.clone());
    // Granite 3.3 has a name of its own for them.
    options.extra.insert("available_tools".to_owned(), tools.tools.clone().into());
    // Phi 4 mini wants the functions as a text, with the system message.
    if template.contains("message['tools']") {
        if messages.first().is_none_or(|message| message.role != "system") {
            messages.insert(0, Message::new("system", ""));
        }
        let functions: Vec<&Value> = tools.tools.iter().map(|tool| &tool["function"]).collect();
        messages[0].extra.insert("tools".to_owned(), json!(functions).to_string().into());
    }
}

/// Where a template has no place for calls of the past, they are put into the text as the model would have written them.
pub(crate) fn place(
    messages: &mut [Message],
    template: &str,
    format: Option<CallFormat>,
) -> Result<(), ApiError> {
    if template.contains("tool_calls") {
        return Ok(());
    }
    for (i, message) in messages.iter_mut().enumerate() {
        let Some(Value::Array(calls)) = message.extra.remove("tool_calls") else { continue };
        let Some(format) = format else {
            let path = format!("messages[{i}].tool_calls");
            let what =
                format!("`{path}`: the model's chat template has no place for calls. hint: leave them out");
            return Err(ApiError::field(path, what));
        };
        let call = |call: &Value| ToolCall {
            id: call["id"].as_str().map(str::to_owned),
            name: call["function"]["name"].as_str().unwrap_or_default().to_owned(),
            arguments: call["function"]["arguments"].to_string(),
        };
        let written = format.write(&calls.iter().map(call).collect::<Vec<_>>());
        let text = message.content.as_ref().and_then(Value::as_str).unwrap_or_default();
        let space = if text.is_empty() { "" } else { "\n" };
        message.content = Some(format!("{text}{space}{written}").into());
    }
    Ok(())
}
