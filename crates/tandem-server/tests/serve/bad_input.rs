//! Bytes that no well-meaning client sends, over a real socket. Each is answered or cut off, and the server goes on.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_server::Options;

use crate::harness::{Server, echo, fake, fake_with, hello, with};

/// All that comes back for these bytes, after which the client has nothing more to say.
fn send(server: &Server, bytes: &[u8]) -> String {
    exchange(server, bytes, false)
}

/// As [`send`], but the client also ends its side of the connection.
fn send_and_end(server: &Server, bytes: &[u8]) -> String {
    exchange(server, bytes, true)
}

fn exchange(server: &Server, bytes: &[u8], end: bool) -> String {
    let mut socket = TcpStream::connect(server.address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // A server that has seen enough does not read on.
    let _ = socket.write_all(bytes);
    if end {
        let _ = socket.shutdown(std::net::Shutdown::Write);
    }
    let mut answer = Vec::new();
    match socket.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
    String::from_utf8(answer).unwrap()
}

/// The status and the error object of an answer.
fn error(answer: &str) -> (u16, Value) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
    let body: Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {answer}"));
    assert!(body["error"]["message"].is_string() && body["error"]["type"].is_string(), "{answer}");
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body)
}

fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

#[test]
fn every_bad_body_is_refused_with_an_error_object_at_every_path() {
    let server = fake();
    let deep = b"[".repeat(200_000);
    let long = [b"{\"model\": \"".as_slice(), &b"m".repeat(1 << 20), b"\", \"prompt\": \"x\"}"].concat();
    let bodies: [(&[u8], u16); 14] = [
        (b"", 400),
        (b"{", 400),
        (b"{\"prompt\": \"x\"", 400),
        (b"{\"prompt\": \"x\"}}", 400),
        (b"[]", 400),
        (b"\"text\"", 400),
        (b"{\"prompt\": \"\xff\xfe\"}", 400),
        (b"{\"prompt\": \"\xed\xa0\x80\"}", 400),
        (b"{\"prompt\": \"\\ud800\"}", 400),
        (b"\x00\x01\x02", 400),
        (b"{\"prompt\": NaN}", 400),
        (b"{\"prompt\": \"x\", \"max_tokens\": 1e999}", 400),
        (&deep, 400),
        (&long, 404),
    ];
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/route", "/tokenize", "/detokenize"] {
        for (body, expected) in bodies {
            let answer = send(&server, &post(path, body));
            let (status, body) = error(&answer);
            // Where a field of that body does not exist, that is the error.
            assert!(status == expected || status == 400, "{path}: {answer}");
            assert!(body.to_string().len() < 1000, "{path}: an error of {} bytes", body.to_string().len());
        }
    }
    server.chat(&json!({}));
}

#[test]
fn values_at_the_edges_are_refused_by_name() {
    let server = fake();
    let ask = |fields: Value| {
        let body = with(json!({"prompt": "x"}), &fields).to_string();
        error(&send(&server, &post("/v1/completions", body.as_bytes())))
    };
    for (fields, status, param) in [
        (json!({"max_tokens": -1}), 400, "max_tokens"),
        (json!({"max_tokens": i64::MIN}), 400, "max_tokens"),
        (json!({"max_tokens": 1e18}), 400, "max_tokens"),
        (json!({"n": 1_000_000_000}), 400, "n"),
        (json!({"n": -1}), 400, "n"),
        (json!({"stop": "s".repeat(100_000)}), 400, "stop"),
        (json!({"stop": vec!["s"; 10_000]}), 400, "stop"),
        (json!({"prompt": vec!["x"; 10_000]}), 400, "n"),
        (json!({"prompt": [4_294_967_296u64]}), 400, "prompt[0]"),
        (json!({"prompt": [-1]}), 400, "prompt[0]"),
        (json!({"logit_bias": {"-1": 1}}), 400, "logit_bias"),
        (json!({"logit_bias": {"99999999": 1}}), 400, ""),
        (json!({"logprobs": u64::MAX}), 400, "logprobs"),
        (json!({"seed": 1e300}), 400, "seed"),
        (json!({"temperature": f32::MAX}), 200, ""),
        (json!({"model": ""}), 404, "model"),
        (json!({"model": "../../etc/passwd"}), 404, "model"),
        (json!({"engine": "../cpu"}), 400, "engine"),
    ] {
        if status == 200 {
            server.complete(&with(json!({"prompt": "x"}), &fields));
            continue;
        }
        let (found, body) = ask(fields.clone());
        let short = fields.to_string().chars().take(80).collect::<String>();
        let param = if param.is_empty() { Value::Null } else { json!(param) };
        assert_eq!((found, &body["error"]["param"]), (status, &param), "{short}: {body}");
    }
    server.chat(&json!({}));
}

#[test]
fn an_order_of_roles_is_refused_only_where_the_template_refuses_it() {
    let odd = json!({"messages": [
        {"role": "assistant", "content": "«Yes»"}, {"role": "user", "content": "«a»"}, {"role": "user", "content": "«b»"},
    ]});
    // This template takes them in any order.
    let lenient = fake();
    lenient.chat(&odd);
    let strict = echo(Some("gemma3"));
    let reply = strict.post("/v1/chat/completions", &with(hello(), &odd));
    let error = &reply.json()["error"];
    assert_eq!((reply.status, &error["param"]), (400, &json!("messages")), "{}", reply.text);
    assert!(error["message"].as_str().unwrap().contains("alternate"), "{error}");
    let even = json!({"messages": [{"role": "user", "content": "«fine»"}]});
    assert_eq!(strict.chat(&even)["choices"][0]["message"]["content"], "fine");
}

#[test]
fn what_is_not_http_is_cut_off() {
    let server = fake();
    let many = format!("GET /health HTTP/1.1\r\n{}\r\n", "X-A: b\r\n".repeat(10_000));
    let wide = format!("GET /health HTTP/1.1\r\nHost: x\r\nX-A: {}\r\n\r\n", "b".repeat(4 << 20));
    let path = format!("GET /{} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "p".repeat(1 << 20));
    for bytes in [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".as_slice(),
        b"\r\n\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbroken header\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        many.as_bytes(),
        wide.as_bytes(),
        path.as_bytes(),
    ] {
        let answer = send_and_end(&server, bytes);
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]);
        let refused = answer.split(' ').nth(1).is_none_or(|status| status.starts_with('4'));
        assert!(refused, "{shown}: {answer}");
    }
    // A body that breaks off is told so where the client still listens.
    let mut half = post("/tokenize", b"{\"content\": \"Hello\"}");
    half.truncate(half.len() - 4);
    let answer = send_and_end(&server, &half);
    assert!(answer.is_empty() || error(&answer).0 == 400, "{answer}");
    server.chat(&json!({}));
}

/// A client that sends a byte now and then would hold its connection for ever, were time counted between bytes.
#[test]
fn a_trickle_ends_in_time_and_disturbs_nobody() {
    let brief = Duration::from_millis(500);
    let options = Options { head_timeout: brief, body_timeout: brief, ..Options::default() };
    let server = fake_with(10_000, &tandem_runtime::Options::default(), options);
    let request = post("/v1/chat/completions", hello().to_string().as_bytes());
    let body_at = request.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    std::thread::scope(|scope| {
        for client in 0..40 {
            let (server, request) = (&server, &request);
            // Half of them are slow from the start, half with their body only.
            let at_once = if client % 2 == 0 { 0 } else { body_at };
            scope.spawn(move || {
                let begun = Instant::now();
                let mut socket = TcpStream::connect(server.address).unwrap();
                socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
                socket.write_all(&request[..at_once]).unwrap();
                let mut answer = Vec::new();
                for byte in &request[at_once..] {
                    let gone = socket.write_all(&[*byte]).is_err();
                    let mut buffer = [0; 1024];
                    match socket.read(&mut buffer) {
                        Ok(0) => break,
                        Ok(count) => answer.extend_from_slice(&buffer[..count]),
                        Err(e)
                            if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) && !gone => {}
                        Err(_) => break,
                    }
                }
                let answer = String::from_utf8(answer).unwrap();
                assert!(begun.elapsed() < Duration::from_secs(10), "it was never cut off: {answer}");
                assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
                if at_once > 0 && !answer.is_empty() {
                    assert!(answer.contains("request_timeout"), "{answer}");
                }
            });
        }
        for _ in 0..10 {
            server.chat(&json!({}));
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    server.chat(&json!({}));
}

#[test]
fn a_bad_key_is_refused_before_anything_is_read() {
    let options = Options { api_key: Some("secret".to_owned()), ..Options::default() };
    let server = fake_with(10_000, &tandem_runtime::Options::default(), options);
    // Of this body nothing but the head is sent.
    let mut socket = TcpStream::connect(server.address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Type: application/json\r\n\
                Content-Length: 1000000\r\nConnection: close\r\n\r\n";
    socket.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    let _ = socket.read_to_string(&mut answer);
    let (status, body) = error(&answer);
    assert_eq!((status, &body["error"]["code"]), (401, &json!("invalid_api_key")));
    assert!(answer.to_lowercase().contains("www-authenticate: bearer"));
}
