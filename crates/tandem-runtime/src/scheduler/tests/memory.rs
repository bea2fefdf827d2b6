//! Memory: who is refused, who joins, who makes way.

use super::*;

#[test]
fn kv_memory_is_decided_before_prefill() {
    let mut rig = Rig::new(100);
    let error = rig.answer(&request(prompt(1, 50), 51)).1.unwrap_err();
    assert_eq!(error.retry_after(), None, "however long one waits");
    let RuntimeError::Engine(EngineError::OutOfMemory { needed, available, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!((needed, available), (101 * 64, 100 * 64));
    assert!(rig.record.borrow().steps.is_empty());

    // An answer that goes on until the context is full is admitted by its prompt; one that has no room for a token is not.
    let open_ended = |len| Request { max_tokens: None, ..request(prompt(1, len), 1) };
    assert!(rig.answer(&open_ended(100)).1.is_err());
    assert!(rig.answer(&open_ended(99)).1.is_ok());
}

#[test]
fn two_that_do_not_fit_beside_each_other_run_one_after_the_other() {
    let mut rig = Rig::new(100);
    let requests = [request(prompt(1, 50), 20), request(prompt(2, 50), 20)];
    let readers = requests.each_ref().map(|request| rig.accept(request, 1000).1);
    rig.run();
    for (request, reader) in requests.iter().zip(&readers) {
        assert_eq!(read(reader).0, expected(request));
    }
    assert!(rig.record.borrow().steps.iter().all(|rows| rows.len() == 1));
    assert_eq!(rig.scheduler.preempted, 0);
}

#[test]
fn an_answer_without_a_limit_reserves_no_more_than_it_soon_needs() {
    let mut rig = Rig::new(CONTEXT);
    let requests: Vec<Request> = (0..4)
        .map(|i| {
            let mut request = Request { max_tokens: None, ..request(prompt(i, 20), 1) };
            request.context = Some(60 + i as usize);
            request
        })
        .collect();
    let readers: Vec<_> = requests.iter().map(|request| rig.accept(request, 1000).1).collect();
    rig.steps(3);
    assert_eq!(rig.scheduler.running(), 4);
    rig.run();
    for (request, reader) in requests.iter().zip(&readers) {
        assert_eq!(read(reader).0, expected(request));
    }
    assert_eq!(rig.scheduler.preempted, 0);
}

#[test]
fn whoever_came_last_makes_way_when_memory_runs_out_and_goes_on_as_if_nothing_had_happened() {
    let mut rig = Rig::new(300);
    let requests: Vec<Request> = (0..3)
        .map(|i| {
            let mut request = request(prompt(i, 20), 120);
            (request.sample.temperature, request.sample.seed) = (1.0, u64::from(i));
            request.sample.presence_penalty = 0.5;
            request
        })
        .collect();
    let readers: Vec<_> = requests.iter().map(|request| rig.accept(request, 1000).1).collect();
    rig.steps(5);
    assert_eq!(rig.scheduler.running(), 3);
    while rig.scheduler.preempted == 0 {
        rig.steps(1);
    }
    let ids = |jobs: Vec<&Job>| jobs.iter().map(|job| job.id.0).collect::<Vec<_>>();
    assert_eq!(ids(rig.scheduler.running.iter().map(|active| &active.job).collect()), [1, 2]);
    assert_eq!(ids(rig.scheduler.waiting.iter().collect()), [3]);
    rig.run();
    for (request, reader) in requests.iter().zip(&readers) {
        let (tokens, done) = read(reader);
        assert_eq!((tokens, done.unwrap().usage.cached), (expected(request), 0));
    }
    assert!(rig.scheduler.preempted < 5, "{} times", rig.scheduler.preempted);
}

#[test]
fn the_lowest_priority_makes_way_first() {
    let mut rig = Rig::new(300);
    let requests = [-1, 0, 1].map(|priority| {
        let request = request(prompt(priority as u32 % 7, 20), 120);
        Request { priority, ..request }
    });
    let _readers = requests.each_ref().map(|request| rig.accept(request, 1000).1);
    while rig.scheduler.preempted == 0 {
        rig.steps(1);
    }
    assert_eq!(rig.scheduler.waiting[0].request.priority, -1);
}

#[test]
fn an_answer_without_a_limit_ends_where_memory_does() {
    let mut rig = Rig::new(100);
    let (tokens, done) = rig.answer(&Request { max_tokens: None, ..request(prompt(1, 30), 1) });
    let whole = expected(&Request { max_tokens: Some(200), ..request(prompt(1, 30), 1) });
    // The last token needs no memory: it was sampled, not fed.
    assert_eq!((tokens.as_slice(), done.unwrap().reason), (&whole[..71], Reason::Length));
}

#[test]
fn a_slow_reader_makes_way_for_a_request_that_waits() {
    let mut rig = Rig::new(200);
    let slow = request(prompt(1, 100), 30);
    let (_, slow_reader) = rig.accept(&slow, 4);
    rig.run();
    assert_eq!((rig.scheduler.running(), rig.kv_tokens()), (1, 103));
    let quick = request(prompt(2, 100), 30);
    assert_eq!(rig.answer(&quick).0, expected(&quick));
    assert_eq!((rig.scheduler.running(), rig.scheduler.waiting()), (0, 1));
    // It goes on when its reader does.
    let mut tokens = Vec::new();
    loop {
        match slow_reader.take().unwrap() {
            crate::channel::Taken { event: Event::Token(token), resume } => {
                tokens.push(token.id);
                assert!(tokens.len() > 1 || !resume);
                rig.run();
            }
            crate::channel::Taken { event: Event::Done(_), .. } => break,
            crate::channel::Taken { event, .. } => panic!("{event:?}"),
        }
    }
    assert_eq!(tokens, expected(&slow));
}

#[test]
fn a_dropped_stream_frees_memory_for_the_next_step() {
    let mut rig = Rig::new(200);
    let (first, _reader) = rig.accept(&request(prompt(1, 150), 20), 1000);
    let next = request(prompt(2, 150), 20);
    let (_, reader) = rig.accept(&next, 1000);
    rig.steps(2);
    assert_eq!((rig.scheduler.running(), rig.kv_tokens()), (1, 128), "in the middle of its prompt");
    rig.scheduler.cancel(first);
    assert_eq!(rig.kv_tokens(), 0);
    rig.run();
    assert_eq!(read(&reader).0, expected(&next));
}
