//! Every architecture's config: what is read, in either spelling, and what is refused by name.

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use std::fs;
use std::path::Path;

use common::{copy_of, edit, fixture, safetensors, says};
use serde_json::{Value, json};
use tandem_model::arch::decoder_from_config;
use tandem_model::decoder::{Attention, Decoder, Mixer, RopeScaling};
use tandem_model::{Checkpoint, ModelError};

/// The decoder of a fixture's config.json after `change`.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> Result<Decoder, ModelError> {
    let mut config = serde_json::from_slice(&fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
    change(&mut config);
    decoder_from_config(Path::new("config.json"), config.to_string().as_bytes()).map(|(_, decoder)| decoder)
}

fn read(name: &str) -> Decoder {
    changed(name, |_| ()).unwrap()
}

fn attention(decoder: &Decoder, layer: usize) -> &Attention {
    let Mixer::Attention(attention) = &decoder.layers[layer].mixer;
    attention
}

fn windows(decoder: &Decoder) -> Vec<Option<usize>> {
    (0..decoder.layers.len()).map(|i| attention(decoder, i).window).collect()
}

fn remove(config: &mut Value, key: &str) {
    config.as_object_mut().unwrap().remove(key);
}

/// Every folder with a config.json.
fn folders() -> Vec<String> {
    let entries = fs::read_dir(fixture("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| fixture(name).join("config.json").exists()).collect()
}

/// Where a config's language model lies.
fn text(config: &mut Value) -> &mut Value {
    if config.get("text_config").is_some() { &mut config["text_config"] } else { config }
}

#[test]
fn every_architecture_refuses_by_name() {
    for name in folders() {
        says(
            changed(&name, |c| text(c)["attention_twist"] = json!(2)),
            &["attention_twist = 2", "does not know"],
        );
        says(changed(&name, |c| text(c)["rms_norm_eps"] = json!("small")), &["rms_norm_eps is \"small\""]);
        let act = |c: &mut Value| {
            let key = if text(c).get("hidden_act").is_some() { "hidden_act" } else { "hidden_activation" };
            text(c)[key] = json!("relu");
        };
        says(changed(&name, act), &["hidden_act", "\"relu\""]);
        let rope = |c: &mut Value| {
            let key =
                if text(c).get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
            text(c)[key] = json!({"rope_type": "spiral", "factor": 2.0});
        };
        says(changed(&name, rope), &["rope_type = \"spiral\"", "longrope"]);
    }
}

#[test]
fn vocabulary_and_embedding_of_different_size() {
    for name in folders() {
        let folder = copy_of(&name);
        edit(folder.path(), "config.json", |c| {
            let size = text(c)["vocab_size"].as_u64().unwrap();
            text(c)["vocab_size"] = json!(size + 1);
        });
        says(Checkpoint::open_network(folder.path()), &["model.embed_tokens.weight has shape"]);
    }
}

#[test]
fn gemma3_says_the_same_in_both_spellings() {
    let new = read("gemma3");
    let old = changed("gemma3", |c| {
        for key in ["rope_parameters", "layer_types"] {
            remove(c, key);
        }
        c["rope_theta"] = json!(1e6);
        c["rope_local_base_freq"] = json!(10000.0);
        c["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
        c["sliding_window_pattern"] = json!(2);
    });
    assert_eq!(old.unwrap(), new);
    assert_eq!(windows(&new), [Some(16), None, Some(16)]);
    let global = attention(&new, 1).rope.as_ref().unwrap();
    assert_eq!((global.theta, &global.scaling), (1e6, &RopeScaling::Linear { factor: 8.0 }));
    // sqrt(96) = 9.798 in bf16.
    assert_eq!(new.embedding_scale, 9.8125);
    let in_f32 = changed("gemma3", |c| c["dtype"] = json!("float32")).unwrap();
    assert_eq!(in_f32.embedding_scale, 96f32.sqrt());
}

#[test]
fn gemma3_defaults_are_those_of_transformers() {
    // google/gemma-3-4b-it states no more than this.
    let config = json!({
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152}
    });
    let (_, decoder) = decoder_from_config(Path::new("config.json"), config.to_string().as_bytes()).unwrap();
    assert_eq!((decoder.vocab_size, decoder.max_context), (262_208, 131_072));
    let (local, global) = (attention(&decoder, 0), attention(&decoder, 5));
    assert_eq!((local.heads, local.kv_heads, local.head_dim, local.scale), (8, 4, 256, 1.0 / 16.0));
    assert_eq!((local.window, local.rope.as_ref().unwrap().theta), (Some(1024), 10_000.0));
    assert_eq!((global.window, global.rope.as_ref().unwrap().theta), (None, 1e6));
    assert_eq!(decoder.head.weight, decoder.embedding);
    // sqrt(2560) = 50.596 in bf16, which the outer config states.
    assert_eq!(decoder.embedding_scale, 50.5);
}

#[test]
fn gemma3_refusals() {
    let gemma = |key: &str, value: Value| changed("gemma3", |c| c[key] = value);
    says(gemma("attn_logit_softcapping", json!(50.0)), &["attn_logit_softcapping = 50.0"]);
    says(gemma("use_bidirectional_attention", json!(true)), &["use_bidirectional_attention = true"]);
    says(gemma("sliding_window", json!(null)), &["sliding_window", "local layers need a window"]);
    says(gemma("layer_types", json!(["full_attention"])), &["layer_types names 1 layers of 3"]);
    says(gemma("layer_types", json!(["chunked_attention"])), &["layer_types is [\"chunked_attention\"]"]);
    says(gemma("rope_theta", json!(2.0)), &["rope_theta = 2.0", "rope_parameters is there too"]);
    says(
        changed("gemma3", |c| c["rope_parameters"]["chunked_attention"] = json!({"rope_theta": 1.0})),
        &["rope_parameters.chunked_attention"],
    );
    says(
        changed("gemma3", |c| c["rope_parameters"]["full_attention"]["twist"] = json!(1)),
        &["rope_parameters.full_attention.twist = 1"],
    );
}

#[test]
fn a_text_tower_inside_a_multimodal_model() {
    let (decoder, weights) = Checkpoint::open_network(&fixture("gemma3-vision")).unwrap();
    assert_eq!(decoder.embedding.tensor, "model.embed_tokens.weight");
    assert!(weights.contains("vision_tower.embeddings.patch_embedding.weight"), "left alone");

    let tower = |change: fn(&mut Value)| changed("gemma3-vision", change);
    says(tower(|c| remove(c, "text_config")), &["text_config is not there"]);
    says(tower(|c| c["audio_config"] = json!({})), &["audio_config = {}"]);
    says(
        tower(|c| c["text_config"]["model_type"] = json!("gemma4_text")),
        &["text_config.model_type = \"gemma4_text\""],
    );
    says(
        tower(|c| c["tie_word_embeddings"] = json!(false)),
        &["tie_word_embeddings = false", "make them agree"],
    );
    says(
        tower(|c| c["text_config"]["final_logit_softcapping"] = json!(30.0)),
        &["text_config.final_logit_softcapping = 30.0"],
    );
}

/// A fixture whose weights have another header and one value more at their end.
fn with_header(name: &str, change: impl FnOnce(&mut Value, Value)) -> Result<Decoder, ModelError> {
    let folder = copy_of(name);
    let path = folder.path().join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header = serde_json::from_slice(&file[8..data]).unwrap();
    let end = file.len() - data;
    change(&mut header, json!({"dtype": "BF16", "shape": [1], "data_offsets": [end, end + 2]}));
    let data = [&file[data..], &[0; 2]].concat();
    fs::write(&path, safetensors(&header.to_string(), &data)).unwrap();
    Checkpoint::open_network(folder.path()).map(|(decoder, _)| decoder)
}

fn rename(header: &mut Value, from: &str, to: &str) {
    let entry = header.as_object_mut().unwrap().remove(from).unwrap();
    header[to] = entry;
}

#[test]
fn tensors_of_a_tower_under_other_names() {
    // As transformers holds them in memory.
    let held = |header: &mut Value, more: Value| {
        let names: Vec<String> = header.as_object().unwrap().keys().cloned().collect();
        for name in names {
            if let Some(rest) = name.strip_prefix("language_model.model.") {
                rename(header, &name, &format!("model.language_model.{rest}"));
            } else if name != "__metadata__" {
                rename(header, &name, &format!("model.{name}"));
            }
        }
        header["model.vision_tower.more"] = more;
    };
    assert_eq!(with_header("gemma3-vision", held).unwrap(), read("gemma3-vision"));
    says(
        with_header("gemma3-vision", |h, more| h["model.language_model.norm.weight"] = more),
        &["language_model.norm.weight is in another shard too, or there under another name"],
    );
    says(
        with_header("gemma3-vision", |h, more| h["audio_tower.norm.weight"] = more),
        &["audio_tower.norm.weight", "reads none"],
    );
    // A text model alone has no other towers.
    says(
        with_header("gemma3", |h, more| h["vision_tower.norm.weight"] = more),
        &["vision_tower.norm.weight", "reads none"],
    );
}

#[test]
fn fused_tensors_must_have_exactly_the_rows_that_are_read() {
    let shape = |tensor: &str, rows: u64| {
        let folder = copy_of("phi3-window");
        edit(folder.path(), "config.json", |c| match tensor {
            "qkv_proj" => c["num_key_value_heads"] = json!(rows),
            _ => c["intermediate_size"] = json!(rows),
        });
        Checkpoint::open_network(folder.path())
    };
    says(shape("qkv_proj", 2), &["self_attn.qkv_proj.weight", "[192, 64]", "[128, 64]"]);
    says(shape("gate_up_proj", 97), &["mlp.gate_up_proj.weight", "[192, 64]"]);
    says(shape("gate_up_proj", 80), &["mlp."]);
}

#[test]
fn phi3_rope() {
    let old = read("phi3-longrope");
    let rope = attention(&old, 0).rope.as_ref().unwrap();
    assert_eq!(rope.rotary_dim, 12);
    let RopeScaling::LongRope { original_context: 64, attention_factor, .. } = rope.scaling else { panic!() };
    assert!((attention_factor - (1.0 + 8f32.ln() / 64f32.ln()).sqrt()).abs() < 1e-6);
    let new = changed("phi3-longrope", |c| {
        let mut rope = c["rope_scaling"].clone();
        for (key, value) in [
            ("rope_theta", c["rope_theta"].clone()),
            ("partial_rotary_factor", json!(0.75)),
            ("original_max_position_embeddings", json!(64)),
        ] {
            rope[key] = value;
        }
        for key in ["rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"]
        {
            remove(c, key);
        }
        c["rope_parameters"] = rope;
    });
    assert_eq!(new.unwrap(), old);

    let scaling = |key: &str, value: Value| changed("phi3-longrope", |c| c["rope_scaling"][key] = value);
    says(scaling("long_factor", json!([1.0, 2.0])), &["long_factor has 2 factors for 6 rotated pairs"]);
    says(scaling("short_factor", json!([1, 1, 1, 1, 1, 0])), &["short_factor", "positive numbers"]);
    says(scaling("short_factor", json!(null)), &["short_factor is not there"]);
    says(scaling("short_mscale", json!(1.1)), &["rope_scaling.short_mscale = 1.1"]);
    says(
        changed("phi3-longrope", |c| c["partial_rotary_factor"] = json!(0.7)),
        &["partial_rotary_factor rotates 11 of 16"],
    );
    says(changed("phi3-longrope", |c| c["partial_rotary_factor"] = json!(1.5)), &["rotates 24 of 16"]);
    says(changed("phi3-longrope", |c| c["lm_head_bias"] = json!(true)), &["lm_head_bias = true"]);
}

#[test]
fn whole_heads_are_rotated_elsewhere() {
    says(
        changed("qwen3", |c| c["rope_parameters"]["partial_rotary_factor"] = json!(0.5)),
        &["partial_rotary_factor is set"],
    );
    says(changed("qwen3", |c| c["partial_rotary_factor"] = json!(0.5)), &["partial_rotary_factor = 0.5"]);
}

#[test]
fn windows_of_qwen() {
    assert_eq!(windows(&read("qwen2-window")), [None, Some(24), Some(24)]);
    let qwen = |change: fn(&mut Value)| changed("qwen2-window", change);
    let off = qwen(|c| {
        c["use_sliding_window"] = json!(false);
        remove(c, "layer_types");
    });
    assert_eq!(windows(&off.unwrap()), [None; 3]);
    let by_number = qwen(|c| {
        c["max_window_layers"] = json!(2);
        remove(c, "layer_types");
    });
    assert_eq!(windows(&by_number.unwrap()), [None, None, Some(24)]);
    says(qwen(|c| c["use_sliding_window"] = json!(false)), &["layer_types", "no window is in use"]);
    says(qwen(|c| c["use_mrope"] = json!(true)), &["use_mrope = true"]);
    says(qwen(|c| c["max_window_layers"] = json!(-1)), &["max_window_layers is not a whole number"]);
}

#[test]
fn windows_of_mistral() {
    assert_eq!(windows(&read("mistral-window")), [Some(16), Some(16)]);
    let mistral = |change: fn(&mut Value)| windows(&changed("mistral-window", change).unwrap());
    assert_eq!(mistral(|c| c["sliding_window"] = json!(null)), [None, None]);
    assert_eq!(mistral(|c| remove(c, "sliding_window")), [Some(4096), Some(4096)]);
}

#[test]
fn layers_of_smollm3_without_rope() {
    let has_rope = |decoder: &Decoder| -> Vec<bool> {
        (0..decoder.layers.len()).map(|i| attention(decoder, i).rope.is_some()).collect()
    };
    let smollm = |change: fn(&mut Value)| changed("smollm3", change);
    assert_eq!(has_rope(&read("smollm3")), [true, true, true, false]);
    let listed = smollm(|c| c["no_rope_layers"] = json!([0, 1, 1, 0]));
    assert_eq!(has_rope(&listed.unwrap()), [false, true, true, false]);
    let counted = smollm(|c| {
        remove(c, "no_rope_layers");
        c["no_rope_layer_interval"] = json!(2);
    });
    assert_eq!(has_rope(&counted.unwrap()), [true, false, true, false]);
    let windowed = smollm(|c| {
        (c["use_sliding_window"], c["sliding_window"]) = (json!(true), json!(8));
        remove(c, "layer_types");
    });
    assert_eq!(windows(&windowed.unwrap()), [None, None, None, Some(8)]);
    says(smollm(|c| c["no_rope_layers"] = json!([0])), &["no_rope_layers names 1 layers of 4"]);
    says(smollm(|c| c["no_rope_layers"] = json!([2, 2, 2, 2])), &["no_rope_layers", "0 and 1"]);
}

#[test]
fn ropes_that_reach_further_than_the_config_states() {
    assert_eq!(read("llama-dynamic").max_context, 128);
    assert_eq!(read("qwen2-yarn").max_context, 256);
    assert_eq!(read("llama-yarn").max_context, 512);
    let absurd = changed("llama-dynamic", |c| c["rope_parameters"]["factor"] = json!(1e30));
    assert_eq!(absurd.unwrap().max_context, 1 << 30);
}
