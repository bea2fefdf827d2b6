use super::{fixture, model, tandem};

#[test]
fn a_model_becomes_packages_that_say_how_they_belong_together() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let out_name = out.to_str().unwrap();
    let args =
        ["export", &model(), out_name, "-c", "128", "--prefill", "16", "--quant", "lut4", "--chunks", "2"];
    let said = tandem(&args).ok();
    assert!(said.contains("model-1-of-2.mlpackage  layers 0 to 0"), "{said}");
    let json = std::fs::read(out.join("tandem.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(manifest["quantization"], "lut4");
    assert!(said.contains("activations: up to") && said.contains("audit: pass"), "{said}");
    assert_eq!(manifest["activations"]["traced"]["tokens"], 128);
    assert_eq!(manifest["activations"]["traced"]["layers"].as_array().unwrap().len(), 3);
    assert_eq!(manifest["audit"]["verdict"], "pass");
    assert_eq!(manifest["audit"]["devices"].as_array().unwrap().len(), 5);
    assert_eq!(manifest["audit"]["devices"][4]["gpu_cpu"], 0);
    for file in ["model-2-of-2.mlpackage/Manifest.json", "embedding.bin", "tokenizer.json"] {
        assert!(out.join(file).is_file(), "{file}");
    }
}

#[test]
fn random_weights_take_the_place_of_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let config = fixture("llama-gqa").join("config.json");
    let dummy = ["--dummy-weights", config.to_str().unwrap(), "-c", "128"];
    let said = tandem(&[&["export", out.to_str().unwrap()], dummy.as_slice()].concat()).ok();
    assert!(said.contains("model.mlpackage"), "{said}");
    let json = std::fs::read_to_string(out.join("tandem.json")).unwrap();
    assert!(json.contains("\"not_traced\": \"the weights are random"), "{json}");
    let untraced = folder.path().join("untraced");
    let args = ["export", &model(), untraced.to_str().unwrap(), "-c", "128", "--no-trace"];
    let said = tandem(&args).ok();
    assert!(said.contains("activations: not known, --no-trace was given"), "{said}");
    let ran = tandem(&[&["export", "a", "b"], dummy.as_slice()].concat()).run();
    assert!(ran.code == Some(1) && ran.err.contains("in place of MODEL"), "{}", ran.err);
}

#[test]
fn what_cannot_be_exported_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let (model, out_name) = (model(), out.to_str().unwrap());
    for (flags, words) in [
        (["--quant", "int4"].as_slice(), "int4 for the Neural Engine"),
        (&["--prefill", "60"], "not made of whole prefill calls of 60"),
        (&["--batch", "2"], "a batch of 2 cannot be exported yet"),
        (&["--chunks", "9"], "9 chunks of 3 layers"),
        (&["--context", "8192"], "more than the 512 this model handles"),
    ] {
        let ran = tandem(&[&["export", &model, out_name], flags].concat()).run();
        assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""), "{flags:?}");
        assert!(ran.err.contains(words) && ran.err.contains("hint: "), "{}", ran.err);
        assert!(!out.exists());
    }
}

#[test]
fn a_folder_that_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("nowhere/out");
    let ran = tandem(&["export", &model(), out.to_str().unwrap()]).run();
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""));
    assert!(ran.err.contains("there is no folder") && ran.err.contains("nowhere"), "{}", ran.err);
    assert!(ran.err.contains("hint: make that folder first"), "{}", ran.err);
}

/// A limit on the size of files stands for a full disk.
#[test]
#[cfg(unix)]
fn a_write_that_fails_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let limited = "trap '' XFSZ; ulimit -f 100; exec \"$@\"";
    let ran = std::process::Command::new("bash")
        .args(["-c", limited, "bash", env!("CARGO_BIN_EXE_tandem"), "export", &model()])
        .arg(&out)
        .args(["-c", "128", "--prefill", "16"])
        .env("TANDEM_HOME", folder.path().join("store"))
        .output()
        .unwrap();
    let error = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot write") && error.contains("weight.bin"), "{error}");
    let left: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "store"), "{left:?}");
}
