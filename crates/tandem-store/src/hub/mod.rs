//! Models of the Hugging Face hub, in the hub's own cache.
//!
//! Why not the `hf-hub` crate: its 1.0 pulls in about 440 crates (an async runtime, a second storage protocol, and a
//! TLS library in C that needs CMake), and it cannot go on with a broken download. What Tandem needs of the hub is
//! one question (which files, how large, which hashes) and plain downloads of byte ranges, which a small blocking
//! HTTP client does. What must be *exactly* as in the other libraries is the cache on disk: see [`cache`].
//!
//! A repository counts as here when all its files that Tandem wants are here or known not to exist, so that the usual
//! start needs no network. Small files come first and weights last, and the revision's name is set at the very end.

mod cache;
mod client;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use self::cache::Repo;
use self::client::{Client, RemoteFile, RepoInfo};
use crate::reference::{HubId, is_gguf};
use crate::settings::HubSettings;
use crate::{Entry, Format, Progress, Resolved, Result, Source, StoreError, digest};

/// The files of a model beside its weights. Not every repository has all of them.
const SMALL_FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

pub(crate) struct Hub {
    settings: HubSettings,
}

/// A model in the hub's cache.
#[derive(Debug, PartialEq)]
pub(crate) struct Found {
    pub path: PathBuf,
    pub format: Format,
}

/// What the cache holds of a model.
#[derive(Debug, PartialEq)]
pub(crate) enum Local {
    /// Everything.
    Whole(Found),
    /// Enough to try, but a small file may be missing (another program fetched what *it* wanted), or, where several
    /// GGUF files are possible, only one of them is here.
    Usable(Found),
    /// Not enough.
    Missing,
}

impl Found {
    pub(crate) fn resolved(self, name: &str, license: Option<&'static str>) -> Resolved {
        let Self { path, format } = self;
        Resolved { name: name.to_owned(), path, format, source: Source::Hub, license }
    }
}

impl Hub {
    pub(crate) fn new(settings: HubSettings) -> Self {
        Self { settings }
    }

    fn repo(&self, id: &HubId) -> Repo {
        Repo::new(&self.settings.cache, id)
    }

    /// Looks for `id` in the cache; never asks the network.
    pub(crate) fn local(&self, id: &HubId) -> Local {
        let repo = self.repo(id);
        let Some(commit) = repo.commit(id.revision()) else { return Local::Missing };
        look(&repo, &commit, id.file())
    }

    /// Fetches what is missing of `id`, at the commit that its revision names now, and checks the rest.
    pub(crate) fn pull(&self, id: &HubId, progress: &mut dyn Progress) -> Result<Found> {
        if self.settings.offline {
            return Err(StoreError::Offline { id: id.to_string() });
        }
        let client = Client::new(&self.settings);
        let info = client.info(id)?;
        let repo = self.repo(id);
        repo.create()?;

        let (path, format) = match chosen_gguf(id, &info)? {
            Some(file) => {
                fetch_all(&client, &repo, id, &info, &[file], progress)?;
                if id.file().is_none() {
                    // Tells the next start that this file alone is the model.
                    repo.mark_absent(&info.commit, WEIGHTS)?;
                    repo.mark_absent(&info.commit, INDEX)?;
                }
                (repo.file(&info.commit, &file.name), Format::Gguf)
            }
            None => {
                let small: Vec<_> = SMALL_FILES.iter().chain([&INDEX]).filter_map(|n| info.file(n)).collect();
                fetch_all(&client, &repo, id, &info, &small, progress)?;
                for missing in SMALL_FILES.iter().filter(|n| info.file(n).is_none()) {
                    repo.mark_absent(&info.commit, missing)?;
                }
                let mut weights = Vec::new();
                for name in weight_files(id, &repo.snapshot(&info.commit), info.file(INDEX).is_some())? {
                    weights.push(info.file(&name).ok_or_else(|| StoreError::Unusable {
                        id: id.to_string(),
                        why: format!("it lacks {name}"),
                    })?);
                }
                fetch_all(&client, &repo, id, &info, &weights, progress)?;
                (repo.snapshot(&info.commit), Format::Folder)
            }
        };
        repo.set_commit(id.revision(), &info.commit)?;
        Ok(Found { path, format })
    }

    /// Checks every file of `found` against the hash that it is named by.
    pub(crate) fn verify(&self, found: &Found) -> Result<()> {
        let files = match found.format {
            Format::Gguf => vec![found.path.clone()],
            Format::Folder => {
                let entries = fs::read_dir(&found.path).map_err(StoreError::accessing(&found.path))?;
                entries.flatten().map(|e| e.path()).collect()
            }
        };
        for file in files {
            let Some(expected) = cache::blob_name(&file) else { continue };
            let hash = digest::as_hub(&file, &expected).map_err(StoreError::accessing(&file))?;
            if hash != expected {
                let file = file.display().to_string();
                return Err(StoreError::HashMismatch { file, expected, found: hash });
            }
        }
        Ok(())
    }

    /// All models of the cache that Tandem can read, by name.
    pub(crate) fn list(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        for (id, commit) in cache::scan(&self.settings.cache) {
            let repo = self.repo(&id);
            if let Local::Whole(found) | Local::Usable(found) = look(&repo, &commit, None)
                && found.format == Format::Folder
            {
                entries.push(entry(id.to_string(), found));
            }
            for file in ggufs_below(&repo.snapshot(&commit)) {
                let found = Found { path: repo.file(&commit, &file), format: Format::Gguf };
                entries.push(entry(format!("{id}:{file}"), found));
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        entries
    }

    /// Whether the cache has anything of this repository.
    pub(crate) fn has(&self, id: &HubId) -> bool {
        self.repo(id).exists()
    }

    /// Removes the repository with all its revisions; returns the bytes that became free.
    pub(crate) fn remove(&self, id: &HubId) -> Result<u64> {
        self.repo(id).remove()
    }
}

fn entry(name: String, found: Found) -> Entry {
    let size = |path: &Path| fs::metadata(path).map_or(0, |m| m.len());
    let bytes = match found.format {
        Format::Gguf => size(&found.path),
        Format::Folder => {
            fs::read_dir(&found.path).into_iter().flatten().flatten().map(|e| size(&e.path())).sum()
        }
    };
    let Found { path, format } = found;
    Entry { name, source: Source::Hub, format, path, bytes }
}

/// What the snapshot of `commit` holds.
fn look(repo: &Repo, commit: &str, file: Option<&str>) -> Local {
    let snapshot = repo.snapshot(commit);
    if let Some(file) = file {
        let path = repo.file(commit, file);
        return if path.is_file() {
            Local::Whole(Found { path, format: Format::Gguf })
        } else {
            Local::Missing
        };
    }
    let has = |name: &str| snapshot.join(name).is_file();
    let weights_here = match has(INDEX) {
        true => shards(&snapshot).is_ok_and(|names| names.iter().all(|n| has(n))),
        false => has(WEIGHTS),
    };
    if weights_here && has("config.json") {
        let found = Found { path: snapshot.clone(), format: Format::Folder };
        let settled = |name: &&str| has(name) || repo.is_absent(commit, name);
        return if SMALL_FILES.iter().all(settled) { Local::Whole(found) } else { Local::Usable(found) };
    }
    match ggufs_below(&snapshot).as_slice() {
        [only] => {
            let found = Found { path: repo.file(commit, only), format: Format::Gguf };
            let alone = [WEIGHTS, INDEX].iter().all(|n| repo.is_absent(commit, n));
            if alone { Local::Whole(found) } else { Local::Usable(found) }
        }
        _ => Local::Missing,
    }
}

/// The GGUF file to fetch of a repository: the one that was chosen, or the only one where there is nothing else.
/// `None` means the safetensors.
fn chosen_gguf<'a>(id: &HubId, info: &'a RepoInfo) -> Result<Option<&'a RemoteFile>> {
    let ggufs: Vec<&RemoteFile> = info.files.iter().filter(|f| is_gguf(Path::new(&f.name))).collect();
    let names = || ggufs.iter().map(|f| f.name.clone()).collect();
    let repo_id = || id.without_file().to_string();
    if let Some(file) = id.file() {
        let found = info.file(file);
        let missing = || StoreError::NoSuchFile { id: repo_id(), file: file.to_owned(), files: names() };
        return found.map(Some).ok_or_else(missing);
    }
    let has_weights = info.file(WEIGHTS).is_some() || info.file(INDEX).is_some();
    let unusable = |why: &str| StoreError::Unusable { id: repo_id(), why: why.to_owned() };
    match (has_weights, ggufs.as_slice()) {
        (true, _) if info.file("config.json").is_none() => Err(unusable("it has no config.json")),
        (true, _) => Ok(None),
        (false, []) => Err(unusable("it has neither model.safetensors nor a .gguf file")),
        (false, [only]) => Ok(Some(only)),
        (false, _) => Err(StoreError::ChooseFile { id: repo_id(), files: names() }),
    }
}

fn weight_files(id: &HubId, snapshot: &Path, sharded: bool) -> Result<BTreeSet<String>> {
    if !sharded {
        return Ok(BTreeSet::from([WEIGHTS.to_owned()]));
    }
    shards(snapshot)
        .map_err(|why| StoreError::Unusable { id: id.to_string(), why: format!("{INDEX}: {why}") })
}

/// The files that the index of a snapshot names.
fn shards(snapshot: &Path) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::HashMap<String, String>,
    }
    let text = fs::read(snapshot.join(INDEX)).map_err(|e| e.to_string())?;
    let index: Index = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    if files.is_empty() { Err("it names no file".into()) } else { Ok(files) }
}

/// Fetches `files` into the cache and links them into the snapshot.
fn fetch_all(
    client: &Client,
    repo: &Repo,
    id: &HubId,
    info: &RepoInfo,
    files: &[&RemoteFile],
    progress: &mut dyn Progress,
) -> Result<()> {
    let mut missing = Vec::new();
    for file in files {
        if repo.has_blob(file, progress)? {
            repo.link(&info.commit, file)?;
        } else {
            missing.push(*file);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let total: u64 = missing.iter().map(|f| f.bytes).sum();
    progress.start(&id.to_string(), Some(total));
    let mut done = 0;
    for file in missing {
        repo.fetch(client, id, info, file, done, progress)?;
        repo.link(&info.commit, file)?;
        done += file.bytes;
        progress.advance(done);
    }
    progress.finish();
    Ok(())
}

/// Paths below `folder`, with `/` between their parts, of the GGUF files in it and one folder deep.
fn ggufs_below(folder: &Path) -> Vec<String> {
    fn names(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let Some(name) = name.to_str() else { continue };
            if path.is_dir() && depth > 0 {
                names(&path, &format!("{prefix}{name}/"), depth - 1, found);
            } else if path.is_file() && is_gguf(&path) {
                found.push(format!("{prefix}{name}"));
            }
        }
    }
    let mut found = Vec::new();
    names(folder, "", 1, &mut found);
    found.sort();
    found
}
