//! Chat templates: Jinja programs that turn messages into the text a model was trained on.
//!
//! They are written against transformers' `apply_chat_template`, that is against Python's jinja2 with a few additions;
//! `minijinja` runs them; `python.rs` and `filters.rs` supply what it does otherwise, and what neither can do is refused. A template comes with the checkpoint and is
//! not trusted: fuel bounds its time and memory.

mod filters;
mod json;
mod python;
mod source;

use std::collections::BTreeMap;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::ModelError;

/// Work one rendering may do, in minijinja's units: about one per instruction and per 64 bytes of data. A conversation
/// of 128 thousand tokens takes well under a tenth of it.
const FUEL: u64 = 10_000_000;

/// Longest text a template may render, in bytes.
const MAX_OUTPUT: usize = 64 << 20;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// A string, a list of parts as the OpenAI API has them, or null. Absent and null are two things to a template.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub content: Option<Value>,
    /// Whatever else the template may look at (`name`, `tool_calls`, `reasoning_content`).
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A plain message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(Value::String(content.into())), extra: Map::new() }
    }
}

/// A key that is there, null or not.
fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// What a rendering depends on besides the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// End with the header of an assistant's message, for the model to fill.
    pub add_generation_prompt: bool,
    /// Tools as JSON schemas; `None` if the request has none.
    pub tools: Option<Vec<Value>>,
    /// Further variables (`enable_thinking`). They win over the others.
    pub extra: Map<String, Value>,
    /// The date that `strftime_now` prints, in local time; `None` for the present.
    pub now: Option<SystemTime>,
}

/// A checkpoint's templates.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatTemplate {
    default: Option<String>,
    named: BTreeMap<String, String>,
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// A single template. `special_tokens` are its variables `bos_token`, `eos_token` and so on.
    ///
    /// A template that does not parse is reported by [`ChatTemplate::render`]: the model can be used without it.
    pub fn new(source: impl Into<String>, special_tokens: BTreeMap<String, String>) -> Self {
        Self { default: Some(source.into()), named: BTreeMap::new(), special_tokens }
    }

    /// Several templates by name, as some checkpoints have (`default`, `tool_use`).
    pub fn with_named(mut named: BTreeMap<String, String>, special_tokens: BTreeMap<String, String>) -> Self {
        Self { default: named.remove("default"), named, special_tokens }
    }

    /// The template used for a request with or without tools.
    ///
    /// # Errors
    /// [`ModelError::Template`] if none of the checkpoint's templates fits.
    pub fn source(&self, tools: bool) -> Result<&str, ModelError> {
        let tool_use = self.named.get("tool_use").filter(|_| tools);
        tool_use.or(self.default.as_ref()).map(String::as_str).ok_or_else(|| {
            let names: Vec<&str> = self.named.keys().map(String::as_str).collect();
            ModelError::Template(format!(
                "the checkpoint has none called `default`, only {}. hint: give the prompt as it is (--raw)",
                names.join(", ")
            ))
        })
    }

    /// The prompt for `messages`.
    ///
    /// # Errors
    /// [`ModelError::Template`] with the template's own message if it raises one (many refuse an order of roles).
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ModelError> {
        let source = self.source(options.tools.is_some())?;
        let source = source::prepare(source).map_err(|error| describe(&error))?;
        let environment = environment(options.now);
        let template = environment.template_from_str(&source).map_err(|error| describe(&error))?;

        let mut variables = BTreeMap::<&str, minijinja::Value>::new();
        for (name, token) in &self.special_tokens {
            variables.insert(name, token.as_str().into());
        }
        let messages: Vec<Map<String, Value>> = messages.iter().map(as_templates_see_it).collect();
        variables.insert("messages", minijinja::Value::from(Serde(messages)));
        variables.insert("add_generation_prompt", options.add_generation_prompt.into());
        variables.insert("tools", minijinja::Value::from(Serde(&options.tools)));
        variables.insert("documents", minijinja::Value::from(()));
        for (name, value) in &options.extra {
            variables.insert(name, minijinja::Value::from(Serde(value)));
        }
        let mut output = Limited { bytes: Vec::new() };
        template
            .render_captured_to(minijinja::Value::from(variables), &mut output)
            .map_err(|error| describe(&error))?;
        String::from_utf8(output.bytes).map_err(|error| ModelError::Template(error.to_string()))
    }
}

/// A message's keys. As in transformers, its reasoning is there under each name that templates read.
fn as_templates_see_it(message: &Message) -> Map<String, Value> {
    let mut own = Map::from_iter([("role".to_owned(), Value::String(message.role.clone()))]);
    own.extend(message.content.clone().map(|content| ("content".to_owned(), content)));
    own.extend(message.extra.clone());
    let mut names = ["reasoning_content", "thinking", "reasoning"].iter();
    let Some(reasoning) = names.find_map(|name| own.get(*name).filter(|value| !value.is_null()).cloned())
    else {
        return own;
    };
    let mut all = Map::from_iter([("thinking".to_owned(), reasoning.clone())]);
    all.extend(own);
    all.insert("reasoning_content".to_owned(), reasoning);
    all
}

/// As transformers' `_compile_jinja_template` sets it up.
fn environment(now: Option<SystemTime>) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    python::install(&mut environment, now);
    filters::install(&mut environment);
    environment
}

fn describe(error: &minijinja::Error) -> ModelError {
    let what = match (error.kind(), error.detail()) {
        (python::RAISED, Some(message)) if message.starts_with(python::RAISE_MARK) => {
            return ModelError::Template(format!("it refuses: {}", &message[python::RAISE_MARK.len()..]));
        }
        (minijinja::ErrorKind::OutOfFuel, _) => "it does too much work (an endless loop?)".to_owned(),
        (minijinja::ErrorKind::WriteFailure, _) => format!("it renders more than {} MiB", MAX_OUTPUT >> 20),
        (kind, detail) => format!("{kind}: {}", detail.unwrap_or("no detail")),
    };
    let line = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    ModelError::Template(format!(
        "{what}{line}. hint: give the prompt as it is (--raw), or correct the template"
    ))
}

/// Output that refuses to grow without bound.
struct Limited {
    bytes: Vec<u8>,
}

impl std::io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
