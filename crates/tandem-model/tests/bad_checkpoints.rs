//! Checkpoints with one thing wrong, each refused by name.

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use std::fs;
use std::path::Path;

use common::{Gguf, copy_of, edit, fixture, safetensors, says};
use serde_json::json;
use tandem_model::{Checkpoint, ModelError};

/// Opens llama-gqa after `change` to its config.json.
fn with_config(change: impl FnOnce(&mut serde_json::Value)) -> Result<Checkpoint, ModelError> {
    let folder = copy_of("llama-gqa");
    edit(folder.path(), "config.json", change);
    Checkpoint::open(folder.path())
}

#[test]
fn files_that_are_not_there() {
    says(Checkpoint::open(Path::new("/nowhere/at/all")), &["/nowhere/at/all is missing", ".gguf file"]);
    let empty = tempfile::tempdir().unwrap();
    says(Checkpoint::open(empty.path()), &["config.json is missing"]);
    fs::write(empty.path().join("model-q4.gguf"), "").unwrap();
    says(Checkpoint::open(empty.path()), &["give that file", "model-q4.gguf"]);

    let folder = copy_of("llama-gqa");
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    says(Checkpoint::open(folder.path()), &["tokenizer.json is missing", "copy tokenizer.json"]);
    fs::write(folder.path().join("tokenizer.model"), "").unwrap();
    says(Checkpoint::open(folder.path()), &["tokenizer.json is missing", "tokenizer.model; convert"]);

    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    says(Checkpoint::open(folder.path()), &["model.safetensors is missing"]);
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    says(Checkpoint::open(folder.path()), &["only pytorch_model.bin", "convert it with transformers"]);

    let folder = copy_of("llama-gqa");
    fs::write(folder.path().join("config.json"), "").unwrap();
    says(Checkpoint::open(folder.path()), &["config.json is damaged", "empty"]);
    fs::remove_file(folder.path().join("config.json")).unwrap();
    fs::write(folder.path().join("adapter_config.json"), "{}").unwrap();
    says(Checkpoint::open(folder.path()), &["LoRA adapter"]);
}

#[test]
fn shards() {
    let folder = copy_of("llama3-rope");
    let path = folder.path();
    fs::remove_file(path.join("model-00002-of-00002.safetensors")).unwrap();
    says(Checkpoint::open_network(path), &["model-00002-of-00002.safetensors is missing", "index"]);

    fs::copy(path.join("model-00001-of-00002.safetensors"), path.join("model-00002-of-00002.safetensors"))
        .unwrap();
    says(Checkpoint::open_network(path), &["00002", "is in another shard too"]);

    let folder = copy_of("llama3-rope");
    let path = folder.path();
    edit(path, "model.safetensors.index.json", |index| {
        index["weight_map"]["extra"] = json!("model-00001-of-00002.safetensors");
    });
    says(Checkpoint::open_network(path), &["tensor extra should be in model-00001"]);
    edit(path, "model.safetensors.index.json", |index| {
        index["weight_map"]["extra"] = json!("../elsewhere.safetensors");
    });
    says(Checkpoint::open_network(path), &["../elsewhere.safetensors"]);
    fs::write(path.join("model.safetensors.index.json"), "{}").unwrap();
    says(Checkpoint::open_network(path), &["index.json is damaged", "weight_map"]);
}

#[test]
fn architectures_and_keys() {
    says(
        with_config(|c| c["architectures"] = json!(["MambaForCausalLM"])),
        &["architectures = [\"MambaForCausalLM\"]", "LlamaForCausalLM"],
    );
    says(with_config(|c| c["model_type"] = json!("mistral")), &["model_type = \"mistral\""]);
    says(
        with_config(|c| {
            c.as_object_mut().unwrap().remove("architectures");
            c["model_type"] = json!("mamba");
        }),
        &["model_type = \"mamba\"", "Tandem knows llama"],
    );
    says(
        with_config(|c| c["logit_bias_scale"] = json!(2.5)),
        &["logit_bias_scale = 2.5", "does not know this key"],
    );
    says(
        with_config(|c| c["quantization_config"] = json!({"bits": 4, "quant_method": "gptq"})),
        &["quantization_config.quant_method = \"gptq\"", "MLX"],
    );
    says(with_config(|c| c["hidden_act"] = json!("gelu")), &["hidden_act = \"gelu\""]);
    says(with_config(|c| c["pretraining_tp"] = json!(2)), &["pretraining_tp = 2"]);
    assert!(with_config(|c| c["quantization_config"] = json!(null)).is_ok());
    assert!(with_config(|c| c["pretraining_tp"] = json!(1.0)).is_ok());
}

#[test]
fn numbers() {
    for (key, value) in [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-64)),
        ("hidden_size", json!("64")),
        ("vocab_size", json!(1e300)),
        ("num_attention_heads", json!(0)),
        ("num_hidden_layers", json!(1_000_000_000)),
        ("intermediate_size", json!(u64::MAX)),
        ("max_position_embeddings", json!(true)),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!(-1.0)),
        ("rope_theta", json!("many")),
        ("tie_word_embeddings", json!(1)),
        ("rope_scaling", json!([])),
    ] {
        says(with_config(|c| c[key] = value), &[key, "expected"]);
    }
    says(
        with_config(|c| c["num_key_value_heads"] = json!(3)),
        &["num_key_value_heads = 3 does not divide 4 heads"],
    );
    says(with_config(|c| c["head_dim"] = json!(15)), &["head_dim = 15 is odd"]);
    says(with_config(|c| c["head_dim"] = json!(1 << 29)), &["head_dim = 536870912 is absurd"]);
    says(
        with_config(|c| {
            c["head_dim"] = json!(null);
            c["num_attention_heads"] = json!(6);
        }),
        &["num_attention_heads does not divide hidden_size"],
    );
    says(
        with_config(|c| {
            c.as_object_mut().unwrap().remove("hidden_size");
        }),
        &["hidden_size is not there"],
    );
}

#[test]
fn rope_settings() {
    let scaling = |value: serde_json::Value| with_config(|c| c["rope_scaling"] = value);
    says(
        scaling(json!({"rope_type": "spiral", "factor": 4.0})),
        &["rope_scaling.rope_type = \"spiral\"", "llama3"],
    );
    says(scaling(json!({"type": "ntk", "factor": 4.0})), &["rope_scaling.type = \"ntk\""]);
    says(scaling(json!({"type": "dynamic"})), &["rope_scaling.factor is not there"]);
    says(
        scaling(json!({"type": "yarn", "factor": 4.0, "extrapolation_factor": 1.0})),
        &["rope_scaling.extrapolation_factor = 1.0"],
    );
    says(with_config(|c| c["rope_theta"] = json!(1.0)), &["rope_theta = 1 must be above 1"]);
    says(scaling(json!({"type": "linear", "rope_type": "llama3"})), &["rope_scaling.type"]);
    says(scaling(json!({"type": "linear"})), &["rope_scaling.factor is not there"]);
    says(scaling(json!({"type": "linear", "factor": 2.0, "beta": 1})), &["rope_scaling.beta = 1"]);
    let flat = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    says(scaling(flat), &["rope_scaling.high_freq_factor must be above"]);
    says(
        with_config(|c| c["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 1.5})),
        &["rope_theta = 50000.0", "rope_parameters says another value"],
    );
    says(with_config(|c| c["partial_rotary_factor"] = json!(0.5)), &["partial_rotary_factor = 0.5"]);
    assert!(scaling(json!({"type": "linear", "factor": 2.0})).is_ok());
}

#[test]
fn config_and_weights_that_do_not_belong_together() {
    says(
        with_config(|c| c["vocab_size"] = json!(400)),
        &["model.embed_tokens.weight", "[384, 64]", "[400, 64]"],
    );
    says(with_config(|c| c["intermediate_size"] = json!(161)), &["mlp.gate_proj.weight", "[160, 64]"]);
    says(
        with_config(|c| c["num_hidden_layers"] = json!(4)),
        &["tensor model.layers.3.input_layernorm.weight is missing"],
    );
    says(
        with_config(|c| c["num_hidden_layers"] = json!(2)),
        &["9 tensors", "llama", "model.layers.2.input_layernorm.weight", ", ..."],
    );
    says(with_config(|c| c["attention_bias"] = json!(true)), &["self_attn.q_proj.bias is missing"]);
    says(
        with_config(|c| c["tie_word_embeddings"] = json!(true)),
        &["tie_word_embeddings", "differs from the embedding"],
    );
}

#[test]
fn tensors_of_other_types() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(fixture("llama-gqa/config.json"), folder.path().join("config.json")).unwrap();
    let write = |name: &str| {
        let header = format!(r#"{{"{name}":{{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}}}"#);
        fs::write(folder.path().join("model.safetensors"), safetensors(&header, &[0; 4])).unwrap();
        Checkpoint::open_network(folder.path())
    };
    says(write("model.norm.weight"), &["type of tensor model.norm.weight = F8_E4M3"]);
    // A leftover that holds no weights is passed over.
    says(write("model.layers.0.self_attn.rotary_emb.inv_freq"), &["model.embed_tokens.weight is missing"]);
}

#[test]
fn a_redundant_head_and_stored_frequencies_are_tolerated() {
    let folder = copy_of("llama-tied-bias");
    let path = folder.path().join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let header_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&file[8..8 + header_len]).unwrap();
    let mut data = file[8 + header_len..].to_vec();
    let embedding = header["model.embed_tokens.weight"].clone();
    let bytes = |i: usize| embedding["data_offsets"][i].as_u64().unwrap() as usize;
    let copy = data[bytes(0)..bytes(1)].to_vec();
    let mut append = |name: &str, shape: serde_json::Value, bytes: &[u8]| {
        let offsets = [data.len(), data.len() + bytes.len()];
        header[name] = json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
        data.extend_from_slice(bytes);
    };
    append("lm_head.weight", embedding["shape"].clone(), &copy);
    append("model.layers.0.self_attn.rotary_emb.inv_freq", json!([2]), &[0; 8]);
    let text = header.to_string();
    fs::write(&path, safetensors(&text, &data)).unwrap();
    let (decoder, weights) = Checkpoint::open_network(folder.path()).unwrap();
    assert_eq!(decoder.head.weight, decoder.embedding);
    assert!(!weights.contains("lm_head.weight"));

    data[offset_of(&text, "lm_head.weight")] ^= 1;
    fs::write(&path, safetensors(&text, &data)).unwrap();
    says(Checkpoint::open_network(folder.path()), &["tie_word_embeddings = true", "differs"]);
}

fn offset_of(header: &str, tensor: &str) -> usize {
    let header: serde_json::Value = serde_json::from_str(header).unwrap();
    header[tensor]["data_offsets"][0].as_u64().unwrap() as usize
}

#[test]
fn tokenizers() {
    let tokenizer = |change: &dyn Fn(&mut serde_json::Value)| {
        let folder = copy_of("llama-gqa");
        edit(folder.path(), "tokenizer.json", change);
        Checkpoint::open(folder.path())
    };
    says(
        tokenizer(&|t| t["model"]["type"] = json!("WordLevel")),
        &["tokenizer.json", "model.type = WordLevel"],
    );
    says(
        tokenizer(&|t| t["model"] = json!({"type": "Unigram", "vocab": [["a", -1.0]]})),
        &["tokenizer.json", "model.type = Unigram"],
    );
    says(
        tokenizer(&|t| t["decoder"] = json!({"type": "WordPiece"})),
        &["decoder = {\"type\":\"WordPiece\"}"],
    );
    says(tokenizer(&|t| t["decoder"] = json!(null)), &["decoder = null"]);
    says(tokenizer(&|t| t["pre_tokenizer"] = json!({"type": "Strange"})), &["pre_tokenizer"]);
    says(
        tokenizer(&|t| t["model"]["vocab"]["zz"] = json!(4_000_000_000u32)),
        &["token id 4000000000 is absurd"],
    );
    says(tokenizer(&|t| t["model"]["vocab"]["zz"] = json!(17)), &["share id 17"]);
    says(tokenizer(&|t| t["model"]["vocab"]["zz"] = json!(384)), &["token 384 (zz)", "384 embeddings"]);
    says(tokenizer(&|t| t["model"]["merges"][0] = json!("nospace")), &["tokenizer.json"]);
    says(tokenizer(&|t| t["model"]["merges"] = json!(["a"])), &["the merge \"a\" is no pair"]);
    says(tokenizer(&|t| t["model"]["merges"] = json!([["a".repeat(99), "b"]])), &["gives no token"]);
    says(tokenizer(&|t| t["model"]["merges"] = json!([["é", "b"]])), &["tokenizer.json"]);
    says(tokenizer(&|t| t["model"]["dropout"] = json!(0.5)), &["model.dropout"]);
    says(
        tokenizer(&|t| t["model"]["end_of_word_suffix"] = json!("</w>")),
        &["model.end_of_word_suffix = </w>"],
    );
    says(tokenizer(&|t| t["added_tokens"][0]["id"] = json!(5)), &["added token <|endoftext|> has id 5"]);
    let folder = copy_of("llama-gqa");
    fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    says(Checkpoint::open(folder.path()), &["not a tokenizer.json"]);
    fs::write(folder.path().join("tokenizer_config.json"), "[]").unwrap();
    says(Checkpoint::open(folder.path()), &["tokenizer_config.json", "not a JSON object"]);
}

#[test]
fn an_added_token_past_the_embedding_is_refused_only_when_used() {
    let folder = copy_of("llama-gqa");
    edit(folder.path(), "tokenizer.json", |t| {
        let mut token = t["added_tokens"][0].clone();
        (token["id"], token["content"]) = (json!(384), json!("<|image|>"));
        t["added_tokens"].as_array_mut().unwrap().push(token);
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(checkpoint.tokenizer.encode("Hello", true).is_ok());
    says(checkpoint.tokenizer.encode("Hello <|image|>", true), &["token 384 (<|image|>)", "384 embeddings"]);
}

#[test]
fn generation_settings() {
    let generation = |value: serde_json::Value| {
        let folder = copy_of("llama-gqa");
        fs::write(folder.path().join("generation_config.json"), value.to_string()).unwrap();
        Checkpoint::open(folder.path()).map(|checkpoint| checkpoint.generation)
    };
    says(generation(json!({"eos_token_id": "two"})), &["eos_token_id is not a token id"]);
    says(generation(json!({"temperature": -1})), &["temperature is not a number"]);
    let read = generation(json!({"eos_token_id": [7, 3], "top_k": 40, "num_beams": 4})).unwrap();
    assert_eq!(read.top_k, Some(40));
    assert_eq!(read.not_read, ["num_beams"]);
    // The template closes turns with <|im_end|>, id 2.
    assert_eq!(read.eos_token_ids, [2, 3, 7]);
}

fn open_gguf(bytes: &[u8]) -> Result<Checkpoint, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path)
}

/// A whole model of one layer: width 32, one head, 32 tokens of one byte each.
fn tiny() -> Gguf {
    let tokens: Vec<String> = (0..32).map(|i| char::from(b'A' + i).to_string()).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let mut file = Gguf::default()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 64)
        .u32("llama.embedding_length", 32)
        .u32("llama.feed_forward_length", 32)
        .u32("llama.attention.head_count", 1)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .texts("tokenizer.ggml.tokens", &tokens)
        .texts("tokenizer.ggml.merges", &[]);
    let names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let names = names.map(|name| format!("blk.0.{name}.weight"));
    for (i, name) in names.iter().map(String::as_str).chain(["token_embd.weight"]).enumerate() {
        file = file.tensor(name, &[32, 32], 0, i as u64 * 4096);
    }
    for (i, name) in
        ["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"].iter().enumerate()
    {
        file = file.tensor(name, &[32], 0, 8 * 4096 + i as u64 * 128);
    }
    file
}

const TINY_DATA: usize = 8 * 4096 + 3 * 128;

#[test]
fn gguf_models() {
    let data = [0; TINY_DATA + 4096];
    let checkpoint = open_gguf(&tiny().finish(&data)).unwrap();
    assert_eq!(checkpoint.tokenizer.encode("CAB", true).unwrap(), [2, 0, 1]);
    says(
        open_gguf(&tiny().finish(&data[..TINY_DATA - 32])),
        &["output_norm.weight ends at byte", "cut short"],
    );
    says(open_gguf(&tiny().u32("llama.expert_count", 8).finish(&data)), &["llama.expert_count = 8"]);
    says(
        open_gguf(&tiny().f32("llama.attn_logit_softcapping", 30.0).finish(&data)),
        &["llama.attn_logit_softcapping = 30"],
    );
    says(
        open_gguf(&tiny().text("llama.rope.scaling.type", "spiral").finish(&data)),
        &["llama.rope.scaling.type = \"spiral\""],
    );
    says(
        open_gguf(&tiny().u32("llama.rope.dimension_count", 16).finish(&data)),
        &["llama.rope.dimension_count = 16"],
    );
    says(
        open_gguf(&tiny().i32s("llama.attention.head_count_kv", &[1]).finish(&data)),
        &["llama.attention.head_count_kv"],
    );
    says(open_gguf(&tiny().text("general.type", "adapter").finish(&data)), &["general.type = adapter"]);
    says(
        open_gguf(&tiny().u32("llama.vocab_size", 40).finish(&data)),
        &["token_embd.weight", "[32, 32]", "[40, 32]"],
    );
    let extra = tiny().tensor("blk.0.attn_gate.weight", &[32], 0, TINY_DATA as u64);
    says(open_gguf(&extra.finish(&data)), &["1 tensors", "blk.0.attn_gate.weight"]);
    let other = Gguf::default().text("general.architecture", "rwkv7");
    says(open_gguf(&other.finish(&[])), &["general.architecture = rwkv7", "Tandem knows llama"]);
    says(open_gguf(&Gguf::default().finish(&[])), &["general.architecture is not there"]);
}

#[test]
fn gguf_rope_factors_become_part_of_the_decoder() {
    let file = tiny().tensor("rope_freqs.weight", &[16], 0, TINY_DATA as u64);
    let mut data = vec![0; TINY_DATA];
    data.extend([2f32; 16].iter().flat_map(|factor| factor.to_le_bytes()));
    let decoder = open_gguf(&file.finish(&data)).unwrap().decoder;
    let tandem_model::decoder::Mixer::Attention(attention) = &decoder.layers[0].mixer;
    let frequencies = attention.rope.as_ref().unwrap().factors(1).inverse_frequencies;
    assert_eq!((frequencies.len(), frequencies[0]), (16, 0.5));

    let file = tiny().tensor("rope_freqs.weight", &[8], 0, TINY_DATA as u64);
    says(open_gguf(&file.finish(&data)), &["rope_freqs.weight", "[8]", "[16]"]);
    let file = tiny().tensor("rope_freqs.weight", &[16], 0, TINY_DATA as u64);
    data[TINY_DATA..TINY_DATA + 4].copy_from_slice(&0f32.to_le_bytes());
    says(open_gguf(&file.finish(&data)), &["rope_freqs.weight that are not positive"]);
}

#[test]
fn gguf_tokenizers() {
    let data = [0; TINY_DATA];
    // Later entries cannot replace earlier ones, so these files stand without the right ones.
    let model = |tokenizer: fn(Gguf) -> Gguf| {
        let whole = Gguf::default()
            .text("general.architecture", "llama")
            .u32("llama.block_count", 1)
            .u32("llama.context_length", 64)
            .u32("llama.embedding_length", 2)
            .u32("llama.feed_forward_length", 2)
            .u32("llama.attention.head_count", 1)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
        let mut file = tokenizer(whole);
        let names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
        let names = names.map(|name| format!("blk.0.{name}.weight"));
        for (i, name) in names.iter().map(String::as_str).chain(["token_embd.weight"]).enumerate() {
            file = file.tensor(name, &[2, 2], 0, i as u64 * 32);
        }
        for (i, name) in
            ["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"].iter().enumerate()
        {
            file = file.tensor(name, &[2], 0, 256 + i as u64 * 32);
        }
        open_gguf(&file.finish(&data))
    };
    fn gpt2(file: Gguf, tokens: &[&str], merges: &[&str]) -> Gguf {
        file.text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "gpt-2")
            .texts("tokenizer.ggml.tokens", tokens)
            .texts("tokenizer.ggml.merges", merges)
    }
    assert!(model(|f| gpt2(f, &["a", "b"], &[])).is_ok());
    says(model(|f| f), &["no tokenizer"]);
    says(
        model(|f| f.text("tokenizer.ggml.model", "bert")),
        &["tokenizer.ggml.model = bert", "gpt2 and llama"],
    );
    says(model(|f| f.text("tokenizer.ggml.model", "gpt2")), &["tokenizer.ggml.tokens is no list"]);
    says(model(|f| gpt2(f, &["a"], &[])), &["1 tokens", "2 embeddings"]);
    says(model(|f| gpt2(f, &["a", "a"], &[])), &["tokens 0 and 1 are both spelled \"a\""]);
    says(model(|f| gpt2(f, &["a", "b"], &["ab"])), &["the merge \"ab\" is no pair"]);
    says(model(|f| gpt2(f, &["a", "b"], &["a b"])), &["model.gguf", "a and b"]);
    says(
        model(|f| {
            let f = f.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "viking");
            f.texts("tokenizer.ggml.tokens", &["a", "b"])
        }),
        &["tokenizer.ggml.pre = viking", "tekken"],
    );
    says(
        model(|f| f.text("tokenizer.ggml.model", "gpt2").texts("tokenizer.ggml.tokens", &["a", "b"])),
        &["tokenizer.ggml.pre = absent"],
    );
    says(
        model(|f| gpt2(f, &["a", "b"], &[]).u32("tokenizer.ggml.bos_token_id", 2)),
        &["bos_token_id", "not a token id"],
    );
    says(
        model(|f| gpt2(f, &["a", "b"], &[]).u32("tokenizer.ggml.add_bos_token", 1)),
        &["add_bos_token", "boolean"],
    );
    let both = model(|f| {
        gpt2(f, &["a", "b"], &[])
            .u32("tokenizer.ggml.bos_token_id", 0)
            .u32("tokenizer.ggml.eos_token_id", 1)
            .bool("tokenizer.ggml.add_bos_token", true)
            .bool("tokenizer.ggml.add_eos_token", true)
    });
    let tokenizer = both.unwrap().tokenizer;
    assert_eq!(tokenizer.encode("ba", true).unwrap(), [0, 1, 0, 1]);
    assert_eq!(tokenizer.encode("ba", false).unwrap(), [1, 0]);

    fn llama(file: Gguf) -> Gguf {
        file.text("tokenizer.ggml.model", "llama").texts("tokenizer.ggml.tokens", &["a", "b"])
    }
    says(model(llama), &["tokenizer.ggml.scores is no list of 2 numbers"]);
    says(model(|f| llama(f).i32s("tokenizer.ggml.scores", &[1, 2])), &["tokenizer.ggml.scores"]);
    says(model(|f| llama(f).f32s("tokenizer.ggml.scores", &[1.0])), &["tokenizer.ggml.scores"]);
    says(
        model(|f| {
            llama(f).f32s("tokenizer.ggml.scores", &[0.0; 2]).u32("tokenizer.ggml.unknown_token_id", 2)
        }),
        &["unknown_token_id = 2"],
    );
    says(
        model(|f| {
            llama(f).f32s("tokenizer.ggml.scores", &[0.0; 2]).u32("tokenizer.ggml.add_space_prefix", 1)
        }),
        &["add_space_prefix", "boolean"],
    );
    // Scores may be anything; a byte that no token stands for is an error when it comes up.
    let odd = model(|f| {
        llama(f)
            .f32s("tokenizer.ggml.scores", &[f32::NAN, -0.0])
            .bool("tokenizer.ggml.add_bos_token", false)
            .bool("tokenizer.ggml.add_space_prefix", false)
    });
    let tokenizer = odd.unwrap().tokenizer;
    assert_eq!(tokenizer.encode("abba", true).unwrap(), [0, 1, 1, 0]);
    says(tokenizer.encode("abc", false), &["no token for the byte 0x63"]);
}
