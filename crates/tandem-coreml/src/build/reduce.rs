//! Operators that gather along an axis.

use super::{Builder, Built, Var};
use crate::mil::Dim;

impl Builder {
    /// The largest along `axis`, which stays with size 1.
    pub fn reduce_max(&mut self, label: &str, x: &Var, axis: usize) -> Built {
        self.reduce("reduce_max", label, x, axis)
    }

    /// The mean along `axis`, which stays with size 1.
    pub fn reduce_mean(&mut self, label: &str, x: &Var, axis: usize) -> Built {
        self.reduce("reduce_mean", label, x, axis)
    }

    /// Softmax along the last axis.
    pub fn softmax(&mut self, label: &str, x: &Var) -> Var {
        let axis = self.int(-1);
        self.op("softmax", label, &[("x", x), ("axis", &axis)], x.ty.clone())
    }

    fn reduce(&mut self, kind: &str, label: &str, x: &Var, axis: usize) -> Built {
        let mut ty = x.ty.clone();
        let Some(dim) = ty.dims.get_mut(axis) else {
            return Err(self.wrong(kind, label, format!("{} has no axis {axis}", x.ty)));
        };
        *dim = Dim::Fixed(1);
        let axes = self.ints(&[axis as i32]);
        let keep = self.bool(true);
        Ok(self.op(kind, label, &[("x", x), ("axes", &axes), ("keep_dims", &keep)], ty))
    }
}
