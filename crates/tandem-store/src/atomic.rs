//! Files that are either whole or not there.
//!
//! A file is written under a temporary name in the folder of its target, synced to the disk, and renamed over the
//! target: a reader sees the old file or the new one, never half of one, also after a power cut. The temporary name
//! (`.` … `.tmp`) is recognisable, so what a killed process left behind can be swept up by [`remove_stale`].

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::{NamedTempFile, TempDir};

const PREFIX: &str = ".";
const SUFFIX: &str = ".tmp";

/// Writes the file `path` by `fill`, atomically: when `fill` or anything after it fails, `path` is as it was and no
/// temporary file is left. The folder of `path` must exist.
pub fn write<T>(path: &Path, fill: impl FnOnce(&mut File) -> io::Result<T>) -> io::Result<T> {
    let mut staged = Staged::new(folder_of(path))?;
    let value = fill(staged.file())?;
    staged.commit(path)?;
    Ok(value)
}

/// Removes from `folder` what killed writers left there. Only the holder of a lock that every writer takes may call
/// this, since the temporary files of live writers look the same.
pub fn remove_stale(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if !(name.starts_with(PREFIX) && name.ends_with(SUFFIX)) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// A file under construction; dropped without [`commit`](Self::commit), it is gone.
pub(crate) struct Staged(NamedTempFile);

impl Staged {
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(PREFIX).suffix(SUFFIX);
        // Temporary files are private by default, but this one becomes a model that other users may read: leave it
        // to the umask, as for any other file.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        builder.tempfile_in(folder).map(Self)
    }

    pub(crate) fn file(&mut self) -> &mut File {
        self.0.as_file_mut()
    }

    pub(crate) fn commit(self, path: &Path) -> io::Result<()> {
        self.0.as_file().sync_all()?;
        self.0.persist(path).map_err(|e| e.error)?;
        sync_folder(folder_of(path))
    }
}

/// A temporary folder that [`remove_stale`] recognises; gone when dropped.
pub(crate) fn staging_folder(parent: &Path) -> io::Result<TempDir> {
    tempfile::Builder::new().prefix(PREFIX).suffix(SUFFIX).tempdir_in(parent)
}

/// Makes a rename in `folder` survive a power cut. Only Unix lets a folder be opened and synced.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Bytes of all files below `path`; entries that vanish meanwhile count as nothing.
pub(crate) fn bytes_below(path: &Path) -> u64 {
    let mut sum = 0;
    let mut folders: Vec<PathBuf> = vec![path.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => folders.push(entry.path()),
                Ok(meta) if meta.is_file() => sum += meta.len(),
                _ => {}
            }
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write(&path, |f| f.write_all(b"old")).unwrap();
        let failed: io::Result<()> = write(&path, |f| {
            f.write_all(b"new, but half of i")?;
            Err(io::Error::other("disk full"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "disk full");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(dir.path()), ["a.json"]);
    }

    #[test]
    fn stale_files_and_folders_are_swept_and_others_kept() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(".x1y2z3.tmp"), b"half").unwrap();
        fs::create_dir_all(dir.path().join(".abc.tmp/deep")).unwrap();
        fs::write(dir.path().join("model.tmp"), b"a user's own name").unwrap();
        remove_stale(dir.path()).unwrap();
        assert_eq!(names(dir.path()), ["model.tmp"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_written_file_is_not_private() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join("plain");
        fs::write(&plain, b"").unwrap();
        let ours = dir.path().join("ours");
        write(&ours, |_| Ok(())).unwrap();
        let mode = |p| fs::metadata(p).unwrap().permissions().mode();
        assert_eq!(mode(&plain), mode(&ours));
    }
}
