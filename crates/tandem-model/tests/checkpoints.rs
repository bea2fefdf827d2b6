//! Real small checkpoints: those transformers wrote, and the GGUF files made from them.

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use common::fixture;
use tandem_model::decoder::{Activation, Decoder, Mixer, RopeScaling, WeightRef};
use tandem_model::format::{Affine, Format, ScaleType};
use tandem_model::{Checkpoint, Message, RenderOptions, Weights};

fn values(weights: &Weights, weight: &WeightRef) -> Vec<f32> {
    weights.vector(weight).unwrap()
}

/// The `i`th weight of two decoders of the same shape.
fn pairs<'a>(a: &'a Decoder, b: &'a Decoder) -> Vec<(&'a WeightRef, &'a WeightRef)> {
    let (a, b) = (a.weight_refs(), b.weight_refs());
    assert_eq!(a.len(), b.len());
    a.into_iter().zip(b).collect()
}

#[test]
fn llama_gqa_in_the_old_spelling() {
    let checkpoint = Checkpoint::open(&fixture("llama-gqa")).unwrap();
    let decoder = &checkpoint.decoder;
    assert_eq!((decoder.vocab_size, decoder.hidden_size, decoder.max_context), (384, 64, 512));
    assert_eq!(decoder.layers.len(), 3);
    let Mixer::Attention(attention) = &decoder.layers[2].mixer;
    assert_eq!((attention.heads, attention.kv_heads, attention.head_dim, attention.scale), (4, 2, 16, 0.25));
    let rope = attention.rope.as_ref().unwrap();
    assert_eq!((rope.theta, rope.rotary_dim, &rope.scaling), (50_000.0, 16, &RopeScaling::Default));
    assert_eq!(decoder.layers[0].mlp.activation, Activation::Silu);
    assert_eq!(decoder.head.weight.tensor, "lm_head.weight");
    assert_eq!(checkpoint.weights.tensor("model.norm.weight").unwrap().format, Format::Bf16);
    assert_eq!(checkpoint.generation.eos_token_ids, [2]);
    assert_eq!((checkpoint.tokenizer.bos(), checkpoint.tokenizer.eos()), (Some(1), Some(2)));
    let prompt = checkpoint
        .chat
        .unwrap()
        .render(
            &[Message::new("user", "Hi")],
            &RenderOptions { add_generation_prompt: true, ..Default::default() },
        )
        .unwrap();
    assert_eq!(
        prompt,
        "<|im_start|>system\nYou are a tiny test model.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let ids = checkpoint.tokenizer.encode(&prompt, false).unwrap();
    assert_eq!(checkpoint.tokenizer.decode(&ids, false), prompt);
    assert!(ids.starts_with(&[1]) && ids.contains(&2));
}

#[test]
fn llama_tied_bias_in_the_new_spelling() {
    let (decoder, weights) = Checkpoint::open_network(&fixture("llama-tied-bias")).unwrap();
    assert_eq!(decoder.head.weight, decoder.embedding);
    let Mixer::Attention(attention) = &decoder.layers[1].mixer;
    assert_eq!((attention.kv_heads, attention.head_dim), (1, 32));
    assert_eq!(attention.rope.as_ref().unwrap().theta, 500_000.0);
    assert_eq!(values(&weights, attention.k.bias.as_ref().unwrap()).len(), 32);
    assert!(decoder.layers[0].mlp.down.bias.is_some());
}

#[test]
fn llama3_rope_in_two_shards() {
    let (decoder, weights) = Checkpoint::open_network(&fixture("llama3-rope")).unwrap();
    let Mixer::Attention(attention) = &decoder.layers[0].mixer;
    assert!(matches!(
        attention.rope.as_ref().unwrap().scaling,
        RopeScaling::Llama3 { factor: 8.0, original_context: 64, .. }
    ));
    assert_eq!(weights.iter().count(), 21);
}

#[test]
fn a_gguf_file_holds_the_same_network_as_the_folder_it_was_made_from() {
    let folder = Checkpoint::open(&fixture("llama-gqa")).unwrap();
    for (name, steps) in [("f16", 0.0), ("q8_0", 127.0), ("q4_0", 8.0), ("q4_1", 15.0)] {
        let gguf = Checkpoint::open(&fixture(&format!("gguf/llama-gqa-{name}.gguf"))).unwrap();
        let (a, b) = (&folder.decoder, &gguf.decoder);
        assert_eq!(
            (a.vocab_size, a.hidden_size, a.max_context),
            (b.vocab_size, b.hidden_size, b.max_context)
        );
        let (Mixer::Attention(ours), Mixer::Attention(theirs)) = (&a.layers[0].mixer, &b.layers[0].mixer);
        assert_eq!(ours.rope, theirs.rope);
        assert_eq!(a.final_norm.eps, b.final_norm.eps);
        assert_eq!(folder.generation.eos_token_ids, gguf.generation.eos_token_ids);
        assert_eq!(
            folder.chat.as_ref().unwrap().source(false).unwrap(),
            gguf.chat.as_ref().unwrap().source(false).unwrap()
        );
        for (source, stored) in pairs(a, b) {
            let (x, y) = (folder.weights.matrix(source).unwrap(), gguf.weights.matrix(stored).unwrap());
            assert_eq!((x.rows, x.cols), (y.rows, y.cols), "{name} {}", stored.tensor);
            let (mut left, mut right) = (vec![0.0; x.cols], vec![0.0; x.cols]);
            for row in 0..x.rows {
                x.row_f32(row, &mut left);
                y.row_f32(row, &mut right);
                let largest = left.iter().fold(0f32, |m, v| m.max(v.abs()));
                // Half a step of the format, with room for the f16 scale; f16 keeps bf16 but for the tiniest.
                let bound = if steps == 0.0 { 1e-7 } else { 1.1 * largest / steps };
                for (l, r) in left.iter().zip(&right) {
                    assert!((l - r).abs() <= bound, "{name} {} row {row}: {l} {r}", stored.tensor);
                }
            }
        }
        for text in ["The answer is 42.", "  Où est la gare ?\n\n日本 🙂", "<|im_start|>user\nHi<|im_end|>"]
        {
            let ids = folder.tokenizer.encode(text, true).unwrap();
            assert_eq!(ids, gguf.tokenizer.encode(text, true).unwrap());
            assert_eq!(gguf.tokenizer.decode(&ids, true), folder.tokenizer.decode(&ids, true));
        }
    }
}

#[test]
fn dummy_weights() {
    let config = fixture("llama-tied-bias/config.json");
    let mlx = [4, 8].map(|bits| Format::Affine(Affine::new(bits, 32, ScaleType::Bf16).unwrap()));
    let others = [Format::F32, Format::F16, Format::Bf16, Format::Q8_0, Format::Q4_0, Format::Q4_1];
    for format in others.into_iter().chain(mlx) {
        let checkpoint = Checkpoint::dummy(&config, 7, format).unwrap();
        let weights = &checkpoint.weights;
        assert_eq!(weights.hash(), Checkpoint::dummy(&config, 7, format).unwrap().weights.hash());
        assert_ne!(weights.hash(), Checkpoint::dummy(&config, 8, format).unwrap().weights.hash());
        let layer = &checkpoint.decoder.layers[0];
        let matrix = weights.matrix(&layer.mlp.up.weight).unwrap();
        assert_eq!(matrix.format, format);
        let mut all = vec![0.0; matrix.rows * matrix.cols];
        for (row, out) in all.chunks_exact_mut(matrix.cols).enumerate() {
            matrix.row_f32(row, out);
        }
        let n = all.len() as f32;
        let mean = all.iter().sum::<f32>() / n;
        let deviation = (all.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n).sqrt();
        // Q4_0 counts from -8 to 7, so its mean lies half a step off.
        assert!(mean.abs() < 0.003 && (0.018..0.022).contains(&deviation), "{format:?}: {mean} {deviation}");
        assert!(values(weights, &layer.mixer_pre_norm.as_ref().unwrap().weight).iter().all(|&v| v == 1.0));
        assert!(values(weights, layer.mlp.up.bias.as_ref().unwrap()).iter().all(|&v| v == 0.0));
        let ids = checkpoint.tokenizer.encode("é 🙂", true).unwrap();
        assert_eq!(ids.iter().map(|&id| id as u8).collect::<Vec<_>>(), "é 🙂".as_bytes());
        assert_eq!(checkpoint.tokenizer.decode(&ids, true), "é 🙂");
    }
    common::says(
        Checkpoint::dummy(&fixture("text/persuasion.txt"), 0, Format::Bf16),
        &["persuasion.txt", "not valid JSON"],
    );
}

#[test]
fn dummy_weights_whose_shape_does_not_fit() {
    let folder = common::copy_of("llama-tied-bias");
    common::edit(folder.path(), "config.json", |c| c["intermediate_size"] = 100.into());
    let config = folder.path().join("config.json");
    assert!(Checkpoint::dummy(&config, 0, Format::Bf16).is_ok());
    common::says(Checkpoint::dummy(&config, 0, Format::Q4_0), &["mlp.down_proj.weight", "[64, 100] in Q4_0"]);
}

/// A template may stand in four places; what transformers looks at last wins.
#[test]
fn places_of_chat_templates() {
    let folder = common::copy_of("llama-gqa");
    let path = folder.path();
    let sources = |tools| {
        let chat = Checkpoint::open(path).unwrap().chat.unwrap();
        chat.source(tools).unwrap().to_owned()
    };
    assert!(sources(false).contains("im_start"));
    common::edit(path, "tokenizer_config.json", |config| {
        config["chat_template"] = serde_json::json!([
            {"name": "default", "template": "a {{ bos_token }}"}, {"name": "tool_use", "template": "b"}
        ]);
    });
    assert_eq!((sources(false).as_str(), sources(true).as_str()), ("a {{ bos_token }}", "b"));
    let chat = Checkpoint::open(path).unwrap().chat.unwrap();
    let rendered = chat.render(&[], &RenderOptions::default()).unwrap();
    assert_eq!(rendered, "a <|im_start|>");
    std::fs::write(path.join("chat_template.json"), r#"{"chat_template": "c"}"#).unwrap();
    assert_eq!((sources(false).as_str(), sources(true).as_str()), ("c", "c"));
    std::fs::write(path.join("chat_template.jinja"), "d").unwrap();
    assert_eq!((sources(false).as_str(), sources(true).as_str()), ("d", "d"));
    std::fs::create_dir(path.join("additional_chat_templates")).unwrap();
    std::fs::write(path.join("additional_chat_templates/tool_use.jinja"), "e").unwrap();
    assert_eq!((sources(false).as_str(), sources(true).as_str()), ("d", "e"));
    std::fs::write(path.join("chat_template.jinja"), [0xff]).unwrap();
    common::says(Checkpoint::open(path), &["chat_template.jinja", "not UTF-8"]);
}
