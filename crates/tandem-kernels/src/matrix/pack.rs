//! From stored rows to panels, and back to a row.

use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use tandem_model::format::{BLOCK, Format};

use super::{PANEL, PackedMatrix, head_bytes, packed_block_bytes};
use crate::buffer::{HugeBuffer, OutOfMemory};
use crate::team::Team;

/// Why a matrix could not be packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// The number of columns does not divide into the blocks of the format.
    #[error("{format} needs rows that divide into blocks of {block} values, but these have {cols} \
             (hint: keep this matrix in a float format)", format = format.name(), block = format.block_len())]
    Columns {
        /// The format asked for.
        format: Format,
        /// The columns there are.
        cols: usize,
    },
    /// A source row has the wrong number of bytes.
    #[error("row {row} has {found} bytes where {cols} values of {format} take {expected} \
             (hint: the file's tensor shape or format is wrong)", format = format.name())]
    Row {
        /// The first such row that was seen.
        row: usize,
        /// Values that it should hold.
        cols: usize,
        /// Their format.
        format: Format,
        /// Bytes that were found.
        found: usize,
        /// Bytes that it should have.
        expected: usize,
    },
    /// No memory.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
}

impl PackedMatrix {
    /// Packs a matrix whose rows are stored in `format`; `row(i)` is the bytes of row `i`.
    ///
    /// # Errors
    /// If `cols` does not divide into blocks, a row has the wrong length, or there is no memory.
    pub fn pack<'a>(
        team: &Team,
        format: Format,
        rows: usize,
        cols: usize,
        row: impl Fn(usize) -> &'a [u8] + Sync,
    ) -> Result<PackedMatrix, PackError> {
        let expected = format.row_bytes(cols).ok_or(PackError::Columns { format, cols })?;
        let wrong = Mutex::new(None);
        let matrix = PackedMatrix::build(team, format, rows, cols, |index, panel| {
            for lane in 0..PANEL.min(rows - index * PANEL) {
                let bytes = row(index * PANEL + lane);
                if bytes.len() != expected {
                    let error = PackError::Row {
                        row: index * PANEL + lane,
                        cols,
                        format,
                        found: bytes.len(),
                        expected,
                    };
                    wrong.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return;
                }
                pack_lane(format, bytes, lane, panel);
            }
        })?;
        wrong.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(matrix), Err)
    }

    /// A matrix whose panels `fill(index, bytes)` writes, in parallel; padding lanes stay zero.
    pub(super) fn build(
        team: &Team,
        format: Format,
        rows: usize,
        cols: usize,
        fill: impl Fn(usize, &mut [u8]) + Sync,
    ) -> Result<PackedMatrix, PackError> {
        let blocks = cols / format.block_len();
        let bytes = blocks
            .checked_mul(packed_block_bytes(format))
            .and_then(|panel| panel.checked_mul(rows.div_ceil(PANEL)))
            .ok_or(OutOfMemory { bytes: usize::MAX })?;
        let mut matrix = PackedMatrix { format, rows, cols, data: HugeBuffer::zeroed(bytes)? };
        if bytes > 0 {
            let panel = bytes / matrix.panels();
            team.chunks_mut(&mut matrix.data, panel, 4, fill);
        }
        Ok(matrix)
    }

    /// The values of row `row`, decoded.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not `[cols]`.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.cols, "columns");
        let (panel, lane) = (self.panels_bytes(row / PANEL..row / PANEL + 1), row % PANEL);
        let blocks = panel.chunks_exact(packed_block_bytes(self.format));
        for (block, out) in blocks.zip(out.chunks_exact_mut(self.format.block_len())) {
            let half = |i: usize| [block[2 * i], block[2 * i + 1]];
            match self.format {
                Format::F32 => out[0] = f32::from_le_bytes(std::array::from_fn(|i| block[4 * lane + i])),
                Format::F16 => out[0] = f16::from_le_bytes(half(lane)).to_f32(),
                Format::Bf16 => out[0] = bf16::from_le_bytes(half(lane)).to_f32(),
                Format::Q4_0 | Format::Q4_1 | Format::Q8_0 => {
                    let d = f16::from_le_bytes(half(lane)).to_f32();
                    let m = match self.format {
                        Format::Q4_0 => -8.0 * d,
                        Format::Q4_1 => f16::from_le_bytes(half(PANEL + lane)).to_f32(),
                        _ => 0.0,
                    };
                    for (k, out) in out.iter_mut().enumerate() {
                        *out = d * f32::from(quant(self.format, block, k, lane)) + m;
                    }
                }
            }
        }
    }
}

/// The stored integer at column `k` of the block, in `lane`.
pub(super) fn quant(format: Format, block: &[u8], k: usize, lane: usize) -> i16 {
    let values = &block[head_bytes(format)..];
    let byte = |group: usize| values[group * 4 * PANEL + lane * 4 + k % 4];
    match format {
        Format::Q8_0 => i16::from(byte(k / 4).cast_signed()),
        _ if k < BLOCK / 2 => i16::from(byte(k / 4) & 15),
        _ => i16::from(byte(k / 4 - 4) >> 4),
    }
}

/// Puts one stored row into its lane of a panel.
pub(super) fn pack_lane(format: Format, row: &[u8], lane: usize, panel: &mut [u8]) {
    match format {
        Format::F32 => pack_floats::<4>(row, lane, panel),
        Format::F16 | Format::Bf16 => pack_floats::<2>(row, lane, panel),
        Format::Q4_0 | Format::Q4_1 | Format::Q8_0 => {
            let head = head_bytes(format);
            let packed = panel.chunks_exact_mut(packed_block_bytes(format));
            for (stored, packed) in row.chunks_exact(format.block_bytes()).zip(packed) {
                let (scales, values) = stored.split_at(head / PANEL);
                for (i, scale) in scales.chunks_exact(2).enumerate() {
                    packed[2 * (i * PANEL + lane)..][..2].copy_from_slice(scale);
                }
                let groups = packed[head..].chunks_exact_mut(4 * PANEL);
                for (group, word) in groups.zip(values.chunks_exact(4)) {
                    group[4 * lane..][..4].copy_from_slice(word);
                }
            }
        }
    }
}

fn pack_floats<const SIZE: usize>(row: &[u8], lane: usize, panel: &mut [u8]) {
    let columns = panel.as_chunks_mut::<SIZE>().0.as_chunks_mut::<PANEL>().0;
    for (column, value) in columns.iter_mut().zip(row.as_chunks::<SIZE>().0) {
        column[lane] = *value;
    }
}
