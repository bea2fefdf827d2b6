//! Chat templates against transformers' own renderings (fixtures/chat, made by scripts/chat_reference.py).

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use common::judged;
use serde::Deserialize;
use serde_json::{Map, Value};
use tandem_model::{ChatTemplate, Message, ModelError, RenderOptions};

#[derive(Deserialize)]
struct Reference {
    /// Absent where each case has its own.
    template: Option<String>,
    special: BTreeMap<String, String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    template: Option<String>,
    messages: Vec<Message>,
    add_generation_prompt: bool,
    tools: Option<Vec<Value>>,
    documents: Option<Value>,
    #[serde(default)]
    variables: Map<String, Value>,
    now: Option<String>,
    expected: Option<String>,
    error: Option<String>,
    #[serde(default)]
    fails: bool,
}

fn local_time(text: &str) -> SystemTime {
    let naive: chrono::NaiveDateTime = text.parse().unwrap();
    naive.and_local_timezone(chrono::Local).unwrap().into()
}

/// What stays an error: minijinja has no `%` operator on strings (the filter `format` and the method do exist).
const KNOWN: &[&str] = &["{{ \"%05.1f\" % 3.14159 }}"];

/// What comes out of the cases in the JSON files of `folder` otherwise than it should.
fn faults(folder: &Path, known: &[&str]) -> Vec<String> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|end| end == "json")).collect();
    files.sort();
    assert!(files.len() >= 8);
    let mut faults = Vec::new();
    for file in files {
        let reference: Reference = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        for (i, case) in reference.cases.into_iter().enumerate() {
            let template = case.template.or_else(|| reference.template.clone()).unwrap();
            let chat = ChatTemplate::new(&template, reference.special.clone());
            let mut extra = case.variables;
            extra.extend(case.documents.map(|documents| ("documents".to_owned(), documents)));
            let options = RenderOptions {
                add_generation_prompt: case.add_generation_prompt,
                tools: case.tools,
                extra,
                now: case.now.as_deref().map(local_time),
            };
            let got = chat.render(&case.messages, &options);
            let right = match (&got, &case.expected, &case.error) {
                (Ok(got), Some(expected), None) => got == expected,
                (Err(error), None, Some(raised)) => {
                    error.to_string() == format!("chat template: it refuses: {raised}")
                }
                (Err(_), None, None) => case.fails,
                _ => false,
            };
            if known.iter().any(|known| template.contains(known)) {
                assert!(got.is_err(), "no longer an error: {template}");
            } else if !right {
                let wanted = case.expected.or(case.error).unwrap_or_else(|| "a failure".into());
                let name = file.file_stem().unwrap().to_string_lossy().into_owned();
                faults.push(format!(
                    "{name} case {i}, {}:\nwanted {wanted}\ngot    {}",
                    if template.len() < 300 { template } else { String::new() },
                    got.unwrap_or_else(|e| e.to_string())
                ));
            }
        }
    }
    faults
}

#[test]
fn renders_as_transformers_does() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/chat");
    let faults = faults(&folder, KNOWN);
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}

/// The templates of real models that llama.cpp keeps for its own tests, rendered by transformers there and then.
#[test]
fn judged_real_templates() {
    let python = std::env::var_os("TANDEM_JUDGE_PYTHON").map(PathBuf::from);
    let Some(python) = judged("a Python with transformers", python) else { return };
    let vocabularies = std::env::var_os("TANDEM_LLAMA_VOCABS").map(PathBuf::from);
    let Some(vocabularies) = judged("llama.cpp's models folder", vocabularies) else { return };
    let out = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/chat_reference.py");
    let output = std::process::Command::new(python)
        .arg(script)
        .arg(out.path())
        .arg(vocabularies.join("templates"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let faults = faults(out.path(), KNOWN);
    // What fails in Python (a loop over none, an empty list where a tuple is meant) may come out here; nothing that
    // comes out there may come out otherwise here, and only one template is refused, for its tools.
    let serious: Vec<_> = faults.iter().filter(|fault| !fault.contains("\nwanted a failure")).collect();
    let refused = serious.iter().filter(|fault| fault.contains("is escaped in Python")).count();
    assert_eq!(serious.len(), refused, "{serious:#?}");
    assert!(refused <= 3 && faults.len() <= 40, "{refused} refused, {} faults: {serious:#?}", faults.len());
}

fn render(template: &str) -> Result<String, ModelError> {
    ChatTemplate::new(template, BTreeMap::new())
        .render(&[Message::new("user", "Hi")], &RenderOptions::default())
}

#[test]
fn a_template_that_throws_hands_on_its_words() {
    let error = render("{{ raise_exception('Only one system message, please.') }}").unwrap_err();
    assert_eq!(error.to_string(), "chat template: it refuses: Only one system message, please.");
}

#[test]
fn a_template_that_does_not_parse_names_the_line() {
    let error = render("line one\n{% if %}").unwrap_err().to_string();
    assert!(error.contains("syntax error") && error.contains("line 2") && error.contains("hint:"), "{error}");
}

#[test]
fn endless_work_and_endless_text_are_cut() {
    let nested =
        "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = a + b %}{% endfor %}{% endfor %}";
    let error = render(nested).unwrap_err().to_string();
    assert!(error.contains("too much work"), "{error}");
    let doubling =
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    assert!(render(doubling).is_err());
    let text = "{% set s = 'x' * 1000000 %}{% for i in range(100) %}{{ s }}{% endfor %}";
    let error = render(text).unwrap_err().to_string();
    assert!(error.contains("64 MiB"), "{error}");
}

#[test]
fn what_python_would_do_otherwise_is_refused_by_name() {
    for (template, words) in [
        ("{{ tool.items }}", "`.items` without a call"),
        ("{% macro m() %}{{ varargs }}{% endmacro %}{{ m(1) }}", "no `varargs`"),
        ("{{ '<' | safe + '<' }}", "is escaped in Python"),
        ("{{ '%s' % 'x' }}", "% operator on unsupported types"),
        ("{{ messages | random }}", "filter random is unknown"),
        ("{{ messages[0] | attr('role') }}", "filter attr is unknown"),
        ("{{ joiner(',') }}", "joiner is unknown"),
        ("{{ 'x'.encode('utf-8') }}", "no method named encode"),
        ("{{ [1].append(2) }}", "no method named append"),
        ("{% block b %}{% endblock %}", "unknown statement block"),
        ("{{ nothing | tojson }}", "a value of type undefined is no JSON"),
        ("{{ 'a' | indent(1, 2, 3, 4) }}", "4 arguments are more than the 3"),
        ("{{ 'a' | default(wrong=1) }}", "unknown keyword argument"),
        ("{{ strftime_now('%Q') }}", "cannot print \"%Q\""),
    ] {
        let error = render(template).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("hint: "), "{template}: {error}");
    }
    // Not reached, not refused.
    assert_eq!(render("{{ ('<' | safe + '<') if false else 'x' }}").unwrap(), "x");
}

#[test]
fn one_expression_cannot_take_all_memory_or_time() {
    let started = std::time::Instant::now();
    for expression in [
        "'x' * 100000000000",
        "('x' * 1000) * 100000000000",
        "[0] * 100000000000",
        "'%1000000000d' | format(1)",
        "'{:1000000000}'.format(1)",
        "range(100000000000) | list",
        "range(100000) | map('string') | join('x' * 100000)",
        "2 ** 100000",
        "'x'.ljust(100000000000)",
        "'x' | indent(100000000000, true)",
        "1.5 | round(100000000)",
        "'a' | tojson(indent=100000000000)",
        "('x' * 1000000).replace('x', 'y' * 1000000) | length",
        "('x' * 1000000) | replace('x', 'y' * 1000000) | length",
        "('x' * 1000000).split('x') | length",
        "('x' * 1000000) | list | join('y' * 1000000) | length",
    ] {
        let _ = render(&format!("{{{{ {expression} }}}}"));
        println!("{expression}: {:?}", started.elapsed());
    }
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
}

#[test]
fn templates_of_a_million_characters() {
    let started = std::time::Instant::now();
    let long = ["x".repeat(999).as_str(), ""].join("\n").repeat(1000);
    assert_eq!(render(&long).unwrap() + "\n", long);
    // Many small tags come out; what nests, or is one expression, is refused before anything recurses over it.
    assert_eq!(render(&"{{ 1 }}+\n".repeat(60_000)).unwrap().len(), 60_000 * 3 - 1);
    let within = |unit: &str| {
        let lines = ["".to_owned(), unit.repeat(10_000 / unit.len())].join("\n");
        lines.repeat(100)
    };
    for (open, unit) in [
        ("{{ 1", " + 1"),
        ("{{ 1", "|int"),
        ("{{ a", ".b"),
        ("{{ ", "("),
        ("{{ ", "["),
        ("{{ ", "not "),
        ("{{ ", "-"),
        ("{{ 1", " if 1 else 1"),
        ("{% if 1 %}", "{% elif 1 %}"),
        ("", "{% if 1 %}"),
        ("", "{% for a in b %}"),
        ("", "{% macro m() %}"),
        ("{{ '", "\\"),
        ("", "{"),
        ("", "{{"),
        ("", "{#"),
        ("", "{% raw %}"),
    ] {
        for close in ["", " }}"] {
            let _ = render(&format!("{open}{}{close}", within(unit)));
        }
    }
    let error = render(&"x".repeat(1_000_000)).unwrap_err().to_string();
    assert!(error.contains("a line of more than 65535 bytes"), "{error}");
    let error = render(&"\n".repeat(100_000)).unwrap_err().to_string();
    assert!(error.contains("as many lines"), "{error}");
    let error = render(&"x".repeat((1 << 20) + 1)).unwrap_err().to_string();
    assert!(error.contains("1048577 bytes"), "{error}");
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
}

#[test]
fn tools_choose_the_template_made_for_them() {
    let named = [("default", "plain"), ("tool_use", "tools")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    let chat = ChatTemplate::with_named(named.into(), BTreeMap::new());
    let mut options = RenderOptions::default();
    assert_eq!(chat.render(&[], &options).unwrap(), "plain");
    options.tools = Some(vec![Value::Null]);
    assert_eq!(chat.render(&[], &options).unwrap(), "tools");

    let only = [("rag".to_owned(), "x".to_owned())];
    let error = ChatTemplate::with_named(only.into(), BTreeMap::new()).render(&[], &RenderOptions::default());
    assert!(error.unwrap_err().to_string().contains("only rag"));
}

#[test]
fn variables_of_the_request_reach_the_template() {
    let chat = ChatTemplate::new(
        "{{ bos_token }}{{ enable_thinking }}",
        [("bos_token".into(), "<s>".into())].into(),
    );
    let options = RenderOptions {
        extra: Map::from_iter([("enable_thinking".into(), false.into())]),
        ..RenderOptions::default()
    };
    assert_eq!(chat.render(&[], &options).unwrap(), "<s>False");
}
