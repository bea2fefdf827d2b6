//! Tandem's own arm: the engine in this process, and a whole `tandem run` in another.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, bail};
use serde_json::Value;
use tandem_engine::{Engine, EngineFactory, Input, Kind, Memory, Row, RowOut, SampleSpec, SeqId, Want};

use super::child;
use super::model::Model;
use super::test::{BATCH_PROMPT, Test};
use crate::prompt::filler;

/// A loaded engine.
pub struct Ours {
    engine: Box<dyn Engine>,
    /// Of the test that runs.
    sequences: Vec<SeqId>,
    chunk: usize,
    vocab: usize,
}

/// How a process of its own went.
pub struct Process {
    /// Seconds to the first token.
    pub first: f64,
    /// Tokens of its prompt that were computed, and those that were not computed again.
    pub tokens: Option<(usize, usize)>,
    pub peak_memory: Option<u64>,
}

impl Ours {
    /// Opens the model and makes an engine of it; the seconds that took.
    pub fn load(model: &Model, threads: usize) -> anyhow::Result<(Self, f64)> {
        let begun = Instant::now();
        let engine = model.factory(threads)?.build()?;
        let seconds = begun.elapsed().as_secs_f64();
        let capabilities = engine.capabilities();
        let chunk = match &capabilities.kind {
            Kind::Dynamic { max_step_tokens } => *max_step_tokens,
            Kind::Static { .. } => bail!("only dynamic engines are measured so far"),
        };
        let vocab = capabilities.vocab_size;
        Ok((Self { engine, sequences: Vec::new(), chunk, vocab }, seconds))
    }

    /// Bytes the engine holds.
    pub fn memory(&self) -> Memory {
        self.engine.memory()
    }

    /// Tokens a second, after a warm-up that does not count.
    pub fn measure(&mut self, test: Test) -> anyhow::Result<f64> {
        let figure = self.warm_and_measure(test);
        // After a failure the next test shall find as much memory as this one did.
        self.close()?;
        figure
    }

    fn warm_and_measure(&mut self, test: Test) -> anyhow::Result<f64> {
        let (tokens, seconds) = match test {
            Test::Prefill { tokens } => {
                self.prefill(tokens)?;
                (tokens, self.prefill(tokens)?)
            }
            Test::Decode { tokens, depth } => {
                self.decode(1, 1, 0)?;
                (tokens, self.decode(1, tokens, depth)?)
            }
            Test::Batch { tokens, sequences } => {
                self.decode(sequences, 1, 0)?;
                (sequences * tokens, self.decode(sequences, tokens, BATCH_PROMPT)?)
            }
            Test::Load | Test::FirstToken { .. } | Test::PeakMemory => {
                bail!("{test} is no test of an engine")
            }
        };
        Ok(tokens as f64 / seconds)
    }

    /// Seconds to compute a prompt and sample from it.
    fn prefill(&mut self, tokens: usize) -> anyhow::Result<f64> {
        let seq = self.open(tokens)?;
        let prompt = filler(tokens, self.vocab);
        let begun = Instant::now();
        self.feed(seq, &prompt)?;
        let seconds = begun.elapsed().as_secs_f64();
        self.close()?;
        Ok(seconds)
    }

    /// Seconds in which each of `sequences` decodes `tokens` tokens, after `depth` others that are not timed.
    fn decode(&mut self, sequences: usize, tokens: usize, depth: usize) -> anyhow::Result<f64> {
        let seqs =
            (0..sequences).map(|_| self.open(depth + tokens)).collect::<anyhow::Result<Vec<SeqId>>>()?;
        // Each has a context of its own. Without one, its first token stands in for a sampled one.
        let texts = filler((depth + 1) * sequences, self.vocab);
        let mut inputs = Vec::with_capacity(sequences);
        for (seq, text) in seqs.iter().zip(texts.chunks_exact(depth + 1)) {
            if depth > 0 {
                self.feed(*seq, &text[1..])?;
                inputs.push(Input::PreviousSample);
            } else {
                inputs.push(Input::Tokens(text.to_vec()));
            }
        }
        let row = |(seq, input): (&SeqId, Input)| Row {
            seq: *seq,
            input,
            want: Want::Sample(SampleSpec::greedy()),
        };
        let mut rows: Vec<Row> = seqs.iter().zip(inputs).map(row).collect();
        let begun = Instant::now();
        for _ in 0..tokens {
            self.step(&rows)?;
            rows.iter_mut().for_each(|row| row.input = Input::PreviousSample);
        }
        let seconds = begun.elapsed().as_secs_f64();
        for seq in seqs {
            let fed = self.engine.len(seq)?;
            if fed != depth + tokens {
                bail!("a sequence of {} tokens is {fed} long", depth + tokens);
            }
        }
        self.close()?;
        Ok(seconds)
    }

    fn open(&mut self, max_len: usize) -> anyhow::Result<SeqId> {
        let seq = self.engine.open(max_len, None)?;
        self.sequences.push(seq);
        Ok(seq)
    }

    fn close(&mut self) -> anyhow::Result<()> {
        for seq in self.sequences.drain(..) {
            self.engine.close(seq)?;
        }
        Ok(())
    }

    /// Feeds a prompt in chunks and samples after the last.
    fn feed(&mut self, seq: SeqId, tokens: &[u32]) -> anyhow::Result<()> {
        let chunks = tokens.len().div_ceil(self.chunk);
        for (i, chunk) in tokens.chunks(self.chunk).enumerate() {
            let want = if i + 1 == chunks { Want::Sample(SampleSpec::greedy()) } else { Want::Nothing };
            self.step(&[Row { seq, input: Input::Tokens(chunk.to_vec()), want }])?;
        }
        Ok(())
    }

    /// Runs one step to its end. Logits that are not finite are an error: their speed is nobody's concern.
    fn step(&mut self, rows: &[Row]) -> anyhow::Result<()> {
        let ticket = self.engine.submit(rows)?;
        let outs = self.engine.collect(ticket)?;
        for (row, out) in rows.iter().zip(outs) {
            match (&row.want, out) {
                (Want::Nothing, RowOut::Nothing) | (Want::Sample(_), RowOut::Sampled(_)) => {}
                (_, RowOut::Failed(error)) => return Err(error.into()),
                (want, out) => bail!("{want:?} was answered by {out:?}"),
            }
        }
        Ok(())
    }
}

/// Runs `tandem run` for one token of an answer.
pub fn process(model: &Model, threads: usize) -> anyhow::Result<Process> {
    let mut command = Command::new(std::env::current_exe().context("cannot find this program's own file")?);
    command.args(model.run_arguments(threads));
    let ran = child::run(&mut command, |output| {
        output.split(|byte| *byte == b'\n').any(|line| line.starts_with(br#"{"event":"token""#))
    })?;
    let done = ran.stdout.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
    let done =
        done.filter(|done| done["event"] == "done").context("tandem run printed no end of its answer")?;
    let count = |name: &str| usize::try_from(done["usage"][name].as_u64()?).ok();
    let tokens =
        count("prompt").zip(count("cached")).map(|(prompt, cached)| (prompt - cached.min(prompt), cached));
    let first = ran.first.context("tandem run printed no token")?.as_secs_f64();
    Ok(Process { first, tokens, peak_memory: ran.peak_memory.or(done["peak_memory_bytes"].as_u64()) })
}
