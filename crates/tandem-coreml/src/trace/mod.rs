//! How large a network's activations become on real text, so that an export can keep them within fp16.
//!
//! The network is run once over a short text in f32, by a forward pass of its own: it reads each weight once, needs
//! little more memory than one tensor, and looks at every value on the way. It is no engine, and slow beside one.

mod forward;
mod grid;

use serde::{Deserialize, Serialize};
use tandem_model::Weights;
use tandem_model::decoder::Decoder;

use crate::error::CoremlError;
use forward::Pass;

/// The first paragraphs of Jane Austen's *Persuasion* (1818, public domain).
pub const SAMPLE: &str = include_str!("sample.txt");
/// Tokens of a text that are looked at.
pub const SAMPLE_TOKENS: usize = 128;

/// Largest magnitudes on a text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Activations {
    /// Tokens of the text.
    pub tokens: usize,
    /// Of the residual stream at its start, the embedding's factor included.
    pub embedding: f32,
    /// Layer by layer.
    pub layers: Vec<LayerRange>,
}

/// Largest magnitudes in one layer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LayerRange {
    /// Of the residual stream after each half of the layer.
    pub residual: f32,
    /// Of all else that the layer computes, but for what is added to the residual stream as it is.
    pub inside: f32,
    /// Where that was: `q`, `scores`, `gated`, `down`, ...
    pub at: String,
}

impl Activations {
    /// The largest magnitude of the residual stream.
    pub fn residual(&self) -> f32 {
        self.layers.iter().fold(self.embedding, |most, layer| most.max(layer.residual))
    }
}

/// Runs the network over the first [`SAMPLE_TOKENS`] of `tokens`. `advance` is told how many weights were read.
///
/// # Errors
/// [`CoremlError::Model`] for a weight that is not there; [`CoremlError::Refused`] for a token that is none of the
/// model's.
pub fn trace(
    decoder: &Decoder,
    weights: &Weights,
    tokens: &[u32],
    advance: &mut dyn FnMut(usize),
) -> Result<Activations, CoremlError> {
    let tokens = &tokens[..tokens.len().min(SAMPLE_TOKENS)];
    Ok(Pass::new(weights, advance).layers(decoder, tokens)?.0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::path::Path;

    use safetensors::SafeTensors;
    use tandem_model::Checkpoint;

    use super::*;

    /// What the pass computes is what transformers does: the logits of every architecture's golden sequences.
    #[test]
    fn the_pass_computes_what_transformers_does() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
        let mut folders: Vec<_> =
            std::fs::read_dir(fixtures).unwrap().map(|entry| entry.unwrap().path()).collect();
        folders.retain(|folder| {
            ["golden.safetensors", "config.json"].iter().all(|file| folder.join(file).exists())
        });
        assert!(folders.len() >= 17);
        for folder in folders {
            let (decoder, weights) = Checkpoint::open_network(&folder).unwrap();
            let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
            let golden = SafeTensors::deserialize(&bytes).unwrap();
            for sequence in 0..2 {
                let words = |name: &str| -> Vec<[u8; 4]> {
                    golden.tensor(&format!("{name}.{sequence}")).unwrap().data().as_chunks().0.to_vec()
                };
                let ids: Vec<u32> = words("ids").into_iter().map(u32::from_le_bytes).collect();
                let logits: Vec<f32> = words("logits").into_iter().map(f32::from_le_bytes).collect();
                let mut read = 0;
                let mut advance = |values| read += values;
                let mut pass = Pass::new(&weights, &mut advance);
                let (range, mut x) = pass.layers(&decoder, &ids).unwrap();
                assert!(x.largest() > 0.0 && x.largest() <= range.layers.last().unwrap().residual);
                pass.norm(&decoder.final_norm, &mut x).unwrap();
                let ours = pass.project(&decoder.head, &x).unwrap();
                let (mut error, mut size) = (0.0f64, 0.0f64);
                for (position, row) in words("positions").into_iter().zip(logits.chunks(decoder.vocab_size)) {
                    for (id, theirs) in row.iter().enumerate() {
                        let logit = ours.at(id, u32::from_le_bytes(position) as usize) * decoder.logit_scale;
                        let logit = decoder.logit_softcap.map_or(logit, |cap| cap * (logit / cap).tanh());
                        error += f64::from(logit - theirs).powi(2);
                        size += f64::from(*theirs).powi(2);
                    }
                }
                let error = (error / size).sqrt();
                assert!(error < 1e-5, "{}: {error:e}", folder.display());
                assert!(read > 0);
            }
        }
    }
}
