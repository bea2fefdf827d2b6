//! Kernels of our own for decoding on NVIDIA, beside MLX's operations.
//!
//! MLX's product of 4-bit weights reaches under a quarter of an H200's memory bandwidth, and each of its operations costs
//! some 4 us however small it is. Here one launch is a whole product with the norm before it and the residual or the gate
//! after it ([`product`]), and one is all of attention, rope and cache included ([`attention`]): five launches a layer; one
//! more ([`choose`]) takes the largest logits. The sources are CUDA C++, compiled when the model is loaded. [`check`] then compares each with f32 and times whole steps
//! with and without them, and only what is right and faster stays. Everything here answers `None` where it does not apply,
//! and the caller goes on with MLX's operations.

pub(crate) mod attention;
pub(crate) mod check;
pub(crate) mod choose;
pub(crate) mod product;

use crate::array::{Array, Result};
use crate::kernels::attention::{Attention, Decode};
use crate::kernels::choose::{Choose, Chosen};
use crate::kernels::product::{Product, Products};

/// Most rows of a product, and sequences of an attention, in one launch.
pub(crate) const ROWS: usize = 8;

/// Most launches of a kernel for eight rows side by side, for steps of more.
pub(crate) const LAUNCHES: usize = 8;

/// Numbers of rows that kernels with parameters for each row are built for.
pub(crate) const SLOTS: [usize; 3] = [1, 4, ROWS];

/// Whether there are kernels for this architecture, in MLX's word. They want instructions and shared memory of Hopper, and
/// have been tried on nothing else.
pub(crate) fn are_for(architecture: Option<&str>) -> bool {
    architecture == Some("sm_90")
}

/// The smallest of these that has room for so many.
pub(crate) fn slots(rows: usize) -> Option<usize> {
    SLOTS.into_iter().find(|slots| *slots >= rows)
}

/// What is in use.
#[derive(Default)]
pub(crate) struct Kernels {
    products: Option<Products>,
    attention: Option<Attention>,
    choose: Option<Choose>,
    /// Most rows of a step that the kernels are used for, in turn: `[products, attention]`.
    limits: [usize; 2],
    /// Rows from which a product with quantized weights is faster as their dequantization and a dense one.
    dense_from: Option<usize>,
}

impl Kernels {
    /// A product, if a kernel is there for it.
    pub fn product(&self, product: &Product<'_>) -> Result<Option<Array>> {
        match &self.products {
            Some(products) if product.rows <= self.limits[0] => products.apply(product),
            _ => Ok(None),
        }
    }

    /// Attention of rows of one token each, if a kernel is there for it.
    pub fn attention(&self, decode: &Decode<'_>) -> Result<Option<Array>> {
        match &self.attention {
            Some(attention) if decode.rows.len() <= self.limits[1] => attention.apply(decode),
            _ => Ok(None),
        }
    }

    /// The largest logits of `[rows, vocab]`, if a kernel is there for it.
    pub fn choose(&self, logits: &Array, rows: usize, vocab: usize) -> Result<Option<Chosen>> {
        match &self.choose {
            Some(choose) => choose.apply(logits, rows, vocab),
            None => Ok(None),
        }
    }

    /// Whether a product of so many rows is to dequantize its weights first.
    pub fn dense(&self, rows: usize) -> bool {
        self.dense_from.is_some_and(|from| rows >= from)
    }
}
