//! Products against f64 arithmetic on rows decoded by `Format::dequantize_row`, and against themselves: other batch
//! sizes, threads and kernel paths must give the same bits.

use proptest::prelude::*;
use tandem_kernels::activations::Activations;
use tandem_kernels::math::{Activation, gelu_tanh, silu};
use tandem_kernels::matrix::{Mode, PackError, PackedMatrix, Target, gate_up, matmul, matmul_each};
use tandem_kernels::path::Path;
use tandem_kernels::team::Team;
use tandem_model::format::{Affine, Format, ScaleType, StoredRow};

fn formats() -> Vec<Format> {
    let mut formats = vec![
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
    ];
    // Every width, group and type of scale once, and each width with each type.
    for (bits, group, scales) in [
        (4, 64, ScaleType::F16),
        (4, 32, ScaleType::Bf16),
        (4, 128, ScaleType::F32),
        (8, 128, ScaleType::F16),
        (8, 64, ScaleType::Bf16),
        (8, 32, ScaleType::F32),
    ] {
        formats.extend(Affine::new(bits, group, scales).map(Format::Affine));
    }
    assert_eq!(formats.len(), 17);
    formats
}

/// About 32 times `blocks` columns, as `format` allows.
fn columns(format: Format, blocks: usize, odd: usize) -> usize {
    if format.is_quantized() { (32 * blocks).next_multiple_of(format.block_len()) } else { 32 * blocks - odd }
}

/// One row in its stored format.
#[derive(Default)]
struct Row {
    values: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
}

impl<'a> From<&'a Row> for StoredRow<'a> {
    fn from(row: &'a Row) -> Self {
        StoredRow { values: &row.values, scales: &row.scales, biases: &row.biases }
    }
}

/// A small generator, so that shapes and contents shrink on their own.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In -1..1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Stored rows with arbitrary contents: every nibble and byte, -128 included, scales of either sign.
fn stored(format: Format, rows: usize, cols: usize, numbers: &mut Numbers) -> Vec<Row> {
    let half = |numbers: &mut Numbers| half::f16::from_f32(numbers.float()).to_le_bytes();
    let row = |numbers: &mut Numbers| {
        let mut row = Row::default();
        for _ in 0..cols / format.block_len() {
            match format {
                Format::F32 => row.values.extend(numbers.float().to_le_bytes()),
                Format::F16 => row.values.extend(half(numbers)),
                Format::Bf16 => row.values.extend(half::bf16::from_f32(numbers.float()).to_le_bytes()),
                _ => {
                    let mut block: Vec<u8> =
                        (0..format.block_bytes()).map(|_| numbers.next() as u8).collect();
                    let scales: &[usize] = match format {
                        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
                        Format::Q6K => &[208],
                        Format::Affine(_) => &[],
                        _ => &[0],
                    };
                    for at in scales {
                        block[*at..at + 2].copy_from_slice(&half(numbers));
                    }
                    row.values.extend(block);
                }
            }
            if let Format::Affine(affine) = format {
                for part in [&mut row.scales, &mut row.biases] {
                    let value = numbers.float();
                    match affine.scales() {
                        ScaleType::F32 => part.extend(value.to_le_bytes()),
                        ScaleType::F16 => part.extend(half::f16::from_f32(value).to_le_bytes()),
                        ScaleType::Bf16 => part.extend(half::bf16::from_f32(value).to_le_bytes()),
                    }
                }
            }
        }
        row
    };
    (0..rows).map(|_| row(numbers)).collect()
}

fn activations(team: &Team, rows: &[Vec<f32>], quantize: bool) -> Activations {
    let mut x = Activations::new(rows[0].len());
    x.resize(rows.len());
    x.fill_rows(team, quantize, |row, out| out.copy_from_slice(&rows[row]));
    x
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn product(team: &Team, weights: &PackedMatrix, x: &[Vec<f32>], quantize: bool) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() * weights.rows()];
    matmul(team, weights, &activations(team, x, quantize), &mut out, weights.rows(), 0, Mode::Store);
    out
}

fn shape() -> impl Strategy<Value = (usize, usize, usize, u64)> {
    // Rows of weights, blocks, rows of activations.
    (1usize..70, 1usize..20, prop_oneof![1usize..12, 60usize..140], any::<u64>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.min(24)))]

    #[test]
    fn rows_come_back_from_their_panels((rows, blocks, _, seed) in shape(), odd in 0usize..32) {
        let team = Team::new(2).unwrap();
        for format in formats() {
            let cols = columns(format, blocks, odd);
            let stored = stored(format, rows, cols, &mut Numbers(seed));
            let packed = PackedMatrix::pack(&team, format, rows, cols, |row| &stored[row]).unwrap();
            let (mut got, mut want) = (vec![0.0; cols], vec![0.0; cols]);
            for (row, stored) in stored.iter().enumerate() {
                packed.dequantize_row(row, &mut got);
                format.dequantize_row(stored, &mut want);
                prop_assert_eq!(&got, &want);
            }
        }
    }

    #[test]
    fn products_are_right_and_always_the_same_bits((rows, blocks, batch, seed) in shape(), odd in 0usize..32) {
        let numbers = &mut Numbers(seed);
        for format in formats() {
            let cols = columns(format, blocks, odd);
            let stored = stored(format, rows, cols, numbers);
            let x: Vec<Vec<f32>> = (0..batch).map(|_| (0..cols).map(|_| 3.0 * numbers.float()).collect()).collect();
            let mut decoded = vec![vec![0.0; cols]; rows];
            stored.iter().zip(&mut decoded).for_each(|(row, out)| format.dequantize_row(row, out));
            for quantize in [false, true] {
                let mut reference = None;
                for path in Path::supported() {
                    for threads in 1..=4 {
                        let team = Team::with_path(threads, path).unwrap();
                        let packed = PackedMatrix::pack(&team, format, rows, cols, |row| &stored[row]).unwrap();
                        let out = product(&team, &packed, &x, quantize);
                        let reference = reference.get_or_insert_with(|| out.clone());
                        prop_assert!(bits(&out) == bits(reference), "{format:?} {path} {threads} threads, quantize {quantize}");
                        if threads == 2 {
                            for m in [0, batch / 2, batch - 1] {
                                let one = product(&team, &packed, &x[m..=m], quantize);
                                prop_assert!(
                                    bits(&one) == bits(&reference[m * rows..][..rows]),
                                    "{format:?} {path}, row {m} of {batch} alone, quantize {quantize}"
                                );
                            }
                        }
                    }
                }
                let out = reference.unwrap();
                for (m, x) in x.iter().enumerate() {
                    for (n, w) in decoded.iter().enumerate() {
                        let terms = || w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                        let (want, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                        // Rounding an activation moves it by at most half of max / 127.
                        let slack: f64 = if quantize && format.is_quantized() {
                            w.iter().map(|w| f64::from(w.abs()) * 3.0 / 254.0).sum()
                        } else {
                            0.0
                        };
                        let error = (f64::from(out[m * rows + n]) - want).abs();
                        prop_assert!(error <= slack + size * 2e-5 + 1e-6, "{format:?} [{m}][{n}] {error}");
                    }
                }
            }
        }
    }

    /// So many that a thread takes two at a time.
    #[test]
    fn many_panels_have_the_bits_of_the_portable_path(
        (rows, blocks, batch, seed) in (120usize..300, 1usize..5, 1usize..10, any::<u64>()),
        odd in 0usize..32,
    ) {
        let numbers = &mut Numbers(seed);
        for format in formats() {
            let cols = columns(format, blocks, odd);
            let stored = stored(format, rows, cols, numbers);
            let x: Vec<Vec<f32>> = (0..batch).map(|_| (0..cols).map(|_| numbers.float()).collect()).collect();
            for quantize in [false, true] {
                let out = |path, threads| {
                    let team = Team::with_path(threads, path).unwrap();
                    let packed = PackedMatrix::pack(&team, format, rows, cols, |row| &stored[row]).unwrap();
                    bits(&product(&team, &packed, &x, quantize))
                };
                let reference = out(Path::SCALAR, 20);
                for path in Path::supported() {
                    for threads in 1..=2 {
                        prop_assert!(
                            out(path, threads) == reference,
                            "{format:?} {path} {threads} threads, {batch} rows, quantize {quantize}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn add_offset_and_stride((rows, blocks, batch, seed) in shape(), offset in 0usize..20, gap in 0usize..20) {
        let numbers = &mut Numbers(seed);
        let stored = stored(Format::Q4_0, rows, 32 * blocks, numbers);
        let x: Vec<Vec<f32>> = (0..batch).map(|_| (0..32 * blocks).map(|_| numbers.float()).collect()).collect();
        let team = Team::new(3).unwrap();
        let packed = PackedMatrix::pack(&team, Format::Q4_0, rows, 32 * blocks, |row| &stored[row]).unwrap();
        let plain = product(&team, &packed, &x, true);
        let stride = offset + rows + gap;
        let before: Vec<f32> = (0..batch * stride).map(|_| numbers.float()).collect();
        for mode in [Mode::Store, Mode::Add] {
            let mut out = before.clone();
            matmul(&team, &packed, &activations(&team, &x, true), &mut out, stride, offset, mode);
            for (i, (out, before)) in out.iter().zip(&before).enumerate() {
                let (m, n) = (i / stride, i % stride);
                let want = match mode {
                    _ if n < offset || n >= offset + rows => *before,
                    Mode::Store => plain[m * rows + n - offset],
                    Mode::Add => before + plain[m * rows + n - offset],
                };
                prop_assert_eq!(out.to_bits(), want.to_bits());
            }
        }
    }

    #[test]
    fn matrices_in_one_pass_are_each_as_alone(
        (rows, blocks, batch, seed) in shape(),
        others in (1usize..70, 1usize..300),
        gap in 0usize..20,
    ) {
        let numbers = &mut Numbers(seed);
        let cols = 32 * blocks;
        let sizes = [(Format::Q4_0, rows), (Format::F16, others.0), (Format::Q8_0, others.1)];
        let stored = sizes.map(|(format, rows)| stored(format, rows, cols, numbers));
        let x: Vec<Vec<f32>> = (0..batch).map(|_| (0..cols).map(|_| numbers.float()).collect()).collect();
        for path in Path::supported() {
            let team = Team::with_path(2, path).unwrap();
            let pack = |i: usize| {
                let (format, rows) = sizes[i];
                PackedMatrix::pack(&team, format, rows, cols, |row| &stored[i][row]).unwrap()
            };
            let matrices = [pack(0), pack(1), pack(2)];
            let offsets = [0, rows + gap, rows + gap + others.0];
            let stride = offsets[2] + others.1;
            let parts: Vec<_> = matrices.iter().zip(offsets).collect();
            let x8 = activations(&team, &x, true);
            let (mut together, mut alone) = (vec![7.0; batch * stride], vec![7.0; batch * stride]);
            matmul_each(&team, &parts, &x8, &mut together, stride, Mode::Store);
            for (matrix, offset) in parts {
                matmul(&team, matrix, &x8, &mut alone, stride, offset, Mode::Store);
            }
            prop_assert_eq!(bits(&together), bits(&alone));
        }
    }

    #[test]
    fn gate_up_is_two_products(
        (rows, blocks, batch, seed) in shape(),
        whole in any::<bool>(),
        up_format in prop_oneof![Just(Format::Q4_1), Just(Format::Q8_0)],
    ) {
        let numbers = &mut Numbers(seed);
        let rows = if whole { rows.next_multiple_of(32) } else { rows };
        let gate = stored(Format::Q4_1, rows, 32 * blocks, numbers);
        let up = stored(up_format, rows, 32 * blocks, numbers);
        let x: Vec<Vec<f32>> = (0..batch).map(|_| (0..32 * blocks).map(|_| numbers.float()).collect()).collect();
        for path in Path::supported() {
            let team = Team::with_path(3, path).unwrap();
            let gate = PackedMatrix::pack(&team, Format::Q4_1, rows, 32 * blocks, |row| &gate[row]).unwrap();
            let up = PackedMatrix::pack(&team, up_format, rows, 32 * blocks, |row| &up[row]).unwrap();
            let (gates, ups) = (product(&team, &gate, &x, true), product(&team, &up, &x, true));
            for (activation, f) in [(Activation::Silu, silu as fn(f32) -> f32), (Activation::GeluTanh, gelu_tanh)] {
                let mut out = Activations::new(rows);
                gate_up(&team, &gate, &up, &activations(&team, &x, true), activation, &mut out, true);
                let want: Vec<f32> = gates.iter().zip(&ups).map(|(gate, up)| up * f(*gate)).collect();
                prop_assert_eq!(bits(out.values()), bits(&want));
                prop_assert_eq!(out.is_quantized(), rows % 32 == 0);
                if whole {
                    // The 8-bit form is the one that quantizing afterwards gives: a product cannot tell.
                    let rows_of = |x: &Activations| x.values().chunks(rows).map(<[f32]>::to_vec).collect::<Vec<_>>();
                    let eye = stored(Format::Q8_0, 16, rows, &mut Numbers(seed));
                    let next = PackedMatrix::pack(&team, Format::Q8_0, 16, rows, |row| &eye[row]).unwrap();
                    let mut got = vec![0.0; batch * 16];
                    matmul(&team, &next, &out, &mut got, 16, 0, Mode::Store);
                    prop_assert_eq!(bits(&got), bits(&product(&team, &next, &rows_of(&out), true)));
                }
            }
        }
    }

    #[test]
    fn quantized_weights_are_close_to_their_source((rows, blocks, _, seed) in shape()) {
        let numbers = &mut Numbers(seed);
        let team = Team::new(2).unwrap();
        let source: Vec<Vec<f32>> = (0..rows).map(|_| (0..32 * blocks).map(|_| numbers.float() + 0.3).collect()).collect();
        for (target, steps) in [(Target::Q4, 15.0), (Target::Q8, 254.0)] {
            let packed =
                PackedMatrix::quantize(&team, target, rows, 32 * blocks, |row, out| out.copy_from_slice(&source[row])).unwrap();
            prop_assert_eq!(packed.format(), target.format());
            for path in Path::supported() {
                let team = Team::with_path(1, path).unwrap();
                let other =
                    PackedMatrix::quantize(&team, target, rows, 32 * blocks, |row, out| out.copy_from_slice(&source[row])).unwrap();
                let (mut a, mut b) = (vec![0.0; 32 * blocks], vec![0.0; 32 * blocks]);
                for row in 0..rows {
                    packed.dequantize_row(row, &mut a);
                    other.dequantize_row(row, &mut b);
                    prop_assert_eq!(&a, &b);
                }
            }
            let mut got = vec![0.0; 32 * blocks];
            for (row, source) in source.iter().enumerate() {
                packed.dequantize_row(row, &mut got);
                for (got, source) in got.chunks(32).zip(source.chunks(32)) {
                    let error: f32 = got.iter().zip(source).map(|(g, s)| (g - s).powi(2)).sum();
                    // No worse than plain rounding over the whole range, whose error is uniform in half a step.
                    let range = match target {
                        Target::Q4 => source.iter().copied().fold(f32::MIN, f32::max) - source.iter().copied().fold(f32::MAX, f32::min),
                        Target::Q8 => 2.0 * source.iter().fold(0f32, |m, v| m.max(v.abs())),
                    };
                    prop_assert!(error <= 32.0 * (range / steps).powi(2) / 4.0, "{target:?} {error} {range}");
                }
            }
        }
    }
}

/// Every number of rows around the sizes of tiles, one block of columns, and panels that are not full.
#[test]
fn edges_of_tiles_are_the_same_bits_on_every_path() {
    let numbers = &mut Numbers(3);
    for format in formats() {
        let cols = columns(format, 1, 0);
        let x: Vec<Vec<f32>> = (0..40).map(|_| (0..cols).map(|_| numbers.float()).collect()).collect();
        // With many outputs, rows are not dealt out in small parts, and panels go in pairs.
        for rows in [1, 17, 140, 270] {
            let stored = stored(format, rows, cols, numbers);
            let of = |path| {
                let team = Team::with_path(1, path).unwrap();
                let packed = PackedMatrix::pack(&team, format, rows, cols, |row| &stored[row]).unwrap();
                (1..=x.len())
                    .map(|batch| bits(&product(&team, &packed, &x[..batch], true)))
                    .collect::<Vec<_>>()
            };
            let reference = of(Path::SCALAR);
            for path in Path::supported() {
                assert!(of(path) == reference, "{format:?} {path}, {rows} outputs");
            }
        }
    }
}

/// Longer than what a kernel unpacks at a time.
#[test]
fn long_rows_are_the_same_bits_on_every_path() {
    let numbers = &mut Numbers(4);
    for format in formats() {
        let (rows, cols) = (300, 4096 + 256);
        let stored = stored(format, rows, cols, numbers);
        let x: Vec<Vec<f32>> = (0..47).map(|_| (0..cols).map(|_| numbers.float()).collect()).collect();
        let mut reference = None;
        for path in Path::supported() {
            let team = Team::with_path(2, path).unwrap();
            let packed = PackedMatrix::pack(&team, format, rows, cols, |row| &stored[row]).unwrap();
            let out = bits(&product(&team, &packed, &x, true));
            let reference = reference.get_or_insert_with(|| out.clone());
            assert!(out == *reference, "{format:?} {path}");
        }
    }
}

#[test]
fn constant_and_zero_blocks_quantize_exactly() {
    let team = Team::new(1).unwrap();
    for target in [Target::Q4, Target::Q8] {
        for value in [0.0, 0.5, -2.0] {
            let packed = PackedMatrix::quantize(&team, target, 3, 64, |_, out| out.fill(value)).unwrap();
            let mut got = vec![1.0; 64];
            packed.dequantize_row(2, &mut got);
            assert!(
                got.iter().all(|got| (got - value).abs() <= 2e-4 * value.abs()),
                "{target:?} {value} {got:?}"
            );
        }
    }
}

#[test]
fn wrong_shapes_are_errors() {
    let team = Team::new(2).unwrap();
    let error = PackedMatrix::pack(&team, Format::Q4_0, 4, 33, |_| b"".as_slice()).unwrap_err();
    assert_eq!(error, PackError::Columns { format: Format::Q4_0, cols: 33 });
    let rows = [vec![0; 36], vec![0; 35]];
    let error = PackedMatrix::pack(&team, Format::Q4_0, 2, 64, |row| &rows[row]).unwrap_err();
    assert!(error.to_string().contains("row 1 has 35 bytes where 64 values of Q4_0 take 36"), "{error}");
    let error = PackedMatrix::quantize(&team, Target::Q8, 4, 33, |_, _| ()).unwrap_err();
    assert!(error.to_string().contains("hint"), "{error}");
    let error =
        PackedMatrix::pack(&team, Format::F32, usize::MAX / 4, 1 << 20, |_| b"".as_slice()).unwrap_err();
    assert!(matches!(error, PackError::Memory(_)), "{error}");
}

#[test]
fn empty_products_do_nothing() {
    let team = Team::new(2).unwrap();
    let none = PackedMatrix::pack(&team, Format::F32, 0, 8, |_| b"".as_slice()).unwrap();
    let mut x = Activations::new(8);
    matmul(&team, &none, &x, &mut [], 0, 0, Mode::Store);
    x.resize(2);
    matmul(&team, &none, &x, &mut [], 0, 0, Mode::Store);
    let hollow = PackedMatrix::pack(&team, Format::Q8_0, 3, 0, |_| b"".as_slice()).unwrap();
    let mut x = Activations::new(0);
    x.resize(2);
    let mut out = [1.0; 6];
    matmul(&team, &hollow, &x, &mut out, 3, 0, Mode::Store);
    assert_eq!(out, [0.0; 6]);
}

#[test]
fn a_large_matrix_is_packed_part_by_part() {
    let (rows, cols) = (5000, 1025);
    let value = |row: usize, col: usize| (row * 31 + col) as f32;
    let stored =
        |row: usize| -> Vec<u8> { (0..cols).flat_map(|col| value(row, col).to_le_bytes()).collect() };
    let stored: Vec<Vec<u8>> = (0..rows).map(stored).collect();
    let team = Team::new(2).unwrap();
    let mut parts = 0;
    let row = |row: usize| stored[row].as_slice();
    let packed = PackedMatrix::pack_in_parts(&team, Format::F32, rows, cols, row, || parts += 1).unwrap();
    assert_eq!(parts, 3, "20 MiB");
    let mut out = vec![0.0; cols];
    for at in [0, 15, 16, 2047, 2048, 2064, 4111, 4999] {
        packed.dequantize_row(at, &mut out);
        assert!(out.iter().enumerate().all(|(col, x)| *x == value(at, col)), "row {at}");
    }
}

#[test]
#[should_panic(expected = "which others before them reach")]
fn outputs_that_overlap_are_refused() {
    let team = Team::new(1).unwrap();
    let packed = PackedMatrix::pack(&team, Format::F32, 2, 2, |_| &[0; 8][..]).unwrap();
    let (x, mut out) = (activations(&team, &[vec![1.0, 1.0]], false), [0.0; 4]);
    matmul_each(&team, &[(&packed, 0), (&packed, 1)], &x, &mut out, 4, Mode::Store);
}
