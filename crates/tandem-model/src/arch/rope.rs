//! Rotary embedding settings in all spellings.
//!
//! transformers up to version 4: `rope_theta` beside `rope_scaling {rope_type or type, ...}`. From version 5: one object
//! `rope_parameters {rope_theta, rope_type, ...}`, or one such object for each type of layer. GGUF: `rope.*`, and divisors
//! of the frequencies as tensors.

use super::common::Shape;
use crate::config::Config;
use crate::decoder::{Rope, RopeScaling, WeightRef};
use crate::error::ModelError;
use crate::weights::Weights;

/// Divisors of the frequencies in a GGUF file: Llama 3.1's, LongRoPE's long and short ones.
pub(super) const DIVISORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// Reads either spelling; rotates the whole head.
pub(super) fn rope(config: &Config, shape: &Shape, default_theta: f32) -> Result<Rope, ModelError> {
    config.expect("partial_rotary_factor", 1.0)?;
    let rope = partial_rope(config, shape, default_theta)?;
    if rope.rotary_dim != shape.head_dim {
        return Err(
            config.malformed("partial_rotary_factor", "is set, but this architecture rotates whole heads")
        );
    }
    Ok(rope)
}

/// Reads either spelling; rotates `partial_rotary_factor` of the head.
pub(super) fn partial_rope(config: &Config, shape: &Shape, default_theta: f32) -> Result<Rope, ModelError> {
    let (new, old) = (config.object("rope_parameters")?, config.object("rope_scaling")?);
    if new.is_some() && old.is_some() {
        return Err(config.unsupported("rope_scaling", "rope_parameters is there too; remove one of them"));
    }
    let key = if new.is_some() { "rope_parameters" } else { "rope_scaling" };
    let inner = new.or(old);
    // What stands outside must agree with what stands inside, or takes its place.
    let agreed = |what: &str| -> Result<Option<f64>, ModelError> {
        let outside = number(config, what)?;
        let inside = inner.as_ref().map_or(Ok(None), |inner| number(inner, what))?;
        if outside.is_some() && inside.is_some() && outside != inside {
            return Err(config.unsupported(what, &format!("{key} says another value; remove one of them")));
        }
        Ok(inside.or(outside))
    };
    let theta = agreed("rope_theta")?.map_or(default_theta, |theta| theta as f32);
    let rotary_dim = (shape.head_dim as f64 * agreed("partial_rotary_factor")?.unwrap_or(1.0)) as usize;
    if rotary_dim == 0 || rotary_dim > shape.head_dim || !rotary_dim.is_multiple_of(2) {
        let what = format!("rotates {rotary_dim} of {} dimensions", shape.head_dim);
        return Err(config.malformed("partial_rotary_factor", &what));
    }
    let original = config.optional_size("original_max_position_embeddings", None)?;
    let scaling = inner.map_or(Ok(RopeScaling::Default), |inner| {
        scaling(&inner, Context { stated: shape.context, original }, rotary_dim)
    })?;
    checked(config, "rope_theta", Rope { theta, rotary_dim, scaling })
}

/// `rope_parameters.{layer_type}`, where that is how they are written.
pub(super) fn nested_rope(
    config: &Config,
    layer_type: &str,
    shape: &Shape,
    default_theta: f32,
) -> Result<Option<Rope>, ModelError> {
    let Some(both) = config.object("rope_parameters")? else { return Ok(None) };
    if !both.is_nested() {
        return Ok(None);
    }
    for key in ["rope_theta", "rope_scaling", "rope_local_base_freq"] {
        if config.get(key).is_some() {
            return Err(config.unsupported(key, "rope_parameters is there too; remove one of them"));
        }
    }
    both.ignore(&["full_attention", "sliding_attention"]);
    both.finish()?;
    let Some(inner) = both.object(layer_type)? else {
        let plain = Rope { theta: default_theta, rotary_dim: shape.head_dim, scaling: RopeScaling::Default };
        return Ok(Some(plain));
    };
    inner.expect("partial_rotary_factor", 1.0)?;
    let theta = inner.positive_or("rope_theta", default_theta)?;
    let context = Context { stated: shape.context, original: None };
    let scaling = scaling(&inner, context, shape.head_dim)?;
    checked(&inner, "rope_theta", Rope { theta, rotary_dim: shape.head_dim, scaling }).map(Some)
}

/// A positive number in full precision.
fn number(config: &Config, key: &str) -> Result<Option<f64>, ModelError> {
    config.optional_positive(key)?;
    Ok(config.get(key).and_then(serde_json::Value::as_f64))
}

/// Refuses what the formulas cannot take.
fn checked(config: &Config, key: &str, rope: Rope) -> Result<Rope, ModelError> {
    if rope.theta <= 1.0 {
        return Err(config.malformed(key, &format!("= {} must be above 1", rope.theta)));
    }
    if rope.rotary_dim < 4 && matches!(rope.scaling, RopeScaling::Dynamic { .. }) {
        return Err(config.malformed("head_dim", "is too small for the rope type dynamic"));
    }
    Ok(rope)
}

/// Context lengths that the config states outside the rope settings.
#[derive(Clone, Copy)]
struct Context {
    /// `max_position_embeddings`.
    stated: usize,
    /// `original_max_position_embeddings`; it goes before the same key inside, as in transformers.
    original: Option<usize>,
}

fn scaling(config: &Config, context: Context, rotary_dim: usize) -> Result<RopeScaling, ModelError> {
    let (new, old) = (config.text("rope_type")?, config.text("type")?);
    let key = if new.is_some() { "rope_type" } else { "type" };
    if new.is_some() && old.is_some() && new != old {
        return Err(config.unsupported("type", "rope_type says something else; remove one of them"));
    }
    // Read by the caller.
    config.ignore(&["rope_theta", "partial_rotary_factor"]);
    let original = || -> Result<usize, ModelError> {
        let inside = config.size_or("original_max_position_embeddings", context.stated)?;
        Ok(context.original.unwrap_or(inside))
    };
    let scaling = match new.or(old).unwrap_or("default") {
        // transformers moves the key in here for Phi 3.
        "default" => {
            config.ignore(&["original_max_position_embeddings"]);
            RopeScaling::Default
        }
        "linear" => RopeScaling::Linear { factor: config.positive("factor")? },
        "dynamic" => {
            RopeScaling::Dynamic { factor: config.positive("factor")?, original_context: context.stated }
        }
        "yarn" => yarn(config, original()?)?,
        "longrope" | "su" => long_rope(config, context.stated, original()?, rotary_dim)?,
        "llama3" => llama3(config, original()?)?,
        _ => {
            let known = "Tandem computes the rope types default, linear, dynamic, yarn, longrope and llama3";
            return Err(config.unsupported(key, known));
        }
    };
    config.finish()?;
    Ok(scaling)
}

fn llama3(config: &Config, original_context: usize) -> Result<RopeScaling, ModelError> {
    let low_freq_factor = config.positive("low_freq_factor")?;
    let high_freq_factor = config.positive("high_freq_factor")?;
    if high_freq_factor <= low_freq_factor {
        return Err(config.malformed("high_freq_factor", "must be above low_freq_factor"));
    }
    let factor = config.positive("factor")?;
    Ok(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context })
}

fn yarn(config: &Config, original_context: usize) -> Result<RopeScaling, ModelError> {
    let factor = config.positive("factor")?;
    let mscale = |weight: f32| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
    let (mscale_over, mscale_under) =
        (config.optional_positive("mscale")?, config.optional_positive("mscale_all_dim")?);
    let inferred = match (mscale_over, mscale_under) {
        (Some(over), Some(under)) => mscale(over) / mscale(under),
        _ => mscale(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_context,
        beta_fast: config.positive_or("beta_fast", 32.0)?,
        beta_slow: config.positive_or("beta_slow", 1.0)?,
        truncate: config.flag_or("truncate", true)?,
        attention_factor: config.positive_or("attention_factor", inferred)?,
    })
}

fn long_rope(
    config: &Config,
    stated_context: usize,
    original_context: usize,
    rotary_dim: usize,
) -> Result<RopeScaling, ModelError> {
    let divisors = |key: &str| -> Result<Vec<f32>, ModelError> {
        let positive = |value: &serde_json::Value| {
            value.as_f64().map(|v| v as f32).filter(|v| v.is_finite() && *v > 0.0)
        };
        let list = config.list(key, "positive numbers", positive)?;
        let list = list.ok_or_else(|| config.malformed(key, "is not there, and has no default"))?;
        if list.len() != rotary_dim / 2 {
            let what = format!("has {} factors for {} rotated pairs", list.len(), rotary_dim / 2);
            return Err(config.malformed(key, &what));
        }
        Ok(list)
    };
    let ratio = stated_context as f32 / original_context as f32;
    let factor = config.positive_or("factor", ratio)?;
    let inferred = if factor <= 1.0 || original_context == 1 {
        1.0
    } else {
        (1.0 + factor.ln() / (original_context as f32).ln()).sqrt()
    };
    Ok(RopeScaling::LongRope {
        short: divisors("short_factor")?,
        long: divisors("long_factor")?,
        original_context,
        attention_factor: config.positive_or("attention_factor", inferred)?,
    })
}

/// The settings of a GGUF file; rotates the whole head.
pub(super) fn gguf_rope(config: &Config, weights: &Weights, shape: &Shape) -> Result<Rope, ModelError> {
    config.expect("rope.dimension_count", shape.head_dim)?;
    gguf_partial_rope(config, weights, shape)
}

/// The settings of a GGUF file; rotates `rope.dimension_count` of the head.
pub(super) fn gguf_partial_rope(
    config: &Config,
    weights: &Weights,
    shape: &Shape,
) -> Result<Rope, ModelError> {
    const COUNT: &str = "rope.dimension_count";
    let rotary_dim = config.size_or(COUNT, shape.head_dim)?;
    if rotary_dim > shape.head_dim || !rotary_dim.is_multiple_of(2) {
        return Err(config.malformed(COUNT, &format!("= {rotary_dim} does not fit the head")));
    }
    let theta = config.positive_or("rope.freq_base", 10_000.0)?;
    let scaling = gguf_scaling(config, weights, shape, rotary_dim)?;
    checked(config, "rope.freq_base", Rope { theta, rotary_dim, scaling })
}

fn gguf_scaling(
    config: &Config,
    weights: &Weights,
    shape: &Shape,
    rotary_dim: usize,
) -> Result<RopeScaling, ModelError> {
    const KIND: &str = "rope.scaling.type";
    let [freqs, long, short] = DIVISORS;
    // A note of how the model was made.
    config.ignore(&["rope.scaling.finetuned"]);
    let old = config.positive_or("rope.scale_linear", 1.0)?;
    let factor = config.positive_or("rope.scaling.factor", old)?;
    let original_context =
        config.optional_size("rope.scaling.original_context_length", None)?.unwrap_or(shape.context);
    let kind = config.text(KIND)?;
    let plain = match kind {
        Some("none") => true,
        None | Some("linear") => factor == 1.0,
        _ => false,
    };
    if weights.contains(long) || weights.contains(short) || kind == Some("longrope") {
        if !plain && kind != Some("longrope") {
            return Err(config.unsupported(KIND, "the file holds the factors of longrope besides"));
        }
        return Ok(RopeScaling::LongRope {
            short: divisors(config, weights, short, rotary_dim)?,
            long: divisors(config, weights, long, rotary_dim)?,
            original_context,
            attention_factor: config.positive_or("rope.scaling.attn_factor", 1.0)?,
        });
    }
    if weights.contains(freqs) {
        if !plain {
            return Err(config.unsupported(KIND, "the file holds rope_freqs.weight besides"));
        }
        return Ok(RopeScaling::Factors(divisors(config, weights, freqs, rotary_dim)?));
    }
    match kind {
        _ if plain => Ok(RopeScaling::Default),
        None | Some("linear") => Ok(RopeScaling::Linear { factor }),
        Some("yarn") => Ok(RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast: config.positive_or("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: config.positive_or("rope.scaling.yarn_beta_slow", 1.0)?,
            truncate: true,
            attention_factor: if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 },
        }),
        _ => Err(config.unsupported(KIND, "Tandem computes none, linear, yarn and longrope here")),
    }
}

fn divisors(
    config: &Config,
    weights: &Weights,
    name: &str,
    rotary_dim: usize,
) -> Result<Vec<f32>, ModelError> {
    let stored = weights.tensor(name)?;
    if stored.shape != [rotary_dim / 2] {
        return Err(ModelError::Shape {
            name: name.into(),
            expected: vec![rotary_dim / 2],
            found: stored.shape.clone(),
        });
    }
    let divisors = weights.vector(&WeightRef::whole(name))?;
    if divisors.iter().any(|&divisor| !(divisor.is_finite() && divisor > 0.0)) {
        return Err(config.malformed("rope.scaling", &format!("has factors in {name} that are not positive")));
    }
    Ok(divisors)
}
