//! The network that a package holds: its weights as the package's tables and scales give them, computed by the CPU engine
//! in f32 (which is within 1e-6 of transformers, see `tandem-cpu/tests/golden.rs`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use half::f16;
use tandem_coreml::mil::{Arg, Data, Op, Value};
use tandem_coreml::{DType, Package};
use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::{Engine, Input, Row, RowOut, Want, Which};
use tandem_model::Weights;
use tandem_model::decoder::{Decoder, Linear, Mixer, WeightRef};
use tandem_model::format::Format;
use tandem_model::weights::Tensor;

/// Every weight of a package by its name in the program, decompressed: shape and values.
fn weights_of(package: &Package) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut out = BTreeMap::new();
    for op in package.model().functions.values().flat_map(|function| function.block.walk()) {
        let Some(output) = op.outputs.first() else { continue };
        let shape = || output.ty.tensor().unwrap().shape().unwrap();
        let values = match op.kind.as_str() {
            "const" if matches!(op.attributes["val"].data, Data::Blob(_)) => {
                halves(package, &op.attributes["val"])
            }
            "constexpr_lut_to_dense" => {
                let (indices, lut) = (argument(op, "indices"), halves(package, argument(op, "lut")));
                let (indices, bits) = integers(package, indices);
                let tables = lut.len() >> bits;
                let each = indices.len() / tables;
                indices
                    .iter()
                    .enumerate()
                    .map(|(i, index)| lut[((i / each) << bits) + *index as u8 as usize])
                    .collect()
            }
            "constexpr_blockwise_shift_scale" => {
                let (data, bits) = integers(package, argument(op, "data"));
                let scale = halves(package, argument(op, "scale"));
                let block = data.len() / scale.len();
                let signed = |quant: i8| if bits == 4 { quant << 4 >> 4 } else { quant };
                let value = |(i, quant): (usize, &i8)| {
                    f16::from_f32(f32::from(signed(*quant)) * scale[i / block]).to_f32()
                };
                data.iter().enumerate().map(value).collect()
            }
            _ => continue,
        };
        out.insert(output.name.clone(), (shape(), values));
    }
    out
}

fn argument<'a>(op: &'a Op, key: &str) -> &'a Value {
    match &op.inputs[key][0] {
        Arg::Value(value) => value,
        Arg::Name(name) => panic!("{key} of {} is {name}", op.name()),
    }
}

fn halves(package: &Package, value: &Value) -> Vec<f32> {
    let bytes = package.bytes(value).unwrap().unwrap();
    bytes.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect()
}

/// Elements of 4, 6 or 8 bits, unsigned in an `i8`.
fn integers(package: &Package, value: &Value) -> (Vec<i8>, usize) {
    let ty = value.ty.tensor().unwrap();
    let bits = ty.dtype.bits();
    assert!([DType::U4, DType::U6, DType::U8, DType::I4, DType::I8].contains(&ty.dtype));
    let bytes = package.bytes(value).unwrap().unwrap();
    let bit = |at: usize| u8::from(bytes[at / 8] >> (at % 8) & 1 == 1);
    let element = |i: usize| (0..bits).fold(0u8, |sum, j| sum | bit(i * bits + j) << j).cast_signed();
    ((0..ty.elements().unwrap()).map(element).collect(), bits)
}

/// `decoder` and its weights with every matrix as the export in `folder` holds it.
fn network(decoder: &Decoder, weights: &Weights, folder: &Path) -> (Decoder, Weights) {
    let mut tensors: BTreeMap<String, Tensor> =
        weights.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
    let mut decoder = decoder.clone();
    let mut stored = BTreeMap::new();
    let mut packages: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "mlpackage"))
        .collect();
    packages.sort();
    for package in packages {
        stored.extend(weights_of(&Package::open(&package).unwrap()));
    }
    let mut put = |name: &str, parts: &[&(Vec<usize>, Vec<f32>)]| {
        let cols = parts[0].0[1];
        let values: Vec<u8> =
            parts.iter().flat_map(|(_, values)| values).flat_map(|v| v.to_le_bytes()).collect();
        let shape = vec![values.len() / 4 / cols, cols];
        let tensor = Tensor { format: Format::F32, shape, values: values.into(), groups: None };
        tensors.insert(name.to_owned(), tensor);
        WeightRef::whole(name)
    };
    for (i, layer) in decoder.layers.iter_mut().enumerate() {
        let Mixer::Attention(attention) = &mut layer.mixer;
        let mlp = &mut layer.mlp;
        let linears: [(&mut Linear, &str); 7] = [
            (&mut attention.q, "q"),
            (&mut attention.k, "k"),
            (&mut attention.v, "v"),
            (&mut attention.o, "o"),
            (&mut mlp.gate, "gate"),
            (&mut mlp.up, "up"),
            (&mut mlp.down, "down"),
        ];
        for (linear, label) in linears {
            let name = format!("layer_{i}_{label}_weight");
            linear.weight = put(&name, &[&stored[&name]]);
        }
    }
    let heads: Vec<_> = match stored.get("head_logits_weight") {
        Some(head) => vec![head],
        None => (0..).map_while(|i| stored.get(&format!("head_{i}_weight"))).collect(),
    };
    decoder.head.weight = put("judged_head", &heads);
    if let Some(table) = stored.get("embedding_weight") {
        decoder.embedding = put("judged_embedding", &[table]);
    }
    (decoder, Weights::new(tensors))
}

/// Writes a golden file for the export in `folder`: logits at every position of the sequences in `golden`.
pub fn write_golden(decoder: &Decoder, weights: &Weights, folder: &Path, golden: &Path, out: &Path) {
    let (decoder, weights) = network(decoder, weights, folder);
    let options =
        CpuOptions { threads: Some(1), memory_budget: Some(256 << 20), ..CpuOptions::default() }.exact();
    let mut engine =
        CpuEngine::load(&decoder, Arc::new(weights), &options, &mut (Box::new(|_| ()) as _)).unwrap();
    let bytes = std::fs::read(golden).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut kept: Vec<(String, Vec<usize>, Vec<u8>, safetensors::Dtype)> = vec![];
    for sequence in 0..2 {
        let ids = file.tensor(&format!("ids.{sequence}")).unwrap().data().to_vec();
        let tokens: Vec<u32> = ids.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
        let len = tokens.len();
        let seq = engine.open(len, None).unwrap();
        let row = Row { seq, input: Input::Tokens(tokens), want: Want::Logits(Which::All) };
        let ticket = engine.submit(&[row]).unwrap();
        let RowOut::Logits(logits) = engine.collect(ticket).unwrap().remove(0) else { panic!("no logits") };
        let logits: Vec<u8> = logits.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let positions: Vec<u8> = (0..len as i32).flat_map(i32::to_le_bytes).collect();
        let vocab = decoder.vocab_size;
        kept.push((format!("ids.{sequence}"), vec![len], ids, safetensors::Dtype::I32));
        kept.push((format!("positions.{sequence}"), vec![len], positions, safetensors::Dtype::I32));
        kept.push((format!("logits.{sequence}"), vec![len, vocab], logits, safetensors::Dtype::F32));
    }
    let views = kept.iter().map(|(name, shape, data, dtype)| {
        (name.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, out).unwrap();
}
