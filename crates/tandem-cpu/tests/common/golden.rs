//! Fixtures with the logits that transformers computed from them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::SafeTensors;
use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::conformance::relative_error;
use tandem_engine::{Engine, Input, Row, RowOut, Want, Which};
use tandem_model::Weights;
use tandem_model::decoder::Decoder;

/// Largest relative error of an f32 run. Measured are 1e-7 to 7e-7; changes of the mathematics cost 1e-4 and more.
pub const TOLERANCE: f32 = 1e-5;

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
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

    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.values(name, u32::from_le_bytes)
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.values(name, f32::from_le_bytes)
    }
}

/// The largest relative error over the golden's sequences, each at its positions.
pub fn error(
    decoder: &Decoder,
    weights: &Arc<Weights>,
    golden: &Golden,
    prefix: &str,
    options: &CpuOptions,
) -> f32 {
    let progress = &mut (Box::new(|_| ()) as _);
    let mut engine = CpuEngine::load(decoder, Arc::clone(weights), options, progress).unwrap();
    let vocab = decoder.vocab_size;
    let mut worst = 0.0f32;
    for sequence in 0..2 {
        let ids = golden.ids(&format!("ids.{sequence}"));
        let positions = golden.ids(&format!("positions.{sequence}"));
        let reference = golden.floats(&format!("{prefix}logits.{sequence}"));
        assert_eq!(reference.len(), positions.len() * vocab);
        let seq = engine.open(ids.len(), None).unwrap();
        let row = Row { seq, input: Input::Tokens(ids), want: Want::Logits(Which::All) };
        let ticket = engine.submit(&[row]).unwrap();
        let RowOut::Logits(logits) = engine.collect(ticket).unwrap().remove(0) else { panic!("no logits") };
        let got: Vec<f32> = positions
            .iter()
            .flat_map(|position| logits.values[*position as usize * vocab..][..vocab].to_vec())
            .collect();
        let error = relative_error(&got, &reference);
        worst = if error.is_nan() { f32::INFINITY } else { worst.max(error) };
    }
    worst
}

pub fn options() -> CpuOptions {
    CpuOptions { threads: Some(2), memory_budget: Some(256 << 20), ..CpuOptions::default() }
}
