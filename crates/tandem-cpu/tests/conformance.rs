//! The CPU engine keeps the contract, for every stored format and every feature of the decoder.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Features, Tiny, options};
use tandem_cpu::CpuOptions;
use tandem_engine::KvType;
use tandem_model::format::{Affine, Format, ScaleType};

fn engine(format: Format, features: Features, options: &CpuOptions) -> Box<dyn tandem_engine::Engine> {
    Box::new(Tiny::new(format, features).engine(options))
}

fn affine(bits: usize) -> Format {
    Format::Affine(Affine::new(bits, 32, ScaleType::Bf16).unwrap())
}

macro_rules! conform {
    ($name:ident, $make:expr) => {
        mod $name {
            use super::*;
            tandem_engine::conformance_tests!(|| $make, tolerance = 0.0);
        }
    };
}

conform!(f32_exact, engine(Format::F32, Features::default(), &options(2).exact()));
conform!(
    f32_with_f16_kv,
    engine(Format::F32, Features::default(), &CpuOptions { kv: KvType::F16, ..options(1) })
);
conform!(
    q4_0_with_8_bit_kv,
    engine(Format::Q4_0, Features::ALL, &CpuOptions { kv: KvType::Q8, ..options(2) })
);
conform!(bf16_all_features, engine(Format::Bf16, Features::ALL, &options(2)));
conform!(q4_0, engine(Format::Q4_0, Features::default(), &options(2)));
conform!(q4_1_all_features, engine(Format::Q4_1, Features::ALL, &options(2)));
conform!(q8_0, engine(Format::Q8_0, Features::default(), &options(1)));
conform!(q4_1_exact, engine(Format::Q4_1, Features::default(), &options(2).exact()));
conform!(q5_0, engine(Format::Q5_0, Features::default(), &options(2)));
conform!(q5_1, engine(Format::Q5_1, Features::default(), &options(2)));
conform!(mlx_4_bit, engine(affine(4), Features::default(), &options(2)));
conform!(mlx_8_bit_exact, engine(affine(8), Features::ALL, &options(2).exact()));
conform!(bf16_ropes_by_length, engine(Format::Bf16, Features::BY_LENGTH, &options(2)));
