use std::io::Read;

use serde_json::Value;

use super::{fixture, model, tandem};

fn answer(flags: &[&str]) -> String {
    tandem(&[&["run", model().as_str(), "Hello there"], flags].concat()).ok()
}

fn events(flags: &[&str]) -> Vec<Value> {
    let text = answer(&[&["--json"], flags].concat());
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_same_seed_gives_the_same_answer_and_another_another() {
    let warm = ["-n", "20", "--ignore-eos", "--temp", "1", "--seed"];
    let with = |seed| answer(&[&warm, [seed].as_slice()].concat());
    assert_eq!(with("1"), with("1"));
    assert_ne!(with("1"), with("2"));
    // Whatever the number of threads.
    assert_eq!(with("1"), answer(&[&warm, ["1", "-t", "1"].as_slice()].concat()));
}

#[test]
fn the_prompt_comes_from_an_argument_a_file_or_standard_input() {
    let flags = ["-n", "10", "--ignore-eos", "--temp", "0"];
    let expected = answer(&flags);
    let model = model();
    let run = |args: &[&str]| tandem(&[&["run", model.as_str()], args, &flags].concat());
    assert_eq!(run(&[]).stdin("Hello there\n").ok(), expected);
    assert_eq!(run(&["-"]).stdin("Hello there").ok(), expected);
    assert_eq!(run(&["-f", "-"]).stdin("Hello there").ok(), expected);
    // An argument wins over standard input, which is not even read.
    assert_eq!(run(&["Hello there"]).stdin("something else").ok(), expected);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, "Hello there\r\n").unwrap();
    assert_eq!(run(&["-f", file.to_str().unwrap()]).ok(), expected);
}

#[test]
fn json_is_one_event_a_line() {
    let events = events(&["-n", "8", "--ignore-eos", "--temp", "0", "--seed", "5", "--logprobs", "3"]);
    let kinds: Vec<&str> = events.iter().map(|e| e["event"].as_str().unwrap()).collect();
    assert_eq!(kinds[0], "start");
    assert_eq!(kinds.iter().filter(|k| **k == "token").count(), 8);
    assert_eq!(*kinds.last().unwrap(), "done");

    let (start, done) = (&events[0], events.last().unwrap());
    assert_eq!((&start["seed"], &start["engine"]), (&Value::from(5), &Value::from("cpu")));
    assert_eq!(done["reason"], "length");
    assert_eq!(done["usage"]["prompt"], start["prompt_tokens"]);
    assert_eq!((&done["usage"]["cached"], &done["usage"]["generated"]), (&Value::from(0), &Value::from(8)));
    for figure in ["load", "prefill_rate", "decode_rate"] {
        assert!(done[figure].as_f64().unwrap() > 0.0, "{figure}");
    }
    assert!(done["timing"]["ttft"].as_f64().unwrap() > 0.0);
    for token in events.iter().filter(|e| e["event"] == "token") {
        let top = token["top"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Greedy: the chosen token is the likeliest.
        assert_eq!((&top[0]["id"], &top[0]["logprob"]), (&token["id"], &token["logprob"]));
        assert!(top.windows(2).all(|w| w[0]["logprob"].as_f64() >= w[1]["logprob"].as_f64()));
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    let text: String = events.iter().filter_map(|e| e["text"].as_str()).collect();
    let plain = answer(&["-n", "8", "--ignore-eos", "--temp", "0"]);
    assert_eq!(plain.trim_end_matches('\n'), text.trim_end_matches('\n'));
}

#[test]
fn an_engine_may_be_named() {
    let named = events(&["-n", "2", "--engine", "cpu"]);
    assert_eq!(named.last().unwrap()["route"]["reason"], "asked for by name");
    assert_eq!(events(&["-n", "2"]).last().unwrap()["route"]["reason"], "the only engine");
    let ran = tandem(&["run", &model(), "x", "--engine", "abacus"]).run();
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("abacus") && ran.err.contains("[possible values: cpu, mlx]"), "{}", ran.err);
}

#[test]
#[cfg(not(any(feature = "mlx", target_os = "macos")))]
fn an_engine_that_was_not_built_says_what_to_do() {
    let ran = tandem(&["run", &model(), "x", "--engine", "mlx"]).run();
    assert_eq!(ran.code, Some(1));
    assert!(ran.out.is_empty());
    for part in ["made without MLX", "hint:", "pip install mlx", "--features mlx"] {
        assert!(ran.err.contains(part), "{}", ran.err);
    }
}

#[test]
fn stats_are_lines_on_standard_error_in_a_fixed_form() {
    let model = model();
    let ran =
        tandem(&["run", &model, "Hello there", "-n", "5", "--ignore-eos", "--stats", "--seed", "3"]).run();
    assert_eq!(ran.code, Some(0));
    let lines: Vec<&str> = ran.err.lines().collect();
    let forms = [
        "seed #",
        "load #.## s",
        "prefill # tokens (0 cached) #.# tok/s",
        "ttft #.## s",
        "decode 5 tokens #.# tok/s",
        "peak memory # MiB",
    ];
    assert_eq!(lines.len(), forms.len(), "{}", ran.err);
    for (line, form) in lines.iter().zip(forms) {
        assert!(matches(line, form), "`{line}` is not of the form `{form}`");
    }
}

/// Whether `line` reads as `form`, where a `#` after `.` is one digit and any other one or more.
fn matches(line: &str, form: &str) -> bool {
    let mut rest = line;
    let mut fraction = false;
    for c in form.chars() {
        let digits = rest.chars().take_while(char::is_ascii_digit).count();
        match c {
            '#' if digits == 0 => return false,
            '#' => rest = &rest[if fraction { 1 } else { digits }..],
            _ => match rest.strip_prefix(c) {
                Some(next) => rest = next,
                None => return false,
            },
        }
        fraction = c == '.' || fraction && c == '#';
    }
    rest.is_empty()
}

#[test]
fn a_stop_string_ends_the_answer_before_it() {
    let flags = ["-n", "40", "--ignore-eos", "--temp", "0"];
    let whole = answer(&flags);
    let chars: Vec<char> = whole.trim_end().chars().collect();
    // Most likely over a token border, somewhere in the middle.
    let stop: String = chars[chars.len() / 2..chars.len() / 2 + 4].iter().collect();
    let before = &whole[..whole.find(&stop).unwrap()];
    let stopped = answer(&[&flags, ["--stop", &stop, "--stop", "\u{1f980}\u{1f980}"].as_slice()].concat());
    assert_eq!(stopped.trim_end_matches('\n'), before.trim_end_matches('\n'));
    let events = events(&[&flags, ["--stop", &stop].as_slice()].concat());
    let done = events.last().unwrap();
    assert_eq!((&done["reason"], &done["stop"]), (&Value::from("stop_string"), &Value::from(stop)));
}

#[test]
fn the_template_the_system_message_and_raw_change_the_prompt() {
    let tokens =
        |flags: &[&str]| events(&[&["-n", "1"], flags].concat())[0]["prompt_tokens"].as_u64().unwrap();
    let system = tokens(&["--system", "Answer every question with a very long and winding sentence."]);
    let (plain, raw) = (tokens(&[]), tokens(&["--raw"]));
    assert!(raw < plain && plain < system, "{raw} {plain} {system}");
}

#[test]
fn a_bias_decides() {
    let events = events(&["-n", "4", "--temp", "1", "--logit-bias", "65=1e9", "--ignore-eos"]);
    let ids: Vec<&Value> = events.iter().filter(|e| e["event"] == "token").map(|e| &e["id"]).collect();
    assert_eq!(ids, [65, 65, 65, 65]);
}

#[test]
fn every_format_and_precision_runs() {
    for file in ["q4_0", "q4_1", "q8_0", "f16"] {
        let gguf = fixture("gguf").join(format!("llama-gqa-{file}.gguf"));
        let ran = tandem(&["run", gguf.to_str().unwrap(), "Hi", "-n", "3", "--raw", "--ignore-eos"]).run();
        assert_eq!(ran.code, Some(0), "{file}: {}", ran.err);
    }
    for flags in [
        ["--exact"].as_slice(),
        &["--quant", "q8"],
        &["--quant", "q4"],
        &["--kv-quant", "f16"],
        &["--kv-quant", "q8"],
        &["--context", "0"],
    ] {
        answer(&[&["-n", "3"], flags].concat());
    }
    let both = tandem(&["run", "model", "Hi", "--exact", "--kv-quant", "q8"]).run();
    assert!(both.code == Some(2) && both.err.contains("cannot be used with"), "{}", both.err);
}

#[test]
fn random_weights_need_no_checkpoint() {
    let config = fixture("llama-gqa").join("config.json");
    let dummy = ["run", "--dummy-weights", config.to_str().unwrap(), "--seed", "1", "-n", "6", "--json"];
    let run = |flags: &[&str]| -> Vec<Value> {
        let text = tandem(&[&dummy, flags].concat()).ok();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    assert_eq!(run(&["--dummy-prompt", "50"])[0]["prompt_tokens"], 50);
    for format in ["f32", "f16", "bf16", "q4_0", "q4_1", "q8_0"] {
        let events = run(&["12 bytes!!!!", "--dummy-format", format]);
        assert_eq!(events[0]["prompt_tokens"], 12, "{format}");
        assert_eq!(events.last().unwrap()["usage"]["generated"], 6);
    }
    let ids = |events: Vec<Value>| events.iter().map(|e| e["id"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(run(&["again"])), ids(run(&["again"])));
}

/// An answer long enough to be interrupted.
fn endless(folder: &tempfile::TempDir) -> super::Tandem {
    let short = std::fs::read_to_string(fixture("llama-gqa").join("config.json")).unwrap();
    let config = folder.path().join("config.json");
    std::fs::write(
        &config,
        short.replace("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 65536"),
    )
    .unwrap();
    let config = config.to_str().unwrap();
    tandem(&["run", "--dummy-weights", config, "--dummy-prompt", "3", "--context", "0", "--stats"])
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let folder = tempfile::tempdir().unwrap();
    let mut tandem = endless(&folder);
    let mut child = tandem.command.spawn().unwrap();
    let mut first = [0; 1];
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut first).unwrap();
    drop(out);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap()), (Some(0), String::new()));
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_the_answer_cleanly_with_its_stats() {
    let folder = tempfile::tempdir().unwrap();
    let mut tandem = endless(&folder);
    let mut child = tandem.command.spawn().unwrap();
    let mut first = [0; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(String::from_utf8(output.stderr).unwrap().contains("\ndecode "));
    assert!(output.stdout.ends_with(b"\n"));
}
