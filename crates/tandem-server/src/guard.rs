//! What every request passes: the key, what browsers ask of other origins, and whether the server is ending.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::{ApiError, App, page};

/// Every request passes here.
pub(crate) async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let open = request.uri().path() == "/health" || page::is_part(request.uri().path());
    let preflight = app.options.cors.is_some() && request.method() == Method::OPTIONS;
    let mut response = if preflight {
        StatusCode::NO_CONTENT.into_response()
    } else if !open && !has_key(request.headers(), app.options.api_key.as_deref()) {
        let message = "this server wants its key as `Authorization: Bearer KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message).into_response()
    } else if app.is_ending() && request.method() == Method::POST {
        let message = "the server is ending. hint: send the request to another one, or after the restart";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shut_down", message).into_response()
    } else {
        next.run(request).await
    };
    if let Some(origin) = app.options.cors.as_deref().and_then(|origin| HeaderValue::from_str(origin).ok()) {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-tandem-route"));
        if preflight {
            let methods = HeaderValue::from_static("GET, POST");
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
            let allowed = HeaderValue::from_static("authorization, content-type");
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
        }
    }
    response
}

/// Whether the client knows the key. Takes the same time for every wrong key of the right length.
fn has_key(headers: &HeaderMap, key: Option<&str>) -> bool {
    let Some(key) = key else { return true };
    let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some(shown) = shown.and_then(|value| value.strip_prefix("Bearer ")) else { return false };
    let differ = shown.bytes().zip(key.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b));
    shown.len() == key.len() && differ == 0
}
