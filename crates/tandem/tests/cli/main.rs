//! The whole command line, as a process, on a tiny random checkpoint. What it says is nonsense, but how it says it is
//! all there.

#![allow(clippy::unwrap_used, reason = "tests")]

mod bad_input;
mod bench;
mod coreml;
mod export;
mod help;
mod models;
mod run;
mod serve;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// `tandem` in a world of its own: an empty store, an empty hub cache, no network, no terminal.
struct Tandem {
    command: Command,
    _home: tempfile::TempDir,
}

fn tandem(args: &[&str]) -> Tandem {
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
    for variable in ["COLUMNS", "LINES", "HF_TOKEN", "HF_HUB_CACHE", "HF_ENDPOINT", "TANDEM_KERNELS"] {
        command.env_remove(variable);
    }
    command
        .args(args)
        .env("TANDEM_HOME", home.path().join("store"))
        .env("HF_HOME", home.path().join("hub"))
        .env("HF_HUB_OFFLINE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Tandem { command, _home: home }
}

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Tandem {
    fn run(mut self) -> Ran {
        self.command.output().unwrap().into()
    }

    /// Runs it and expects nothing on standard error.
    fn ok(self) -> String {
        let ran = self.run();
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
        ran.out
    }

    fn stdin(mut self, text: impl AsRef<[u8]>) -> Self {
        let path = self._home.path().join("stdin");
        std::fs::write(&path, text).unwrap();
        self.command.stdin(std::fs::File::open(path).unwrap());
        self
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// A complete tiny checkpoint with a chat template.
fn model() -> String {
    fixture("llama-gqa").display().to_string()
}
