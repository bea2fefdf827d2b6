//! Weight matrices in the layout that the products stream.
//!
//! A matrix of `rows x cols` is cut into *panels* of [`PANEL`] rows, the last one padded with zeros. A SIMD lane is one
//! row, so that an output never is a sum across lanes. Within a panel:
//!
//! * floats lie `[cols][PANEL]`;
//! * quantized columns lie in blocks of 32, each one stream of bytes, with the scales before them as the module `kind`
//!   says. The values of a block are grouped by four consecutive columns, which is what the integer dot product
//!   instructions eat: 64 bytes, four for each row. With 4-bit values, the low nibbles are group `g` (columns
//!   `4g..4g+4`) and the high nibbles group `g + 4` (columns `16+4g..`), which is how the bytes of a GGUF block of 32 lie in
//!   their row already, so that packing is a transposition of 4-byte words.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod kind;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
mod pack;
mod product;
mod quantize;
mod scalar;

pub use pack::PackError;
pub use product::{Mode, gate_up, matmul, matmul_each};
pub use quantize::Target;

use kind::Shape;
use tandem_model::format::{BLOCK, Format};

use crate::buffer::HugeBuffer;

/// Rows of a panel.
pub const PANEL: usize = 16;

/// A weight matrix, packed for products. Build one with [`PackedMatrix::pack`] or [`PackedMatrix::quantize`].
#[derive(Debug)]
pub struct PackedMatrix {
    format: Format,
    rows: usize,
    cols: usize,
    /// Bytes of a panel.
    panel: usize,
    data: HugeBuffer,
}

impl PackedMatrix {
    /// Outputs: rows of the stored matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs: columns of the stored matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The number format of the values.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Bytes that a matrix takes once it is packed; `None` if `cols` does not divide into the blocks of `format`, or there
    /// are too many.
    pub fn packed_bytes(format: Format, rows: usize, cols: usize) -> Option<usize> {
        let units = cols.is_multiple_of(format.block_len()).then_some(cols / format.block_len())?;
        units.checked_mul(unit_bytes(format))?.checked_mul(rows.div_ceil(PANEL))
    }

    /// Bytes that one product streams: the packed values, padding included.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Whether the memory was promised huge pages.
    pub fn huge_pages(&self) -> bool {
        self.data.huge_pages()
    }

    /// Number of panels.
    fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// The bytes of a panel.
    fn panel_bytes(&self, panel: usize) -> &[u8] {
        &self.data[panel * self.panel..(panel + 1) * self.panel]
    }
}

/// Bytes of one packed unit: [`Format::block_len`] columns of a panel.
fn unit_bytes(format: Format) -> usize {
    match format {
        Format::F32 => 4 * PANEL,
        Format::F16 | Format::Bf16 => 2 * PANEL,
        _ => {
            let shape = Shape::of(format);
            shape.head() + format.block_len() / BLOCK * shape.block_bytes()
        }
    }
}
