//! Models of the hub, against a small hub on this machine.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashMap;
use std::fs;

use common::{COMMIT, FakeHub, Faults, Seen, closed_port, files_below, settings, sha256, store};
use tandem_store::{Format, Silent, Source, Store, StoreError};

const CONFIG: &[u8] = br#"{"model_type":"llama"}"#;

fn weights() -> Vec<u8> {
    (0..100_000u32).flat_map(u32::to_le_bytes).collect()
}

/// `owner/tiny` with one file of weights and things that nobody needs.
fn tiny(hub: &FakeHub) {
    hub.repo(
        "owner/tiny",
        &[
            ("README.md", b"# tiny"),
            ("config.json", CONFIG),
            ("generation_config.json", b"{}"),
            ("model.safetensors", &weights()),
            ("onnx/model.onnx", b"large and useless here"),
            ("pytorch_model.bin", b"a pickle"),
            ("tokenizer.json", br#"{"version":"1.0"}"#),
        ],
    );
}

#[test]
fn a_repository_is_fetched_once_and_then_needs_no_network() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    let mut seen = Seen::default();
    let got = store(dir.path(), &hub).resolve("owner/tiny", &mut seen).unwrap();
    assert_eq!((got.format, got.source, got.license), (Format::Folder, Source::Hub, None));
    assert_eq!(got.path, dir.path().join(format!("hub/models--owner--tiny/snapshots/{COMMIT}")));
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
    assert_eq!(
        files_below(&got.path),
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    );
    let repo = dir.path().join("hub/models--owner--tiny");
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    assert!(repo.join("blobs").join(sha256(&weights())).is_file());
    assert_eq!(seen.started.last().unwrap(), &("owner/tiny".to_owned(), Some(400_000)));
    assert_eq!(seen.done.last(), Some(&400_000));
    assert_eq!(seen.finished, seen.started.len());

    // Again, with a hub that is gone.
    let gone = Store::with(settings(dir.path()));
    assert_eq!(gone.resolve("owner/tiny", &mut Silent).unwrap(), got);
    gone.verify("owner/tiny").unwrap();
    let list = gone.list();
    assert_eq!(list.len(), 1);
    assert_eq!((list[0].name.as_str(), &list[0].path), ("owner/tiny", &got.path));
    assert_eq!(list[0].bytes, 400_000 + 22 + 2 + 17);
    assert_eq!(gone.remove("owner/tiny").unwrap(), 400_000 + 22 + 2 + 17 + 40);
    assert!(files_below(&dir.path().join("hub")).is_empty());
    assert!(matches!(gone.remove("owner/tiny"), Err(StoreError::NotInStore { .. })));
}

#[test]
fn a_sharded_repository_brings_the_files_of_its_index_and_no_others() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    let index = br#"{"weight_map":{"a":"model-1-of-2.safetensors","b":"model-2-of-2.safetensors"}}"#;
    let files: Vec<(&str, &[u8])> = vec![
        ("config.json", CONFIG),
        ("consolidated.safetensors", b"the same once more"),
        ("model-1-of-2.safetensors", b"one"),
        ("model-2-of-2.safetensors", b"two"),
        ("model.safetensors.index.json", index),
    ];
    hub.repo("owner/shards", &files);
    let store = store(dir.path(), &hub);
    let got = store.resolve("owner/shards@v2", &mut Silent).unwrap();
    assert_eq!(
        files_below(&got.path),
        [
            "config.json",
            "model-1-of-2.safetensors",
            "model-2-of-2.safetensors",
            "model.safetensors.index.json"
        ]
    );
    assert_eq!(store.list()[0].name, "owner/shards@v2");
    assert!(matches!(store.remove("owner/shards@v2"), Err(StoreError::NotRemovable { .. })));

    hub.repo("owner/short", &[files[0], files[2], files[4]]);
    let text = store.resolve("owner/short", &mut Silent).unwrap_err().to_string();
    assert!(text.contains("lacks model-2-of-2.safetensors"), "{text}");
}

#[test]
fn a_broken_connection_is_resumed_within_one_call() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    let cut = HashMap::from([("model.safetensors".to_owned(), 150_000)]);
    hub.faults(Faults { cut, ..Faults::default() });
    let got = store(dir.path(), &hub).resolve("owner/tiny", &mut Silent).unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
    let ranges: Vec<_> = hub
        .take_log()
        .into_iter()
        .filter(|r| r.path.ends_with("/model.safetensors"))
        .map(|r| r.headers["range"].clone())
        .collect();
    assert_eq!(ranges, ["bytes=0-", "bytes=150000-", "bytes=300000-"]);
}

#[test]
fn a_download_that_broke_for_good_looks_like_nothing_and_goes_on_later() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    let cut = HashMap::from([("model.safetensors".to_owned(), 150_000)]);
    hub.faults(Faults { cut: cut.clone(), no_ranges: true, ..Faults::default() });
    let store = store(dir.path(), &hub);
    match store.resolve("owner/tiny", &mut Silent).unwrap_err() {
        StoreError::Interrupted { have, want, .. } => assert_eq!((have, want), (150_000, 400_000)),
        other => panic!("{other}"),
    }
    assert!(store.list().is_empty());
    let repo = dir.path().join("hub/models--owner--tiny");
    assert!(!repo.join("refs/main").exists());
    assert!(repo.join(format!("blobs/{}.incomplete", sha256(&weights()))).is_file());

    hub.faults(Faults::default());
    hub.take_log();
    store.resolve("owner/tiny", &mut Silent).unwrap();
    let log = hub.take_log();
    assert_eq!(log.last().unwrap().headers["range"], "bytes=150000-");
}

#[test]
fn a_server_without_ranges_sends_all_of_it_again() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    let cut = HashMap::from([("model.safetensors".to_owned(), 150_000)]);
    hub.faults(Faults { cut, cuts_left: 2, no_ranges: true, ..Faults::default() });
    let got = store(dir.path(), &hub).resolve("owner/tiny", &mut Silent).unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn an_altered_file_is_refused_with_both_hashes_and_removed() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    hub.faults(Faults { altered: vec!["model.safetensors".into()], ..Faults::default() });
    let store = store(dir.path(), &hub);
    let mut altered = weights();
    altered[0] ^= 1;
    let text = store.resolve("owner/tiny", &mut Silent).unwrap_err().to_string();
    for part in ["owner/tiny/model.safetensors", &sha256(&weights()), &sha256(&altered)] {
        assert!(text.contains(part), "{text}");
    }
    assert!(
        files_below(&dir.path().join("hub"))
            .iter()
            .all(|f| !f.contains(&sha256(&weights())) || f.ends_with(".lock"))
    );
}

#[test]
fn a_bad_beginning_of_another_program_is_thrown_away() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    let blobs = dir.path().join("hub/models--owner--tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(format!("{}.incomplete", sha256(&weights()))), [7; 1000]).unwrap();
    let got = store(dir.path(), &hub).resolve("owner/tiny", &mut Silent).unwrap();
    assert_eq!(fs::read(got.path.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn a_damaged_blob_is_found_by_verify_and_mended_by_pull() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    let store = store(dir.path(), &hub);
    let got = store.resolve("owner/tiny", &mut Silent).unwrap();
    let mut bytes = weights();
    bytes[77] ^= 4;
    fs::write(got.path.join("model.safetensors"), &bytes).unwrap();
    let text = store.verify("owner/tiny").unwrap_err().to_string();
    assert!(text.contains(&sha256(&bytes)) && text.contains(&sha256(&weights())), "{text}");
    let mut seen = Seen::default();
    store.pull("owner/tiny", &mut seen).unwrap();
    assert!(seen.notes[0].contains("damaged"), "{:?}", seen.notes);
    store.verify("owner/tiny").unwrap();
}

#[test]
fn what_another_program_left_out_is_fetched_and_is_enough_without_network() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    let with_hub = store(dir.path(), &hub);
    let got = with_hub.resolve("owner/tiny", &mut Silent).unwrap();
    fs::remove_file(got.path.join("tokenizer.json")).unwrap();

    let mut seen = Seen::default();
    let gone = Store::with(settings(dir.path()));
    assert_eq!(gone.resolve("owner/tiny", &mut seen).unwrap(), got);
    assert!(
        seen.notes[0].contains("no network") && seen.notes[0].contains("using what is here"),
        "{:?}",
        seen.notes
    );

    assert_eq!(with_hub.resolve("owner/tiny", &mut Silent).unwrap(), got);
    assert!(got.path.join("tokenizer.json").is_file());
}

#[test]
fn a_gguf_repository_needs_a_choice_only_where_there_is_one() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    hub.repo("owner/many", &[("m-Q4_0.gguf", b"four"), ("m-Q8_0.gguf", b"eight")]);
    hub.repo("owner/one", &[("m.gguf", b"GGUF"), ("README.md", b"")]);
    hub.repo("owner/none", &[("config.json", CONFIG), ("pytorch_model.bin", b"pickle")]);
    let store = store(dir.path(), &hub);

    let text = store.resolve("owner/many", &mut Silent).unwrap_err().to_string();
    assert!(text.contains("owner/many:m-Q4_0.gguf") && text.contains("owner/many:m-Q8_0.gguf"), "{text}");
    let got = store.resolve("owner/many:m-Q8_0.gguf", &mut Silent).unwrap();
    assert_eq!((got.format, fs::read(&got.path).unwrap()), (Format::Gguf, b"eight".to_vec()));
    assert!(matches!(store.resolve("owner/many", &mut Silent), Err(StoreError::ChooseFile { .. })));
    let text = store.resolve("owner/many:x.gguf", &mut Silent).unwrap_err().to_string();
    assert!(text.contains("no file x.gguf") && text.contains("owner/many:m-Q4_0.gguf"), "{text}");

    let one = store.resolve("owner/one", &mut Silent).unwrap();
    assert_eq!(fs::read(&one.path).unwrap(), b"GGUF");
    hub.take_log();
    assert_eq!(store.resolve("owner/one", &mut Silent).unwrap(), one);
    assert!(hub.take_log().is_empty());
    let names: Vec<_> = store.list().into_iter().map(|e| e.name).collect();
    assert_eq!(names, ["owner/many:m-Q8_0.gguf", "owner/one:m.gguf"]);

    let text = store.resolve("owner/none", &mut Silent).unwrap_err().to_string();
    assert!(text.contains("neither model.safetensors nor a .gguf"), "{text}");
}

#[test]
fn a_missing_repository_or_revision_is_named() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    let store = store(dir.path(), &hub);
    for id in ["owner/nothing", "owner/tiny@v9"] {
        let text = store.resolve(id, &mut Silent).unwrap_err().to_string();
        assert!(
            text.contains(&format!("no model {id}")) && text.contains("hint: check the spelling"),
            "{text}"
        );
    }
    // To strangers the hub answers 401 for what does not exist.
    hub.faults(Faults { refuse: Some((401, "RepoNotFound")), ..Faults::default() });
    assert!(matches!(store.resolve("owner/private", &mut Silent), Err(StoreError::NoSuchRepo { .. })));
}

#[test]
fn a_gated_repository_tells_where_the_terms_are_and_how_to_give_a_token() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    hub.faults(Faults { refuse: Some((401, "GatedRepo")), ..Faults::default() });
    let text = store(dir.path(), &hub).resolve("owner/gated", &mut Silent).unwrap_err().to_string();
    assert!(
        text.contains("set HF_TOKEN") && text.contains(&format!("{}/owner/gated", hub.endpoint)),
        "{text}"
    );
    hub.faults(Faults { refuse: Some((429, "")), ..Faults::default() });
    let text = store(dir.path(), &hub).resolve("owner/gated", &mut Silent).unwrap_err().to_string();
    assert!(text.contains("429") && text.contains("rate"), "{text}");
}

#[test]
fn the_token_goes_to_the_hub_and_not_where_it_redirects() {
    let (dir, hub, other) = (tempfile::tempdir().unwrap(), FakeHub::start(), FakeHub::start());
    tiny(&hub);
    tiny(&other);
    // Another name of this machine is another host to the client.
    let redirect = Some(other.endpoint.replace("127.0.0.1", "localhost"));
    hub.faults(Faults { redirect, ..Faults::default() });
    let mut settings = settings(dir.path());
    settings.hub.endpoint = hub.endpoint.clone();
    settings.hub.token = Some("hf_secret".into());
    Store::with(settings).resolve("owner/tiny", &mut Silent).unwrap();
    assert!(hub.take_log().iter().all(|r| r.headers["authorization"] == "Bearer hf_secret"));
    let log = other.take_log();
    assert!(!log.is_empty());
    assert!(log.iter().all(|r| !r.headers.contains_key("authorization") && r.headers.contains_key("range")));
}

#[test]
fn no_network_and_offline_are_told_apart_with_hints() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = settings(dir.path());
    settings.hub.endpoint = closed_port();
    let text = Store::with(settings.clone()).resolve("owner/tiny", &mut Silent).unwrap_err().to_string();
    assert!(text.contains("no network") && text.contains("hint: check the connection"), "{text}");
    settings.hub.offline = true;
    let text = Store::with(settings).resolve("owner/tiny", &mut Silent).unwrap_err().to_string();
    assert!(text.contains("HF_HUB_OFFLINE"), "{text}");
}

#[test]
fn an_unwritable_cache_is_named_with_a_hint() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    tiny(&hub);
    // Root may write anywhere, but not below a file.
    fs::write(dir.path().join("hub"), b"").unwrap();
    let text = store(dir.path(), &hub).resolve("owner/tiny", &mut Silent).unwrap_err().to_string();
    assert!(
        text.contains("cannot write") && text.contains("models--owner--tiny") && text.contains("HF_HOME"),
        "{text}"
    );
}

/// Answers that would write outside the cache, or make no sense.
#[test]
fn a_lying_hub_is_refused() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
    let store = store(dir.path(), &hub);
    for name in ["../../../evil.gguf", "/etc/evil.gguf", "a/../../evil.gguf", "", "c:evil.gguf"] {
        hub.repo("owner/evil", &[(name, b"x"), ("model.gguf", b"y")]);
        let error = store.resolve("owner/evil", &mut Silent).unwrap_err();
        assert!(matches!(error, StoreError::BadAnswer { .. }), "{name:?}: {error}");
    }
    let index = br#"{"weight_map":{"a":"../../../../evil.safetensors"}}"#;
    hub.repo("owner/evil", &[("config.json", CONFIG), ("model.safetensors.index.json", index)]);
    assert!(matches!(store.resolve("owner/evil", &mut Silent), Err(StoreError::Unusable { .. })));
    for index in [&b"{"[..], b"[]", br#"{"weight_map":{}}"#, br#"{"weight_map":{"a":1}}"#] {
        hub.repo("owner/evil", &[("config.json", CONFIG), ("model.safetensors.index.json", index)]);
        assert!(matches!(store.resolve("owner/evil", &mut Silent), Err(StoreError::Unusable { .. })));
    }
}
