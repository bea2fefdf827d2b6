//! What fixes a sequence's angles: one rope table for each of the model's ropes, and a fingerprint of all.
//!
//! Most models turn every sequence alike and share one set of tables. Where a rope depends on how long the sequence will
//! be, each sequence has its own.

use std::sync::Arc;

use tandem_kernels::rope::RopeTable;
use tandem_model::decoder::{Rope, RopeFactors};

#[derive(Debug)]
pub(crate) struct Turns {
    pub tables: Vec<RopeTable>,
    /// Equal where keys may be shared.
    pub fingerprint: String,
}

/// The model's ropes.
pub(crate) struct Ropes {
    ropes: Vec<Rope>,
    shared: Option<Arc<Turns>>,
}

impl Ropes {
    pub(crate) fn new(ropes: Vec<Rope>) -> Self {
        let by_length = ropes.iter().any(Rope::depends_on_length);
        let shared = (!by_length).then(|| Arc::new(Turns::new(&ropes, 0)));
        Self { ropes, shared }
    }

    /// Those of a sequence that may grow to `max_len`.
    pub(crate) fn turns(&self, max_len: usize) -> Arc<Turns> {
        self.shared.clone().unwrap_or_else(|| Arc::new(Turns::new(&self.ropes, max_len)))
    }
}

impl Turns {
    fn new(ropes: &[Rope], max_len: usize) -> Self {
        let factors: Vec<RopeFactors> = ropes.iter().map(|rope| rope.factors(max_len)).collect();
        let fingerprint = RopeFactors::fingerprint(&factors);
        let table =
            |factors: RopeFactors| RopeTable::new(factors.inverse_frequencies, factors.attention_factor);
        Self { tables: factors.into_iter().map(table).collect(), fingerprint }
    }
}
