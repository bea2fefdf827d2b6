//! Running steps.
//!
//! Where the engine overlaps steps, the next one is submitted before the last is collected, so that the device never
//! waits for the host. Its rows then feed samples that nobody has seen. If such a sample ends its request (a stop token,
//! a cancel), the row that fed it was in vain: what it gives is ignored, and the request's answer is what it was. At
//! [`Reason::Length`](crate::Reason::Length) no such row is submitted, because that end is known beforehand.

use std::time::Instant;

use tandem_engine::{EngineError, Fork, Row, SeqId, Ticket};

use super::Scheduler;
use super::plan::Plan;
use crate::RuntimeError;

/// A submitted step.
pub(super) struct Flight {
    ticket: Ticket,
    /// Whose rows. Sequences are never reused, so one that has gone is not mistaken for another.
    seqs: Vec<SeqId>,
    decoding: usize,
    prompt_tokens: usize,
    submitted: Instant,
}

impl Scheduler {
    /// Submits a step, and collects the oldest if enough are under way; `false` if there is nothing to do until a message
    /// comes.
    ///
    /// # Errors
    /// The engine is broken and must be rebuilt.
    pub fn step(&mut self) -> Result<bool, RuntimeError> {
        self.admit();
        let submitted = self.submit()?;
        let depth = if self.capabilities.overlaps { 2 } else { 1 };
        if submitted && self.flights.len() < depth {
            return Ok(true);
        }
        self.collect()
    }

    /// Submits the best next step; `false` if there is none before another is collected.
    fn submit(&mut self) -> Result<bool, RuntimeError> {
        loop {
            let plan = Plan::new(&self.running, &self.capabilities, &self.pace);
            if plan.rows.is_empty() {
                return Ok(false);
            }
            match self.try_submit(&plan) {
                Ok(()) => return Ok(true),
                // What is under way may change the plan, and free memory.
                Err(_) if !self.flights.is_empty() => return Ok(false),
                Err(error) => match error {
                    EngineError::OutOfMemory { needed, available, .. } => {
                        self.make_room(needed.saturating_sub(available), &error);
                    }
                    error => self.isolate(&plan, error)?,
                },
            }
        }
    }

    fn try_submit(&mut self, plan: &Plan) -> Result<(), EngineError> {
        let rows: Vec<Row> = plan.rows.iter().map(|row| self.running[row.index].row(row.count)).collect();
        let submitted = (self.now)();
        let ticket = self.engine.submit(&rows)?;
        self.steps += 1;
        self.flights.push_back(Flight {
            ticket,
            seqs: rows.iter().map(|row| row.seq).collect(),
            decoding: plan.decoding,
            prompt_tokens: plan.prompt_tokens(),
            submitted,
        });
        for row in &plan.rows {
            self.running[row.index].submitted(row.count, self.steps);
            self.keep_prompt_end(row.index);
        }
        Ok(())
    }

    /// The engine has refused the whole step: runs its rows one by one, so that only the request at fault ends.
    fn isolate(&mut self, plan: &Plan, error: EngineError) -> Result<(), RuntimeError> {
        if let [only] = plan.rows.as_slice() {
            self.running[only.index].ended = Some(Err(error.into()));
        } else {
            for row in &plan.rows {
                let one = Plan { rows: vec![*row], decoding: usize::from(row.count == 1) };
                match self.try_submit(&one) {
                    Ok(()) => self.land()?,
                    Err(EngineError::OutOfMemory { .. }) => {}
                    Err(error) => self.running[row.index].ended = Some(Err(error.into())),
                }
            }
        }
        self.reap();
        Ok(())
    }

    /// Where only the end of a sequence can be forked, its prompt is kept as it ends: the next turn of a chat goes on
    /// from there if it renders the answer otherwise.
    fn keep_prompt_end(&mut self, index: usize) {
        let active = &mut self.running[index];
        if self.capabilities.exact_fork || active.fed != active.job.prompt || active.prompt_end.is_some() {
            return;
        }
        if let Ok(Fork::Exact(seq)) = self.engine.fork(active.seq, active.fed, active.job.max_len()) {
            active.prompt_end = Some(seq);
        }
    }

    /// Collects the oldest step; `false` if none is under way.
    fn collect(&mut self) -> Result<bool, RuntimeError> {
        if self.flights.is_empty() {
            return Ok(false);
        }
        self.land()?;
        self.reap();
        Ok(true)
    }

    fn land(&mut self) -> Result<(), RuntimeError> {
        let Some(flight) = self.flights.pop_front() else { return Ok(()) };
        let outs = self.engine.collect(flight.ticket)?;
        let now = (self.now)();
        let begun = flight.submitted.max(self.last_collected);
        self.last_collected = now;
        self.pace.observe(now - begun, flight.decoding, flight.prompt_tokens);
        for (seq, out) in flight.seqs.into_iter().zip(outs) {
            if let Some(active) = self.running.iter_mut().find(|active| active.seq == seq) {
                active.take(out, now);
            }
        }
        Ok(())
    }
}
