//! What need not be computed again.

use super::*;

#[test]
fn the_next_turn_of_a_chat_computes_only_what_it_adds() {
    let mut rig = Rig::new(100_000);
    let first = request(prompt(1, 100), 20);
    let (answer, done) = rig.answer(&first);
    assert_eq!(done.unwrap().usage, Usage { prompt: 100, cached: 0, generated: 20 });

    // The last token was sampled but never fed, so it is not cached.
    let second = request([first.tokens, answer, prompt(5, 10)].concat(), 20);
    let (answer, done) = rig.answer(&second);
    assert_eq!(answer, expected(&second));
    assert_eq!(done.unwrap().usage, Usage { prompt: 130, cached: 119, generated: 20 });

    // The same prompt again: its last token is computed for the logits.
    let (again, done) = rig.answer(&second);
    assert_eq!(again, answer);
    assert_eq!(done.unwrap().usage.cached, 129);

    // Something else entirely.
    let other = request([vec![96], prompt(7, 20)].concat(), 5);
    let (answer, done) = rig.answer(&other);
    assert_eq!((answer, done.unwrap().usage.cached), (expected(&other), 0));
}

#[test]
fn an_inexact_fork_means_recomputing() {
    let mut rig = Rig::new(100_000);
    rig.record.borrow_mut().inexact = true;
    let again = request(prompt(1, 100), 20);
    for _ in 0..2 {
        let (answer, done) = rig.answer(&again);
        assert_eq!((answer, done.unwrap().usage.cached), (expected(&again), 0));
    }
}

#[test]
fn the_kept_prefix_yields_to_a_request_that_needs_its_memory() {
    let mut rig = Rig::new(100);
    rig.answer(&request(prompt(1, 50), 10)).1.unwrap();
    assert_eq!(rig.kv_tokens(), 59);
    let other = request([vec![96], prompt(2, 50)].concat(), 29);
    let (answer, done) = rig.answer(&other);
    assert_eq!((answer, done.unwrap().usage.cached), (expected(&other), 0));
    assert_eq!(rig.kv_tokens(), 79);

    // A request that continues it shares its memory instead, however little is left.
    let longer = request([other.tokens.clone(), expected(&other)].concat(), 20);
    let (answer, done) = rig.answer(&longer);
    assert_eq!((answer, done.unwrap().usage.cached), (expected(&longer), 79));
    assert_eq!(rig.kv_tokens(), 99);
}

#[test]
fn finishing_keeps_the_prefix_and_says_why() {
    let mut rig = Rig::new(100_000);
    let long = request(prompt(1, 20), 100);
    let (id, reader) = rig.accept(&long, 1000);
    for _ in 0..5 {
        rig.scheduler.step().unwrap();
    }
    let reason = Reason::StopString { text: "END".to_owned() };
    rig.scheduler.finish(id, reason.clone());
    let (tokens, done) = read(&reader);
    let done = done.unwrap();
    assert_eq!((tokens.len(), done.reason, done.usage.generated), (5, reason, 5));
    assert_eq!(rig.answer(&long).1.unwrap().usage.cached, 19);

    // One that has not begun yet.
    let (id, reader) = rig.accept(&long, 1000);
    rig.scheduler.finish(id, Reason::Interrupted);
    let done = read(&reader).1.unwrap();
    assert_eq!((done.reason, done.timing.ttft), (Reason::Interrupted, None));
}

#[test]
fn what_several_ask_at_once_is_computed_once() {
    let mut rig = Rig::new(100_000);
    let alike: Vec<Request> =
        (0..4u32).map(|last| request([prompt(1, 150), vec![last]].concat(), 3)).collect();
    let same = [&alike[0], &alike[0], &alike[1], &alike[2], &alike[3]];
    let readers = same.map(|request| rig.accept(request, 1000).1);
    rig.run();
    let cached = std::iter::zip(&readers, same).map(|(reader, request)| {
        let (answer, done) = read(reader);
        assert_eq!(answer, expected(request));
        done.unwrap().usage.cached
    });
    assert_eq!(cached.collect::<Vec<_>>(), [0, 150, 150, 150, 150]);
    let computed: usize = rig.record.borrow().steps.iter().flatten().map(|(_, count, _)| count).sum();
    assert_eq!(computed, 151 + 4 + 5 * 2, "the prompt once, a last token each, and two tokens fed back");

    // Whoever waits for one that is cancelled computes it.
    let (first, _reader) = rig.accept(&request(prompt(5, 200), 3), 1000);
    let (_, second) = rig.accept(&request(prompt(5, 200), 3), 1000);
    rig.steps(1);
    assert_eq!((rig.scheduler.running(), rig.scheduler.waiting()), (1, 1));
    rig.scheduler.cancel(first);
    rig.run();
    assert_eq!(read(&second).0, expected(&request(prompt(5, 200), 3)));
}

/// A chat whose template leaves the thinking of earlier answers out: the prompts and answers of its turns.
fn thinking_chat(rig: &mut Rig, turns: u32) -> Vec<(usize, usize)> {
    let mut history = prompt(9, 60);
    let mut usages = Vec::new();
    for turn in 0..turns {
        let asked = request([history.clone(), prompt(10 + turn, 10)].concat(), 30);
        let (answer, done) = rig.answer(&asked);
        assert_eq!(answer, expected(&asked));
        let usage = done.unwrap().usage;
        usages.push((usage.prompt, usage.cached));
        history = [asked.tokens, answer[20..].to_vec()].concat();
    }
    usages
}

#[test]
fn a_chat_whose_template_drops_thinking_computes_only_what_was_rendered_anew() {
    let mut rig = Rig::new(100_000);
    // Each prompt shares the last one, and then the answer's end stands where its thinking did.
    assert_eq!(thinking_chat(&mut rig, 4), [(70, 0), (90, 70), (110, 90), (130, 110)]);
}

#[test]
fn a_windowed_engine_goes_on_from_the_end_of_the_last_prompt() {
    let mut rig = Rig::with(FakeEngine::new(VOCAB, CONTEXT, 100_000).windowed(16));
    assert_eq!(thinking_chat(&mut rig, 4), [(70, 0), (90, 70), (110, 90), (130, 110)]);
    // Where the answer is rendered as it was, from its end.
    let first = request(prompt(3, 50), 20);
    let (answer, _) = rig.answer(&first);
    let second = request([first.tokens, answer, prompt(4, 10)].concat(), 5);
    let (answer, done) = rig.answer(&second);
    assert_eq!((answer, done.unwrap().usage.cached), (expected(&second), 69));
    // And from nowhere in between.
    let other = request([prompt(3, 30), prompt(5, 30)].concat(), 5);
    let (answer, done) = rig.answer(&other);
    assert_eq!((answer, done.unwrap().usage.cached), (expected(&other), 0));
}

#[test]
fn a_cancelled_request_keeps_nothing_of_its_prompt() {
    let mut rig = Rig::with(FakeEngine::new(VOCAB, CONTEXT, 100_000).windowed(16));
    let (id, _reader) = rig.accept(&request(prompt(3, 50), 20), 1000);
    rig.steps(3);
    rig.scheduler.cancel(id);
    assert_eq!(rig.kv_tokens(), 0);
}

#[test]
fn chats_beside_each_other_keep_their_own_prefixes() {
    let mut rig = Rig::new(100_000);
    let mut histories: Vec<Vec<u32>> = (0..5).map(|i| [prompt(1, 40), prompt(20 + i, 20)].concat()).collect();
    for turn in 0..4 {
        for (i, history) in histories.iter_mut().enumerate() {
            let asked = request([history.clone(), prompt(turn, 5)].concat(), 10);
            let (answer, done) = rig.answer(&asked);
            assert_eq!(answer, expected(&asked));
            let usage = done.unwrap().usage;
            match (turn, i) {
                (0, 0) => assert_eq!(usage.cached, 0),
                (0, _) => assert_eq!(usage.cached, 40, "what all begin with"),
                _ => assert_eq!(usage.cached, history.len() - 1),
            }
            *history = [asked.tokens, answer].concat();
        }
    }
    // Forks share: five chats of 120 tokens, of which they have 40 in common and lack the last sampled token each.
    assert_eq!(rig.kv_tokens(), 40 + 5 * (80 - 1));
    assert_eq!(rig.scheduler.prefixes.tokens(), 40 + 5 * (80 - 1));
}

#[test]
fn the_least_recently_used_prefix_is_given_up_first() {
    let mut rig = Rig::new(250);
    let chats: Vec<Request> = (0..3).map(|i| request([vec![90 + i], prompt(i, 59)].concat(), 5)).collect();
    let cached = |rig: &mut Rig, i: usize| rig.answer(&chats[i]).1.unwrap().usage.cached;
    assert_eq!([0, 1, 2].map(|i| cached(&mut rig, i)), [0, 0, 0]);
    assert_eq!(cached(&mut rig, 0), 59);
    // Memory for a fourth is found where nobody has been for longest.
    rig.answer(&request([vec![96], prompt(9, 59)].concat(), 60)).1.unwrap();
    assert_eq!(rig.scheduler.prefixes.tokens(), 64 + 119 + 64);
    assert_eq!(cached(&mut rig, 0), 59);
}

#[test]
fn the_tree_keeps_to_its_limit() {
    let mut rig = Rig::new(100_000);
    rig.scheduler.prefixes = Prefixes::new(150, true);
    for i in 0..10 {
        rig.answer(&request([vec![80 + i], prompt(i, 39)].concat(), 11)).1.unwrap();
        assert!(rig.kv_tokens() <= 150);
    }
    assert_eq!(rig.kv_tokens(), 150);
    rig.scheduler.prefixes = Prefixes::new(0, true);
    let mut rig = Rig::new(100_000);
    rig.scheduler.prefixes = Prefixes::new(0, true);
    rig.answer(&request(prompt(1, 20), 5)).1.unwrap();
    assert_eq!(rig.kv_tokens(), 0);
}

#[test]
fn adapters_share_no_prefix() {
    let mut rig = Rig::with(FakeEngine::new(VOCAB, CONTEXT, 100_000).with_adapters(2));
    let with =
        |adapter: Option<u32>| Request { adapter: adapter.map(AdapterId), ..request(prompt(1, 50), 10) };
    for (round, cached) in [(0, 0), (1, 49)] {
        for adapter in [None, Some(0), Some(1)] {
            let (answer, done) = rig.answer(&with(adapter));
            assert_eq!(answer, expected(&with(adapter)), "round {round}");
            assert_eq!(done.unwrap().usage.cached, cached);
        }
    }
    let error = rig.answer(&with(Some(2))).1.unwrap_err().to_string();
    assert!(error.contains("adapter 2"), "{error}");
}

#[test]
fn what_is_said_to_be_cached_was_not_computed() {
    let mut rig = Rig::new(100_000);
    for (i, len) in [50, 80, 64, 80, 20, 100].into_iter().enumerate() {
        rig.record.borrow_mut().steps.clear();
        let asked = request([prompt(1, len), prompt(i as u32 / 2, 30)].concat(), 1);
        let usage = rig.answer(&asked).1.unwrap().usage;
        let fed: usize = rig.record.borrow().steps.iter().flatten().map(|row| row.1).sum();
        assert_eq!(usage.cached + fed, usage.prompt);
    }
}

#[test]
fn a_prompt_shares_what_a_running_request_has_computed() {
    let mut rig = Rig::new(100_000);
    let (first, second) = (request(prompt(1, 60), 30), request([prompt(1, 40), prompt(2, 20)].concat(), 30));
    let (_, reader) = rig.accept(&first, 1000);
    rig.steps(3);
    let (answer, done) = rig.answer(&second);
    assert_eq!((answer, done.unwrap().usage.cached), (expected(&second), 40));
    assert_eq!(read(&reader).0, expected(&first));
}
