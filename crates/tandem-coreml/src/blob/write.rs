//! Writes a weight file record by record, with no more in memory than the caller hands over at once.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::{ALIGNMENT, SENTINEL, VERSION};
use crate::dtype::DType;
use crate::error::CoremlError;

/// A weight file under construction.
#[derive(Debug)]
pub struct BlobWriter {
    path: PathBuf,
    file: BufWriter<File>,
    count: u32,
    end: u64,
}

impl BlobWriter {
    /// Starts the file `path`.
    ///
    /// # Errors
    /// [`CoremlError::Io`].
    pub fn create(path: &Path) -> Result<Self, CoremlError> {
        let file = File::create(path).map_err(CoremlError::writing(path))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        file.write_all(&header(0)).map_err(CoremlError::writing(path))?;
        Ok(Self { path: path.to_owned(), file, count: 0, end: ALIGNMENT })
    }

    /// Appends a record of `count` elements whose packed bytes are those that `fill` writes. Returns the offset by
    /// which a program names it.
    ///
    /// # Errors
    /// Those of `fill`; [`CoremlError::Io`].
    ///
    /// # Panics
    /// If weight files have no such element type, or `fill` writes more or fewer bytes than `count` elements take.
    pub fn stream(
        &mut self,
        dtype: DType,
        count: usize,
        fill: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<(), CoremlError>) -> Result<(), CoremlError>,
    ) -> Result<u64, CoremlError> {
        let code = dtype.blob_code().expect("an element type of weight files");
        let len = dtype.bytes(count).expect("an array that fits into memory") as u64;
        let offset = self.end.next_multiple_of(ALIGNMENT);
        let gap = (offset - self.end) as usize;
        let mut record = [0; ALIGNMENT as usize];
        let padding_bits = (8 - count * dtype.bits() % 8) % 8;
        record[..4].copy_from_slice(&SENTINEL.to_le_bytes());
        record[4..8].copy_from_slice(&code.to_le_bytes());
        for (at, value) in [(8, len), (16, offset + ALIGNMENT), (24, padding_bits as u64)] {
            record[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let Self { path, file, .. } = self;
        let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(CoremlError::writing(path));
        write(&[0; ALIGNMENT as usize][..gap])?;
        write(&record)?;
        let mut written = 0;
        fill(&mut |bytes| {
            written += bytes.len() as u64;
            write(bytes)
        })?;
        assert_eq!(written, len, "{count} elements of {}", dtype.name());
        self.count += 1;
        self.end = offset + ALIGNMENT + len;
        Ok(offset)
    }

    /// Appends a record. Returns the offset by which a program names it.
    ///
    /// # Errors
    /// [`CoremlError::Io`].
    ///
    /// # Panics
    /// As [`BlobWriter::stream`].
    pub fn add(&mut self, dtype: DType, count: usize, bytes: &[u8]) -> Result<u64, CoremlError> {
        self.stream(dtype, count, |write| write(bytes))
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.end
    }

    /// Writes the header and syncs the file to the disk.
    ///
    /// # Errors
    /// [`CoremlError::Io`].
    pub fn finish(mut self) -> Result<(), CoremlError> {
        let Self { path, file, count, .. } = &mut self;
        let mut done = || {
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&header(*count))?;
            file.flush()?;
            file.get_ref().sync_all()
        };
        done().map_err(CoremlError::writing(path))
    }
}

fn header(count: u32) -> [u8; ALIGNMENT as usize] {
    let mut header = [0; ALIGNMENT as usize];
    header[..4].copy_from_slice(&count.to_le_bytes());
    header[4..8].copy_from_slice(&VERSION.to_le_bytes());
    header
}

/// Packs elements smaller than a byte into one stream, lowest bit first.
#[derive(Debug)]
pub struct Packer {
    bits: usize,
    word: u16,
    held: usize,
    out: Vec<u8>,
}

impl Packer {
    /// For elements of `bits` bits.
    ///
    /// # Panics
    /// If that is 0 or more than 8.
    pub fn new(bits: usize) -> Self {
        assert!((1..=8).contains(&bits), "{bits} bits");
        Self { bits, word: 0, held: 0, out: vec![] }
    }

    /// Appends elements: the low bits of each.
    pub fn extend(&mut self, values: &[u8]) {
        let mask = (1u16 << self.bits) - 1;
        for &value in values {
            self.word |= (u16::from(value) & mask) << self.held;
            self.held += self.bits;
            if self.held >= 8 {
                self.out.push(self.word as u8);
                self.word >>= 8;
                self.held -= 8;
            }
        }
    }

    /// The bytes that are complete.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// The rest, the last byte filled with zeros.
    pub fn finish(mut self) -> Vec<u8> {
        if self.held > 0 {
            self.out.push(self.word as u8);
        }
        self.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blob::BlobFile;

    fn pack(values: &[u8], bits: usize) -> Vec<u8> {
        let mut packer = Packer::new(bits);
        packer.extend(values);
        packer.finish()
    }

    #[test]
    fn streams_of_bits_are_those_of_apples_own_writer() {
        // Written with coremltools' libmilstoragepython and read with hexdump.
        assert_eq!(pack(&[1, 2, 3, 4, 5, 6, 7, 0, 1], 3), [0xd1, 0x58, 0x1f, 0x01]);
        assert_eq!(pack(&[-8i8, 7, -1, 3, 1].map(i8::cast_unsigned), 4), [0x78, 0x3f, 0x01]);
    }

    #[test]
    fn every_element_type_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weight.bin");
        let mut writer = BlobWriter::create(&path).unwrap();
        let types: Vec<DType> = DType::all().filter(|dtype| dtype.blob_code().is_some()).collect();
        let bytes =
            |dtype: DType| -> Vec<u8> { (0..dtype.bytes(13).unwrap()).map(|i| i as u8 + 1).collect() };
        let offsets: Vec<u64> =
            types.iter().map(|dtype| writer.add(*dtype, 13, &bytes(*dtype)).unwrap()).collect();
        let size = writer.bytes();
        writer.finish().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
        let file = BlobFile::open(&path).unwrap();
        assert_eq!(file.count() as usize, types.len());
        for (dtype, offset) in types.into_iter().zip(offsets) {
            let blob = file.record(offset).unwrap();
            assert_eq!((blob.dtype, blob.bytes), (dtype, bytes(dtype).as_slice()));
            assert_eq!(blob.padding_bits as usize, blob.bytes.len() * 8 - 13 * dtype.bits());
            assert_eq!(blob.data_offset % ALIGNMENT, 0);
        }
    }
}
