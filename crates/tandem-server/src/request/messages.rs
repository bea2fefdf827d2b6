//! The messages of a conversation.

use serde_json::{Map, Value, json};
use tandem_model::Message;

use super::tools::only_functions;
use crate::ApiError;
use crate::fields::{Fields, wrong};

/// Reads the field `messages`.
pub(super) fn read(values: Vec<Value>) -> Result<Vec<Message>, ApiError> {
    let mut messages = Vec::with_capacity(values.len());
    // Ids of the calls that results may still answer.
    let mut asked = Vec::new();
    for (i, value) in values.into_iter().enumerate() {
        messages.push(message(value, format!("messages[{i}]"), &mut asked)?);
    }
    Ok(messages)
}

fn message(value: Value, path: String, asked: &mut Vec<String>) -> Result<Message, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let role = match fields.string("role")?.as_deref() {
        None => return Err(ApiError::field(fields.path("role"), "a message has no `role`")),
        // OpenAI's newer name for the same thing; templates know the older one.
        Some("developer") => "system",
        Some("system") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some("tool") => "tool",
        Some(_) => {
            let path = fields.path("role");
            let message = format!("`{path}` must be system, developer, user, assistant or tool");
            return Err(ApiError::field(path, message));
        }
    };
    let calls = if role == "assistant" { tool_calls(&mut fields)? } else { Vec::new() };
    let path = fields.path("content");
    let content = match fields.take("content") {
        None if !calls.is_empty() => Value::Null,
        None => return Err(ApiError::field(path.clone(), format!("`{path}` is missing"))),
        Some(Value::String(text)) => text.into(),
        Some(Value::Array(parts)) => {
            let parts = parts.into_iter().enumerate();
            let texts = parts.map(|(i, part)| text_part(part, format!("{path}[{i}]")));
            texts.collect::<Result<String, _>>()?.into()
        }
        Some(other) => return Err(wrong(path, "a string or an array of parts", &other)),
    };
    let mut message = Message { role: role.to_owned(), content: Some(content), extra: Map::new() };
    if role == "tool" {
        let path = fields.path("tool_call_id");
        let id = fields.string("tool_call_id")?.filter(|id| asked.contains(id)).ok_or_else(|| {
            let message = format!("`{path}` must be the id of a call in the assistant's message before it");
            ApiError::field(path.clone(), message)
        })?;
        message.extra.insert("tool_call_id".to_owned(), id.into());
    } else {
        *asked = calls.iter().filter_map(|call| call["id"].as_str()).map(str::to_owned).collect();
    }
    if !calls.is_empty() {
        message.extra.insert("tool_calls".to_owned(), calls.into());
    }
    // A template may look at these; what becomes of them is its business.
    for name in ["name", "reasoning_content"] {
        if let Some(text) = fields.string(name)? {
            message.extra.insert(name.to_owned(), Value::String(text));
        }
    }
    fields.finish()?;
    Ok(message)
}

/// Takes the calls that an assistant made, with their arguments as templates want them: as values, not as text.
fn tool_calls(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let path = fields.path("tool_calls");
    let calls = fields.array("tool_calls")?.unwrap_or_default().into_iter().enumerate();
    calls.map(|(i, value)| tool_call(value, format!("{path}[{i}]"))).collect()
}

fn tool_call(value: Value, path: String) -> Result<Value, ApiError> {
    let missing = |path: String| ApiError::field(path.clone(), format!("`{path}` is missing"));
    let mut fields = Fields::of(value, path)?;
    only_functions(&mut fields)?;
    let id = fields.string("id")?.ok_or_else(|| missing(fields.path("id")))?;
    let mut function = fields.object("function")?.ok_or_else(|| missing(fields.path("function")))?;
    fields.finish()?;
    let name = function.string("name")?.ok_or_else(|| missing(function.path("name")))?;
    let path = function.path("arguments");
    let text = function.string("arguments")?.unwrap_or_default();
    let arguments = match text.trim() {
        "" => Map::new(),
        text => serde_json::from_str(text).map_err(|error| {
            ApiError::field(path.clone(), format!("`{path}` is not the text of a JSON object: {error}"))
        })?,
    };
    function.finish()?;
    Ok(json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } }))
}

fn text_part(value: Value, path: String) -> Result<String, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let kind = fields.string("type")?;
    if kind.as_deref() != Some("text") {
        let path = fields.path("type");
        let message =
            format!("`{path}`: only parts of type `text` are supported, no images, sounds or files");
        return Err(ApiError { code: Some("unsupported_parameter"), ..ApiError::field(path, message) });
    }
    let text = fields.string("text")?;
    let path = fields.path("text");
    fields.finish()?;
    text.ok_or_else(|| ApiError::field(path.clone(), format!("`{path}` is missing")))
}
