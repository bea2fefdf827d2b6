//! What an operator costs: the multiply-adds of products and convolutions, and the bytes of its weights.

use super::graph::{Site, is_constant};
use crate::mil::{Data, TensorType, Value};

/// Multiply-adds of one run. `None` where a length is not known before the program runs, or the operator runs a
/// number of times that is not; 0 for operators that only move or map elements.
pub(super) fn multiply_adds(site: Site<'_, '_>) -> Option<u64> {
    let count = match site.op.kind.as_str() {
        "conv" | "conv_quantized" => convolution(site),
        "conv_transpose" => transposed_convolution(site),
        "linear" | "linear_activation" => linear(site),
        "matmul" => product(site),
        "einsum" => einsum(site),
        "scaled_dot_product_attention" => attention(site),
        // Their steps are hidden in one operator, or nobody knows what they do.
        "gru" | "lstm" | "rnn" | "while_loop" | "cond" | "call" => None,
        kind if super::catalog::find(kind).is_none() && !is_constant(kind) => None,
        _ => return Some(0),
    };
    if site.graph.ops[site.index].nested { None } else { count }
}

fn elements(ty: &TensorType) -> Option<u64> {
    u64::try_from(ty.elements()?).ok()
}

fn dim(ty: &TensorType, from_end: usize) -> Option<u64> {
    let at = ty.dims.len().checked_sub(from_end)?;
    u64::try_from(ty.dims.get(at)?.fixed()?).ok()
}

/// Each output element reads one filter: `weight` is `[out, in / groups, kernel...]`.
fn convolution(site: Site<'_, '_>) -> Option<u64> {
    let weight = site.ty("weight")?.shape()?;
    let filter = weight.get(1..)?.iter().try_fold(1u64, |product, size| product.checked_mul(*size as u64))?;
    elements(site.output()?)?.checked_mul(filter)
}

/// Each input element meets one filter: `weight` is `[in, out / groups, kernel...]`.
fn transposed_convolution(site: Site<'_, '_>) -> Option<u64> {
    let weight = site.ty("weight")?.shape()?;
    let filter = weight.get(1..)?.iter().try_fold(1u64, |product, size| product.checked_mul(*size as u64))?;
    elements(site.ty("x")?)?.checked_mul(filter)
}

fn linear(site: Site<'_, '_>) -> Option<u64> {
    elements(site.output()?)?.checked_mul(dim(site.ty("weight")?, 1)?)
}

fn product(site: Site<'_, '_>) -> Option<u64> {
    let from_end = if site.flag("transpose_x").unwrap_or(false) { 2 } else { 1 };
    let x = site.ty("x")?;
    let inner = if x.dims.len() == 1 { dim(x, 1) } else { dim(x, from_end) };
    elements(site.output()?)?.checked_mul(inner?)
}

/// The product of the lengths of all letters.
fn einsum(site: Site<'_, '_>) -> Option<u64> {
    let equation = site.text("equation")?;
    let (inputs, _) = equation.split_once("->")?;
    let args = site.op.inputs.get("values")?;
    let mut letters: Vec<(char, u64)> = Vec::new();
    for (names, arg) in inputs.split(',').zip(args) {
        let ty = site.ty_of(arg)?;
        let names: Vec<char> = names.chars().filter(|c| !c.is_whitespace()).collect();
        if names.len() != ty.dims.len() {
            return None;
        }
        for (name, dim) in names.into_iter().zip(&ty.dims) {
            if !letters.iter().any(|(known, _)| *known == name) {
                letters.push((name, dim.fixed()? as u64));
            }
        }
    }
    letters.into_iter().try_fold(1u64, |product, (_, size)| product.checked_mul(size))
}

/// Scores and their product with the values.
fn attention(site: Site<'_, '_>) -> Option<u64> {
    let query = site.ty("query")?;
    let rows = elements(query)?.checked_div(dim(query, 1)?)?;
    let keys = rows.checked_mul(dim(site.ty("key")?, 2)?)?;
    keys.checked_mul(dim(query, 1)?.checked_add(dim(site.ty("value")?, 1)?)?)
}

/// The stored bytes of a constant.
pub(super) fn stored_bytes(value: &Value) -> u64 {
    let packed = || {
        let ty = value.ty.tensor()?;
        u64::try_from(ty.dtype.bytes(ty.elements()?)?).ok()
    };
    match &value.data {
        Data::Strings(values) => values.iter().map(|text| text.len() as u64).sum(),
        _ => packed().unwrap_or(0),
    }
}
