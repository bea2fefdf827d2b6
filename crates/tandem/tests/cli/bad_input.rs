//! What a user may get wrong: what happened, both numbers where there are two, and what to do.

use super::{fixture, model, tandem};

/// Runs `tandem` and expects a failure with these words on standard error, and nothing on standard output.
#[track_caller]
fn fails(args: &[&str], code: i32, words: &[&str]) {
    let ran = tandem(args).run();
    assert_eq!(ran.code, Some(code), "{args:?}: {}", ran.err);
    assert_eq!(ran.out, "", "{args:?}");
    for word in words {
        assert!(ran.err.contains(word), "{args:?} does not say `{word}`:\n{}", ran.err);
    }
    if code == 1 {
        let lines: Vec<&str> = ran.err.lines().collect();
        assert!(lines[lines.len() - 2].starts_with("error: "), "{}", ran.err);
        assert!(lines[lines.len() - 1].starts_with("hint: "), "{}", ran.err);
    }
}

#[test]
fn a_model_that_is_not_there() {
    fails(&["run", "/no/such/folder", "hi"], 1, &["no such file or folder: /no/such/folder"]);
    fails(&["run", "./missing.gguf", "hi"], 1, &["no such file or folder: ./missing.gguf"]);
    fails(&["run", "nosuchalias", "hi"], 1, &["unknown model `nosuchalias`", "smollm2"]);
    fails(&["run", "owner/name", "hi"], 1, &["owner/name", "HF_HUB_OFFLINE"]);
    fails(&["pull", "owner/name"], 1, &["owner/name", "HF_HUB_OFFLINE"]);
    fails(&["run"], 2, &["required", "MODEL"]);
}

#[test]
fn a_folder_that_is_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    fails(&["run", folder.path().to_str().unwrap(), "hi"], 1, &["config.json"]);
    let text = fixture("text").join("persuasion.txt");
    fails(&["run", text.to_str().unwrap(), "hi"], 1, &["persuasion.txt is not a .gguf file"]);
}

#[test]
fn a_prompt_that_is_empty() {
    let model = model();
    fails(&["run", &model, ""], 1, &["the prompt is empty"]);
    fails(&["run", &model, " \n"], 1, &["the prompt is empty"]);
    // Standard input is empty here.
    fails(&["run", &model], 1, &["the prompt is empty"]);
    fails(&["run", &model, "-"], 1, &["the prompt is empty"]);
}

#[test]
fn prompts_that_cannot_be_read() {
    let model = model();
    let folder = tempfile::tempdir().unwrap();
    let latin1 = folder.path().join("latin1.txt");
    std::fs::write(&latin1, b"caf\xe9").unwrap();
    fails(&["run", &model, "-f", latin1.to_str().unwrap()], 1, &["latin1.txt is not UTF-8", "iconv"]);
    let ran = tandem(&["run", &model]).stdin(b"caf\xe9").run();
    assert!(ran.err.contains("standard input is not UTF-8"), "{}", ran.err);
    let ran = tandem(&["run", &model, "-f", "/no/such/file"]).run();
    assert_eq!(ran.code, Some(1));
    assert!(ran.err.contains("cannot read /no/such/file"), "{}", ran.err);
    fails(&["run", &model, "hi", "-f", "x"], 2, &["cannot be used with"]);
}

#[test]
fn a_prompt_longer_than_the_context_names_both_numbers() {
    let model = model();
    let long = "word ".repeat(5000);
    let ran = tandem(&["run", &model]).stdin(&long).run();
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""));
    let numbers: Vec<usize> =
        ran.err.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
    assert!(numbers[0] > 5000 && numbers[1] > 0, "{}", ran.err);
    assert!(ran.err.contains("do not fit the context of"), "{}", ran.err);

    fails(&["run", &model, "hello", "-c", "4"], 1, &["do not fit the context of 4", "give --context"]);
    fails(&["run", &model, "hello", "-c", "200", "-n", "1000"], 1, &["and the 1000 to generate do not fit"]);
    fails(&["run", &model, "hello", "-c", "999999"], 1, &["999999", "this model handles"]);
}

#[test]
fn numbers_out_of_their_range() {
    let model = model();
    let run = |flags: &[&str], code, words: &[&str]| {
        fails(&[&["run", model.as_str(), "hi"], flags].concat(), code, words);
    };
    run(&["--threads", "0"], 2, &["--threads", "at least 1 thread"]);
    run(&["-t", "100000"], 2, &["--threads", "this machine runs at most"]);
    run(&["--max-tokens", "0"], 2, &["--max-tokens"]);
    run(&["--max-tokens=-5"], 2, &["--max-tokens"]);
    run(&["--seed", "x"], 2, &["--seed"]);
    run(&["--stop", ""], 2, &["--stop"]);
    run(&["--quant", "q3"], 2, &["--quant", "q4, q8, none"]);
    run(&["--logit-bias", "5"], 2, &["--logit-bias", "such as 42=-1.5"]);
    run(&["--memory-budget", "lots"], 2, &["--memory-budget", "such as 900MiB"]);
    run(&["--memory-budget", "10k"], 1, &["not enough memory", "10240"]);
    run(&["--no-such-flag"], 2, &["--no-such-flag"]);
}

/// These reach the engine, which names the parameter and its range.
#[test]
fn sampling_parameters_out_of_their_range() {
    let model = model();
    for (flags, words) in [
        (["--temperature=-1"].as_slice(), "temperature = -1 is not allowed: 0 or above"),
        (&["--temperature", "NaN"], "temperature = NaN"),
        (&["--top-p", "0"], "top_p = 0"),
        (&["--top-p", "1.5"], "top_p = 1.5"),
        (&["--min-p", "2"], "min_p = 2"),
        (&["--repeat-penalty", "0"], "repetition_penalty = 0"),
        (&["--logit-bias", "999999=1"], "token 999999 is outside the vocabulary"),
    ] {
        let ran = tandem(&[&["run", model.as_str(), "hi"], flags].concat()).run();
        assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""), "{flags:?}");
        assert!(ran.err.contains(words), "{flags:?}: {}", ran.err);
    }
}

#[test]
fn flags_that_would_be_ignored_are_refused() {
    let model = model();
    fails(&["run", &model, "hi", "--logprobs", "2"], 2, &["--json"]);
    fails(&["run", &model, "hi", "--raw", "--system", "x"], 2, &["cannot be used with"]);
    fails(&["run", &model, "--dummy-prompt", "3"], 2, &["--dummy-prompt", "cannot be used with"]);
    let config = fixture("llama-gqa").join("config.json");
    let dummy = ["run", "--dummy-weights", config.to_str().unwrap()];
    fails(&[&dummy, ["a", "b"].as_slice()].concat(), 1, &["in place of MODEL"]);
    fails(&[&dummy, ["a", "--dummy-prompt", "3"].as_slice()].concat(), 2, &["cannot be used with"]);
    fails(&[&dummy, ["a", "--system", "b"].as_slice()].concat(), 1, &["no chat template"]);
}

#[test]
fn with_json_an_error_is_an_event_too() {
    let ran = tandem(&["run", &model(), "hello", "--json", "-c", "4"]).run();
    assert_eq!(ran.code, Some(1));
    let event: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(event["event"], "error");
    assert!(event["error"].as_str().unwrap().contains("do not fit the context of 4"));
    assert!(event["hint"].as_str().unwrap().contains("--context"));
    assert!(ran.err.starts_with("error: "));
}
