//! The model that is measured, as every arm needs it.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::ValueEnum;
use tandem_cpu::CpuFactory;
use tandem_model::{Checkpoint, Tokenizer};

use crate::cli::{BenchArgs, DummyArgs, LoadArgs};
use crate::model;

/// A model and how it is to be loaded.
pub struct Model {
    pub checkpoint: Checkpoint,
    /// `None` for random weights.
    pub path: Option<PathBuf>,
    pub load: LoadArgs,
    dummy: DummyArgs,
    /// Tokens of the longest sequence of any test.
    context: usize,
    prompt: Prompt,
}

/// What processes are asked.
struct Prompt {
    /// Tokens that were asked for.
    tokens: usize,
    /// A text of about as many; `None` for random weights, which have no words.
    file: Option<tempfile::NamedTempFile>,
}

impl Model {
    /// Opens it and checks that every sequence of `context` tokens fits.
    pub fn open(args: &BenchArgs, context: usize) -> anyhow::Result<Self> {
        if args.model.is_some() && args.dummy.weights.is_some() {
            bail!("--dummy-weights stands in place of MODEL. hint: leave MODEL out");
        }
        let path = model::resolve(args.model.as_ref(), &args.dummy)?;
        let checkpoint = model::open(path.as_ref(), &args.dummy)?;
        let handles = checkpoint.decoder.max_context;
        if context > handles {
            bail!(
                "the longest test takes {context} tokens, and this model handles {handles}. hint: make --n-prompt, \
                 --n-gen or --n-depth smaller"
            );
        }
        let file = match path {
            Some(_) if args.n_prompt > 0 => Some(text(&checkpoint.tokenizer, args.n_prompt)?),
            _ => None,
        };
        let prompt = Prompt { tokens: args.n_prompt, file };
        Ok(Self { checkpoint, path, load: args.load.clone(), dummy: args.dummy.clone(), context, prompt })
    }

    /// What the user called it.
    pub fn name(args: &BenchArgs) -> String {
        match (&args.model, &args.dummy.weights) {
            (Some(name), _) => name.clone(),
            (None, Some(config)) => format!("random weights ({})", config.display()),
            (None, None) => String::new(),
        }
    }

    /// A factory that reads the model from its file again. Random weights are made only once.
    pub fn factory(&self, threads: usize) -> anyhow::Result<CpuFactory> {
        let checkpoint = match &self.path {
            Some(path) => Checkpoint::open(path)?,
            None => self.checkpoint.clone(),
        };
        let options = model::options(&self.load, Some(threads), self.context.max(1));
        Ok(CpuFactory::new(checkpoint.decoder, checkpoint.weights, options, Box::new(|_| ())))
    }

    /// The one file that other runners can read too.
    pub fn gguf(&self) -> Option<&Path> {
        self.path.as_deref().filter(|path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")))
    }

    /// The text that processes are asked.
    pub fn prompt_file(&self) -> Option<&Path> {
        self.prompt.file.as_ref().map(tempfile::NamedTempFile::path)
    }

    /// Context for a process that answers one token.
    pub fn process_context(&self) -> usize {
        (self.prompt.tokens + 1).next_multiple_of(256).min(self.checkpoint.decoder.max_context)
    }

    /// The arguments of `tandem run` that answer the prompt with one token.
    pub fn run_arguments(&self, threads: usize) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["run".into()];
        let mut push = |flag: &str, value: OsString| arguments.extend([flag.into(), value]);
        if let (Some(path), Some(prompt)) = (&self.path, self.prompt_file()) {
            push("--file", prompt.into());
            arguments.extend(["--raw".into(), path.into()]);
        } else if let Some(config) = &self.dummy.weights {
            push("--dummy-weights", config.into());
            push("--dummy-format", value_name(&self.dummy.format).into());
            push("--dummy-prompt", self.prompt.tokens.to_string().into());
        }
        let mut push = |flag: &str, value: OsString| arguments.extend([flag.into(), value]);
        push("--threads", threads.to_string().into());
        push("--context", self.process_context().to_string().into());
        push("--quant", value_name(&self.load.quant).into());
        push("--max-tokens", "1".into());
        push("--temperature", "0".into());
        if let Some(bytes) = self.load.memory_budget {
            push("--memory-budget", bytes.to_string().into());
        }
        if self.load.exact {
            arguments.push("--exact".into());
        } else {
            arguments.extend(["--kv-quant".into(), value_name(&self.load.kv_quant).into()]);
        }
        arguments.extend(["--json".into(), "--ignore-eos".into()]);
        arguments
    }
}

fn value_name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// A file with a text of as many tokens, or a few less.
fn text(tokenizer: &Tokenizer, tokens: usize) -> anyhow::Result<tempfile::NamedTempFile> {
    // A verse would be learned by heart; these say something else each time.
    const WORDS: [&str; 16] = [
        "the", "river", "carries", "seven", "boats", "past", "a", "quiet", "town", "while", "people",
        "count", "their", "letters", "before", "winter",
    ];
    let words: Vec<&str> = (0..tokens).map(|i| WORDS[(i * 7 + i / 16 * 5 + i * i / 64) % 16]).collect();
    // More words never make fewer tokens, so the greatest number that fits is found by halving.
    let (mut fits, mut too_many) = (1, words.len() + 1);
    while fits + 1 < too_many {
        let middle = usize::midpoint(fits, too_many);
        if tokenizer.encode(&words[..middle].join(" "), true)?.len() <= tokens {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    let mut file = tempfile::NamedTempFile::new().context("cannot write the prompt to a temporary file")?;
    file.write_all(words[..fits].join(" ").as_bytes())
        .context("cannot write the prompt to a temporary file")?;
    Ok(file)
}
