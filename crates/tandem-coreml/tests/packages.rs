//! Packages written and read back, and packages that are none.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

use tandem_coreml::mil::{
    Arg, Block, Data, Feature, FeatureKind, Flexibility, Function, Interface, Model, Named, Op, TensorType,
    Value, ValueType,
};
use tandem_coreml::{CoremlError, DType, Package, PackageWriter};

/// `y = x + w`, with `w` in the weight file.
fn write(path: &Path, names: &[&str]) -> Model {
    let mut writer = PackageWriter::create(path).unwrap();
    let weights: Vec<u8> = (0..64u8).collect();
    let offset = writer.weights.add(DType::F16, 32, &weights).unwrap();
    let ty = ValueType::Tensor(TensorType::fixed(DType::F16, &[1, 32]));
    let named = |name: &str| Named { name: name.into(), ty: ty.clone() };
    let constant = Op {
        kind: "const".into(),
        outputs: vec![named("w")],
        attributes: [
            ("name".to_owned(), Value::string("w")),
            ("val".to_owned(), Value { ty: ty.clone(), data: Data::Blob(PackageWriter::reference(offset)) }),
        ]
        .into(),
        ..Op::default()
    };
    let add = Op {
        kind: "add".into(),
        inputs: [("x", "x"), ("y", "w")].map(|(key, name)| (key.into(), vec![Arg::Name(name.into())])).into(),
        outputs: vec![named("y")],
        attributes: [("name".to_owned(), Value::string("y"))].into(),
        ..Op::default()
    };
    let feature = |name: &str| Feature {
        name: name.into(),
        kind: FeatureKind::Array { dtype: DType::F16, shape: vec![1, 32], flexibility: Flexibility::Fixed },
    };
    let function = Function {
        interface: Interface { inputs: vec![feature("x")], outputs: vec![feature("y")], states: vec![] },
        inputs: vec![named("x")],
        opset: "CoreML8".into(),
        block: Block { inputs: vec![], outputs: vec!["y".into()], ops: vec![constant, add] },
    };
    let model = Model {
        specification: 9,
        functions: names.iter().map(|name| ((*name).to_owned(), function.clone())).collect(),
        default_function: names[0].into(),
        ..Model::default()
    };
    writer.finish(&model).unwrap();
    model
}

fn program(package: &Path) -> PathBuf {
    package.join("Data/com.apple.CoreML/model.mlmodel")
}

fn weights(package: &Path) -> PathBuf {
    package.join("Data/com.apple.CoreML/weights/weight.bin")
}

fn error(path: &Path) -> String {
    Package::open(path).unwrap_err().to_string()
}

#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    for (name, functions) in [("one", ["main"].as_slice()), ("two", ["decode", "prefill"].as_slice())] {
        let path = folder.path().join(name);
        let model = write(&path, functions);
        let package = Package::open(&path).unwrap();
        assert_eq!(package.model(), &model);
        let value = package.values().find(|value| matches!(value.data, Data::Blob(_))).unwrap();
        assert_eq!(package.bytes(value).unwrap().unwrap(), (0..64u8).collect::<Vec<_>>());
        assert_eq!(package.function(None).unwrap().0, functions[0]);
        assert!(package.function(Some("absent")).unwrap_err().to_string().contains(functions[0]));
    }
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    write(&a, &["main"]);
    write(&b, &["main"]);
    for file in [program, weights, |package: &Path| package.join("Manifest.json")] {
        assert_eq!(fs::read(file(&a)).unwrap(), fs::read(file(&b)).unwrap());
    }
}

#[test]
fn what_exists_is_not_overwritten_and_what_fails_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.mlpackage");
    write(&path, &["main"]);
    assert!(matches!(PackageWriter::create(&path), Err(CoremlError::Refused { .. })));
    drop(PackageWriter::create(&folder.path().join("y.mlpackage")).unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn what_is_no_package_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("net.mlmodel"), b"x").unwrap();
    fs::write(at("file"), b"x").unwrap();
    fs::create_dir(at("net.mlmodelc")).unwrap();
    fs::create_dir(at("empty")).unwrap();
    for (name, expected) in [
        ("net.mlmodel", "bare .mlmodel"),
        ("file", "it is a file"),
        ("net.mlmodelc", "compiled"),
        ("empty", "no Manifest.json"),
        ("absent", "cannot read"),
    ] {
        let message = error(&at(name));
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn models_of_another_kind_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.mlpackage");
    write(&path, &["main"]);
    // Specification 4, then an empty message in the field of the kind (as a varint key and a length).
    for (key, expected) in [([0xa2u8, 0x1f], "a NeuralNetwork"), ([0xd2, 0x0c], "a pipeline")] {
        fs::write(program(&path), [&[0x08, 4], key.as_slice(), &[0]].concat()).unwrap();
        let message = error(&path);
        assert!(message.contains(expected) && message.contains("specification 4"), "{message}");
    }
}

#[test]
fn damage_is_named_and_never_a_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.mlpackage");
    write(&path, &["main"]);
    let whole = [program(&path), weights(&path), path.join("Manifest.json")].map(|file| {
        let bytes = fs::read(&file).unwrap();
        (file, bytes)
    });
    for (file, bytes) in &whole {
        for len in 0..bytes.len() {
            fs::write(file, &bytes[..len]).unwrap();
            // A manifest that lost only its last line break is whole.
            assert!(Package::open(&path).is_err() || bytes[len..] == *b"\n", "{} at {len}", file.display());
        }
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0xff;
            fs::write(file, &bytes).unwrap();
            let _ = Package::open(&path);
        }
        fs::write(file, bytes).unwrap();
    }
    let (file, bytes) = &whole[1];
    for (at, value, expected) in [
        (4, 1, "version 1"),
        (64, 0, "no record starts here"),
        (68, 99, "element type 99"),
        (68, 2, "fp16[1, 32]"),
        (72, 62, "62 bytes of fp16"),
        (72, 66, "lie outside"),
        (81, 1, "lie outside"),
        (87, 0xff, "lie outside"),
    ] {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        fs::write(file, &bytes).unwrap();
        let message = error(&path);
        assert!(message.contains(expected), "{at}: {message}");
    }
}
