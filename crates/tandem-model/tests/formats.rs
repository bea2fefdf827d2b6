//! Decoding of quantized blocks against the `gguf` package: `scripts/quant_blocks.py` made the fixture.

#![allow(clippy::unwrap_used)] // helpers are tests too

mod common;

use common::fixture;
use tandem_model::format::{BLOCK, Format};
use tandem_model::safetensors;

#[test]
fn random_blocks_decode_to_the_same_bits_as_in_python() {
    let path = fixture("gguf/blocks.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let entries = safetensors::parse(&path, &bytes).unwrap();
    let tensor = |name: String| {
        let entry = entries.iter().find(|entry| entry.name == name).unwrap();
        (entry.shape.as_slice(), &bytes[entry.range.clone()])
    };
    let formats = [
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
    ];
    assert_eq!(entries.len(), 2 * formats.len());
    for format in formats {
        let (_, stored) = tensor(format!("{}.stored", format.name()));
        let (&[rows, cols], values) = tensor(format!("{}.values", format.name())) else { panic!("a matrix") };
        let stored = stored.chunks_exact(format.row_bytes(cols).unwrap());
        assert_eq!(stored.len(), rows);
        let mut out = vec![0.0; cols];
        for (stored, values) in stored.zip(values.chunks_exact(4 * cols)) {
            format.dequantize_row(stored, &mut out);
            for (i, (got, want)) in out.iter().zip(values.as_chunks::<4>().0).enumerate() {
                let want = f32::from_le_bytes(*want);
                assert_eq!(got.to_bits(), want.to_bits(), "{} value {i}: {got} {want}", format.name());
            }
            for block in stored.chunks_exact(format.block_bytes()) {
                let four_bits = matches!(format, Format::Q4_0 | Format::Q4_1 | Format::Q4K);
                let parts = (0..format.block_len() / BLOCK).flat_map(|part| format.quants(block, part));
                assert!(!four_bits || parts.into_iter().all(|q| (0..16).contains(&q)), "{}", format.name());
            }
        }
    }
}
