//! Hashes of files.

use std::fmt::Write;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// Size of the pieces in which files are read and copied.
pub(crate) const CHUNK: usize = 1 << 18;

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

/// SHA-256 of a file.
pub(crate) fn sha256(path: &Path) -> io::Result<String> {
    hash(Sha256::new(), path)
}

/// The hash of a file in the form in which the hub names it. Large files are named by SHA-256 (64 digits), small ones
/// by the id that git gives a blob (40 digits): SHA-1 over `blob LENGTH\0` and the content.
pub(crate) fn as_hub(path: &Path, name: &str) -> io::Result<String> {
    if name.len() == 64 {
        return sha256(path);
    }
    let header = format!("blob {}\0", path.metadata()?.len());
    hash(Sha1::new_with_prefix(header), path)
}

fn hash<D: Digest>(mut hasher: D, path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut chunk = vec![0; CHUNK];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&chunk[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The two expected hashes are what `sha256sum` and `git hash-object` print for these six bytes.
    #[test]
    fn hashes_are_those_of_sha256sum_and_git() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "hello\n").unwrap();
        assert_eq!(
            as_hub(&path, &"0".repeat(64)).unwrap(),
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
        );
        assert_eq!(as_hub(&path, &"0".repeat(40)).unwrap(), "ce013625030ba8dba906f756967f9e9ca394464a");
    }
}
