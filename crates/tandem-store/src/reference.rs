//! What a person may type for a model, told apart.

use std::path::{Path, PathBuf};

use crate::aliases::Alias;
use crate::{Result, StoreError};

/// A model as it was typed, read.
#[derive(Debug)]
pub(crate) enum Reference {
    Path(PathBuf),
    Alias(&'static Alias),
    Hub(HubId),
}

/// A repository on the Hugging Face hub: `owner/name`, with a revision (branch, tag or commit) after `@`, and one GGUF
/// file of it after `:`.
///
/// Its parts later become parts of paths and addresses, so none can hold a character that means something there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HubId {
    owner: String,
    name: String,
    revision: Option<String>,
    file: Option<String>,
}

impl Reference {
    /// Reads `model`. An existing folder or file wins over an alias of the same name.
    pub(crate) fn parse(model: &str, aliases: &'static [Alias]) -> Result<Self> {
        let path = expand_home(model);
        if !model.is_empty() && path.exists() {
            return Ok(Self::Path(path));
        }
        if let Some(alias) = aliases.iter().find(|a| a.name == model) {
            return Ok(Self::Alias(alias));
        }
        let rooted = model.starts_with(['.', '/', '~']) || model.contains('\\') || path.is_absolute();
        let hub = HubId::parse(model);
        let names_gguf_of_repo = matches!(&hub, Ok(id) if id.file.is_some());
        if rooted || (is_gguf(&path) && !names_gguf_of_repo) {
            return Err(StoreError::NoSuchPath { path });
        }
        hub.map(Self::Hub).map_err(|why| StoreError::UnknownModel {
            name: model.to_owned(),
            why,
            aliases: aliases.iter().map(|a| a.name).collect::<Vec<_>>().join(", "),
        })
    }
}

impl HubId {
    /// Reads `owner/name[@revision][:file.gguf]`; the error says what is wrong.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (text, file) = match text.split_once(':') {
            Some((text, file)) => (text, Some(file)),
            None => (text, None),
        };
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (text, None),
        };
        let Some((owner, name)) = repo.split_once('/') else {
            return Err("it is no alias, and no such file or folder is here".into());
        };
        if !is_component(owner) || !is_component(name) || repo.contains("--") {
            return Err(format!("`{repo}` is no id of the hub"));
        }
        if let Some(bad) = revision.filter(|r| !r.split('/').all(is_component)) {
            return Err(format!("`{bad}` is no revision"));
        }
        if let Some(bad) = file.filter(|f| !is_relative_path(f) || !is_gguf(Path::new(f))) {
            return Err(format!("`{bad}` is no name of a .gguf file"));
        }
        let own = |s: &str| s.to_owned();
        Ok(Self { owner: own(owner), name: own(name), revision: revision.map(own), file: file.map(own) })
    }

    /// `owner/name`.
    pub(crate) fn repo(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The revision; `main` where none was given.
    pub(crate) fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// The GGUF file that was chosen, if any.
    pub(crate) fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// The id of the whole repository at this revision, without the file.
    pub(crate) fn without_file(&self) -> Self {
        Self { file: None, ..self.clone() }
    }

    /// The name of the repository's folder in the hub's cache.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }

    /// Whether it names neither a revision nor a file.
    pub(crate) fn is_plain(&self) -> bool {
        self.revision.is_none() && self.file.is_none()
    }
}

impl std::fmt::Display for HubId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        Ok(())
    }
}

/// Whether the name ends in `.gguf`, in any case.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// Whether `path`, given by a server or a user, stays below the folder that it is joined to, on every platform.
pub(crate) fn is_relative_path(path: &str) -> bool {
    path.split('/').all(|part| {
        !matches!(part, "" | "." | "..") && !part.contains(['\\', ':', '\0']) && !part.ends_with('.')
    })
}

fn is_component(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    is_relative_path(text) && text.chars().all(plain)
}

fn expand_home(model: &str) -> PathBuf {
    let home = || std::env::home_dir().unwrap_or_default();
    match model.strip_prefix('~') {
        Some("") => home(),
        Some(rest) if rest.starts_with(['/', '\\']) => home().join(&rest[1..]),
        _ => PathBuf::from(model),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aliases::ALIASES;

    fn parse(model: &str) -> Result<Reference> {
        Reference::parse(model, ALIASES)
    }

    #[test]
    fn an_id_is_read_whole() {
        let id = HubId::parse("owner/a-model.v2@refs/pr/3:sub/m-Q4_0.gguf").unwrap();
        assert_eq!(id.repo(), "owner/a-model.v2");
        assert_eq!(id.revision(), "refs/pr/3");
        assert_eq!(id.file(), Some("sub/m-Q4_0.gguf"));
        assert_eq!(id.to_string(), "owner/a-model.v2@refs/pr/3:sub/m-Q4_0.gguf");
        let id = HubId::parse("owner/name").unwrap();
        assert_eq!((id.revision(), id.file()), ("main", None));
    }

    #[test]
    fn ids_that_would_leave_the_cache_or_break_an_address_are_refused() {
        for bad in [
            "",
            "/",
            "a/",
            "/b",
            "a/b/c",
            "a/..",
            "../b",
            "a/b@",
            "a/b@../../x",
            "a/b@r?x",
            "a/b:",
            "a/b:m.bin",
            "a/b:../m.gguf",
            "a/b:/etc/m.gguf",
            "a/b:x\\m.gguf",
            "a b/c",
            "a/b#c",
            "a--b/c",
            "a/b%2f",
            "ä/b",
        ] {
            assert!(HubId::parse(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn paths_aliases_and_ids_are_told_apart() {
        assert!(matches!(parse("smollm2"), Ok(Reference::Alias(a)) if a.name == "smollm2"));
        assert!(matches!(parse("owner/name"), Ok(Reference::Hub(_))));
        assert!(matches!(parse("owner/name:m.gguf"), Ok(Reference::Hub(_))));
        assert!(matches!(parse("src"), Ok(Reference::Path(_))));
        for missing in
            ["./nowhere", "/nowhere/at/all", "~/no such folder", "nowhere.gguf", "a/b.gguf", "..", "a\\b"]
        {
            match parse(missing) {
                Err(StoreError::NoSuchPath { .. }) => {}
                Ok(Reference::Path(_)) if missing == ".." => {}
                other => panic!("{missing}: {other:?}"),
            }
        }
        let text = parse("gpt2").unwrap_err().to_string();
        assert!(text.contains("`gpt2`") && text.contains("smollm2, gemma3-270m"), "{text}");
        assert!(matches!(parse(""), Err(StoreError::UnknownModel { .. })));
    }
}
