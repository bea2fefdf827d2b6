//! Products by kernel path and number of rows:
//! `cargo run --release -p tandem-kernels --example product_bench -- q4_0 1`.
//!
//! A matrix of 1536 x 576 times 1 to 512 rows on every path, in 10^9 operations per second. All are measured in every round;
//! figures are the best.

use std::time::Instant;

use tandem_kernels::activations::Activations;
use tandem_kernels::matrix::{Mode, PackedMatrix, matmul};
use tandem_kernels::path::Path;
use tandem_kernels::team::Team;
use tandem_model::format::{Affine, Format, ScaleType};

const OUTPUTS: usize = 1536;
const ROUNDS: usize = 30;
const ROWS: [usize; 12] = [1, 4, 8, 12, 15, 16, 20, 25, 32, 64, 128, 512];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_else(|| "q4_0".to_owned());
    let (format, cols) = match name.as_str() {
        "q4_1" => (Format::Q4_1, 576),
        "q8_0" => (Format::Q8_0, 576),
        "q4_k" => (Format::Q4K, 768),
        "q5_k" => (Format::Q5K, 768),
        "q6_k" => (Format::Q6K, 768),
        "mlx4" => (Affine::new(4, 64, ScaleType::Bf16).map_or(Format::Q4_1, Format::Affine), 576),
        "mlx8" => (Affine::new(8, 64, ScaleType::F32).map_or(Format::Q4_1, Format::Affine), 576),
        _ => (Format::Q4_0, 576),
    };
    let threads = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(1);
    let paths = Path::supported();
    let paths: Vec<_> = paths.into_iter().filter(|path| *path != Path::SCALAR).collect();
    let teams: Vec<_> = paths.iter().map(|path| Team::with_path(threads, *path).expect("a team")).collect();
    let bytes = vec![17; format.row_bytes(cols).expect("columns") + 2 * format.scale_row_bytes(cols)];
    let scales = format.scale_row_bytes(cols);
    let values = bytes.len() - 2 * scales;
    let row = |_| tandem_model::format::StoredRow {
        values: &bytes[..values],
        scales: &bytes[values..values + scales],
        biases: &bytes[values + scales..],
    };
    let matrix = PackedMatrix::pack(&teams[0], format, OUTPUTS, cols, row).expect("a matrix");
    println!(
        "{name}, {threads} threads, GOP/s\nrows {}",
        paths.iter().map(|p| format!("{:>9}", p.name())).collect::<String>()
    );
    for rows in ROWS {
        let mut x = Activations::new(cols);
        x.resize(rows);
        x.values_mut().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 97) as f32 - 48.0);
        x.quantize(&teams[0]);
        let mut out = vec![0.0; rows * OUTPUTS];
        let repeat = (512 / rows).clamp(1, 64);
        let mut best = vec![f64::INFINITY; teams.len()];
        for _ in 0..ROUNDS {
            for (best, team) in best.iter_mut().zip(&teams) {
                let start = Instant::now();
                for _ in 0..repeat {
                    matmul(team, &matrix, &x, &mut out, OUTPUTS, 0, Mode::Store);
                }
                *best = best.min(start.elapsed().as_secs_f64() / repeat as f64);
            }
        }
        let operations = (2 * rows * OUTPUTS * cols) as f64;
        let rates =
            best.iter().map(|seconds| format!("{:9.0}", operations / seconds / 1e9)).collect::<String>();
        println!("{rows:4} {rates}");
    }
}
