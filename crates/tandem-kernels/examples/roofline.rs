//! How close the products come to the limits of the machine.
//!
//! Streams all weight matrices of a SmolLM2-135M-like model at one row of activations (GB/s of packed weights, beside
//! a plain read loop over a buffer as large), and multiplies them with 512 rows (GOP/s, two operations a
//! multiply-add), for each number of threads, format and kernel path. Arms are interleaved; medians are shown, and the
//! best in brackets.
//!
//!     cargo run --release -p tandem-kernels --example roofline -- [THREADS ...] [FORMAT ...]
//!
//! A `FORMAT` is a name such as `Q4_0`, or `Q4_0-exact` for quantized weights with f32 activations.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tandem_kernels::activations::Activations;
use tandem_kernels::math::Activation;
use tandem_kernels::matrix::{Mode, PackedMatrix, gate_up, matmul};
use tandem_kernels::path::Path;
use tandem_kernels::roofline::{Pages, read_bandwidth};
use tandem_kernels::team::Team;
use tandem_model::format::Format;

const HIDDEN: usize = 576;
const MLP: usize = 1536;
const LAYERS: usize = 30;
const VOCABULARY: usize = 49152;
const PREFILL: usize = 512;

struct Layer {
    qkv: PackedMatrix,
    o: PackedMatrix,
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
}

struct Model {
    layers: Vec<Layer>,
    head: PackedMatrix,
}

impl Model {
    fn new(team: &Team, format: Format, vocabulary: usize) -> Result<Model, Box<dyn std::error::Error>> {
        let matrix = |rows: usize, cols: usize| {
            // 0x2C2C as f16 is 0.065: contents do not matter, as long as no value is subnormal or NaN.
            let row = vec![0x2C; format.row_bytes(cols).unwrap_or(0)];
            PackedMatrix::pack(team, format, rows, cols, |_| &row)
        };
        let layer = || -> Result<Layer, tandem_kernels::matrix::PackError> {
            Ok(Layer {
                qkv: matrix(HIDDEN + 384, HIDDEN)?,
                o: matrix(HIDDEN, HIDDEN)?,
                gate: matrix(MLP, HIDDEN)?,
                up: matrix(MLP, HIDDEN)?,
                down: matrix(HIDDEN, MLP)?,
            })
        };
        Ok(Model {
            layers: (0..LAYERS).map(|_| layer()).collect::<Result<_, _>>()?,
            head: matrix(vocabulary, HIDDEN)?,
        })
    }

    fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let layers = self.layers.iter().flat_map(|l| [&l.qkv, &l.o, &l.gate, &l.up, &l.down]);
        layers.chain([&self.head])
    }

    /// All products of a forward pass over `rows` rows (and the head on the last of them), each timed.
    fn pass(&self, team: &Team, rows: usize, int: bool, times: &mut Times) {
        let mut x = Activations::new(HIDDEN);
        let mut hidden = Activations::new(MLP);
        let mut last = Activations::new(HIDDEN);
        x.resize(rows);
        last.resize(1);
        x.fill_rows(team, int, |_, row| row.fill(0.5));
        last.fill_rows(team, int, |_, row| row.fill(0.5));
        let mut out = vec![0.0; rows * (HIDDEN + 384)];
        let mut logits = vec![0.0; self.head.rows()];
        for layer in &self.layers {
            times.time(0, || matmul(team, &layer.qkv, &x, &mut out, HIDDEN + 384, 0, Mode::Store));
            times.time(1, || matmul(team, &layer.o, &x, &mut out, HIDDEN, 0, Mode::Add));
            times.time(2, || gate_up(team, &layer.gate, &layer.up, &x, Activation::Silu, &mut hidden, int));
            times.time(3, || matmul(team, &layer.down, &hidden, &mut out, HIDDEN, 0, Mode::Add));
        }
        times.time(4, || matmul(team, &self.head, &last, &mut logits, self.head.rows(), 0, Mode::Store));
    }
}

/// Seconds of each kind of product, many samples each. Adding up a median for each kind leaves out the moments when
/// something else had the core.
#[derive(Default, Clone)]
struct Times([Vec<f64>; 5]);

impl Times {
    fn time(&mut self, kind: usize, f: impl FnOnce()) {
        let start = Instant::now();
        f();
        self.0[kind].push(start.elapsed().as_secs_f64());
    }

    /// `work` per second, for a pass that has every layer and, if `head`, the head.
    fn rate(&mut self, work: f64, head: bool) -> Rate {
        let mut rate = Rate { median: 0.0, best: 0.0 };
        for (kind, times) in self.0.iter_mut().enumerate() {
            times.sort_by(f64::total_cmp);
            let count = [LAYERS as f64, f64::from(u8::from(head))][kind / 4];
            rate.median += count * times[times.len() / 2];
            rate.best += count * times[0];
        }
        Rate { median: work / rate.median, best: work / rate.best }
    }
}

/// Seconds of a run in which no thread leaves before all have come.
fn fork_and_join(team: &Team) -> f64 {
    let (threads, arrived) = (team.threads(), AtomicUsize::new(0));
    let start = Instant::now();
    team.run(|_| {
        arrived.fetch_add(1, Ordering::Relaxed);
        while arrived.load(Ordering::Relaxed) < threads {
            std::hint::spin_loop();
        }
    });
    start.elapsed().as_secs_f64()
}

/// A rate by the median of the times, and by the least.
struct Rate {
    median: f64,
    best: f64,
}

impl std::fmt::Display for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:6.1} ({:6.1})", self.median, self.best)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (numbers, names): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|arg| arg.parse::<usize>().is_ok());
    let threads = if numbers.is_empty() { vec!["1".to_owned(), "2".to_owned()] } else { numbers };
    for threads in threads {
        let teams: Vec<Team> = Path::supported()
            .into_iter()
            .filter(|path| *path != Path::SCALAR)
            .map(|path| Team::with_path(threads.parse()?, path).map_err(Into::into))
            .collect::<Result<_, Box<dyn std::error::Error>>>()?;
        let Some(team) = teams.first() else { continue };
        let fork = (0..10_000).map(|_| fork_and_join(team)).fold(f64::INFINITY, f64::min);
        println!("{threads} threads: fork and join at best {:.2} us", fork * 1e6);
        for (format, int) in [
            (Format::Q4_0, true),
            (Format::Q4_1, true),
            (Format::Q8_0, true),
            (Format::F16, false),
            (Format::Bf16, false),
            (Format::F32, false),
            (Format::Q4_0, false),
            (Format::Q8_0, false),
        ] {
            let name =
                format!("{}{}", format.name(), if format.is_quantized() && !int { "-exact" } else { "" });
            if names.is_empty() || names.contains(&name) {
                measure(&teams, &name, format, int)?;
            }
        }
    }
    Ok(())
}

fn measure(teams: &[Team], name: &str, format: Format, int: bool) -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::new(&teams[0], format, VOCABULARY)?;
    let bytes: usize = model.matrices().map(PackedMatrix::bytes).sum();
    let weights: usize = model.matrices().map(|m| m.rows() * m.cols()).sum::<usize>() - HIDDEN * VOCABULARY;
    let read = read_bandwidth(&teams[0], bytes, Pages::Huge)?.map_or(f64::NAN, |read| read / 1e9);
    let mut times = vec![[const { Times([const { Vec::new() }; 5]) }; 3]; teams.len()];
    for round in 0..7 {
        for (team, times) in teams.iter().zip(&mut times) {
            for (rows, times) in [1, 4, PREFILL].into_iter().zip(times) {
                if rows < PREFILL || round % 3 == 0 {
                    model.pass(team, rows, int, times);
                }
            }
        }
    }
    for (team, [decode, batch, prefill]) in teams.iter().zip(&mut times) {
        println!(
            "  {name:10} {:6}  decode {} GB/s {} tok/s | batch 4 {} tok/s | prefill {} GOP/s | plain read {read:.1} GB/s",
            team.path().name(),
            decode.rate(bytes as f64 / 1e9, true),
            decode.rate(1.0, true),
            batch.rate(4.0, true),
            prefill.rate(2.0 * (weights * PREFILL) as f64 / 1e9, false),
        );
    }
    Ok(())
}
