//! A loaded engine that nobody asks for anything uses no CPU. Alone in its file, as it measures the whole process.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{Features, Tiny, options};
use tandem_engine::{Engine, Input, Row, SampleSpec, Want};
use tandem_model::format::Format;

/// CPU time of all threads of this process.
fn cpu_time() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let nanoseconds = threads.map(|thread| {
        let path = thread.unwrap().path().join("schedstat");
        // A thread may end while they are counted.
        let stat = std::fs::read_to_string(path).unwrap_or_default();
        stat.split_whitespace().next().map_or(0, |time| time.parse().unwrap())
    });
    Duration::from_nanos(nanoseconds.sum())
}

#[test]
fn an_idle_engine_uses_no_cpu() {
    let mut engine = Tiny::new(Format::Q4_0, Features::default()).engine(&options(2));
    let seq = engine.open(100, None).unwrap();
    for _ in 0..20 {
        let want = Want::Sample(SampleSpec::greedy());
        let ticket = engine.submit(&[Row { seq, input: Input::Tokens(vec![1, 2, 3]), want }]).unwrap();
        engine.collect(ticket).unwrap();
    }
    let worked = cpu_time();
    assert!(worked > Duration::ZERO, "nothing is measured");
    // Threads that wait spin a little before they sleep.
    std::thread::sleep(Duration::from_millis(50));
    let before = cpu_time();
    std::thread::sleep(Duration::from_secs(1));
    let used = cpu_time() - before;
    assert!(used < Duration::from_millis(10), "{used:?} of a second");
    engine.close(seq).unwrap();
}
