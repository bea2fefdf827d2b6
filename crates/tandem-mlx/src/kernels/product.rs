//! `product.cu`: a product for up to eight rows, with the norm before it and the residual or the gate after it.

use std::collections::BTreeMap;

use tandem_model::decoder::Activation;

use crate::array::{Array, Dtype, Launch, Module, Result};
use crate::kernels::ROWS;
use crate::load::Held;
use crate::lower::Norm;

const SOURCE: &str = concat!(include_str!("device.cuh"), include_str!("product.cu"));
// As in the source.
const WARPS: usize = 8;
const DEPTH: usize = 2;
const TILE: usize = 16;
/// Bytes of dynamic shared memory that a block may have.
pub(crate) const SHARED: usize = 200_000;
/// Blocks that are there at once: four on each of some 132 multiprocessors.
const BLOCKS: usize = 528;

/// What follows a product.
#[derive(Clone, Copy)]
pub(crate) enum After<'a> {
    Nothing,
    /// This is added, `[rows, width]`.
    Add(&'a Array),
    /// The matrix holds the rows of gate and up; they become `act(gate) * up`.
    Gate(Activation),
}

/// `after(norm(x) Wᵀ)`.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    /// `[rows, cols]`.
    pub x: &'a Array,
    pub rows: usize,
    pub norm: Option<&'a Norm>,
    pub matrix: Matrix<'a>,
    pub after: After<'a>,
}

#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub held: &'a Held,
    pub rows: usize,
    pub cols: usize,
}

/// What a kernel is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Build {
    pub affine: bool,
    norm: bool,
    /// As in the source.
    after: u8,
}

impl Product<'_> {
    /// What it needs built; `None` if the source does not do it.
    pub fn build(&self) -> Option<Build> {
        let Matrix { held, rows, cols } = self.matrix;
        let affine = match held {
            Held::Float(_) => false,
            Held::Quantized(quantized) if (quantized.bits, quantized.group) == (4, 64) => true,
            Held::Quantized(_) => return None,
        };
        let fits =
            cols.is_multiple_of(128) && self.width().is_multiple_of(TILE) && rows > 0 && self.rows <= ROWS;
        let after = match self.after {
            After::Nothing => 0,
            After::Add(_) => 1,
            After::Gate(Activation::Silu) => 2,
            After::Gate(Activation::GeluTanh) => 3,
        };
        let build = Build { affine, norm: self.norm.is_some(), after };
        (fits && self.shared(build) <= SHARED).then_some(build)
    }

    /// Of the output.
    pub fn width(&self) -> usize {
        if matches!(self.after, After::Gate(_)) { self.matrix.rows / 2 } else { self.matrix.rows }
    }

    fn shared(&self, build: Build) -> usize {
        let cols = self.matrix.cols;
        let (stage, totals) = if build.affine { (TILE * 64 + 128, cols / 2) } else { (TILE * 128, 0) };
        WARPS * DEPTH * stage + self.rows * (2 * cols + 16) + totals
    }
}

impl Build {
    pub fn compile(self, architecture: &str, broken: bool) -> Result<Vec<u8>> {
        let Self { affine, norm, after } = self;
        let defines = [("AFFINE", u8::from(affine)), ("NORM", u8::from(norm)), ("AFTER", after)];
        let mut defines: Vec<String> =
            defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if broken {
            defines.push("BROKEN=1".into());
        }
        Module::compile(SOURCE, architecture, &defines)
    }
}

/// The kernels that were built.
pub(crate) struct Products(pub BTreeMap<Build, Module>);

impl Products {
    /// Once each has run.
    pub fn shorten(&mut self) {
        self.0.values_mut().for_each(Module::shorten);
    }

    /// `[rows, width]` in bfloat16, which everything is in; `None` if no kernel is there for it.
    pub fn apply(&self, product: &Product<'_>) -> Result<Option<Array>> {
        self.launch(product, 0)
    }

    /// [`Products::apply`] with at least so much shared memory. MLX asks the driver for what a kernel's first launch takes,
    /// and for no more later.
    pub fn launch(&self, product: &Product<'_>, at_least: usize) -> Result<Option<Array>> {
        let Some((build, module)) = product.build().and_then(|build| Some((build, self.0.get(&build)?)))
        else {
            return Ok(None);
        };
        let Product { x, rows, norm, matrix, after } = *product;
        let mut inputs = vec![x];
        inputs.extend(norm.map(|norm| &norm.weight));
        inputs.extend(matrix.held.arrays());
        if let After::Add(residual) = after {
            inputs.push(residual);
        }
        let (width, tiles) = (product.width(), product.width() / TILE);
        // As many tiles to each block, as far as that goes.
        let blocks = tiles.div_ceil(tiles.div_ceil(BLOCKS));
        let mut out = module.launch(&Launch {
            inputs: &inputs,
            outputs: &[(Dtype::Bf16, &[rows, width])],
            integers: &[rows, matrix.cols, width],
            floats: &[norm.map_or(0.0, |norm| norm.eps)],
            grid: [blocks, 1, 1],
            threads: WARPS * 32,
            shared: product.shared(build).max(at_least),
        })?;
        Ok(out.pop())
    }
}
