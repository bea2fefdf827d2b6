//! Weight files (`weight.bin`, version 2).
//!
//! A file header of 64 bytes, then records at multiples of 64 bytes: a header of 64 bytes and the data right after it.
//! A program names a record by the offset of its header. Everything is little endian. Elements smaller than a byte
//! lie in one stream of bits, lowest first, without gaps between rows.

mod write;

use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::dtype::DType;
use crate::error::CoremlError;

pub use write::{BlobWriter, Packer};

/// Records and their data start at multiples of this.
pub(crate) const ALIGNMENT: u64 = 64;
pub(crate) const VERSION: u32 = 2;
pub(crate) const SENTINEL: u32 = 0xDEAD_BEEF;

/// A mapped weight file.
#[derive(Debug)]
pub struct BlobFile {
    path: PathBuf,
    map: Mmap,
}

/// One record.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Blob<'a> {
    /// Element type.
    pub dtype: DType,
    /// Its bytes.
    pub bytes: &'a [u8],
    /// Where they start in the file.
    pub data_offset: u64,
    /// Bits of the last byte that hold no element.
    pub padding_bits: u64,
}

impl BlobFile {
    /// Maps `path` and checks its header; records are read when they are asked for.
    ///
    /// # Errors
    /// [`CoremlError::Io`], or [`CoremlError::Malformed`] for a file of another version or without a header.
    pub fn open(path: &Path) -> Result<Self, CoremlError> {
        let file = std::fs::File::open(path).map_err(CoremlError::reading(path))?;
        // SAFETY: the mapping is private and read-only. A file that another process truncates while it is mapped
        // raises SIGBUS, as for every program that maps weights; nothing here writes to it.
        let map = unsafe { Mmap::map(&file) }.map_err(CoremlError::reading(path))?;
        let file = Self { path: path.to_owned(), map };
        match file.word(4) {
            Some(VERSION) if file.map.len() as u64 >= ALIGNMENT => Ok(file),
            Some(version) if file.map.len() as u64 >= ALIGNMENT => {
                Err(file.malformed(format!("version {version} of the weight format, not {VERSION}")))
            }
            _ => Err(file.malformed(format!("{} bytes are less than a header", file.map.len()))),
        }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// How many records its header announces.
    pub fn count(&self) -> u32 {
        self.word(0).unwrap_or(0)
    }

    /// The record whose header lies at `offset`.
    ///
    /// # Errors
    /// [`CoremlError::Malformed`] if there is none, or its data lie outside the file.
    pub fn record(&self, offset: u64) -> Result<Blob<'_>, CoremlError> {
        let wrong = |what: &str| self.malformed(format!("offset {offset}: {what}"));
        let size = self.bytes();
        let at = usize::try_from(offset).ok().filter(|_| offset.is_multiple_of(ALIGNMENT) && offset > 0);
        let header = at.and_then(|at| self.map.get(at..at.checked_add(ALIGNMENT as usize)?));
        let header =
            header.ok_or_else(|| wrong(&format!("no record can start here in a file of {size} bytes")))?;
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let (sentinel, code) = (long(0) as u32, (long(0) >> 32) as u32);
        if sentinel != SENTINEL {
            return Err(wrong("no record starts here"));
        }
        let dtype =
            DType::from_blob_code(code).ok_or_else(|| wrong(&format!("element type {code} is not known")))?;
        let (len, start, padding_bits) = (long(8), long(16), long(24));
        let inside = usize::try_from(start)
            .ok()
            .zip(usize::try_from(len).ok())
            .and_then(|(start, len)| self.map.get(start..start.checked_add(len)?));
        let bytes = inside.ok_or_else(|| {
            wrong(&format!("its data, {len} bytes at {start}, lie outside the file of {size} bytes"))
        })?;
        Ok(Blob { dtype, bytes, data_offset: start, padding_bits })
    }

    fn word(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(*self.map.get(at..at + 4)?.first_chunk()?))
    }

    fn malformed(&self, what: impl Into<String>) -> CoremlError {
        CoremlError::malformed(&self.path, what)
    }
}
