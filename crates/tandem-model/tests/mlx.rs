//! MLX-quantized folders: what mlx-lm wrote is read in place, and what does not fit is refused by name.

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use std::collections::BTreeMap;
use std::fs;

use common::{copy_of, edit, fixture, says};
use serde_json::{Value, json};
use tandem_model::decoder::WeightRef;
use tandem_model::format::{Affine, Format, ScaleType};
use tandem_model::{Checkpoint, ModelError};

const FIXTURE: &str = "mlx-llama-gqa";

fn affine(bits: usize, group: usize) -> Format {
    Format::Affine(Affine::new(bits, group, ScaleType::Bf16).unwrap())
}

/// Opens the fixture after `change` to what config.json says of quantization.
fn with_settings(change: impl FnOnce(&mut Value)) -> Result<Checkpoint, ModelError> {
    let folder = copy_of(FIXTURE);
    edit(folder.path(), "config.json", |config| {
        change(&mut config["quantization"]);
        config["quantization_config"] = config["quantization"].clone();
    });
    Checkpoint::open(folder.path())
}

/// A tensor of a safetensors file that a test may damage.
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Opens the fixture after `change` to its tensors.
fn with_tensors(change: impl FnOnce(&mut BTreeMap<String, Entry>)) -> Result<Checkpoint, ModelError> {
    let folder = copy_of(FIXTURE);
    let path = folder.path().join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let entries = tandem_model::safetensors::parse(&path, &file).unwrap().into_iter();
    let mut tensors = entries
        .map(|entry| {
            let bytes = file[entry.range].to_vec();
            (entry.name, Entry { dtype: entry.dtype, shape: entry.shape, bytes })
        })
        .collect();
    change(&mut tensors);
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, Entry { dtype, shape, bytes }) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    fs::write(&path, common::safetensors(&Value::Object(header).to_string(), &data)).unwrap();
    Checkpoint::open(folder.path())
}

/// Cuts a tensor to its first columns.
fn cut(entry: &mut Entry, cols: usize) {
    let [rows, old] = entry.shape[..] else { panic!("a matrix") };
    let size = entry.bytes.len() / rows;
    entry.bytes = entry.bytes.chunks(size).flat_map(|row| row[..size / old * cols].to_vec()).collect();
    entry.shape = vec![rows, cols];
}

#[test]
fn every_module_has_the_format_that_the_folder_says() {
    let checkpoint = Checkpoint::open(&fixture(FIXTURE)).unwrap();
    let format = |name: &str| checkpoint.weights.tensor(name).unwrap().format;
    assert_eq!(format("model.embed_tokens.weight"), affine(4, 64));
    assert_eq!(format("model.layers.0.self_attn.k_proj.weight"), affine(4, 64));
    assert_eq!(format("model.layers.0.self_attn.o_proj.weight"), affine(8, 32));
    assert_eq!(format("lm_head.weight"), affine(8, 32));
    assert_eq!(format("model.layers.1.self_attn.k_proj.weight"), Format::Bf16);
    assert_eq!(format("model.layers.2.mlp.down_proj.weight"), Format::Bf16);
    assert_eq!(checkpoint.weights.tensor("model.embed_tokens.weight").unwrap().shape, [384, 64]);
    assert!(!checkpoint.weights.contains("lm_head.scales"));
}

#[test]
fn rows_are_scaled_by_their_own_groups() {
    let source = Checkpoint::open(&fixture("llama-gqa")).unwrap();
    let quantized = Checkpoint::open(&fixture(FIXTURE)).unwrap();
    for (name, rows, steps) in
        [("model.embed_tokens.weight", Some(100..140), 15.0), ("lm_head.weight", None, 255.0)]
    {
        let weight = WeightRef { rows, ..WeightRef::whole(name) };
        let (a, b) = (source.weights.matrix(&weight).unwrap(), quantized.weights.matrix(&weight).unwrap());
        assert_eq!((a.rows, a.cols), (b.rows, b.cols));
        let (mut left, mut right) = (vec![0.0; a.cols], vec![0.0; a.cols]);
        for row in 0..a.rows {
            a.row_f32(row, &mut left);
            b.row_f32(row, &mut right);
            let range =
                left.iter().copied().fold(f32::MIN, f32::max) - left.iter().copied().fold(f32::MAX, f32::min);
            for (l, r) in left.iter().zip(&right) {
                // MLX moves an end of the range so that zero is kept: up to a step, and the rounding of bfloat16.
                assert!((l - r).abs() <= range * (1.0 / steps + 0.01), "{name} row {row}: {l} {r}");
            }
        }
    }
}

#[test]
fn scales_are_part_of_the_hash() {
    let hash = |checkpoint: Checkpoint| checkpoint.weights.hash().to_owned();
    let damaged = with_tensors(|tensors| tensors.get_mut("lm_head.scales").unwrap().bytes[0] ^= 1).unwrap();
    assert_ne!(hash(damaged), hash(Checkpoint::open(&fixture(FIXTURE)).unwrap()));
}

#[test]
fn settings_that_are_not_read() {
    says(with_settings(|q| q["mode"] = json!("mxfp4")), &["quantization.mode = \"mxfp4\""]);
    says(with_settings(|q| q["bits"] = json!(6)), &["quantization.bits = 6", "4 and 8 bits"]);
    says(with_settings(|q| q["group_size"] = json!(16)), &["quantization.group_size = 16"]);
    says(with_settings(|q| q["bits"] = json!("four")), &["quantization.bits is \"four\""]);
    says(with_settings(|q| *q = json!({"bits": 4})), &["quantization.group_size is not there"]);
    says(
        with_settings(|q| *q = json!({"quant_method": "awq", "bits": 4})),
        &["quant_method = \"awq\"", "MLX"],
    );
    says(with_settings(|q| q["rotation"] = json!("hadamard")), &["quantization.rotation = \"hadamard\""]);
    says(with_settings(|q| q["lm_head"]["bits"] = json!(3)), &["quantization.lm_head.bits = 3"]);
    says(with_settings(|q| q["lm_head"]["sparse"] = json!(true)), &["quantization.lm_head.sparse = true"]);
    says(with_settings(|q| q["lm_head"] = json!(false)), &["quantization.lm_head = false"]);
    // Modules that are stored as floats may be named or not.
    let name = "model.layers.1.self_attn.k_proj";
    assert!(with_settings(|q| q[name] = json!(false)).is_ok());
    // Without the key, the words of a matrix are of no known type.
    let folder = copy_of(FIXTURE);
    edit(folder.path(), "config.json", |config| {
        config.as_object_mut().unwrap().retain(|key, _| !key.starts_with("quantization"));
    });
    says(Checkpoint::open(folder.path()), &["type of tensor", "= U32", "`quantization`"]);
}

#[test]
fn either_key_will_do() {
    for key in ["quantization", "quantization_config"] {
        let folder = copy_of(FIXTURE);
        edit(folder.path(), "config.json", |config| {
            config.as_object_mut().unwrap().remove(key);
        });
        Checkpoint::open(folder.path()).unwrap();
    }
}

#[test]
fn parts_that_do_not_fit() {
    let gone = |name: &'static str| with_tensors(move |tensors| drop(tensors.remove(name)));
    says(gone("lm_head.scales"), &["tensor lm_head.scales is missing"]);
    says(gone("model.embed_tokens.biases"), &["tensor model.embed_tokens.biases is missing"]);
    says(gone("lm_head.weight"), &["lm_head.weight is missing"]);

    let lm_head = |part: &'static str, change: fn(&mut Entry)| {
        with_tensors(move |tensors| change(tensors.get_mut(&format!("lm_head.{part}")).unwrap()))
    };
    says(
        lm_head("scales", |scales| cut(scales, 1)),
        &["tensor lm_head.scales has shape [384, 1], expected [384, 2]"],
    );
    says(
        lm_head("biases", |biases| cut(biases, 1)),
        &["tensor lm_head.biases has shape [384, 1], expected [384, 2]"],
    );
    says(lm_head("biases", |biases| biases.dtype = "F16".into()), &["type of lm_head.biases", "F16"]);
    says(
        lm_head("weight", |weight| cut(weight, 12)),
        &["group_size of lm_head = 32", "48 values", "do not divide into groups of 32"],
    );
    says(lm_head("weight", |weight| weight.dtype = "I32".into()), &["type of tensor lm_head.weight = I32"]);
    // Read with another width than they were packed with, rows have another length.
    says(with_settings(|q| q["lm_head"]["bits"] = json!(4)), &["lm_head.scales has shape [384, 2]"]);
    // Scales of a matrix that is not quantized belong to nothing.
    says(
        with_tensors(|tensors| {
            let scales = Entry { dtype: "BF16".into(), shape: vec![1], bytes: vec![0; 2] };
            tensors.insert("model.layers.1.self_attn.k_proj.scales".into(), scales);
        }),
        &["1 tensors", "model.layers.1.self_attn.k_proj.scales"],
    );
}
