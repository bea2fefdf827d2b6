//! Errors as OpenAI's API shapes them.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tandem_engine::EngineError;
use tandem_model::ModelError;
use tandem_runtime::RuntimeError;

/// Why a request was not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// A word for programs, such as `context_length_exceeded`.
    pub code: Option<&'static str>,
    /// The field at fault, such as `messages[0].role`.
    pub param: Option<String>,
    /// What happened, and what to do about it.
    pub message: String,
}

impl ApiError {
    /// An error of no field in particular.
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code: Some(code), param: None, message: message.into() }
    }

    /// A field that is not as it should be.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let (param, message) = (Some(param.into()), message.into());
        Self { status: StatusCode::BAD_REQUEST, code: Some("invalid_value"), param, message }
    }

    /// The object that a client reads.
    pub(crate) fn json(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.json());
        let headers = response.headers_mut();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// A JSON body.
pub(crate) fn json_response(status: StatusCode, body: &Value) -> Response {
    let json = HeaderValue::from_static("application/json");
    (status, [(header::CONTENT_TYPE, json)], body.to_string()).into_response()
}

impl From<RuntimeError> for ApiError {
    fn from(error: RuntimeError) -> Self {
        let message = error.to_string();
        match error {
            RuntimeError::Busy { .. } => Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message),
            RuntimeError::EmptyStop => Self::field("stop", message),
            RuntimeError::Crashed(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "engine_crashed", message),
            RuntimeError::Draining | RuntimeError::ShutDown => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "shut_down", message)
            }
            RuntimeError::Engine(error) => error.into(),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::ContextOverflow { .. } => {
                Self::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message)
            }
            EngineError::OutOfMemory { .. } => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "insufficient_memory", message)
            }
            EngineError::InvalidSpec { field, .. } => Self::field(field, message),
            EngineError::TokenOutOfRange { .. } | EngineError::Empty(_) | EngineError::Unsupported { .. } => {
                Self::new(StatusCode::BAD_REQUEST, "invalid_value", message)
            }
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "engine_error", message),
        }
    }
}

impl From<ModelError> for ApiError {
    fn from(error: ModelError) -> Self {
        let message = error.to_string();
        match error {
            // Templates raise for an order of roles they were not made for.
            ModelError::Template(_) => Self::field("messages", message),
            ModelError::Tokenizer(_) => Self::new(StatusCode::BAD_REQUEST, "invalid_value", message),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "model_error", message),
        }
    }
}
