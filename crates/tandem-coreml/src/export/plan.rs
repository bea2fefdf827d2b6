//! What will be exported: caches, ropes, chunks and parts of the head, and what cannot be exported yet, by name.

use std::ops::Range;

use tandem_model::decoder::{Attention, Decoder, Layer, Mixer, Rope};

use super::options::{ExportOptions, Target};
use crate::error::CoremlError;
use crate::trace::{Activations, LayerRange};

/// Longest axis on engines of the M1 to M3 generations; later ones take four times as much.
const LONGEST_AXIS: usize = 16_384;
/// Rows of a cache are padded to a multiple of this: states of another width do not run on the engine.
const STATE_WIDTH: usize = 32;
/// Packages above this size are split.
const LARGEST_PACKAGE: usize = 1 << 30;
/// The largest number that fp16 holds.
const LARGEST_HALF: f32 = 65_504.0;
/// How many times what the sample text needs a residual stream has room for.
const ROOM: f32 = 4.0;
/// Factor of residual streams that were not traced and may grow beyond fp16 on real weights (Gemma's).
const UNTRACED_FACTOR: f32 = 1.0 / 32.0;

/// A decoder with the decisions that its export needs.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub decoder: &'a Decoder,
    pub options: &'a ExportOptions,
    pub heads: Heads,
    /// Distinct ropes.
    pub ropes: Vec<Rope>,
    pub layers: Vec<LayerPlan>,
    /// The window of windowed layers, and the slots of their ring.
    pub ring: Option<Ring>,
    /// Layers of each package.
    pub chunks: Vec<Range<usize>>,
    /// Rows of each part of the head.
    pub head_parts: Vec<Range<usize>>,
    /// What the residual stream is multiplied by: a power of two, which costs no precision.
    pub residual: f32,
}

/// Shape of the attention, the same in all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Values of a row of the cache.
    pub width: usize,
}

/// What a layer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LayerPlan {
    pub cache: Cache,
    /// Index into the plan's ropes.
    pub rope: Option<usize>,
}

/// Which cache a layer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cache {
    /// One slot for each position.
    Full,
    /// A ring of slots for the last positions.
    Ring,
}

impl Cache {
    /// Name of the state, or of the input and the output that stand in for it.
    pub fn name(self) -> &'static str {
        match self {
            Cache::Full => "kv",
            Cache::Ring => "kv_window",
        }
    }

    /// Name of the input that says which slots are seen.
    pub fn mask(self) -> &'static str {
        match self {
            Cache::Full => "mask",
            Cache::Ring => "mask_window",
        }
    }

    /// Name of the input that says which slot the first new row goes to.
    pub fn slot(self) -> &'static str {
        match self {
            Cache::Full => "slot",
            Cache::Ring => "slot_window",
        }
    }
}

/// The cache of windowed layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ring {
    pub window: usize,
    pub slots: usize,
}

impl<'a> Plan<'a> {
    /// # Errors
    /// [`CoremlError::Refused`] for what cannot be exported.
    pub fn new(decoder: &'a Decoder, options: &'a ExportOptions) -> Result<Self, CoremlError> {
        options.check()?;
        let refuse = |what: String, hint: &str| Err(CoremlError::refused(what, hint));
        let handles = decoder.max_context;
        if options.context > handles {
            return refuse(
                format!(
                    "a context of {} tokens is more than the {handles} this model handles",
                    options.context
                ),
                "choose a smaller --context",
            );
        }
        let attention = |layer: &'a Layer| -> &'a Attention {
            let Mixer::Attention(attention) = &layer.mixer;
            attention
        };
        let shape = |attention: &Attention| Heads {
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            width: match options.target {
                Target::Ane => attention.head_dim.next_multiple_of(STATE_WIDTH),
                Target::Gpu => attention.head_dim,
            },
        };
        let Some(first) = decoder.layers.first() else {
            return refuse("a model without layers".into(), "check num_hidden_layers");
        };
        let heads = shape(attention(first));
        let mut ropes = Vec::new();
        let mut ring: Option<Ring> = None;
        let mut layers = Vec::new();
        for (i, layer) in decoder.layers.iter().enumerate() {
            let attention = attention(layer);
            if shape(attention) != heads {
                return refuse(
                    format!("layers with different heads (layer {i}) cannot be exported yet"),
                    "run this model with another engine",
                );
            }
            let rope = attention.rope.as_ref().map(|rope| {
                ropes.iter().position(|known| known == rope).unwrap_or_else(|| {
                    ropes.push(rope.clone());
                    ropes.len() - 1
                })
            });
            // A window that is never left is none.
            let window = attention.window.filter(|window| *window < options.context);
            if attention.softcap.is_some() && options.target == Target::Gpu {
                return refuse(
                    format!(
                        "capped attention scores (layer {i}) for the GPU: the fused operator has no place for them"
                    ),
                    "use --for ane",
                );
            }
            let cache = match window {
                None => Cache::Full,
                Some(window) if ring.is_none_or(|ring| ring.window == window) => {
                    ring = Some(Ring { window, slots: ring_slots(window, options) });
                    Cache::Ring
                }
                Some(window) => {
                    return refuse(
                        format!(
                            "windows of different lengths ({window} in layer {i}) cannot be exported yet"
                        ),
                        "run this model with another engine",
                    );
                }
            };
            layers.push(LayerPlan { cache, rope });
        }
        let parts = match (options.head_parts, options.target) {
            (Some(parts), _) => parts.min(decoder.vocab_size),
            (None, Target::Ane) => decoder.vocab_size.div_ceil(LONGEST_AXIS),
            (None, Target::Gpu) => 1,
        };
        Ok(Self {
            decoder,
            options,
            heads,
            ropes,
            layers,
            ring,
            chunks: chunks(decoder, options)?,
            head_parts: even(decoder.vocab_size, parts),
            residual: untraced_factor(decoder),
        })
    }

    /// Chooses the residual stream's factor by what the activations were on real text.
    ///
    /// # Errors
    /// [`CoremlError::Refused`] where fp16 cannot hold what a layer computes.
    pub fn fit(&mut self, activations: &Activations) -> Result<(), CoremlError> {
        for (i, LayerRange { inside, at, .. }) in activations.layers.iter().enumerate() {
            if *inside > LARGEST_HALF {
                return Err(CoremlError::refused(
                    format!(
                        "layer {i} computes {inside:.3e} ({at}) for plain English text, and fp16 holds up to {LARGEST_HALF}"
                    ),
                    "run this model with another engine, or export it as it is with --no-trace",
                ));
            }
        }
        let largest = activations.residual();
        if !largest.is_finite() {
            return Err(CoremlError::refused(
                "this model's values are not finite for plain English text",
                "check the checkpoint, or export it as it is with --no-trace",
            ));
        }
        self.residual = traced_factor(largest);
        Ok(())
    }

    /// Slots of a cache.
    pub fn slots(&self, cache: Cache) -> usize {
        match (cache, self.ring) {
            (Cache::Ring, Some(ring)) => ring.slots,
            _ => self.options.context,
        }
    }

    /// Layers of `chunk` that read `cache`.
    pub fn cached(&self, chunk: usize, cache: Cache) -> usize {
        self.layers[self.chunks[chunk].clone()].iter().filter(|layer| layer.cache == cache).count()
    }

    /// The caches of `chunk`, with the shape of each: keys and values of its layers in turn.
    pub fn caches(&self, chunk: usize) -> Vec<(Cache, [usize; 4])> {
        let Heads { kv_heads, width, .. } = self.heads;
        [Cache::Full, Cache::Ring]
            .into_iter()
            .map(|cache| (cache, [2 * self.cached(chunk, cache), kv_heads, self.slots(cache), width]))
            .filter(|(_, shape)| shape[0] > 0)
            .collect()
    }

    /// The ropes that `chunk` reads.
    pub fn ropes_of(&self, chunk: usize) -> Vec<usize> {
        let mut ropes: Vec<usize> =
            self.layers[self.chunks[chunk].clone()].iter().filter_map(|layer| layer.rope).collect();
        ropes.sort_unstable();
        ropes.dedup();
        ropes
    }
}

fn ring_slots(window: usize, options: &ExportOptions) -> usize {
    match options.target {
        // A call that is only part filled writes rows of no meaning after its own; the ring is long enough that these
        // never lie on rows that are still seen.
        Target::Ane => (window + options.prefill).next_multiple_of(options.prefill),
        // A call may bring any number of rows, so every position is kept.
        Target::Gpu => options.context,
    }
}

/// Layers of each package.
fn chunks(decoder: &Decoder, options: &ExportOptions) -> Result<Vec<Range<usize>>, CoremlError> {
    let layers = decoder.layers.len();
    let count = match (options.chunks, options.target) {
        (Some(chunks), _) if chunks > layers => {
            return Err(CoremlError::refused(
                format!("{chunks} chunks of {layers} layers"),
                "choose at most one chunk a layer",
            ));
        }
        (Some(chunks), _) => chunks,
        (None, Target::Gpu) => 1,
        (None, Target::Ane) => {
            let values: usize =
                decoder.weight_uses().iter().map(|used| used.shape.iter().product::<usize>()).sum();
            let outside = decoder.vocab_size * decoder.hidden_size;
            ((values - outside) * options.quant.bits() / 8).div_ceil(LARGEST_PACKAGE).clamp(1, layers)
        }
    };
    Ok(even(layers, count))
}

/// `0..total` in `parts` parts that differ by at most 1.
fn even(total: usize, parts: usize) -> Vec<Range<usize>> {
    (0..parts).map(|i| i * total / parts..(i + 1) * total / parts).collect()
}

/// The largest power of two up to 1 that leaves room above `largest`.
fn traced_factor(largest: f32) -> f32 {
    let mut factor = 1.0;
    while largest * factor * ROOM > LARGEST_HALF {
        factor /= 2.0;
    }
    factor
}

/// Only networks that norm what enters and what leaves each half of a layer are known to grow beyond fp16, and they can be
/// scaled at no cost.
fn untraced_factor(decoder: &Decoder) -> f32 {
    let sandwiched = decoder.layers.iter().all(|layer| {
        [&layer.mixer_pre_norm, &layer.mixer_post_norm, &layer.mlp_pre_norm, &layer.mlp_post_norm]
            .iter()
            .all(|norm| norm.is_some())
    });
    if sandwiched { UNTRACED_FACTOR } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_leave_room_and_are_no_smaller_than_they_must() {
        for (largest, expected) in
            [(0.0, 1.0), (16376.0, 1.0), (16377.0, 0.5), (65504.0, 0.25), (800_000.0, 1.0 / 64.0)]
        {
            assert_eq!(traced_factor(largest), expected, "{largest}");
        }
    }

    #[test]
    fn parts_are_even_and_whole() {
        assert_eq!(even(10, 4), [0..2, 2..5, 5..7, 7..10]);
        assert_eq!(even(3, 1), [0..3; 1]);
    }
}
