//! The JSON inside calls.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::ToolCall;

/// A call as models write it; they add fields of their own (`type`), which say nothing.
#[derive(Deserialize)]
struct Written<'a> {
    name: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
    id: Option<Value>,
    /// OpenAI's own shape, which some models copy.
    #[serde(borrow)]
    function: Option<Box<Written<'a>>>,
}

/// The calls in a JSON value: one object, or a list of some. `None` if it holds anything else.
pub(super) fn read(json: &str) -> Option<Vec<ToolCall>> {
    let written: Vec<Written> = if json.starts_with('[') {
        serde_json::from_str(json).ok()?
    } else {
        vec![serde_json::from_str(json).ok()?]
    };
    let calls: Option<Vec<_>> = written.into_iter().map(call).collect();
    calls.filter(|calls| !calls.is_empty())
}

fn call(written: Written) -> Option<ToolCall> {
    let id = written.id.as_ref().and_then(Value::as_str).filter(|id| !id.is_empty()).map(str::to_owned);
    let inner = match (&written.name, written.function) {
        (None, Some(function)) => *function,
        (_, function) => Written { function, ..written },
    };
    let name = inner.name.filter(|name| !name.is_empty())?;
    let arguments = arguments(inner.arguments.or(inner.parameters))?;
    Some(ToolCall { id, name, arguments })
}

/// The text of an object. Some models write it into a string, and none where a tool takes none.
fn arguments(raw: Option<&RawValue>) -> Option<String> {
    let Some(raw) = raw else { return Some("{}".to_owned()) };
    let text = raw.get();
    match text.as_bytes().first()? {
        b'{' => Some(text.to_owned()),
        b'"' => {
            let inner: String = serde_json::from_str(text).ok()?;
            let object: Option<serde_json::Map<String, Value>> = serde_json::from_str(&inner).ok();
            object.map(|_| inner)
        }
        _ => None,
    }
}
