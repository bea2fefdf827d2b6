//! Speed of the engine alone, without a peer and without a runtime above it:
//! `cargo run --release -p tandem-cpu --example step_bench -- MODEL THREADS`.
//!
//! Each figure is the best of several rounds: on a busy machine what made a round slower does not count. For figures to
//! be compared with others, use `tandem bench`.

use std::path::Path;
use std::time::Instant;

use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::{Engine, Input, Row, SampleSpec, SeqId, Want};
use tandem_model::Checkpoint;

const ROUNDS: usize = 5;
const DECODED: usize = 48;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("which model?")?;
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let model = Checkpoint::open(Path::new(&path))?;
    let options = CpuOptions { threads: Some(threads), context: Some(4096), ..CpuOptions::default() };
    let mut engine =
        CpuEngine::load(&model.decoder, model.weights.clone(), &options, &mut (Box::new(|_| ()) as _))?;
    let mut best = [f64::INFINITY; 5];
    for _ in 0..ROUNDS {
        let mut figures = Vec::new();
        for (streams, depth) in [(1, 512), (1, 2048), (1, 1), (4, 128)] {
            let seqs = (0..streams).map(|_| engine.open(4096, None)).collect::<Result<Vec<SeqId>, _>>()?;
            let mut prefill = 0.0;
            for (i, seq) in seqs.iter().enumerate() {
                let text: Vec<u32> =
                    (0..depth).map(|at| ((at * 7919 + i * 104_729) % 40_000) as u32).collect();
                for part in text.chunks(512) {
                    prefill += step(&mut engine, &[row(*seq, Input::Tokens(part.to_vec()))])?;
                }
            }
            if (streams, depth) == (1, 512) {
                figures.push(prefill / depth as f64);
            }
            let rows: Vec<Row> = seqs.iter().map(|seq| row(*seq, Input::PreviousSample)).collect();
            let mut least = f64::INFINITY;
            for _ in 0..DECODED {
                least = least.min(step(&mut engine, &rows)?);
            }
            figures.push(least / streams as f64);
            for seq in seqs {
                engine.close(seq)?;
            }
        }
        best.iter_mut().zip(figures).for_each(|(best, figure)| *best = best.min(figure));
    }
    let [pp, d512, d2048, tg, x4] = best.map(|seconds| 1.0 / seconds);
    println!(
        "{threads} threads, tok/s: pp512 {pp:.0}, tg {tg:.1}, tg @ d512 {d512:.1}, tg @ d2048 {d2048:.1}, x 4 {x4:.1}"
    );
    Ok(())
}

fn row(seq: SeqId, input: Input) -> Row {
    Row { seq, input, want: Want::Sample(SampleSpec::greedy()) }
}

/// Seconds of one step.
fn step(engine: &mut CpuEngine, rows: &[Row]) -> Result<f64, Failure> {
    let begun = Instant::now();
    let ticket = engine.submit(rows)?;
    engine.collect(ticket)?;
    Ok(begun.elapsed().as_secs_f64())
}
