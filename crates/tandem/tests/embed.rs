//! Tandem as a library, on a tiny random checkpoint.

#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "its main is not this program's")]
#[path = "../examples/embed.rs"]
mod example;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tandem::{Ask, Error, Message, Model, Options, Reason, SampleSpec};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama-gqa")
}

fn model() -> Model {
    Model::load(fixture(), &Options::default()).unwrap()
}

fn text(answer: &mut tandem::Answer) -> String {
    answer.map(Result::unwrap).collect()
}

#[test]
fn the_example_runs() {
    example::run(fixture().to_str().unwrap()).unwrap();
}

#[test]
fn an_answer_is_streamed_and_says_how_it_ended() {
    let model = model();
    let greedy = SampleSpec { temperature: 0.0, ..model.sampling() };
    let ask = Ask { max_tokens: Some(12), sample: Some(greedy), ignore_eos: true, ..Ask::default() };
    let mut answer = model.chat(&[Message::new("user", "Hello")], &ask).unwrap();
    assert_eq!((answer.route().engine.as_str(), answer.done()), ("cpu", None));
    let whole = text(&mut answer);
    let done = answer.done().unwrap();
    assert_eq!((done.usage.generated, &done.reason, &done.route), (12, &Reason::Length, answer.route()));
    // The same through tokens, up to a stop string.
    let stop: String = whole.chars().skip(4).take(3).collect();
    let stopping = Ask { stop: vec![stop.clone()], engine: Some("cpu".to_owned()), ..ask.clone() };
    let mut answer = model.chat(&[Message::new("user", "Hello")], &stopping).unwrap();
    assert_eq!(text(&mut answer), whole[..whole.find(&stop).unwrap()]);
    assert_eq!(answer.done().unwrap().reason, Reason::StopString { text: stop });
}

#[test]
fn threads_share_a_model_and_each_gets_its_own_answer() {
    let model = model();
    let ask = |seed| {
        let sample = SampleSpec { seed, temperature: 1.0, ..SampleSpec::greedy() };
        Ask { max_tokens: Some(16), sample: Some(sample), ignore_eos: true, ..Ask::default() }
    };
    let answer = |seed| text(&mut model.complete("Once", &ask(seed)).unwrap());
    let alone: Vec<String> = (0..4).map(answer).collect();
    std::thread::scope(|scope| {
        let together: Vec<_> = (0..4).map(|seed| scope.spawn(move || answer(seed))).collect();
        for (answer, alone) in together.into_iter().zip(&alone) {
            assert_eq!(answer.join().unwrap(), *alone);
        }
    });
}

#[test]
fn a_dropped_answer_does_not_keep_the_next_waiting() {
    let requests = tandem_runtime::Options { max_requests: 1, ..Default::default() };
    let model = Model::load(fixture(), &Options { requests, ..Options::default() }).unwrap();
    let ask = Ask { ignore_eos: true, ..Ask::default() };
    let mut first = model.complete("Once", &ask).unwrap();
    first.next().unwrap().unwrap();
    assert!(matches!(model.complete("Twice", &ask), Err(Error::Route(_))));
    drop(first);
    let begun = Instant::now();
    while model.complete("Twice", &Ask { max_tokens: Some(1), ..ask.clone() }).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_cannot_be_is_an_error_that_says_what_to_do() {
    let no = |error: Error, words: &[&str]| {
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    no(Model::load("/no/such/folder", &Options::default()).unwrap_err(), &["/no/such/folder"]);
    let options = Options { engine: Some("abacus".to_owned()), ..Options::default() };
    no(Model::load(fixture(), &options).unwrap_err(), &["abacus", "cpu"]);
    let options = Options { context: Some(100_000), ..Options::default() };
    no(Model::load(fixture(), &options).unwrap_err(), &["100000", "512"]);
    let model = model();
    let ask = Ask { max_tokens: Some(600), ..Ask::default() };
    no(model.complete("x", &ask).unwrap_err(), &["do not fit the context of 512"]);
    let ask = Ask { engine: Some("abacus".to_owned()), ..Ask::default() };
    no(model.complete("x", &ask).unwrap_err(), &["`abacus`", "`cpu`"]);
    let ask = Ask { stop: vec![String::new()], ..Ask::default() };
    no(model.complete("x", &ask).unwrap_err(), &["stop string is empty"]);
}
