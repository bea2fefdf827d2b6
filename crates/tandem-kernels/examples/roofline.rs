//! How close the products come to the limits of the machine.
//!
//! Streams all weight matrices of a SmolLM2-135M-like model at one row of activations (GB/s of packed weights, beside
//! a plain read loop over a buffer as large), and multiplies them with 512 rows (GOP/s, two operations a
//! multiply-add), for each format, kernel path and number of threads given. Arms are interleaved; medians are shown.
//!
//!     cargo run --release -p tandem-kernels --example roofline -- [threads ...]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tandem_kernels::activations::Activations;
use tandem_kernels::buffer::HugeBuffer;
use tandem_kernels::math::Activation;
use tandem_kernels::matrix::{Mode, PackedMatrix, gate_up, matmul};
use tandem_kernels::path::Path;
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

    /// All products of a forward pass over `rows` rows (and the head on the last of them); seconds.
    fn pass(&self, team: &Team, rows: usize, int: bool) -> f64 {
        let mut x = Activations::new(HIDDEN);
        let mut hidden = Activations::new(MLP);
        let mut last = Activations::new(HIDDEN);
        x.resize(rows);
        last.resize(1);
        x.fill_rows(team, int, |_, row| row.fill(0.5));
        last.fill_rows(team, int, |_, row| row.fill(0.5));
        let mut out = vec![0.0; rows * (HIDDEN + 384)];
        let mut logits = vec![0.0; self.head.rows()];
        let start = Instant::now();
        for layer in &self.layers {
            matmul(team, &layer.qkv, &x, &mut out, HIDDEN + 384, 0, Mode::Store);
            matmul(team, &layer.o, &x, &mut out, HIDDEN, 0, Mode::Add);
            gate_up(team, &layer.gate, &layer.up, &x, Activation::Silu, &mut hidden, int);
            matmul(team, &layer.down, &hidden, &mut out, HIDDEN, 0, Mode::Add);
        }
        matmul(team, &self.head, &last, &mut logits, self.head.rows(), 0, Mode::Store);
        start.elapsed().as_secs_f64()
    }
}

/// Seconds to read all of `buffer`, each thread its share.
fn read(team: &Team, buffer: &[u8]) -> f64 {
    let start = Instant::now();
    let (words, _) = buffer.as_chunks::<64>();
    let total = AtomicU64::new(0);
    team.split(words.len(), |range| {
        let mut sums = [0u64; 8];
        for line in &words[range] {
            for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        total.fetch_add(sums.iter().fold(0, |a, b| a.wrapping_add(*b)), Ordering::Relaxed);
    });
    black_box(total.into_inner());
    start.elapsed().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads: Vec<usize> = std::env::args().skip(1).map(|arg| arg.parse()).collect::<Result<_, _>>()?;
    let threads = if threads.is_empty() { vec![1, 2] } else { threads };
    let mut buffer = HugeBuffer::zeroed(94 << 20)?;
    buffer.fill(1);
    println!("huge pages: {}", buffer.huge_pages());
    for threads in threads {
        let teams: Vec<Team> = Path::supported()
            .into_iter()
            .filter(|path| *path != Path::SCALAR)
            .map(|path| Team::with_path(threads, path))
            .collect::<Result<_, _>>()?;
        let Some(team) = teams.first() else { continue };
        let forks = Instant::now();
        (0..10_000).for_each(|_| team.run(|_| ()));
        println!("{threads} threads: fork and join {:.2} us", forks.elapsed().as_secs_f64() * 100.0);
        for (format, int) in [
            (Format::Q4_0, true),
            (Format::Q4_1, true),
            (Format::Q8_0, true),
            (Format::F16, false),
            (Format::Bf16, false),
            (Format::F32, false),
            (Format::Q4_0, false),
        ] {
            let model = Model::new(team, format, VOCABULARY)?;
            let bytes: usize = model.matrices().map(PackedMatrix::bytes).sum();
            let weights: usize = model
                .layers
                .iter()
                .flat_map(|l| [&l.qkv, &l.o, &l.gate, &l.up, &l.down])
                .map(|m| m.rows() * m.cols())
                .sum();
            let name =
                format!("{}{}", format.name(), if format.is_quantized() && !int { " exact" } else { "" });
            let mut reads = Vec::new();
            let mut decode = vec![Vec::new(); teams.len()];
            let mut batch = vec![Vec::new(); teams.len()];
            let mut prefill = vec![Vec::new(); teams.len()];
            for round in 0..6 {
                reads.push(read(team, &buffer));
                for (i, team) in teams.iter().enumerate() {
                    let times =
                        [model.pass(team, 1, int), model.pass(team, 4, int), model.pass(team, PREFILL, int)];
                    if round > 0 {
                        decode[i].push(times[0]);
                        batch[i].push(times[1]);
                        prefill[i].push(times[2]);
                    }
                }
            }
            let read = buffer.len() as f64 / median(reads) / 1e9;
            for (i, team) in teams.iter().enumerate() {
                let (one, four, many) =
                    (median(decode[i].clone()), median(batch[i].clone()), median(prefill[i].clone()));
                println!(
                    "  {name:11} {:7} decode {:5.1} GB/s {:6.1} tok/s   batch 4 {:6.1} tok/s   prefill {:6.1} GOP/s   (plain read {read:.1} GB/s)",
                    team.path().name(),
                    bytes as f64 / one / 1e9,
                    1.0 / one,
                    4.0 / four,
                    2.0 * (weights * PREFILL) as f64 / many / 1e9,
                );
            }
        }
    }
    Ok(())
}
