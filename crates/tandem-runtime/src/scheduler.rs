//! Which rows make the next step.
//!
//! First in, first out: a request joins the running batch when there is a row for it and the KV of its longest possible
//! answer fits beside what the others may still need. A step then holds one row for each sequence that decodes, and the
//! rest of its tokens go to prompts, oldest first, in chunks; inner chunks want nothing back. A sequence whose reader is
//! behind gets no row.
//!
//! The scheduler owns the engine but no thread, so tests drive it step by step.

use std::collections::VecDeque;
use std::time::Instant;

use tandem_engine::{Capabilities, Engine, EngineError, Input, Kind, Row, RowOut, Sampled, SeqId, Want};

use crate::RuntimeError;
use crate::channel::Sender;
use crate::message::{Done, Event, Reason, Request, RequestId, Route, Timing, Token, Usage};
use crate::prefix::Prefix;

pub(crate) struct Scheduler {
    engine: Box<dyn Engine>,
    capabilities: Capabilities,
    waiting: VecDeque<Waiting>,
    running: Vec<Active>,
    prefix: Prefix,
    completed: u64,
}

/// A request that has been checked but holds nothing yet.
struct Waiting {
    id: RequestId,
    request: Request,
    max_new: usize,
    sender: Sender,
    arrived: Instant,
}

/// A request with a sequence.
struct Active {
    id: RequestId,
    seq: SeqId,
    request: Request,
    /// Prompt and answer.
    tokens: Vec<u32>,
    /// How many of `tokens` the engine holds.
    fed: usize,
    cached: usize,
    max_new: usize,
    sender: Sender,
    arrived: Instant,
    admitted: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    ended: Option<Result<Reason, RuntimeError>>,
}

/// A row of the next step: how many tokens of which running request.
#[derive(Clone, Copy)]
struct Planned {
    index: usize,
    count: usize,
}

impl Scheduler {
    pub fn new(engine: Box<dyn Engine>) -> Self {
        let capabilities = engine.capabilities().clone();
        Self {
            engine,
            capabilities,
            waiting: VecDeque::new(),
            running: Vec::new(),
            prefix: Prefix::default(),
            completed: 0,
        }
    }

    pub fn engine(&self) -> &dyn Engine {
        self.engine.as_ref()
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no request is left.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Requests that ended with `Done`.
    pub fn completed(&self) -> u64 {
        self.completed
    }

    /// Checks a request and lets it wait for its turn.
    pub fn accept(&mut self, id: RequestId, mut request: Request, sender: Sender, arrived: Instant) {
        request.sample.generated_from = request.tokens.len();
        match self.longest_answer(&request) {
            Ok(max_new) => self.waiting.push_back(Waiting { id, request, max_new, sender, arrived }),
            Err(error) => sender.end(Event::Error(error.into())),
        }
    }

    /// How many tokens the answer may have.
    fn longest_answer(&self, request: &Request) -> Result<usize, EngineError> {
        let vocab = self.capabilities.vocab_size;
        request.sample.validate(vocab)?;
        if request.tokens.is_empty() {
            return Err(EngineError::Empty("the prompt is empty".to_owned()));
        }
        if let Some(&token) = request.tokens.iter().find(|t| **t as usize >= vocab) {
            return Err(EngineError::TokenOutOfRange { token, vocab });
        }
        if request.max_tokens == Some(0) {
            let (field, value, expected) = ("max_tokens".to_owned(), "0".to_owned(), "1 or more".to_owned());
            return Err(EngineError::InvalidSpec { field, value, expected });
        }
        let limit = request.context.unwrap_or(usize::MAX).min(self.capabilities.context);
        let prompt = request.tokens.len();
        let needed = prompt.saturating_add(request.max_tokens.unwrap_or(1));
        if needed > limit {
            return Err(EngineError::ContextOverflow { needed, limit });
        }
        Ok(request.max_tokens.unwrap_or(limit - prompt))
    }

    /// Frees a request and all it holds; nobody reads its events.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|w| w.id != id);
        if let Some(index) = self.running.iter().position(|a| a.id == id) {
            let active = self.running.remove(index);
            self.close(active.seq);
        }
    }

    /// Ends a request as complete.
    pub fn finish(&mut self, id: RequestId, reason: Reason) {
        if let Some(active) = self.running.iter_mut().find(|a| a.id == id) {
            active.ended = Some(Ok(reason));
            self.reap();
        } else if let Some(waiting) = self.waiting.iter().position(|w| w.id == id)
            && let Some(waiting) = self.waiting.remove(waiting)
        {
            let usage = Usage { prompt: waiting.request.tokens.len(), ..Usage::default() };
            let done = Done { reason, usage, timing: Timing::default(), route: self.route() };
            waiting.sender.end(Event::Done(done));
        }
    }

    /// Ends every request with `error`. Does not touch the engine, which may be broken.
    pub fn fail_all(&mut self, error: &RuntimeError) {
        let running = self.running.drain(..).map(|a| a.sender);
        for sender in running.chain(self.waiting.drain(..).map(|w| w.sender)) {
            sender.end(Event::Error(error.clone()));
        }
    }

    /// Runs one step; `false` if there was nothing to run until a message comes.
    ///
    /// # Errors
    /// The engine is broken and must be rebuilt.
    pub fn step(&mut self) -> Result<bool, RuntimeError> {
        self.admit();
        let plan = self.plan();
        if plan.is_empty() {
            return Ok(false);
        }
        self.run(&plan)?;
        self.reap();
        Ok(true)
    }

    /// Moves waiting requests into the batch while rows and memory last.
    fn admit(&mut self) {
        let rows = self.capabilities.max_batch.min(self.max_step_tokens());
        while self.running.len() < rows
            && let Some(next) = self.waiting.pop_front()
        {
            let per_token = self.capabilities.kv_bytes_per_token;
            let reserved = self.running.iter().map(|a| a.max_len() as u64 * per_token).sum();
            let limit = self.engine.memory().kv_limit;
            let needed = next.max_len() as u64 * per_token;
            if needed > limit {
                let error = EngineError::OutOfMemory {
                    what: format!("the KV cache of {} tokens", next.max_len()),
                    needed,
                    available: limit,
                    hint: "ask for fewer tokens, lower --context or raise --memory-budget".to_owned(),
                };
                next.sender.end(Event::Error(error.into()));
                continue;
            }
            if needed > limit.saturating_sub(reserved) {
                self.waiting.push_front(next);
                return;
            }
            self.start(next, limit - reserved - needed);
        }
    }

    /// Gives a request its sequence; `spare` bytes of KV stay for the kept prefix.
    fn start(&mut self, waiting: Waiting, spare: u64) {
        let engine = self.engine.as_mut();
        let max_len = waiting.max_len();
        let Waiting { id, request, max_new, sender, arrived } = waiting;
        let opened = match self.prefix.fork(engine, &request.tokens, max_len) {
            Ok(None) => engine.open(max_len, None).map(|seq| (seq, 0)),
            Ok(Some(forked)) => Ok(forked),
            Err(error) => Err(error),
        };
        if self.prefix.exclusive_bytes(engine) > spare {
            self.prefix.clear(engine);
        }
        match opened {
            Ok((seq, cached)) => self.running.push(Active {
                id,
                seq,
                tokens: request.tokens.clone(),
                request,
                fed: cached,
                cached,
                max_new,
                sender,
                arrived,
                admitted: Instant::now(),
                first_token: None,
                last_token: None,
                ended: None,
            }),
            Err(error) => sender.end(Event::Error(error.into())),
        }
    }

    fn plan(&self) -> Vec<Planned> {
        let ready = || (0..self.running.len()).filter(|i| self.running[*i].sender.has_room());
        let decoding = ready().filter(|i| self.running[*i].generated() > 0);
        let prefilling = ready().filter(|i| self.running[*i].generated() == 0);
        let mut budget = self.max_step_tokens();
        let mut plan = Vec::new();
        for index in decoding.chain(prefilling) {
            let active = &self.running[index];
            let count = self.chunk((active.tokens.len() - active.fed).min(budget));
            if count == 0 {
                break;
            }
            budget -= count;
            plan.push(Planned { index, count });
        }
        plan
    }

    fn max_step_tokens(&self) -> usize {
        match &self.capabilities.kind {
            Kind::Dynamic { max_step_tokens } => *max_step_tokens,
            Kind::Static { chunks } => chunks.last().copied().unwrap_or(1),
        }
    }

    /// How many of `tokens` a row takes: all, or the longest length there is a function for.
    fn chunk(&self, tokens: usize) -> usize {
        match &self.capabilities.kind {
            Kind::Dynamic { .. } => tokens,
            Kind::Static { chunks } => chunks.iter().rev().copied().find(|c| *c <= tokens).unwrap_or(tokens),
        }
    }

    /// Runs one step. A refused batch is run row by row, so that only the request at fault ends.
    fn run(&mut self, plan: &[Planned]) -> Result<(), RuntimeError> {
        let rows: Vec<Row> = plan.iter().map(|p| self.running[p.index].row(p.count)).collect();
        let mut submitted = self.engine.submit(&rows);
        if let Err(EngineError::OutOfMemory { .. }) = &submitted
            && self.prefix.clear(self.engine.as_mut())
        {
            submitted = self.engine.submit(&rows);
        }
        match (submitted, plan) {
            (Ok(ticket), _) => {
                let outs = self.engine.collect(ticket)?;
                let now = Instant::now();
                for (planned, out) in plan.iter().zip(outs) {
                    self.running[planned.index].take(planned.count, out, now);
                }
            }
            (Err(error), [only]) => self.running[only.index].ended = Some(Err(error.into())),
            (Err(_), _) => plan.iter().try_for_each(|one| self.run(&[*one]))?,
        }
        Ok(())
    }

    /// Takes ended requests out of the batch. Their memory is free, or kept as the prefix, before their reader knows.
    fn reap(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            let Some(ended) = self.running[index].ended.take() else {
                index += 1;
                continue;
            };
            let mut active = self.running.remove(index);
            match ended {
                Ok(reason) => {
                    let done = active.done(reason, self.route());
                    active.tokens.truncate(active.fed);
                    if active.fed > 0 {
                        self.prefix.keep(self.engine.as_mut(), active.seq, active.tokens);
                    } else {
                        self.close(active.seq);
                    }
                    self.completed += 1;
                    active.sender.end(Event::Done(done));
                }
                Err(error) => {
                    self.close(active.seq);
                    active.sender.end(Event::Error(error));
                }
            }
        }
    }

    fn close(&mut self, seq: SeqId) {
        if let Err(error) = self.engine.close(seq) {
            tracing::error!(%error, "closing a sequence");
        }
    }

    fn route(&self) -> Route {
        Route { engine: self.capabilities.engine.clone(), reason: "the only engine".to_owned() }
    }
}

impl Waiting {
    fn max_len(&self) -> usize {
        self.request.tokens.len() + self.max_new
    }
}

impl Active {
    fn prompt(&self) -> usize {
        self.request.tokens.len()
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt()
    }

    fn max_len(&self) -> usize {
        self.prompt() + self.max_new
    }

    /// The row that feeds the next `count` tokens.
    fn row(&self, count: usize) -> Row {
        let next = &self.tokens[self.fed..][..count];
        let last = self.fed + count == self.tokens.len();
        let want = if last { Want::Sample(self.request.sample.clone()) } else { Want::Nothing };
        Row { seq: self.seq, input: Input::Tokens(next.to_vec()), want }
    }

    fn take(&mut self, count: usize, out: RowOut, now: Instant) {
        self.fed += count;
        match out {
            RowOut::Nothing => {}
            RowOut::Sampled(sampled) => self.grow(sampled, now),
            RowOut::Failed(error) => self.ended = Some(Err(error.into())),
            RowOut::Logits(_) => {
                let error = EngineError::Device("logits came back where a sample was wanted".to_owned());
                self.ended = Some(Err(error.into()));
            }
        }
    }

    fn grow(&mut self, sampled: Sampled, now: Instant) {
        let Sampled { token, logprob, top } = sampled;
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.tokens.push(token);
        if self.request.stop_tokens.contains(&token) {
            self.ended = Some(Ok(Reason::Stop { token }));
            return;
        }
        self.sender.send(Event::Token(Token { id: token, logprob, top }));
        if self.generated() >= self.max_new {
            self.ended = Some(Ok(Reason::Length));
        }
    }

    fn done(&self, reason: Reason, route: Route) -> Done {
        let seconds = |from: Instant, to: Option<Instant>| to.map(|to| (to - from).as_secs_f64());
        let timing = Timing {
            queue: seconds(self.arrived, Some(self.admitted)),
            prefill: seconds(self.admitted, self.first_token),
            ttft: seconds(self.arrived, self.first_token),
            decode: self.first_token.and_then(|first| seconds(first, self.last_token)),
        };
        let usage = Usage { prompt: self.prompt(), cached: self.cached, generated: self.generated() };
        Done { reason, usage, timing, route }
    }
}

#[cfg(test)]
mod tests;
