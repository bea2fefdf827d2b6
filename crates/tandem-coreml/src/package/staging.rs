//! A folder under construction: whole under its own name, or not there.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::error::CoremlError;

/// A folder of a temporary name beside its target. Dropped before [`Staging::commit`], nothing of it remains.
#[derive(Debug)]
pub(crate) struct Staging(TempDir);

impl Staging {
    /// Starts a folder that will lie at `target`, which must not exist; its parent must.
    ///
    /// # Errors
    /// [`CoremlError::Refused`] if `target` exists or its parent does not; [`CoremlError::Io`].
    pub fn create(target: &Path) -> Result<Self, CoremlError> {
        if fs::symlink_metadata(target).is_ok() {
            let what = format!("{} exists", target.display());
            return Err(CoremlError::refused(what, "remove it or choose another name"));
        }
        let parent = folder_of(target);
        if !parent.is_dir() {
            let what = format!("there is no folder {} to put {} in", parent.display(), target.display());
            return Err(CoremlError::refused(what, "make that folder first"));
        }
        let folder = tempfile::Builder::new().prefix(".").suffix(".tmp").tempdir_in(parent);
        folder.map(Self).map_err(CoremlError::writing(target))
    }

    /// Where it lies for now.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file in it and syncs it to the disk.
    ///
    /// # Errors
    /// [`CoremlError::Io`].
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), CoremlError> {
        let path = self.path().join(name);
        let write = || {
            let mut file = fs::File::create(&path)?;
            std::io::Write::write_all(&mut file, bytes)?;
            file.sync_all()
        };
        write().map_err(CoremlError::writing(&path))
    }

    /// Makes a folder in it.
    ///
    /// # Errors
    /// [`CoremlError::Io`].
    pub fn folder(&self, name: &str) -> Result<(), CoremlError> {
        let path = self.path().join(name);
        fs::create_dir_all(&path).map_err(CoremlError::writing(&path))
    }

    /// Syncs the folders and gives it its name.
    ///
    /// # Errors
    /// [`CoremlError::Io`]; nothing is left behind then.
    pub fn commit(self, target: &Path) -> Result<(), CoremlError> {
        let commit = || {
            sync_folders(self.path())?;
            open_to_others(self.path())?;
            fs::rename(self.path(), target)?;
            sync_folder(folder_of(target))
        };
        commit().map_err(CoremlError::writing(target))?;
        // It has another name now: nothing is left to remove.
        let _ = self.0.keep();
        Ok(())
    }
}

/// Temporary folders are private; an export is as open as any other folder.
fn open_to_others(folder: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The umask shows in a folder that was just made.
        let probe = folder.join(".mode");
        fs::create_dir(&probe)?;
        let mode = fs::metadata(&probe)?.permissions().mode() & 0o777;
        fs::remove_dir(&probe)?;
        fs::set_permissions(folder, fs::Permissions::from_mode(mode))?;
    }
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

fn sync_folders(folder: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_folders(&entry.path())?;
        }
    }
    sync_folder(folder)
}

/// Makes names in `folder` survive a power cut. Only Unix lets a folder be opened and synced.
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    if cfg!(unix) { fs::File::open(folder)?.sync_all() } else { Ok(()) }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
