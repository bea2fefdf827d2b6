use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tandem_engine::fake::FakeEngine;
use tandem_engine::{Engine, SampleSpec};

use super::*;
use crate::{Event, Reason};

const VOCAB: usize = 97;

/// A dynamic engine of 4096 tokens.
fn dynamic() -> Box<dyn EngineFactory> {
    Box::new(|| Ok(Box::new(FakeEngine::new(VOCAB, 4096, 100_000)) as Box<dyn Engine>))
}

/// A static one of 512.
fn fixed() -> Box<dyn EngineFactory> {
    Box::new(|| Ok(Box::new(FakeEngine::new(VOCAB, 512, 2000).fixed_shapes(&[1, 16, 64])) as Box<dyn Engine>))
}

/// Refuses to be built while `broken`.
fn breakable(broken: &Arc<AtomicBool>) -> Box<dyn EngineFactory> {
    let broken = Arc::clone(broken);
    Box::new(move || {
        if broken.load(Ordering::Relaxed) {
            return Err(EngineError::Device("no such device".to_owned()));
        }
        Ok(Box::new(FakeEngine::new(VOCAB, 512, 2000).fixed_shapes(&[1, 16])) as Box<dyn Engine>)
    })
}

/// Waits to be let go before it is built.
fn slow(gate: &Arc<AtomicBool>, mut inner: Box<dyn EngineFactory>) -> Box<dyn EngineFactory> {
    let gate = Arc::clone(gate);
    Box::new(move || {
        while !gate.load(Ordering::Relaxed) {
            std::thread::sleep(GLANCE);
        }
        inner.build()
    })
}

fn few(max_requests: usize) -> Options {
    Options { max_requests, ..Options::default() }
}

/// Model `m` with these engines, all of them ready.
fn coordinator(engines: Vec<(&str, Box<dyn EngineFactory>, Options)>) -> Coordinator {
    let mut coordinator = Coordinator::default();
    let names: Vec<&str> = engines.iter().map(|(name, ..)| *name).collect();
    for (name, factory, options) in engines {
        coordinator.add("m", name, factory, &options).unwrap();
    }
    for name in names {
        coordinator.ready("m", Some(name)).unwrap();
    }
    coordinator
}

/// The pair: static `ane`, dynamic `cpu`.
fn pair() -> Coordinator {
    coordinator(vec![("ane", fixed(), Options::default()), ("cpu", dynamic(), Options::default())])
}

fn request(prompt: usize, max_tokens: Option<usize>) -> Request {
    Request {
        tokens: (0..prompt as u32).map(|i| i % VOCAB as u32).collect(),
        sample: SampleSpec::greedy(),
        max_tokens,
        stop_tokens: Vec::new(),
        context: None,
        adapter: None,
        priority: 0,
    }
}

/// Whose `Done` says the same as the decision.
fn finish(routed: Routed) -> Vec<Event> {
    let route = routed.decision.route;
    let last = routed.streams.into_iter().map(|stream| {
        let last = stream.last().unwrap();
        if let Event::Done(done) = &last {
            assert_eq!(done.route, route);
        }
        last
    });
    last.collect()
}

fn answered(coordinator: &Coordinator, requests: &[Request]) -> Decision {
    let routed = coordinator.generate("m", requests, None).unwrap();
    let decision = routed.decision.clone();
    assert!(finish(routed).iter().all(|e| matches!(e, Event::Done(done) if done.reason == Reason::Length)));
    decision
}

fn is(decision: &Decision, engine: &str, kind: &str, reason: &str) {
    let Decision { route, kind: found } = decision;
    assert_eq!((route.engine.as_str(), *found, route.reason.as_str()), (engine, kind, reason));
}

#[test]
fn the_threshold_sends_short_lone_requests_to_the_static_engine() {
    let pair = pair();
    let decision = answered(&pair, &[request(10, Some(20))]);
    is(&decision, "ane", "short", "30 tokens of prompt and answer, below 1024, and alone");
    let decision = answered(&pair, &[request(10, Some(20)), request(10, Some(20))]);
    is(&decision, "cpu", "batch", "2 answers run as one batch");
    let routed = pair.generate("m", &[request(10, None)], None).unwrap();
    is(&routed.decision, "cpu", "unbounded", "the answer may fill the context");
    drop(routed);
    // Beyond what the static engine was made for.
    let decision = answered(&pair, &[request(500, Some(20))]);
    is(&decision, "cpu", "unfit", "ane cannot: 520 tokens do not fit the context of 512");
}

#[test]
fn the_cutoff_is_exclusive_and_may_be_set() {
    let capabilities = FakeEngine::new(VOCAB, 4096, 100).fixed_shapes(&[1]).capabilities().clone();
    let dynamic = FakeEngine::new(VOCAB, 4096, 100).capabilities().clone();
    let candidates = [
        Candidate { engine: "cpu", capabilities: &dynamic, requests: 3 },
        Candidate { engine: "ane", capabilities: &capabilities, requests: 0 },
    ];
    let choose = |cutoff, prompt, max_tokens| {
        let shape = Shape { prompt, max_tokens: Some(max_tokens), sequences: 1 };
        Threshold { cutoff }.choose(&shape, &candidates)
    };
    assert_eq!(choose(1024, 1000, 23).index, 1);
    let long = choose(1024, 1000, 24);
    assert_eq!((long.index, long.kind), (0, "long"));
    assert_eq!(long.reason, "1024 tokens of prompt and answer, not below 1024");
    assert_eq!((choose(100, 50, 49).index, choose(100, 50, 50).index), (1, 0));
    assert_eq!(choose(0, 1, usize::MAX).index, 0);
}

#[test]
fn a_static_engine_that_serves_somebody_is_left_alone() {
    let pair = pair();
    // Its reader takes nothing, so it stays.
    let held = pair.generate("m", &[request(10, Some(300))], None).unwrap();
    assert_eq!(held.decision.route.engine, "ane");
    is(&answered(&pair, &[request(10, Some(5))]), "cpu", "occupied", "ane has 1 request already");
    drop(held);
    let busy = |load: &Load| load.running + load.waiting > 0;
    while busy(&pair.loads("m").unwrap()[0].1) {
        std::thread::sleep(GLANCE);
    }
    assert_eq!(answered(&pair, &[request(10, Some(5))]).kind, "short");
}

#[test]
fn a_request_may_name_its_engine() {
    let pair = pair();
    let asked = |engine, request: Request| pair.generate("m", &[request], Some(engine));
    let routed = asked("ane", request(10, Some(5))).unwrap();
    is(&routed.decision, "ane", "asked", "asked for by name");
    assert!(matches!(finish(routed).as_slice(), [Event::Done(_)]));
    assert_eq!(asked("cpu", request(10, Some(5))).unwrap().decision.route.engine, "cpu");

    let error = asked("gpu", request(10, Some(5))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no engine `gpu` here, only `ane`, `cpu`. hint: leave it out to let Tandem choose"
    );
    let error = asked("ane", request(600, Some(5))).unwrap_err();
    assert!(
        error.to_string().starts_with("the engine `ane` cannot serve this: 605 tokens do not fit"),
        "{error}"
    );
    assert!(matches!(
        error.refusal(),
        Some(Refusal::Unfit(EngineError::ContextOverflow { needed: 605, limit: 512 }))
    ));
    assert_eq!(pair.generate("x", &[], None).unwrap_err(), RouteError::NoModel { model: "x".to_owned() });
}

#[test]
fn memory_that_never_suffices_is_known_before_anything_runs() {
    let small: Box<dyn EngineFactory> =
        Box::new(|| Ok(Box::new(FakeEngine::new(VOCAB, 4096, 100)) as Box<dyn Engine>));
    let both =
        coordinator(vec![("small", small, Options::default()), ("cpu", dynamic(), Options::default())]);
    let decision = answered(&both, &[request(90, Some(20))]);
    is(
        &decision,
        "cpu",
        "unfit",
        "small cannot: not enough memory for the KV cache of 110 tokens: 7040 bytes needed, 6400 available",
    );
}

#[test]
fn an_engine_that_is_loading_is_passed_by_and_waited_for_only_if_it_is_the_last() {
    let gate = Arc::new(AtomicBool::new(false));
    let mut coordinator = Coordinator::default();
    coordinator.add("m", "ane", slow(&gate, fixed()), &Options::default()).unwrap();
    coordinator.add("m", "cpu", dynamic(), &Options::default()).unwrap();
    // One that is ready suffices.
    assert_eq!(coordinator.ready("m", None).unwrap().context, 4096);
    is(&answered(&coordinator, &[request(10, Some(5))]), "cpu", "loading", "ane is loading");
    // Asked for by name, it is waited for.
    let waiting = coordinator.generate("m", &[request(10, Some(5))], Some("ane")).unwrap();
    gate.store(true, Ordering::Relaxed);
    assert!(matches!(finish(waiting).as_slice(), [Event::Done(_)]));

    let gate = Arc::new(AtomicBool::new(false));
    let mut alone = Coordinator::default();
    alone.add("m", "cpu", slow(&gate, dynamic()), &Options::default()).unwrap();
    let waiting = alone.generate("m", &[request(10, Some(5))], None).unwrap();
    is(&waiting.decision, "cpu", "only", "the only engine");
    gate.store(true, Ordering::Relaxed);
    assert!(matches!(finish(waiting).as_slice(), [Event::Done(_)]));
}

#[test]
fn an_engine_that_has_failed_is_passed_by_and_taken_again_once_it_is_mended() {
    let broken = Arc::new(AtomicBool::new(true));
    let soon = Options { pause: Duration::from_millis(50), ..Options::default() };
    let mut coordinator = Coordinator::default();
    coordinator.add("m", "ane", breakable(&broken), &soon).unwrap();
    let error = coordinator.ready("m", None).unwrap_err();
    assert_eq!(error.to_string(), "engine failure: no such device");
    let error = coordinator.generate("m", &[request(10, Some(5))], None).map(|_| ()).unwrap_err();
    assert!(
        error.to_string().contains("`ane` cannot serve this: it has failed and is started again in"),
        "{error}"
    );
    assert!(error.refusal().unwrap().retry_after().unwrap() <= soon.pause * 2);

    coordinator.add("m", "cpu", dynamic(), &Options::default()).unwrap();
    coordinator.ready("m", Some("cpu")).unwrap();
    while coordinator.loads("m").unwrap()[0].1.state == LoadState::Loading {
        std::thread::sleep(GLANCE);
    }
    let routed = coordinator.generate("m", &[request(10, Some(5))], None).unwrap();
    assert_eq!(routed.decision.route.engine, "cpu");
    assert!(["failed", "loading"].contains(&routed.decision.kind));
    finish(routed);
    broken.store(false, Ordering::Relaxed);
    while coordinator.generate("m", &[request(10, Some(5))], None).unwrap().decision.route.engine != "ane" {
        std::thread::sleep(GLANCE);
    }
}

#[test]
fn a_full_engine_gives_way_to_the_other_and_both_full_is_an_error() {
    let pair = coordinator(vec![("ane", fixed(), few(1)), ("cpu", dynamic(), few(1))]);
    let first = pair.generate("m", &[request(600, Some(300))], None).unwrap();
    assert_eq!(first.decision.route.engine, "cpu");
    // The policy prefers the dynamic engine for this one, but it is full.
    let second = pair.generate("m", &[request(10, None)], None).unwrap();
    let reason = "cpu is busy: 1 requests are running or waiting already";
    is(&second.decision, "ane", "busy", reason);
    let error = pair.generate("m", &[request(10, Some(5))], None).map(|_| ()).unwrap_err();
    assert!(error.to_string().starts_with("no engine can serve this; ane: 1 requests"), "{error}");
    assert!(matches!(error.refusal(), Some(Refusal::Busy(_))));
    assert!(error.refusal().unwrap().retry_after().is_some());
    let error = pair.generate("m", &[request(10, Some(5))], Some("ane")).map(|_| ()).unwrap_err();
    assert!(error.to_string().starts_with("the engine `ane` cannot serve this: 1 requests"), "{error}");
    // More answers than either will ever take: waiting would not help.
    drop((first, second));
    let many = [request(10, Some(5)), request(10, Some(5))];
    let error = loop {
        match pair.generate("m", &many, None).map(|_| ()).unwrap_err() {
            error if error.refusal().unwrap().retry_after().is_none() => break error,
            _ => std::thread::sleep(GLANCE),
        }
    };
    assert!(
        error.to_string().contains("2 answers were asked for, and it takes 1 requests in all"),
        "{error}"
    );
}

#[test]
fn a_drained_coordinator_answers_what_it_has_and_takes_no_more() {
    let pair = pair();
    let held = pair.generate("m", &[request(10, Some(300))], None).unwrap();
    pair.drain(Duration::from_secs(20));
    let error = pair.generate("m", &[request(10, Some(5))], None).map(|_| ()).unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::Ending(_))) && error.to_string().contains("shut down"));
    assert!(matches!(finish(held).as_slice(), [Event::Done(done)] if done.usage.generated == 300));
}

#[test]
fn explaining_runs_nothing() {
    let pair = pair();
    let shape = Shape { prompt: 600, max_tokens: Some(9), sequences: 1 };
    let (decision, prospects) = pair.explain("m", &shape, None).unwrap();
    is(&decision.unwrap(), "cpu", "unfit", "ane cannot: 609 tokens do not fit the context of 512");
    let refused: Vec<_> = prospects.iter().map(|p| (p.engine.as_str(), p.refusal.is_some())).collect();
    assert_eq!(refused, [("ane", true), ("cpu", false)]);
    let (decision, _) = pair.explain("m", &shape, Some("ane")).unwrap();
    assert!(matches!(decision, Err(RouteError::Asked { .. })));
    assert!(pair.loads("m").unwrap().iter().all(|(_, load)| load.running + load.waiting == 0));
}

#[test]
fn engines_answer_the_same_whichever_serves() {
    let pair = pair();
    let tokens = |engine| -> Vec<u32> {
        let routed = pair.generate("m", &[request(200, Some(40))], Some(engine)).unwrap();
        let events = routed.streams.into_iter().flatten();
        events.filter_map(|e| if let Event::Token(token) = e { Some(token.id) } else { None }).collect()
    };
    assert_eq!(tokens("ane"), tokens("cpu"));
    assert_eq!(tokens("ane").len(), 40);
}

#[test]
fn requests_are_seen_in_their_longest_shape() {
    let shape = |requests: &[Request]| Shape::of(requests);
    let both = [request(5, Some(9)), request(7, Some(3))];
    assert_eq!(shape(&both), Shape { prompt: 7, max_tokens: Some(9), sequences: 2 });
    assert_eq!(shape(&[request(5, None)]).total(), None);
    let within = Request { context: Some(20), ..request(5, None) };
    assert_eq!(shape(&[within]).total(), Some(20));
}
