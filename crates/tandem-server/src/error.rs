//! Errors as OpenAI's API shapes them.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tandem_engine::EngineError;
use tandem_model::ModelError;
use tandem_runtime::{Refusal, RouteError, RuntimeError};

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
    /// When it is worth another try, where that is known.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// An error of no field in particular.
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code: Some(code), param: None, message: message.into(), retry_after: None }
    }

    /// A field that is not as it should be.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let (param, message) = (Some(param.into()), message.into());
        Self {
            status: StatusCode::BAD_REQUEST,
            code: Some("invalid_value"),
            param,
            message,
            retry_after: None,
        }
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
            // Whole seconds, as the header has it.
            let seconds = self.retry_after.map_or(1, |after| after.as_secs_f64().ceil().max(1.0) as u64);
            headers.insert(header::RETRY_AFTER, seconds.into());
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
        let retry_after = error.retry_after();
        let error = match error {
            RuntimeError::Busy { .. } => Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message),
            RuntimeError::EmptyStop => Self::field("stop", message),
            RuntimeError::Crashed(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "engine_crashed", message),
            RuntimeError::Draining | RuntimeError::ShutDown => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "shut_down", message)
            }
            RuntimeError::Engine(error) => error.into(),
        };
        Self { retry_after, ..error }
    }
}

impl From<RouteError> for ApiError {
    fn from(error: RouteError) -> Self {
        let message = error.to_string();
        let param = match &error {
            RouteError::NoModel { .. } => Some("model"),
            RouteError::NoEngine { .. } | RouteError::Asked { .. } => Some("engine"),
            RouteError::Nobody(_) => None,
        };
        let base = match (&error, error.refusal()) {
            (RouteError::NoModel { .. }, _) => Self::new(StatusCode::NOT_FOUND, "model_not_found", message),
            (_, None) => Self::new(StatusCode::BAD_REQUEST, "engine_not_found", message),
            (_, Some(refusal)) => {
                let (status, code) = refused(refusal);
                Self { retry_after: refusal.retry_after(), ..Self::new(status, code, message) }
            }
        };
        Self { param: param.map(str::to_owned), ..base }
    }
}

/// How a refusal reads over HTTP: whether to come back, and a word for programs.
fn refused(refusal: &Refusal) -> (StatusCode, &'static str) {
    match refusal {
        Refusal::Busy(_) => (StatusCode::TOO_MANY_REQUESTS, "queue_full"),
        Refusal::Loading => (StatusCode::SERVICE_UNAVAILABLE, "engine_loading"),
        Refusal::Failed { .. } => (StatusCode::SERVICE_UNAVAILABLE, "engine_failed"),
        Refusal::Ending(_) => (StatusCode::SERVICE_UNAVAILABLE, "shut_down"),
        Refusal::TooMany { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "too_many_choices"),
        Refusal::Unfit(error) => {
            let error = ApiError::from(error.clone());
            (error.status, error.code.unwrap_or("engine_error"))
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
