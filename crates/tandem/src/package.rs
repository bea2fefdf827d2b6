//! Core ML packages that a user names, and the texts in them.

use std::path::Path;

use tandem_coreml::Package;

/// Opens it; a path that leads nowhere is told apart from a package that cannot be read.
pub fn open(path: &Path) -> anyhow::Result<Package> {
    anyhow::ensure!(path.exists(), "there is no {}. hint: give the folder of a .mlpackage", path.display());
    Ok(Package::open(path)?)
}

/// A text of a package as a terminal may show it: whoever made the package shall not steer the terminal.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(plain("a\u{1b}[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(plain("größe, 1.0"), "größe, 1.0");
    }
}
