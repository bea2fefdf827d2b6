//! From stored rows to panels, and back to a row.

use std::sync::{Mutex, PoisonError};

use half::f16;
use tandem_model::format::{BLOCK, Format, StoredRow};

use super::kind::{Scales, Shape};
use super::scalar::{blocks, float_value};
use super::{PANEL, PackedMatrix, unit_bytes};
use crate::buffer::{HugeBuffer, OutOfMemory};
use crate::team::Team;

/// Bytes that are packed before the source may be forgotten.
const PART: usize = 8 << 20;

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
    /// Packs a matrix whose rows are stored in `format`; `row(i)` is the stored row `i`.
    ///
    /// # Errors
    /// If `cols` does not divide into blocks, a row has the wrong length, or there is no memory.
    pub fn pack<'a, R: Into<StoredRow<'a>>>(
        team: &Team,
        format: Format,
        rows: usize,
        cols: usize,
        row: impl Fn(usize) -> R + Sync,
    ) -> Result<PackedMatrix, PackError> {
        PackedMatrix::pack_in_parts(team, format, rows, cols, row, || ())
    }

    /// As [`PackedMatrix::pack`]; after each few MiB it calls `packed`, which may tell the system to forget what was read:
    /// so a large matrix is never in memory twice.
    ///
    /// # Errors
    /// As [`PackedMatrix::pack`].
    pub fn pack_in_parts<'a, R: Into<StoredRow<'a>>>(
        team: &Team,
        format: Format,
        rows: usize,
        cols: usize,
        row: impl Fn(usize) -> R + Sync,
        packed: impl FnMut(),
    ) -> Result<PackedMatrix, PackError> {
        let values = format.row_bytes(cols).ok_or(PackError::Columns { format, cols })?;
        let expected = values + 2 * format.scale_row_bytes(cols);
        let wrong = Mutex::new(None);
        let fill = |index: usize, panel: &mut [u8]| {
            for lane in 0..PANEL.min(rows - index * PANEL) {
                let stored = row(index * PANEL + lane).into();
                if !format.is_row(&stored, cols) {
                    let error = PackError::Row {
                        row: index * PANEL + lane,
                        cols,
                        format,
                        found: stored.len(),
                        expected,
                    };
                    wrong.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return;
                }
                pack_lane(format, stored, lane, panel);
            }
        };
        let matrix = PackedMatrix::build(team, format, rows, cols, fill, packed)?;
        wrong.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(matrix), Err)
    }

    /// A matrix whose panels `fill(index, bytes)` writes, in parallel; padding lanes stay zero. After each part it calls
    /// `filled`.
    pub(super) fn build(
        team: &Team,
        format: Format,
        rows: usize,
        cols: usize,
        fill: impl Fn(usize, &mut [u8]) + Sync,
        mut filled: impl FnMut(),
    ) -> Result<PackedMatrix, PackError> {
        let bytes =
            PackedMatrix::packed_bytes(format, rows, cols).ok_or(OutOfMemory { bytes: usize::MAX })?;
        let panel = bytes / rows.div_ceil(PANEL).max(1);
        let mut matrix = PackedMatrix { format, rows, cols, panel, data: HugeBuffer::zeroed(bytes)? };
        if bytes > 0 {
            let panels = PART.div_ceil(panel);
            for (part, bytes) in matrix.data.chunks_mut(panels * panel).enumerate() {
                team.chunks_mut(bytes, panel, 4, |i, panel| fill(part * panels + i, panel));
                filled();
            }
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
        let (panel, lane) = (self.panel_bytes(row / PANEL), row % PANEL);
        if self.format.is_quantized() {
            for (block, out) in blocks(self.format, panel).zip(out.as_chunks_mut::<BLOCK>().0) {
                for (k, out) in out.iter_mut().enumerate() {
                    *out = block.value(k, lane);
                }
            }
        } else {
            for (column, out) in panel.chunks_exact(unit_bytes(self.format)).zip(out) {
                *out = float_value(self.format, column, lane);
            }
        }
    }
}

/// Puts one stored row into its lane of a panel.
pub(super) fn pack_lane(format: Format, row: StoredRow<'_>, lane: usize, panel: &mut [u8]) {
    match format {
        Format::F32 => return pack_floats::<4>(row.values, lane, panel),
        Format::F16 | Format::Bf16 => return pack_floats::<2>(row.values, lane, panel),
        _ => {}
    }
    let shape = Shape::of(format);
    let units = panel.chunks_exact_mut(unit_bytes(format));
    for (i, (stored, unit)) in row.values.chunks_exact(format.block_bytes()).zip(units).enumerate() {
        let (head, blocks) = unit.split_at_mut(shape.head());
        pack_scales(format, shape, &row, i, stored, lane, head);
        for (part, block) in blocks.chunks_exact_mut(shape.block_bytes()).enumerate() {
            let (small, values) = block.split_at_mut(shape.block_head());
            if let Some([first, second]) = format.small_scales(stored, part) {
                (small[lane], small[PANEL + lane]) = (first, second);
            }
            match format {
                // These lie in their rows as they lie in a panel.
                Format::Q4_0 | Format::Q4_1 | Format::Q8_0 => {
                    pack_words(&stored[shape.head() / PANEL..], lane, values);
                }
                _ => {
                    let quants = format.quants(stored, part).map(i8::cast_unsigned);
                    if shape.bits == 8 {
                        pack_words(&quants, lane, values);
                    } else {
                        let (low, high) = quants.split_at(BLOCK / 2);
                        let bytes: [u8; BLOCK / 2] = std::array::from_fn(|i| low[i] | high[i] << 4);
                        pack_words(&bytes, lane, values);
                    }
                }
            }
        }
    }
}

/// Puts the scale and minimum of unit `index` into their lane of its head.
fn pack_scales(
    format: Format,
    shape: Shape,
    row: &StoredRow<'_>,
    index: usize,
    stored: &[u8],
    lane: usize,
    head: &mut [u8],
) {
    let size = shape.scale_bytes();
    let mut put = |i: usize, bytes: &[u8]| head[(i * PANEL + lane) * size..][..size].copy_from_slice(bytes);
    match (shape.scales, format) {
        (Scales::Nested, _) => {
            let [d, dmin] = format.super_scales(stored).unwrap_or([f16::ZERO; 2]);
            put(0, &d.to_le_bytes());
            if shape.affine {
                put(1, &(-dmin).to_le_bytes());
            }
        }
        (_, Format::Affine(_)) => {
            put(0, &row.scales[index * size..][..size]);
            put(1, &row.biases[index * size..][..size]);
        }
        _ => {
            put(0, &stored[..size]);
            if shape.affine {
                put(1, &stored[size..2 * size]);
            }
        }
    }
}

/// Spreads the values of a block over its groups: four bytes a group.
fn pack_words(bytes: &[u8], lane: usize, values: &mut [u8]) {
    for (group, word) in values.chunks_exact_mut(4 * PANEL).zip(bytes.as_chunks::<4>().0) {
        group[4 * lane..][..4].copy_from_slice(word);
    }
}

fn pack_floats<const SIZE: usize>(row: &[u8], lane: usize, panel: &mut [u8]) {
    let columns = panel.as_chunks_mut::<SIZE>().0.as_chunks_mut::<PANEL>().0;
    for (column, value) in columns.iter_mut().zip(row.as_chunks::<SIZE>().0) {
        column[lane] = *value;
    }
}
