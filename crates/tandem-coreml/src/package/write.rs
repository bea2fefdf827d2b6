//! Writing a package that is either whole or not there.

use std::fs;
use std::path::{Path, PathBuf};

use prost::Message;
use tempfile::TempDir;

use super::manifest;
use crate::blob::BlobWriter;
use crate::error::CoremlError;
use crate::mil::{BlobRef, Model};

const WEIGHT_FILE: &str = "@model_path/weights/weight.bin";

/// A package under construction, in a folder of a temporary name beside its target. Dropped before
/// [`PackageWriter::finish`], nothing of it remains.
#[derive(Debug)]
pub struct PackageWriter {
    target: PathBuf,
    staging: TempDir,
    /// For the weights, while the program is built.
    pub weights: BlobWriter,
}

impl PackageWriter {
    /// Starts a package that will lie at `target`. Its folder must exist, and `target` must not.
    ///
    /// # Errors
    /// [`CoremlError::Refused`] if `target` exists; [`CoremlError::Io`].
    pub fn create(target: &Path) -> Result<Self, CoremlError> {
        if target.exists() {
            return Err(CoremlError::refused(
                format!("{} exists", target.display()),
                "remove it or choose another name",
            ));
        }
        let parent = folder_of(target);
        let staging = tempfile::Builder::new().prefix(".").suffix(".tmp").tempdir_in(parent);
        let staging = staging.map_err(CoremlError::writing(target))?;
        let weights = staging.path().join("Data").join(manifest::WEIGHTS);
        fs::create_dir_all(&weights).map_err(CoremlError::writing(&weights))?;
        let weights = BlobWriter::create(&weights.join("weight.bin"))?;
        Ok(Self { target: target.to_owned(), staging, weights })
    }

    /// How a program names the record at `offset`.
    pub fn reference(offset: u64) -> BlobRef {
        BlobRef { file: WEIGHT_FILE.into(), offset }
    }

    /// Writes program and manifest, syncs everything and gives the package its name.
    ///
    /// # Errors
    /// [`CoremlError::Io`]; nothing is left behind then.
    pub fn finish(self, model: &Model) -> Result<(), CoremlError> {
        let Self { target, staging, weights } = self;
        weights.finish()?;
        let root = staging.path();
        write_synced(&root.join("Data").join(manifest::PROGRAM), &model.to_proto().encode_to_vec())?;
        write_synced(&root.join("Manifest.json"), manifest::render().as_bytes())?;
        for folder in ["Data/com.apple.CoreML/weights", "Data/com.apple.CoreML", "Data", ""] {
            sync_folder(&root.join(folder)).map_err(CoremlError::writing(&target))?;
        }
        open_to_others(root).map_err(CoremlError::writing(&target))?;
        fs::rename(root, &target).map_err(CoremlError::writing(&target))?;
        // It has another name now: nothing is left to remove.
        let _ = staging.keep();
        sync_folder(folder_of(&target)).map_err(CoremlError::writing(&target))
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CoremlError> {
    let write = || {
        let mut file = fs::File::create(path)?;
        std::io::Write::write_all(&mut file, bytes)?;
        file.sync_all()
    };
    write().map_err(CoremlError::writing(path))
}

/// Temporary folders are private; a package is as open as any other folder.
fn open_to_others(folder: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The umask shows in the folders that were made below it.
        let mode = fs::metadata(folder.join("Data"))?.permissions().mode() & 0o777;
        fs::set_permissions(folder, fs::Permissions::from_mode(mode))?;
    }
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

/// Makes a rename in `folder` survive a power cut. Only Unix lets a folder be opened and synced.
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    if cfg!(unix) { fs::File::open(folder)?.sync_all() } else { Ok(()) }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
