//! A small hub on this machine, and settings that use it.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::json;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use tandem_store::{Alias, HubSettings, Progress, Settings, Store};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub fn git_blob(bytes: &[u8]) -> String {
    hex(&Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize())
}

/// How the fake hub misbehaves.
#[derive(Default, Clone)]
pub struct Faults {
    /// Files whose every answer ends after so many bytes of body.
    pub cut: HashMap<String, usize>,
    /// Stop cutting after so many answers; 0 is never.
    pub cuts_left: usize,
    /// Files that are served with other bytes than their hash is of.
    pub altered: Vec<String>,
    /// Never honour a range.
    pub no_ranges: bool,
    /// Answer everything with this status and `x-error-code`.
    pub refuse: Option<(u16, &'static str)>,
    /// Send large files from this address instead.
    pub redirect: Option<String>,
}

#[derive(Clone)]
pub struct Request {
    pub path: String,
    pub headers: HashMap<String, String>,
}

#[derive(Default)]
struct State {
    repos: HashMap<String, Vec<(String, Vec<u8>)>>,
    faults: Faults,
    log: Vec<Request>,
}

/// Speaks as much of the hub's interface as the store uses: the list of a repository's files, and the files with
/// ranges. Files that end in `.safetensors` or `.gguf` are large ones.
pub struct FakeHub {
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

impl FakeHub {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State::default()));
        let served = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = served.clone();
                std::thread::spawn(move || answer(stream, &state));
            }
        });
        Self { endpoint, state }
    }

    pub fn repo(&self, id: &str, files: &[(&str, &[u8])]) {
        let files = files.iter().map(|(n, b)| ((*n).to_owned(), b.to_vec())).collect();
        self.state.lock().unwrap().repos.insert(id.to_owned(), files);
    }

    pub fn faults(&self, faults: Faults) {
        self.state.lock().unwrap().faults = faults;
    }

    /// The requests since the last call.
    pub fn take_log(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }
}

fn answer(stream: TcpStream, state: &Mutex<State>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let mut state = state.lock().ok()?;
    state.log.push(Request { path: path.clone(), headers: headers.clone() });
    let (status, extra, body, send) = respond(&mut state, &path, &headers);
    drop(state);
    let mut stream = stream;
    let head =
        format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n{extra}\r\n", body.len());
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(&body[..send.min(body.len())]).ok()?;
    stream.shutdown(std::net::Shutdown::Write).ok()?;
    let _ = stream.read(&mut [0]);
    Some(())
}

fn respond(
    state: &mut State,
    path: &str,
    headers: &HashMap<String, String>,
) -> (u16, String, Vec<u8>, usize) {
    if let Some((status, code)) = state.faults.refuse {
        return (status, format!("X-Error-Code: {code}\r\n"), b"{}".to_vec(), 2);
    }
    let missing = (404, "X-Error-Code: RepoNotFound\r\n".to_owned(), b"{}".to_vec(), 2);
    if let Some(rest) = path.strip_prefix("/api/models/") {
        let Some((id, revision)) = rest.split_once("/revision/") else { return missing };
        if !revision.starts_with("main?") && !revision.starts_with("v2?") {
            return missing;
        }
        let Some(files) = state.repos.get(id) else { return missing };
        let siblings: Vec<_> = files
            .iter()
            .map(|(name, bytes)| match is_large(name) {
                true => json!({"rfilename": name, "size": bytes.len(), "blobId": git_blob(b"pointer"),
                               "lfs": {"sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 134}}),
                false => json!({"rfilename": name, "size": bytes.len(), "blobId": git_blob(bytes)}),
            })
            .collect();
        let body = json!({"id": id, "sha": COMMIT, "siblings": siblings}).to_string().into_bytes();
        let send = body.len();
        return (200, String::new(), body, send);
    }
    let Some((id, name)) = path[1..].split_once(&format!("/resolve/{COMMIT}/")) else { return missing };
    if let Some(other) = state.faults.redirect.as_ref().filter(|_| is_large(name)) {
        return (302, format!("Location: {other}{path}\r\n"), Vec::new(), 0);
    }
    let found = state.repos.get(id).and_then(|files| files.iter().find(|(n, _)| n == name));
    let Some((_, bytes)) = found else { return missing };
    let mut bytes = bytes.clone();
    if state.faults.altered.iter().any(|n| n == name) {
        bytes[0] ^= 1;
    }
    let from: usize = match headers.get("range").filter(|_| !state.faults.no_ranges) {
        Some(range) => range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap(),
        None => 0,
    };
    let mut send = bytes.len();
    if let Some(cut) = state.faults.cut.get(name).copied() {
        send = cut;
        if state.faults.cuts_left > 0 {
            state.faults.cuts_left -= 1;
            if state.faults.cuts_left == 0 {
                state.faults.cut.clear();
            }
        }
    }
    match headers.contains_key("range") && !state.faults.no_ranges {
        true => {
            let range = format!("Content-Range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len());
            (206, range, bytes.split_off(from), send)
        }
        false => (200, String::new(), bytes, send),
    }
}

fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf")
}

/// Settings below `dir`, with no Python and a hub that nothing listens for.
pub fn settings(dir: &Path) -> Settings {
    Settings {
        root: dir.join("home"),
        aliases: &[],
        pythons: vec!["no-such-python".into()],
        hub: HubSettings { endpoint: closed_port(), cache: dir.join("hub"), token: None, offline: false },
    }
}

/// A store below `dir` that uses `hub`.
pub fn store(dir: &Path, hub: &FakeHub) -> Store {
    let mut settings = settings(dir);
    settings.hub.endpoint = hub.endpoint.clone();
    Store::with(settings)
}

/// An address that refuses connections.
pub fn closed_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

pub fn leak_aliases(aliases: Vec<Alias>) -> &'static [Alias] {
    aliases.leak()
}

/// Remembers what it was told.
#[derive(Default)]
pub struct Seen {
    pub started: Vec<(String, Option<u64>)>,
    pub done: Vec<u64>,
    pub finished: usize,
    pub notes: Vec<String>,
}

impl Progress for Seen {
    fn start(&mut self, what: &str, total: Option<u64>) {
        self.started.push((what.to_owned(), total));
    }

    fn advance(&mut self, done: u64) {
        self.done.push(done);
    }

    fn finish(&mut self) {
        self.finished += 1;
    }

    fn note(&mut self, line: &str) {
        self.notes.push(line.to_owned());
    }
}

/// All files below `dir`, as paths relative to it, sorted.
pub fn files_below(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else {
                found.push(path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}
