//! Exports as coremltools judges them: valid, and giving the logits that transformers computed. Runs in the judged tier
//! (`TANDEM_JUDGED=1`).

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::{Path, PathBuf};

use common::dequantized::write_golden;
use common::{assert_exports, fixtures, judge, names, python, scaled, source, tiny, try_export};
use tandem_coreml::export::manifest::ActivationFacts;
use tandem_coreml::export::{ExportOptions, KvForm, Quant, Target, export};
use tandem_coreml::mil::{Data, Dim, Feature, FeatureKind, Model, ValueType};
use tandem_coreml::{Package, PackageWriter};
use tandem_model::Checkpoint;

/// Least cosine between the logits of an fp16 package and transformers' in f32.
const COSINE: f64 = 0.9999;

/// Exports `name` and pairs it with its golden file.
fn export_to(folder: &Path, name: &str, label: &str, options: &ExportOptions) -> (PathBuf, PathBuf) {
    let out = folder.join(format!("{name}-{label}"));
    try_export(name, &out, options).unwrap_or_else(|error| panic!("{name}: {error}"));
    (out, fixtures().join(name).join("golden.safetensors"))
}

#[test]
fn judged_every_architecture_computes_what_transformers_does() {
    let Some(python) = judge() else { return };
    let folder = tempfile::tempdir().unwrap();
    let pairs: Vec<_> = names()
        .iter()
        .map(|name| {
            // The frequencies of dynamic rope are those of the longest sequence a package holds.
            let options = match name.as_str() {
                "llama-dynamic" => ExportOptions { context: 113, prefill: 113, ..tiny(Target::Ane) },
                _ => tiny(Target::Ane),
            };
            export_to(folder.path(), name, "ane", &options)
        })
        .collect();
    assert_exports(&python, &pairs, COSINE);
}

#[test]
fn judged_chunks_and_caches_outside_compute_the_same() {
    let Some(python) = judge() else { return };
    let folder = tempfile::tempdir().unwrap();
    let io = ExportOptions { kv: KvForm::Io, ..tiny(Target::Ane) };
    let chunks = ExportOptions { chunks: Some(2), head_parts: Some(3), ..tiny(Target::Ane) };
    let both = ExportOptions { chunks: Some(2), prefill: 32, ..io.clone() };
    let pairs: Vec<_> = ["llama-gqa", "gemma3", "mistral-window", "phi3-longrope"]
        .into_iter()
        .flat_map(|name| {
            [("io", &io), ("chunks", &chunks), ("io-chunks", &both)]
                .map(|(label, options)| export_to(folder.path(), name, label, options))
        })
        .collect();
    assert_exports(&python, &pairs, COSINE);
}

#[test]
fn judged_the_gpu_form_computes_the_same() {
    let Some(python) = judge() else { return };
    let folder = tempfile::tempdir().unwrap();
    let pairs: Vec<_> = names()
        .iter()
        .map(|name| {
            let context = if name == "llama-dynamic" { 113 } else { 128 };
            let options = ExportOptions { context, prefill: context, ..tiny(Target::Gpu) };
            export_to(folder.path(), name, "gpu", &options)
        })
        .collect();
    assert_exports(&python, &pairs, COSINE);
}

/// What no fp16 holds, computed all the same: with norms on both sides of each half, and only before it, with biases.
#[test]
fn judged_residual_streams_beyond_fp16_are_kept_within() {
    let Some(python) = judge() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut pairs = Vec::new();
    for (name, target) in [
        ("gemma3", Target::Ane),
        ("llama-tied-bias", Target::Ane),
        ("llama-tied-bias", Target::Gpu),
        ("gemma3", Target::Gpu),
    ] {
        let (decoder, weights) = Checkpoint::open_network(&fixtures().join(name)).unwrap();
        let decoder = scaled(&decoder, 1e5);
        let out = folder.path().join(format!("{name}-{}", target.name()));
        let manifest = export(source(&decoder, &weights), &out, &tiny(target), &mut |_, _| {}).unwrap();
        let ActivationFacts::Traced(range) = &manifest.activations else {
            panic!("{:?}", manifest.activations)
        };
        assert!(range.residual() > 65504.0, "{name}: {}", range.residual());
        let own = out.with_extension("safetensors");
        write_golden(&decoder, &weights, &out, &fixtures().join(name).join("golden.safetensors"), &own);
        pairs.push((out, own));
    }
    assert_exports(&python, &pairs, COSINE);
}

/// One fixture of each architecture.
const ARCHITECTURES: [&str; 10] = [
    "gemma3",
    "granite",
    "llama-gqa",
    "mistral-window",
    "olmo2",
    "phi3-window",
    "qwen2-window",
    "qwen3",
    "smollm3",
    "mlx-llama-gqa",
];

/// Exports each architecture with compressed weights and judges it against the network of those weights.
fn judge_compressed(python: &Path, target: Target, quants: &[Quant]) {
    let folder = tempfile::tempdir().unwrap();
    let mut pairs = Vec::new();
    for name in ARCHITECTURES {
        for &quant in quants {
            let options = ExportOptions { quant, ..tiny(target) };
            let (out, golden) = export_to(folder.path(), name, &quant.name(), &options);
            let (decoder, weights) = Checkpoint::open_network(&fixtures().join(name)).unwrap();
            let own = out.with_extension("safetensors");
            write_golden(&decoder, &weights, &out, &golden, &own);
            pairs.push((out, own));
        }
    }
    assert_exports(python, &pairs, COSINE);
}

#[test]
fn judged_tables_compute_what_their_weights_say() {
    let Some(python) = judge() else { return };
    judge_compressed(&python, Target::Ane, &[Quant::Lut(4), Quant::Lut(6), Quant::Lut(8)]);
}

#[test]
fn judged_blocks_and_tables_for_the_gpu_compute_what_their_weights_say() {
    let Some(python) = judge() else { return };
    judge_compressed(&python, Target::Gpu, &[Quant::Int(4), Quant::Int(8), Quant::Lut(4)]);
}

/// Writes `package` again with another program.
fn rewrite(package: &Package, out: &Path, model: &Model) {
    let mut writer = PackageWriter::create(out).unwrap();
    let (_, file) = package.weight_files().next().unwrap();
    let mut offset = 64;
    for _ in 0..file.count() {
        let blob = file.record(offset).unwrap();
        let count = (blob.bytes.len() * 8 - blob.padding_bits as usize) / blob.dtype.bits();
        assert_eq!(writer.weights.add(blob.dtype, count, blob.bytes).unwrap(), offset);
        offset = (blob.data_offset + blob.bytes.len() as u64).next_multiple_of(64);
    }
    writer.finish(model).unwrap();
}

#[test]
fn judged_the_validator_finds_what_is_wrong() {
    let Some(python_path) = judge() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (out, _) = export_to(folder.path(), "llama-gqa", "ane", &tiny(Target::Ane));
    let package = Package::open(&out.join("model.mlpackage")).unwrap();
    let wrong_interface = |model: &mut Model| {
        let features = &mut model.functions.get_mut("decode").unwrap().interface.inputs;
        let FeatureKind::Array { shape, .. } = &mut features[0].kind else { panic!("no array") };
        shape[1] += 1;
    };
    let unknown_output = |model: &mut Model| {
        let interface = &mut model.functions.get_mut("decode").unwrap().interface;
        let kind = interface.outputs[0].kind.clone();
        interface.outputs.push(Feature { name: "absent".into(), kind });
    };
    let wrong_shape = |model: &mut Model| {
        let ops = &mut model.functions.get_mut("decode").unwrap().block.ops;
        let op = ops.iter_mut().find(|op| op.kind == "conv").unwrap();
        let ValueType::Tensor(ty) = &mut op.outputs[0].ty else { panic!("no tensor") };
        ty.dims[1] = Dim::Fixed(1);
    };
    let wrong_offset = |model: &mut Model| {
        for op in &mut model.functions.get_mut("decode").unwrap().block.ops {
            if let Some(value) = op.attributes.get_mut("val")
                && let Data::Blob(blob) = &mut value.data
            {
                blob.offset += 64;
                return;
            }
        }
    };
    let wrong_operator = |model: &mut Model| {
        let ops = &mut model.functions.get_mut("decode").unwrap().block.ops;
        ops.iter_mut().find(|op| op.kind == "conv").unwrap().kind = "convolve".into();
    };
    let wrong_opset = |model: &mut Model| model.specification = 8;
    type Spoil<'a> = &'a dyn Fn(&mut Model);
    let cases: [(&str, Spoil<'_>); 6] = [
        ("interface", &wrong_interface),
        ("output", &unknown_output),
        ("shape", &wrong_shape),
        ("offset", &wrong_offset),
        ("operator", &wrong_operator),
        ("opset", &wrong_opset),
    ];
    let same = folder.path().join("same.mlpackage");
    rewrite(&package, &same, package.model());
    let (valid, report) = python(&python_path, "validate_mlpackage.py", &[&same]);
    assert!(valid, "{report}");
    for (name, spoil) in cases {
        let mut model = package.model().clone();
        spoil(&mut model);
        assert_ne!(&model, package.model());
        let path = folder.path().join(format!("{name}.mlpackage"));
        rewrite(&package, &path, &model);
        let (valid, report) = python(&python_path, "validate_mlpackage.py", &[&path]);
        println!("{report}");
        assert!(!valid && report.contains("INVALID"), "{name}: {report}");
    }
    // Bytes of the files themselves.
    for (name, file) in [("weights", "weights/weight.bin"), ("program", "model.mlmodel")] {
        let path = folder.path().join(format!("short-{name}.mlpackage"));
        rewrite(&package, &path, package.model());
        let file = path.join("Data/com.apple.CoreML").join(file);
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() - 100]).unwrap();
        let (valid, report) = python(&python_path, "validate_mlpackage.py", &[&path]);
        assert!(!valid && report.contains("INVALID"), "{name}: {report}");
    }
}

#[test]
fn judged_compression_is_as_good_as_that_of_coremltools() {
    let Some(python_path) = judge() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (success, _) = python(&python_path, "compress_reference.py", &[folder.path()]);
    assert!(success);
    let bytes = std::fs::read(folder.path().join("reference.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let halves = |name: &str| -> Vec<half::f16> {
        let data = file.tensor(name).unwrap().data().to_vec();
        data.as_chunks::<2>().0.iter().map(|bytes| half::f16::from_le_bytes(*bytes)).collect()
    };
    let error = |a: &[half::f16], b: &[half::f16]| {
        a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>() / a.len() as f64
    };
    let mut compared = 0;
    for name in file.names().into_iter().filter(|name| name.ends_with(".weight")) {
        let weight = halves(name);
        let columns = file.tensor(name).unwrap().shape()[1];
        for bits in [4, 6, 8] {
            let theirs = halves(&name.replace(".weight", &format!(".lut{bits}")));
            let ours: Vec<half::f16> = weight
                .chunks(16 * columns)
                .flat_map(|group| {
                    let palette = tandem_coreml::quantize::palette::palettize(group, 1 << bits);
                    palette
                        .indices
                        .into_iter()
                        .map(move |index| palette.table[usize::from(index)])
                        .collect::<Vec<_>>()
                })
                .collect();
            let (ours, theirs) = (error(&weight, &ours), error(&weight, &theirs));
            println!("{name} lut{bits}: mean squared error {:.4} of coremltools'", ours / theirs);
            assert!(ours <= 1.02 * theirs, "{name} lut{bits}: {ours} for {theirs}");
            compared += 1;
        }
        let theirs = halves(&name.replace(".weight", ".int4"));
        for (block, theirs) in weight.chunks(32).zip(theirs.chunks(32)) {
            let (scale, quants) = tandem_coreml::quantize::blocks::quantize(block, 4);
            let scale = f64::from(scale);
            for ((weight, quant), theirs) in block.iter().zip(&quants).zip(theirs) {
                let (ours, theirs) = (scale * f64::from(quant.cast_signed()), f64::from(*theirs));
                // They divide in fp16: what then lies half-way between two steps may go to the other one.
                let steps = f64::from(*weight) / scale;
                let half_way = (steps.fract().abs() - 0.5).abs() < 4e-3;
                let slack = if half_way { scale } else { 0.0 };
                // Rounding of the product to fp16.
                assert!(
                    (ours - theirs).abs() <= slack + 1e-3 * theirs.abs() + 1e-7,
                    "{ours} for {theirs}, {steps} steps"
                );
            }
        }
    }
    assert_eq!(compared, 9);
}
