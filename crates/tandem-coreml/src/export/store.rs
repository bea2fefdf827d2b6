//! Weights of a checkpoint on their way into a weight file: converted, compressed and written once, whatever number of
//! functions read them.

use std::collections::HashMap;
use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use tandem_model::Weights;
use tandem_model::decoder::{Norm, WeightRef};
use tandem_model::weights::Matrix;

use super::options::{ExportOptions, Quant};
use crate::blob::{BlobWriter, Packer};
use crate::build::{Stored, StoredForm};
use crate::dtype::DType;
use crate::error::CoremlError;
use crate::quantize::{blocks, palette};

/// Values that are converted at once: enough for all threads, little beside a tensor.
const AT_ONCE: usize = 1 << 20;

/// Called with the number of values just stored.
pub(super) type Advance<'a> = dyn FnMut(usize) + 'a;

/// The weight file of one package.
pub(super) struct Store<'a> {
    weights: &'a Weights,
    quant: Quant,
    group: usize,
    writer: &'a mut BlobWriter,
    known: HashMap<String, Stored>,
    advance: &'a mut Advance<'a>,
}

/// Values in one block of [`Quant::Int`].
pub(super) const BLOCK: usize = 32;

impl<'a> Store<'a> {
    pub(super) fn new(
        weights: &'a Weights,
        options: &ExportOptions,
        writer: &'a mut BlobWriter,
        advance: &'a mut Advance<'a>,
    ) -> Self {
        let ExportOptions { quant, group, .. } = options;
        Self { weights, quant: *quant, group: *group, writer, known: HashMap::new(), advance }
    }

    /// Rows of a matrix (all, if not said), compressed as asked; `trailing` dimensions of size 1 follow `[rows, cols]`.
    pub(super) fn matrix(
        &mut self,
        weight: &WeightRef,
        rows: Option<Range<usize>>,
        trailing: usize,
    ) -> Result<Stored, CoremlError> {
        let key = format!("{weight:?} {rows:?} {trailing}");
        if let Some(stored) = self.known.get(&key) {
            return Ok(stored.clone());
        }
        let matrix = self.weights.matrix(weight)?;
        let rows = rows.unwrap_or(0..matrix.rows);
        let mut shape = vec![rows.len(), matrix.cols];
        shape.resize(2 + trailing, 1);
        let form = match self.quant {
            Quant::None => self.dense(weight, &matrix, rows)?,
            Quant::Lut(_) => self.lut(weight, &matrix, rows)?,
            // A row that is not made of whole blocks stays as it is.
            Quant::Int(_) if !matrix.cols.is_multiple_of(BLOCK) => self.dense(weight, &matrix, rows)?,
            Quant::Int(_) => self.blocks(weight, &matrix, rows)?,
        };
        self.weights.release(weight);
        let stored = Stored { shape, form };
        self.known.insert(key, stored.clone());
        Ok(stored)
    }

    /// A vector as fp16 of shape `shape`: `(value + offset) * factor`.
    pub(super) fn vector(
        &mut self,
        weight: &WeightRef,
        shape: &[usize],
        offset: f32,
        factor: f32,
    ) -> Result<Stored, CoremlError> {
        let key = format!("{weight:?} {shape:?} {offset} {factor}");
        if let Some(stored) = self.known.get(&key) {
            return Ok(stored.clone());
        }
        let values: Vec<f32> =
            self.weights.vector(weight)?.into_iter().map(|value| (value + offset) * factor).collect();
        let halves = to_half(&weight.tensor, &values)?;
        let form = StoredForm::Dense { offset: self.writer.add(DType::F16, halves.len(), &bytes(&halves))? };
        (self.advance)(halves.len());
        let stored = Stored { shape: shape.to_vec(), form };
        self.known.insert(key, stored.clone());
        Ok(stored)
    }

    /// A norm's weight, in a shape that stretches along the other dimensions.
    pub(super) fn norm(&mut self, norm: &Norm, shape: &[usize], factor: f32) -> Result<Stored, CoremlError> {
        let Norm { weight, eps: _, offset } = norm;
        self.vector(weight, shape, *offset, factor)
    }

    fn dense(
        &mut self,
        weight: &WeightRef,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
    ) -> Result<StoredForm, CoremlError> {
        let count = rows.len() * matrix.cols;
        let advance = &mut *self.advance;
        let offset = self.writer.stream(DType::F16, count, |write| {
            for some in pieces(rows, (AT_ONCE / matrix.cols.max(1)).max(1)) {
                let halves = halves(weight, matrix, some)?;
                write(&bytes(&halves))?;
                advance(halves.len());
            }
            Ok(())
        })?;
        Ok(StoredForm::Dense { offset })
    }

    fn lut(
        &mut self,
        weight: &WeightRef,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
    ) -> Result<StoredForm, CoremlError> {
        let (count, dtype) = (rows.len() * matrix.cols, self.quant.dtype());
        let group = largest_divisor(rows.len(), self.group);
        let tables = rows.len() / group;
        let groups_at_once = (AT_ONCE / (group * matrix.cols).max(1)).max(1);
        let mut luts: Vec<f16> = Vec::with_capacity(tables << dtype.bits());
        let advance = &mut *self.advance;
        let indices = self.writer.stream(dtype, count, |write| {
            let mut packer = Packer::new(dtype.bits());
            for some in pieces(rows, group * groups_at_once) {
                let halves = halves(weight, matrix, some)?;
                let palettes: Vec<_> = halves
                    .par_chunks(group * matrix.cols)
                    .map(|values| palette::palettize(values, 1 << dtype.bits()))
                    .collect();
                for palette::Palette { table, indices } in palettes {
                    luts.extend(table);
                    packer.extend(&indices);
                }
                write(&packer.take())?;
                advance(halves.len());
            }
            write(&packer.finish())
        })?;
        let lut = self.writer.add(DType::F16, luts.len(), &bytes(&luts))?;
        Ok(StoredForm::Lut { indices, index_type: dtype, lut, tables })
    }

    fn blocks(
        &mut self,
        weight: &WeightRef,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
    ) -> Result<StoredForm, CoremlError> {
        let (count, dtype) = (rows.len() * matrix.cols, self.quant.dtype());
        let mut scales: Vec<f16> = Vec::with_capacity(count / BLOCK);
        let advance = &mut *self.advance;
        let data = self.writer.stream(dtype, count, |write| {
            let mut packer = Packer::new(dtype.bits());
            for some in pieces(rows, (AT_ONCE / matrix.cols.max(1)).max(1)) {
                let halves = halves(weight, matrix, some)?;
                let done: Vec<_> =
                    halves.par_chunks(BLOCK).map(|block| blocks::quantize(block, dtype.bits())).collect();
                for (scale, quants) in done {
                    scales.push(scale);
                    packer.extend(&quants);
                }
                write(&packer.take())?;
                advance(halves.len());
            }
            write(&packer.finish())
        })?;
        let scale = self.writer.add(DType::F16, scales.len(), &bytes(&scales))?;
        Ok(StoredForm::Blocks { data, data_type: dtype, scale, block: BLOCK })
    }
}

/// Some rows of a matrix as fp16, multiplied by nothing.
pub(super) fn halves(
    weight: &WeightRef,
    matrix: &Matrix<'_>,
    rows: Range<usize>,
) -> Result<Vec<f16>, CoremlError> {
    scaled_halves(weight, matrix, rows, 1.0)
}

/// Some rows of a matrix times `factor`, as fp16.
pub(super) fn scaled_halves(
    weight: &WeightRef,
    matrix: &Matrix<'_>,
    rows: Range<usize>,
    factor: f32,
) -> Result<Vec<f16>, CoremlError> {
    let mut out = vec![f16::ZERO; rows.len() * matrix.cols];
    out.par_chunks_mut(matrix.cols.max(1)).zip(rows).try_for_each_init(
        || vec![0.0; matrix.cols],
        |values, (out, row)| {
            matrix.row_f32(row, values);
            if factor != 1.0 {
                values.iter_mut().for_each(|value| *value *= factor);
            }
            out.copy_from_slice(&to_half(&weight.tensor, values)?);
            Ok::<_, CoremlError>(())
        },
    )?;
    Ok(out)
}

fn to_half(tensor: &str, values: &[f32]) -> Result<Vec<f16>, CoremlError> {
    let mut out = vec![f16::ZERO; values.len()];
    out.convert_from_f32_slice(values);
    match out.iter().position(|value| !value.is_finite()) {
        None => Ok(out),
        Some(at) => Err(CoremlError::refused(
            format!("tensor {tensor} holds {}, which fp16 cannot hold", values[at]),
            "Core ML packages are in fp16; this checkpoint does not fit",
        )),
    }
}

pub(super) fn bytes(values: &[f16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn pieces(rows: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(len).map(move |start| start..end.min(start + len))
}

fn largest_divisor(of: usize, up_to: usize) -> usize {
    (1..=up_to.min(of)).rev().find(|divisor| of.is_multiple_of(*divisor)).unwrap_or(1)
}
