//! A forward pass over one short sequence, layer by layer: every weight is read once and let go.

use rayon::prelude::*;
use tandem_model::Weights;
use tandem_model::decoder::{
    Activation, Attention, Decoder, Layer, Linear, Mixer, Mlp, Norm, QkNormOver, WeightRef,
};

use super::grid::Grid;
use super::{Activations, LayerRange};
use crate::error::CoremlError;

type Done<T> = Result<T, CoremlError>;

pub(super) struct Pass<'a> {
    pub weights: &'a Weights,
    /// Told how many values were read.
    pub advance: &'a mut dyn FnMut(usize),
    /// Of the layer under way, without the residual stream.
    peak: LayerRange,
}

impl<'a> Pass<'a> {
    pub fn new(weights: &'a Weights, advance: &'a mut dyn FnMut(usize)) -> Self {
        Self { weights, advance, peak: LayerRange::default() }
    }

    /// What the layers compute for `tokens`, and the residual stream after the last.
    pub fn layers(&mut self, decoder: &Decoder, tokens: &[u32]) -> Done<(Activations, Grid)> {
        let mut x = self.embed(decoder, tokens)?;
        let mut range = Activations { tokens: tokens.len(), embedding: x.largest(), layers: vec![] };
        for layer in &decoder.layers {
            self.peak = LayerRange::default();
            let residual = self.layer(layer, &mut x)?;
            range.layers.push(LayerRange { residual, ..std::mem::take(&mut self.peak) });
        }
        Ok((range, x))
    }

    fn embed(&self, decoder: &Decoder, tokens: &[u32]) -> Done<Grid> {
        let table = self.weights.matrix(&decoder.embedding)?;
        let mut x = Grid::zeros(table.cols, tokens.len());
        let mut row = vec![0.0; table.cols];
        for (token, &id) in tokens.iter().enumerate() {
            let id = id as usize;
            if id >= table.rows {
                let what = format!("token {id} of the sample text, of {} tokens", table.rows);
                return Err(CoremlError::refused(what, "check that the tokenizer belongs to the model"));
            }
            table.row_f32(id, &mut row);
            row.iter()
                .enumerate()
                .for_each(|(channel, value)| x.set(channel, token, value * decoder.embedding_scale));
        }
        Ok(x)
    }

    /// Takes the residual stream through a layer; its largest magnitude there.
    fn layer(&mut self, layer: &Layer, x: &mut Grid) -> Done<f32> {
        let Layer {
            mixer_pre_norm,
            mixer: Mixer::Attention(attention),
            mixer_post_norm,
            mlp_pre_norm,
            mlp,
            mlp_post_norm,
            residual_scale,
        } = layer;
        let normed = self.normed("attention_norm", mixer_pre_norm.as_ref(), x)?;
        let mixed = self.attention(attention, &normed)?;
        let between = self.join("o", x, mixed, mixer_post_norm.as_ref(), *residual_scale)?;
        let normed = self.normed("mlp_norm", mlp_pre_norm.as_ref(), x)?;
        let fed = self.mlp(mlp, &normed)?;
        Ok(between.max(self.join("down", x, fed, mlp_post_norm.as_ref(), *residual_scale)?))
    }

    /// `x += scale * post(added)`; the largest magnitude of the sum.
    fn join(
        &mut self,
        label: &'static str,
        x: &mut Grid,
        mut added: Grid,
        post: Option<&Norm>,
        scale: f32,
    ) -> Done<f32> {
        if let Some(norm) = post {
            self.note(label, added.largest());
            self.norm(norm, &mut added)?;
        }
        x.zip(&added, |x, added| x + scale * added);
        Ok(x.largest())
    }

    pub fn norm(&mut self, norm: &Norm, x: &mut Grid) -> Done<()> {
        let Norm { weight, eps, offset } = norm;
        let weight: Vec<f32> = self.vector(weight)?.into_iter().map(|weight| weight + offset).collect();
        x.rms_norm(&weight, *eps);
        Ok(())
    }

    fn normed(&mut self, label: &'static str, norm: Option<&Norm>, x: &Grid) -> Done<Grid> {
        let mut x = x.clone();
        if let Some(norm) = norm {
            self.norm(norm, &mut x)?;
            self.note(label, x.largest());
        }
        Ok(x)
    }

    fn vector(&mut self, weight: &WeightRef) -> Done<Vec<f32>> {
        let values = self.weights.vector(weight)?;
        (self.advance)(values.len());
        Ok(values)
    }

    pub fn project(&mut self, linear: &Linear, x: &Grid) -> Done<Grid> {
        let Linear { weight, bias } = linear;
        let matrix = self.weights.matrix(weight)?;
        let mut y = x.product(&matrix);
        self.weights.release(weight);
        (self.advance)(matrix.rows * matrix.cols);
        if let Some(bias) = bias {
            y.add_bias(&self.vector(bias)?);
        }
        Ok(y)
    }

    fn noted(&mut self, label: &'static str, linear: &Linear, x: &Grid) -> Done<Grid> {
        let y = self.project(linear, x)?;
        self.note(label, y.largest());
        Ok(y)
    }

    fn note(&mut self, at: &'static str, largest: f32) {
        if largest > self.peak.inside {
            self.peak = LayerRange { inside: largest, at: at.into(), ..LayerRange::default() };
        }
    }

    fn attention(&mut self, attention: &Attention, x: &Grid) -> Done<Grid> {
        let Attention { heads, kv_heads, head_dim, q, k, v, o, qk_norm, rope, window, scale, softcap } =
            attention;
        let (heads, kv_heads, width, tokens) = (*heads, *kv_heads, *head_dim, x.tokens);
        let mut queries = self.noted("q", q, x)?;
        let mut keys = self.noted("k", k, x)?;
        let values = self.noted("v", v, x)?;
        if let Some(norms) = qk_norm {
            // A norm runs over as many channels as it has weights.
            let (QkNormOver::Head | QkNormOver::FullWidth) = norms.over;
            self.norm(&norms.q, &mut queries)?;
            self.norm(&norms.k, &mut keys)?;
        }
        if let Some(rope) = rope {
            let factors = rope.factors(tokens);
            for x in [&mut queries, &mut keys] {
                turn(x, width, &factors.inverse_frequencies, factors.attention_factor);
            }
        }
        let window = window.unwrap_or(usize::MAX);
        let of_head = |head: usize| {
            let (from, shared) = (head * width, head / (heads / kv_heads) * width);
            let mut largest = 0.0f32;
            let mut mixed = vec![0.0f32; tokens * width];
            for (token, mixed) in mixed.chunks_mut(width).enumerate() {
                let first = (token + 1).saturating_sub(window);
                let scores: Vec<f32> = (first..=token)
                    .map(|other| {
                        let product = |c| queries.at(from + c, token) * keys.at(shared + c, other);
                        let score = scale * (0..width).map(product).sum::<f32>();
                        largest = largest.max(score.abs());
                        softcap.map_or(score, |cap| cap * (score / cap).tanh())
                    })
                    .collect();
                let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let shares: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
                let sum: f32 = shares.iter().sum();
                for (share, other) in shares.iter().zip(first..) {
                    let of = |c| share / sum * values.at(shared + c, other);
                    mixed.iter_mut().enumerate().for_each(|(c, mixed)| *mixed += of(c));
                }
            }
            (mixed, largest)
        };
        let by_head: Vec<(Vec<f32>, f32)> = (0..heads).into_par_iter().map(of_head).collect();
        let mut mixed = Grid::zeros(heads * width, tokens);
        for (head, (values, largest)) in by_head.into_iter().enumerate() {
            self.note("scores", largest);
            for (at, value) in values.into_iter().enumerate() {
                mixed.set(head * width + at % width, at / width, value);
            }
        }
        self.project(o, &mixed)
    }

    fn mlp(&mut self, mlp: &Mlp, x: &Grid) -> Done<Grid> {
        let Mlp { intermediate: _, gate, up, down, activation } = mlp;
        let mut gated = self.noted("gate", gate, x)?;
        let up = self.noted("up", up, x)?;
        match activation {
            Activation::Silu => gated.map(|x| x / (1.0 + (-x).exp())),
            Activation::GeluTanh => gated.map(|x| {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }),
        }
        gated.zip(&up, |gate, up| gate * up);
        self.note("gated", gated.largest());
        self.project(down, &gated)
    }
}

/// Turns the leading channels of each head of `width` by the token's position.
fn turn(x: &mut Grid, width: usize, frequencies: &[f32], factor: f32) {
    let half = frequencies.len();
    for token in 0..x.tokens {
        for (i, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (token as f32 * frequency).sin_cos();
            for head in (0..x.channels).step_by(width) {
                let (a, b) = (x.at(head + i, token), x.at(head + i + half, token));
                x.set(head + i, token, (a * cos - b * sin) * factor);
                x.set(head + i + half, token, (b * cos + a * sin) * factor);
            }
        }
    }
}
