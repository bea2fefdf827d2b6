//! The form for the Neural Engine: static shapes, `[1, channels, 1, tokens]`, projections as 1x1 convolutions.
//!
//! Attention reads the cache as it was before the call and the new rows beside it, and all new rows are written at the
//! end: one read and one write of each state, however many layers there are. Query heads that share a key head stand
//! together in the rows of one product, so that keys and values are never repeated.

use std::collections::BTreeMap;

use tandem_model::decoder::{self, Activation, Decoder, Layer, Linear, Mixer, Norm, QkNormOver};

use super::norm::rms_norm;
use super::options::KvForm;
use super::plan::{Cache, Heads, LayerPlan, Plan};
use super::store::Store;
use super::turn::turned;
use crate::build::{Builder, Var};
use crate::dtype::DType;
use crate::error::CoremlError;
use crate::mil::{Function, TensorType};

type Done<T> = Result<T, CoremlError>;

/// Which function of a package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Several tokens; of the last layer only keys and values, and no head.
    Prefill,
    /// One token; gives logits.
    Decode,
}

/// Builds one function of package `chunk`.
pub(super) fn function(plan: &Plan<'_>, chunk: usize, role: Role, store: &mut Store<'_>) -> Done<Function> {
    let tokens = match role {
        Role::Prefill => plan.options.prefill,
        Role::Decode => 1,
    };
    let mut b = Builder::new(plan.options.opset.name());
    let hidden = b.fixed_input("hidden", DType::F16, &[1, plan.decoder.hidden_size, 1, tokens]);
    let mut lowering =
        Lowering { plan, chunk, tokens, store, b, turns: BTreeMap::new(), caches: BTreeMap::new() };
    lowering.inputs()?;
    lowering.run(role, hidden)?;
    Ok(lowering.b.finish())
}

struct Lowering<'a, 'b> {
    plan: &'a Plan<'a>,
    chunk: usize,
    tokens: usize,
    store: &'a mut Store<'b>,
    b: Builder,
    /// Cosines and signed sines of each rope, `[1, 1, head_dim, tokens]`.
    turns: BTreeMap<usize, [Var; 2]>,
    caches: BTreeMap<Cache, OpenCache>,
}

/// A cache during a call.
struct OpenCache {
    /// `[2 * layers, kv_heads, slots, width]`.
    before: Var,
    /// `[1, 1, rows, slots + tokens]`.
    mask: Var,
    /// Keys and values of the layers so far, `[1, kv_heads, tokens, width]` each.
    rows: Vec<Var>,
}

impl Lowering<'_, '_> {
    fn inputs(&mut self) -> Done<()> {
        let Heads { heads, kv_heads, head_dim, .. } = self.plan.heads;
        let tokens = self.tokens;
        for rope in self.plan.ropes_of(self.chunk) {
            let turn = |name: &str, b: &mut Builder| {
                let input = b.fixed_input(&format!("{name}_{rope}"), DType::F16, &[1, head_dim, 1, tokens]);
                b.reshape_fixed(&format!("{name}_{rope}_by_head"), &input, &[1, 1, head_dim, tokens])
            };
            let turns = [turn("cos", &mut self.b)?, turn("sin", &mut self.b)?];
            self.turns.insert(rope, turns);
        }
        for (cache, shape) in self.plan.caches(self.chunk) {
            let mask = self.b.fixed_input(cache.mask(), DType::F16, &[1, 1, tokens, shape[2] + tokens]);
            // The rows of the scores are those of all query heads of a key head.
            let copies = if tokens == 1 { 1 } else { heads / kv_heads };
            let mask = self.b.concat(&format!("{}_by_head", cache.mask()), &vec![&mask; copies], 2)?;
            let before = match self.plan.options.kv {
                KvForm::State => self.b.state(cache.name(), TensorType::fixed(DType::F16, &shape)),
                KvForm::Io => self.b.fixed_input(cache.name(), DType::F16, &shape),
            };
            self.caches.insert(cache, OpenCache { before, mask, rows: vec![] });
        }
        Ok(())
    }

    fn run(&mut self, role: Role, mut x: Var) -> Done<()> {
        let Decoder {
            architecture: _,
            vocab_size: _,
            hidden_size: _,
            max_context: _,
            // The lookup and its factor are outside the graph.
            embedding: _,
            embedding_scale: _,
            layers,
            final_norm,
            head,
            logit_scale,
            logit_softcap,
        } = self.plan.decoder;
        let range = self.plan.chunks[self.chunk].clone();
        let is_last = range.end == layers.len();
        for i in range.clone() {
            self.b.scope(format!("layer_{i}"));
            let only_rows = role == Role::Prefill && i + 1 == layers.len();
            match self.layer(&layers[i], self.plan.layers[i], &x, only_rows)? {
                Some(next) => x = next,
                None => break,
            }
        }
        self.b.scope("");
        match (role, is_last) {
            (_, false) => self.b.output("hidden_out", &x)?,
            (Role::Decode, true) => {
                let x = self.norm("final_norm", final_norm, &x)?;
                self.head(head, &x, *logit_scale, *logit_softcap)?;
            }
            (Role::Prefill, true) => {}
        }
        self.close_caches(role == Role::Prefill && is_last)
    }

    /// The residual stream after a layer, or `None` if only its keys and values were wanted.
    fn layer(&mut self, layer: &Layer, plan: LayerPlan, x: &Var, only_rows: bool) -> Done<Option<Var>> {
        let Layer {
            mixer_pre_norm,
            mixer: Mixer::Attention(attention),
            mixer_post_norm,
            mlp_pre_norm,
            mlp,
            mlp_post_norm,
            residual_scale,
        } = layer;
        let normed = self.optional_norm("attention_norm", mixer_pre_norm.as_ref(), x)?;
        let Some(mixed) = self.attention(attention, plan, &normed, only_rows)? else { return Ok(None) };
        let x = self.join("o", x, (&attention.o, &mixed), mixer_post_norm.as_ref(), *residual_scale)?;
        let normed = self.optional_norm("mlp_norm", mlp_pre_norm.as_ref(), &x)?;
        let gated = self.gated(mlp, &normed)?;
        self.join("down", &x, (&mlp.down, &gated), mlp_post_norm.as_ref(), *residual_scale).map(Some)
    }

    /// `x + factor * post(linear(input))`.
    fn join(
        &mut self,
        label: &str,
        x: &Var,
        (linear, input): (&Linear, &Var),
        post: Option<&Norm>,
        scale: f32,
    ) -> Done<Var> {
        let factor = scale * self.plan.residual;
        let added = match post {
            Some(norm) => {
                let added = self.project(label, linear, input, 1.0)?;
                let width = self.plan.decoder.hidden_size;
                let weight = self.store.norm(norm, &[1, width, 1, 1], factor)?;
                let weight = self.b.weight(&format!("{label}_post_norm_weight"), &weight);
                rms_norm(&mut self.b, &format!("{label}_post_norm"), &added, 1, &weight, norm.eps)?
            }
            // Before the product: what comes out may be more than fp16 holds.
            None => {
                let input = self.b.scaled(&format!("{label}_scaled"), input, factor)?;
                self.project(label, linear, &input, factor)?
            }
        };
        self.b.add(&format!("{label}_residual"), x, &added)
    }

    /// A norm of the residual stream, whose factor it takes out.
    fn norm(&mut self, label: &str, norm: &Norm, x: &Var) -> Done<Var> {
        let weight = self.store.norm(norm, &[1, self.plan.decoder.hidden_size, 1, 1], 1.0)?;
        let weight = self.b.weight(&format!("{label}_weight"), &weight);
        let eps = norm.eps * self.plan.residual * self.plan.residual;
        rms_norm(&mut self.b, label, x, 1, &weight, eps)
    }

    fn optional_norm(&mut self, label: &str, norm: Option<&Norm>, x: &Var) -> Done<Var> {
        norm.map_or_else(|| Ok(x.clone()), |norm| self.norm(label, norm, x))
    }

    /// A projection whose input was multiplied by `factor` already.
    fn project(&mut self, label: &str, linear: &Linear, x: &Var, factor: f32) -> Done<Var> {
        let Linear { weight, bias } = linear;
        let stored = self.store.matrix(weight, None, 2)?;
        let weight = self.b.weight(&format!("{label}_weight"), &stored);
        let bias = match bias {
            Some(bias) => {
                let bias = self.store.vector(bias, &[stored.shape[0]], 0.0, factor)?;
                Some(self.b.weight(&format!("{label}_bias"), &bias))
            }
            None => None,
        };
        self.b.conv(label, x, &weight, bias.as_ref())
    }

    fn attention(
        &mut self,
        attention: &decoder::Attention,
        plan: LayerPlan,
        x: &Var,
        only_rows: bool,
    ) -> Done<Option<Var>> {
        let decoder::Attention {
            heads: _,
            kv_heads: _,
            head_dim: _,
            q,
            k,
            v,
            o: _,
            qk_norm,
            rope: _,
            window: _,
            scale,
            softcap,
        } = attention;
        let Heads { heads, kv_heads, head_dim, width } = self.plan.heads;
        let tokens = self.tokens;
        let norms = qk_norm.as_ref();
        let keys = self.by_head("k", k, x, kv_heads, norms.map(|norms| (&norms.k, norms.over)), plan.rope)?;
        let keys = self.as_rows("k", &keys)?;
        let values = self.by_head("v", v, x, kv_heads, None, None)?;
        let values = self.as_rows("v", &values)?;
        let cache = self.caches.get_mut(&plan.cache).expect("every layer's cache is open");
        let at = cache.rows.len() as i32;
        cache.rows.extend([keys.clone(), values.clone()]);
        if only_rows {
            return Ok(None);
        }
        let (before, mask) = (cache.before.clone(), cache.mask.clone());
        let slots = self.plan.slots(plan.cache);

        let queries = self.by_head("q", q, x, heads, norms.map(|norms| (&norms.q, norms.over)), plan.rope)?;
        let queries = self.b.scaled("q_scaled", &queries, *scale)?;
        let queries = self.as_rows("q", &queries)?;
        let rows = heads / kv_heads * tokens;
        let queries = self.b.reshape_fixed("q_grouped", &queries, &[1, kv_heads, rows, width])?;

        let b = &mut self.b;
        let cached = |b: &mut Builder, label: &str, index: i32| {
            b.slice(label, &before, &[(index, Some(index + 1)), (0, None), (0, None), (0, None)])
        };
        let (old_keys, old_values) = (cached(b, "k_cached", at)?, cached(b, "v_cached", at + 1)?);
        let mut scores = [
            b.matmul("scores_cached", &queries, &old_keys, true)?,
            b.matmul("scores_new", &queries, &keys, true)?,
        ];
        if let Some(cap) = softcap {
            for scores in &mut scores {
                *scores = b.softcap("scores_capped", scores, *cap)?;
            }
        }
        let scores = b.concat("scores", &[&scores[0], &scores[1]], 3)?;
        let scores = b.add("scores_masked", &scores, &mask)?;
        let shares = b.softmax("shares", &scores);
        let shares = b.split("shares_parts", &shares, 3, &[slots, tokens])?;
        let old = b.matmul("mixed_cached", &shares[0], &old_values, false)?;
        let new = b.matmul("mixed_new", &shares[1], &values, false)?;
        let mut mixed = b.add("mixed", &old, &new)?;
        if width > head_dim {
            mixed = b.slice(
                "mixed_unpadded",
                &mixed,
                &[(0, None), (0, None), (0, None), (0, Some(head_dim as i32))],
            )?;
        }
        let mixed = b.reshape_fixed("mixed_by_head", &mixed, &[1, heads, tokens, head_dim])?;
        let mixed = b.transpose("mixed_channels", &mixed, &[0, 1, 3, 2])?;
        b.reshape_fixed("mixed_flat", &mixed, &[1, heads * head_dim, 1, tokens]).map(Some)
    }

    /// A projection by heads, normed and turned: `[1, heads, head_dim, tokens]`.
    fn by_head(
        &mut self,
        label: &str,
        linear: &Linear,
        x: &Var,
        heads: usize,
        norm: Option<(&Norm, QkNormOver)>,
        rope: Option<usize>,
    ) -> Done<Var> {
        let (head_dim, tokens) = (self.plan.heads.head_dim, self.tokens);
        let norm_label = format!("{label}_norm");
        let mut y = self.project(label, linear, x, 1.0)?;
        if let Some((norm, QkNormOver::FullWidth)) = norm {
            let weight = self.store.norm(norm, &[1, heads * head_dim, 1, 1], 1.0)?;
            let weight = self.b.weight(&format!("{norm_label}_weight"), &weight);
            y = rms_norm(&mut self.b, &norm_label, &y, 1, &weight, norm.eps)?;
        }
        y = self.b.reshape_fixed(&format!("{label}_by_head"), &y, &[1, heads, head_dim, tokens])?;
        if let Some((norm, QkNormOver::Head)) = norm {
            let weight = self.store.norm(norm, &[1, 1, head_dim, 1], 1.0)?;
            let weight = self.b.weight(&format!("{norm_label}_weight"), &weight);
            y = rms_norm(&mut self.b, &norm_label, &y, 2, &weight, norm.eps)?;
        }
        let Some(rope) = rope else { return Ok(y) };
        let rotary = self.plan.ropes[rope].rotary_dim;
        turned(&mut self.b, label, &y, 2, [rotary, head_dim], &self.turns[&rope])
    }

    /// `[1, heads, head_dim, tokens]` as rows of the cache's width: `[1, heads, tokens, width]`.
    fn as_rows(&mut self, label: &str, heads: &Var) -> Done<Var> {
        let rows = self.b.transpose(&format!("{label}_rows"), heads, &[0, 1, 3, 2])?;
        self.b.pad_last(&format!("{label}_padded"), &rows, self.plan.heads.width)
    }

    /// What goes into the MLP's last projection.
    fn gated(&mut self, mlp: &decoder::Mlp, x: &Var) -> Done<Var> {
        let decoder::Mlp { intermediate: _, gate, up, down: _, activation } = mlp;
        let gate = self.project("gate", gate, x, 1.0)?;
        let up = self.project("up", up, x, 1.0)?;
        let gate = match activation {
            Activation::Silu => self.b.silu("gate_silu", &gate),
            Activation::GeluTanh => self.b.gelu_tanh("gate_gelu", &gate),
        };
        self.b.mul("gated", &gate, &up)
    }

    fn head(&mut self, head: &Linear, x: &Var, scale: f32, softcap: Option<f32>) -> Done<()> {
        let Linear { weight, bias } = head;
        for (i, part) in self.plan.head_parts.iter().enumerate() {
            self.b.scope(format!("head_{i}"));
            let rows = part.len();
            let stored = self.store.matrix(weight, Some(part.clone()), 2)?;
            let stored = self.b.weight("weight", &stored);
            let bias = match bias {
                Some(bias) => {
                    let first = bias.rows.as_ref().map_or(0, |rows| rows.start);
                    let some = decoder::WeightRef {
                        rows: Some(first + part.start..first + part.end),
                        ..bias.clone()
                    };
                    let bias = self.store.vector(&some, &[rows], 0.0, 1.0)?;
                    Some(self.b.weight("bias", &bias))
                }
                None => None,
            };
            let b = &mut self.b;
            let logits = b.conv("logits", x, &stored, bias.as_ref())?;
            let logits = b.scaled("logits_scaled", &logits, scale)?;
            let logits =
                softcap.map_or(Ok(logits.clone()), |cap| b.softcap("logits_capped", &logits, cap))?;
            let logits = b.reshape_fixed("logits_row", &logits, &[1, 1, 1, rows])?;
            self.b.output(&format!("logits_{i}"), &logits)?;
        }
        self.b.scope("");
        Ok(())
    }

    /// Writes the new rows, or gives them to the caller. A function must give something: where it would not, a row of
    /// keys.
    fn close_caches(&mut self, needs_output: bool) -> Done<()> {
        let mut some_row = None;
        for (cache, OpenCache { before, rows, .. }) in std::mem::take(&mut self.caches) {
            let b = &mut self.b;
            let name = cache.name();
            let new = b.concat(&format!("{name}_new_rows"), &rows.iter().collect::<Vec<_>>(), 0)?;
            if self.plan.options.kv == KvForm::Io {
                b.output(&format!("{name}_new"), &new)?;
                continue;
            }
            // Whole, as the caller gives them: arithmetic of integers would leave the engine.
            let [begin, end] = [cache.slot().to_owned(), format!("{}_end", cache.slot())]
                .map(|name| b.fixed_input(&name, DType::I32, &[4]));
            let whole = [true, true, false, true];
            let after = b.slice_update(&format!("{name}_after"), &before, &new, [&begin, &end], &whole)?;
            b.write_state(name, &after);
            some_row = rows.into_iter().next_back();
        }
        match some_row {
            Some(row) if needs_output => {
                let first = (0, Some(1));
                let row = self.b.slice("written_row", &row, &[first, first, first, (0, None)])?;
                self.b.output("written", &row)
            }
            _ => Ok(()),
        }
    }
}
