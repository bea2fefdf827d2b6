//! What each path does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tandem_runtime::{EngineState, Status, Token};

use crate::answer::{Answer, Step};
use crate::calls::Call;
use crate::error::json_response;
use crate::metrics::{Metrics, Ongoing, Outcome};
use crate::reply::{Endpoint, Head};
use crate::request::{self, Ask};
use crate::{ApiError, Model, stream};

/// How long a stream may keep its client without a status while nothing has been generated.
const HEAD_PATIENCE: Duration = Duration::from_secs(10);

/// How long an engine may take to say how it is; it answers between two steps.
const STATUS_PATIENCE: Duration = Duration::from_secs(2);

/// How a server behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Clients must show this as a bearer token, except for `/health` and the page at `/`, which asks its user for it.
    pub api_key: Option<String>,
    /// The origin whose pages may use this server from a browser (`*` for all).
    pub cors: Option<String>,
    /// Longest body in bytes.
    pub max_body: usize,
    /// For the head of a request to come; idle connections end after it too.
    pub head_timeout: Duration,
    /// For its body to come.
    pub body_timeout: Duration,
    /// For a client to take the next piece of an answer.
    pub write_timeout: Duration,
    /// For running requests to end after the server was told to stop.
    pub drain: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            api_key: None,
            cors: None,
            max_body: 16 << 20,
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(60),
            drain: Duration::from_secs(30),
        }
    }
}

/// A model and what its clients share.
#[derive(Debug)]
pub struct App {
    pub(crate) model: Arc<Model>,
    pub(crate) options: Options,
    metrics: Arc<Metrics>,
    started: SystemTime,
    answers: AtomicU64,
    /// One question at a time, so that a busy engine's mailbox does not fill with them.
    asking: Arc<tokio::sync::Mutex<()>>,
}

type Shared = State<Arc<App>>;

impl App {
    /// Serves one model.
    pub fn new(model: Model, options: Options) -> Self {
        Self {
            model: Arc::new(model),
            options,
            metrics: Arc::default(),
            started: SystemTime::now(),
            answers: AtomicU64::new(0),
            asking: Arc::default(),
        }
    }

    /// All paths.
    pub(crate) fn router(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/completions", post(completion))
            .route("/v1/models", get(models))
            .route("/v1/models/{*id}", get(model))
            .route("/tokenize", post(tokenize))
            .route("/detokenize", post(detokenize))
            .route("/", get(page))
            .route("/health", get(health))
            .route("/metrics", get(metrics))
            .fallback(|| async {
                ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path")
            })
            .method_not_allowed_fallback(|| async {
                let message = "this path takes another method";
                ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
            })
            .layer(from_fn_with_state(Arc::clone(self), guard))
            .with_state(Arc::clone(self))
    }

    /// Checks that the named model is the one served here. A request that names none means it.
    fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(name) if name != self.model.id => {
                let shown: String = name.chars().take(100).collect();
                let message = format!("there is no model `{shown}` here, only `{}`", self.model.id);
                let param = Some("model".to_owned());
                Err(ApiError { param, ..ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message) })
            }
            _ => Ok(()),
        }
    }

    /// How the engine is; `None` if it does not say.
    async fn status(&self) -> Option<Status> {
        let asking = Arc::clone(&self.asking);
        let handle = self.model.handle.clone();
        let answer = async {
            let turn = asking.lock_owned().await;
            let ask = move || {
                let status = handle.status();
                drop(turn);
                status
            };
            tokio::task::spawn_blocking(ask).await
        };
        tokio::time::timeout(STATUS_PATIENCE, answer).await.ok()?.ok()?.ok()
    }

    /// Reads a JSON body.
    async fn body(&self, request: Request) -> Result<Vec<u8>, ApiError> {
        // Browsers send any other type across origins without asking first.
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let kind = kind.and_then(|kind| kind.split(';').next());
        if kind.map(str::trim) != Some("application/json") {
            let message = "the body must come as `Content-Type: application/json`";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
        }
        let read = read(request.into_body(), self.options.max_body);
        tokio::time::timeout(self.options.body_timeout, read).await.unwrap_or_else(|_| {
            let seconds = self.options.body_timeout.as_secs_f64();
            let message = format!("the body did not come within {seconds} s");
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message))
        })
    }

    /// Generates; `encode` makes the prompts and may take its time.
    async fn generate<E>(
        &self,
        endpoint: Endpoint,
        ask: &Ask,
        arrived: Instant,
        ongoing: Ongoing,
        encode: E,
    ) -> Result<Response, (ApiError, Ongoing)>
    where
        E: FnOnce(&Model) -> Result<Vec<Vec<u32>>, ApiError> + Send + 'static,
    {
        let requests = match self.prepare(ask, encode).await {
            Ok(requests) => requests,
            Err(error) => return Err((error, ongoing)),
        };
        let mut answer = Answer::start(&self.model, requests, ask, arrived, ongoing)?;
        if ask.stream
            && let Err(error) = answer.begin(HEAD_PATIENCE).await
        {
            return Err((error, answer.ongoing));
        }
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let (id, model) = (self.id(endpoint), self.model.id.clone());
        let head = Head { endpoint, id, created, model };
        let mut response = if ask.stream {
            stream::response(answer, head, self.model.tokenizer.clone(), ask)
        } else {
            self.collect(answer, &head, ask).await?
        };
        let route = self.model.route();
        if let Ok(route) = HeaderValue::from_str(&format!("{}; {}", route.engine, route.reason)) {
            response.headers_mut().insert("x-tandem-route", route);
        }
        Ok(response)
    }

    async fn prepare<E>(&self, ask: &Ask, encode: E) -> Result<Vec<tandem_runtime::Request>, ApiError>
    where
        E: FnOnce(&Model) -> Result<Vec<Vec<u32>>, ApiError> + Send + 'static,
    {
        self.check_model(ask.model.as_deref())?;
        let prompts = self.off_thread(encode).await?;
        self.model.requests(&prompts, ask)
    }

    /// Does work that would hold up other connections.
    async fn off_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Model) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let model = Arc::clone(&self.model);
        let done = tokio::task::spawn_blocking(move || work(&model)).await;
        done.unwrap_or_else(|error| {
            tracing::error!(%error, "a request's preparation");
            let message = "the server failed on this request";
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message))
        })
    }

    /// The whole answer as one object.
    async fn collect(
        &self,
        mut answer: Answer,
        head: &Head,
        ask: &Ask,
    ) -> Result<Response, (ApiError, Ongoing)> {
        #[derive(Default, Clone)]
        struct Choice {
            text: String,
            calls: Vec<Call>,
            tokens: Vec<Token>,
            shown: Option<Value>,
        }
        let mut choices = vec![Choice::default(); answer.choices()];
        while let Some(step) = answer.next().await {
            match step {
                Err(error) => return Err((error, answer.ongoing)),
                Ok(Step::Piece { index, text, calls, tokens }) => {
                    choices[index].text += &text;
                    choices[index].calls.extend(calls);
                    choices[index].tokens.extend(tokens);
                }
                Ok(Step::Done { index, done, calls: end }) => {
                    let Choice { text, calls, tokens, shown } = &mut choices[index];
                    let logprobs = match ask.logprobs {
                        None => Value::Null,
                        Some(_) => head.logprobs(tokens, &self.model.tokenizer, &mut 0),
                    };
                    *shown = Some(head.choice(index, (text, calls), &logprobs, (&done, end)));
                }
            }
        }
        let usage = answer.usage();
        self.metrics.tokens(&usage);
        answer.ongoing.end(Outcome::Completed);
        let choices: Vec<Value> = choices.into_iter().filter_map(|c| c.shown).collect();
        Ok(json_response(StatusCode::OK, &head.whole(&choices, &usage)))
    }

    /// Unique over this server's life, and over others' as far as clocks tell.
    fn id(&self, endpoint: Endpoint) -> String {
        let prefix = match endpoint {
            Endpoint::Chat => "chatcmpl",
            Endpoint::Completion => "cmpl",
        };
        let started = self.started.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        format!("{prefix}-{started:016x}{:08x}", self.answers.fetch_add(1, Ordering::Relaxed))
    }

    fn model_json(&self) -> Value {
        let created = self.started.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let (id, context) = (&self.model.id, self.model.capabilities.context);
        json!({ "id": id, "object": "model", "created": created, "owned_by": "tandem", "context_length": context })
    }
}

/// Collects a body of at most `most` bytes. One that is longer is read on for a while and thrown away: a client that is
/// cut off in the middle of sending would not see the answer.
async fn read(mut body: Body, most: usize) -> Result<Vec<u8>, ApiError> {
    let (mut bytes, mut total) = (Vec::new(), 0usize);
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            return Err(ApiError::new(StatusCode::BAD_REQUEST, "incomplete_body", "the body broke off"));
        };
        let Ok(data) = frame.into_data() else { continue };
        total = total.saturating_add(data.len());
        if total <= most {
            bytes.extend_from_slice(&data);
        } else {
            bytes = Vec::new();
            if total / 4 > most {
                break;
            }
        }
    }
    if total > most {
        let message = format!("the body is longer than {most} bytes. hint: send less");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
    }
    Ok(bytes)
}

/// Counts how a request to generate ended.
fn counted(answered: Result<Response, (ApiError, Ongoing)>) -> Response {
    answered.unwrap_or_else(|(error, ongoing)| {
        let failed = error.status.is_server_error();
        ongoing.end(if failed { Outcome::Failed } else { Outcome::Refused });
        error.into_response()
    })
}

async fn chat(State(app): Shared, request: Request) -> Response {
    let (arrived, ongoing) = (Instant::now(), Ongoing::new(Arc::clone(&app.metrics)));
    let parsed = app.body(request).await.and_then(|body| request::chat(&body));
    counted(match parsed {
        Err(error) => Err((error, ongoing)),
        Ok(request::Chat { messages, ask }) => {
            let tools = ask.tools.clone();
            let encode = move |model: &Model| Ok(vec![model.render(messages, tools.as_ref())?]);
            app.generate(Endpoint::Chat, &ask, arrived, ongoing, encode).await
        }
    })
}

async fn completion(State(app): Shared, request: Request) -> Response {
    let (arrived, ongoing) = (Instant::now(), Ongoing::new(Arc::clone(&app.metrics)));
    let parsed = app.body(request).await.and_then(|body| request::completion(&body));
    counted(match parsed {
        Err(error) => Err((error, ongoing)),
        Ok(request::Completion { prompts, ask }) => {
            let encode = move |model: &Model| prompts.iter().map(|p| model.encode(p)).collect();
            app.generate(Endpoint::Completion, &ask, arrived, ongoing, encode).await
        }
    })
}

async fn models(State(app): Shared) -> Response {
    json_response(StatusCode::OK, &json!({ "object": "list", "data": [app.model_json()] }))
}

async fn model(State(app): Shared, Path(id): Path<String>) -> Result<Response, ApiError> {
    app.check_model(Some(&id))?;
    Ok(json_response(StatusCode::OK, &app.model_json()))
}

async fn tokenize(State(app): Shared, request: Request) -> Result<Response, ApiError> {
    let (content, add_special) = request::tokenize(&app.body(request).await?)?;
    let encode = move |model: &Model| Ok(model.tokenizer.encode(&content, add_special)?);
    let tokens = app.off_thread(encode).await?;
    Ok(json_response(StatusCode::OK, &json!({ "tokens": tokens })))
}

async fn detokenize(State(app): Shared, request: Request) -> Result<Response, ApiError> {
    let tokens = request::detokenize(&app.body(request).await?)?;
    let known = |id: &u32| app.model.tokenizer.token_bytes(*id).is_some();
    if let Some(at) = tokens.iter().position(|id| !known(id)) {
        let message = format!("there is no token {}", tokens[at]);
        return Err(ApiError::field(format!("tokens[{at}]"), message));
    }
    let content = app.model.tokenizer.decode(&tokens, false);
    Ok(json_response(StatusCode::OK, &json!({ "content": content })))
}

async fn health(State(app): Shared) -> Response {
    let mut model = json!({ "id": app.model.id, "engine": app.model.capabilities.engine });
    let mut ready = false;
    match app.status().await {
        None => model["state"] = "no answer".into(),
        Some(Status { engine, running, waiting, restarts }) => {
            model["running"] = running.into();
            model["waiting"] = waiting.into();
            model["restarts"] = restarts.into();
            match engine {
                EngineState::Failed(error) => {
                    model["state"] = "failed".into();
                    model["error"] = error.to_string().into();
                }
                EngineState::Ready { capabilities, memory } => {
                    ready = true;
                    model["state"] = "ready".into();
                    model["device"] = capabilities.device.into();
                    model["context"] = capabilities.context.into();
                    model["kv_used_bytes"] = (memory.kv_exclusive + memory.kv_shared).into();
                    model["kv_limit_bytes"] = memory.kv_limit.into();
                    model["weights_bytes"] = memory.weights.into();
                }
            }
        }
    }
    let (code, status) =
        if ready { (StatusCode::OK, "ok") } else { (StatusCode::SERVICE_UNAVAILABLE, "unavailable") };
    json_response(code, &json!({ "status": status, "models": [model] }))
}

/// The page may talk to this server and to nobody else.
async fn page() -> Response {
    const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                          base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let kind = HeaderValue::from_static("text/html; charset=utf-8");
    let policy = HeaderValue::from_static(POLICY);
    let headers = [(header::CONTENT_TYPE, kind), (header::CONTENT_SECURITY_POLICY, policy)];
    (headers, include_str!("page.html")).into_response()
}

async fn metrics(State(app): Shared) -> Response {
    let page = app.metrics.render(&app.model.id, app.status().await.as_ref());
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    ([(header::CONTENT_TYPE, kind)], page).into_response()
}

/// Every request passes here: the key, and what browsers ask.
async fn guard(State(app): Shared, request: Request, next: Next) -> Response {
    let open = matches!(request.uri().path(), "/" | "/health");
    let preflight = app.options.cors.is_some() && request.method() == Method::OPTIONS;
    let mut response = if preflight {
        StatusCode::NO_CONTENT.into_response()
    } else if open || has_key(request.headers(), app.options.api_key.as_deref()) {
        next.run(request).await
    } else {
        let message = "this server wants its key as `Authorization: Bearer KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message).into_response()
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
