//! Weight matrices in the layout that the products stream.
//!
//! A matrix of `rows x cols` is cut into *panels* of [`PANEL`] rows, the last one padded with zeros. A SIMD lane is one
//! row, so that an output never is a sum across lanes. Within a panel:
//!
//! * floats lie `[cols][PANEL]`;
//! * quantized blocks of 32 columns lie one after the other, each one stream of bytes: the scales `[PANEL] f16`, for
//!   affine formats the minima `[PANEL] f16`, then the values. Those are grouped by four consecutive columns, which
//!   is what the integer dot product instructions eat: 64 bytes, four for each row. With 4-bit values, the low nibbles
//!   are group `g` (columns `4g..4g+4`) and the high nibbles group `g + 4` (columns `16+4g..`), which is how the bytes of
//!   a GGUF block lie in their row already, so that packing is a transposition of 4-byte words.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod pack;
mod product;
mod quantize;
mod scalar;

pub use pack::PackError;
pub use product::{Mode, gate_up, matmul};
pub use quantize::Target;

use std::ops::Range;

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

    /// The bytes of some panels.
    fn panels_bytes(&self, panels: Range<usize>) -> &[u8] {
        let bytes = self.data.len() / self.panels().max(1);
        &self.data[panels.start * bytes..panels.end * bytes]
    }
}

/// Bytes of the scales and minima at the start of a packed block.
const fn head_bytes(format: Format) -> usize {
    match format {
        Format::F32 | Format::F16 | Format::Bf16 => 0,
        Format::Q4_0 | Format::Q8_0 => 2 * PANEL,
        Format::Q4_1 => 4 * PANEL,
    }
}

/// Bytes of one packed block: `block_len` columns of a panel.
const fn packed_block_bytes(format: Format) -> usize {
    match format {
        Format::F32 => 4 * PANEL,
        Format::F16 | Format::Bf16 => 2 * PANEL,
        Format::Q4_0 | Format::Q4_1 => head_bytes(format) + PANEL * BLOCK / 2,
        Format::Q8_0 => head_bytes(format) + PANEL * BLOCK,
    }
}
