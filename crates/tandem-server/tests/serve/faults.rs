//! Clients that go away or dawdle, engines that break, servers that end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_server::Options;

use crate::harness::{Server, fake, fake_with, hello, read_events, with};

/// A request as bytes.
fn raw(body: &Value) -> String {
    let body = body.to_string();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn slow(milliseconds: u64) -> Server {
    let server = fake();
    server.knobs.delay_ms.store(milliseconds, Ordering::Relaxed);
    server
}

fn outcome(server: &Server, name: &str) -> u64 {
    let page = server.get("/metrics").text;
    let start = format!("tandem_requests_total{{outcome=\"{name}\"}} ");
    page.lines().find_map(|line| line.strip_prefix(&start)).unwrap().parse().unwrap()
}

/// llama.cpp #24496: generation went on after the client had left.
#[test]
fn a_client_that_goes_away_frees_its_kv() {
    let server = slow(20);
    for (round, stream) in [false, true].into_iter().enumerate() {
        let mut socket = TcpStream::connect(server.address).unwrap();
        let body = with(hello(), &json!({"max_tokens": 400, "n": 2, "stream": stream}));
        socket.write_all(raw(&body).as_bytes()).unwrap();
        server.until("it runs", |s| {
            s.get("/health").json()["models"][0]["engines"][0]["running"] == 2 && s.kv() > 0
        });
        if stream {
            let mut line = String::new();
            BufReader::new(&socket).read_line(&mut line).unwrap();
            assert!(line.contains("200"), "{line}");
        }
        drop(socket);
        let left = Instant::now();
        server.until("it has ended", |s| s.kv() == 0);
        assert!(left.elapsed() < Duration::from_secs(4), "it ran to its end");
        assert_eq!(outcome(&server, "cancelled"), round as u64 + 1);
    }
    let health = server.get("/health").json();
    assert_eq!(
        (&health["models"][0]["engines"][0]["running"], &health["models"][0]["engines"][0]["waiting"]),
        (&json!(0), &json!(0))
    );
}

#[test]
fn a_panic_ends_all_streams_with_an_error_event_and_the_next_request_succeeds() {
    let server = slow(5);
    std::thread::scope(|scope| {
        let body = with(hello(), &json!({"max_tokens": 300, "stream": true})).to_string();
        let open = |_| {
            let response = server.open("/v1/chat/completions", body.as_bytes());
            assert_eq!(response.status(), 200);
            scope.spawn(|| read_events(response))
        };
        let streams: Vec<_> = (0..16).map(open).collect();
        server.until("all run", |s| s.get("/health").json()["models"][0]["engines"][0]["running"] == 16);
        server.knobs.panic.store(true, Ordering::Relaxed);
        for stream in streams {
            let (events, done) = stream.join().unwrap();
            assert!(!done);
            let error = &events.last().unwrap()["error"];
            assert_eq!(error["code"], "engine_crashed");
            assert!(error["message"].as_str().unwrap().contains("told to panic"));
        }
    });
    server.chat(&json!({}));
    assert_eq!(server.get("/health").json()["models"][0]["engines"][0]["restarts"], 1);
    assert_eq!((outcome(&server, "failed"), outcome(&server, "completed")), (16, 1));

    // Without a stream it is a status.
    server.knobs.panic.store(true, Ordering::Relaxed);
    let reply = server.post("/v1/chat/completions", &hello());
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("engine_crashed")));
    server.chat(&json!({}));
}

#[test]
fn a_slow_head_or_body_ends_the_connection() {
    let brief = Duration::from_millis(400);
    let options = Options { head_timeout: brief, body_timeout: brief, ..Options::default() };
    let server = fake_with(1000, &tandem_runtime::Options::default(), options);
    let request = raw(&hello());
    let body_at = request.find("\r\n\r\n").unwrap() + 4;
    std::thread::scope(|scope| {
        for sent in [0, 10, body_at - 1, body_at, body_at + 5] {
            let (server, request) = (&server, &request);
            scope.spawn(move || {
                let mut socket = TcpStream::connect(server.address).unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                socket.write_all(&request.as_bytes()[..sent]).unwrap();
                let mut answer = String::new();
                socket.read_to_string(&mut answer).unwrap();
                assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
                assert_eq!(answer.contains("request_timeout"), sent >= body_at);
            });
        }
        // Others do not notice.
        server.chat(&json!({}));
    });
    server.chat(&json!({}));
}

#[test]
fn a_server_that_is_told_to_stop_finishes_what_is_under_way_and_takes_no_more() {
    let mut server = slow(20);
    let address = server.address;
    let body = with(hello(), &json!({"max_tokens": 60, "stream": true})).to_string();
    let response = server.open("/v1/chat/completions", body.as_bytes());
    server.stop();
    let health = || server.get("/health");
    server.until("it is ending", |_| health().status == 503);
    assert_eq!(health().json()["status"], "ending");
    let reply = server.post("/v1/chat/completions", &hello());
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("shut_down")));
    assert!(reply.headers.contains_key("retry-after"));
    let (events, done) = read_events(response);
    assert!(done && events.last().unwrap()["choices"][0]["finish_reason"] == "length");
    drop(server);
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn what_takes_too_long_to_finish_ends_with_an_error_event() {
    let options = Options { drain: Duration::from_millis(300), ..Options::default() };
    let mut server = fake_with(100_000, &tandem_runtime::Options::default(), options);
    server.knobs.delay_ms.store(20, Ordering::Relaxed);
    let body = with(hello(), &json!({"max_tokens": 400, "stream": true})).to_string();
    let response = server.open("/v1/chat/completions", body.as_bytes());
    server.stop();
    let (events, done) = read_events(response);
    assert!(!done);
    assert_eq!(events.last().unwrap()["error"]["code"], "shut_down");
}

#[test]
fn a_client_that_never_reads_does_not_keep_its_kv() {
    let options = Options { write_timeout: Duration::from_millis(400), ..Options::default() };
    let server = fake_with(100_000, &tandem_runtime::Options::default(), options);
    let mut socket = TcpStream::connect(server.address).unwrap();
    // More than the sockets between them hold.
    let much = json!({"max_tokens": 400, "n": 16, "logprobs": true, "top_logprobs": 20, "stream": true});
    socket.write_all(raw(&with(hello(), &much)).as_bytes()).unwrap();
    server.until("it is given up", |s| outcome(s, "cancelled") == 1 && s.kv() == 0);
    drop(socket);
}
