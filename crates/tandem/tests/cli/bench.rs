//! `tandem bench` on the tiny fixture. The figures mean nothing; that they are there, real and labelled does.

use std::path::PathBuf;

use serde_json::Value;

use super::{Ran, Tandem, fixture, model, tandem};

/// `tandem bench` that is allowed to report from whatever build the tests are.
fn bench(args: &[&str]) -> Tandem {
    tandem(&[&["bench"], args].concat()).env("TANDEM_BENCH_DEBUG_BUILD", "1")
}

fn gguf() -> String {
    fixture("gguf").join("llama-gqa-q4_0.gguf").display().to_string()
}

fn json(ran: &Ran) -> Value {
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    serde_json::from_str(&ran.out).unwrap()
}

fn rows<'a>(report: &'a Value, engine: &str) -> Vec<&'a Value> {
    report["rows"].as_array().unwrap().iter().filter(|row| row["engine"] == engine).collect()
}

const QUICK: [&str; 8] = ["-p", "6", "-n", "3", "-r", "2", "-o", "json"];

/// A program that stands in for llama-bench.
#[cfg(unix)]
fn script(folder: &tempfile::TempDir, name: &str, body: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;

    let path = folder.path().join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn every_figure_has_its_samples_and_tokens() {
    let model = gguf();
    let args =
        [&[model.as_str(), "-d", "0,5", "--batch", "2", "-t", "1", "--roofline"], QUICK.as_slice()].concat();
    let report = json(&bench(&args).run());
    assert_eq!(report["tandem"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["tandem"]["debug_build"], cfg!(debug_assertions));
    assert_eq!(report["model"]["hash"].as_str().unwrap().len(), 64);
    assert!(report["model"]["weight_bytes"].as_u64().unwrap() > 0);
    assert!(report["host"]["kernels"].is_string() && report["host"]["cores"].as_u64().unwrap() > 0);
    let names: Vec<&str> = rows(&report, "tandem").iter().map(|row| row["test"].as_str().unwrap()).collect();
    assert_eq!(names, ["load", "pp6", "tg3", "tg3 @ d5", "tg3 x 2", "ttft6", "peak memory"]);
    for row in rows(&report, "tandem") {
        let samples = row["samples"].as_array().unwrap();
        assert_eq!(samples.len(), 2, "{row}");
        let figure = |name: &str| row["spread"][name].as_f64().unwrap();
        assert!(
            0.0 < figure("min") && figure("min") <= figure("median") && figure("median") <= figure("max")
        );
        assert_eq!((&row["error"], &row["tandem_over_peer"]), (&Value::Null, &Value::Null));
        assert_eq!(row["share_of_limit"].is_f64(), row["unit"] == "tok/s", "{row}");
    }
    let first = rows(&report, "tandem")[5];
    assert!(
        (1..=6).contains(&first["new_tokens"].as_u64().unwrap()) && first["cached_tokens"] == 0,
        "{first}"
    );
    let limits = &report["roofline"][0];
    for limit in
        ["int8_operations_per_second", "f32_operations_per_second", "read_small_pages_bytes_per_second"]
    {
        assert!(limits[limit].is_null() || limits[limit].as_f64().unwrap() > 1e6, "{limits}");
    }
}

#[test]
fn the_table_says_what_it_is_from() {
    let out = bench(&[&model(), "-p", "4", "-n", "2", "-r", "1", "-t", "1", "--exact"]).ok();
    for word in ["host ", "load ", "blake3 ", "kernels", "| pp4", "| tg2", "tok/s", "MiB", "exact"] {
        assert!(out.contains(word), "{word} is not in\n{out}");
    }
    assert_eq!(out.contains("DEBUG BUILD"), cfg!(debug_assertions), "{out}");
}

#[test]
fn random_weights_are_measured_too() {
    let config = fixture("llama-gqa").join("config.json");
    let args = ["--dummy-weights", config.to_str().unwrap(), "--dummy-format", "q4_0", "-t", "1"];
    let report = json(&bench(&[&args, QUICK.as_slice()].concat()).run());
    assert!(report["model"]["name"].as_str().unwrap().starts_with("random weights"));
    let first = rows(&report, "tandem")[2];
    assert_eq!((&first["test"], &first["new_tokens"]), (&Value::from("ttft6"), &Value::from(6)));
}

#[test]
fn the_limits_need_no_model() {
    let report = json(&bench(&["--roofline", "-t", "1", "-o", "json"]).run());
    assert_eq!((report["rows"].as_array().unwrap().len(), &report["model"]), (0, &Value::Null));
    assert_eq!(report["roofline"][0]["threads"], 1);
}

#[test]
#[cfg(debug_assertions)]
fn a_debug_build_does_not_report() {
    let ran = tandem(&["bench", &model()]).run();
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""));
    assert!(ran.err.contains("debug build") && ran.err.contains("hint: cargo run --release"), "{}", ran.err);
}

#[test]
fn bad_arguments_are_refused_before_anything_is_measured() {
    let model = model();
    for (flags, code, words) in [
        (["--threads", "0"].as_slice(), 2, "at least 1 thread"),
        (&["-t", "1,100000"], 2, "this machine runs at most"),
        (&["--batch", "0"], 2, "--batch"),
        (&["-r", "0"], 2, "--rounds"),
        (&["--peer", "ollama=/bin/true"], 2, "no runner `ollama` is known"),
        (&["--peer", "/bin/true"], 2, "give llama.cpp=PATH"),
        (&["-p", "100000"], 1, "100001 tokens, and this model handles"),
        (&["-d", "100000"], 1, "100128 tokens, and this model handles"),
        (&["-p", "9", "-n", "9", "--memory-budget", "10k"], 1, "not enough memory"),
    ] {
        let ran = bench(&[&[model.as_str()], flags].concat()).run();
        assert_eq!((ran.code, ran.out.as_str()), (Some(code), ""), "{flags:?}: {}", ran.err);
        assert!(ran.err.contains(words), "{flags:?}: {}", ran.err);
    }
    assert_eq!(bench(&[]).run().code, Some(2));
}

#[test]
fn a_peer_that_is_not_there_keeps_its_rows_and_the_run_goes_on() {
    let model = gguf();
    let args = [&[model.as_str(), "-t", "1", "--peer", "llama.cpp=/no/such/llama-bench"], QUICK.as_slice()];
    let report = json(&bench(&args.concat()).run());
    let failed = rows(&report, "llama.cpp");
    assert_eq!(failed.len(), 4);
    for row in failed {
        assert!(!row["error"].as_str().unwrap().is_empty() && row["spread"].is_null(), "{row}");
    }
    assert!(report["rows"].to_string().contains("cannot start /no/such/llama-bench"));
    assert!(rows(&report, "tandem").iter().all(|row| row["spread"].is_object()));
}

#[test]
#[cfg(unix)]
fn a_peer_that_fails_or_prints_something_else_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let model = gguf();
    let other =
        r#"echo '[{"build_commit":"x","n_prompt":1,"n_gen":0,"n_depth":0,"n_threads":1,"samples_ns":[5]}]'"#;
    let silent = other.replace("[5]", "[]").replace(r#""n_prompt":1"#, r#""n_prompt":6"#);
    for (body, why) in [
        ("echo no memory >&2; exit 3", "failed (exit status: 3): no memory"),
        ("echo hello", "printed no result that is understood (hello)"),
        ("true", "printed no result that is understood (nothing)"),
        (other, "measured something else"),
        (silent.as_str(), "reported no time"),
    ] {
        let peer = format!("llama.cpp={}", script(&folder, "llama-bench", body).display());
        let args = [&[model.as_str(), "-t", "1", "--peer", &peer], QUICK.as_slice()].concat();
        let report = json(&bench(&args).run());
        let row = rows(&report, "llama.cpp")[0];
        assert!(row["error"].as_str().unwrap().contains(why), "{body}: {row}");
        assert_eq!(rows(&report, "tandem").len(), 5);
    }
    let table =
        bench(&[&model, "-t", "1", "-p", "6", "-n", "0", "-r", "1", "--peer", "llama.cpp=/no/such"]).ok();
    assert!(table.contains("failed    pp6 -t 1 llama.cpp: cannot start /no/such"), "{table}");
}

#[test]
fn a_peer_cannot_read_a_folder() {
    let model = model();
    let args = [&[model.as_str(), "-t", "1", "--peer", "llama.cpp=/no/such"], QUICK.as_slice()].concat();
    let report = json(&bench(&args).run());
    assert_eq!(rows(&report, "llama.cpp")[0]["error"], "llama.cpp reads only a .gguf file");
}

#[test]
#[cfg(unix)]
fn a_peer_is_compared_round_by_round() {
    let folder = tempfile::tempdir().unwrap();
    let body = r#"while [ $# -gt 0 ]; do case $1 in -p) p=$2;; -n) n=$2;; -d) d=$2;; -t) t=$2;; esac; shift; done
echo "[{\"build_commit\":\"abc\",\"n_prompt\":$p,\"n_gen\":$n,\"n_depth\":$d,\"n_threads\":$t,\"samples_ns\":[1000000000]}]""#;
    let peer = script(&folder, "llama-bench", body);
    let batched = r#"echo 'a line of talk'; echo '{"pp":128,"tg":3,"pl":2,"n_threads":1,"t_tg":0.5}'"#;
    script(&folder, "llama-batched-bench", batched);
    script(&folder, "llama-cli", "echo out; echo 'prompt eval time = 1.0 ms / 6 tokens' >&2; sleep 0.1");
    let (model, peer) = (gguf(), format!("llama.cpp={}", peer.parent().unwrap().display()));
    let args = [&[model.as_str(), "-t", "1", "--batch", "2", "--peer", &peer], QUICK.as_slice()].concat();
    let report = json(&bench(&args).run());
    assert_eq!(report["peers"][0]["build"], "abc");
    let theirs = rows(&report, "llama.cpp");
    let rates: Vec<f64> = theirs.iter().filter_map(|row| row["spread"]["median"].as_f64()).collect();
    assert_eq!(rates[..3], [6.0, 3.0, 12.0]);
    assert_eq!(theirs[3]["new_tokens"], 6);
    for row in &theirs[..4] {
        let ours = rows(&report, "tandem").into_iter().find(|ours| ours["test"] == row["test"]).unwrap();
        let ratio =
            |round: usize| ours["samples"][round].as_f64().unwrap() / row["samples"][round].as_f64().unwrap();
        let expected = [ratio(0).min(ratio(1)), ratio(0).max(ratio(1))];
        let got = ["min", "max"].map(|name| row["tandem_over_peer"][name].as_f64().unwrap());
        // Decimal figures are read back to within rounding.
        assert!(got.iter().zip(expected).all(|(got, expected)| (got / expected - 1.0).abs() < 1e-9), "{row}");
    }
}
