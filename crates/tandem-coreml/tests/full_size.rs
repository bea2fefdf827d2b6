//! SmolLM2-135M at full size, in every legal form, as coremltools judges it. Runs in the judged tier (`TANDEM_JUDGED=1`).

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use common::{judge, python};
use tandem_coreml::export::manifest::Manifest;
use tandem_coreml::export::{ExportOptions, Quant, Sample, Source, Target, export};
use tandem_coreml::mil::{BlobRef, Data, Model, Op};
use tandem_coreml::{Package, PackageWriter, trace};
use tandem_model::Checkpoint;

fn program(package: &Path) -> PathBuf {
    package.join("Data/com.apple.CoreML/model.mlmodel")
}

/// The weights that some functions of a program read.
fn weights_of(model: &Model) -> BTreeSet<BlobRef> {
    let ops = model.functions.values().flat_map(|function| function.block.walk());
    let blobs = ops.flat_map(Op::values).filter_map(|(_, value)| match &value.data {
        Data::Blob(blob) => Some(blob.clone()),
        _ => None,
    });
    blobs.collect()
}

/// What the prefill function adds to the package's size, as a part of what it would be without.
fn added_by_prefill(folder: &Path, manifest: &Manifest) -> f64 {
    let path = folder.join(&manifest.packages[0].file);
    let package = Package::open(&path).unwrap();
    let mut alone = package.model().clone();
    alone.functions.remove("prefill").unwrap();
    assert_eq!(weights_of(&alone), weights_of(package.model()), "prefill has weights of its own");
    let without = folder.join("alone.mlpackage");
    PackageWriter::create(&without).unwrap().finish(&alone).unwrap();
    let size = |path: &Path| std::fs::metadata(program(path)).unwrap().len();
    let (both, one) = (size(&path), size(&without));
    std::fs::remove_dir_all(without).unwrap();
    (both - one) as f64 / (one + manifest.packages[0].weight_bytes) as f64
}

#[test]
fn judged_smollm2_is_valid_in_every_form() {
    let Some(python_path) = judge() else { return };
    let home = PathBuf::from(std::env::var_os("TANDEM_HOME").expect("TANDEM_HOME in the judged tier"));
    let checkpoint = Checkpoint::open(&home.join("models/smollm2.gguf")).unwrap();
    let tokens = checkpoint.tokenizer.encode(trace::SAMPLE, true).unwrap();
    let source = Source {
        decoder: &checkpoint.decoder,
        weights: &checkpoint.weights,
        sample: Sample::Tokens(&tokens),
        companions: &[],
    };
    let forms = [
        (Target::Ane, &[Quant::None, Quant::Lut(4), Quant::Lut(6), Quant::Lut(8)]),
        (Target::Gpu, &[Quant::None, Quant::Int(4), Quant::Int(8), Quant::Lut(4)]),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (target, quants) in forms {
        for &quant in quants {
            let form = format!("{}-{}", target.name(), quant.name());
            let out = folder.path().join(&form);
            let options = ExportOptions { quant, ..ExportOptions::new(target) };
            let manifest = export(source, &out, &options, &mut |_, _| {}).unwrap();
            if target == Target::Ane {
                assert_eq!(manifest.audit.verdict, "pass", "{form}: {:?}", manifest.audit);
                assert!(manifest.audit.devices.iter().all(|device| device.gpu_cpu + device.unknown == 0));
                let added = added_by_prefill(&out, &manifest);
                println!("{form}: the prefill function adds {:.2} % to the package", added * 100.0);
                assert!(added < 0.02, "{form}: {added}");
            }
            let (valid, report) =
                python(&python_path, "validate_mlpackage.py", &[&out.join(&manifest.packages[0].file)]);
            assert!(valid, "{form}: {report}");
            std::fs::remove_dir_all(out).unwrap();
        }
    }
}
