//! What a model may call.

use serde_json::{Value, json};

use crate::ApiError;
use crate::fields::Fields;

/// Longest name of a function in bytes, as OpenAI has it.
const MAX_NAME: usize = 64;

/// The tools of a request whose `tool_choice` leaves the choice to the model.
#[derive(Debug, Clone, PartialEq)]
pub struct Tools {
    /// As templates take them: `{"type": "function", "function": {"name", "description", "parameters"}}`. At least one.
    pub tools: Vec<Value>,
    /// Whether an answer may hold several calls.
    pub parallel: bool,
}

impl Tools {
    /// The names of the functions.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().filter_map(|tool| tool["function"]["name"].as_str())
    }

    /// Takes `tools`, `tool_choice` and `parallel_tool_calls`. `None` where the model may call nothing.
    pub(super) fn take(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true);
        let may_call = match fields.take("tool_choice") {
            None => true,
            Some(Value::String(choice)) if choice == "auto" => true,
            Some(Value::String(choice)) if choice == "none" => false,
            Some(_) => {
                let message = "`tool_choice` may be \"auto\" or \"none\": a call cannot be forced yet. hint: leave it out";
                let error = ApiError::field("tool_choice", message);
                return Err(ApiError { code: Some("unsupported_parameter"), ..error });
            }
        };
        let mut tools: Vec<Value> = Vec::new();
        for (i, value) in fields.array("tools")?.unwrap_or_default().into_iter().enumerate() {
            let path = format!("tools[{i}]");
            let tool = tool(value, &path)?;
            let name = &tool["function"]["name"];
            if tools.iter().any(|other| other["function"]["name"] == *name) {
                let path = format!("{path}.function.name");
                return Err(ApiError::field(
                    path.clone(),
                    format!("`{path}`: there is a tool {name} already"),
                ));
            }
            tools.push(tool);
        }
        Ok((may_call && !tools.is_empty()).then_some(Self { tools, parallel }))
    }
}

fn tool(value: Value, path: &str) -> Result<Value, ApiError> {
    let mut fields = Fields::of(value, path.to_owned())?;
    only_functions(&mut fields)?;
    let Some(mut function) = fields.object("function")? else {
        let path = fields.path("function");
        return Err(ApiError::field(path.clone(), format!("`{path}` is missing")));
    };
    fields.finish()?;
    let path = function.path("name");
    let name = function.string("name")?.unwrap_or_default();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    if !(1..=MAX_NAME).contains(&name.len()) || !name.bytes().all(plain) {
        let message = format!("`{path}` must be 1 to {MAX_NAME} letters, digits, underscores and dashes");
        return Err(ApiError::field(path, message));
    }
    if function.flag("strict")? == Some(true) {
        let path = function.path("strict");
        let message = format!("`{path}`: arguments cannot be held to a schema yet. hint: leave it out");
        return Err(ApiError { code: Some("unsupported_parameter"), ..ApiError::field(path, message) });
    }
    let mut seen = json!({ "name": name });
    if let Some(description) = function.string("description")? {
        seen["description"] = description.into();
    }
    // As OpenAI has it, none means that the function takes none; templates do not know that.
    seen["parameters"] = match function.object("parameters")? {
        Some(mut schema) => Value::Object(schema.rest()),
        None => json!({ "type": "object", "properties": {} }),
    };
    function.finish()?;
    Ok(json!({ "type": "function", "function": seen }))
}

/// Takes `type`, which must say that this is a function.
pub(super) fn only_functions(fields: &mut Fields) -> Result<(), ApiError> {
    let kind = fields.string("type")?;
    if kind.as_deref() == Some("function") {
        return Ok(());
    }
    let path = fields.path("type");
    let message = format!("`{path}` must be \"function\"");
    Err(ApiError { code: Some("unsupported_parameter"), ..ApiError::field(path, message) })
}
