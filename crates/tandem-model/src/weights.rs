//! Tensors in their stored format, mapped from files or held in memory.
//!
//! An engine asks for a [`WeightRef`] and gets a [`Matrix`]: bytes row by row, with ranges and row orders resolved. It
//! packs them as it likes, then calls [`Weights::release`] so that a mapped file does not stay resident beside the
//! packed copy.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use memmap2::Mmap;

use crate::decoder::{RowOrder, WeightRef};
use crate::error::ModelError;
use crate::format::{Format, StoredRow};

/// Where a tensor's bytes come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// Part of a mapped file.
    Mapped(Arc<MappedFile>),
    /// Held in memory (`--dummy-weights`, tests).
    Memory(Arc<[u8]>),
}

/// Bytes that are read before they are released.
const PIECE: usize = 8 << 20;

/// A read-only mapping of a whole file.
#[derive(Debug)]
pub struct MappedFile {
    /// The file.
    pub path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps `path`.
    ///
    /// # Errors
    /// [`ModelError::Io`] if it cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Arc<Self>, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let file = std::fs::File::open(path).map_err(io)?;
        // SAFETY: the mapping is private and read-only. A file that another process truncates while it is mapped
        // raises SIGBUS, as for every program that maps weights; nothing here writes to it.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Arc::new(Self { path: path.to_owned(), map }))
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    fn release(&self, range: &Range<usize>) {
        #[cfg(unix)]
        {
            // SAFETY: MADV_DONTNEED on a private read-only file mapping drops clean pages; the next read faults the
            // same bytes in again from the file.
            let result = unsafe {
                self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
            if let Err(error) = result {
                tracing::debug!(%error, "madvise(DONTNEED) refused; the mapping stays resident");
            }
        }
    }
}

/// Some bytes of a source.
#[derive(Debug, Clone)]
pub struct Bytes {
    /// Where they are.
    pub source: Source,
    /// Which of them.
    pub range: Range<usize>,
}

impl Bytes {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match &self.source {
            Source::Mapped(file) => &file.bytes()[self.range.clone()],
            Source::Memory(bytes) => &bytes[self.range.clone()],
        }
    }

    fn release(&self) {
        if let Source::Mapped(file) = &self.source {
            file.release(&self.range);
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self { range: 0..bytes.len(), source: Source::Memory(bytes.into()) }
    }
}

/// One stored tensor.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Stored format of its values.
    pub format: Format,
    /// Slowest dimension first, counted in values.
    pub shape: Vec<usize>,
    /// Its rows one after the other.
    pub values: Bytes,
    /// Scales and biases, rows one after the other, where the format keeps them apart from the values.
    pub groups: Option<Groups>,
}

/// The scales and biases of an affine tensor, `[rows, cols / group]` each.
#[derive(Debug, Clone)]
pub struct Groups {
    /// Factors.
    pub scales: Bytes,
    /// Summands.
    pub biases: Bytes,
}

impl Tensor {
    /// All bytes that it is stored in: values, scales and biases.
    pub fn parts(&self) -> impl Iterator<Item = &Bytes> {
        let groups = self.groups.iter().flat_map(|Groups { scales, biases }| [scales, biases]);
        std::iter::once(&self.values).chain(groups)
    }

    /// `(rows, cols)`; a vector is one value per row.
    fn rows_cols(&self) -> (usize, usize) {
        match self.shape.as_slice() {
            [] => (1, 1),
            [n] => (*n, 1),
            [rows @ .., cols] => (rows.iter().product(), *cols),
        }
    }
}

/// All tensors of a checkpoint by name.
#[derive(Debug, Default)]
pub struct Weights {
    tensors: BTreeMap<String, Tensor>,
    hash: OnceLock<String>,
}

impl Weights {
    /// Builds the table. The readers have checked that each range lies inside its source and matches shape and format.
    pub fn new(tensors: BTreeMap<String, Tensor>) -> Self {
        Self { tensors, hash: OnceLock::new() }
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<&Tensor, ModelError> {
        self.tensors.get(name).ok_or_else(|| ModelError::MissingTensor { name: name.to_owned() })
    }

    /// Whether a tensor of that name is stored.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// All tensors in order of name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Bytes of all tensors in their stored formats.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().flat_map(Tensor::parts).map(|part| part.range.len() as u64).sum()
    }

    /// The rows that `weight` names.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], or [`ModelError::Shape`] when the range lies outside the tensor.
    pub fn matrix(&self, weight: &WeightRef) -> Result<Matrix<'_>, ModelError> {
        let tensor = self.tensor(&weight.tensor)?;
        let (stored_rows, cols) = tensor.rows_cols();
        let rows = weight.rows.clone().unwrap_or(0..stored_rows);
        let whole_heads = match weight.order {
            RowOrder::Stored => true,
            RowOrder::RopePairs { head_dim } => {
                rows.len().is_multiple_of(head_dim) && head_dim.is_multiple_of(2)
            }
        };
        let inside = rows.start <= rows.end && rows.end <= stored_rows;
        let (Some(row_bytes), true) = (tensor.format.row_bytes(cols), inside && whole_heads) else {
            return Err(ModelError::Shape {
                name: weight.tensor.clone(),
                expected: vec![rows.end, cols.next_multiple_of(tensor.format.block_len())],
                found: tensor.shape.clone(),
            });
        };
        let scale_bytes = tensor.format.scale_row_bytes(cols);
        Ok(Matrix {
            format: tensor.format,
            rows: rows.len(),
            cols,
            values: Rows::new(&tensor.values, &rows, row_bytes),
            groups: tensor.groups.as_ref().map(|Groups { scales, biases }| {
                [scales, biases].map(|part| Rows::new(part, &rows, scale_bytes))
            }),
            order: weight.order,
        })
    }

    /// A vector (norm weight or bias) as f32.
    ///
    /// # Errors
    /// As [`Weights::matrix`].
    pub fn vector(&self, weight: &WeightRef) -> Result<Vec<f32>, ModelError> {
        let matrix = self.matrix(weight)?;
        let mut out = vec![0.0; matrix.rows * matrix.cols];
        for (row, out) in out.chunks_exact_mut(matrix.cols.max(1)).enumerate() {
            matrix.row_f32(row, out);
        }
        Ok(out)
    }

    /// Tells the system that the bytes of `weight`'s tensor are not needed for now. They stay readable.
    pub fn release(&self, weight: &WeightRef) {
        if let Some(tensor) = self.tensors.get(&weight.tensor) {
            tensor.parts().for_each(Bytes::release);
        }
    }

    /// BLAKE3 over names, formats, shapes and bytes of all tensors, as hexadecimal. Reads every byte the first time.
    pub fn hash(&self) -> &str {
        self.hash.get_or_init(|| {
            let mut hasher = blake3::Hasher::new();
            for (name, tensor) in &self.tensors {
                hasher.update(format!("{name}\0{}\0{:?}\0", tensor.format.name(), tensor.shape).as_bytes());
                for part in tensor.parts() {
                    // Piece by piece, so that never a whole tensor of the file is in memory beside its packed form.
                    for piece in part.as_slice().chunks(PIECE) {
                        hasher.update(piece);
                        part.release();
                    }
                }
            }
            hasher.finalize().to_hex().to_string()
        })
    }
}

/// A view of the rows that a [`WeightRef`] names, in logical order.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Stored format.
    pub format: Format,
    /// Logical rows.
    pub rows: usize,
    /// Values per row.
    pub cols: usize,
    values: Rows<'a>,
    groups: Option<[Rows<'a>; 2]>,
    order: RowOrder,
}

/// Rows of bytes, one after the other.
#[derive(Debug, Clone, Copy)]
struct Rows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
}

impl<'a> Rows<'a> {
    fn new(bytes: &'a Bytes, rows: &Range<usize>, row_bytes: usize) -> Self {
        Self { bytes: &bytes.as_slice()[rows.start * row_bytes..rows.end * row_bytes], row_bytes }
    }

    fn row(self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes..][..self.row_bytes]
    }
}

impl<'a> Matrix<'a> {
    /// Logical row `row` as it is stored.
    ///
    /// # Panics
    /// If `row >= rows`.
    pub fn row(&self, row: usize) -> StoredRow<'a> {
        let at = self.order.stored_row(row);
        let [scales, biases] = self.groups.map_or([&[][..]; 2], |groups| groups.map(|part| part.row(at)));
        StoredRow { values: self.values.row(at), scales, biases }
    }

    /// Logical row `row` decoded to f32.
    ///
    /// # Panics
    /// If `row >= rows` or `out.len() != cols`.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        self.format.dequantize_row(self.row(row), out);
    }
}
