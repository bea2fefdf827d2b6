//! The form for the GPU: any number of tokens a call, `[1, tokens, width]`, fused attention over the cache in a state.
//!
//! One function serves prefill and decode. It gives the logits of the last token.

use std::collections::BTreeMap;

use tandem_model::decoder::{self, Activation, Decoder, Layer, Linear, Mixer, Norm, QkNormOver};

use super::norm::rms_norm;
use super::plan::{Cache, Heads, LayerPlan, Plan};
use super::store::Store;
use super::turn::turned;
use crate::build::{Builder, Var};
use crate::dtype::DType;
use crate::error::CoremlError;
use crate::mil::{Dim, Function, TensorType};

type Done<T> = Result<T, CoremlError>;

/// Builds the function.
pub(super) fn function(plan: &Plan<'_>, store: &mut Store<'_>) -> Done<Function> {
    let b = Builder::new(plan.options.opset.name());
    let mut lowering = Lowering { plan, store, b, turns: BTreeMap::new(), caches: BTreeMap::new() };
    let ids = lowering.inputs()?;
    lowering.run(&ids)?;
    Ok(lowering.b.finish())
}

struct Lowering<'a, 'b> {
    plan: &'a Plan<'a>,
    store: &'a mut Store<'b>,
    b: Builder,
    /// Cosines and signed sines of each rope, `[1, 1, tokens, head_dim]`.
    turns: BTreeMap<usize, [Var; 2]>,
    caches: BTreeMap<Cache, OpenCache>,
}

/// A cache during a call.
struct OpenCache {
    /// `[2 * layers, kv_heads, slots, head_dim]`, the rows of the layers so far included.
    value: Var,
    /// `[1, 1, rows, slots]`.
    mask: Var,
    /// Slots of the first new row and of the one after the last.
    slots: [Var; 2],
    /// Next of the first dimension.
    next: usize,
}

impl Lowering<'_, '_> {
    /// Inputs of a shape that depends on the number of tokens.
    fn flexible(&mut self, name: &str, dtype: DType, dims: &[Dim]) -> Var {
        let bounds = (1, self.plan.options.context);
        self.b.input(name, TensorType { dtype, dims: dims.to_vec() }, bounds)
    }

    /// All inputs and states; the ids.
    fn inputs(&mut self) -> Done<Var> {
        let Heads { heads, kv_heads, head_dim, .. } = self.plan.heads;
        let one = Dim::Fixed(1);
        let ids = self.flexible("ids", DType::I32, &[one, Dim::ANY]);
        for rope in self.plan.ropes_of(0) {
            let turns = ["cos", "sin"].map(|name| {
                self.flexible(
                    &format!("{name}_{rope}"),
                    DType::F16,
                    &[one, one, Dim::ANY, Dim::Fixed(head_dim)],
                )
            });
            self.turns.insert(rope, turns);
        }
        for (cache, shape) in self.plan.caches(0) {
            let mask = self.flexible(cache.mask(), DType::F16, &[one, one, Dim::ANY, Dim::Fixed(shape[2])]);
            let copies = vec![&mask; heads / kv_heads];
            let mask = self.b.concat(&format!("{}_by_head", cache.mask()), &copies, 2)?;
            let slots = [cache.slot().to_owned(), format!("{}_end", cache.slot())]
                .map(|name| self.b.fixed_input(&name, DType::I32, &[1]));
            let value = self.b.state(cache.name(), TensorType::fixed(DType::F16, &shape));
            self.caches.insert(cache, OpenCache { value, mask, slots, next: 0 });
        }
        Ok(ids)
    }

    fn run(&mut self, ids: &Var) -> Done<()> {
        let Decoder {
            architecture: _,
            vocab_size: _,
            hidden_size,
            max_context: _,
            embedding,
            embedding_scale,
            layers,
            final_norm,
            head,
            logit_scale,
            logit_softcap,
        } = self.plan.decoder;
        let table = self.store.matrix(embedding, None, 0)?;
        let table = self.b.weight("embedding_weight", &table);
        let x = self.b.gather_rows("embedding", &table, ids)?;
        let mut x = self.b.scaled("embedding_scaled", &x, embedding_scale * self.plan.residual)?;
        for (i, layer) in layers.iter().enumerate() {
            self.b.scope(format!("layer_{i}"));
            x = self.layer(layer, self.plan.layers[i], &x)?;
        }
        self.b.scope("head");
        let last = self.b.slice("last_token", &x, &[(0, None), (-1, None), (0, None)])?;
        debug_assert_eq!(last.ty.shape(), Some(vec![1, 1, *hidden_size]));
        let x = self.norm("final_norm", final_norm, &last)?;
        let logits = self.project("logits", head, &x, 1.0)?;
        let logits = self.b.scaled("logits_scaled", &logits, *logit_scale)?;
        let logits = match logit_softcap {
            Some(cap) => self.b.softcap("logits_capped", &logits, *cap)?,
            None => logits,
        };
        self.b.output("logits_0", &logits)
    }

    fn layer(&mut self, layer: &Layer, plan: LayerPlan, x: &Var) -> Done<Var> {
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
        let mixed = self.attention(attention, plan, &normed)?;
        let x = self.join("o", x, (&attention.o, &mixed), mixer_post_norm.as_ref(), *residual_scale)?;
        let normed = self.optional_norm("mlp_norm", mlp_pre_norm.as_ref(), &x)?;
        let gated = self.gated(mlp, &normed)?;
        self.join("down", &x, (&mlp.down, &gated), mlp_post_norm.as_ref(), *residual_scale)
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
                let weight = self.store.norm(norm, &[self.plan.decoder.hidden_size], factor)?;
                let weight = self.b.weight(&format!("{label}_post_norm_weight"), &weight);
                rms_norm(&mut self.b, &format!("{label}_post_norm"), &added, 2, &weight, norm.eps)?
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
        let weight = self.store.norm(norm, &[self.plan.decoder.hidden_size], 1.0)?;
        let weight = self.b.weight(&format!("{label}_weight"), &weight);
        let eps = norm.eps * self.plan.residual * self.plan.residual;
        rms_norm(&mut self.b, label, x, 2, &weight, eps)
    }

    fn optional_norm(&mut self, label: &str, norm: Option<&Norm>, x: &Var) -> Done<Var> {
        norm.map_or_else(|| Ok(x.clone()), |norm| self.norm(label, norm, x))
    }

    /// A projection whose input was multiplied by `factor` already.
    fn project(&mut self, label: &str, linear: &Linear, x: &Var, factor: f32) -> Done<Var> {
        let Linear { weight, bias } = linear;
        let stored = self.store.matrix(weight, None, 0)?;
        let weight = self.b.weight(&format!("{label}_weight"), &stored);
        let bias = match bias {
            Some(bias) => {
                let bias = self.store.vector(bias, &[stored.shape[0]], 0.0, factor)?;
                Some(self.b.weight(&format!("{label}_bias"), &bias))
            }
            None => None,
        };
        self.b.linear(label, x, &weight, bias.as_ref())
    }

    fn attention(&mut self, attention: &decoder::Attention, plan: LayerPlan, x: &Var) -> Done<Var> {
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
            // Refused by the plan: the fused operator has no place for it.
            softcap: _,
        } = attention;
        let Heads { heads, kv_heads, head_dim, .. } = self.plan.heads;
        let norms = qk_norm.as_ref();
        let queries = self.by_head("q", q, x, heads, norms.map(|norms| (&norms.q, norms.over)), plan.rope)?;
        let keys = self.by_head("k", k, x, kv_heads, norms.map(|norms| (&norms.k, norms.over)), plan.rope)?;
        let values = self.by_head("v", v, x, kv_heads, None, None)?;
        let [keys, values] = self.cached(plan.cache, &keys, &values)?;

        let b = &mut self.b;
        // The operator divides by the root of the width itself.
        let queries = b.scaled("q_scaled", &queries, scale * (head_dim as f32).sqrt())?;
        // Query heads that share a key head stand together in its rows.
        let grouped = [Dim::Fixed(1), Dim::Fixed(kv_heads), Dim::ANY, Dim::Fixed(head_dim)];
        let queries = b.reshape("q_grouped", &queries, &grouped)?;
        let mask = &self.caches[&plan.cache].mask;
        let mixed = b.fused_attention("mixed", &queries, &keys, &values, mask)?;
        let by_head = [Dim::Fixed(1), Dim::Fixed(heads), Dim::ANY, Dim::Fixed(head_dim)];
        let mixed = b.reshape("mixed_by_head", &mixed, &by_head)?;
        let mixed = b.transpose("mixed_by_token", &mixed, &[0, 2, 1, 3])?;
        let flat = [Dim::Fixed(1), Dim::ANY, Dim::Fixed(heads * head_dim)];
        b.reshape("mixed_flat", &mixed, &flat)
    }

    /// Writes new rows into the cache; all rows of this layer's keys and values, `[1, kv_heads, slots, head_dim]` each.
    fn cached(&mut self, cache: Cache, keys: &Var, values: &Var) -> Done<[Var; 2]> {
        let b = &mut self.b;
        let open = self.caches.get_mut(&cache).expect("every layer's cache is open");
        let (first, last) = (open.next as i32, open.next as i32 + 2);
        open.next += 2;
        let rows = b.concat("kv_rows", &[keys, values], 0)?;
        let begin = b.index_vector("kv_begin", &[first, 0], &open.slots[0], &[0])?;
        let end = b.index_vector("kv_end", &[last, 0], &open.slots[1], &[0])?;
        let whole = [false, true, false, true];
        let after = b.slice_update("kv_after", &open.value, &rows, [&begin, &end], &whole)?;
        b.write_state(cache.name(), &after);
        open.value = b.read_state(cache.name(), "kv_read", after.ty);
        let row = |b: &mut Builder, label: &str, index: i32| {
            b.slice(label, &open.value, &[(index, Some(index + 1)), (0, None), (0, None), (0, None)])
        };
        Ok([row(b, "k_cached", first)?, row(b, "v_cached", first + 1)?])
    }

    /// A projection by heads, normed and turned: `[1, heads, tokens, head_dim]`.
    fn by_head(
        &mut self,
        label: &str,
        linear: &Linear,
        x: &Var,
        heads: usize,
        norm: Option<(&Norm, QkNormOver)>,
        rope: Option<usize>,
    ) -> Done<Var> {
        let head_dim = self.plan.heads.head_dim;
        let norm_label = format!("{label}_norm");
        let mut y = self.project(label, linear, x, 1.0)?;
        if let Some((norm, QkNormOver::FullWidth)) = norm {
            let weight = self.store.norm(norm, &[heads * head_dim], 1.0)?;
            let weight = self.b.weight(&format!("{norm_label}_weight"), &weight);
            y = rms_norm(&mut self.b, &norm_label, &y, 2, &weight, norm.eps)?;
        }
        let dims = [Dim::Fixed(1), Dim::ANY, Dim::Fixed(heads), Dim::Fixed(head_dim)];
        y = self.b.reshape(&format!("{label}_by_token"), &y, &dims)?;
        y = self.b.transpose(&format!("{label}_by_head"), &y, &[0, 2, 1, 3])?;
        if let Some((norm, QkNormOver::Head)) = norm {
            let weight = self.store.norm(norm, &[head_dim], 1.0)?;
            let weight = self.b.weight(&format!("{norm_label}_weight"), &weight);
            y = rms_norm(&mut self.b, &norm_label, &y, 3, &weight, norm.eps)?;
        }
        let Some(rope) = rope else { return Ok(y) };
        let rotary = self.plan.ropes[rope].rotary_dim;
        turned(&mut self.b, label, &y, 3, [rotary, head_dim], &self.turns[&rope])
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
}
