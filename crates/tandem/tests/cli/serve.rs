use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::{fixture, model, tandem};

/// A server process on a free port; killed when dropped.
struct Serving {
    child: Child,
    url: String,
    /// Its store must outlive it.
    _tandem: super::Tandem,
}

fn serve(flags: &[&str]) -> Serving {
    serve_all(&[&[model().as_str()], flags].concat())
}

fn serve_all(arguments: &[&str]) -> Serving {
    let mut tandem = tandem(&[&["serve"], arguments, &["--port", "0"]].concat());
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

impl Serving {
    /// Sends a request; its answer is still to be read.
    fn send(&self, method: &str, path: &str, body: &str) -> BufReader<TcpStream> {
        let mut socket = TcpStream::connect(self.url.strip_prefix("http://").unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n"
        );
        write!(socket, "{head}Content-Type: application/json\r\n\r\n{body}").unwrap();
        BufReader::new(socket)
    }

    /// The status of the answer and its JSON.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        self.try_ask(method, path, body).expect("an answer")
    }

    /// As `ask`; `None` if the connection was closed without an answer.
    fn try_ask(&self, method: &str, path: &str, body: &str) -> Option<(u16, Value)> {
        let mut answer = String::new();
        self.send(method, path, body).read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let json = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {answer}"));
        Some((head[9..12].parse().unwrap(), json))
    }

    #[cfg(unix)]
    fn signal(&self, signal: &str) {
        assert!(
            Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success()
        );
    }
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
        server.signal(signal);
        assert_eq!(server.child.wait().unwrap().code(), Some(0));
    }
}

/// A stream of that many answers, begun.
#[cfg(unix)]
fn streaming(server: &Serving, n: usize) -> BufReader<TcpStream> {
    let body = json!({
        "prompt": "x", "max_tokens": 400, "n": n, "ignore_eos": true, "logprobs": 20, "stream": true,
    });
    let mut stream = server.send("POST", "/v1/completions", &body.to_string());
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        stream.read_line(&mut line).unwrap();
    }
    stream
}

#[test]
#[cfg(unix)]
fn the_first_signal_lets_answers_end_and_the_second_does_not_wait() {
    let mut server = serve(&["--drain-timeout", "60"]);
    let mut stream = streaming(&server, 2);
    server.signal("-INT");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));

    // More than the sockets hold, so it is not at its end before it is read.
    let mut server = serve(&[]);
    let stream = streaming(&server, 64);
    server.signal("-INT");
    let health = loop {
        // A connection that was made at the very moment of the signal is closed.
        if let Some((status, health)) = server.try_ask("GET", "/health", "")
            && status != 200
        {
            break health;
        }
    };
    assert_eq!(health["status"], "ending");
    server.signal("-TERM");
    assert_eq!(server.child.wait().unwrap().code(), Some(130));
    drop(stream);
}

#[test]
fn several_models_share_a_budget_and_are_told_apart_by_name() {
    let (gguf, folder) = (fixture("gguf/llama-gqa-q4_0.gguf"), fixture("llama-gqa"));
    let (gguf, folder) = (gguf.to_str().unwrap(), folder.to_str().unwrap());
    let server = serve_all(&[folder, gguf, "--memory-budget", "100MB", "--engine", "cpu"]);
    let (_, list) = server.ask("GET", "/v1/models", "");
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|m| (&m["id"], &m["aliases"])).collect();
    assert_eq!(
        ids,
        [(&json!("llama-gqa"), &json!([])), (&json!("llama-gqa-q4_0.gguf"), &json!(["llama-gqa-q4_0"])),]
    );
    for name in ["llama-gqa", "llama-gqa-q4_0.gguf", "llama-gqa-q4_0"] {
        let body = json!({"model": name, "prompt": "Hello", "max_tokens": 3}).to_string();
        let (status, answer) = server.ask("POST", "/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        assert!(answer["model"].as_str().unwrap().starts_with("llama-gqa"));
    }
    let (status, health) = server.ask("GET", "/health", "");
    assert_eq!(status, 200);
    // Each has its weights and half of what is left.
    let engines = health["models"].as_array().unwrap().iter().map(|m| &m["engines"][0]);
    let limits: u64 = engines.map(|e| e["kv_limit_bytes"].as_u64().unwrap()).sum();
    assert!(limits < 100_000_000, "{health}");
}

#[test]
fn limits_are_as_the_operator_says() {
    let flags = ["-np", "2", "--queue", "1", "--max-body", "1kB", "--timeout", "0.5", "--alias", "mine"];
    let server = serve(&flags);
    let ask = |n: usize, prompt: &str| {
        let body = json!({"model": "mine", "prompt": prompt, "n": n, "max_tokens": 2}).to_string();
        server.ask("POST", "/v1/completions", &body)
    };
    assert_eq!(ask(3, "x").0, 200);
    let (status, answer) = ask(4, "x");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 413 && message.contains("it takes 3 requests in all"), "{answer}");
    assert_eq!(ask(1, &"x".repeat(2000)).0, 413);
    let (_, health) = server.ask("GET", "/health", "");
    assert_eq!(health["models"][0]["engines"][0]["max_batch"], 2);
    let mut stalled = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).unwrap();
    stalled.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stalled.write_all(b"POST / HT").unwrap();
    assert_eq!(stalled.read(&mut [0; 64]).unwrap_or(0), 0);
}

#[test]
fn flags_that_make_no_sense_are_refused() {
    let model = model();
    for (flags, code, word) in [
        (["--engine", "abacus"].as_slice(), 2, "[possible values: cpu, mlx]"),
        (&["--parallel", "0"], 2, "--parallel"),
        (&["-np", "0"], 2, "--parallel"),
        (&["--timeout=-1"], 2, "0 to"),
        (&["--drain-timeout", "NaN"], 2, "0 to"),
        (&["--max-body", "much"], 2, "size"),
        (&[model.as_str()], 1, "two models are called `llama-gqa`"),
        (
            &[fixture("gguf/llama-gqa-f16.gguf").to_str().unwrap(), "--alias", "x"],
            1,
            "--alias names the only model",
        ),
        (&["--context", "9999"], 1, "9999"),
    ] {
        let ran = tandem(&[&["serve", model.as_str(), "--port", "0"], flags].concat()).run();
        assert_eq!(ran.code, Some(code), "{flags:?}: {}", ran.err);
        assert!(ran.err.contains(word) && ran.out.is_empty(), "{flags:?}: {}", ran.err);
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
