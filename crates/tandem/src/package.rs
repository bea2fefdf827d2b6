//! Opening a Core ML package that a user names.

use std::path::Path;

use tandem_coreml::Package;

/// Opens it; a path that leads nowhere is told apart from a package that cannot be read.
pub fn open(path: &Path) -> anyhow::Result<Package> {
    anyhow::ensure!(path.exists(), "there is no {}. hint: give the folder of a .mlpackage", path.display());
    Ok(Package::open(path)?)
}
