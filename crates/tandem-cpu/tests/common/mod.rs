//! A tiny random model in memory, of any stored format, with any features.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod golden;

use std::collections::BTreeMap;
use std::sync::Arc;

use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::sampler::uniform;
use tandem_model::Weights;
use tandem_model::decoder::{
    Activation, Attention, Decoder, Layer, Linear, Mixer, Mlp, Norm, QkNorm, QkNormOver, Rope, RopeScaling,
    WeightRef, WeightUse,
};
use tandem_model::format::{Affine, Format, ScaleType};
use tandem_model::weights::{Groups, Tensor};

pub const VOCAB: usize = 96;
pub const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const INTERMEDIATE: usize = 96;

/// Which of the decoder's features the model has.
#[derive(Debug, Clone, Copy, Default)]
pub struct Features {
    pub bias: bool,
    pub qk_norm: Option<QkNormOver>,
    pub post_norms: bool,
    pub window: Option<usize>,
    pub caps: bool,
    pub scales: bool,
    pub rope_by_length: bool,
}

/// Where the ropes that depend on the length begin to.
pub const ORIGINAL_CONTEXT: usize = 200;

impl Features {
    pub const ALL: Self = Self {
        bias: true,
        qk_norm: Some(QkNormOver::Head),
        post_norms: true,
        window: Some(20),
        caps: true,
        scales: true,
        rope_by_length: false,
    };

    /// OLMo 2's norms, and ropes that depend on how long the sequence will be.
    pub const BY_LENGTH: Self = Self {
        bias: false,
        qk_norm: Some(QkNormOver::FullWidth),
        post_norms: true,
        window: None,
        caps: false,
        scales: false,
        rope_by_length: true,
    };
}

pub struct Tiny {
    pub decoder: Decoder,
    pub weights: Arc<Weights>,
}

impl Tiny {
    pub fn new(format: Format, features: Features) -> Self {
        let decoder = decoder(features);
        let mut tensors = BTreeMap::new();
        for (i, WeightUse { weight, shape, .. }) in decoder.weight_uses().into_iter().enumerate() {
            let tensor = match shape.as_slice() {
                [_] => vector(i as u64, shape),
                _ => matrix(i as u64, format, shape),
            };
            tensors.entry(weight.tensor.clone()).or_insert(tensor);
        }
        Self { decoder, weights: Arc::new(Weights::new(tensors)) }
    }

    pub fn engine(&self, options: &CpuOptions) -> CpuEngine {
        CpuEngine::load(&self.decoder, Arc::clone(&self.weights), options, &mut (Box::new(|_| ()) as _))
            .unwrap()
    }
}

pub fn options(threads: usize) -> CpuOptions {
    CpuOptions {
        threads: Some(threads),
        memory_budget: Some(64 << 20),
        max_step_tokens: 200,
        ..CpuOptions::default()
    }
}

fn decoder(features: Features) -> Decoder {
    let norm = |name: String| Norm { weight: WeightRef::whole(name), eps: 1e-5, offset: 0.0 };
    let linear = |name: String| Linear {
        bias: features.bias.then(|| WeightRef::whole(format!("{name}.bias"))),
        weight: WeightRef::whole(format!("{name}.weight")),
    };
    let layers = (0..2).map(|i| Layer {
        mixer_pre_norm: Some(norm(format!("{i}.mixer_pre_norm"))),
        mixer: Mixer::Attention(Attention {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            q: linear(format!("{i}.q")),
            k: linear(format!("{i}.k")),
            v: linear(format!("{i}.v")),
            o: linear(format!("{i}.o")),
            qk_norm: features.qk_norm.map(|over| QkNorm {
                q: norm(format!("{i}.q_norm")),
                k: norm(format!("{i}.k_norm")),
                over,
            }),
            rope: (!features.scales || i == 0).then_some(Rope {
                theta: 10000.0,
                rotary_dim: if features.scales { HEAD_DIM / 2 } else { HEAD_DIM },
                scaling: match i {
                    _ if !features.rope_by_length => RopeScaling::Default,
                    0 => RopeScaling::Dynamic { factor: 4.0, original_context: ORIGINAL_CONTEXT },
                    _ => RopeScaling::LongRope {
                        short: vec![1.0; HEAD_DIM / 2],
                        long: (0..HEAD_DIM / 2).map(|i| 1.0 + i as f32).collect(),
                        original_context: ORIGINAL_CONTEXT,
                        attention_factor: 1.2,
                    },
                },
            }),
            window: features.window.filter(|_| i == 0),
            scale: 0.25,
            softcap: features.caps.then_some(3.0),
        }),
        mixer_post_norm: features.post_norms.then(|| norm(format!("{i}.mixer_post_norm"))),
        mlp_pre_norm: Some(norm(format!("{i}.mlp_pre_norm"))),
        mlp: Mlp {
            intermediate: INTERMEDIATE,
            gate: linear(format!("{i}.gate")),
            up: linear(format!("{i}.up")),
            down: linear(format!("{i}.down")),
            activation: if features.scales { Activation::GeluTanh } else { Activation::Silu },
        },
        mlp_post_norm: features.post_norms.then(|| norm(format!("{i}.mlp_post_norm"))),
        residual_scale: if features.scales { 0.7 } else { 1.0 },
    });
    Decoder {
        architecture: "tiny".into(),
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        max_context: 512,
        embedding: WeightRef::whole("embedding"),
        embedding_scale: if features.scales { 8.0 } else { 1.0 },
        layers: layers.collect(),
        final_norm: norm("final_norm".into()),
        head: Linear { weight: WeightRef::whole("head"), bias: None },
        logit_scale: if features.scales { 0.5 } else { 1.0 },
        logit_softcap: features.caps.then_some(10.0),
    }
}

fn tensor(format: Format, shape: Vec<usize>, bytes: Vec<u8>) -> Tensor {
    Tensor { format, shape, values: bytes.into(), groups: None }
}

/// Values around 1.
fn vector(seed: u64, shape: Vec<usize>) -> Tensor {
    let values = (0..shape[0]).map(|i| 0.6 + 0.8 * uniform(seed, i as u64) as f32);
    tensor(Format::F32, shape, values.flat_map(f32::to_le_bytes).collect())
}

/// Values around 0, in any format.
fn matrix(seed: u64, format: Format, shape: Vec<usize>) -> Tensor {
    let rows_cols: usize = shape.iter().product();
    let value = |i: usize| (uniform(seed, i as u64) as f32 - 0.5) * 0.5;
    let half = |v: f32| half::f16::from_f32(v).to_le_bytes();
    let random = |i: usize| (uniform(seed ^ 77, i as u64) * 256.0) as u8;
    let bytes: Vec<u8> = match format {
        Format::F32 => (0..rows_cols).flat_map(|i| value(i).to_le_bytes()).collect(),
        Format::F16 => (0..rows_cols).flat_map(|i| half(value(i))).collect(),
        Format::Bf16 => (0..rows_cols).flat_map(|i| half::bf16::from_f32(value(i)).to_le_bytes()).collect(),
        Format::Affine(affine) => return affine_matrix(seed, affine, shape),
        _ => (0..rows_cols / format.block_len())
            .flat_map(|block| {
                let scale = 0.5 + uniform(seed, block as u64) as f32;
                let (d, m) = match format {
                    Format::Q8_0 => (scale * 0.002, None),
                    Format::Q5_0 => (scale * 0.015, None),
                    Format::Q5_1 => (scale * 0.015, Some(-0.25 * scale)),
                    Format::Q4_0 => (scale * 0.03, None),
                    _ => (scale * 0.03, Some(-0.25 * scale)),
                };
                let head: Vec<u8> = half(d).into_iter().chain(m.into_iter().flat_map(half)).collect();
                let quants = (head.len()..format.block_bytes()).map(move |i| random(block * 64 + i));
                head.clone().into_iter().chain(quants.collect::<Vec<_>>())
            })
            .collect(),
    };
    tensor(format, shape, bytes)
}

/// Values around 0, in MLX's groups with bfloat16 scales.
fn affine_matrix(seed: u64, affine: Affine, shape: Vec<usize>) -> Tensor {
    assert_eq!(affine.scales(), ScaleType::Bf16);
    let values: usize = shape.iter().product();
    let random = |i: usize| (uniform(seed ^ 77, i as u64) * 256.0) as u8;
    let scale = |i: usize| 0.5 + uniform(seed, i as u64) as f32;
    let bf16 = |v: f32| half::bf16::from_f32(v).to_le_bytes();
    let step = 0.5 / (1 << affine.bits()) as f32;
    let groups = 0..values / affine.group();
    let scales: Vec<u8> = groups.clone().flat_map(|i| bf16(scale(i) * step)).collect();
    let biases: Vec<u8> = groups.flat_map(|i| bf16(-0.25 * scale(i))).collect();
    let packed: Vec<u8> = (0..values * affine.bits() / 8).map(random).collect();
    Tensor {
        format: Format::Affine(affine),
        shape,
        values: packed.into(),
        groups: Some(Groups { scales: scales.into(), biases: biases.into() }),
    }
}
