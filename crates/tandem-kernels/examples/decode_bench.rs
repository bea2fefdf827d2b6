//! Where the time of one decoded token goes, in the shape of SmolLM2-135M:
//! `cargo run --release -p tandem-kernels --example decode_bench -- q4_0 2`.
//!
//! The operations of a token run in the order of a forward pass, over weights and a KV cache that the caches of the
//! processor do not hold. Then each kind of operation is left out in turn: the difference is what it costs where it
//! stands, waiting for threads included. All variants are measured in every round; figures are minima.

use std::time::Instant;

use tandem_kernels::activations::Activations;
use tandem_kernels::attention::{AttentionRow, AttentionShape, attention};
use tandem_kernels::buffer::HugeBuffer;
use tandem_kernels::kv::{KV_BLOCK, KvLayout, KvType, KvWrite, write_kv};
use tandem_kernels::logits::argmax;
use tandem_kernels::math::Activation;
use tandem_kernels::matrix::{Mode, PackedMatrix, gate_up, matmul, matmul_each};
use tandem_kernels::norm::rms_norm;
use tandem_kernels::rope::{RopeTable, rope};
use tandem_kernels::rows::Rows;
use tandem_kernels::team::Team;
use tandem_model::format::Format;

const LAYERS: usize = 30;
const HIDDEN: usize = 576;
const HEADS: usize = 9;
const KV: KvLayout = KvLayout { kv_heads: 3, head_dim: 64, dtype: KvType::F16 };
const WIDTH: usize = HEADS * KV.head_dim;
const STRIDE: usize = WIDTH + 2 * KV.kv_heads * KV.head_dim;
const INTERMEDIATE: usize = 1536;
const VOCABULARY: usize = 49152;
const ROUNDS: usize = 60;

/// Kinds of operations, to be left out.
const KINDS: [&str; 9] = ["norm", "qkv", "rope", "write", "attention", "o", "gate/up", "down", "head"];

struct Layer {
    qkv: [PackedMatrix; 3],
    o: PackedMatrix,
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    blocks: Vec<HugeBuffer>,
}

struct Token<'a> {
    team: &'a Team,
    layers: Vec<Layer>,
    head: PackedMatrix,
    depth: usize,
    x: Vec<f32>,
    qkv: Vec<f32>,
    normed: Activations,
    attended: Activations,
    gated: Activations,
    logits: Vec<f32>,
}

impl Token<'_> {
    fn run(&mut self, without: Option<&str>) {
        let team = self.team;
        let does = |kind: &str| without != Some(kind);
        let weight = [1.0; HIDDEN];
        let rotations = RopeTable::new(vec![0.5; KV.head_dim / 2], 1.0).rotations([self.depth]);
        let shape = AttentionShape { heads: HEADS, kv: KV, scale: 0.125, window: None, softcap: None };
        for layer in &mut self.layers {
            if does("norm") {
                rms_norm(team, &self.x, &weight, 1e-5, &mut self.normed, true);
            }
            if does("qkv") {
                let [q, k, v] = &layer.qkv;
                let parts = [(q, 0), (k, WIDTH), (v, WIDTH + KV.width())];
                matmul_each(team, &parts, &self.normed, &mut self.qkv, STRIDE, Mode::Store);
            }
            if does("rope") {
                rope(team, &mut self.qkv, STRIDE, HEADS + KV.kv_heads, KV.head_dim, &rotations);
            }
            if does("write") {
                let keys = Rows::columns(&self.qkv, STRIDE, WIDTH, KV.width());
                let values = Rows::columns(&self.qkv, STRIDE, WIDTH + KV.width(), KV.width());
                let block = &mut layer.blocks[self.depth / KV_BLOCK];
                let write = KvWrite { block, slot: self.depth % KV_BLOCK, tokens: 0..1 };
                write_kv(team, &KV, keys, values, &mut [write]);
            }
            if does("attention") {
                let blocks: Vec<&[u8]> = layer.blocks.iter().map(|block| &**block).collect();
                let row = AttentionRow { tokens: 1, position: self.depth, blocks: &blocks };
                let queries = Rows::columns(&self.qkv, STRIDE, 0, WIDTH);
                attention(team, &shape, queries, &[row], self.attended.values_mut());
            }
            self.attended.quantize(team);
            if does("o") {
                matmul(team, &layer.o, &self.attended, &mut self.x, HIDDEN, 0, Mode::Add);
            }
            if does("norm") {
                rms_norm(team, &self.x, &weight, 1e-5, &mut self.normed, true);
            }
            if does("gate/up") {
                let (gate, up) = (&layer.gate, &layer.up);
                gate_up(team, gate, up, &self.normed, Activation::Silu, &mut self.gated, true);
            }
            if does("down") {
                matmul(team, &layer.down, &self.gated, &mut self.x, HIDDEN, 0, Mode::Add);
            }
            // The numbers mean nothing, but must stay numbers.
            self.x.iter_mut().for_each(|x| *x = x.clamp(-1.0, 1.0));
        }
        if does("head") {
            matmul(team, &self.head, &self.normed, &mut self.logits, VOCABULARY, 0, Mode::Store);
            argmax(team, &self.logits);
        }
    }

    fn bytes(&self) -> usize {
        let layer = |layer: &Layer| {
            let [q, k, v] = &layer.qkv;
            [q, k, v, &layer.o, &layer.gate, &layer.up, &layer.down]
                .map(PackedMatrix::bytes)
                .iter()
                .sum::<usize>()
        };
        let kv = self.layers.len() * self.depth * 2 * KV.row_bytes();
        self.layers.iter().map(layer).sum::<usize>() + self.head.bytes() + kv
    }
}

fn matrix(team: &Team, format: Format, rows: usize, cols: usize) -> PackedMatrix {
    let bytes = format.row_bytes(cols).expect("whole blocks");
    // Bytes around 0x28 are small scales as f16, and nothing in particular as integers.
    let row: Vec<u8> = (0..bytes).map(|i| 0x20 + (i * 7 % 8) as u8).collect();
    PackedMatrix::pack(team, format, rows, cols, |_| row.as_slice()).expect("memory")
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (format, head) = match arguments.next().as_deref() {
        None | Some("q4_0") => (Format::Q4_0, Format::Q8_0),
        Some("q4_1") => (Format::Q4_1, Format::Q8_0),
        Some("q4_k") => (Format::Q4_1, Format::Q6K),
        Some("q8_0") => (Format::Q8_0, Format::Q8_0),
        Some(other) => return Err(format!("no such format: {other}").into()),
    };
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let team = Team::new(threads)?;
    for depth in [64, 2048] {
        let pack = |rows, cols| matrix(&team, format, rows, cols);
        let blocks = || {
            let mut blocks = (0..=depth / KV_BLOCK)
                .map(|_| HugeBuffer::zeroed(KV.block_bytes()))
                .collect::<Result<Vec<_>, _>>()?;
            blocks.iter_mut().for_each(|block| block.fill(0x28));
            Ok::<_, Box<dyn std::error::Error>>(blocks)
        };
        let layer = || {
            let kv = KV.width();
            Ok::<_, Box<dyn std::error::Error>>(Layer {
                qkv: [pack(WIDTH, HIDDEN), pack(kv, HIDDEN), pack(kv, HIDDEN)],
                o: pack(HIDDEN, WIDTH),
                gate: pack(INTERMEDIATE, HIDDEN),
                up: pack(INTERMEDIATE, HIDDEN),
                down: pack(HIDDEN, INTERMEDIATE),
                blocks: blocks()?,
            })
        };
        let activations = |cols| {
            let mut x = Activations::new(cols);
            x.resize(1);
            x
        };
        let mut token = Token {
            team: &team,
            layers: (0..LAYERS).map(|_| layer()).collect::<Result<_, _>>()?,
            head: matrix(&team, head, VOCABULARY, HIDDEN),
            depth,
            x: (0..HIDDEN).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect(),
            qkv: vec![0.1; STRIDE],
            normed: activations(HIDDEN),
            attended: activations(WIDTH),
            gated: activations(INTERMEDIATE),
            logits: vec![0.0; VOCABULARY],
        };
        let variants: Vec<Option<&str>> = [None].into_iter().chain(KINDS.map(Some)).collect();
        let mut best = vec![f64::INFINITY; variants.len()];
        for _ in 0..ROUNDS {
            for (variant, best) in variants.iter().zip(&mut best) {
                let start = Instant::now();
                token.run(*variant);
                *best = best.min(start.elapsed().as_secs_f64());
            }
        }
        let rate = token.bytes() as f64 / best[0] / 1e9;
        println!("depth {depth:5}, {threads} threads: {:7.1} us a token, {rate:5.1} GB/s", best[0] * 1e6);
        for (kind, without) in KINDS.iter().zip(&best[1..]) {
            println!("  {kind:10} {:7.1} us", (best[0] - without) * 1e6);
        }
    }
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        (0..100).for_each(|_| team.split(16, |_| ()));
        best = best.min(start.elapsed().as_secs_f64() / 100.0);
    }
    println!("an empty fork: {:.2} us", best * 1e6);
    Ok(())
}
