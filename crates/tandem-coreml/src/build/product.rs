//! Operators that multiply matrices, and the lookup of rows.

use super::elementwise::broadcast;
use super::{Builder, Built, Var};
use crate::dtype::DType;
use crate::mil::{Dim, TensorType};

impl Builder {
    /// A matrix product at every place: `x` is `[batch, in, 1, places]`, `weight` `[out, in, 1, 1]`, `bias` `[out]`.
    pub fn conv(&mut self, label: &str, x: &Var, weight: &Var, bias: Option<&Var>) -> Built {
        let (&[batch, inner, height, width], &[out, weight_inner, Dim::Fixed(1), Dim::Fixed(1)]) =
            (x.ty.dims.as_slice(), weight.ty.dims.as_slice())
        else {
            return Err(self.wrong("conv", label, format!("{} by {}", x.ty, weight.ty)));
        };
        if inner != weight_inner || bias.is_some_and(|bias| bias.ty.dims != [out]) {
            return Err(self.wrong("conv", label, format!("{} by {}", x.ty, weight.ty)));
        }
        let (ones, zeros) = (self.ints(&[1, 1]), self.ints(&[0, 0, 0, 0]));
        let (pad_type, groups) = (self.text("valid"), self.int(1));
        let mut args = vec![
            ("x", x),
            ("weight", weight),
            ("strides", &ones),
            ("pad_type", &pad_type),
            ("pad", &zeros),
            ("dilations", &ones),
            ("groups", &groups),
        ];
        args.extend(bias.map(|bias| ("bias", bias)));
        let ty = TensorType { dtype: x.ty.dtype, dims: vec![batch, out, height, width] };
        Ok(self.op("conv", label, &args, ty))
    }

    /// `x · weightᵀ + bias` along the last axis; `weight` is `[out, in]`.
    pub fn linear(&mut self, label: &str, x: &Var, weight: &Var, bias: Option<&Var>) -> Built {
        let (&[out, inner], Some(&last)) = (weight.ty.dims.as_slice(), x.ty.dims.last()) else {
            return Err(self.wrong("linear", label, format!("{} by {}", x.ty, weight.ty)));
        };
        if inner != last || bias.is_some_and(|bias| bias.ty.dims != [out]) {
            return Err(self.wrong("linear", label, format!("{} by {}", x.ty, weight.ty)));
        }
        let mut ty = x.ty.clone();
        *ty.dims.last_mut().expect("it has a last dimension") = out;
        let mut args = vec![("x", x), ("weight", weight)];
        args.extend(bias.map(|bias| ("bias", bias)));
        Ok(self.op("linear", label, &args, ty))
    }

    /// `x · y`, or `x · yᵀ`, of the last two axes; the others are stretched to each other.
    pub fn matmul(&mut self, label: &str, x: &Var, y: &Var, transpose_y: bool) -> Built {
        let ty = (|| {
            let ([x_batch @ .., rows, inner], [y_batch @ .., a, b]) =
                (x.ty.dims.as_slice(), y.ty.dims.as_slice())
            else {
                return None;
            };
            let (y_inner, cols) = if transpose_y { (b, a) } else { (a, b) };
            let mut dims =
                broadcast(x_batch, y_batch).filter(|_| inner == y_inner && x.ty.dtype == y.ty.dtype)?;
            dims.extend([*rows, *cols]);
            Some(TensorType { dtype: x.ty.dtype, dims })
        })();
        let Some(ty) = ty else {
            return Err(self.wrong(
                "matmul",
                label,
                format!("{} by {}, transposed: {transpose_y}", x.ty, y.ty),
            ));
        };
        let (no, turned) = (self.bool(false), self.bool(transpose_y));
        Ok(self.op(
            "matmul",
            label,
            &[("x", x), ("y", y), ("transpose_x", &no), ("transpose_y", &turned)],
            ty,
        ))
    }

    /// Attention in one operator, scores divided by the root of the head's width: `query` `[.., rows, width]`, `key` and
    /// `value` `[.., keys, width]`, `mask` stretched to `[.., rows, keys]`.
    pub fn fused_attention(&mut self, label: &str, query: &Var, key: &Var, value: &Var, mask: &Var) -> Built {
        let rank = query.ty.dims.len();
        let same = key.ty == value.ty
            && key.ty.dims.len() == rank
            && rank >= 3
            && query.ty.dims[..rank - 2] == key.ty.dims[..rank - 2]
            && query.dim(rank - 1) == key.dim(rank - 1)
            && mask.ty.dims.last() == Some(&key.dim(rank - 2));
        if !same {
            let what = format!("{} on {} under {}", query.ty, key.ty, mask.ty);
            return Err(self.wrong("scaled_dot_product_attention", label, what));
        }
        let args = [("query", query), ("key", key), ("value", value), ("attn_mask", mask)];
        Ok(self.op("scaled_dot_product_attention", label, &args, query.ty.clone()))
    }

    /// The rows of `table` (`[rows, width]`) that `ids` names.
    pub fn gather_rows(&mut self, label: &str, table: &Var, ids: &Var) -> Built {
        let (&[_, width], DType::I32) = (table.ty.dims.as_slice(), ids.ty.dtype) else {
            return Err(self.wrong("gather", label, format!("{} from {}", ids.ty, table.ty)));
        };
        let (axis, batch_dims, validate) = (self.int(0), self.int(0), self.bool(false));
        let dims = ids.ty.dims.iter().copied().chain([width]).collect();
        let args = [
            ("x", table),
            ("indices", ids),
            ("axis", &axis),
            ("batch_dims", &batch_dims),
            ("validate_indices", &validate),
        ];
        Ok(self.op("gather", label, &args, TensorType { dtype: table.ty.dtype, dims }))
    }
}
