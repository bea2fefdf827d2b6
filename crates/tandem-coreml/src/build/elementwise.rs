//! Operators that treat every element alike.

use super::{Builder, Built, Var};
use crate::mil::{Dim, TensorType};

impl Builder {
    /// `x + y`, dimensions of size 1 stretched.
    pub fn add(&mut self, label: &str, x: &Var, y: &Var) -> Built {
        self.binary("add", label, x, y)
    }

    /// `x * y`, dimensions of size 1 stretched.
    pub fn mul(&mut self, label: &str, x: &Var, y: &Var) -> Built {
        self.binary("mul", label, x, y)
    }

    /// `x / y`, dimensions of size 1 stretched.
    pub fn div(&mut self, label: &str, x: &Var, y: &Var) -> Built {
        self.binary("real_div", label, x, y)
    }

    /// The larger of `x` and `y`, dimensions of size 1 stretched.
    pub fn maximum(&mut self, label: &str, x: &Var, y: &Var) -> Built {
        self.binary("maximum", label, x, y)
    }

    /// `x * factor`; `x` itself if the factor is 1.
    pub fn scaled(&mut self, label: &str, x: &Var, factor: f32) -> Built {
        if factor == 1.0 {
            return Ok(x.clone());
        }
        let factor = self.half(factor);
        self.mul(label, x, &factor)
    }

    /// `|x|`.
    pub fn abs(&mut self, label: &str, x: &Var) -> Var {
        self.op("abs", label, &[("x", x)], x.ty.clone())
    }

    /// `x²`.
    pub fn square(&mut self, label: &str, x: &Var) -> Var {
        self.op("square", label, &[("x", x)], x.ty.clone())
    }

    /// `1 / sqrt(x)`.
    pub fn rsqrt(&mut self, label: &str, x: &Var) -> Var {
        let epsilon = self.half(0.0);
        self.op("rsqrt", label, &[("x", x), ("epsilon", &epsilon)], x.ty.clone())
    }

    /// `x * sigmoid(x)`.
    pub fn silu(&mut self, label: &str, x: &Var) -> Var {
        self.op("silu", label, &[("x", x)], x.ty.clone())
    }

    /// GELU in its tanh approximation.
    pub fn gelu_tanh(&mut self, label: &str, x: &Var) -> Var {
        let mode = self.text("TANH_APPROXIMATION");
        self.op("gelu", label, &[("x", x), ("mode", &mode)], x.ty.clone())
    }

    /// `cap * tanh(x / cap)`.
    pub fn softcap(&mut self, label: &str, x: &Var, cap: f32) -> Built {
        let shrunk = self.scaled(&format!("{label}_shrunk"), x, 1.0 / cap)?;
        let bent = self.op("tanh", &format!("{label}_tanh"), &[("x", &shrunk)], x.ty.clone());
        self.scaled(label, &bent, cap)
    }

    fn binary(&mut self, kind: &str, label: &str, x: &Var, y: &Var) -> Built {
        let dims = broadcast(&x.ty.dims, &y.ty.dims).filter(|_| x.ty.dtype == y.ty.dtype);
        let Some(dims) = dims else {
            return Err(self.wrong(kind, label, format!("{} and {} do not fit together", x.ty, y.ty)));
        };
        let ty = TensorType { dtype: x.ty.dtype, dims };
        Ok(self.op(kind, label, &[("x", x), ("y", y)], ty))
    }
}

/// The shape of two tensors stretched to each other, aligned at their last dimensions.
pub(super) fn broadcast(a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let rank = a.len().max(b.len());
    let at = |dims: &[Dim], i: usize| (i + dims.len()).checked_sub(rank).map_or(Dim::Fixed(1), |i| dims[i]);
    let one = |i| match (at(a, i), at(b, i)) {
        (a, b) if a == b => Some(a),
        (Dim::Fixed(1), other) | (other, Dim::Fixed(1)) => Some(other),
        _ => None,
    };
    (0..rank).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn shapes_stretch_or_are_refused() {
        let mut builder = Builder::new("CoreML8");
        let a = builder.fixed_input("a", DType::F16, &[1, 4, 1, 8]);
        let b = builder.fixed_input("b", DType::F16, &[4, 1, 1]);
        let c = builder.fixed_input("c", DType::F16, &[3]);
        assert_eq!(builder.add("ab", &a, &b).unwrap().ty, a.ty);
        let error = builder.add("ac", &a, &c).unwrap_err().to_string();
        assert!(error.contains("fp16[1, 4, 1, 8] and fp16[3]"), "{error}");
    }
}
