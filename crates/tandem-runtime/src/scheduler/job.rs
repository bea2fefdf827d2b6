//! A request on its way through the scheduler.

use std::time::Instant;

use tandem_engine::{EngineError, Input, Row, RowOut, Sampled, SeqId, Want};

use crate::RuntimeError;
use crate::channel::Sender;
use crate::message::{Done, Event, Reason, Request, RequestId, Route, Timing, Token, Usage};

/// How many times a request is overtaken until it counts one priority higher.
const PATIENCE: u32 = 8;

/// A request and what has come of it. It holds no sequence: so it waits at first, and again if it was preempted.
pub(crate) struct Job {
    pub id: RequestId,
    pub request: Request,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Most tokens of the answer.
    pub max_new: usize,
    /// Tokens of the prompt that were not computed again; `None` until it has begun.
    pub cached: Option<usize>,
    pub sender: Sender,
    pub overtaken: u32,
    arrived: Instant,
    begun: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Job {
    pub fn new(
        id: RequestId,
        mut request: Request,
        max_new: usize,
        sender: Sender,
        arrived: Instant,
    ) -> Self {
        let tokens = std::mem::take(&mut request.tokens);
        let prompt = tokens.len();
        request.sample.generated_from = prompt;
        let (cached, overtaken) = (None, 0);
        let (begun, first_token, last_token) = (None, None, None);
        Self {
            id,
            request,
            tokens,
            prompt,
            max_new,
            cached,
            sender,
            overtaken,
            arrived,
            begun,
            first_token,
            last_token,
        }
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// What its sequence is opened for.
    pub fn max_len(&self) -> usize {
        self.prompt + self.max_new
    }

    /// Its priority, and what it has gained by being overtaken.
    pub fn level(&self) -> i64 {
        i64::from(self.request.priority) + i64::from(self.overtaken / PATIENCE)
    }

    /// It has a sequence that holds `cached` of its tokens.
    pub fn begin(&mut self, cached: usize) {
        self.begun.get_or_insert_with(Instant::now);
        self.cached.get_or_insert(cached);
    }

    /// The end of an answer that took its course.
    pub fn done(&self, reason: Reason, route: Route) -> Done {
        let seconds = |from: Option<Instant>, to: Option<Instant>| Some((to? - from?).as_secs_f64());
        let arrived = Some(self.arrived);
        let timing = Timing {
            queue: seconds(arrived, self.begun),
            prefill: seconds(self.begun, self.first_token),
            ttft: seconds(arrived, self.first_token),
            decode: seconds(self.first_token, self.last_token),
        };
        let (prompt, cached) = (self.prompt, self.cached.unwrap_or(0));
        Done { reason, usage: Usage { prompt, cached, generated: self.generated() }, timing, route }
    }
}

/// A job with a sequence.
pub(crate) struct Active {
    pub job: Job,
    pub seq: SeqId,
    /// Tokens that the sequence holds, submitted steps included.
    pub fed: usize,
    /// Samples under way.
    pub pending: usize,
    /// The sequence as the prompt ended, where the engine cannot fork the longer one there.
    pub prompt_end: Option<SeqId>,
    /// The step that last had a row of it.
    pub turn: u64,
    pub ended: Option<Result<Reason, RuntimeError>>,
}

impl Active {
    pub fn new(job: Job, seq: SeqId, fed: usize) -> Self {
        Self { job, seq, fed, pending: 0, prompt_end: None, turn: 0, ended: None }
    }

    /// Tokens that its next row could feed, a sample that is still under way included; 0 if there is nothing to come.
    pub fn ahead(&self) -> usize {
        let whole = self.job.generated() + self.pending >= self.job.max_new;
        if whole || self.ended.is_some() { 0 } else { self.job.tokens.len() + self.pending - self.fed }
    }

    /// Whether its reader can take what its next row gives.
    pub fn has_room(&self) -> bool {
        self.job.sender.has_room(self.pending + 1)
    }

    /// Whether its reader is behind.
    pub fn is_paused(&self) -> bool {
        !self.job.sender.has_room(1)
    }

    /// How many of its first `within` tokens a job begins with, the job's last one left out; `None` if their adapters
    /// differ.
    pub fn common(&self, job: &Job, within: usize) -> Option<usize> {
        let (mine, known) = (self.job.tokens.iter().take(within), &job.tokens[..job.tokens.len() - 1]);
        let alike = self.job.request.adapter == job.request.adapter;
        alike.then(|| mine.zip(known).take_while(|(a, b)| a == b).count())
    }

    /// The row that feeds the next `count` tokens.
    pub fn row(&self, count: usize) -> Row {
        let tokens = &self.job.tokens;
        let input = match tokens.get(self.fed..self.fed + count) {
            Some(next) => Input::Tokens(next.to_vec()),
            None => Input::PreviousSample,
        };
        let last = count == self.ahead();
        let want = if last { Want::Sample(self.job.request.sample.clone()) } else { Want::Nothing };
        Row { seq: self.seq, input, want }
    }

    /// A row of `count` tokens was submitted in step `turn`.
    pub fn submitted(&mut self, count: usize, turn: u64) {
        let sampled = count == self.ahead();
        self.fed += count;
        self.turn = turn;
        self.pending += usize::from(sampled);
    }

    /// A row came back.
    pub fn take(&mut self, out: RowOut, now: Instant) {
        if self.ended.is_some() {
            return;
        }
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
        let job = &mut self.job;
        self.pending -= 1;
        job.first_token.get_or_insert(now);
        job.last_token = Some(now);
        job.tokens.push(token);
        if job.request.stop_tokens.contains(&token) {
            self.ended = Some(Ok(Reason::Stop { token }));
            return;
        }
        job.sender.send(Event::Token(Token { id: token, logprob, top }));
        if job.generated() >= job.max_new {
            self.ended = Some(Ok(Reason::Length));
        }
    }
}
