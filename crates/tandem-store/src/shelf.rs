//! The store's own folder of models: for each name a GGUF file and a record beside it.
//!
//! ```text
//! ROOT/.lock                held while the folder is changed
//! ROOT/models/NAME.gguf
//! ROOT/models/NAME.json     its size, hash and source
//! ```
//!
//! The record is written last and removed first: a GGUF file without one does not count.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::atomic::{self, Staged};
use crate::{Progress, Result, StoreError, digest};

/// What is known about a file of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Size of the GGUF file.
    pub bytes: u64,
    /// Its SHA-256.
    pub sha256: String,
    /// Where it came from, in words.
    pub source: String,
}

pub(crate) struct Shelf {
    root: PathBuf,
}

impl Shelf {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn models(&self) -> PathBuf {
        self.root.join("models")
    }

    pub(crate) fn gguf(&self, name: &str) -> PathBuf {
        self.models().join(format!("{name}.gguf"))
    }

    fn record_path(&self, name: &str) -> PathBuf {
        self.models().join(format!("{name}.json"))
    }

    /// The record of `name`; none where there is none or it cannot be read (then the model is fetched again).
    pub(crate) fn record(&self, name: &str) -> Option<Record> {
        serde_json::from_slice(&fs::read(self.record_path(name)).ok()?).ok()
    }

    /// All names with a record, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.models()).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|e| e.file_name().to_str()?.strip_suffix(".json").map(str::to_owned))
            .filter(|name| self.record(name).is_some())
            .collect();
        names.sort();
        names
    }

    /// Checks the size of `name` against its record: cheap enough for every start.
    pub(crate) fn check_size(&self, name: &str, record: &Record) -> Result<()> {
        let path = self.gguf(name);
        let found = fs::metadata(&path).map_or(0, |m| m.len());
        if found == record.bytes {
            return Ok(());
        }
        Err(StoreError::SizeMismatch { file: path.display().to_string(), expected: record.bytes, found })
    }

    /// Checks size and hash of `name` against its record.
    pub(crate) fn check_hash(&self, name: &str, record: &Record) -> Result<()> {
        self.check_size(name, record)?;
        let path = self.gguf(name);
        let found = digest::sha256(&path).map_err(StoreError::accessing(&path))?;
        if found == record.sha256 {
            return Ok(());
        }
        let file = path.display().to_string();
        Err(StoreError::HashMismatch { file, expected: record.sha256.clone(), found })
    }

    /// Puts a finished file under `name`. The caller holds the lock.
    pub(crate) fn put(&self, name: &str, file: Staged, record: &Record) -> Result<PathBuf> {
        let (path, record_path) = (self.gguf(name), self.record_path(name));
        remove_if_there(&record_path)?;
        file.commit(&path).map_err(StoreError::writing(&path))?;
        let json = serde_json::to_vec_pretty(record).unwrap_or_default();
        atomic::write(&record_path, |f| f.write_all(&json)).map_err(StoreError::writing(&record_path))?;
        Ok(path)
    }

    /// Removes `name`; returns the bytes that became free. The caller holds the lock.
    pub(crate) fn remove(&self, name: &str) -> Result<u64> {
        let path = self.gguf(name);
        let bytes = fs::metadata(&path).map_or(0, |m| m.len());
        remove_if_there(&self.record_path(name))?;
        remove_if_there(&path)?;
        Ok(bytes)
    }

    /// Makes the folders and takes the lock; waits for another process that holds it.
    pub(crate) fn lock(&self, progress: &mut dyn Progress) -> Result<File> {
        let models = self.models();
        fs::create_dir_all(&models).map_err(StoreError::writing(&models))?;
        lock_file(&self.root.join(".lock"), progress)
    }

    /// Removes what killed downloads left, unless another process is at work. Best effort: whoever cannot sweep will
    /// hear the reason when it writes.
    pub(crate) fn sweep(&self) {
        let Ok(lock) = File::open(self.root.join(".lock")) else { return };
        if lock.try_lock().is_ok() {
            let _ = atomic::remove_stale(&self.models());
        }
    }
}

/// Takes the lock of `path`, which is released when the file is dropped, also by a crash.
pub(crate) fn lock_file(path: &Path, progress: &mut dyn Progress) -> Result<File> {
    let file = File::options().create(true).append(true).open(path).map_err(StoreError::writing(path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress.note("waiting for another process that downloads into the same place");
            file.lock().map_err(StoreError::writing(path))?;
        }
        Err(TryLockError::Error(source)) => return Err(StoreError::writing(path)(source)),
    }
    Ok(file)
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(StoreError::accessing(path)(e)),
        _ => Ok(()),
    }
}
