//! Tool calls in a model's text.
//!
//! A model asks for a tool in the form that its chat template taught it. [`CallFormat::find`] recognises the form by
//! what the template and the vocabulary show, never by a model's name; [`CallParser`] takes calls out of a text that
//! arrives in pieces; and [`CallFormat::write`] puts them into the history of a template that has no place for them.

mod parser;
mod written;

#[cfg(test)]
mod tests;

use serde_json::Value;

pub use parser::{CallParser, CallPiece};

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Its name, where the model gave it one (Mistral's do).
    pub id: Option<String>,
    /// The tool.
    pub name: String,
    /// Its arguments: the text of a JSON object, as the model wrote it.
    pub arguments: String,
}

/// How a family of models writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallFormat {
    /// Each begins calls, wherever it stands. What follows is JSON; a bracket at its end is already part of that.
    opens: &'static [&'static str],
    /// Ends calls; often left out by models, and by some families always.
    close: Option<&'static str>,
    /// Other marks inside calls.
    inner: &'static [&'static str],
    /// The name of a call's arguments, as this family writes it. Both are read.
    arguments: &'static str,
    /// A second JSON value may follow the first.
    many: bool,
    /// A text that begins with a JSON object is a call, if it names one of the request's tools.
    bare: bool,
}

/// Hermes, Qwen, Granite 4, SmolLM 3: `<tool_call>{"name": .., "arguments": ..}</tool_call>`.
const TAGGED: CallFormat = CallFormat {
    opens: &["<tool_call>"],
    close: Some("</tool_call>"),
    inner: &[],
    arguments: "arguments",
    many: true,
    bare: false,
};

/// Apriel, MiniMax M1: all calls between one pair of tags.
const TAGGED_TOGETHER: CallFormat =
    CallFormat { opens: &["<tool_calls>"], close: Some("</tool_calls>"), ..TAGGED };

/// Nemotron: the same in capitals.
const TAGGED_LOUDLY: CallFormat = CallFormat { opens: &["<TOOLCALL>"], close: Some("</TOOLCALL>"), ..TAGGED };

/// Granite 3, Phi 4 mini, Firefunction: a list behind a token or a word.
const LISTED: CallFormat = CallFormat {
    opens: &["<|tool_call|>", "functools["],
    close: Some("<|/tool_call|>"),
    many: false,
    ..TAGGED
};

/// Mistral: a list behind a token, or, in newer models, that token before each `name[ARGS]{..}`.
const MISTRAL: CallFormat = CallFormat {
    opens: &["[TOOL_CALLS]"],
    close: None,
    inner: &["[CALL_ID]", "[ARGS]"],
    many: false,
    ..TAGGED
};

/// Llama 3: a JSON object and nothing else, or anywhere behind a token.
const LLAMA: CallFormat =
    CallFormat { opens: &["<|python_tag|>"], close: None, arguments: "parameters", bare: true, ..TAGGED };

/// Inside `<tool_call>` some families do not write JSON, but this.
const NOT_JSON: [&str; 5] = ["<function=", "<invoke", "<arg_key>", "<parameter", "<tool_sep>"];

impl CallFormat {
    /// The form that a chat template teaches; `has_token` says whether the vocabulary has a token of that spelling,
    /// which counts where the template itself shows none. `None` if it is no form that is known here.
    pub fn find(template: &str, has_token: impl Fn(&str) -> bool) -> Option<Self> {
        if NOT_JSON.iter().any(|mark| template.contains(mark)) {
            return None;
        }
        let known = [MISTRAL, TAGGED_TOGETHER, TAGGED, TAGGED_LOUDLY, LISTED];
        let shown = |format: &CallFormat| {
            format.opens.iter().any(|open| template.contains(open.trim_end_matches('[')))
        };
        let llama =
            || ["\"parameters\": ", "tool_calls", "ipython"].iter().all(|word| template.contains(word));
        let tokens = |format: &CallFormat| format.opens.iter().any(|open| has_token(open));
        known
            .into_iter()
            .find(shown)
            .or_else(|| (shown(&LLAMA) || llama()).then_some(LLAMA))
            .or_else(|| known.into_iter().find(tokens))
    }

    /// The marks around calls. Where one is a special token, it must not be left out of the text.
    pub fn marks(&self) -> impl Iterator<Item = &'static str> {
        self.opens.iter().chain(self.inner).copied().chain(self.close)
    }

    /// Calls as this family writes them.
    pub fn write(&self, calls: &[ToolCall]) -> String {
        let json = |call: &ToolCall| {
            let id = call.id.as_ref().filter(|_| *self == MISTRAL);
            let id = id.map(|id| format!(", \"id\": {}", Value::from(id.as_str()))).unwrap_or_default();
            let name = Value::from(call.name.as_str());
            format!("{{\"name\": {name}, \"{}\": {}{id}}}", self.arguments, call.arguments)
        };
        let calls: Vec<String> = calls.iter().map(json).collect();
        let open = self.opens[0];
        match self.close {
            _ if !self.many => format!("{open}[{}]", calls.join(", ")),
            Some(close) => {
                let tagged: Vec<String> =
                    calls.iter().map(|call| format!("{open}\n{call}\n{close}")).collect();
                tagged.join("\n")
            }
            None => calls.join("; "),
        }
    }
}
