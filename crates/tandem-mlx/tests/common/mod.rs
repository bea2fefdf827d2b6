//! The fixtures of the repository and an engine over them.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::SafeTensors;
use tandem_engine::conformance::relative_error;
use tandem_engine::{Engine, Input, Row, RowOut, Want, Which};
use tandem_mlx::{MlxEngine, MlxOptions};
use tandem_model::Weights;
use tandem_model::decoder::Decoder;

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// Small steps and few rows: what refuses too many is tested with as many.
pub fn options() -> MlxOptions {
    MlxOptions { max_step_tokens: 200, max_batch: 8, memory_budget: Some(1 << 30), ..MlxOptions::default() }
}

pub fn exact() -> MlxOptions {
    MlxOptions { exact: true, ..options() }
}

pub fn load(decoder: &Decoder, weights: &Arc<Weights>, options: &MlxOptions) -> MlxEngine {
    MlxEngine::load(decoder, Arc::clone(weights), options, &mut (Box::new(|_| ()) as _)).unwrap()
}

/// Logits of every position, `[tokens, vocab]`.
pub fn all_logits(engine: &mut dyn Engine, ids: Vec<u32>) -> Vec<f32> {
    let seq = engine.open(ids.len(), None).unwrap();
    let row = Row { seq, input: Input::Tokens(ids), want: Want::Logits(Which::All) };
    let ticket = engine.submit(&[row]).unwrap();
    let RowOut::Logits(logits) = engine.collect(ticket).unwrap().remove(0) else { panic!("no logits") };
    engine.close(seq).unwrap();
    logits.values
}

pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    pub fn open(path: &Path) -> Self {
        Self { bytes: std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())) }
    }

    fn values<T>(&self, name: &str, read: fn([u8; 4]) -> T) -> Vec<T> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        tensor.data().as_chunks::<4>().0.iter().map(|bytes| read(*bytes)).collect()
    }

    pub fn ids(&self, sequence: usize) -> Vec<u32> {
        self.values(&format!("ids.{sequence}"), u32::from_le_bytes)
    }

    /// The largest relative error over the golden's sequences, each at its positions.
    pub fn error(&self, engine: &mut dyn Engine, prefix: &str) -> f32 {
        let vocab = engine.capabilities().vocab_size;
        let mut worst = 0.0f32;
        for sequence in 0..2 {
            let positions = self.values(&format!("positions.{sequence}"), u32::from_le_bytes);
            let reference = self.values(&format!("{prefix}logits.{sequence}"), f32::from_le_bytes);
            assert_eq!(reference.len(), positions.len() * vocab);
            let logits = all_logits(engine, self.ids(sequence));
            let got: Vec<f32> = positions
                .iter()
                .flat_map(|position| logits[*position as usize * vocab..][..vocab].to_vec())
                .collect();
            let error = relative_error(&got, &reference);
            worst = if error.is_nan() { f32::INFINITY } else { worst.max(error) };
        }
        worst
    }
}
