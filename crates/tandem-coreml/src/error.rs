//! What can go wrong with a package. Every message names the file or the operator and says what to do.

use std::path::{Path, PathBuf};

/// Why a package could not be read, written or exported.
#[derive(Debug, thiserror::Error)]
pub enum CoremlError {
    /// The operating system refused.
    #[error("cannot {verb} {path}: {source}", path = path.display())]
    Io {
        /// `read` or `write`.
        verb: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not an ML Program package.
    #[error("{path} is not an ML Program package: {what}. hint: {hint}", path = path.display())]
    NotAPackage {
        /// What was given.
        path: PathBuf,
        /// What it is instead.
        what: String,
        /// What to do.
        hint: String,
    },
    /// A file of the package does not hold what its format promises.
    #[error("{path} is damaged: {what}. hint: copy or export the package again", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, with numbers.
        what: String,
    },
    /// The checkpoint.
    #[error(transparent)]
    Model(#[from] tandem_model::ModelError),
    /// An operator was given what it does not take.
    #[error("operator {op} ({name}): {what}")]
    Operator {
        /// Kind of operator.
        op: String,
        /// Its name in the program.
        name: String,
        /// What is wrong, with shapes.
        what: String,
    },
    /// A wish that cannot be granted.
    #[error("{what}. hint: {hint}")]
    Refused {
        /// What and why.
        what: String,
        /// What to do.
        hint: String,
    },
}

impl CoremlError {
    pub(crate) fn reading(path: &Path) -> impl Fn(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { verb: "read", path: path.clone(), source }
    }

    pub(crate) fn writing(path: &Path) -> impl Fn(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { verb: "write", path: path.clone(), source }
    }

    pub(crate) fn not_a_package(path: &Path, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::NotAPackage { path: path.to_owned(), what: what.into(), hint: hint.into() }
    }

    pub(crate) fn malformed(path: &Path, what: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), what: what.into() }
    }

    pub(crate) fn refused(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), hint: hint.into() }
    }
}
