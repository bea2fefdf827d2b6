//! What operators and curious clients ask: models, tokens, health, metrics, and who would serve a request.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tandem_runtime::{Load, LoadState, Shape};

use crate::error::json_response;
use crate::request::{self, Chat, Completion, Question};
use crate::{ApiError, App, Model};

type Shared = State<Arc<App>>;

pub(crate) async fn models(State(app): Shared) -> Response {
    let models: Vec<Value> = app.models.iter().map(|model| model_json(&app, model)).collect();
    json_response(StatusCode::OK, &json!({ "object": "list", "data": models }))
}

pub(crate) async fn model(State(app): Shared, Path(id): Path<String>) -> Result<Response, ApiError> {
    Ok(json_response(StatusCode::OK, &model_json(&app, app.model(Some(&id))?)))
}

fn model_json(app: &App, model: &Model) -> Value {
    let created = app.started.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let loads = app.loads(model);
    let engines: Vec<&str> = loads.iter().map(|(engine, _)| *engine).collect();
    // The longest that any engine takes; unknown while none is there to say.
    let context = loads.iter().filter_map(|(_, load)| match &load.state {
        LoadState::Ready(capabilities) => Some(capabilities.context),
        _ => None,
    });
    json!({
        "id": model.id, "object": "model", "created": created, "owned_by": "tandem", "aliases": model.aliases,
        "context_length": context.max(), "engines": engines,
    })
}

pub(crate) async fn tokenize(State(app): Shared, request: Request) -> Result<Response, ApiError> {
    let asked = request::tokenize(&app.body(request).await?)?;
    let model = app.model(asked.model.as_deref())?;
    let encode = move |model: &Model| Ok(model.tokenizer.encode(&asked.content, asked.add_special)?);
    let tokens = app.off_thread(model, encode).await?;
    Ok(json_response(StatusCode::OK, &json!({ "tokens": tokens })))
}

pub(crate) async fn detokenize(State(app): Shared, request: Request) -> Result<Response, ApiError> {
    let asked = request::detokenize(&app.body(request).await?)?;
    let tokenizer = &app.model(asked.model.as_deref())?.tokenizer;
    let known = |id: &u32| tokenizer.token_bytes(*id).is_some();
    if let Some(at) = asked.tokens.iter().position(|id| !known(id)) {
        let message = format!("there is no token {}", asked.tokens[at]);
        return Err(ApiError::field(format!("tokens[{at}]"), message));
    }
    let content = tokenizer.decode(&asked.tokens, false);
    Ok(json_response(StatusCode::OK, &json!({ "content": content })))
}

/// Who would serve this request now, and why. Nothing is run.
pub(crate) async fn route(State(app): Shared, request: Request) -> Result<Response, ApiError> {
    let question = request::question(&app.body(request).await?)?;
    let (Question::Chat(Chat { ask, .. }) | Question::Completion(Completion { ask, .. })) = &question;
    let model = app.model(ask.model.as_deref())?;
    let ask = ask.clone();
    let encode = move |model: &Model| match question {
        Question::Chat(chat) => Ok(vec![model.render(chat.messages, chat.ask.tools.as_ref())?]),
        Question::Completion(completion) => completion.prompts.iter().map(|p| model.encode(p)).collect(),
    };
    let prompts: Vec<Vec<u32>> = app.off_thread(model, encode).await?;
    let requests = model.requests(&prompts, &ask)?;
    let shape = Shape::of(&requests);
    let (decided, prospects) = app.coordinator.explain(&model.id, &shape, ask.engine.as_deref())?;
    let engines: Vec<Value> = prospects
        .into_iter()
        .map(|prospect| {
            let refusal = prospect.refusal.map(|refusal| refusal.to_string());
            json!({
                "engine": prospect.engine, "state": state(&prospect.load), "running": prospect.load.running,
                "waiting": prospect.load.waiting, "refusal": refusal,
            })
        })
        .collect();
    let mut answer = json!({
        "model": model.id,
        "route": null,
        "kind": null,
        "prompt_tokens": prompts.iter().map(Vec::len).sum::<usize>(),
        "max_tokens": ask.max_tokens,
        "choices": requests.len(),
        "engines": engines,
    });
    match decided {
        Ok(decision) => {
            answer["route"] = json!(decision.route);
            answer["kind"] = decision.kind.into();
        }
        Err(error) => answer["error"] = ApiError::from(error).json()["error"].take(),
    }
    Ok(json_response(StatusCode::OK, &answer))
}

pub(crate) async fn health(State(app): Shared) -> Response {
    let mut all = true;
    let models: Vec<Value> = app
        .models
        .iter()
        .map(|model| {
            let loads = app.loads(model);
            let serves = loads.iter().any(|(_, load)| matches!(load.state, LoadState::Ready(_)));
            all &= serves;
            let engines: Vec<Value> = loads.iter().map(|(engine, load)| engine_json(engine, load)).collect();
            json!({ "id": model.id, "status": word(serves), "engines": engines })
        })
        .collect();
    let serves = all && !app.is_ending();
    let code = if serves { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let status = if app.is_ending() { "ending" } else { word(all) };
    json_response(code, &json!({ "status": status, "models": models }))
}

fn word(serves: bool) -> &'static str {
    if serves { "ok" } else { "unavailable" }
}

fn state(load: &Load) -> &'static str {
    match load.state {
        LoadState::Loading => "loading",
        LoadState::Ready(_) => "ready",
        LoadState::Failed { .. } => "failed",
        LoadState::Draining => "draining",
        LoadState::Stopped => "stopped",
    }
}

/// How an engine is. What is not known of one that is not there is left out.
fn engine_json(engine: &str, load: &Load) -> Value {
    let last_error = load.last_error.as_ref().map(ToString::to_string);
    let mut json = json!({
        "engine": engine, "state": state(load), "running": load.running, "waiting": load.waiting,
        "restarts": load.restarts, "last_error": last_error, "preempted": load.preempted,
        "prefix_tokens": load.prefix_tokens,
    });
    match &load.state {
        LoadState::Ready(capabilities) => {
            json["device"] = capabilities.device.as_str().into();
            json["context"] = capabilities.context.into();
            json["max_batch"] = capabilities.max_batch.into();
            json["kv_used_bytes"] = (load.memory.kv_exclusive + load.memory.kv_shared).into();
            json["kv_limit_bytes"] = load.memory.kv_limit.into();
            json["kv_bytes_per_token"] = capabilities.kv_bytes_per_token.into();
            json["weights_bytes"] = load.memory.weights.into();
        }
        LoadState::Failed { retry_in, .. } => json["retry_in"] = retry_in.as_secs_f64().into(),
        LoadState::Loading | LoadState::Draining | LoadState::Stopped => {}
    }
    json
}

pub(crate) async fn metrics(State(app): Shared) -> Response {
    let load = |model: &str, engine: &str| {
        let loads = app.coordinator.loads(model).ok()?;
        loads.into_iter().find(|(name, _)| *name == engine).map(|(_, load)| load)
    };
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    ([(header::CONTENT_TYPE, kind)], app.metrics.render(load)).into_response()
}
