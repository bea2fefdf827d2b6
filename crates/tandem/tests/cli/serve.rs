use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::{fixture, model, tandem};

/// A server process on a free port; killed when dropped.
struct Serving {
    child: Child,
    url: String,
    /// Its store must outlive it.
    _tandem: super::Tandem,
}

fn serve(flags: &[&str]) -> Serving {
    let model = model();
    let mut tandem = tandem(&[&["serve", model.as_str(), "--port", "0"], flags].concat());
    let mut child = tandem.command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let Some(url) = line.trim().strip_prefix("listening on ") else {
        let mut error = String::new();
        child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        panic!("{line}{error}")
    };
    Serving { url: url.to_owned(), child, _tandem: tandem }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[cfg(unix)]
fn a_server_ends_when_told_to() {
    for signal in ["-TERM", "-INT"] {
        let mut server = serve(&[]);
        let id = server.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        assert_eq!(server.child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn a_port_that_is_taken_is_said_before_anything_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ran = tandem(&["serve", "no-such-model", "--port", &port]).run();
    assert_eq!(ran.code, Some(1));
    assert!(ran.err.contains("cannot listen on 127.0.0.1:") && ran.err.contains("hint: "), "{}", ran.err);
}

#[test]
fn judged_openais_own_client_is_content() {
    if std::env::var_os("TANDEM_JUDGED").is_none() {
        eprintln!("skipped: TANDEM_JUDGED is not set");
        return;
    }
    let python = std::env::var_os("TANDEM_JUDGE_PYTHON").expect("TANDEM_JUDGE_PYTHON in the judged tier");
    let server = serve(&["--api-key", "secret"]);
    let script = fixture("../scripts/judge_openai.py");
    let judged =
        Command::new(python).arg(script).args([&server.url, "secret"]).env("no_proxy", "*").status().unwrap();
    assert!(judged.success());
}

/// Runs every `curl` of the README's console blocks (they show no output), against the fixture in place of the model it names.
#[test]
fn judged_the_readmes_curl_examples_work() {
    if std::env::var_os("TANDEM_JUDGED").is_none() {
        eprintln!("skipped: TANDEM_JUDGED is not set");
        return;
    }
    let readme = std::fs::read_to_string(fixture("../README.md")).unwrap();
    let server = serve(&[]);
    let blocks = readme.split("```").skip(1).step_by(2).filter_map(|b| b.strip_prefix("console\n"));
    let commands =
        blocks.flat_map(|b| b.split("\n$ ").collect::<Vec<_>>()).map(|c| c.trim_start_matches("$ "));
    let mut run = 0;
    for command in commands.filter(|c| c.starts_with("curl ")) {
        let command = command.replace("http://127.0.0.1:8080", &server.url).replace("smollm2", "llama-gqa");
        let ran =
            Command::new("bash").args(["-c", &command]).env("no_proxy", "*").stdin(Stdio::null()).output();
        let answer = String::from_utf8(ran.unwrap().stdout).unwrap();
        if command.contains("\"stream\": true") {
            assert!(
                answer.contains("data: {") && answer.ends_with("data: [DONE]\n\n"),
                "{command}\n{answer}"
            );
        } else if command.contains("/metrics") {
            assert!(answer.contains("tandem_requests_total"), "{command}\n{answer}");
        } else {
            let answer: Value =
                serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{command}\n{e}\n{answer}"));
            assert!(answer.is_object() && answer.get("error").is_none(), "{command}\n{answer}");
        }
        run += 1;
    }
    assert!(run >= 4, "only {run} commands were found");
}
