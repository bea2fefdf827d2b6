//! One step as a lazy graph: a ragged batch of tokens through the layers.
//!
//! The tokens of all rows lie one after the other in one matrix, `[tokens, hidden]`: norms and products see them
//! together. Rope and attention go row by row, since each has keys of its own; rows of one token each turn together.

use std::ops::Range;
use std::rc::Rc;

use tandem_model::decoder::{Activation, QkNormOver};

use crate::array::{Array, Dtype, Result};
use crate::kernels::Kernels;
use crate::kernels::attention::{Decode, Heads, NewToken};
use crate::kernels::product::After;
use crate::kv::Kv;
use crate::lower::{Attention, Input, Layer, Mlp, Model, Norm, Projection};
use crate::turns::{Turn, Turns};

/// One sequence's part of a step.
pub(crate) struct Part {
    /// New tokens.
    pub count: usize,
    /// How many it had before.
    pub position: usize,
    /// Its own buffers, with room for the new tokens.
    pub kv: Kv,
    pub turns: Rc<Turns>,
    /// For how many of the last new tokens logits are wanted.
    pub logits: usize,
}

/// What a device does beyond MLX's plain operations.
#[derive(Clone, Copy)]
pub(crate) struct How<'a> {
    /// Whether MLX may compile small operations into one.
    pub fuse: bool,
    pub kernels: &'a Kernels,
}

/// A step's graph.
pub(crate) struct Forward {
    /// The wanted ones, `[wanted, vocab]`.
    pub logits: Option<Array>,
    /// With this, all keys and values are written.
    pub last: Array,
}

/// Builds the graph that writes the new tokens' keys and values and computes the wanted logits.
pub(crate) fn run(model: &Model, parts: &mut [Part], ids: &Array, how: How<'_>) -> Result<Forward> {
    let mut step = Step::new(parts, how)?;
    let mut x = model.embedding.rows(ids)?;
    if model.embedding_scale != 1.0 {
        x = x.scale(model.embedding_scale)?;
    }
    let mut last = x.clone();
    for (i, layer) in model.layers.iter().enumerate() {
        let mut attended = step.attend(i, layer, &x, parts)?;
        if i + 1 == model.layers.len() {
            last = attended.clone();
            // Nothing after this mixes tokens: go on with the wanted ones.
            let Some(wanted) = step.wanted.take() else { return Ok(Forward { logits: None, last }) };
            (x, attended) = (wanted.of(&x)?, wanted.of(&attended)?);
            step.tokens = wanted.count;
        }
        x = step.finish(layer, &x, &attended)?;
    }
    let mut logits = step.input(&x, Some(&model.final_norm)).times(&model.head, model.vocab, model.hidden)?;
    if let Some(bias) = &model.head_bias {
        logits = logits.add(bias)?;
    }
    if model.logit_scale != 1.0 {
        logits = logits.scale(model.logit_scale)?;
    }
    if let Some(cap) = model.logit_softcap {
        logits = logits.softcap(cap)?;
    }
    Ok(Forward { logits: Some(logits), last })
}

/// Lines of a step's matrices that go on after the last attention.
struct Wanted {
    count: usize,
    /// `None` for all.
    lines: Option<Array>,
}

impl Wanted {
    fn of(&self, x: &Array) -> Result<Array> {
        self.lines.as_ref().map_or_else(|| Ok(x.clone()), |lines| x.take(lines))
    }
}

/// What all layers need to know of a step.
struct Step<'a> {
    how: How<'a>,
    tokens: usize,
    /// Each part's lines.
    lines: Vec<Range<usize>>,
    wanted: Option<Wanted>,
    /// Whether each part is one token and all turn alike.
    decode: bool,
    /// The parts' positions, if that is so and there are several.
    together: Option<Array>,
    /// By part and window (0 for none), where a mask is needed.
    masks: Vec<(usize, usize, Array)>,
}

impl<'a> Step<'a> {
    fn new(parts: &[Part], how: How<'a>) -> Result<Self> {
        let (mut tokens, mut lines, mut wanted) = (0, Vec::with_capacity(parts.len()), Vec::new());
        for part in parts {
            let end = tokens + part.count;
            wanted.extend((end - part.logits..end).map(|line| line as u32));
            lines.push(tokens..end);
            tokens = end;
        }
        let alike = parts.iter().all(|part| part.count == 1 && Rc::ptr_eq(&part.turns, &parts[0].turns));
        let together = if alike && parts.len() > 1 {
            let positions: Vec<u32> = parts.iter().map(|part| part.position as u32).collect();
            Some(Array::from_u32(&positions)?.as_type(Dtype::I32)?)
        } else {
            None
        };
        let wanted = match wanted.len() {
            0 => None,
            count if count == tokens => Some(Wanted { count, lines: None }),
            count => Some(Wanted { count, lines: Some(Array::from_u32(&wanted)?) }),
        };
        Ok(Self { how, tokens, lines, wanted, decode: alike, together, masks: Vec::new() })
    }

    fn input<'b>(&'b self, x: &'b Array, norm: Option<&'b Norm>) -> Input<'b> {
        Input { kernels: self.how.kernels, x, rows: self.tokens, norm }
    }

    /// Keys and values into the parts' buffers; attention's output, `[tokens, heads * head_dim]`.
    fn attend(&mut self, index: usize, layer: &Layer, x: &Array, parts: &mut [Part]) -> Result<Array> {
        let attention = &layer.attention;
        let Attention { heads, kv_heads, head_dim, qkv, qk_norm, rope, .. } = attention;
        let stacks = qkv.stacked(&self.input(x, layer.mixer_pre_norm.as_ref()))?;
        if let [whole] = stacks.as_slice()
            && let Some(attended) = self.decode(index, attention, whole, parts)?
        {
            return Ok(attended);
        }
        let [mut q, mut k, v] = qkv
            .split(stacks, self.tokens)?
            .try_into()
            .map_err(|_| tandem_engine::EngineError::Model("attention takes three projections".into()))?;
        let by_head = |x: &Array, heads: usize| x.reshape([self.tokens, heads, *head_dim]);
        if let Some(norms) = qk_norm.as_ref().filter(|norms| norms.over == QkNormOver::FullWidth) {
            (q, k) = (Norm::of(Some(&norms.q), &q)?, Norm::of(Some(&norms.k), &k)?);
        }
        let (mut q, mut k, v) = (by_head(&q, *heads)?, by_head(&k, *kv_heads)?, by_head(&v, *kv_heads)?);
        if let Some(norms) = qk_norm.as_ref().filter(|norms| norms.over == QkNormOver::Head) {
            (q, k) = (Norm::of(Some(&norms.q), &q)?, Norm::of(Some(&norms.k), &k)?);
        }
        // Rows of one token each turn here, others one by one below.
        if let (Some(positions), Some(rope)) = (&self.together, rope) {
            let turn = &parts[0].turns.ropes[*rope];
            let turned = |x: &Array, heads: usize| {
                let x = factored(turn, x)?.reshape([self.tokens, heads, 1, *head_dim])?;
                x.rope_each(turn.dims, &turn.wavelengths, positions)?.reshape([self.tokens, heads, *head_dim])
            };
            (q, k) = (turned(&q, *heads)?, turned(&k, *kv_heads)?);
        }
        let mut outputs = Vec::with_capacity(parts.len());
        for (at, part) in parts.iter_mut().enumerate() {
            let mut own = [
                self.lines_of(at, &q, *heads, *head_dim)?,
                self.lines_of(at, &k, *kv_heads, *head_dim)?,
                self.lines_of(at, &v, *kv_heads, *head_dim)?,
            ];
            if let (None, Some(rope)) = (&self.together, rope) {
                let turn = &part.turns.ropes[*rope];
                for x in &mut own[..2] {
                    *x = factored(turn, x)?.rope(turn.dims, &turn.wavelengths, part.position)?;
                }
            }
            let [q, k, v] = own;
            part.write(index, *kv_heads, *head_dim, &k, &v)?;
            let attended = self.attend_part(at, index, attention, &q, part)?;
            let in_order = if part.count == 1 { attended } else { attended.transpose([0, 2, 1, 3])? };
            outputs.push(in_order.reshape([part.count, heads * head_dim])?);
        }
        match outputs.as_slice() {
            [one] => Ok(one.clone()),
            _ => Array::concatenate(&outputs, 0),
        }
    }

    /// [`Step::attend`] in one kernel, for queries, keys and values in one matrix.
    fn decode(
        &self,
        index: usize,
        attention: &Attention,
        qkv: &Array,
        parts: &[Part],
    ) -> Result<Option<Array>> {
        let Attention {
            heads,
            kv_heads,
            head_dim,
            qk_norm: None,
            rope: Some(rope),
            window,
            scale,
            softcap: None,
            ..
        } = attention
        else {
            return Ok(None);
        };
        if !self.decode {
            return Ok(None);
        }
        let first = |part: &Part| window.map_or(0, |window| (part.position + 1).saturating_sub(window));
        let rows: Vec<NewToken<'_>> = parts
            .iter()
            .map(|part| NewToken { kv: &part.kv, first: first(part), position: part.position })
            .collect();
        self.how.kernels.attention(&Decode {
            qkv,
            heads: Heads { heads: *heads, kv_heads: *kv_heads, dim: *head_dim },
            scale: *scale,
            turn: &parts[0].turns.ropes[*rope],
            layer: index,
            rows: &rows,
        })
    }

    /// A part's lines of `[tokens, heads, head_dim]` as `[1, heads, count, head_dim]`.
    fn lines_of(&self, at: usize, x: &Array, heads: usize, head_dim: usize) -> Result<Array> {
        let lines = self.lines[at].clone();
        let own = if self.lines.len() == 1 {
            x.clone()
        } else {
            x.slice([lines.start, 0, 0], [lines.end, heads, head_dim])?
        };
        if lines.len() == 1 {
            own.reshape([1, heads, 1, head_dim])
        } else {
            own.reshape([1, lines.len(), heads, head_dim])?.transpose([0, 2, 1, 3])
        }
    }

    fn attend_part(
        &mut self,
        at: usize,
        index: usize,
        attention: &Attention,
        q: &Array,
        part: &Part,
    ) -> Result<Array> {
        let Attention { kv_heads, head_dim, window, scale, softcap, .. } = attention;
        let end = part.position + part.count;
        // The first key that the first query sees.
        let first = window.map_or(0, |window| (part.position + 1).saturating_sub(window));
        let (k, v) = &part.kv.layers[index];
        let [k, v] = [k, v].map(|x| x.slice([0, 0, first, 0], [1, *kv_heads, end, *head_dim]));
        let (k, v) = (k?, v?);
        let hides_more = window.is_some_and(|window| end - first > window);
        if let Some(cap) = softcap {
            let mask = self.mask(at, window.unwrap_or(end), part.position, part.count, first, end - first)?;
            return q.attention_capped(&k, &v, *scale, *cap, &mask);
        }
        match window {
            Some(window) if hides_more => {
                let mask = self.mask(at, *window, part.position, part.count, first, end - first)?;
                q.attention_masked(&k, &v, *scale, &mask)
            }
            _ => q.attention(&k, &v, *scale, part.count > 1),
        }
    }

    fn mask(
        &mut self,
        at: usize,
        window: usize,
        position: usize,
        count: usize,
        first: usize,
        keys: usize,
    ) -> Result<Array> {
        if let Some((.., mask)) = self.masks.iter().find(|(part, of, _)| (*part, *of) == (at, window)) {
            return Ok(mask.clone());
        }
        let mask = Array::window_mask(position, count, first, keys, window)?;
        self.masks.push((at, window, mask.clone()));
        Ok(mask)
    }

    /// A layer after its attention: output projection and MLP, each added to the residual stream.
    fn finish(&self, layer: &Layer, x: &Array, attended: &Array) -> Result<Array> {
        let x = self.added(layer, x, &layer.attention.o, attended, layer.mixer_post_norm.as_ref())?;
        let Mlp { gate_up, down, activation } = &layer.mlp;
        let input = self.input(&x, layer.mlp_pre_norm.as_ref());
        let gated = match gate_up.whole(&input, After::Gate(*activation))? {
            Some(gated) => gated,
            None => {
                let [gate, up] = gate_up.apply(&input)?.try_into().map_err(|_| {
                    tandem_engine::EngineError::Model("a gated MLP takes two projections".into())
                })?;
                match activation {
                    Activation::Silu => gate.gate_silu(&up, self.how.fuse)?,
                    Activation::GeluTanh => gate.gate_gelu(&up, self.how.fuse)?,
                }
            }
        };
        self.added(layer, &x, down, &gated, layer.mlp_post_norm.as_ref())
    }

    /// `x + m * post(projection(input))`.
    fn added(
        &self,
        layer: &Layer,
        x: &Array,
        projection: &Projection,
        input: &Array,
        post: Option<&Norm>,
    ) -> Result<Array> {
        let input = self.input(input, None);
        let plain = post.is_none() && layer.residual_scale == 1.0;
        if plain && let Some(sum) = projection.whole(&input, After::Add(x))? {
            return Ok(sum);
        }
        let mut output = Norm::of(post, &projection.apply_one(&input)?)?;
        if layer.residual_scale != 1.0 {
            output = output.scale(layer.residual_scale)?;
        }
        x.add(&output)
    }
}

fn factored(turn: &Turn, x: &Array) -> Result<Array> {
    turn.factor.as_ref().map_or_else(|| Ok(x.clone()), |factor| x.multiply(factor))
}

impl Part {
    /// New keys and values `[1, kv heads, count, head_dim]` behind those that are there.
    fn write(&mut self, index: usize, kv_heads: usize, head_dim: usize, k: &Array, v: &Array) -> Result<()> {
        let (start, stop) = ([0, 0, self.position, 0], [1, kv_heads, self.position + self.count, head_dim]);
        let (keys, values) = &mut self.kv.layers[index];
        *keys = keys.slice_update(k, start, stop)?;
        *values = values.slice_update(v, start, stop)?;
        Ok(())
    }
}
