//! The answer on standard output: text as it comes, or events.

use std::io::{Stdout, Write, stdout};
use std::time::Duration;

use serde::Serialize;
use tandem_model::Tokenizer;
use tandem_runtime::{Done, Reason, Route, Timing, Token, Usage};

use crate::measure::peak_memory;

/// Where an answer goes.
pub struct Output {
    out: Stdout,
    json: bool,
    /// The last character was a line break, or there was none.
    at_line_start: bool,
}

/// What `--json` prints before the answer.
#[derive(Debug, Serialize)]
pub struct Start<'a> {
    pub model: &'a str,
    pub engine: &'a str,
    pub context: usize,
    pub prompt_tokens: usize,
    pub seed: u64,
}

/// One line of `--json`.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Line<'a> {
    Start(&'a Start<'a>),
    Token {
        id: u32,
        text: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprob: Option<f32>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        top: Vec<Candidate>,
    },
    /// Text that no token of its own came with.
    Text {
        text: &'a str,
    },
    Done {
        reason: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        stop: Option<&'a str>,
        usage: Usage,
        /// Seconds.
        timing: Timing,
        load: Option<f64>,
        prefill_rate: Option<f64>,
        decode_rate: Option<f64>,
        peak_memory_bytes: Option<u64>,
        route: &'a Route,
    },
    Error {
        error: &'a str,
        hint: Option<&'a str>,
    },
}

#[derive(Serialize)]
struct Candidate {
    id: u32,
    text: String,
    logprob: f32,
}

impl Output {
    pub fn new(json: bool) -> Self {
        Self { out: stdout(), json, at_line_start: true }
    }

    pub fn start(&mut self, start: &Start<'_>) -> std::io::Result<()> {
        if self.json { self.line(&Line::Start(start)) } else { Ok(()) }
    }

    /// A piece of the answer, and the token it came with.
    pub fn piece(&mut self, text: &str, token: Option<&Token>, tokenizer: &Tokenizer) -> std::io::Result<()> {
        match (self.json, token) {
            (false, _) if text.is_empty() => Ok(()),
            (false, _) => {
                self.at_line_start = text.ends_with('\n');
                self.out.write_all(text.as_bytes())?;
                self.out.flush()
            }
            (true, None) => self.line(&Line::Text { text }),
            (true, Some(token)) => {
                let text_of =
                    |id| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default()).into_owned();
                let candidate = |&(id, logprob): &(u32, f32)| Candidate { id, text: text_of(id), logprob };
                let top = token.top.iter().map(candidate).collect();
                self.line(&Line::Token { id: token.id, text, logprob: token.logprob, top })
            }
        }
    }

    /// The end of the answer.
    pub fn done(&mut self, done: &Done, load: Option<Duration>) -> std::io::Result<()> {
        if !self.json {
            if !self.at_line_start {
                self.at_line_start = true;
                self.out.write_all(b"\n")?;
            }
            return self.out.flush();
        }
        let stop = match &done.reason {
            Reason::StopString { text } => Some(text.as_str()),
            _ => None,
        };
        self.line(&Line::Done {
            reason: done.reason.name(),
            stop,
            usage: done.usage,
            timing: done.timing,
            load: load.map(|l| l.as_secs_f64()),
            prefill_rate: done.timing.prefill_rate(&done.usage),
            decode_rate: done.timing.decode_rate(&done.usage),
            peak_memory_bytes: peak_memory(),
            route: &done.route,
        })
    }

    /// There will be no more of the answer.
    pub fn error(&mut self, error: &str, hint: Option<&str>) -> std::io::Result<()> {
        if self.json {
            self.line(&Line::Error { error, hint })
        } else if self.at_line_start {
            Ok(())
        } else {
            self.at_line_start = true;
            self.out.write_all(b"\n")
        }
    }

    fn line(&mut self, line: &Line<'_>) -> std::io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.out.write_all(&text)?;
        self.out.flush()
    }
}
