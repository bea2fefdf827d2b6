//! What fixes a sequence's angles: the wavelengths of each of the model's ropes, and a fingerprint of all.

use std::rc::Rc;

use tandem_model::decoder::{Rope, RopeFactors};

use crate::array::{Array, Dtype, Result, evaluate};

/// One rope as MLX takes it.
pub(crate) struct Turn {
    /// Leading dimensions of a head that turn.
    pub dims: usize,
    /// Reciprocals of the angular frequencies, `[dims / 2]` in f32.
    pub wavelengths: Array,
    /// Factors on a head's dimensions, where cosine and sine have one.
    pub factor: Option<Array>,
}

pub(crate) struct Turns {
    pub ropes: Vec<Turn>,
    /// Equal where keys may be shared.
    pub fingerprint: String,
}

/// The model's ropes, each with the width of the heads it turns.
pub(crate) struct Ropes {
    ropes: Vec<(Rope, usize)>,
    float: Dtype,
    shared: Option<Rc<Turns>>,
}

impl Ropes {
    pub fn new(ropes: Vec<(Rope, usize)>, float: Dtype) -> Result<Self> {
        let by_length = ropes.iter().any(|(rope, _)| rope.depends_on_length());
        let mut all = Self { ropes, float, shared: None };
        if !by_length {
            all.shared = Some(Rc::new(all.fixed(0)?));
        }
        Ok(all)
    }

    /// Those of a sequence that may grow to `max_len`.
    pub fn turns(&self, max_len: usize) -> Result<Rc<Turns>> {
        self.shared.clone().map_or_else(|| Ok(Rc::new(self.fixed(max_len)?)), Ok)
    }

    fn fixed(&self, max_len: usize) -> Result<Turns> {
        let factors: Vec<RopeFactors> = self.ropes.iter().map(|(rope, _)| rope.factors(max_len)).collect();
        let fingerprint = RopeFactors::fingerprint(&factors);
        let mut ropes = Vec::with_capacity(factors.len());
        for ((rope, head_dim), RopeFactors { inverse_frequencies, attention_factor }) in
            self.ropes.iter().zip(factors)
        {
            let wavelengths: Vec<f32> = inverse_frequencies.iter().map(|f| 1.0 / f).collect();
            let dims = rope.rotary_dim;
            let factor = if attention_factor == 1.0 {
                None
            } else {
                let by_dim: Vec<f32> =
                    (0..*head_dim).map(|i| if i < dims { attention_factor } else { 1.0 }).collect();
                Some(Array::from_f32(&by_dim, [*head_dim])?.as_type(self.float)?)
            };
            ropes.push(Turn {
                dims,
                wavelengths: Array::from_f32(&wavelengths, [wavelengths.len()])?,
                factor,
            });
        }
        evaluate(ropes.iter().flat_map(|turn| turn.factor.iter().chain([&turn.wavelengths])))?;
        Ok(Turns { ropes, fingerprint })
    }
}
