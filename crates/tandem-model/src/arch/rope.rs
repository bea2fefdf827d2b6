//! Rotary embedding settings in both of transformers' spellings.
//!
//! Up to version 4: `rope_theta` beside `rope_scaling {rope_type or type, ...}`. From version 5: one object
//! `rope_parameters {rope_theta, rope_type, ...}`.

use crate::config::Config;
use crate::decoder::{Rope, RopeScaling};
use crate::error::ModelError;

/// Reads either spelling; rotates the whole head.
pub(super) fn rope(config: &Config, head_dim: usize) -> Result<Rope, ModelError> {
    const DEFAULT_THETA: f32 = 10_000.0;
    let outer_theta = config.get("rope_theta").map(|_| config.positive("rope_theta")).transpose()?;
    config.expect("partial_rotary_factor", 1.0)?;
    let (theta, scaling) = match config.object("rope_parameters")? {
        Some(parameters) => {
            if config.get("rope_scaling").is_some() {
                return Err(
                    config.unsupported("rope_scaling", "rope_parameters is there too; remove one of them")
                );
            }
            let theta = parameters.positive_or("rope_theta", outer_theta.unwrap_or(DEFAULT_THETA))?;
            if outer_theta.is_some_and(|outer| outer != theta) {
                return Err(config
                    .unsupported("rope_theta", "rope_parameters says another value; remove one of them"));
            }
            parameters.expect("partial_rotary_factor", 1.0)?;
            (theta, scaling(&parameters)?)
        }
        None => {
            let theta = outer_theta.unwrap_or(DEFAULT_THETA);
            (theta, config.object("rope_scaling")?.map_or(Ok(RopeScaling::Default), |s| scaling(&s))?)
        }
    };
    Ok(Rope { theta, rotary_dim: head_dim, scaling })
}

fn scaling(config: &Config) -> Result<RopeScaling, ModelError> {
    let (new, old) = (config.text("rope_type")?, config.text("type")?);
    let key = if new.is_some() { "rope_type" } else { "type" };
    if new.is_some() && old.is_some() && new != old {
        return Err(config.unsupported("type", "rope_type says something else; remove one of them"));
    }
    let scaling = match new.or(old).unwrap_or("default") {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: config.positive("factor")? },
        "llama3" => {
            let low_freq_factor = config.positive("low_freq_factor")?;
            let high_freq_factor = config.positive("high_freq_factor")?;
            if high_freq_factor <= low_freq_factor {
                return Err(config.malformed("high_freq_factor", "must be above low_freq_factor"));
            }
            RopeScaling::Llama3 {
                factor: config.positive("factor")?,
                low_freq_factor,
                high_freq_factor,
                original_context: config.size("original_max_position_embeddings")?,
            }
        }
        _ => return Err(config.unsupported(key, "Tandem computes the rope types default, linear and llama3")),
    };
    config.finish()?;
    Ok(scaling)
}
