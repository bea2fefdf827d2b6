//! From stored weights to arrays.
//!
//! What MLX can compute with as it is goes over as it is: plain floats, and the groups of MLX's own folders. GGUF's blocks
//! are scale and minimum over 32 integers, which is an affine group of 32: they are repacked without loss, 4-bit ones to 4
//! bits, others to 8, under f32 scales (the products of a super-block's scales need as many bits). Only `Q6_K`, whose
//! scales cover 16 values, is rounded: to 8 bits in groups of 32.

use tandem_engine::EngineError;
use tandem_model::Weights;
use tandem_model::decoder::WeightRef;
use tandem_model::format::{Affine, BLOCK, Format, ScaleType};
use tandem_model::weights::Matrix;

use crate::array::{Array, Dtype, Quantized, Result, evaluate};
use crate::options::Quant;

/// Group of float weights that are quantized at load, where the row divides into it.
const GROUP: usize = 64;

/// A matrix `[rows, cols]` as the engine holds it.
pub(crate) enum Held {
    Float(Array),
    Quantized(Quantized),
}

/// How a matrix will be held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// In the model's float format.
    Float,
    /// As stored in an MLX folder.
    Affine(Affine),
    /// Repacked from GGUF's blocks.
    Blocks { bits: usize },
    /// Quantized at load.
    Quantize { group: usize, bits: usize },
}

impl Held {
    pub fn arrays(&self) -> Vec<&Array> {
        match self {
            Held::Float(array) => vec![array],
            Held::Quantized(quantized) => quantized.parts().to_vec(),
        }
    }

    /// `x Wᵀ`; if `dense`, quantized weights are made floats first.
    pub fn project(&self, x: &Array, dense: bool) -> Result<Array> {
        match self {
            Held::Float(array) => x.matmul_transposed(array),
            Held::Quantized(quantized) if dense => x.matmul_transposed(&quantized.dequantize()?),
            Held::Quantized(quantized) => x.quantized_matmul(quantized),
        }
    }

    /// The rows that `indices` names.
    pub fn rows(&self, indices: &Array) -> Result<Array> {
        match self {
            Held::Float(array) => array.take(indices),
            Held::Quantized(quantized) => quantized.rows(indices),
        }
    }
}

/// How a matrix of that format and width is held.
pub(crate) fn target(format: Format, cols: usize, quant: Option<Quant>, is_head: bool) -> Target {
    match (format, quant) {
        (Format::Affine(affine), _) => Target::Affine(affine),
        (Format::Q4_0 | Format::Q4_1 | Format::Q4K, _) => Target::Blocks { bits: 4 },
        (Format::Q5_0 | Format::Q5_1 | Format::Q5K | Format::Q8_0, _) => Target::Blocks { bits: 8 },
        (Format::Q6K, _) => Target::Quantize { group: BLOCK, bits: 8 },
        (Format::F32 | Format::F16 | Format::Bf16, None) => Target::Float,
        (Format::F32 | Format::F16 | Format::Bf16, Some(quant)) => {
            let bits = if quant == Quant::Q4 && !is_head { 4 } else { 8 };
            match [GROUP, BLOCK].into_iter().find(|group| cols.is_multiple_of(*group)) {
                Some(group) => Target::Quantize { group, bits },
                None => Target::Float,
            }
        }
    }
}

impl Target {
    /// Bytes of a matrix, for the check before loading.
    pub fn bytes(self, rows: usize, cols: usize, float: Dtype) -> u64 {
        let (values, float) = (rows as u64 * cols as u64, bytes_of(float));
        let quantized =
            |bits: usize, group: usize| values * bits as u64 / 8 + values / group as u64 * 2 * float;
        match self {
            Target::Float => values * float,
            Target::Affine(affine) => quantized(affine.bits(), affine.group()),
            Target::Blocks { bits } => quantized(bits, BLOCK),
            Target::Quantize { group, bits } => quantized(bits, group),
        }
    }
}

pub(crate) fn bytes_of(dtype: Dtype) -> u64 {
    if dtype == Dtype::F16 || dtype == Dtype::Bf16 { 2 } else { 4 }
}

/// The float format a model is computed in: as its embedding is stored, or that of its scales; f32 where GGUF's blocks
/// need f32 scales, and where the user wants it exact.
pub(crate) fn compute_type(formats: &[Format], exact: bool) -> Dtype {
    let of = |format: Format| match format {
        Format::F16 => Dtype::F16,
        Format::Bf16 => Dtype::Bf16,
        Format::Affine(affine) => match affine.scales() {
            ScaleType::F16 => Dtype::F16,
            ScaleType::Bf16 => Dtype::Bf16,
            ScaleType::F32 => Dtype::F32,
        },
        _ => Dtype::F32,
    };
    let blocks = formats.iter().any(|f| f.is_quantized() && !matches!(f, Format::Affine(_)));
    match formats.first() {
        Some(first) if !exact && !blocks => of(*first),
        _ => Dtype::F32,
    }
}

/// Reads weights into arrays.
pub(crate) struct Loader<'a> {
    pub weights: &'a Weights,
    pub float: Dtype,
    pub quant: Option<Quant>,
}

impl Loader<'_> {
    /// A vector plus `offset`, in the model's float format.
    pub fn vector(&self, weight: &WeightRef, offset: f32) -> Result<Array> {
        let mut values = self.weights.vector(weight)?;
        values.iter_mut().for_each(|value| *value += offset);
        self.floats(&values, [values.len()])
    }

    pub fn floats<const N: usize>(&self, values: &[f32], shape: [usize; N]) -> Result<Array> {
        let array = Array::from_f32(values, shape)?.as_type(self.float)?;
        evaluate([&array])?;
        Ok(array)
    }

    /// Matrices of one format and width, one below the other.
    pub fn stacked(&self, parts: &[&WeightRef], is_head: bool) -> Result<Held> {
        let matrices =
            parts.iter().map(|part| self.weights.matrix(part)).collect::<std::result::Result<Vec<_>, _>>()?;
        let (Some(first), rows) = (matrices.first(), matrices.iter().map(|m| m.rows).sum::<usize>()) else {
            return Err(EngineError::Model("a projection without weights".into()));
        };
        let held = match target(first.format, first.cols, self.quant, is_head) {
            Target::Float => Held::Float(self.float(&matrices, rows)?),
            Target::Affine(affine) => Held::Quantized(self.affine(&matrices, rows, affine)?),
            Target::Blocks { bits } => Held::Quantized(self.blocks(&matrices, rows, bits)?),
            Target::Quantize { group, bits } => {
                Held::Quantized(Quantized::of(&self.float(&matrices, rows)?, group, bits)?)
            }
        };
        evaluate(held.arrays())?;
        parts.iter().for_each(|part| self.weights.release(part));
        Ok(held)
    }

    fn float(&self, matrices: &[Matrix<'_>], rows: usize) -> Result<Array> {
        let (format, cols) = (matrices[0].format, matrices[0].cols);
        let stored = match format {
            Format::F16 => Dtype::F16,
            Format::Bf16 => Dtype::Bf16,
            _ => Dtype::F32,
        };
        // Piece by piece, so that no piece has more bytes than MLX can count and the copy here stays small.
        let mut pieces = Vec::new();
        let mut bytes = Vec::new();
        let mut row_f32 = vec![0.0; cols];
        let mut flush = |bytes: &mut Vec<u8>| -> Result<()> {
            let width = cols * bytes_of(stored) as usize;
            let piece =
                Array::from_bytes(bytes, stored, [bytes.len() / width.max(1), cols])?.as_type(self.float)?;
            evaluate([&piece])?;
            pieces.push(piece);
            bytes.clear();
            Ok(())
        };
        for (matrix, row) in each_row(matrices) {
            if format.is_quantized() {
                matrix.row_f32(row, &mut row_f32);
                bytes.extend(row_f32.iter().flat_map(|value| value.to_le_bytes()));
            } else {
                bytes.extend_from_slice(matrix.row(row).values);
            }
            if bytes.len() >= 1 << 28 {
                flush(&mut bytes)?;
            }
        }
        if !bytes.is_empty() {
            flush(&mut bytes)?;
        }
        match pieces.as_slice() {
            [one] => Ok(one.clone()),
            _ => Array::concatenate(&pieces, 0)?.reshape([rows, cols]),
        }
    }

    fn affine(&self, matrices: &[Matrix<'_>], rows: usize, affine: Affine) -> Result<Quantized> {
        let cols = matrices[0].cols;
        let [mut values, mut scales, mut biases] = [const { Vec::<u8>::new() }; 3];
        for (matrix, row) in each_row(matrices) {
            let row = matrix.row(row);
            values.extend_from_slice(row.values);
            scales.extend_from_slice(row.scales);
            biases.extend_from_slice(row.biases);
        }
        let stored = match affine.scales() {
            ScaleType::F32 => Dtype::F32,
            ScaleType::F16 => Dtype::F16,
            ScaleType::Bf16 => Dtype::Bf16,
        };
        let groups = [rows, cols / affine.group()];
        Ok(Quantized {
            values: Array::from_bytes(&values, Dtype::U32, [rows, cols * affine.bits() / 32])?,
            scales: Array::from_bytes(&scales, stored, groups)?.as_type(self.float)?,
            biases: Array::from_bytes(&biases, stored, groups)?.as_type(self.float)?,
            group: affine.group() as i32,
            bits: affine.bits() as i32,
        })
    }

    /// GGUF's blocks as affine groups of 32.
    fn blocks(&self, matrices: &[Matrix<'_>], rows: usize, bits: usize) -> Result<Quantized> {
        let cols = matrices[0].cols;
        let (mut values, mut scales, mut biases) = (Vec::<u8>::new(), Vec::new(), Vec::new());
        for (matrix, row) in each_row(matrices) {
            let stored = matrix.row(row);
            for block in stored.values.chunks_exact(matrix.format.block_bytes()) {
                for part in 0..matrix.format.block_len() / BLOCK {
                    let quants = matrix.format.quants(block, part);
                    let (scale, minimum) = scale_and_minimum(matrix.format, block, part);
                    let shift = matrix.format.shift() as f32;
                    scales.push(scale);
                    if bits == 4 {
                        biases.push(scale * shift + minimum);
                        let nibbles = quants.map(i8::cast_unsigned);
                        values.extend(nibbles.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4));
                    } else {
                        biases.push(scale * (shift - 128.0) + minimum);
                        values.extend(quants.map(|q| q.cast_unsigned() ^ 0x80));
                    }
                }
            }
        }
        let groups = [rows, cols / BLOCK];
        Ok(Quantized {
            values: Array::from_bytes(&values, Dtype::U32, [rows, cols * bits / 32])?,
            scales: Array::from_f32(&scales, groups)?.as_type(self.float)?,
            biases: Array::from_f32(&biases, groups)?.as_type(self.float)?,
            group: BLOCK as i32,
            bits: bits as i32,
        })
    }
}

/// What the integers of a block's part are multiplied by, and what is then added.
fn scale_and_minimum(format: Format, block: &[u8], part: usize) -> (f32, f32) {
    let half = |at: usize| half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    match (format.super_scales(block), format.small_scales(block, part)) {
        (Some([d, minimum]), Some([small, small_minimum])) => {
            (d.to_f32() * f32::from(small), -(minimum.to_f32() * f32::from(small_minimum)))
        }
        _ if matches!(format, Format::Q4_1 | Format::Q5_1) => (half(0), half(2)),
        _ => (half(0), 0.0),
    }
}

fn each_row<'a, 'm>(matrices: &'a [Matrix<'m>]) -> impl Iterator<Item = (&'a Matrix<'m>, usize)> {
    matrices.iter().flat_map(|matrix| (0..matrix.rows).map(move |row| (matrix, row)))
}
