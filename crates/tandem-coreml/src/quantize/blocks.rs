//! Symmetric integers under a scale for each block: `value = scale * quant`.

use half::f16;

/// The scale and the integers (two's complement in `bits` bits) of one block: the largest magnitude becomes
/// `2^(bits - 1) - 1`, and what lies between is rounded to the nearest, ties to even.
pub fn quantize(block: &[f16], bits: usize) -> (f16, Vec<u8>) {
    let most = ((1u32 << (bits - 1)) - 1) as f32;
    let largest = block.iter().map(|value| value.to_f32().abs()).fold(0.0, f32::max);
    // Of a block of zeros any scale will do.
    let scale = f16::from_f32(if largest == 0.0 { 1.0 } else { largest / most });
    // A scale that fp16 rounds to nothing cannot be divided by.
    let divisor = if scale == f16::ZERO { f32::INFINITY } else { scale.to_f32() };
    let quant = |value: &f16| {
        let quant = (value.to_f32() / divisor).round_ties_even().clamp(-most, most);
        (quant as i8).cast_unsigned()
    };
    (scale, block.iter().map(quant).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_at_most_half_a_step() {
        let block: Vec<f16> = (0..32).map(|i| f16::from_f32((i as f32 * 1.7).sin())).collect();
        for bits in [4, 8] {
            let (scale, quants) = quantize(&block, bits);
            for (value, quant) in block.iter().zip(quants) {
                let back = scale.to_f32() * f32::from(quant.cast_signed());
                assert!((back - value.to_f32()).abs() <= 0.501 * scale.to_f32(), "{back} for {value}");
            }
        }
    }

    #[test]
    fn zeros_and_tiny_values_stay_finite() {
        for value in [0.0, 6e-8] {
            let (scale, quants) = quantize(&[f16::from_f32(value); 32], 8);
            assert!(scale.is_finite() && quants.iter().all(|quant| *quant == 0 || *quant == 127));
        }
    }
}
