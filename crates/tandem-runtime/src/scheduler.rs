//! Many requests, one engine.
//!
//! A request waits in line, joins the running batch, and grows by the rows of the steps it is in; when memory runs out
//! it may have to wait again. Each of these has a file: [`admission`] says who joins and who makes way, [`plan`] which
//! rows make the next step, [`pace`] how much of a prompt, and [`step`] runs them.
//!
//! The scheduler owns the engine but no thread, so tests drive it step by step.

mod admission;
mod job;
mod pace;
mod plan;
mod step;

use std::collections::VecDeque;
use std::time::Instant;

use tandem_engine::{Capabilities, Engine, SeqId};

use self::job::{Active, Job};
use self::pace::Pace;
use self::step::Flight;
use crate::RuntimeError;
use crate::channel::Sender;
use crate::load::Work;
use crate::message::{Event, Reason, Request, RequestId, Route};
use crate::prefix::Prefixes;

pub(crate) struct Scheduler {
    engine: Box<dyn Engine>,
    capabilities: Capabilities,
    kv_limit: u64,
    waiting: Vec<Job>,
    running: Vec<Active>,
    /// Submitted steps, oldest first.
    flights: VecDeque<Flight>,
    prefixes: Prefixes,
    pace: Pace,
    steps: u64,
    /// Tells the time that steps take; tests have their own.
    now: fn() -> Instant,
    last_collected: Instant,
    completed: u64,
    preempted: u64,
}

impl Scheduler {
    /// Keeps prefixes of at most `prefix_tokens` tokens.
    pub fn new(engine: Box<dyn Engine>, prefix_tokens: usize) -> Self {
        let capabilities = engine.capabilities().clone();
        Self {
            kv_limit: engine.memory().kv_limit,
            engine,
            waiting: Vec::new(),
            running: Vec::new(),
            flights: VecDeque::new(),
            prefixes: Prefixes::new(prefix_tokens, capabilities.exact_fork),
            pace: Pace::new(),
            steps: 0,
            now: Instant::now,
            last_collected: Instant::now(),
            completed: 0,
            preempted: 0,
            capabilities,
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

    /// What it does, in numbers.
    pub fn work(&self) -> Work {
        Work {
            running: self.running(),
            completed: self.completed,
            preempted: self.preempted,
            prefix_tokens: self.prefixes.tokens(),
            memory: self.engine.memory(),
        }
    }

    /// Checks a request and lets it wait for its turn.
    pub fn accept(&mut self, id: RequestId, request: Request, sender: Sender, arrived: Instant) {
        match self.longest_answer(&request) {
            Ok(max_new) => self.waiting.push(Job::new(id, request, max_new, sender, arrived)),
            Err(error) => sender.end(Event::Error(error.into())),
        }
    }

    /// Frees a request and all it holds; nobody reads its events.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|job| job.id != id);
        if let Some(index) = self.running.iter().position(|active| active.job.id == id) {
            self.stop(index);
        }
    }

    /// Ends a request as complete.
    pub fn finish(&mut self, id: RequestId, reason: Reason) {
        if let Some(active) = self.running.iter_mut().find(|active| active.job.id == id) {
            active.ended.get_or_insert(Ok(reason));
            self.reap();
        } else if let Some(index) = self.waiting.iter().position(|job| job.id == id) {
            let job = self.waiting.remove(index);
            self.complete(job, reason);
        }
    }

    /// Ends every request with `error`. Does not touch the engine, which may be broken.
    pub fn fail_all(&mut self, error: &RuntimeError) {
        let running = self.running.drain(..).map(|active| active.job);
        for job in running.chain(self.waiting.drain(..)) {
            job.sender.end(Event::Error(error.clone()));
        }
    }

    /// Closes all kept prefixes.
    pub fn clear_prefixes(&mut self) {
        self.prefixes.clear(self.engine.as_mut());
    }

    /// Takes ended requests out of the batch. Their memory is free, or kept as a prefix, before their reader knows.
    fn reap(&mut self) {
        while let Some(index) = self.running.iter().position(|active| active.ended.is_some()) {
            let ended = self.running[index].ended.take();
            match ended {
                Some(Err(error)) => self.stop(index).sender.end(Event::Error(error)),
                Some(Ok(reason)) => {
                    let Active { job, seq, fed, prompt_end, .. } = self.running.remove(index);
                    let (engine, adapter) = (self.engine.as_mut(), job.request.adapter);
                    if let Some(prompt_end) = prompt_end {
                        self.prefixes.keep(engine, adapter, &job.tokens[..job.prompt], prompt_end);
                    }
                    self.prefixes.keep(engine, adapter, &job.tokens[..fed], seq);
                    self.complete(job, reason);
                }
                None => {}
            }
        }
    }

    fn complete(&mut self, job: Job, reason: Reason) {
        let engine = self.capabilities.engine.clone();
        let done = job.done(reason, Route { engine, reason: "the only engine".to_owned() });
        self.completed += 1;
        job.sender.end(Event::Done(done));
    }

    /// Takes a request out of the batch and frees what it holds. Rows of it that are still under way are ignored.
    fn stop(&mut self, index: usize) -> Job {
        let Active { job, seq, prompt_end, .. } = self.running.remove(index);
        self.close(seq);
        if let Some(prompt_end) = prompt_end {
            self.close(prompt_end);
        }
        job
    }

    fn close(&mut self, seq: SeqId) {
        if let Err(error) = self.engine.close(seq) {
            tracing::error!(%error, "closing a sequence");
        }
    }
}

#[cfg(test)]
mod tests;
