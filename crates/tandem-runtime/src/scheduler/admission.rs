//! Who joins the running batch, and who makes way.
//!
//! What can never fit is refused at once. Everything else waits in line: by priority, first in first out within one, and
//! whoever has been overtaken often counts as a higher one, so that nobody waits for ever.
//!
//! The first in line joins when there is a row for it and memory for its prompt and a little more, beside what the
//! running ones will soon need; not for its longest possible answer, which hardly anybody gives. So memory can run out
//! later. Then kept prefixes go first, and after them the running request of the lowest priority that came last waits
//! again. What it had is computed once more when its turn comes, from the longest prefix that is still kept, and it goes
//! on with the same tokens as if nothing had happened. It is not swapped out instead: a snapshot of its KV would lie in
//! the very memory that has run out, and prompts are computed many tokens at a time.
//!
//! A request whose reader is behind makes way for one that waits. It joins again when its reader has caught up.
//!
//! A request whose beginning a running one is still computing waits until it can fork that: the choices of one prompt, or
//! many users of one system prompt who come at once, compute it once.

use std::cmp::Reverse;

use tandem_engine::{EngineError, Fork, SeqId};

use super::Scheduler;
use super::job::{Active, Job};
use super::plan::row_limit;
use crate::message::{Event, Reason, Request};

/// Tokens that a request may grow by before memory is looked at again.
const RESERVE: usize = 64;

/// Tokens that a running prompt must be about to spare a request for it to wait for them.
const WORTH_WAITING: usize = 16;

impl Scheduler {
    /// How many tokens the answer may have.
    pub(super) fn longest_answer(&self, request: &Request) -> Result<usize, EngineError> {
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
        let tokens = prompt.saturating_add(request.max_tokens.unwrap_or(1));
        if tokens > limit {
            return Err(EngineError::ContextOverflow { needed: tokens, limit });
        }
        let needed = self.bytes(tokens);
        if needed > self.kv_limit {
            return Err(EngineError::OutOfMemory {
                what: format!("the KV cache of {tokens} tokens"),
                needed,
                available: self.kv_limit,
                hint: "ask for fewer tokens, lower --context or raise --memory-budget".to_owned(),
            });
        }
        Ok(request.max_tokens.unwrap_or(limit - prompt))
    }

    fn bytes(&self, tokens: usize) -> u64 {
        tokens as u64 * self.capabilities.kv_bytes_per_token
    }

    /// Moves waiting requests into the batch while rows and memory last.
    pub(super) fn admit(&mut self) {
        while let Some(next) = self.first_in_line() {
            let at_work = self.running.iter().filter(|active| !active.is_paused()).count();
            let level = self.waiting[next].level();
            if at_work >= row_limit(&self.capabilities) {
                if !self.make_way(|active| active.job.level() < level) {
                    return;
                }
            } else if self.has_memory(&self.waiting[next]) {
                self.start(next);
            } else if !self.make_way(|active| active.job.level() < level || active.is_paused()) {
                return;
            }
        }
    }

    /// The request that joins next. One whose reader is behind has been preempted, and waits for its reader.
    fn first_in_line(&self) -> Option<usize> {
        let ready = self.waiting.iter().enumerate();
        let ready = ready.filter(|(_, job)| job.sender.has_room(1) && !self.is_being_computed(job));
        ready.max_by_key(|(_, job)| (job.level(), Reverse(job.id))).map(|(index, _)| index)
    }

    /// Whether a running request is about to compute much more of a job's beginning than could be forked now. Where only
    /// the end of a sequence can be forked, that would be in vain.
    fn is_being_computed(&self, job: &Job) -> bool {
        let now = || {
            let kept = self.prefixes.agreed(job.request.adapter, &job.tokens);
            self.nearest_running(job).map_or(0, |(_, at)| at).max(kept)
        };
        let coming =
            self.running.iter().filter(|active| active.fed < active.job.prompt && !active.is_paused());
        let coming = coming.filter_map(|active| active.common(job, active.job.prompt)).max();
        self.capabilities.exact_fork && coming.is_some_and(|coming| coming >= now() + WORTH_WAITING)
    }

    /// Whether a request's tokens and a little more fit beside what the running ones will soon need, perhaps in place of
    /// kept prefixes.
    fn has_memory(&self, job: &Job) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let kept = self.prefixes.agreed(job.request.adapter, &job.tokens);
        let spared = self.nearest_running(job).map_or(0, |(_, at)| at).max(kept);
        let needed = self.bytes(soon(job, spared) + self.running.iter().map(grows).sum::<usize>());
        let memory = self.engine.memory();
        let free = self.kv_limit.saturating_sub(memory.kv_exclusive + memory.kv_shared);
        if needed <= free {
            return true;
        }
        // Two bounds of what kept prefixes can give: what each alone would free, and all that no running request holds.
        let held = self.bytes(self.running.iter().map(|active| active.fed).sum());
        let evictable =
            self.prefixes.exclusive_bytes(self.engine()).max((self.kv_limit - free).saturating_sub(held));
        needed <= free + evictable
    }

    /// Gives a waiting request its sequence.
    fn start(&mut self, index: usize) {
        let mut job = self.waiting.remove(index);
        for other in self.waiting.iter_mut().filter(|other| other.id < job.id) {
            other.overtaken += 1;
        }
        let (adapter, max_len) = (job.request.adapter, job.max_len());
        let forked = self
            .fork_running(&job)
            .or_else(|| self.prefixes.fork(self.engine.as_mut(), adapter, &job.tokens, max_len));
        match forked.map_or_else(|| self.engine.open(max_len, adapter).map(|seq| (seq, 0)), Ok) {
            Ok((seq, fed)) => {
                job.begin(fed.min(job.prompt));
                self.running.push(Active::new(job, seq, fed));
            }
            Err(error) => job.sender.end(Event::Error(error.into())),
        }
    }

    /// The running sequence that has most of a job's beginning, and how much that is. Not all of it, as in
    /// [`Prefixes::fork`](crate::prefix::Prefixes::fork).
    fn nearest_running(&self, job: &Job) -> Option<(SeqId, usize)> {
        let common =
            self.running.iter().filter_map(|active| Some((active.seq, active.common(job, active.fed)?)));
        common.max_by_key(|(_, at)| *at).filter(|(_, at)| *at > 0)
    }

    /// A fork of a running sequence, where none that is kept has more to give.
    fn fork_running(&mut self, job: &Job) -> Option<(SeqId, usize)> {
        let (seq, at) = self.nearest_running(job)?;
        if at <= self.prefixes.agreed(job.request.adapter, &job.tokens) {
            return None;
        }
        match self.engine.fork(seq, at, job.max_len()) {
            Ok(Fork::Exact(fork)) => Some((fork, at)),
            Ok(Fork::Inexact) => None,
            Err(error) => {
                tracing::error!(%error, "forking a running sequence");
                None
            }
        }
    }

    /// Lets the running request of the lowest priority that came last wait again, of those that `may`; `false` if none
    /// does.
    fn make_way(&mut self, may: impl Fn(&Active) -> bool) -> bool {
        let running = self.running.iter().enumerate().filter(|(_, active)| may(active));
        let first = running
            .min_by_key(|(_, active)| (active.job.level(), !active.is_paused(), Reverse(active.job.id)));
        let Some(index) = first.map(|(index, _)| index) else { return false };
        let job = self.stop(index);
        tracing::debug!(request = job.id.0, tokens = job.tokens.len(), "preempted");
        self.preempted += 1;
        self.waiting.push(job);
        true
    }

    /// The engine has refused a step for lack of `missing` bytes: frees some. The last request there is has all memory to
    /// itself, and ends.
    pub(super) fn make_room(&mut self, missing: u64, error: &EngineError) {
        let freed = self.prefixes.free(self.engine.as_mut(), missing);
        if freed || (self.running.len() > 1 && self.make_way(|_| true)) {
            return;
        }
        for active in &mut self.running {
            // Without a limit of its own an answer goes on until there is no room for more.
            let open_ended = active.job.request.max_tokens.is_none() && active.job.generated() > 0;
            active.ended = Some(if open_ended { Ok(Reason::Length) } else { Err(error.clone().into()) });
        }
        self.reap();
    }
}

/// Tokens that a job feeds soon if `spared` need not be computed.
fn soon(job: &Job, spared: usize) -> usize {
    job.tokens.len() - spared + RESERVE.min(job.max_new - job.generated())
}

fn grows(active: &Active) -> usize {
    soon(&active.job, active.fed.min(active.job.tokens.len()))
}
