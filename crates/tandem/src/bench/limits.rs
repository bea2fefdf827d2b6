//! What a test takes at least: the bytes it must read and the operations it must do, over what the machine can.

use std::ops::Range;

use serde::Serialize;
use tandem_kernels::roofline::{Pages, f32_peak, int8_peak, int8_vector_peak, read_bandwidth};
use tandem_kernels::team::Team;
use tandem_model::decoder::{Decoder, Mixer, Role};
use tandem_model::weights::Weights;

use super::test::{BATCH_PROMPT, Test};
use crate::cli::{LoadArgs, QuantArg};

/// Limits of this machine for so many threads. `None` is what it does not have.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    pub threads: usize,
    /// Size of the buffer that was read.
    pub buffer_bytes: usize,
    pub read_small_pages_bytes_per_second: Option<f64>,
    pub read_huge_pages_bytes_per_second: Option<f64>,
    pub int8_operations_per_second: f64,
    /// Without tiles, where the live kernel path has them.
    pub int8_vector_operations_per_second: Option<f64>,
    pub f32_operations_per_second: f64,
}

/// What bounds a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    Memory,
    Arithmetic,
}

/// The best figure a test can give here.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Limit {
    pub value: f64,
    pub bound: Bound,
}

/// What must be done.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Work {
    bytes: f64,
    int8: f64,
    f32: f64,
}

/// What a network costs.
#[derive(Debug, Clone)]
pub struct Costs {
    /// Bytes of the weights that every step reads.
    weights: f64,
    /// Operations a token in the layers' products.
    layers: Work,
    /// Operations of the head for one position.
    head: Work,
    /// Of each layer.
    attention: Vec<Attention>,
}

#[derive(Debug, Clone)]
struct Attention {
    /// Bytes of keys and values a position.
    kv_bytes: f64,
    /// Operations for one query and one key.
    operations: f64,
    window: usize,
}

impl Machine {
    /// Measures, reading a buffer of `bytes`.
    pub fn measure(threads: usize, bytes: usize) -> anyhow::Result<Self> {
        let team = Team::new(threads)?;
        Ok(Self {
            threads,
            buffer_bytes: bytes,
            read_small_pages_bytes_per_second: read_bandwidth(&team, bytes, Pages::Small)?,
            read_huge_pages_bytes_per_second: read_bandwidth(&team, bytes, Pages::Huge)?,
            int8_operations_per_second: int8_peak(&team),
            int8_vector_operations_per_second: int8_vector_peak(&team)?,
            f32_operations_per_second: f32_peak(&team),
        })
    }

    /// Seconds that `work` takes at least.
    fn least(&self, work: Work) -> Option<(f64, Bound)> {
        let pages = [self.read_huge_pages_bytes_per_second, self.read_small_pages_bytes_per_second];
        let bandwidth = pages.into_iter().flatten().reduce(f64::max)?;
        let memory = work.bytes / bandwidth;
        let arithmetic =
            work.int8 / self.int8_operations_per_second + work.f32 / self.f32_operations_per_second;
        Some(if memory > arithmetic { (memory, Bound::Memory) } else { (arithmetic, Bound::Arithmetic) })
    }
}

impl Costs {
    /// `weight_bytes` is what the engine holds.
    pub fn new(decoder: &Decoder, weights: &Weights, load: &LoadArgs, weight_bytes: u64) -> Self {
        let product = |used: &tandem_model::decoder::WeightUse<'_>| {
            let operations = 2.0 * used.shape.iter().product::<usize>() as f64;
            let stored = weights.matrix(used.weight).is_ok_and(|matrix| matrix.format.is_quantized());
            if !load.exact && (stored || load.quant != QuantArg::None) {
                Work { int8: operations, ..Work::default() }
            } else {
                Work { f32: operations, ..Work::default() }
            }
        };
        let uses = decoder.weight_uses();
        let matrices: Vec<Work> = uses.iter().filter(|used| used.role == Role::Matrix).map(product).collect();
        // The embedding is looked up, not multiplied; the head comes last.
        let (head, layers) = match matrices.as_slice() {
            [_, layers @ .., head] => (*head, layers.iter().fold(Work::default(), |sum, work| sum + *work)),
            _ => (Work::default(), Work::default()),
        };
        let attention = decoder.layers.iter().map(|layer| {
            let Mixer::Attention(attention) = &layer.mixer;
            Attention {
                kv_bytes: (2 * attention.kv_heads * load.kv().head_bytes(attention.head_dim)) as f64,
                operations: (4 * attention.heads * attention.head_dim) as f64,
                window: attention.window.unwrap_or(usize::MAX),
            }
        });
        Self { weights: weight_bytes as f64, layers, head, attention: attention.collect() }
    }

    /// Bytes of weights that a step reads.
    pub fn weight_bytes(&self) -> f64 {
        self.weights
    }

    /// The best figure of a test whose figure is a rate.
    pub fn limit(&self, test: Test, machine: &Machine) -> Option<Limit> {
        let (tokens, work) = match test {
            Test::Prefill { tokens } => (tokens, self.step(std::iter::once(0..tokens))),
            Test::Decode { tokens, depth } => (tokens, self.decode(1, tokens, depth)),
            Test::Batch { tokens, sequences } => {
                (sequences * tokens, self.decode(sequences, tokens, BATCH_PROMPT))
            }
            Test::Load | Test::FirstToken { .. } | Test::PeakMemory => return None,
        };
        let (seconds, bound) = machine.least(work)?;
        Some(Limit { value: tokens as f64 / seconds, bound })
    }

    fn decode(&self, sequences: usize, tokens: usize, depth: usize) -> Work {
        let steps = (depth..depth + tokens).map(|at| self.step(std::iter::repeat_n(at..at + 1, sequences)));
        steps.fold(Work::default(), |sum, step| sum + step)
    }

    /// One step over sequences that grow by these positions, each with logits for its last.
    fn step(&self, rows: impl Iterator<Item = Range<usize>>) -> Work {
        let mut work = Work { bytes: self.weights, ..Work::default() };
        for positions in rows {
            work = work + self.layers * positions.len() as f64 + self.head;
            for attention in &self.attention {
                let pairs: usize = positions.clone().map(|at| attention.window.min(at + 1)).sum();
                work.f32 += attention.operations * pairs as f64;
                let first = positions.start.saturating_sub(attention.window.saturating_sub(1));
                work.bytes += attention.kv_bytes * (positions.end - first) as f64;
            }
        }
        work
    }
}

impl std::ops::Add for Work {
    type Output = Work;

    fn add(self, other: Work) -> Work {
        Work { bytes: self.bytes + other.bytes, int8: self.int8 + other.int8, f32: self.f32 + other.f32 }
    }
}

impl std::ops::Mul<f64> for Work {
    type Output = Work;

    fn mul(self, factor: f64) -> Work {
        Work { bytes: self.bytes * factor, int8: self.int8 * factor, f32: self.f32 * factor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(window: usize) -> Costs {
        let per = |int8| Work { int8, ..Work::default() };
        let attention = vec![Attention { kv_bytes: 10.0, operations: 6.0, window }];
        Costs { weights: 1000.0, layers: per(50.0), head: per(7.0), attention }
    }

    #[test]
    fn a_step_reads_weights_once_and_what_each_row_sees() {
        let work = costs(usize::MAX).step([3..4, 0..2].into_iter());
        // Four keys for the first row; one and two for the second.
        assert_eq!(work, Work { bytes: 1000.0 + 40.0 + 20.0, int8: 3.0 * 50.0 + 2.0 * 7.0, f32: 6.0 * 7.0 });
        let windowed = costs(2).step([3..4, 0..3].into_iter());
        assert_eq!(windowed.f32, 6.0 * (2.0 + 1.0 + 2.0 + 2.0));
        assert_eq!(windowed.bytes, 1000.0 + 20.0 + 30.0);
    }

    #[test]
    fn what_takes_longer_bounds() {
        let machine = Machine {
            threads: 1,
            buffer_bytes: 1,
            read_small_pages_bytes_per_second: Some(10.0),
            read_huge_pages_bytes_per_second: None,
            int8_operations_per_second: 100.0,
            int8_vector_operations_per_second: None,
            f32_operations_per_second: 20.0,
        };
        let limit = |test| costs(usize::MAX).limit(test, &machine);
        let decode = limit(Test::Decode { tokens: 1, depth: 0 }).unwrap();
        assert_eq!((decode.value, decode.bound), (1.0 / 101.0, Bound::Memory));
        let prefill = limit(Test::Prefill { tokens: 1000 }).unwrap();
        assert_eq!(prefill.bound, Bound::Arithmetic);
        let seconds = 50_007.0 / 100.0 + 6.0 * 500_500.0 / 20.0;
        assert!((prefill.value * seconds / 1000.0 - 1.0).abs() < 1e-12);
        assert!(limit(Test::PeakMemory).is_none());
    }
}
