//! Damaged and lying files, one fault each: the message names the file and the tensor or key, and gives a hint.

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use std::path::Path;

use common::{Gguf, safetensors, says};
use tandem_model::{ModelError, gguf};

fn read_safetensors(bytes: &[u8]) -> Result<Vec<tandem_model::safetensors::Entry>, ModelError> {
    tandem_model::safetensors::parse(Path::new("model.safetensors"), bytes)
}

fn read_gguf(bytes: &[u8]) -> Result<usize, ModelError> {
    gguf::parse(Path::new("model.gguf"), bytes).map(|gguf| gguf.tensors.len())
}

const A: &str = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;

#[test]
fn a_right_safetensors_file_is_read() {
    let header = format!(
        r#"{{"__metadata__":{{"format":"pt"}},{A},"b":{{"dtype":"I64","shape":[],"data_offsets":[8,16]}}}}"#
    );
    let entries = read_safetensors(&safetensors(&header, &[0; 16])).unwrap();
    assert_eq!(entries.len(), 2);
    assert_eq!((entries[0].name.as_str(), entries[0].shape.as_slice()), ("a", &[2][..]));
    assert_eq!(entries[1].range.len(), 8);
    assert_eq!(entries[1].format(), None);
}

#[test]
fn safetensors_header_faults() {
    says(read_safetensors(b""), &["model.safetensors", "empty"]);
    says(read_safetensors(b"1234"), &["4 bytes are too short"]);
    says(
        read_safetensors(b"version https://git-lfs.github.com/spec/v1\n"),
        &["Git LFS pointer", "git lfs pull"],
    );
    says(read_safetensors(&u64::MAX.to_le_bytes()), &["claims 18446744073709551615 bytes"]);
    let whole = safetensors(&format!("{{{A}}}"), &[0; 8]);
    says(read_safetensors(&whole[..30]), &["only 22 follow", "cut short"]);
    says(read_safetensors(&safetensors("[]", &[])), &["bad header"]);
    says(read_safetensors(&safetensors(r#"{"a":{"dtype":"F32"}}"#, &[])), &["bad header", "shape"]);
    says(read_safetensors(&safetensors("\u{fffd}{", &[])), &["bad header"]);
}

#[test]
fn safetensors_tensor_faults() {
    let one =
        |tensor: &str, data: usize| read_safetensors(&safetensors(&format!("{{{tensor}}}"), &vec![0; data]));
    says(one(A, 4), &["tensor a claims bytes 0 to 8", "holds 4", "cut short"]);
    says(one(A, 12), &["4 bytes at the end belong to no tensor"]);
    says(
        one(r#""a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#, 8),
        &["tensor a claims bytes 8 to 0"],
    );
    says(
        one(r#""a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}"#, 8),
        &["tensor a of shape [3]", "8 bytes"],
    );
    says(
        one(r#""a":{"dtype":"Q3","shape":[2],"data_offsets":[0,8]}"#, 8),
        &["tensor a has the unknown type Q3"],
    );
    let huge = r#""a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,8]}"#;
    says(one(huge, 8), &["tensor a of shape"]);
    let negative = r#""a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#;
    says(one(negative, 8), &["bad header"]);
    let two = |start: usize| {
        format!(r#"{A},"b":{{"dtype":"F32","shape":[2],"data_offsets":[{start},{}]}}"#, start + 8)
    };
    assert!(one(&two(8), 16).is_ok());
    says(one(&two(4), 16), &["tensor b overlaps"]);
    says(one(&two(12), 20), &["tensor b leaves a hole"]);
    let twice = format!(r#"{A},"a":{{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#);
    says(one(&twice, 16), &["tensor a is there twice"]);
}

#[test]
fn a_right_gguf_file_is_read() {
    let file = Gguf::default()
        .text("general.architecture", "llama")
        .texts("tokenizer.ggml.tokens", &["a", "bc"])
        .i32s("tokenizer.ggml.token_type", &[1, -3])
        .tensor("x", &[32, 2], 8, 0)
        .tensor("y", &[3], 0, 96)
        .finish(&[0; 108]);
    let gguf = gguf::parse(Path::new("model.gguf"), &file).unwrap();
    assert_eq!(gguf.tensors["x"].shape, [2, 32]);
    assert_eq!(gguf.tensors["x"].range.len(), 68);
    assert_eq!(gguf.tensors["y"].range.len(), 12);
    let gguf::Value::Array(tokens) = gguf.metadata["tokenizer.ggml.tokens"] else { panic!() };
    assert_eq!(tokens.texts().unwrap().collect::<Vec<_>>(), ["a", "bc"]);
    assert!(tokens.integers().is_none());
    let gguf::Value::Array(types) = gguf.metadata["tokenizer.ggml.token_type"] else { panic!() };
    assert_eq!(types.integers().unwrap().collect::<Vec<_>>(), [1, -3]);
}

#[test]
fn gguf_header_faults() {
    says(read_gguf(b""), &["model.gguf", "empty"]);
    says(read_gguf(b"PK\x03\x04 and so on"), &["not with GGUF", "PK"]);
    says(read_gguf(b"GG"), &["not with GGUF"]);
    says(read_gguf(b"GGUF\x03\0"), &["the version", "cut short"]);
    says(read_gguf(b"GGUF\x01\0\0\0"), &["GGUF version = 1"]);
    says(read_gguf(b"GGUF\0\0\0\x03"), &["big endian"]);
    let counts = |tensors: u64, entries: u64| {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(tensors.to_le_bytes());
        file.extend(entries.to_le_bytes());
        file.resize(200, 0);
        file
    };
    says(read_gguf(&counts(u64::MAX, 0)), &["count of tensors is 18446744073709551615"]);
    says(read_gguf(&counts(0, 1 << 40)), &["count of metadata entries is 1099511627776"]);
}

#[test]
fn gguf_metadata_faults() {
    let entry =
        |kind: u32, value: &[u8]| read_gguf(&Gguf::default().entry("key", kind, value).finish(&[0; 64]));
    says(entry(99, &[]), &["key has the unknown value type 99"]);
    says(entry(8, &u64::MAX.to_le_bytes()), &["key at byte", "needs 18446744073709551615 bytes"]);
    says(entry(8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]), &["key at byte", "not UTF-8"]);
    says(entry(7, &[7]), &["key is the boolean 7"]);
    let array = |kind: u32, len: u64| [&kind.to_le_bytes()[..], &len.to_le_bytes()].concat();
    says(entry(9, &array(9, 1)), &["key = an array of arrays"]);
    says(entry(9, &array(8, 1 << 60)), &["the length of key is 1152921504606846976"]);
    says(entry(9, &array(77, 1)), &["key has the unknown value type 77"]);
    says(read_gguf(&Gguf::default().u32("a", 1).u32("a", 2).finish(&[])), &["key a is there twice"]);
    says(read_gguf(&Gguf::default().u32("split.count", 3).finish(&[])), &["split.count = 3", "--merge"]);
    for alignment in [0, 24, 1 << 21] {
        let file = Gguf::default().u32("general.alignment", alignment).finish(&[]);
        says(read_gguf(&file), &["general.alignment", "power of two"]);
    }
}

#[test]
fn gguf_tensor_faults() {
    let tensor = |dims: &[u64], kind: u32, offset: u64| {
        read_gguf(&Gguf::default().tensor("blk.0.x", dims, kind, offset).finish(&[0; 64]))
    };
    assert_eq!(tensor(&[4], 0, 32).unwrap(), 1);
    says(tensor(&[4], 0, 16), &["tensor blk.0.x lies at 16", "32"]);
    says(tensor(&[17], 0, 0), &["tensor blk.0.x ends at byte", "cut short"]);
    says(tensor(&[4], 0, u64::MAX - 31), &["tensor blk.0.x has the absurd offset"]);
    says(tensor(&[u64::MAX, u64::MAX], 0, 0), &["tensor blk.0.x has shape"]);
    says(tensor(&[40], 8, 0), &["tensor blk.0.x has shape [40], which Q8_0 cannot store"]);
    says(tensor(&[256], 10, 0), &["type of tensor blk.0.x = Q2_K", "Q8_0"]);
    says(tensor(&[256], 23, 0), &["type of tensor blk.0.x = IQ4_XS", "Q4_K"]);
    says(tensor(&[128], 12, 0), &["tensor blk.0.x has shape [128], which Q4_K cannot store"]);
    says(tensor(&[32], 1234, 0), &["type of tensor blk.0.x = ggml type 1234"]);
    says(tensor(&[1; 5], 0, 0), &["tensor blk.0.x has 5 dimensions"]);
    let two = |name: &str, offset: u64| {
        read_gguf(&Gguf::default().tensor("a", &[16], 0, 0).tensor(name, &[4], 0, offset).finish(&[0; 128]))
    };
    assert_eq!(two("b", 64).unwrap(), 2);
    says(two("b", 32), &["tensor b overlaps"]);
    says(two("a", 64), &["tensor a is there twice"]);
}
