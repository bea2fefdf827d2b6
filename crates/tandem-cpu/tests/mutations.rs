//! Are the goldens sharp? Each value of the decoder that a config sets is changed a little, in a fixture that has it, and
//! the logits must then leave the golden by more than it tolerates.
//!
//! A mutation that goes unnoticed means a config key could be misread without any test failing.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::golden::{Golden, TOLERANCE, error, fixtures, options};
use tandem_model::decoder::{Activation, Attention, Decoder, Layer, Mixer, QkNormOver, Rope, RopeScaling};
use tandem_model::{Checkpoint, Weights};

struct Mutation {
    what: &'static str,
    fixture: &'static str,
    change: fn(&mut Decoder),
}

fn layers(decoder: &mut Decoder, mut change: impl FnMut(&mut Layer)) {
    decoder.layers.iter_mut().for_each(&mut change);
}

fn attention(decoder: &mut Decoder, mut change: impl FnMut(&mut Attention)) {
    layers(decoder, |layer| {
        let Mixer::Attention(attention) = &mut layer.mixer;
        change(attention);
    });
}

fn rope(decoder: &mut Decoder, mut change: impl FnMut(&mut Rope)) {
    attention(decoder, |attention| attention.rope.iter_mut().for_each(&mut change));
}

fn eps(decoder: &mut Decoder, eps: f32) {
    decoder.final_norm.eps = eps;
    layers(decoder, |layer| {
        layer.mixer_pre_norm.iter_mut().chain(&mut layer.mlp_pre_norm).for_each(|norm| norm.eps = eps);
    });
}

const MUTATIONS: &[Mutation] = &[
    Mutation { what: "rms_norm_eps", fixture: "llama-gqa", change: |d| eps(d, 1e-3) },
    Mutation { what: "rope_theta", fixture: "llama-gqa", change: |d| rope(d, |rope| rope.theta *= 1.1) },
    Mutation {
        what: "k and v the other way round",
        fixture: "llama-gqa",
        change: |d| attention(d, |a| std::mem::swap(&mut a.k, &mut a.v)),
    },
    Mutation {
        what: "rope factor (linear)",
        fixture: "llama-linear",
        change: |d| rope(d, |rope| rope.scaling = RopeScaling::Linear { factor: 4.4 }),
    },
    Mutation {
        what: "rope factor (dynamic)",
        fixture: "llama-dynamic",
        change: |d| rope(d, |r| r.scaling = RopeScaling::Dynamic { factor: 2.2, original_context: 64 }),
    },
    Mutation {
        what: "max_position_embeddings (dynamic)",
        fixture: "llama-dynamic",
        change: |d| rope(d, |r| r.scaling = RopeScaling::Dynamic { factor: 2.0, original_context: 72 }),
    },
    Mutation {
        what: "rope attention factor (yarn)",
        fixture: "llama-yarn",
        change: |d| {
            rope(d, |rope| {
                let RopeScaling::Yarn { attention_factor, .. } = &mut rope.scaling else { panic!() };
                *attention_factor = 1.0;
            });
        },
    },
    Mutation {
        what: "beta_slow (yarn)",
        fixture: "llama-yarn",
        change: |d| {
            rope(d, |rope| {
                let RopeScaling::Yarn { beta_slow, .. } = &mut rope.scaling else { panic!() };
                *beta_slow = 2.0;
            });
        },
    },
    Mutation {
        what: "original_max_position_embeddings (llama3)",
        fixture: "llama3-rope",
        change: |d| {
            rope(d, |rope| {
                let RopeScaling::Llama3 { original_context, .. } = &mut rope.scaling else { panic!() };
                *original_context = 80;
            });
        },
    },
    Mutation {
        what: "original_max_position_embeddings (longrope)",
        fixture: "phi3-longrope",
        change: |d| {
            rope(d, |rope| {
                let RopeScaling::LongRope { original_context, .. } = &mut rope.scaling else { panic!() };
                *original_context = 113;
            });
        },
    },
    Mutation {
        what: "partial_rotary_factor",
        fixture: "phi3-window",
        change: |d| rope(d, |rope| rope.rotary_dim = 16),
    },
    Mutation {
        what: "gate_up_proj the other way round",
        fixture: "phi3-window",
        change: |d| layers(d, |layer| std::mem::swap(&mut layer.mlp.gate, &mut layer.mlp.up)),
    },
    Mutation {
        what: "sliding_window",
        fixture: "mistral-window",
        change: |d| attention(d, |attention| attention.window = Some(17)),
    },
    Mutation {
        what: "max_window_layers",
        fixture: "qwen2-window",
        change: |d| attention(d, |attention| attention.window = Some(24)),
    },
    Mutation {
        what: "use_sliding_window",
        fixture: "qwen2-window",
        change: |d| attention(d, |attention| attention.window = None),
    },
    Mutation {
        what: "attention bias",
        fixture: "qwen2-window",
        change: |d| attention(d, |attention| attention.k.bias = None),
    },
    Mutation {
        what: "q/k norm",
        fixture: "qwen3",
        change: |d| attention(d, |attention| attention.qk_norm = None),
    },
    Mutation {
        what: "q and k norm the other way round",
        fixture: "qwen3",
        change: |d| {
            attention(d, |attention| {
                let norms = attention.qk_norm.as_mut().unwrap();
                std::mem::swap(&mut norms.q, &mut norms.k);
            });
        },
    },
    Mutation { what: "norm offset", fixture: "gemma3", change: |d| d.final_norm.offset = 0.0 },
    Mutation {
        what: "layer_types",
        fixture: "gemma3",
        change: |d| {
            let (local, global) = (d.layers[0].mixer.clone(), d.layers[1].mixer.clone());
            let Mixer::Attention(local) = local;
            let Mixer::Attention(global) = global;
            let Mixer::Attention(attention) = &mut d.layers[0].mixer;
            (attention.window, attention.rope) = (global.window, global.rope);
            let Mixer::Attention(attention) = &mut d.layers[1].mixer;
            (attention.window, attention.rope) = (local.window, local.rope);
        },
    },
    Mutation {
        what: "rope_local_base_freq",
        fixture: "gemma3-vision",
        change: |d| {
            rope(d, |rope| rope.theta = rope.theta.max(6000.0));
        },
    },
    Mutation {
        what: "query_pre_attn_scalar",
        fixture: "gemma3",
        change: |d| attention(d, |attention| attention.scale = 0.25),
    },
    Mutation {
        what: "embedding scale (not rounded to bf16)",
        fixture: "gemma3",
        change: |d| d.embedding_scale = 96f32.sqrt(),
    },
    Mutation { what: "final_logit_softcapping", fixture: "gemma3", change: |d| d.logit_softcap = None },
    Mutation {
        what: "hidden_activation",
        fixture: "gemma3",
        change: |d| layers(d, |layer| layer.mlp.activation = Activation::Silu),
    },
    Mutation {
        what: "post-norms the other way round",
        fixture: "gemma3",
        change: |d| layers(d, |layer| std::mem::swap(&mut layer.mixer_post_norm, &mut layer.mlp_post_norm)),
    },
    Mutation {
        what: "no_rope_layers",
        fixture: "smollm3",
        change: |d| {
            let Mixer::Attention(first) = d.layers[0].mixer.clone();
            attention(d, |attention| attention.rope = first.rope.clone());
        },
    },
    Mutation {
        what: "norms before instead of after",
        fixture: "olmo2",
        change: |d| {
            layers(d, |layer| {
                layer.mixer_pre_norm = layer.mixer_post_norm.take();
                layer.mlp_pre_norm = layer.mlp_post_norm.take();
            });
        },
    },
    Mutation {
        what: "what the q/k norm runs over",
        fixture: "olmo2",
        change: |d| {
            attention(d, |attention| {
                let (width, norms) = (attention.head_dim, attention.qk_norm.as_mut().unwrap());
                norms.over = QkNormOver::Head;
                norms.q.weight.rows = Some(0..width);
                norms.k.weight.rows = Some(0..width);
            });
        },
    },
    Mutation { what: "embedding_multiplier", fixture: "granite", change: |d| d.embedding_scale = 13.0 },
    Mutation {
        what: "attention_multiplier",
        fixture: "granite",
        change: |d| attention(d, |attention| attention.scale = 0.25),
    },
    Mutation {
        what: "residual_multiplier",
        fixture: "granite",
        change: |d| layers(d, |layer| layer.residual_scale = 0.23),
    },
    Mutation { what: "logits_scaling", fixture: "granite", change: |d| d.logit_scale = 0.5 },
    Mutation {
        what: "tie_word_embeddings",
        fixture: "llama-gqa",
        change: |d| d.head.weight = d.embedding.clone(),
    },
];

fn open(fixture: &str) -> (Decoder, Arc<Weights>, Golden) {
    let folder = fixtures().join(fixture);
    let (decoder, weights) = Checkpoint::open_network(&folder).unwrap();
    (decoder, weights, Golden::open(&folder.join("golden.safetensors")))
}

#[test]
fn every_mutation_is_noticed() {
    let mut unnoticed = Vec::new();
    for Mutation { what, fixture, change } in MUTATIONS {
        let (mut decoder, weights, golden) = open(fixture);
        let before = decoder.clone();
        change(&mut decoder);
        assert_ne!(decoder, before, "{what}: nothing was changed");
        let error = error(&decoder, &weights, &golden, "", &options().exact());
        println!("{what} in {fixture}: relative error {error:.1e}");
        if error <= 10.0 * TOLERANCE {
            unnoticed.push((what, error));
        }
    }
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}

#[test]
fn unchanged_decoders_pass() {
    for fixture in ["llama-gqa", "gemma3", "granite", "phi3-longrope", "olmo2"] {
        let (decoder, weights, golden) = open(fixture);
        assert!(error(&decoder, &weights, &golden, "", &options().exact()) < TOLERANCE);
    }
}
