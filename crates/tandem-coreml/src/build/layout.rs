//! Operators that move elements without computing.

use super::{Builder, Built, Var};
use crate::error::CoremlError;
use crate::mil::{Arg, Dim, Named, TensorType, ValueType};

impl Builder {
    /// The same elements, row by row, under another shape. One dimension may be unknown.
    pub fn reshape(&mut self, label: &str, x: &Var, dims: &[Dim]) -> Built {
        let ty = TensorType { dtype: x.ty.dtype, dims: dims.to_vec() };
        let unknown = |dims: &[Dim]| dims.iter().filter(|dim| dim.fixed().is_none()).count();
        let same = match (x.ty.elements(), ty.elements()) {
            (Some(old), Some(new)) => old == new,
            (None, None) => unknown(&x.ty.dims) == 1 && unknown(dims) == 1,
            _ => false,
        };
        if !same {
            return Err(self.wrong("reshape", label, format!("{} into {ty}", x.ty)));
        }
        if x.ty == ty {
            return Ok(x.clone());
        }
        let shape: Vec<i32> = dims.iter().map(|dim| dim.fixed().map_or(-1, |size| size as i32)).collect();
        let shape = self.ints(&shape);
        Ok(self.op("reshape", label, &[("x", x), ("shape", &shape)], ty))
    }

    /// [`Builder::reshape`] into a known shape.
    pub fn reshape_fixed(&mut self, label: &str, x: &Var, shape: &[usize]) -> Built {
        let dims: Vec<Dim> = shape.iter().copied().map(Dim::Fixed).collect();
        self.reshape(label, x, &dims)
    }

    /// Dimension `i` of the result is dimension `perm[i]` of `x`.
    pub fn transpose(&mut self, label: &str, x: &Var, perm: &[usize]) -> Built {
        let mut sorted = perm.to_vec();
        sorted.sort_unstable();
        if sorted != (0..x.ty.dims.len()).collect::<Vec<_>>() {
            return Err(self.wrong("transpose", label, format!("{} by {perm:?}", x.ty)));
        }
        let dims = perm.iter().map(|&axis| x.dim(axis)).collect();
        let perm: Vec<i32> = perm.iter().map(|&axis| axis as i32).collect();
        let perm = self.ints(&perm);
        let ty = TensorType { dtype: x.ty.dtype, dims };
        Ok(self.op("transpose", label, &[("x", x), ("perm", &perm)], ty))
    }

    /// One after the other along `axis`; a single value is itself.
    pub fn concat(&mut self, label: &str, values: &[&Var], axis: usize) -> Built {
        let (first, rest) = match values {
            [] => return Err(self.wrong("concat", label, "of nothing")),
            [only] => return Ok((*only).clone()),
            [first, rest @ ..] => (first, rest),
        };
        let mut ty = first.ty.clone();
        for value in rest {
            let others = |ty: &TensorType| {
                let mut dims = ty.dims.clone();
                (axis < dims.len()).then(|| dims.remove(axis)).map(|_| (ty.dtype, dims))
            };
            if others(&ty).is_none() || others(&ty) != others(&value.ty) {
                return Err(self.wrong("concat", label, format!("{ty} and {} along axis {axis}", value.ty)));
            }
            ty.dims[axis] = match (ty.dims[axis], value.dim(axis)) {
                (Dim::Fixed(a), Dim::Fixed(b)) => Dim::Fixed(a + b),
                _ => Dim::ANY,
            };
        }
        let (axis, interleave) = (self.int(axis as i32), self.bool(false));
        let name = self.unique(label);
        let args = |vars: &[&Var]| vars.iter().map(|var| Arg::Name(var.name.clone())).collect();
        let inputs =
            [("values", args(values)), ("axis", args(&[&axis])), ("interleave", args(&[&interleave]))];
        let inputs = inputs.map(|(key, args)| (key.to_owned(), args)).into();
        Ok(self.push_op("concat", name, inputs, ty))
    }

    /// Parts of the given sizes along `axis`; a single part is `x` itself.
    pub fn split(
        &mut self,
        label: &str,
        x: &Var,
        axis: usize,
        sizes: &[usize],
    ) -> Result<Vec<Var>, CoremlError> {
        if x.ty.dims.get(axis) != Some(&Dim::Fixed(sizes.iter().sum())) {
            return Err(self.wrong("split", label, format!("{} into {sizes:?} along axis {axis}", x.ty)));
        }
        if sizes.len() == 1 {
            return Ok(vec![x.clone()]);
        }
        let as_ints: Vec<i32> = sizes.iter().map(|&size| size as i32).collect();
        let (split_sizes, axis_const) = (self.ints(&as_ints), self.int(axis as i32));
        let num = self.int(sizes.len() as i32);
        let part = |size: &usize| {
            let mut ty = x.ty.clone();
            ty.dims[axis] = Dim::Fixed(*size);
            ty
        };
        let types: Vec<TensorType> = sizes.iter().map(part).collect();
        let args = [("x", x), ("num_splits", &num), ("split_sizes", &split_sizes), ("axis", &axis_const)];
        let first = self.op("split", label, &args, types[0].clone());
        let mut parts = vec![first];
        for ty in &types[1..] {
            let name = self.unique(label);
            let op = self.ops.last_mut().expect("the operator just added");
            op.outputs.push(Named { name: name.clone(), ty: ValueType::Tensor(ty.clone()) });
            parts.push(Var { name, ty: ty.clone() });
        }
        Ok(parts)
    }

    /// `x[begin[0]..end[0], begin[1]..end[1], ...]`; an end of `None` is that of the dimension.
    pub fn slice(&mut self, label: &str, x: &Var, ranges: &[(i32, Option<i32>)]) -> Built {
        let fits = |(dim, (begin, end)): (&Dim, &(i32, Option<i32>))| match (dim.fixed(), begin, end) {
            (Some(size), 0.., Some(end)) => begin < end && *end as usize <= size,
            (Some(size), 0.., None) => (*begin as usize) < size,
            (_, i32::MIN..0, None) => true,
            (None, 0, None) => true,
            _ => false,
        };
        if ranges.len() != x.ty.dims.len() || !x.ty.dims.iter().zip(ranges).all(fits) {
            return Err(self.wrong("slice_by_index", label, format!("{ranges:?} of {}", x.ty)));
        }
        let size = |(dim, (begin, end)): (&Dim, &(i32, Option<i32>))| match (dim, begin, end) {
            (_, 0.., Some(end)) => Dim::Fixed((end - begin) as usize),
            (_, i32::MIN..0, _) => Dim::Fixed(begin.unsigned_abs() as usize),
            (Dim::Fixed(size), ..) => Dim::Fixed(size - *begin as usize),
            (any, ..) => *any,
        };
        let ty = TensorType { dtype: x.ty.dtype, dims: x.ty.dims.iter().zip(ranges).map(size).collect() };
        let begin = self.ints(&ranges.iter().map(|range| range.0).collect::<Vec<_>>());
        let end = self.ints(&ranges.iter().map(|range| range.1.unwrap_or(0)).collect::<Vec<_>>());
        let end_mask = self.bools(&ranges.iter().map(|range| range.1.is_none()).collect::<Vec<_>>());
        Ok(self.sliced("slice_by_index", label, &[("x", x), ("begin", &begin), ("end", &end)], &end_mask, ty))
    }

    /// `x` with the part between two vectors of one index a dimension replaced by `update`. Dimensions that are `whole`
    /// end where `x` does, whatever the second vector says.
    pub fn slice_update(
        &mut self,
        label: &str,
        x: &Var,
        update: &Var,
        [begin, end]: [&Var; 2],
        whole: &[bool],
    ) -> Built {
        let rank = Dim::Fixed(x.ty.dims.len());
        let indices = [begin, end].iter().all(|index| index.ty.dims == [rank]);
        let inside = x.ty.dims.len() == update.ty.dims.len()
            && x.ty.dims.iter().zip(&update.ty.dims).all(|(x, u)| match (x.fixed(), u.fixed()) {
                (Some(x), Some(u)) => u <= x,
                _ => true,
            });
        if !indices || !inside || whole.len() != x.ty.dims.len() || x.ty.dtype != update.ty.dtype {
            let what = format!("{} into {} at {}", update.ty, x.ty, begin.ty);
            return Err(self.wrong("slice_update", label, what));
        }
        let end_mask = self.bools(whole);
        let args = [("x", x), ("update", update), ("begin", begin), ("end", end)];
        Ok(self.sliced("slice_update", label, &args, &end_mask, x.ty.clone()))
    }

    /// A vector of indices for [`Builder::slice_update`]: constants around one that is computed (`int32[1]`).
    pub fn index_vector(&mut self, label: &str, before: &[i32], index: &Var, after: &[i32]) -> Built {
        let (before, after) = (self.ints(before), self.ints(after));
        self.concat(label, &[&before, index, &after], 0)
    }

    /// Zeros after the elements of the last axis, up to `width` of them.
    pub fn pad_last(&mut self, label: &str, x: &Var, width: usize) -> Built {
        let mut ty = x.ty.clone();
        let more = match ty.dims.last_mut() {
            Some(dim) => {
                let more = dim.fixed().and_then(|size| width.checked_sub(size));
                *dim = Dim::Fixed(width);
                more
            }
            None => None,
        };
        let Some(more) = more else {
            return Err(self.wrong("pad", label, format!("{} to {width}", x.ty)));
        };
        if more == 0 {
            return Ok(x.clone());
        }
        let mut amounts = vec![0; 2 * ty.dims.len()];
        amounts[2 * ty.dims.len() - 1] = more as i32;
        let (pad, mode, zero) = (self.ints(&amounts), self.text("constant"), self.half(0.0));
        let args = [("x", x), ("pad", &pad), ("mode", &mode), ("constant_val", &zero)];
        Ok(self.op("pad", label, &args, ty))
    }

    fn sliced(
        &mut self,
        kind: &str,
        label: &str,
        args: &[(&str, &Var)],
        end_mask: &Var,
        ty: TensorType,
    ) -> Var {
        let rank = end_mask.dim(0).fixed().unwrap_or_default();
        let (stride, none) = (self.ints(&vec![1; rank]), self.bools(&vec![false; rank]));
        let masks =
            [("stride", &stride), ("begin_mask", &none), ("end_mask", end_mask), ("squeeze_mask", &none)];
        self.op(kind, label, &[args, masks.as_slice()].concat(), ty)
    }
}
