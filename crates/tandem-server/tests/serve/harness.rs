//! A server to test, its engine's knobs, and a client.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_engine::fake::FakeEngine;
use tandem_engine::sampler::sample;
use tandem_engine::{
    AdapterId, Capabilities, Engine, EngineError, Fork, Input, KvSnapshot, Memory, Row, RowOut, SampleSpec,
    SeqBytes, SeqId, Ticket, Want,
};
use tandem_model::{ChatTemplate, Checkpoint, Message, RenderOptions, Tokenizer};
use tandem_runtime::Coordinator;
use tandem_server::{App, Model, Options};
use tokio::sync::oneshot;

/// Of the fixture's tokenizer.
pub const VOCAB: usize = 384;
pub const CONTEXT: usize = 512;

pub fn checkpoint() -> Checkpoint {
    Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama-gqa")).unwrap()
}

/// What a test does to an engine while it runs.
#[derive(Default)]
pub struct Knobs {
    /// Before each step.
    pub delay_ms: AtomicU64,
    /// In the next step.
    pub panic: AtomicBool,
    /// From now on.
    pub unbuildable: AtomicBool,
    /// Make an echo of it; see [`echo`].
    pub echo: Option<Tokenizer>,
}

/// The fake engine with knobs.
struct Faulty {
    inner: FakeEngine,
    knobs: Arc<Knobs>,
}

impl Engine for Faulty {
    fn submit(&mut self, rows: &[Row]) -> Result<Ticket, EngineError> {
        std::thread::sleep(Duration::from_millis(self.knobs.delay_ms.load(Ordering::Relaxed)));
        assert!(!self.knobs.panic.swap(false, Ordering::Relaxed), "told to panic");
        let knobs = Arc::clone(&self.knobs);
        match &knobs.echo {
            None => self.inner.submit(rows),
            Some(tokenizer) => {
                let mut rows = rows.to_vec();
                rows.iter_mut().for_each(|row| self.say(row, tokenizer));
                self.inner.submit(&rows)
            }
        }
    }
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn open(&mut self, max_len: usize, adapter: Option<AdapterId>) -> Result<SeqId, EngineError> {
        self.inner.open(max_len, adapter)
    }
    fn len(&self, seq: SeqId) -> Result<usize, EngineError> {
        self.inner.len(seq)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<Vec<RowOut>, EngineError> {
        self.inner.collect(ticket)
    }
    fn fork(&mut self, seq: SeqId, at: usize, max_len: usize) -> Result<Fork, EngineError> {
        self.inner.fork(seq, at, max_len)
    }
    fn truncate(&mut self, seq: SeqId, len: usize) -> Result<bool, EngineError> {
        self.inner.truncate(seq, len)
    }
    fn close(&mut self, seq: SeqId) -> Result<(), EngineError> {
        self.inner.close(seq)
    }
    fn export(&mut self, seq: SeqId) -> Result<KvSnapshot, EngineError> {
        self.inner.export(seq)
    }
    fn import(&mut self, snapshot: &KvSnapshot, max_len: usize) -> Result<SeqId, EngineError> {
        self.inner.import(snapshot, max_len)
    }
    fn memory(&self) -> Memory {
        self.inner.memory()
    }
    fn sequence_bytes(&self, seq: SeqId) -> Result<SeqBytes, EngineError> {
        self.inner.sequence_bytes(seq)
    }
}

impl Faulty {
    /// Leaves a row that wants a sample no choice but the next token of what the prompt has between « and », and then
    /// the end of the message.
    fn say(&mut self, row: &mut Row, tokenizer: &Tokenizer) {
        let Want::Sample(spec) = &mut row.want else { return };
        let mut history = self.inner.export(row.seq).unwrap().tokens;
        let fed = match &row.input {
            Input::Tokens(tokens) => tokens.clone(),
            Input::PreviousSample => vec![0],
        };
        history.extend(fed);
        let said = history.len() - spec.generated_from;
        let prompt = tokenizer.decode(&history[..spec.generated_from], false);
        let Some((_, script)) = prompt.rsplit_once('«') else { return };
        let script = script.split('»').next().unwrap();
        let script = tokenizer.encode(script, false).unwrap();
        let next = script.get(said).copied().or(tokenizer.eos()).unwrap();
        spec.logit_bias = vec![(next, 1000.0)];
    }
}

/// A running server. Dropping it stops it as Ctrl-C would.
pub struct Server {
    pub address: SocketAddr,
    /// Of the first engine.
    pub knobs: Arc<Knobs>,
    agent: ureq::Agent,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The fake engine under the name `tiny`, with default options.
pub fn fake() -> Server {
    fake_with(100_000, &tandem_runtime::Options::default(), Options::default())
}

/// With room for so many tokens of KV.
pub fn fake_with(kv_tokens: usize, runtime: &tandem_runtime::Options, options: Options) -> Server {
    let knobs = Arc::new(Knobs::default());
    let mut coordinator = Coordinator::default();
    let factory = faulty(&knobs, move || FakeEngine::new(VOCAB, CONTEXT, kv_tokens));
    coordinator.add("tiny", "fake", factory, runtime).unwrap();
    serve(&["tiny"], coordinator, options, knobs)
}

/// A static engine `ane` of half the context beside the dynamic `fake`; the knobs are the static one's.
pub fn pair(runtime: &tandem_runtime::Options) -> Server {
    let knobs = Arc::new(Knobs::default());
    let mut coordinator = Coordinator::default();
    let fixed = faulty(&knobs, || FakeEngine::new(VOCAB, CONTEXT / 2, 10_000).fixed_shapes(&[1, 16, 64]));
    coordinator.add("tiny", "ane", fixed, runtime).unwrap();
    let dynamic = faulty(&Arc::default(), || FakeEngine::new(VOCAB, CONTEXT, 100_000));
    coordinator.add("tiny", "fake", dynamic, runtime).unwrap();
    serve(&["tiny"], coordinator, Options::default(), knobs)
}

/// Two models, `tiny` (also called `small`) and `other`, each with an engine of its own; the knobs are those of the
/// first.
pub fn two_models() -> Server {
    let knobs = Arc::new(Knobs::default());
    let mut coordinator = Coordinator::default();
    for (model, knobs, context) in [("tiny", &knobs, CONTEXT), ("other", &Arc::default(), 64)] {
        let factory = faulty(knobs, move || FakeEngine::new(VOCAB, context, 10_000));
        let soon = tandem_runtime::Options { pause: Duration::from_millis(100), ..Default::default() };
        coordinator.add(model, "fake", factory, &soon).unwrap();
    }
    serve(&["tiny", "other"], coordinator, Options::default(), knobs)
}

/// An engine that answers with what the last message to say so has between « and », under the chat template of
/// `fixtures/chat/style-STYLE.json`, or the fixture's own.
pub fn echo(style: Option<&str>) -> Server {
    echo_with(style, &tandem_runtime::Options::default(), Options::default())
}

/// The same with options.
pub fn echo_with(style: Option<&str>, runtime: &tandem_runtime::Options, options: Options) -> Server {
    let mut checkpoint = checkpoint();
    if let Some(style) = style {
        let path = format!("{}/../../fixtures/chat/style-{style}.json", env!("CARGO_MANIFEST_DIR"));
        let reference: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let special = serde_json::from_value(reference["special"].clone()).unwrap();
        checkpoint.chat = Some(ChatTemplate::new(reference["template"].as_str().unwrap(), special));
    }
    let knobs = Arc::new(Knobs { echo: Some(checkpoint.tokenizer.clone()), ..Knobs::default() });
    let mut coordinator = Coordinator::default();
    let factory = faulty(&knobs, || FakeEngine::new(VOCAB, 16 * CONTEXT, 100_000));
    coordinator.add("tiny", "fake", factory, runtime).unwrap();
    serve_checkpoint(&checkpoint, &["tiny"], coordinator, options, knobs)
}

fn faulty(
    knobs: &Arc<Knobs>,
    inner: impl Fn() -> FakeEngine + Send + 'static,
) -> Box<dyn tandem_engine::EngineFactory> {
    let knobs = Arc::clone(knobs);
    Box::new(move || {
        if knobs.unbuildable.load(Ordering::Relaxed) {
            return Err(EngineError::Device("told not to be built".to_owned()));
        }
        Ok(Box::new(Faulty { inner: inner(), knobs: Arc::clone(&knobs) }) as Box<dyn Engine>)
    })
}

/// The fixture itself on the CPU engine.
pub fn tiny() -> Server {
    let Checkpoint { decoder, weights, .. } = checkpoint();
    let options = tandem_cpu::CpuOptions { threads: Some(1), ..Default::default() };
    let factory = tandem_cpu::CpuFactory::new(decoder, weights, options, Box::new(|_| ()));
    let mut coordinator = Coordinator::default();
    coordinator.add("tiny", "cpu", Box::new(factory), &tandem_runtime::Options::default()).unwrap();
    serve(&["tiny"], coordinator, Options::default(), Arc::default())
}

fn serve(models: &[&str], coordinator: Coordinator, options: Options, knobs: Arc<Knobs>) -> Server {
    serve_checkpoint(&checkpoint(), models, coordinator, options, knobs)
}

fn serve_checkpoint(
    checkpoint: &Checkpoint,
    models: &[&str],
    coordinator: Coordinator,
    options: Options,
    knobs: Arc<Knobs>,
) -> Server {
    let model = |id: &&str| {
        for (engine, _) in coordinator.loads(id).unwrap() {
            coordinator.ready(id, Some(engine)).unwrap();
        }
        let aliases = if *id == "tiny" { vec!["small".to_owned()] } else { Vec::new() };
        Model::new(id, aliases, checkpoint, SampleSpec::greedy())
    };
    let models = models.iter().map(model).collect();
    let app = Arc::new(App::new(models, coordinator, options));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, told) = oneshot::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.unwrap().block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            tandem_server::serve(listener, app, async { drop(told.await) }).await;
        });
    });
    let agent = ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build().new_agent();
    Server { address, knobs, agent, stop: Some(stop), thread: Some(thread) }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

pub struct Reply {
    pub status: u16,
    pub headers: ureq::http::HeaderMap,
    pub text: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }
}

impl From<ureq::http::Response<ureq::Body>> for Reply {
    fn from(mut response: ureq::http::Response<ureq::Body>) -> Self {
        let text = response.body_mut().read_to_string().unwrap();
        Self { status: response.status().as_u16(), headers: response.headers().clone(), text }
    }
}

impl Server {
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Tells it to stop, without waiting.
    pub fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    pub fn get(&self, path: &str) -> Reply {
        self.agent.get(self.url(path)).call().unwrap().into()
    }

    pub fn get_with_key(&self, path: &str, key: &str) -> Reply {
        self.agent.get(self.url(path)).header("authorization", key).call().unwrap().into()
    }

    pub fn post_bytes(&self, path: &str, body: &[u8]) -> Reply {
        self.open(path, body).into()
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    /// A response whose body is still to be read.
    pub fn open(&self, path: &str, body: &[u8]) -> ureq::http::Response<ureq::Body> {
        self.agent.post(self.url(path)).header("content-type", "application/json").send(body).unwrap()
    }

    pub fn ok(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{}", reply.text);
        reply.json()
    }

    pub fn chat(&self, fields: &Value) -> Value {
        self.ok("/v1/chat/completions", &with(hello(), fields))
    }

    pub fn complete(&self, fields: &Value) -> Value {
        self.ok("/v1/completions", fields)
    }

    /// The events of a stream, and whether it ended with `[DONE]`.
    pub fn events(&self, path: &str, body: &Value) -> (Vec<Value>, bool) {
        let response = self.open(path, with(body.clone(), &json!({"stream": true})).to_string().as_bytes());
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        read_events(response)
    }

    /// KV bytes that sequences hold, as `/health` says.
    pub fn kv(&self) -> u64 {
        self.get("/health").json()["models"][0]["engines"][0]["kv_used_bytes"].as_u64().unwrap()
    }

    /// Waits until something holds.
    pub fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < Duration::from_secs(20), "it never came that {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

pub fn read_events(response: ureq::http::Response<ureq::Body>) -> (Vec<Value>, bool) {
    let (mut events, mut done) = (Vec::new(), false);
    for line in BufReader::new(response.into_body().into_reader()).lines() {
        let line = line.unwrap();
        match line.strip_prefix("data: ") {
            Some("[DONE]") => done = true,
            Some(data) => {
                assert!(!done, "an event after [DONE]");
                events.push(serde_json::from_str(data).unwrap());
            }
            None => assert!(line.is_empty() || line.starts_with(':'), "{line}"),
        }
    }
    (events, done)
}

/// `body` with other fields.
pub fn with(mut body: Value, fields: &Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// A question that asks for a few tokens, whatever they are.
pub fn hello() -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "ignore_eos": true})
}

/// The prompt of [`hello`], rendered without the server.
pub fn hello_tokens() -> Vec<u32> {
    let checkpoint = checkpoint();
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let text = checkpoint.chat.unwrap().render(&[Message::new("user", "Hello")], &options).unwrap();
    checkpoint.tokenizer.encode(&text, false).unwrap()
}

/// The fake engine's answer, by definition.
pub fn expected(prompt: &[u32], spec: &SampleSpec, count: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    let spec = SampleSpec { generated_from: prompt.len(), ..spec.clone() };
    for _ in 0..count {
        let logits = FakeEngine::logits(&history, VOCAB);
        history.push(sample(&spec, &logits, &history).unwrap().token);
    }
    history.split_off(prompt.len())
}

pub fn decode(tokens: &[u32]) -> String {
    checkpoint().tokenizer.decode(tokens, true)
}

/// The Python of the judged tier; `None` outside of it.
pub fn judge() -> Option<std::ffi::OsString> {
    if std::env::var_os("TANDEM_JUDGED").is_none() {
        eprintln!("skipped: TANDEM_JUDGED is not set");
        return None;
    }
    Some(std::env::var_os("TANDEM_JUDGE_PYTHON").expect("TANDEM_JUDGE_PYTHON in the judged tier"))
}
