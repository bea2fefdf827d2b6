//! Seeded random weights of any shape, for benchmarks without a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};

use super::Checkpoint;
use crate::arch;
use crate::decoder::{Role, WeightUse};
use crate::error::ModelError;
use crate::format::{Affine, Format, ScaleType};
use crate::generation::GenerationConfig;
use crate::tokenizer::Tokenizer;
use crate::weights::{Bytes, Groups, Source, Tensor, Weights};

/// Standard deviation of the weights, transformers' `initializer_range`.
const DEVIATION: f32 = 0.02;

impl Checkpoint {
    /// A model as `config_json` describes it, with matrices of random values (uniform, deviation 0.02, mean about 0) in `format`,
    /// norms of 1 and biases of 0. The same seed gives the same weights. The tokenizer stands in: ids 0 to 255 are the
    /// bytes, the others have no text; there is no template and no end token.
    ///
    /// # Errors
    /// As [`Checkpoint::open`] for the config; [`ModelError::Unsupported`] if `format` is not one of those (F32, F16,
    /// BF16, Q4_0, Q4_1, Q8_0, MLX's), its blocks do not divide a row, or the weights do not fit into memory.
    pub fn dummy(config_json: &Path, seed: u64, format: Format) -> Result<Self, ModelError> {
        let json = std::fs::read(config_json)
            .map_err(|source| ModelError::Io { path: config_json.to_owned(), source })?;
        let (_, decoder) = arch::decoder_from_config(config_json, &json)?;
        let mut tensors = BTreeMap::new();
        for WeightUse { weight, shape, role } in decoder.weight_uses() {
            if tensors.contains_key(&weight.tensor) {
                continue;
            }
            let tensor = match role {
                Role::Matrix => random(format, &shape, mix(seed, &weight.tensor)),
                Role::Bias => constant(0.0, &shape),
                Role::Norm { offset } => constant(1.0 - offset, &shape),
            };
            let tensor = tensor.ok_or_else(|| {
                ModelError::unsupported(
                    config_json,
                    format!("shape of {}", weight.tensor),
                    format!("{shape:?} in {}", format.name()),
                    "dummy weights are F32, F16, BF16, Q4_0, Q4_1, Q8_0 or MLX's, in rows of whole blocks, and must fit into \
                     memory",
                )
            })?;
            tensors.insert(weight.tensor.clone(), tensor);
        }
        let tokenizer = Tokenizer::bytes(decoder.vocab_size)?;
        Ok(Self {
            tokenizer,
            weights: Arc::new(Weights::new(tensors)),
            chat: None,
            generation: GenerationConfig::default(),
            source: config_json.to_owned(),
            decoder,
        })
    }
}

fn constant(value: f32, shape: &[usize]) -> Option<Tensor> {
    tensor(Format::F32, shape, |bytes| bytes.as_chunks_mut::<4>().0.fill(value.to_le_bytes()))
}

/// `None` if the format cannot store the shape or is not drawn, or there is no memory.
fn random(format: Format, shape: &[usize], seed: u64) -> Option<Tensor> {
    // A uniform distribution over (-a, a) has the deviation a / sqrt(3).
    let reach = DEVIATION * 3f32.sqrt();
    let uniform = |draw: u64| (f32::from(draw as u16) - 32767.5) * (reach / 32768.0);
    let mut counter = Counter(seed);
    if let Format::Affine(affine) = format {
        return random_affine(affine, shape, &mut counter, reach);
    }
    let drawn = [Format::F32, Format::F16, Format::Bf16, Format::Q4_0, Format::Q4_1, Format::Q8_0];
    if !drawn.contains(&format) {
        return None;
    }
    tensor(format, shape, |bytes| match format {
        Format::F32 => fill(bytes, &mut counter, |draw| uniform(draw).to_le_bytes()),
        Format::F16 => fill(bytes, &mut counter, |draw| f16::from_f32(uniform(draw)).to_le_bytes()),
        Format::Bf16 => fill(bytes, &mut counter, |draw| bf16::from_f32(uniform(draw)).to_le_bytes()),
        _ => {
            // Random quants of full range under a scale that gives the same reach.
            let scale = reach / if format == Format::Q8_0 { 128.0 } else { 8.0 };
            let head = [f16::from_f32(scale), f16::from_f32(-reach)].map(f16::to_le_bytes);
            let head = &head.as_flattened()[..if format == Format::Q4_1 { 4 } else { 2 }];
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                let (block_head, quants) = block.split_at_mut(head.len());
                block_head.copy_from_slice(head);
                for eight in quants.as_chunks_mut::<8>().0 {
                    *eight = counter.next().to_le_bytes();
                }
            }
        }
    })
}

/// Random integers of full range in groups that all have one scale, from `-reach` to `reach`.
fn random_affine(affine: Affine, shape: &[usize], counter: &mut Counter, reach: f32) -> Option<Tensor> {
    let steps = ((1 << affine.bits()) - 1) as f32;
    let mut drawn = tensor(Format::Affine(affine), shape, |bytes| {
        for eight in bytes.chunks_mut(8) {
            eight.copy_from_slice(&counter.next().to_le_bytes()[..eight.len()]);
        }
    })?;
    let groups = shape.iter().product::<usize>() / affine.group();
    let each = |value: f32| -> Bytes {
        match affine.scales() {
            ScaleType::F32 => value.to_le_bytes().repeat(groups),
            ScaleType::F16 => f16::from_f32(value).to_le_bytes().repeat(groups),
            ScaleType::Bf16 => bf16::from_f32(value).to_le_bytes().repeat(groups),
        }
        .into()
    };
    drawn.groups = Some(Groups { scales: each(2.0 * reach / steps), biases: each(-reach) });
    Some(drawn)
}

/// Allocates once, at the size that is needed, and fills in place.
fn tensor(format: Format, shape: &[usize], fill: impl FnOnce(&mut [u8])) -> Option<Tensor> {
    let cols = *shape.last()?;
    let rows = shape.iter().rev().skip(1).try_fold(1usize, |product, &n| product.checked_mul(n))?;
    let len = format.row_bytes(cols)?.checked_mul(rows)?;
    Vec::<u8>::new().try_reserve_exact(len).ok()?;
    let mut bytes: Arc<[u8]> = std::iter::repeat_n(0, len).collect();
    fill(Arc::get_mut(&mut bytes)?);
    let values = Bytes { source: Source::Memory(bytes), range: 0..len };
    Some(Tensor { format, shape: shape.to_vec(), values, groups: None })
}

/// Four values from each draw of 64 bits.
fn fill<const N: usize>(bytes: &mut [u8], counter: &mut Counter, value: impl Fn(u64) -> [u8; N]) {
    for four in bytes.as_chunks_mut::<N>().0.chunks_mut(4) {
        let draw = counter.next();
        for (i, out) in four.iter_mut().enumerate() {
            *out = value(draw >> (16 * i));
        }
    }
}

/// SplitMix64: a Weyl sequence and a finalizer (Steele, Lea and Flood 2014).
struct Counter(u64);

impl Counter {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A seed of its own for each tensor (FNV-1a over the name).
fn mix(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
