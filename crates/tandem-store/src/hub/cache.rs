//! The hub's cache on disk, as Python's huggingface_hub lays it out, so that programs share what they downloaded:
//!
//! ```text
//! CACHE/models--OWNER--NAME/refs/REVISION               the commit that a branch or tag named last
//!                          /blobs/HASH                  contents, by SHA-256 (large files) or git's blob id
//!                          /blobs/HASH.incomplete       a download that broke, or goes on in another process
//!                          /snapshots/COMMIT/PATH       a link to a blob
//!                          /.no_exist/COMMIT/PATH       an empty file: the repository has no such file
//! CACHE/.locks/models--OWNER--NAME/HASH.lock            held while that blob is written
//! ```

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::client::{Client, RemoteFile, RepoInfo};
use crate::reference::HubId;
use crate::shelf::lock_file;
use crate::{Progress, Result, StoreError, atomic, digest};

/// One repository's folder in the cache.
pub(super) struct Repo {
    folder: PathBuf,
    locks: PathBuf,
}

impl Repo {
    pub(super) fn new(cache: &Path, id: &HubId) -> Self {
        Self { folder: cache.join(id.folder()), locks: cache.join(".locks").join(id.folder()) }
    }

    pub(super) fn exists(&self) -> bool {
        self.folder.is_dir()
    }

    pub(super) fn create(&self) -> Result<()> {
        [&self.folder.join("blobs"), &self.locks].into_iter().try_for_each(|folder| create_folder(folder))
    }

    pub(super) fn remove(&self) -> Result<u64> {
        let bytes = atomic::bytes_below(&self.folder);
        fs::remove_dir_all(&self.folder).map_err(StoreError::accessing(&self.folder))?;
        // Locks are empty files, and another process may hold one.
        let _ = fs::remove_dir_all(&self.locks);
        Ok(bytes)
    }

    /// The commit that `revision` named when it was last downloaded.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.folder.join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if is_commit(revision) {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        create_parent(&path)?;
        atomic::write(&path, |f| f.write_all(commit.as_bytes())).map_err(StoreError::writing(&path))
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    pub(super) fn file(&self, commit: &str, name: &str) -> PathBuf {
        self.snapshot(commit).join(name)
    }

    fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.folder.join("blobs").join(&file.hash)
    }

    fn absent(&self, commit: &str, name: &str) -> PathBuf {
        self.folder.join(".no_exist").join(commit).join(name)
    }

    pub(super) fn is_absent(&self, commit: &str, name: &str) -> bool {
        self.absent(commit, name).is_file()
    }

    pub(super) fn mark_absent(&self, commit: &str, name: &str) -> Result<()> {
        let path = self.absent(commit, name);
        create_parent(&path)?;
        fs::write(&path, []).map_err(StoreError::writing(&path))
    }

    /// Whether the blob of `file` is here and has its hash. One that has not is removed.
    pub(super) fn has_blob(&self, file: &RemoteFile, progress: &mut dyn Progress) -> Result<bool> {
        let blob = self.blob(file);
        let Ok(meta) = fs::metadata(&blob) else { return Ok(false) };
        let whole = meta.len() == file.bytes
            && digest::as_hub(&blob, &file.hash).map_err(StoreError::accessing(&blob))? == file.hash;
        if !whole {
            progress.note(&format!("{} is damaged; downloading it again", blob.display()));
            fs::remove_file(&blob).map_err(StoreError::accessing(&blob))?;
        }
        Ok(whole)
    }

    /// Downloads the blob of `file`, going on where an earlier try stopped. `before` bytes of this transfer are done.
    pub(super) fn fetch(
        &self,
        client: &Client,
        id: &HubId,
        info: &RepoInfo,
        file: &RemoteFile,
        before: u64,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let _lock = lock_file(&self.locks.join(format!("{}.lock", file.hash)), progress)?;
        let blob = self.blob(file);
        if blob.exists() {
            // Another process brought it while this one waited for the lock.
            return Ok(());
        }
        let incomplete = self.folder.join("blobs").join(format!("{}.incomplete", file.hash));
        let resumes = incomplete.metadata().is_ok_and(|m| m.len() > 0);
        let complete = |progress: &mut dyn Progress| {
            let mut partial = File::options()
                .create(true)
                .append(true)
                .open(&incomplete)
                .map_err(StoreError::writing(&incomplete))?;
            client.download(id, info, file, (&mut partial, &incomplete), &mut |here| {
                progress.advance(before + here);
            })?;
            partial.sync_all().map_err(StoreError::writing(&incomplete))?;
            drop(partial);
            let found =
                digest::as_hub(&incomplete, &file.hash).map_err(StoreError::accessing(&incomplete))?;
            if found == file.hash {
                return Ok(());
            }
            fs::remove_file(&incomplete).map_err(StoreError::accessing(&incomplete))?;
            let name = format!("{}/{}", id.repo(), file.name);
            Err(StoreError::HashMismatch { file: name, expected: file.hash.clone(), found })
        };
        match complete(progress) {
            // The beginning that was here, perhaps from another program, was bad: once more from the start.
            Err(StoreError::HashMismatch { .. }) if resumes => complete(progress)?,
            result => result?,
        }
        fs::rename(&incomplete, &blob).map_err(StoreError::writing(&blob))?;
        atomic::sync_folder(&self.folder.join("blobs")).map_err(StoreError::writing(&blob))
    }

    /// Makes the blob of `file` appear in the snapshot of `commit`.
    pub(super) fn link(&self, commit: &str, file: &RemoteFile) -> Result<()> {
        let path = self.file(commit, &file.name);
        create_parent(&path)?;
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(StoreError::writing(&path)(e)),
            _ => {}
        }
        link(&self.blob(file), &file.hash, &file.name, &path).map_err(StoreError::writing(&path))
    }
}

/// A relative link, so that the cache can be moved.
#[cfg(unix)]
fn link(_blob: &Path, hash: &str, name: &str, path: &Path) -> io::Result<()> {
    let up = "../".repeat(2 + name.matches('/').count());
    std::os::unix::fs::symlink(format!("{up}blobs/{hash}"), path)
}

/// Symbolic links need a privilege on Windows; a second name for the same data does not.
#[cfg(not(unix))]
fn link(blob: &Path, _hash: &str, _name: &str, path: &Path) -> io::Result<()> {
    fs::hard_link(blob, path).or_else(|_| fs::copy(blob, path).map(|_| ()))
}

/// The hash that names the blob behind a snapshot's link.
pub(super) fn blob_name(link: &Path) -> Option<String> {
    let target = fs::read_link(link).ok()?;
    target.file_name()?.to_str().filter(|name| is_hash(name)).map(str::to_owned)
}

/// All snapshots of the cache: the id that names each (by branch or tag, else by commit), and its commit.
pub(super) fn scan(cache: &Path) -> Vec<(HubId, String)> {
    let names = |folder: &Path| -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|e| e.file_name().into_string().ok()).collect()
    };
    let mut found = Vec::new();
    for folder in names(cache) {
        let Some((owner, name)) = folder.strip_prefix("models--").and_then(|f| f.split_once("--")) else {
            continue;
        };
        let Ok(id) = HubId::parse(&format!("{owner}/{name}")) else { continue };
        let repo = Repo::new(cache, &id);
        let mut unnamed = names(&repo.folder.join("snapshots"));
        for revision in names(&repo.folder.join("refs")) {
            let Some(commit) = repo.commit(&revision) else { continue };
            unnamed.retain(|c| *c != commit);
            let suffix = if revision == "main" { String::new() } else { format!("@{revision}") };
            found.extend(HubId::parse(&format!("{owner}/{name}{suffix}")).map(|id| (id, commit)));
        }
        for commit in unnamed.into_iter().filter(|c| is_commit(c)) {
            found.extend(HubId::parse(&format!("{owner}/{name}@{commit}")).map(|id| (id, commit)));
        }
    }
    found
}

/// A commit of git, in full.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && is_hash(text)
}

/// What blobs are named by: SHA-1 or SHA-256.
pub(super) fn is_hash(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn create_parent(path: &Path) -> Result<()> {
    path.parent().map_or(Ok(()), create_folder)
}

fn create_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(StoreError::writing(folder))
}
