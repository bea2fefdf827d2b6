//! A loaded model and what a command's flags fix for all of its answers.

use std::time::{Duration, Instant};

use anyhow::Context;
use tandem_engine::SampleSpec;
use tandem_model::{Checkpoint, Detokenizer};
use tandem_runtime::{Coordinator, Done, Options, Request, TextEvent, TextStream};

use crate::cli::RunArgs;
use crate::output::{Output, Start};
use crate::{interrupt, measure, model, prompt};

pub struct Session {
    pub checkpoint: Checkpoint,
    name: String,
    context: usize,
    coordinator: Coordinator,
    engine: Option<String>,
    request: Request,
    stop: Vec<String>,
    stats: bool,
    load: Duration,
    answered: bool,
}

impl Session {
    /// Starts the engine and waits until it is loaded. `begun` is when loading began.
    pub fn start(
        args: &RunArgs,
        checkpoint: Checkpoint,
        context: usize,
        begun: Instant,
    ) -> anyhow::Result<Self> {
        let name = match (&args.dummy.weights, &args.model) {
            (Some(config), _) => config.display().to_string(),
            (None, name) => name.clone().unwrap_or_default(),
        };
        let cpu = model::options(&args.engine.load, args.engine.threads, context);
        let mut coordinator = Coordinator::default();
        model::start(&mut coordinator, &name, &checkpoint, &args.engine, cpu, Options::default())?;
        let engine = args.engine.engine.clone();
        let capabilities = coordinator.ready(&name, engine.as_deref())?;
        let sample = SampleSpec {
            top_logprobs: args.output.logprobs,
            ..model::sampling(&args.sampling, &checkpoint.generation)
        };
        let stop_tokens =
            if args.answer.ignore_eos { Vec::new() } else { checkpoint.generation.eos_token_ids.clone() };
        let request = Request {
            tokens: Vec::new(),
            sample,
            max_tokens: args.answer.max_tokens.map(usize::from),
            stop_tokens,
            context: None,
            adapter: None,
            priority: 0,
        };
        tracing::debug!(?capabilities, sample = ?request.sample, stop_tokens = ?request.stop_tokens, "loaded");
        let (stop, stats) = (args.answer.stop.clone(), args.output.stats);
        let load = begun.elapsed();
        let answered = false;
        Ok(Self { checkpoint, name, context, coordinator, engine, request, stop, stats, load, answered })
    }

    /// Whether `tokens` of prompt leave room for an answer.
    pub fn check_fits(&self, tokens: usize) -> anyhow::Result<()> {
        prompt::check_fits(tokens, self.request.max_tokens, self.context, self.checkpoint.decoder.max_context)
    }

    /// Streams the answer to `output`; returns its text too.
    pub fn answer(&mut self, tokens: Vec<u32>, output: &mut Output) -> anyhow::Result<(String, Done)> {
        let tokenizer = &self.checkpoint.tokenizer;
        tracing::debug!(?tokens, "prompt");
        let prompt_tokens = tokens.len();
        let request = Request { tokens, ..self.request.clone() };
        let routed = self.coordinator.generate(&self.name, &[request], self.engine.as_deref())?;
        output.start(&Start {
            model: &self.name,
            engine: &routed.decision.route.engine,
            context: self.context,
            prompt_tokens,
            seed: self.request.sample.seed,
        })?;
        let tokens = routed.streams.into_iter().next().context("the request has no stream")?;
        let events = TextStream::new(tokens, Detokenizer::new(tokenizer, true), self.stop.clone())?;
        let ends = interrupt::Ends::answer(events.control());
        let load = (!self.answered).then_some(self.load);
        let mut answer = String::new();
        for event in events {
            match event {
                TextEvent::Piece { text, token } => {
                    output.piece(&text, token.as_ref(), tokenizer)?;
                    answer += &text;
                }
                TextEvent::Error(error) => return Err(error.into()),
                TextEvent::Done(done) => {
                    drop(ends);
                    self.answered = true;
                    output.done(&done, load)?;
                    if self.stats {
                        for line in measure::lines(load, self.request.sample.seed, &done) {
                            eprintln!("{line}");
                        }
                    }
                    return Ok((answer, done));
                }
            }
        }
        anyhow::bail!("the answer broke off")
    }
}
