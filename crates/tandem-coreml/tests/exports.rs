//! Exports without a judge: two are the same bytes, and wishes that cannot be granted are refused by name.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::{Path, PathBuf};

use common::{scaled, tiny, try_export};
use tandem_coreml::export::manifest::{ActivationFacts, Manifest};
use tandem_coreml::export::{ExportOptions, KvForm, Quant, Sample, Source, Target, export};
use tandem_coreml::mil::ValueType;
use tandem_coreml::{DType, Package};
use tandem_model::decoder::{Decoder, Mixer};

fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push((path.strip_prefix(folder).unwrap().to_owned(), std::fs::read(&path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

#[test]
fn two_exports_are_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let options = ExportOptions { quant: Quant::Lut(4), chunks: Some(2), ..tiny(Target::Ane) };
    let [a, b] = ["a", "b"].map(|name| {
        let out = folder.path().join(name);
        try_export("gemma3", &out, &options).unwrap();
        files(&out)
    });
    assert!(a.len() >= 8, "{}", a.len());
    assert!(a == b);
}

#[test]
fn functions_share_their_weights_and_states_suit_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let manifest = try_export("gemma3", &out, &tiny(Target::Ane)).unwrap();
    let package = Package::open(&out.join(&manifest.packages[0].file)).unwrap();
    let file = package.weight_files().next().unwrap().1;
    // Every matrix and vector of the network once, but for the embedding.
    let params: u64 = {
        let (decoder, _) =
            tandem_model::Checkpoint::open_network(&common::fixtures().join("gemma3")).unwrap();
        let uses = decoder.weight_uses();
        uses.iter().skip(1).map(|used| used.shape.iter().product::<usize>() as u64).sum()
    };
    let records = u64::from(file.count());
    assert!(
        file.bytes() >= 2 * params && file.bytes() <= 64 + 2 * params + 128 * records,
        "{}",
        file.bytes()
    );
    for name in ["decode", "prefill"] {
        let (_, function) = package.function(Some(name)).unwrap();
        let states: Vec<_> = function.states().collect();
        assert_eq!(states.iter().map(|state| state.0).collect::<Vec<_>>(), ["kv", "kv_window"]);
        for (_, ty) in states {
            let shape = ty.shape().unwrap();
            assert!(shape[3].is_multiple_of(32), "{shape:?}");
        }
        // Every tensor that is computed is fp16 of at most rank 4: no operator counts slots.
        for op in function.block.ops.iter().filter(|op| op.kind != "const") {
            for output in &op.outputs {
                let ValueType::Tensor(ty) = &output.ty else { panic!("{}", output.name) };
                assert!(ty.dtype == DType::F16 && ty.dims.len() <= 4, "{} {ty}", output.name);
            }
        }
    }
}

/// A network whose random weights keep small, and one whose residual stream is beyond fp16.
#[test]
fn the_residual_streams_factor_follows_the_trace() {
    let folder = tempfile::tempdir().unwrap();
    let (decoder, weights) =
        tandem_model::Checkpoint::open_network(&common::fixtures().join("gemma3")).unwrap();
    let run = |name: &str, decoder: &Decoder, sample: Sample<'_>| {
        let source = Source { sample, ..common::source(decoder, &weights) };
        let out = folder.path().join(name);
        let result = export(source, &out, &tiny(Target::Ane), &mut |_, _| {});
        result.map(|manifest| {
            let json = std::fs::read(out.join("tandem.json")).unwrap();
            assert_eq!(serde_json::from_slice::<Manifest>(&json).unwrap(), manifest);
            manifest
        })
    };
    let tokens = [5, 6, 7];
    let manifest = run("small", &decoder, Sample::Tokens(&tokens)).unwrap();
    let ActivationFacts::Traced(range) = &manifest.activations else { panic!("{:?}", manifest.activations) };
    assert_eq!((range.tokens, range.layers.len()), (3, decoder.layers.len()));
    assert!(range.residual() > 0.0 && range.layers.iter().all(|layer| layer.inside > 0.0), "{range:?}");
    assert_eq!(manifest.residual_factor, 1.0);

    let manifest = run("untraced", &decoder, Sample::Without("it is a test")).unwrap();
    assert_eq!(manifest.activations, ActivationFacts::NotTraced("it is a test".into()));
    assert_eq!(manifest.residual_factor, 1.0 / 32.0);

    let large = scaled(&decoder, 1e5);
    let manifest = run("large", &large, Sample::Tokens(&tokens)).unwrap();
    let ActivationFacts::Traced(range) = &manifest.activations else { panic!("{:?}", manifest.activations) };
    let (most, factor) = (range.residual(), manifest.residual_factor);
    assert!(
        most > 65504.0 && most * factor * 4.0 <= 65504.0 && most * factor * 8.0 > 65504.0,
        "{most} {factor}"
    );

    // Within a layer nothing is scaled: what fp16 cannot hold there is refused.
    let mut wild = decoder.clone();
    let Mixer::Attention(attention) = &mut wild.layers[1].mixer;
    attention.scale = 1e6;
    let error = run("wild", &wild, Sample::Tokens(&tokens)).unwrap_err().to_string();
    assert!(error.contains("layer 1 computes") && error.contains("(scores)"), "{error}");
    assert!(error.contains("hint: run this model with another engine"), "{error}");
    let beyond = [decoder.vocab_size as u32];
    let error = run("beyond", &decoder, Sample::Tokens(&beyond)).unwrap_err().to_string();
    assert!(error.contains("of the sample text"), "{error}");
    assert!(!folder.path().join("wild").exists() && !folder.path().join("beyond").exists());
}

#[test]
fn what_cannot_be_exported_is_refused_by_name_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let ane = || tiny(Target::Ane);
    let gpu = || tiny(Target::Gpu);
    for (options, expected) in [
        (ExportOptions { quant: Quant::Int(4), ..ane() }, "int4 for the Neural Engine"),
        (ExportOptions { quant: Quant::Int(8), ..ane() }, "int8 for the Neural Engine"),
        (ExportOptions { quant: Quant::Lut(6), ..gpu() }, "lut6 for the GPU"),
        (ExportOptions { prefill: 24, ..ane() }, "128 tokens is not made of whole prefill calls of 24"),
        (ExportOptions { context: 4096, ..ane() }, "more than the 512 this model handles"),
        (ExportOptions { chunks: Some(9), ..ane() }, "9 chunks of 3 layers"),
        (ExportOptions { chunks: Some(0), ..ane() }, "of 0"),
        (ExportOptions { kv: KvForm::Io, ..gpu() }, "--kv io for the GPU"),
    ] {
        let error = try_export("llama-gqa", &folder.path().join("out"), &options).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("hint"), "{error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    std::fs::create_dir(folder.path().join("out")).unwrap();
    let error = try_export("llama-gqa", &folder.path().join("out"), &ane()).unwrap_err().to_string();
    assert!(error.contains("exists"), "{error}");
}

#[test]
fn an_export_that_fails_leaves_nothing() {
    use tandem_model::decoder::WeightRef;
    let folder = tempfile::tempdir().unwrap();
    let (mut decoder, weights) =
        tandem_model::Checkpoint::open_network(&common::fixtures().join("llama-gqa")).unwrap();
    // The last weight that is read is not there.
    decoder.head.weight = WeightRef::whole("absent");
    let out = folder.path().join("out");
    let error = export(common::source(&decoder, &weights), &out, &tiny(Target::Ane), &mut |_, _| {});
    assert!(error.unwrap_err().to_string().contains("absent"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
