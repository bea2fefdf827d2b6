//! From a [`Decoder`] and its [`Weights`] to arrays, in the order a forward pass meets them.
//!
//! Every struct of the decoder is taken apart without `..`, so that a new feature of an architecture does not compile
//! here until this engine computes it or refuses it by name. Projections of the same input are stacked into one product
//! where their format allows: fewer and larger operations are what a GPU wants.

use std::rc::Rc;

use tandem_engine::EngineError;
use tandem_model::Weights;
use tandem_model::decoder::{self, Activation, Decoder, Mixer, QkNormOver, Role, Rope, WeightRef};

use crate::array::{Array, Dtype, Result, evaluate};
use crate::kernels::Kernels;
use crate::kernels::product::{After, Matrix, Product};
use crate::load::{Held, Loader, target};
use crate::options::{LoadProgress, Quant};

pub(crate) struct Model {
    pub vocab: usize,
    pub hidden: usize,
    pub embedding: Rc<Held>,
    pub embedding_scale: f32,
    pub layers: Vec<Layer>,
    pub final_norm: Norm,
    pub head: Rc<Held>,
    pub head_bias: Option<Array>,
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
    pub qkv: Projection,
    pub o: Projection,
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
    pub over: QkNormOver,
}

pub(crate) struct Mlp {
    pub gate_up: Projection,
    pub down: Projection,
    pub activation: Activation,
}

pub(crate) struct Norm {
    /// Offset included.
    pub weight: Array,
    pub eps: f32,
}

/// Linear layers of one input.
pub(crate) struct Projection {
    stacks: Vec<Stack>,
}

/// Linear layers in one product.
struct Stack {
    held: Held,
    bias: Option<Array>,
    /// Of each layer's output.
    widths: Vec<usize>,
    /// Of the input.
    cols: usize,
}

impl Norm {
    /// `x` normed, if there is a norm.
    pub fn of(norm: Option<&Self>, x: &Array) -> Result<Array> {
        norm.map_or_else(|| Ok(x.clone()), |Norm { weight, eps }| x.rms_norm(weight, *eps))
    }
}

impl Stack {
    fn product<'a>(&'a self, input: &Input<'a>, after: After<'a>) -> Product<'a> {
        let Input { x, rows, norm, .. } = *input;
        let matrix = Matrix { held: &self.held, rows: self.widths.iter().sum(), cols: self.cols };
        Product { x, rows, norm, matrix, after }
    }
}

/// What a projection is of.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    pub kernels: &'a Kernels,
    /// `[rows, in]`.
    pub x: &'a Array,
    pub rows: usize,
    /// Comes first.
    pub norm: Option<&'a Norm>,
}

impl Input<'_> {
    /// The product with a matrix of which there is one.
    pub fn times(&self, held: &Held, rows: usize, cols: usize) -> Result<Array> {
        let Input { kernels, x, norm, .. } = *self;
        let matrix = Matrix { held, rows, cols };
        let own = kernels.product(&Product { x, rows: self.rows, norm, matrix, after: After::Nothing })?;
        own.map_or_else(|| held.project(&Norm::of(norm, x)?, kernels.dense(self.rows)), Ok)
    }
}

impl Projection {
    /// The output of each stack of layers.
    pub fn stacked(&self, input: &Input<'_>) -> Result<Vec<Array>> {
        let mut normed = None;
        let mut outputs = Vec::with_capacity(self.stacks.len());
        for stack in &self.stacks {
            let mut y = match input.kernels.product(&stack.product(input, After::Nothing))? {
                Some(y) => y,
                None => {
                    if normed.is_none() {
                        normed = Some(Norm::of(input.norm, input.x)?);
                    }
                    let x = normed.as_ref().unwrap_or(input.x);
                    stack.held.project(x, input.kernels.dense(input.rows))?
                }
            };
            if let Some(bias) = &stack.bias {
                y = y.add(bias)?;
            }
            outputs.push(y);
        }
        Ok(outputs)
    }

    /// The outputs of the layers, `[rows, width]` each, from those of the stacks.
    pub fn split(&self, outputs: Vec<Array>, rows: usize) -> Result<Vec<Array>> {
        let mut layers = Vec::new();
        for (Stack { widths, .. }, y) in self.stacks.iter().zip(outputs) {
            if widths.len() == 1 {
                layers.push(y);
                continue;
            }
            let mut first = 0;
            for width in widths {
                layers.push(y.slice([0, first], [rows, first + width])?);
                first += width;
            }
        }
        Ok(layers)
    }

    /// The output of each layer.
    pub fn apply(&self, input: &Input<'_>) -> Result<Vec<Array>> {
        self.split(self.stacked(input)?, input.rows)
    }

    /// Of a projection that is one layer.
    pub fn apply_one(&self, input: &Input<'_>) -> Result<Array> {
        let mut outputs = self.stacked(input)?;
        outputs.pop().ok_or_else(|| EngineError::Model("a projection without weights".into()))
    }

    /// All of it with `after` in one kernel, if there is one.
    pub fn whole(&self, input: &Input<'_>, after: After<'_>) -> Result<Option<Array>> {
        self.product(input, after).map_or(Ok(None), |product| input.kernels.product(&product))
    }

    /// What [`Projection::whole`] computes.
    pub fn product<'a>(&'a self, input: &Input<'a>, after: After<'a>) -> Option<Product<'a>> {
        match self.stacks.as_slice() {
            [stack @ Stack { bias: None, .. }] => Some(stack.product(input, after)),
            _ => None,
        }
    }

    fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.stacks.iter().flat_map(|stack| stack.held.arrays().into_iter().chain(&stack.bias))
    }
}

impl Model {
    /// Every array of the weights.
    pub fn arrays(&self) -> Vec<&Array> {
        let mut all = self.embedding.arrays();
        all.extend(self.head.arrays());
        all.extend(&self.head_bias);
        all.push(&self.final_norm.weight);
        for layer in &self.layers {
            let Attention { qkv, o, qk_norm, .. } = &layer.attention;
            for projection in [qkv, o, &layer.mlp.gate_up, &layer.mlp.down] {
                all.extend(projection.arrays());
            }
            let norms =
                [&layer.mixer_pre_norm, &layer.mixer_post_norm, &layer.mlp_pre_norm, &layer.mlp_post_norm];
            let of_heads = qk_norm.iter().flat_map(|norm| [&norm.q, &norm.k]);
            all.extend(norms.into_iter().flatten().chain(of_heads).map(|norm| &norm.weight));
        }
        all
    }
}

/// What this engine cannot compute, by name.
///
/// # Errors
/// [`EngineError::Unsupported`].
pub(crate) fn supports(decoder: &Decoder) -> Result<()> {
    let unsupported = |feature: String, hint: &str| EngineError::Unsupported {
        engine: "mlx".into(),
        feature,
        hint: hint.into(),
    };
    if decoder.layers.is_empty() {
        return Err(unsupported("a model without layers".into(), "check num_hidden_layers"));
    }
    for (i, layer) in decoder.layers.iter().enumerate() {
        let Mixer::Attention(attention) = &layer.mixer;
        if let Some(rope) = &attention.rope
            && (!rope.rotary_dim.is_multiple_of(2) || rope.rotary_dim > attention.head_dim)
        {
            let feature =
                format!("rope over {} dimensions of {} (layer {i})", rope.rotary_dim, attention.head_dim);
            return Err(unsupported(feature, "use the cpu engine"));
        }
    }
    Ok(())
}

/// Bytes that the weights will take.
///
/// # Errors
/// [`EngineError::Model`] if a tensor is missing.
pub(crate) fn held_bytes(
    decoder: &Decoder,
    weights: &Weights,
    quant: Option<Quant>,
    float: Dtype,
) -> Result<u64> {
    let tied = decoder.head.weight == decoder.embedding;
    let uses = decoder.weight_uses();
    let count = uses.len() - usize::from(tied);
    uses.iter().take(count).filter(|used| used.role == Role::Matrix).try_fold(0, |total, used| {
        let matrix = weights.matrix(used.weight)?;
        let is_head = *used.weight == decoder.head.weight || *used.weight == decoder.embedding;
        Ok(total + target(matrix.format, matrix.cols, quant, is_head).bytes(matrix.rows, matrix.cols, float))
    })
}

/// Loads everything, reporting the share that is done. Also the distinct ropes with the head widths they turn; layers
/// name them by index.
pub(crate) fn lower(
    decoder: &Decoder,
    weights: &Weights,
    float: Dtype,
    quant: Option<Quant>,
    progress: &mut LoadProgress,
) -> Result<(Model, Vec<(Rope, usize)>)> {
    let Decoder {
        architecture: _,
        vocab_size,
        hidden_size,
        max_context: _,
        embedding,
        embedding_scale,
        layers,
        final_norm,
        head: decoder::Linear { weight: head, bias: head_bias },
        logit_scale,
        logit_softcap,
    } = decoder;
    let mut lowering = Lowering { loader: Loader { weights, float, quant }, ropes: Vec::new() };
    let table = Rc::new(lowering.loader.stacked(&[embedding], true)?);
    let mut lowered = Vec::with_capacity(layers.len());
    for (i, layer) in layers.iter().enumerate() {
        lowered.push(lowering.layer(layer)?);
        progress((i + 1) as f32 / (layers.len() + 1) as f32);
    }
    let head_held =
        if head == embedding { Rc::clone(&table) } else { Rc::new(lowering.loader.stacked(&[head], true)?) };
    let model = Model {
        vocab: *vocab_size,
        hidden: *hidden_size,
        embedding: table,
        embedding_scale: *embedding_scale,
        layers: lowered,
        final_norm: lowering.norm(final_norm)?,
        head: head_held,
        head_bias: lowering.bias(head_bias.as_ref())?,
        logit_scale: *logit_scale,
        logit_softcap: *logit_softcap,
    };
    progress(1.0);
    Ok((model, lowering.ropes))
}

struct Lowering<'a> {
    loader: Loader<'a>,
    ropes: Vec<(Rope, usize)>,
}

impl Lowering<'_> {
    fn layer(&mut self, layer: &decoder::Layer) -> Result<Layer> {
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
                qkv: self.projection(&[q, k, v])?,
                o: self.projection(&[o])?,
                qk_norm: qk_norm.as_ref().map(|norm| self.qk_norm(norm)).transpose()?,
                rope: rope.as_ref().map(|rope| self.rope(rope, *head_dim)),
                window: *window,
                scale: *scale,
                softcap: *softcap,
            },
            mixer_post_norm: self.optional_norm(mixer_post_norm.as_ref())?,
            mlp_pre_norm: self.optional_norm(mlp_pre_norm.as_ref())?,
            mlp: Mlp {
                gate_up: self.projection(&[gate, up])?,
                down: self.projection(&[down])?,
                activation: *activation,
            },
            mlp_post_norm: self.optional_norm(mlp_post_norm.as_ref())?,
            residual_scale: *residual_scale,
        })
    }

    fn rope(&mut self, rope: &Rope, head_dim: usize) -> usize {
        let known = self.ropes.iter().position(|(r, dim)| r == rope && *dim == head_dim);
        known.unwrap_or_else(|| {
            self.ropes.push((rope.clone(), head_dim));
            self.ropes.len() - 1
        })
    }

    fn optional_norm(&self, norm: Option<&decoder::Norm>) -> Result<Option<Norm>> {
        norm.map(|norm| self.norm(norm)).transpose()
    }

    fn norm(&self, norm: &decoder::Norm) -> Result<Norm> {
        let decoder::Norm { weight, eps, offset } = norm;
        Ok(Norm { weight: self.loader.vector(weight, *offset)?, eps: *eps })
    }

    fn qk_norm(&self, norm: &decoder::QkNorm) -> Result<QkNorm> {
        let decoder::QkNorm { q, k, over } = norm;
        Ok(QkNorm { q: self.norm(q)?, k: self.norm(k)?, over: *over })
    }

    fn bias(&self, bias: Option<&WeightRef>) -> Result<Option<Array>> {
        bias.map(|bias| self.loader.vector(bias, 0.0)).transpose()
    }

    /// Neighbours that are held alike go into one product.
    fn projection(&self, layers: &[&decoder::Linear]) -> Result<Projection> {
        let mut stacks = Vec::new();
        let mut rest = layers;
        while let [first, ..] = rest {
            let mut count = 1;
            while let Some(next) = rest.get(count)
                && self.alike(first, next)?
            {
                count += 1;
            }
            let (group, after) = rest.split_at(count);
            stacks.push(self.stack(group)?);
            rest = after;
        }
        Ok(Projection { stacks })
    }

    fn alike(&self, a: &decoder::Linear, b: &decoder::Linear) -> Result<bool> {
        let [of_a, of_b] = [a, b].map(|linear| self.loader.weights.matrix(&linear.weight));
        let (of_a, of_b) = (of_a?, of_b?);
        Ok(of_a.format == of_b.format && of_a.cols == of_b.cols && a.bias.is_some() == b.bias.is_some())
    }

    fn stack(&self, group: &[&decoder::Linear]) -> Result<Stack> {
        let (mut weights, mut biases, mut widths) = (Vec::new(), Vec::new(), Vec::new());
        let mut cols = 0;
        for decoder::Linear { weight, bias } in group {
            weights.push(weight);
            biases.extend(self.bias(bias.as_ref())?);
            let matrix = self.loader.weights.matrix(weight)?;
            widths.push(matrix.rows);
            cols = matrix.cols;
        }
        let bias = match biases.as_slice() {
            [] => None,
            [one] => Some(one.clone()),
            several => Some(Array::concatenate(several, 0)?),
        };
        evaluate(&bias)?;
        Ok(Stack { held: self.loader.stacked(&weights, false)?, bias, widths, cols })
    }
}
