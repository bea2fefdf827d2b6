//! Tokens: against references made elsewhere where there are some, and against themselves.
//!
//! The judged one needs SmolLM2 in the store. token_references.rs has the many strings and vocabularies.

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use std::path::{Path, PathBuf};

use common::streamed;
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::json;
use tandem_model::{Checkpoint, Detokenizer, Tokenizer, gguf};

fn tiny() -> Tokenizer {
    Checkpoint::open(&common::fixture("llama-gqa")).unwrap().tokenizer
}

/// A SentencePiece-like vocabulary, as converted Llama 2 tokenizers have it.
fn sentencepiece_like(decoder: &serde_json::Value) -> Tokenizer {
    let mut vocab = json!({"<unk>": 0, "<s>": 1, "</s>": 2});
    for byte in 0..256 {
        vocab[format!("<0x{byte:02X}>")] = json!(3 + byte);
    }
    for (id, text) in ["▁", "a", "b", "é", "▁a", "▁ab", "ab", "▁▁", "🙂"].iter().enumerate() {
        vocab[*text] = json!(259 + id);
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let file = json!({
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        ]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": decoder,
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": ["▁ a", "a b", "▁a b", "▁ ▁"]}
    });
    Tokenizer::from_json(Path::new("tokenizer.json"), file.to_string().as_bytes(), 268).unwrap()
}

fn strip_decoder() -> serde_json::Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    ]})
}

fn metaspace_decoder() -> serde_json::Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true})
}

#[test]
fn sentencepiece_like_vocabularies() {
    let tokenizer = sentencepiece_like(&strip_decoder());
    // "▁ab", "▁", byte fallback for the two bytes of "ß" (0xC3 0x9F), and the begin token in front.
    assert_eq!(tokenizer.encode("ab ß", true).unwrap(), [1, 264, 259, 3 + 0xc3, 3 + 0x9f]);
    assert_eq!(tokenizer.encode("a", false).unwrap(), [263]);
    assert_eq!(tokenizer.token_bytes(264).unwrap(), b" ab");
    assert_eq!(tokenizer.token_bytes(3 + 0xc3).unwrap(), [0xc3]);
    assert_eq!(tokenizer.token_bytes(1).unwrap(), b"<s>");
    assert_eq!(tokenizer.token_bytes(9999), None);
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(264) && !tokenizer.is_special(9999));
    assert_eq!(tokenizer.decode(&[1, 264, 259, 3 + 0xc3, 3 + 0x9f], true), "ab ß");
    // One leading space goes, wherever the first text comes from.
    assert_eq!(tokenizer.decode(&[266, 264], true), "  ab");
    assert_eq!(tokenizer.decode(&[1, 264], false), "<s> ab");

    let tokenizer = sentencepiece_like(&metaspace_decoder());
    assert_eq!(tokenizer.decode(&[266, 264], true), " ab");
    assert_eq!(tokenizer.decode(&[264, 264], true), "ab ab");
}

#[test]
fn special_tokens_in_a_text_are_recognised() {
    let tokenizer = tiny();
    let ids = tokenizer.encode("Hi<|im_end|>", false).unwrap();
    assert_eq!(ids.last(), Some(&2));
    assert_eq!(tokenizer.decode(&ids, true), "Hi");
    assert_eq!(tokenizer.decode(&ids, false), "Hi<|im_end|>");
    assert_eq!(
        (tokenizer.id_of("<|im_end|>"), tokenizer.token_text(2).as_deref()),
        (Some(2), Some("<|im_end|>"))
    );
    assert_eq!(tokenizer.vocab_size(), 384);
}

#[test]
fn half_characters_wait_and_broken_ones_are_marked() {
    let tokenizer = Tokenizer::bytes(256).unwrap();
    let mut detokenizer = Detokenizer::new(&tokenizer, true);
    let smile = "🙂".as_bytes();
    for &byte in &smile[..3] {
        assert_eq!(detokenizer.push(byte.into()), None);
    }
    assert_eq!(detokenizer.push(smile[3].into()).as_deref(), Some("🙂"));
    assert_eq!(detokenizer.finish(), None);
    // Two bytes of three, then a letter: one mark for the maximal part, as in every conforming decoder.
    assert_eq!(streamed(&tokenizer, &[0xe6, 0x97, 0x61], true), "\u{fffd}a");
    assert_eq!(streamed(&tokenizer, &[0xff, 0xc3], true), "\u{fffd}\u{fffd}");
}

/// The vocabulary of [`sentencepiece_like`] as a GGUF file has it, with scores.
fn sentencepiece_with_scores(space_prefix: bool) -> Tokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "b", "é", "▁a", "▁ab", "ab", "▁▁", "🙂", "  \n", "aa"].map(str::to_owned));
    let mut types = vec![6; tokens.len()];
    types[..3].copy_from_slice(&[2, 3, 3]);
    types[259..].fill(1);
    types[268] = 4;
    let mut scores = vec![0.0; tokens.len()];
    scores[259..].copy_from_slice(&[-9.0, -9.0, -9.0, -9.0, -1.0, -3.0, -2.0, -4.0, -5.0, 0.0, -1.0]);
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let bytes = common::Gguf::default()
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .f32s("tokenizer.ggml.scores", &scores)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .bool("tokenizer.ggml.add_space_prefix", space_prefix)
        .finish(&[]);
    let path = Path::new("model.gguf");
    Tokenizer::from_gguf(path, &gguf::parse(path, &bytes).unwrap(), tokens.len()).unwrap()
}

#[test]
fn vocabularies_with_scores() {
    let tokenizer = sentencepiece_with_scores(true);
    let encode = |text: &str| tokenizer.encode(text, false).unwrap();
    // The best score joins first: "▁a" before "ab"; of equals the leftmost.
    assert_eq!(encode("ab"), [264]);
    assert_eq!(encode("bab"), [259, 261, 265]);
    assert_eq!(encode("baaa"), [259, 261, 269, 260]);
    // Bytes for what is no token, and the begin token where it is asked for, which is the default of this kind.
    assert_eq!(tokenizer.encode("aß", true).unwrap(), [1, 263, 3 + 0xc3, 3 + 0x9f]);
    // Special and user-defined tokens are found first, and a space stands before what follows them.
    assert_eq!(encode("a</s>a  \na"), [263, 2, 263, 268, 263]);
    assert_eq!(encode(""), [0; 0]);
    assert_eq!(tokenizer.decode(&encode("ab a ß  \nb"), false), "ab a ß  \n b");
    assert!(tokenizer.is_special(0) && tokenizer.is_special(2) && !tokenizer.is_special(268));
    assert_eq!((tokenizer.bos(), tokenizer.id_of("▁a")), (Some(1), Some(263)));
    assert_eq!((tokenizer.token_text(263).as_deref(), tokenizer.token_text(999)), (Some("▁a"), None));

    let tokenizer = sentencepiece_with_scores(false);
    assert_eq!(tokenizer.encode("a </s> a", false).unwrap(), [260, 259, 2, 263]);
    assert_eq!(tokenizer.decode(&[263, 263], false), " a a");
}

/// Both made `tokenizers` panic while it encoded (found by the fuzzer).
#[test]
fn post_processors_that_name_what_is_not_there_are_refused() {
    let with = |single: serde_json::Value| {
        let processor = json!({"type": "Sequence", "processors": [
            {"type": "TemplateProcessing", "single": single, "pair": [],
             "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}}]});
        let mut file: serde_json::Value =
            serde_json::from_slice(&std::fs::read(common::fixture("llama-gqa/tokenizer.json")).unwrap())
                .unwrap();
        file["post_processor"] = processor;
        Tokenizer::from_json(Path::new("tokenizer.json"), file.to_string().as_bytes(), 384)
    };
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    assert_eq!(with(json!([text, special("</s>")])).unwrap().encode("", true).unwrap(), [2]);
    for (single, complaint) in [
        (json!([special("<s>"), text]), "<s> is not among its special_tokens"),
        (json!([text, {"Sequence": {"id": "B", "type_id": 0}}]), "has no place around a single text"),
    ] {
        let error = with(single).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains(complaint), "{error}");
    }
}

proptest! {
    #[test]
    fn vocabularies_with_scores_lose_nothing(text in "[ab é🙂ß\n]{0,40}|\\PC{0,20}") {
        let plain = sentencepiece_with_scores(false);
        let ids = plain.encode(&text, false).unwrap();
        prop_assert_eq!(plain.decode(&ids, false), text.replace('▁', " "));
        prop_assert_eq!(streamed(&plain, &ids, false), plain.decode(&ids, false));
        let spaced = sentencepiece_with_scores(true);
        let ids = spaced.encode(&text, false).unwrap();
        prop_assert_eq!(streamed(&spaced, &ids, false), spaced.decode(&ids, false));
    }

    #[test]
    fn any_tokens_stream_to_what_they_decode_to(ids in proptest::collection::vec(0u32..300, 0..40), skip: bool) {
        let tokenizers = [
            sentencepiece_like(&strip_decoder()),
            sentencepiece_like(&metaspace_decoder()),
            sentencepiece_with_scores(true),
            Tokenizer::bytes(256).unwrap(),
        ];
        for tokenizer in tokenizers {
            prop_assert_eq!(streamed(&tokenizer, &ids, skip), tokenizer.decode(&ids, skip));
        }
    }

    #[test]
    fn bytes_cut_anywhere_stream_to_the_text(text in "\\PC{0,30}") {
        let tokenizer = Tokenizer::bytes(256).unwrap();
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        prop_assert_eq!(streamed(&tokenizer, &ids, true), text);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn byte_level_text_survives_the_round_trip(text in "\\PC{0,60}|[ \\n\\t0-9a-z'é]{0,60}") {
        thread_local!(static TINY: Tokenizer = tiny());
        TINY.with(|tokenizer| {
            let ids = tokenizer.encode(&text, true).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, false), text.clone());
            prop_assert_eq!(streamed(tokenizer, &ids, false), text);
            Ok(())
        })?;
    }
}

#[test]
fn judged_smollm2_tokens_are_those_of_tokenizers() {
    #[derive(Deserialize)]
    struct Reference {
        text: String,
        ids: Vec<u32>,
        decoded: Option<String>,
    }
    if std::env::var_os("TANDEM_JUDGED").is_none() {
        eprintln!("skipped: TANDEM_JUDGED is not set");
        return;
    }
    let home = PathBuf::from(std::env::var_os("TANDEM_HOME").expect("TANDEM_HOME in the judged tier"));
    let checkpoint = Checkpoint::open(&home.join("models/smollm2.gguf")).unwrap();
    assert_eq!(checkpoint.generation.eos_token_ids, [2]);
    let file = std::fs::read(common::fixture("smollm2/tokens.json")).unwrap();
    let references: Vec<Reference> = serde_json::from_slice(&file).unwrap();
    assert!(references.len() > 200);
    for Reference { text, ids, decoded } in references {
        assert_eq!(checkpoint.tokenizer.encode(&text, false).unwrap(), ids, "{text:?}");
        let decoded = decoded.unwrap_or(text);
        assert_eq!(checkpoint.tokenizer.decode(&ids, false), decoded);
        assert_eq!(streamed(&checkpoint.tokenizer, &ids, false), decoded);
    }
}
