//! How long the palettizer takes for a matrix of random values, in groups of 16 rows on all threads.
//!
//!     cargo run --release -p tandem-coreml --example palettize_bench -- ROWS COLUMNS
//!
//! `tests/judges/compress_reference.py --time ROWS COLUMNS` times coremltools' own on a matrix of the same kind, in one
//! process: `RAYON_NUM_THREADS=1` makes them comparable.

use std::time::Instant;

use half::f16;
use rayon::prelude::*;
use tandem_coreml::quantize::palette::palettize;

fn main() {
    let sizes: Vec<usize> = std::env::args().skip(1).filter_map(|size| size.parse().ok()).collect();
    let &[rows, columns] = sizes.as_slice() else {
        eprintln!("usage: palettize_bench ROWS COLUMNS");
        return;
    };
    // Sums of twelve uniform values are nearly normal.
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let weight: Vec<f16> = (0..rows * columns)
        .map(|_| f16::from_f32(((0..12).map(|_| uniform()).sum::<f32>() - 6.0) * 0.02))
        .collect();
    for bits in [4, 6, 8] {
        let best = (0..3)
            .map(|_| {
                let begun = Instant::now();
                let tables: usize = weight
                    .par_chunks(16 * columns)
                    .map(|group| palettize(group, 1 << bits).table.len())
                    .sum();
                assert!(tables > 0);
                begun.elapsed()
            })
            .min()
            .unwrap_or_default();
        println!("{rows} x {columns}, lut{bits}: {:.2} s", best.as_secs_f64());
    }
}
