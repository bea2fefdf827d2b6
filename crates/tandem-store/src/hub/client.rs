//! The two requests that Tandem makes of a hub.
//!
//! `GET /api/models/ID/revision/REVISION?blobs=true` says which files there are, with sizes and hashes;
//! `GET /ID/resolve/COMMIT/PATH` is a file, and honours `Range`. (Interface: the hub's OpenAPI description, "Models".)

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

use super::cache::{is_commit, is_hash};
use crate::reference::{HubId, is_relative_path};
use crate::settings::HubSettings;
use crate::{Result, StoreError, digest};

/// Tries in a row that bring no new byte before a download is given up.
const TRIES: u32 = 4;

pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// What the hub says about a repository at one commit.
pub(super) struct RepoInfo {
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

/// A file of a repository.
pub(super) struct RemoteFile {
    /// Its path in the repository.
    pub name: String,
    pub bytes: u64,
    /// SHA-256 of a large file, git's blob id of a small one.
    pub hash: String,
}

impl RepoInfo {
    pub(super) fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|f| f.name == name)
    }
}

/// How one try at a download ended, if not well.
enum Broken {
    /// Another try may do.
    Retry(StoreError),
    Fatal(StoreError),
}

impl Client {
    pub(super) fn new(settings: &HubSettings) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Files come from other hosts by signed addresses; the token is for the hub alone.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(30)))
            .timeout_per_read(Some(Duration::from_secs(30)))
            .user_agent(concat!("tandem/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: Agent::new_with_config(config),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
        }
    }

    /// Which files `id` has.
    pub(super) fn info(&self, id: &HubId) -> Result<RepoInfo> {
        #[derive(Deserialize)]
        struct Answer {
            sha: String,
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Sibling {
            rfilename: String,
            size: Option<u64>,
            blob_id: Option<String>,
            lfs: Option<Lfs>,
        }
        #[derive(Deserialize)]
        struct Lfs {
            sha256: String,
            size: u64,
        }

        let url = format!(
            "{}/api/models/{}/revision/{}?blobs=true",
            self.endpoint,
            id.repo(),
            encode(id.revision())
        );
        let mut response = self.get(&url, None)?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(id, &url, &response));
        }
        let bad = |why: String| StoreError::BadAnswer { url: url.clone(), why };
        let text = response.body_mut().read_to_string().map_err(|e| bad(e.to_string()))?;
        let answer: Answer = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        if !is_commit(&answer.sha) {
            return Err(bad(format!("`{}` is no commit", answer.sha)));
        }
        let mut files = Vec::with_capacity(answer.siblings.len());
        for Sibling { rfilename: name, size, blob_id, lfs } in answer.siblings {
            let described = lfs.map(|l| (l.size, l.sha256)).or(size.zip(blob_id));
            match described {
                Some((bytes, hash)) if is_hash(&hash) && is_relative_path(&name) => {
                    files.push(RemoteFile { name, bytes, hash });
                }
                Some(_) => return Err(bad(format!("`{name}` has no valid path or hash"))),
                None => return Err(bad(format!("`{name}` has no size or hash"))),
            }
        }
        Ok(RepoInfo { commit: answer.sha, files })
    }

    /// Appends to `partial` until it has all bytes of `file`. `advance` hears how many are there.
    pub(super) fn download(
        &self,
        id: &HubId,
        info: &RepoInfo,
        file: &RemoteFile,
        (partial, path): (&mut File, &Path),
        advance: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let url =
            format!("{}/{}/resolve/{}/{}", self.endpoint, id.repo(), info.commit, encode_path(&file.name));
        let here = |partial: &File| partial.metadata().map(|m| m.len()).map_err(StoreError::accessing(path));
        let (mut best, mut failures) = (0, 0);
        loop {
            let have = here(partial)?;
            if have == file.bytes {
                return Ok(());
            }
            if have > file.bytes {
                partial.set_len(0).map_err(StoreError::writing(path))?;
                continue;
            }
            advance(have);
            let broken = match self.download_once(id, &url, have, file.bytes, (partial, path), advance) {
                Ok(()) => continue,
                Err(Broken::Fatal(error)) => return Err(error),
                Err(Broken::Retry(error)) => error,
            };
            let have = here(partial)?;
            failures = if have > best { 1 } else { failures + 1 };
            best = best.max(have);
            if failures == TRIES {
                return Err(match broken {
                    StoreError::Interrupted { url, want, why, .. } => {
                        StoreError::Interrupted { url, have, want, why }
                    }
                    other => other,
                });
            }
            std::thread::sleep(Duration::from_millis(100 << failures));
        }
    }

    /// One request for the bytes from `have` on. Success means that the server sent all it promised.
    fn download_once(
        &self,
        id: &HubId,
        url: &str,
        have: u64,
        want: u64,
        (partial, path): (&mut File, &Path),
        advance: &mut dyn FnMut(u64),
    ) -> Result<(), Broken> {
        let interrupted =
            |why: String| Broken::Retry(StoreError::Interrupted { url: url.to_owned(), have, want, why });
        let mut response = self.get(url, Some(have)).map_err(Broken::Retry)?;
        let mut here = match response.status() {
            StatusCode::PARTIAL_CONTENT if starts_at(&response, have) => have,
            // A server without ranges sends everything.
            StatusCode::OK => {
                partial.set_len(0).map_err(|e| Broken::Fatal(StoreError::writing(path)(e)))?;
                0
            }
            StatusCode::PARTIAL_CONTENT => return Err(interrupted("the server sent another range".into())),
            status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                return Err(Broken::Retry(self.refusal(id, url, &response)));
            }
            _ => return Err(Broken::Fatal(self.refusal(id, url, &response))),
        };
        let mut body = response.body_mut().as_reader();
        let mut chunk = vec![0; digest::CHUNK];
        while here < want {
            // Never more than the file has, whatever the server sends.
            let room = chunk.len().min(usize::try_from(want - here).unwrap_or(usize::MAX));
            let n = body.read(&mut chunk[..room]).map_err(|e| interrupted(e.to_string()))?;
            if n == 0 {
                return Err(interrupted("the connection closed early".into()));
            }
            partial.write_all(&chunk[..n]).map_err(|e| Broken::Fatal(StoreError::writing(path)(e)))?;
            here += n as u64;
            advance(here);
        }
        Ok(())
    }

    fn get(&self, url: &str, from: Option<u64>) -> Result<Response<Body>> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(from) = from {
            request = request.header("Range", format!("bytes={from}-"));
        }
        request.call().map_err(|e| StoreError::NoNetwork { url: url.to_owned(), why: e.to_string() })
    }

    /// The error behind an answer that is not the thing asked for. The hub answers 401 both for what is gated and,
    /// to strangers, for what does not exist; a header tells which.
    fn refusal(&self, id: &HubId, url: &str, response: &Response<Body>) -> StoreError {
        let header = |name| response.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let status = response.status();
        let id = id.without_file();
        match (status.as_u16(), header("x-error-code")) {
            (_, "RepoNotFound" | "RevisionNotFound") | (404, _) => {
                StoreError::NoSuchRepo { id: id.to_string() }
            }
            (401 | 403, _) => {
                let why = match header("x-error-message") {
                    "" if self.token.is_none() => format!("it answered {status}, and no token is set"),
                    "" => format!("it answered {status}"),
                    message => message.to_owned(),
                };
                let page = format!("{}/{}", self.endpoint, id.repo());
                StoreError::Gated { id: id.to_string(), why, page }
            }
            (status, _) => StoreError::BadStatus { status, url: url.to_owned() },
        }
    }
}

/// Whether the answer to a request for a range starts at byte `have`.
fn starts_at(response: &Response<Body>, have: u64) -> bool {
    let range = response.headers().get("content-range").and_then(|v| v.to_str().ok()).unwrap_or_default();
    range.strip_prefix("bytes ").and_then(|r| r.split('-').next()) == Some(have.to_string().as_str())
}

/// Percent-encodes one segment of an address.
fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

fn encode_path(path: &str) -> String {
    path.split('/').map(encode).collect::<Vec<_>>().join("/")
}
