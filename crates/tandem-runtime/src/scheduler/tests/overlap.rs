//! Steps that overlap.

use super::*;

fn rig() -> Rig {
    Rig::with(FakeEngine::new(VOCAB, CONTEXT, 100_000).overlapping())
}

/// Rows submitted for the first sequence.
fn rows(rig: &Rig) -> usize {
    rig.record.borrow().steps.iter().flatten().filter(|row| row.0 == SeqId(1)).count()
}

#[test]
fn the_next_step_is_submitted_before_the_last_is_collected() {
    for (mut rig, order) in [(rig(), "++-+-+-+--"), (Rig::new(100_000), "+-+-+-+-+-")] {
        let asked = request(prompt(1, 5), 5);
        assert_eq!(rig.answer(&asked).0, expected(&asked));
        assert_eq!(rig.record.borrow().order, order);
    }
}

#[test]
fn overlapped_answers_are_those_of_steps_one_by_one() {
    let mut rig = rig();
    let requests: Vec<Request> = (0..30)
        .map(|i| {
            let mut request = request(prompt(i, 1 + (i as usize * 37) % 200), 1 + i as usize % 30);
            (request.sample.temperature, request.sample.seed) = ((i % 2) as f32, u64::from(i));
            request.sample.frequency_penalty = (i % 3) as f32 * 0.2;
            request.stop_tokens = prompt(i + 50, (i % 4) as usize);
            request
        })
        .collect();
    let readers: Vec<_> = requests.iter().map(|request| rig.accept(request, 1000).1).collect();
    rig.run();
    for (request, reader) in requests.iter().zip(&readers) {
        assert_eq!(read(reader).0, expected(request));
    }
}

#[test]
fn no_row_is_submitted_beyond_max_tokens() {
    let mut rig = rig();
    let asked = request(prompt(1, 5), 7);
    assert_eq!(rig.answer(&asked).0, expected(&asked));
    assert_eq!(rows(&rig), 7);
}

#[test]
fn the_row_after_a_stop_token_is_not_part_of_the_answer() {
    let mut rig = rig();
    let free = expected(&request(prompt(1, 10), 10));
    let mut stopping = request(prompt(1, 10), 10);
    stopping.stop_tokens = vec![free[4]];
    let at = free.iter().position(|token| *token == free[4]).unwrap();
    let (tokens, done) = rig.answer(&stopping);
    let done = done.unwrap();
    assert_eq!((tokens.as_slice(), done.usage.generated), (&free[..at], at + 1));
    assert_eq!(rows(&rig), at + 2, "the row was under way");
    // The stop token was fed; what it gave is in no prefix.
    let next = request([prompt(1, 10), free[..=at].to_vec(), vec![3, 4]].concat(), 5);
    let (tokens, done) = rig.answer(&next);
    assert_eq!((tokens, done.unwrap().usage.cached), (expected(&next), 10 + at + 1));
}

#[test]
fn nothing_is_submitted_for_a_cancelled_request_and_all_is_free() {
    for steps in 1..6 {
        for prompt_len in [5, 200] {
            let mut rig = rig();
            let (id, _reader) = rig.accept(&request(prompt(1, prompt_len), 100), 1000);
            rig.steps(steps);
            let before = rows(&rig);
            rig.scheduler.cancel(id);
            assert_eq!(rig.kv_tokens(), 0);
            rig.run();
            assert_eq!(rows(&rig), before);
            assert_eq!(rig.scheduler.flights.len(), 0);
            // The engine goes on.
            let other = request(prompt(2, 5), 3);
            assert_eq!(rig.answer(&other).0, expected(&other));
        }
    }
}

#[test]
fn a_request_that_is_finished_with_a_row_under_way_keeps_what_was_fed() {
    let mut rig = rig();
    let long = request(prompt(1, 20), 100);
    let (id, reader) = rig.accept(&long, 1000);
    rig.steps(5);
    rig.scheduler.finish(id, Reason::Interrupted);
    let (tokens, done) = read(&reader);
    assert_eq!((tokens.len(), done.unwrap().usage.generated), (4, 4));
    rig.run();
    let more = request([long.tokens, tokens, vec![1]].concat(), 5);
    let (tokens, done) = rig.answer(&more);
    assert_eq!((tokens, done.unwrap().usage.cached), (expected(&more), 24));
}

#[test]
fn a_reader_with_room_for_one_event_gets_no_more_and_loses_nothing() {
    let mut rig = rig();
    let asked = request(prompt(1, 10), 20);
    let (_, reader) = rig.accept(&asked, 1);
    let mut tokens = Vec::new();
    while tokens.len() < 20 {
        rig.run();
        match reader.take().unwrap().event {
            Event::Token(token) => tokens.push(token.id),
            other => panic!("{other:?}"),
        }
        // Beside the last event, which always fits, the queue held one.
        let next = reader.try_take().flatten();
        assert!(next.is_none_or(|next| tokens.len() == 20 && matches!(next.event, Event::Done(_))));
    }
    assert_eq!(tokens, expected(&asked));
}

#[test]
fn memory_that_runs_out_while_a_step_is_under_way_waits_for_it() {
    let mut rig = Rig::with(FakeEngine::new(VOCAB, CONTEXT, 100).overlapping());
    let requests = [request(prompt(1, 30), 40), request(prompt(2, 30), 40)];
    let readers = requests.each_ref().map(|request| rig.accept(request, 1000).1);
    rig.run();
    for (request, reader) in requests.iter().zip(&readers) {
        assert_eq!(read(reader).0, expected(request));
    }
}
