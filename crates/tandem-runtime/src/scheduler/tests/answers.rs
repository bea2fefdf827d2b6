//! What a request is answered.

use super::*;

#[test]
fn a_batch_of_many_equals_each_alone() {
    let mut rig = Rig::new(100_000);
    let requests: Vec<Request> = (0..40)
        .map(|i| {
            let mut request = request(prompt(i, 1 + (i as usize * 37) % 200), 1 + i as usize % 30);
            request.sample.temperature = (i % 3) as f32 * 0.6;
            request.sample.seed = u64::from(i);
            request.sample.frequency_penalty = (i % 2) as f32 * 0.3;
            request
        })
        .collect();
    let receivers: Vec<_> = requests.iter().map(|r| rig.accept(r, 1000).1).collect();
    rig.run();
    for (request, receiver) in requests.iter().zip(&receivers) {
        let (tokens, done) = read(receiver);
        assert_eq!(tokens, expected(request));
        assert_eq!(done.unwrap().reason, Reason::Length);
    }
    assert!(rig.record.borrow().steps.iter().any(|rows| rows.len() >= 8), "it never batched");
}

#[test]
fn a_cancel_frees_all_kv_before_the_next_step_also_in_mid_prefill() {
    for steps in [0, 1, 2, 6] {
        let mut rig = Rig::new(100_000);
        let (id, _receiver) = rig.accept(&request(prompt(1, 200), 100), 1000);
        for _ in 0..steps {
            rig.scheduler.step().unwrap();
        }
        assert_eq!(rig.kv_tokens(), [0, 64, 128, 0, 0, 0, 202][steps]);
        rig.scheduler.cancel(id);
        assert_eq!(rig.kv_tokens(), 0);
        assert!(!rig.scheduler.step().unwrap());
        assert_eq!(rig.record.borrow().steps.len(), steps);
    }
}

#[test]
fn a_slow_reader_pauses_only_itself() {
    let mut rig = Rig::new(100_000);
    let (slow, quick) = (request(prompt(1, 10), 30), request(prompt(2, 10), 30));
    let (_, slow_reader) = rig.accept(&slow, 4);
    let (_, quick_reader) = rig.accept(&quick, 1000);
    rig.run();
    assert_eq!(read(&quick_reader).0, expected(&quick));
    let rows = rig.record.borrow().steps.iter().flatten().filter(|r| r.0 == SeqId(1)).count();
    assert_eq!(rows, 4, "a row was submitted for a reader that was not ready");

    let mut tokens = Vec::new();
    let done = loop {
        let taken = slow_reader.take().unwrap();
        if taken.resume {
            rig.run();
        }
        match taken.event {
            Event::Token(token) => tokens.push(token.id),
            Event::Done(done) => break done,
            Event::Error(error) => panic!("{error}"),
        }
    };
    assert_eq!(tokens, expected(&slow));
    assert_eq!(done.usage.generated, 30);
}

#[test]
fn context_overflow_names_both_numbers_and_computes_nothing() {
    let mut rig = Rig::new(100_000);
    let within = |context: usize, mut request: Request| {
        request.context = Some(context);
        request
    };
    let open_ended = |tokens| Request { max_tokens: None, ..request(tokens, 1) };
    for (bad, needed, limit) in [
        (request(prompt(1, 600), 1), 601, 512),
        (request(prompt(1, 500), 13), 513, 512),
        (within(100, request(prompt(1, 90), 11)), 101, 100),
        (within(10_000, request(prompt(1, 90), 600)), 690, 512),
        (open_ended(prompt(1, 512)), 513, 512),
    ] {
        let (_, result) = rig.answer(&bad);
        assert_eq!(result.unwrap_err(), EngineError::ContextOverflow { needed, limit }.into());
    }
    assert!(rig.record.borrow().steps.is_empty());

    let (tokens, done) = rig.answer(&within(40, open_ended(prompt(1, 30))));
    assert_eq!((tokens.len(), done.unwrap().reason), (10, Reason::Length));
}

#[test]
fn bad_requests_are_refused_by_name() {
    let mut rig = Rig::new(100_000);
    let mut hot = request(prompt(1, 3), 1);
    hot.sample.temperature = -1.0;
    for (bad, word) in [
        (request([], 1), "prompt is empty"),
        (request([3, VOCAB as u32], 1), "token 97 is outside the vocabulary of 97"),
        (request([3], 0), "max_tokens = 0"),
        (hot, "temperature = -1"),
    ] {
        let error = rig.answer(&bad).1.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    assert!(rig.record.borrow().steps.is_empty());
}

#[test]
fn stop_tokens_end_the_answer_and_are_counted_but_not_sent() {
    let mut rig = Rig::new(100_000);
    let free = expected(&request(prompt(1, 10), 10));
    let mut stopping = request(prompt(1, 10), 10);
    stopping.stop_tokens = vec![free[4]];
    let at = free.iter().position(|t| *t == free[4]).unwrap();
    let (tokens, done) = rig.answer(&stopping);
    let done = done.unwrap();
    assert_eq!(tokens, free[..at]);
    assert_eq!((done.reason, done.usage.generated), (Reason::Stop { token: free[4] }, at + 1));
}

#[test]
fn a_refused_row_ends_its_own_request_only() {
    let mut rig = Rig::new(100_000);
    let good = request(prompt(2, 10), 10);
    let (_, bad_reader) = rig.accept(&request(prompt(1, 10), 10), 1000);
    let (_, good_reader) = rig.accept(&good, 1000);
    rig.record.borrow_mut().refuse = Some(SeqId(1));
    rig.run();
    assert_eq!(read(&bad_reader).1.unwrap_err(), EngineError::NotFinite(SeqId(1)).into());
    assert_eq!(read(&good_reader).0, expected(&good));
}

/// The fake engine never answers this; a broken engine might.
#[test]
fn logits_in_place_of_a_sample_end_the_request() {
    let logits = tandem_engine::Logits { vocab: 1, values: vec![0.0] };
    let mut rig = Rig::new(1000);
    let (_, reader) = rig.accept(&request([1], 1), 10);
    rig.scheduler.admit();
    rig.scheduler.running[0].take(RowOut::Logits(logits), Instant::now());
    rig.scheduler.reap();
    assert!(read(&reader).1.unwrap_err().to_string().contains("logits"));
}
