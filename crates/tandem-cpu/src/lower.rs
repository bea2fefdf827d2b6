//! From a [`Decoder`] and its [`Weights`] to packed matrices.
//!
//! Every struct of the decoder is taken apart without `..`, so that a new feature of an architecture does not compile
//! here until this engine computes it or refuses it by name.

use tandem_engine::EngineError;
use tandem_kernels::math::Activation;
use tandem_kernels::matrix::{PackedMatrix, Target};
use tandem_kernels::team::Team;
use tandem_model::Weights;
use tandem_model::decoder::{self, Decoder, Mixer, WeightRef};
use tandem_model::weights::Matrix;

use crate::engine::{LoadProgress, Quant};

pub(crate) struct Model {
    pub hidden: usize,
    pub vocab: usize,
    pub embedding: WeightRef,
    pub embedding_scale: f32,
    pub layers: Vec<Layer>,
    pub final_norm: Norm,
    pub head: Linear,
    pub logit_scale: f32,
    pub logit_softcap: Option<f32>,
}

pub(crate) struct Layer {
    pub mixer_pre_norm: Option<Norm>,
    pub attention: Attention,
    pub mixer_post_norm: Option<Norm>,
    pub mlp_pre_norm: Option<Norm>,
    pub mlp: Mlp,
    pub mlp_post_norm: Option<Norm>,
    pub residual_scale: f32,
}

pub(crate) struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub o: Linear,
    pub qk_norm: Option<QkNorm>,
    /// Index into the model's ropes.
    pub rope: Option<usize>,
    pub window: Option<usize>,
    pub scale: f32,
    pub softcap: Option<f32>,
}

pub(crate) struct QkNorm {
    pub q: Norm,
    pub k: Norm,
}

pub(crate) struct Mlp {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
    pub activation: Activation,
}

pub(crate) struct Norm {
    /// Offset included.
    pub weight: Vec<f32>,
    pub eps: f32,
}

pub(crate) struct Linear {
    pub matrix: PackedMatrix,
    pub bias: Option<Vec<f32>>,
}

/// Values per token that the forward pass needs room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Widths {
    pub q: usize,
    pub kv: usize,
    pub intermediate: usize,
}

/// What this engine cannot compute, by name.
///
/// # Errors
/// [`EngineError::Unsupported`].
pub(crate) fn supports(decoder: &Decoder) -> Result<Widths, EngineError> {
    let unsupported = |feature: String, hint: &str| EngineError::Unsupported {
        engine: "cpu".into(),
        feature,
        hint: hint.into(),
    };
    let mut widths = None;
    for (i, layer) in decoder.layers.iter().enumerate() {
        let Mixer::Attention(attention) = &layer.mixer;
        if !attention.head_dim.is_multiple_of(8) {
            let feature = format!("a head dimension of {} (layer {i})", attention.head_dim);
            return Err(unsupported(feature, "head dimensions are multiples of 8"));
        }
        let here = Widths {
            q: attention.heads * attention.head_dim,
            kv: attention.kv_heads * attention.head_dim,
            intermediate: layer.mlp.intermediate,
        };
        if *widths.get_or_insert(here) != here {
            return Err(unsupported(format!("layers of different shapes (layer {i})"), "use another engine"));
        }
    }
    widths.ok_or_else(|| unsupported("a model without layers".into(), "check num_hidden_layers"))
}

/// Bytes that the packed weights will take.
///
/// # Errors
/// [`EngineError::Model`] if a tensor is missing.
pub(crate) fn packed_bytes(
    decoder: &Decoder,
    weights: &Weights,
    quant: Option<Quant>,
) -> Result<u64, EngineError> {
    matrices(decoder).try_fold(0, |total, (weight, is_head)| {
        let matrix = weights.matrix(weight)?;
        let format = target(quant, &matrix, is_head).map_or(matrix.format, Target::format);
        let bytes = PackedMatrix::packed_bytes(format, matrix.rows, matrix.cols);
        Ok(total + bytes.unwrap_or(0) as u64)
    })
}

/// The matrices that will be packed, and whether each is the head. The embedding is not: its rows are read in place.
fn matrices(decoder: &Decoder) -> impl Iterator<Item = (&WeightRef, bool)> {
    let layers = decoder.layers.iter().flat_map(|layer| {
        let Mixer::Attention(attention) = &layer.mixer;
        let decoder::Mlp { gate, up, down, .. } = &layer.mlp;
        [&attention.q, &attention.k, &attention.v, &attention.o, gate, up, down]
    });
    layers.map(|linear| (&linear.weight, false)).chain([(&decoder.head.weight, true)])
}

/// What a matrix is quantized to at load, if it is. The head decides between tokens and stays at 8 bits.
fn target(quant: Option<Quant>, matrix: &Matrix<'_>, is_head: bool) -> Option<Target> {
    let wanted = match (quant?, is_head) {
        (Quant::Q4, false) => Target::Q4,
        (Quant::Q4, true) | (Quant::Q8, _) => Target::Q8,
    };
    let divides = wanted.format().row_bytes(matrix.cols).is_some();
    (!matrix.format.is_quantized() && divides).then_some(wanted)
}

/// Packs everything, reporting the share that is done. Also the distinct ropes, which layers name by index.
pub(crate) fn lower(
    decoder: &Decoder,
    weights: &Weights,
    team: &Team,
    quant: Option<Quant>,
    progress: &mut LoadProgress,
) -> Result<(Model, Vec<decoder::Rope>), EngineError> {
    let total =
        matrices(decoder).filter_map(|(w, _)| weights.matrix(w).ok()).map(|m| m.rows * m.cols).sum::<usize>();
    let mut packer = Packer { weights, team, quant, progress, done: 0, total, ropes: vec![] };
    let Decoder {
        architecture: _,
        vocab_size,
        hidden_size,
        max_context: _,
        embedding,
        embedding_scale,
        layers,
        final_norm,
        head,
        logit_scale,
        logit_softcap,
    } = decoder;
    let model = Model {
        hidden: *hidden_size,
        vocab: *vocab_size,
        embedding: embedding.clone(),
        embedding_scale: *embedding_scale,
        layers: layers.iter().map(|layer| packer.layer(layer)).collect::<Result<_, _>>()?,
        final_norm: packer.norm(final_norm)?,
        head: packer.linear(head, true)?,
        logit_scale: *logit_scale,
        logit_softcap: *logit_softcap,
    };
    Ok((model, packer.ropes))
}

struct Packer<'a> {
    weights: &'a Weights,
    team: &'a Team,
    quant: Option<Quant>,
    progress: &'a mut LoadProgress,
    /// Values packed so far.
    done: usize,
    total: usize,
    ropes: Vec<decoder::Rope>,
}

impl Packer<'_> {
    fn layer(&mut self, layer: &decoder::Layer) -> Result<Layer, EngineError> {
        let decoder::Layer {
            mixer_pre_norm,
            mixer: Mixer::Attention(attention),
            mixer_post_norm,
            mlp_pre_norm,
            mlp,
            mlp_post_norm,
            residual_scale,
        } = layer;
        let decoder::Attention {
            heads,
            kv_heads,
            head_dim,
            q,
            k,
            v,
            o,
            qk_norm,
            rope,
            window,
            scale,
            softcap,
        } = attention;
        let decoder::Mlp { intermediate: _, gate, up, down, activation } = mlp;
        Ok(Layer {
            mixer_pre_norm: self.optional_norm(mixer_pre_norm.as_ref())?,
            attention: Attention {
                heads: *heads,
                kv_heads: *kv_heads,
                head_dim: *head_dim,
                q: self.linear(q, false)?,
                k: self.linear(k, false)?,
                v: self.linear(v, false)?,
                o: self.linear(o, false)?,
                qk_norm: qk_norm.as_ref().map(|norm| self.qk_norm(norm)).transpose()?,
                rope: rope.as_ref().map(|rope| self.rope(rope)),
                window: *window,
                scale: *scale,
                softcap: *softcap,
            },
            mixer_post_norm: self.optional_norm(mixer_post_norm.as_ref())?,
            mlp_pre_norm: self.optional_norm(mlp_pre_norm.as_ref())?,
            mlp: Mlp {
                gate: self.linear(gate, false)?,
                up: self.linear(up, false)?,
                down: self.linear(down, false)?,
                activation: match activation {
                    decoder::Activation::Silu => Activation::Silu,
                    decoder::Activation::GeluTanh => Activation::GeluTanh,
                },
            },
            mlp_post_norm: self.optional_norm(mlp_post_norm.as_ref())?,
            residual_scale: *residual_scale,
        })
    }

    fn rope(&mut self, rope: &decoder::Rope) -> usize {
        self.ropes.iter().position(|known| known == rope).unwrap_or_else(|| {
            self.ropes.push(rope.clone());
            self.ropes.len() - 1
        })
    }

    fn optional_norm(&self, norm: Option<&decoder::Norm>) -> Result<Option<Norm>, EngineError> {
        norm.map(|norm| self.norm(norm)).transpose()
    }

    fn norm(&self, norm: &decoder::Norm) -> Result<Norm, EngineError> {
        let decoder::Norm { weight, eps, offset } = norm;
        let mut weight = self.weights.vector(weight)?;
        weight.iter_mut().for_each(|w| *w += offset);
        Ok(Norm { weight, eps: *eps })
    }

    fn qk_norm(&self, norm: &decoder::QkNorm) -> Result<QkNorm, EngineError> {
        // What a norm runs over is as long as its weight.
        let decoder::QkNorm { q, k, over: _ } = norm;
        Ok(QkNorm { q: self.norm(q)?, k: self.norm(k)? })
    }

    fn linear(&mut self, linear: &decoder::Linear, is_head: bool) -> Result<Linear, EngineError> {
        let decoder::Linear { weight, bias } = linear;
        let bias = bias.as_ref().map(|bias| self.weights.vector(bias)).transpose()?;
        Ok(Linear { matrix: self.matrix(weight, is_head)?, bias })
    }

    fn matrix(&mut self, weight: &WeightRef, is_head: bool) -> Result<PackedMatrix, EngineError> {
        let matrix = self.weights.matrix(weight)?;
        let (team, rows, cols) = (self.team, matrix.rows, matrix.cols);
        // What was packed is read no more, so that memory never holds a large matrix twice.
        let release = || self.weights.release(weight);
        let packed = match target(self.quant, &matrix, is_head) {
            Some(target) => {
                let row = |row, out: &mut [f32]| matrix.row_f32(row, out);
                PackedMatrix::quantize_in_parts(team, target, rows, cols, row, release)
            }
            None => {
                let row = |row| matrix.row(row);
                PackedMatrix::pack_in_parts(team, matrix.format, rows, cols, row, release)
            }
        };
        let packed =
            packed.map_err(|error| EngineError::Model(format!("tensor {}: {error}", weight.tensor)))?;
        self.done += matrix.rows * matrix.cols;
        (self.progress)(self.done as f32 / self.total.max(1) as f32);
        Ok(packed)
    }
}
