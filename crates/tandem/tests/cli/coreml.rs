//! `tandem audit` and `tandem inspect`.

use std::fs;
use std::path::Path;

use super::{fixture, model, tandem};

fn naive(name: &str) -> String {
    fixture("coreml").join(format!("naive-{name}.mlpackage")).to_str().unwrap().to_owned()
}

/// A copy that a test may damage.
fn copy(to: &Path) -> String {
    fn folder(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            let target = to.join(path.file_name().unwrap());
            if path.is_dir() {
                folder(&path, &target);
            } else {
                fs::copy(path, target).unwrap();
            }
        }
    }
    let target = to.join("x.mlpackage");
    folder(Path::new(&naive("static")), &target);
    target.to_str().unwrap().to_owned()
}

#[test]
fn an_audit_says_what_and_where_and_what_to_change() {
    let ran = tandem(&["audit", &naive("dynamic")]).run();
    assert_eq!((ran.code, ran.err.as_str()), (Some(2), ""));
    for words in [
        "fails mask-infinity (mask, m1 to m5)",
        "change: pass the cosines and sines of the positions as inputs",
        "layer 1: layer_norm model_layers_1_input_norm_cast_fp16",
        "source: apple/coreai-models skills, neural_engine_rules.md (Apple)",
        "main on m2, m3, m4, m5: no operator is predicted on the engine",
        "mask-infinity fails on the engine",
        "unknown multiply-adds",
        "verdict: failed (predicted by rules; nothing was run)",
    ] {
        assert!(ran.out.contains(words), "`{words}` is not in\n{}", ran.out);
    }
}

#[test]
fn an_audit_as_json_has_every_operator() {
    let args =
        ["audit", &naive("static"), "--json", "--device", "m4,m5", "--max-fallback", "100%", "--strict"];
    let ran = tandem(&args).run();
    assert_eq!((ran.code, ran.err.as_str()), (Some(2), ""), "what fails on the engine never passes");
    let json: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(json["schema"], 1);
    assert_eq!(json["verdict"], "failed");
    assert_eq!(json["devices"], serde_json::json!(["m4", "m5"]));
    let function = &json["functions"][0];
    let operators = function["operators"].as_array().unwrap();
    assert_eq!(function["totals"]["operators"], operators.len());
    for operator in operators {
        for key in
            ["name", "op", "unit", "units", "rule", "findings", "weight_bytes", "multiply_adds", "shares"]
        {
            assert!(operator.get(key).is_some(), "{key} is not in {operator}");
        }
        for finding in operator["findings"].as_array().unwrap() {
            let rule = &json["rules"][finding["rule"].as_str().unwrap()];
            assert!(rule["advice"].is_string() && rule["sources"].is_array(), "{finding}");
        }
    }
    let units = function["devices"][0]["operators"].as_object().unwrap();
    let counted: u64 = units.values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(counted as usize, operators.len());
}

#[test]
fn our_own_export_passes_unless_all_must_be_certain() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    tandem(&["export", &model(), out.to_str().unwrap(), "-c", "128", "--prefill", "16", "--quant", "lut4"])
        .ok();
    let package = out.join("model.mlpackage");
    let audit = ["audit", package.to_str().unwrap(), "--max-fallback", "0%"];
    let text = tandem(&audit).ok();
    for words in ["function decode", "function prefill", "state-access", "verdict: pass"] {
        assert!(text.contains(words), "`{words}` is not in\n{text}");
    }
    let ran = tandem(&[audit.as_slice(), &["--strict"]].concat()).run();
    assert_eq!((ran.code, ran.err.as_str()), (Some(3), ""));
    for words in ["decode on m1 to m5: ", "operators uncertain or unknown", "verdict: uncertain"] {
        assert!(ran.out.contains(words), "`{words}` is not in\n{}", ran.out);
    }
}

#[test]
fn an_inspection_shows_functions_weights_and_sizes() {
    let text = tandem(&["inspect", &naive("static")]).ok();
    for words in [
        "specification 9 (iOS 18, macOS 15 or newer)",
        "function main (CoreML8)",
        "input  ids: int32[1, 16]",
        "output logits: fp32[1, 16, 128]",
        "state  cache_0: fp16[1, 2, 16, 8]",
        "15 linear",
        "int4",
        "Data/com.apple.CoreML/weights/weight.bin",
    ] {
        assert!(text.contains(words), "`{words}` is not in\n{text}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&tandem(&["inspect", &naive("dynamic"), "--json"]).ok()).unwrap();
    assert_eq!(json["functions"][0]["inputs"][0]["type"], "int32[1, 1..64]");
    assert_eq!(json["functions"][0]["operators"]["linear"], 15);
}

/// Both commands say the same of a package they cannot read.
#[track_caller]
fn refused(path: &str, words: &[&str]) {
    for command in ["audit", "inspect"] {
        let ran = tandem(&[command, path]).run();
        assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""), "{}", ran.err);
        for word in words.iter().chain(&["error: ", "hint: "]) {
            assert!(ran.err.contains(word), "`{word}` is not in\n{}", ran.err);
        }
    }
}

#[test]
fn what_is_no_package_is_told_in_clear_words() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().to_str().unwrap();
    refused("/no/such.mlpackage", &["there is no /no/such.mlpackage"]);
    refused(empty, &["no Manifest.json"]);
    refused(fixture("text").join("persuasion.txt").to_str().unwrap(), &["it is a file"]);
    let path = copy(folder.path());
    let program = Path::new(&path).join("Data/com.apple.CoreML/model.mlmodel");
    let bytes = fs::read(&program).unwrap();
    // Specification 4 and an empty message in the field of neural networks.
    fs::write(&program, [0x08, 4, 0xa2, 0x1f, 0]).unwrap();
    refused(&path, &["it is a NeuralNetwork", "minimum_deployment_target"]);
    fs::write(&program, &bytes[..bytes.len() / 2]).unwrap();
    refused(&path, &["model.mlmodel is damaged"]);
    fs::write(&program, &bytes).unwrap();
    let weights = Path::new(&path).join("Data/com.apple.CoreML/weights/weight.bin");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    refused(&path, &["weight.bin is damaged", "offset"]);
}

#[test]
fn flags_that_make_no_sense_are_refused() {
    let path = naive("static");
    for (flag, value, words) in [
        ("--device", "m9", "device m9 is not known"),
        ("--device", "a17", "m1, m2, m3, m4, m5 or all"),
        ("--max-fallback", "101%", "out of range"),
        ("--max-fallback", "-1%", "out of range"),
        ("--max-fallback", "0.15", "write the percent sign"),
        ("--max-fallback", "some", "not a percentage"),
    ] {
        let ran = tandem(&["audit", &path, &format!("{flag}={value}")]).run();
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{value}");
        assert!(ran.err.contains(words), "`{words}` is not in\n{}", ran.err);
    }
}
