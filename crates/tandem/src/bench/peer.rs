//! llama.cpp's arm: its own benchmark programs, on the same file, one repetition each.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde::{Deserialize, de::DeserializeOwned};

use super::child;
use super::model::Model;
use super::ours::Process;
use super::test::{BATCH_PROMPT, Test};

/// Its programs.
pub struct LlamaCpp {
    bench: PathBuf,
    /// Which build it says it is, once it has said so.
    pub build: Option<String>,
}

/// The part of an entry of `llama-bench -o json` that is read.
#[derive(Debug, Deserialize)]
struct BenchEntry {
    build_commit: String,
    n_prompt: usize,
    n_gen: usize,
    n_depth: usize,
    n_threads: usize,
    samples_ns: Vec<u64>,
}

/// The part of a line of `llama-batched-bench --output-format jsonl` that is read.
#[derive(Debug, Deserialize)]
struct BatchedEntry {
    pp: usize,
    tg: usize,
    pl: usize,
    n_threads: usize,
    /// Seconds.
    t_tg: f64,
}

impl LlamaCpp {
    /// `path` is its llama-bench, or the folder that holds it.
    pub fn new(path: &Path) -> Self {
        let bench = if path.is_dir() { path.join("llama-bench") } else { path.to_owned() };
        Self { bench, build: None }
    }

    pub fn path(&self) -> &Path {
        &self.bench
    }

    /// Tokens a second; its programs warm up by themselves.
    pub fn measure(&mut self, test: Test, model: &Model, threads: usize) -> anyhow::Result<f64> {
        let file = gguf(model)?;
        match test {
            Test::Prefill { tokens } => self.bench(file, threads, [tokens, 0, 0]),
            Test::Decode { tokens, depth } => self.bench(file, threads, [0, tokens, depth]),
            Test::Batch { tokens, sequences } => self.batch(file, threads, tokens, sequences),
            Test::Load | Test::FirstToken { .. } | Test::PeakMemory => bail!("llama-bench has no such test"),
        }
    }

    /// llama-bench with so many tokens of prompt, of answer, and of context before.
    fn bench(&mut self, file: &Path, threads: usize, sizes: [usize; 3]) -> anyhow::Result<f64> {
        let mut command = Command::new(&self.bench);
        command.arg("-m").arg(file).args(["-t", &threads.to_string()]);
        for (flag, size) in ["-p", "-n", "-d"].into_iter().zip(sizes) {
            command.args([flag, &size.to_string()]);
        }
        command.args(["-r", "1", "-o", "json"]);
        let ran = child::run(&mut command, |_| false)?;
        let entries: Vec<BenchEntry> = read(&self.bench, &ran.stdout)?;
        let [entry] = entries.as_slice() else {
            bail!("{} reported {} results in place of one", self.bench.display(), entries.len());
        };
        let asked = (sizes, threads);
        let did = ([entry.n_prompt, entry.n_gen, entry.n_depth], entry.n_threads);
        if did != asked {
            bail!("{} measured something else: {did:?} in place of {asked:?}", self.bench.display());
        }
        self.build = Some(entry.build_commit.clone());
        let Some(nanoseconds) = entry.samples_ns.first().filter(|nanoseconds| **nanoseconds > 0) else {
            bail!("{} reported no time: {:?}", self.bench.display(), entry.samples_ns);
        };
        Ok((sizes[0] + sizes[1]) as f64 * 1e9 / *nanoseconds as f64)
    }

    /// llama-batched-bench with so many sequences.
    fn batch(&self, file: &Path, threads: usize, tokens: usize, sequences: usize) -> anyhow::Result<f64> {
        let program = self.beside(&["llama-batched-bench"])?;
        let context = (sequences * (BATCH_PROMPT + tokens)).next_multiple_of(256);
        let mut command = Command::new(&program);
        command.arg("-m").arg(file);
        for (flag, value) in
            [("-t", threads), ("-c", context), ("-npp", BATCH_PROMPT), ("-ntg", tokens), ("-npl", sequences)]
        {
            command.args([flag, &value.to_string()]);
        }
        command.args(["--output-format", "jsonl"]);
        let ran = child::run(&mut command, |_| false)?;
        let line = ran.stdout.lines().find(|line| line.starts_with('{')).unwrap_or_default();
        let entry: BatchedEntry = read(&program, line)?;
        let asked = [BATCH_PROMPT, tokens, sequences, threads];
        let did = [entry.pp, entry.tg, entry.pl, entry.n_threads];
        if did != asked {
            bail!("{} measured something else: {did:?} in place of {asked:?}", program.display());
        }
        if entry.t_tg.is_nan() || entry.t_tg <= 0.0 {
            bail!("{} reported no time: {} s", program.display(), entry.t_tg);
        }
        Ok((sequences * tokens) as f64 / entry.t_tg)
    }

    /// Runs llama-completion (llama-cli in older builds) for one token, without a warm-up, which would take it longer.
    pub fn process(&self, model: &Model, threads: usize) -> anyhow::Result<Process> {
        let file = gguf(model)?;
        let prompt = model.prompt_file().context("random weights have no words to ask llama.cpp")?;
        let program = self.beside(&["llama-completion", "llama-cli"])?;
        let mut command = Command::new(&program);
        command.arg("-m").arg(file).arg("-f").arg(prompt);
        for (flag, value) in [("-t", threads), ("-c", model.process_context()), ("-n", 1), ("--temp", 0)] {
            command.args([flag, &value.to_string()]);
        }
        command.args(["-no-cnv", "--no-display-prompt", "--no-warmup"]);
        let ran = child::run(&mut command, |output| !output.is_empty())?;
        let first = ran.first.with_context(|| format!("{} printed no token", program.display()))?;
        let tokens = prompt_tokens(&ran.stderr).map(|computed| (computed, 0));
        Ok(Process { first: first.as_secs_f64(), tokens, peak_memory: ran.peak_memory })
    }

    /// The first of these programs that lies beside llama-bench.
    fn beside(&self, names: &[&str]) -> anyhow::Result<PathBuf> {
        let folder = self.bench.parent().unwrap_or(Path::new(""));
        let suffix = self.bench.extension().and_then(OsStr::to_str);
        let mut paths = names.iter().map(|name| match suffix {
            Some("exe") => folder.join(format!("{name}.exe")),
            _ => folder.join(name),
        });
        let found = paths.find(|path| path.exists());
        found.with_context(|| format!("there is no {} beside {}", names.join(" or "), self.bench.display()))
    }
}

fn gguf(model: &Model) -> anyhow::Result<&Path> {
    model.gguf().context("llama.cpp reads only a .gguf file")
}

fn read<T: DeserializeOwned>(program: &Path, json: &str) -> anyhow::Result<T> {
    serde_json::from_str(json).with_context(|| {
        let mut start: String = json.trim().chars().take(60).collect();
        if start.is_empty() {
            start.push_str("nothing");
        }
        format!("{} printed no result that is understood ({start})", program.display())
    })
}

/// Tokens in the line `prompt eval time = 2442.99 ms / 69 tokens (...)`.
fn prompt_tokens(stderr: &str) -> Option<usize> {
    let line = stderr.lines().find_map(|line| line.split_once("prompt eval time"))?.1;
    line.split_once('/')?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_tokens_are_read_from_its_report() {
        let line = "0.03.0 I common_perf_print: prompt eval time =    2442.99 ms /    69 tokens (   35.41 ms per token)";
        assert_eq!(prompt_tokens(&format!("x\n{line}\ny")), Some(69));
        assert_eq!(prompt_tokens("no report"), None);
    }
}
