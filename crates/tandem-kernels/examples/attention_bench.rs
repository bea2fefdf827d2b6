//! Speed of attention alone, in the shape of SmolLM2-135M (9 heads on 3 kv heads of 64, f16):
//! `cargo run --release -p tandem-kernels --example attention_bench`.
//!
//! Prefill is GFLOP/s of the arithmetic that causality leaves (4 per head dimension and visible token). Decode is
//! GB/s of keys and values, over enough layers that the cache of the processor does not hold them.

use std::time::Instant;

use tandem_kernels::attention::{AttentionRow, AttentionShape, attention};
use tandem_kernels::buffer::HugeBuffer;
use tandem_kernels::kv::{KV_BLOCK, KvLayout, KvType};
use tandem_kernels::rows::Rows;
use tandem_kernels::team::Team;

const HEADS: usize = 9;
const REPEATS: usize = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let kv = KvLayout { kv_heads: 3, head_dim: 64, dtype: KvType::F16 };
    let shape = AttentionShape { heads: HEADS, kv, scale: 0.125, window: None, softcap: None };
    let width = HEADS * kv.head_dim;
    for threads in [1, 2] {
        let team = Team::new(threads)?;
        for tokens in [512, 2048] {
            let cache = Cache::new(&kv, tokens, 1)?;
            let q: Vec<f32> = (0..tokens * width).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
            let mut out = vec![0.0; q.len()];
            let row = AttentionRow { tokens, position: 0, blocks: &cache.layer(0) };
            let seconds =
                best_and_median(|| attention(&team, &shape, Rows::packed(&q, width), &[row], &mut out));
            let flops = (tokens * (tokens + 1) / 2 * HEADS * kv.head_dim * 4) as f64;
            report("prefill", tokens, threads, seconds, flops, "GFLOP/s");
        }
        for depth in [512, 2048, 8192] {
            let layers = 30;
            let cache = Cache::new(&kv, depth, layers)?;
            let blocks: Vec<_> = (0..layers).map(|layer| cache.layer(layer)).collect();
            let q = vec![0.1; width];
            let mut out = vec![0.0; width];
            let seconds = best_and_median(|| {
                for blocks in &blocks {
                    let row = AttentionRow { tokens: 1, position: depth - 1, blocks };
                    attention(&team, &shape, Rows::packed(&q, width), &[row], &mut out);
                }
            });
            let bytes = (layers * depth * 2 * kv.row_bytes()) as f64;
            report("decode", depth, threads, seconds, bytes, "GB/s");
        }
    }
    Ok(())
}

fn report(what: &str, tokens: usize, threads: usize, (best, median): (f64, f64), amount: f64, unit: &str) {
    println!(
        "{what:8} {tokens:5} tokens {threads} threads: median {:7.1} best {:7.1} {unit} ({:.3} ms)",
        amount / median / 1e9,
        amount / best / 1e9,
        median * 1e3
    );
}

fn best_and_median(mut f: impl FnMut()) -> (f64, f64) {
    f();
    let mut seconds: Vec<f64> = (0..REPEATS)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    (seconds[0], seconds[REPEATS / 2])
}

/// The filled blocks of some layers.
struct Cache {
    memory: HugeBuffer,
    block_bytes: usize,
    blocks: usize,
}

impl Cache {
    fn new(kv: &KvLayout, tokens: usize, layers: usize) -> Result<Self, Box<dyn std::error::Error>> {
        let (block_bytes, blocks) = (kv.block_bytes(), tokens.div_ceil(KV_BLOCK));
        let mut memory = HugeBuffer::zeroed(layers * blocks * block_bytes)?;
        // The bytes 0x28 and up are small positive f16.
        memory.iter_mut().enumerate().for_each(|(i, byte)| *byte = 0x28 + (i * 7 % 8) as u8);
        Ok(Self { memory, block_bytes, blocks })
    }

    fn layer(&self, layer: usize) -> Vec<&[u8]> {
        self.memory.chunks_exact(self.block_bytes).skip(layer * self.blocks).take(self.blocks).collect()
    }
}
