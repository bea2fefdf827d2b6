//! What each path does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body_util::BodyExt;
use serde_json::Value;
use tandem_model::Tokenizer;
use tandem_runtime::{Coordinator, Load, Route, RouteError, Routed, Token};

use crate::answer::{Answer, Step};
use crate::calls::Call;
use crate::error::json_response;
use crate::guard::guard;
use crate::metrics::{Metrics, Ongoing, Outcome};
use crate::reply::{Endpoint, Head};
use crate::request::{self, Ask};
use crate::{ApiError, Model, operation, page, stream};

/// How long a stream may keep its client without a status while nothing has been generated.
const HEAD_PATIENCE: Duration = Duration::from_secs(10);

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

/// Models and what their clients share.
#[derive(Debug)]
pub struct App {
    pub(crate) models: Vec<Arc<Model>>,
    pub(crate) coordinator: Coordinator,
    pub(crate) options: Options,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) started: SystemTime,
    answers: AtomicU64,
    ending: AtomicBool,
}

type Shared = State<Arc<App>>;

impl App {
    /// Serves these models by the engines that `coordinator` holds for them under their names.
    pub fn new(models: Vec<Model>, coordinator: Coordinator, options: Options) -> Self {
        let engines = models.iter().flat_map(|model| {
            let loads = coordinator.loads(&model.id).unwrap_or_default();
            loads.into_iter().map(|(engine, _)| (model.id.as_str(), engine))
        });
        let metrics = Arc::new(Metrics::new(engines));
        Self {
            models: models.into_iter().map(Arc::new).collect(),
            coordinator,
            options,
            metrics,
            started: SystemTime::now(),
            answers: AtomicU64::new(0),
            ending: AtomicBool::new(false),
        }
    }

    /// Takes no more requests; those under way have as long as the options say.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
        self.coordinator.drain(self.options.drain);
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    /// All paths.
    pub(crate) fn router(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/completions", post(completion))
            .route("/v1/models", get(operation::models))
            .route("/v1/models/{*id}", get(operation::model))
            .route("/v1/route", post(operation::route))
            .route("/tokenize", post(operation::tokenize))
            .route("/detokenize", post(operation::detokenize))
            .merge(page::router())
            .route("/health", get(operation::health))
            .route("/metrics", get(operation::metrics))
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

    /// The model of that name. A request that names none means the only one.
    pub(crate) fn model(&self, name: Option<&str>) -> Result<&Arc<Model>, ApiError> {
        let found = match (name, self.models.as_slice()) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(name), models) => models.iter().find(|model| model.is_called(name)),
        };
        found.ok_or_else(|| {
            let ids: Vec<String> = self.models.iter().map(|model| format!("`{}`", model.id)).collect();
            let ids = ids.join(", ");
            let param = Some("model".to_owned());
            match name {
                Some(name) => {
                    let shown: String = name.chars().take(100).collect();
                    let message = format!("there is no model `{shown}` here, only {ids}");
                    ApiError { param, ..ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message) }
                }
                None => ApiError::field("model", format!("`model` is missing; there are {ids}")),
            }
        })
    }

    /// How the model's engines are.
    pub(crate) fn loads(&self, model: &Model) -> Vec<(&str, Load)> {
        self.coordinator.loads(&model.id).unwrap_or_default()
    }

    /// Reads a JSON body.
    pub(crate) async fn body(&self, request: Request) -> Result<Vec<u8>, ApiError> {
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
        let (model, routed) = match self.prepare(ask, encode).await {
            Ok(prepared) => prepared,
            Err(error) => return Err((error, ongoing)),
        };
        let Routed { streams, decision } = routed;
        let series = self.metrics.engine(&model.id, &decision.route.engine);
        series.routed(decision.kind);
        let mut answer = Answer::new(streams, model, ask, arrived, ongoing, series)?;
        if ask.stream
            && let Err(error) = answer.begin(HEAD_PATIENCE).await
        {
            return Err((error, answer.ongoing));
        }
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let (id, model_id) = (self.id(endpoint), model.id.clone());
        let head = Head { endpoint, id, created, model: model_id, tier: ask.tier };
        let mut response = if ask.stream {
            stream::response(answer, head, model.tokenizer.clone(), ask)
        } else {
            collect(answer, &head, &model.tokenizer, ask).await?
        };
        response.headers_mut().insert("x-tandem-route", route_header(&decision.route));
        Ok(response)
    }

    /// Everything before the first token: the prompts, and an engine that takes them.
    async fn prepare<E>(&self, ask: &Ask, encode: E) -> Result<(&Arc<Model>, Routed), ApiError>
    where
        E: FnOnce(&Model) -> Result<Vec<Vec<u32>>, ApiError> + Send + 'static,
    {
        let model = self.model(ask.model.as_deref())?;
        let prompts = self.off_thread(model, encode).await?;
        let requests = model.requests(&prompts, ask)?;
        let routed = self.coordinator.generate(&model.id, &requests, ask.engine.as_deref());
        Ok((model, routed.map_err(|error| refused(error, &prompts, ask))?))
    }

    /// Does work that would hold up other connections.
    pub(crate) async fn off_thread<T: Send + 'static>(
        &self,
        model: &Arc<Model>,
        work: impl FnOnce(&Model) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let model = Arc::clone(model);
        let done = tokio::task::spawn_blocking(move || work(&model)).await;
        done.unwrap_or_else(|error| {
            tracing::error!(%error, "a request's preparation");
            let message = "the server failed on this request";
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message))
        })
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
}

/// The whole answer as one object.
async fn collect(
    mut answer: Answer,
    head: &Head,
    tokenizer: &Tokenizer,
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
                    Some(_) => head.logprobs(tokens, tokenizer, &mut 0),
                };
                *shown = Some(head.choice(index, (text, calls), &logprobs, (&done, end)));
            }
        }
    }
    let usage = answer.usage();
    answer.complete();
    let choices: Vec<Value> = choices.into_iter().filter_map(|c| c.shown).collect();
    Ok(json_response(StatusCode::OK, &head.whole(&choices, &usage)))
}

/// The error of a request that got no route. One that is too long says what of it is prompt.
fn refused(error: RouteError, prompts: &[Vec<u32>], ask: &Ask) -> ApiError {
    let error = ApiError::from(error);
    if error.code != Some("context_length_exceeded") {
        return error;
    }
    let prompt = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let what = match ask.max_tokens {
        Some(most) => format!("{prompt} of prompt and {most} to generate"),
        None => format!("{prompt} of prompt"),
    };
    ApiError { message: format!("{what}: {}", error.message), ..error }
}

/// `engine; reason`, in the characters that a header may hold.
fn route_header(route: &Route) -> HeaderValue {
    let text = format!("{}; {}", route.engine, route.reason);
    let text: String = text.chars().map(|c| if matches!(c, ' '..='~') { c } else { '?' }).collect();
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("unknown"))
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
