//! The page at `/`: files that are part of the program, and a policy that lets it talk to this server only.

use axum::Router;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Each path with its type and content.
const FILES: [(&str, &str, &str); 3] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("/page.js", "text/javascript; charset=utf-8", include_str!("page/script.js")),
];

/// Whether `path` is the page's, which needs no key: it asks its user for it.
pub(crate) fn is_part(path: &str) -> bool {
    FILES.iter().any(|(own, ..)| *own == path)
}

/// The page's paths.
pub(crate) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let add = |router: Router<S>, (path, kind, content)| {
        router.route(path, get(move || async move { answer(kind, content) }))
    };
    FILES.into_iter().fold(Router::new(), add)
}

fn answer(kind: &'static str, content: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        // A newer program has a newer page.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, content).into_response()
}
