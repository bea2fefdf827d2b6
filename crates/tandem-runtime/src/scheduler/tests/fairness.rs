//! Prompts beside running streams, and one request beside another.

use super::*;

/// The steps' rows without their sequences.
fn shapes(rig: &Rig) -> Vec<Vec<(usize, bool)>> {
    let record = rig.record.borrow();
    record
        .steps
        .iter()
        .map(|step| step.iter().map(|(_, count, wanted)| (*count, *wanted)).collect())
        .collect()
}

#[test]
fn a_long_prompt_is_fed_in_chunks_that_want_nothing_back_beside_decoding_rows() {
    let mut rig = Rig::new(100_000);
    let (_, short) = rig.accept(&request(prompt(1, 5), 10), 1000);
    rig.steps(1);
    let (_, long) = rig.accept(&request(prompt(2, 106), 2), 1000);
    rig.run();
    assert_eq!(read(&short).0, expected(&request(prompt(1, 5), 10)));
    assert_eq!(read(&long).0, expected(&request(prompt(2, 106), 2)));
    // What a prompt's token costs a running stream is not known yet, so few of them are taken; all that there is room
    // for once nobody waits for a token.
    let mut steps = vec![vec![(5, true)]];
    steps.extend(vec![vec![(1, true), (4, false)]; 9]);
    steps.extend([vec![(64, false)], vec![(6, true)], vec![(1, true)]]);
    assert_eq!(shapes(&rig), steps);
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let mut rig = Rig::new(100_000);
    let (_, long) = rig.accept(&request(prompt(1, 300), 1), 1000);
    let (_, short) = rig.accept(&request(prompt(2, 30), 1), 1000);
    rig.steps(1);
    assert_eq!(read(&short).0, expected(&request(prompt(2, 30), 1)));
    rig.run();
    read(&long).1.unwrap();
    assert_eq!(shapes(&rig)[0], [(34, false), (30, true)]);
}

#[test]
fn more_sequences_than_rows_take_turns() {
    let mut rig = Rig::new(100_000);
    // Twenty whose readers are behind take no place in the batch of sixteen.
    let slow: Vec<_> = (0..20).map(|i| rig.accept(&request(prompt(i, 5), 12), 4).1).collect();
    rig.run();
    let quick = request(prompt(30, 5), 3);
    assert_eq!(rig.answer(&quick).0, expected(&quick));
    // All catch up at once: nobody gets far ahead of the others.
    rig.record.borrow_mut().steps.clear();
    for reader in &slow {
        (0..4).for_each(|_| drop(reader.take()));
    }
    rig.run();
    let mut rows = std::collections::BTreeMap::new();
    for (i, step) in rig.record.borrow().steps.iter().enumerate() {
        assert!(step.len() <= 16);
        for (seq, ..) in step {
            let count = rows.entry(*seq).or_insert(0i32);
            *count += 1;
            assert!(
                (*count - (i as i32 + 1) * 16 / 20).abs() <= 1,
                "{seq:?} has {count} rows after {i} steps"
            );
        }
    }
}

#[test]
fn higher_priority_comes_first_and_nobody_waits_for_ever() {
    let mut rig = Rig::with(FakeEngine::new(VOCAB, CONTEXT, 100_000));
    rig.scheduler.capabilities.max_batch = 1;
    let with = |key: u32, priority: i8| Request { priority, ..request(prompt(key, 5), 3) };
    let (_, first) = rig.accept(&with(0, 0), 1000);
    rig.steps(1);
    let ids = [with(1, 0), with(2, 0), with(3, 1)].map(|request| rig.accept(&request, 1000).0);
    // The third does not even wait for the one that runs.
    rig.steps(1);
    assert_eq!(rig.scheduler.running[0].job.id, ids[2]);
    rig.run();
    assert_eq!(read(&first).0, expected(&with(0, 0)));
    assert_eq!(rig.scheduler.preempted, 1);

    // However many of a higher priority keep coming, a low one has its turn.
    let (_, low) = rig.accept(&with(9, -1), 1000);
    for i in 0..40 {
        rig.accept(&with(i, 0), 1000);
        rig.accept(&with(i + 40, 0), 1000);
        rig.steps(3);
        if low.try_take().is_some() {
            assert!((4..12).contains(&i), "{i}");
            return;
        }
    }
    panic!("the low one never had its turn");
}
