//! Rounding a block to 8 bits with NEON, which is part of what all code for AArch64 is compiled for.

use std::arch::aarch64::*;

use tandem_model::format::BLOCK;

use super::scale_of_bits;

/// As the portable form.
pub(super) fn quantize_block(values: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> (f32, i32) {
    // SAFETY: NEON is there, `values` are eight vectors of four floats, and `q` is two of sixteen bytes.
    unsafe {
        let v: [float32x4_t; 8] = std::array::from_fn(|i| vld1q_f32(values.as_ptr().add(4 * i)));
        let magnitude = vdupq_n_s32(i32::MAX);
        let m = v.map(|v| vandq_s32(vreinterpretq_s32_f32(v), magnitude));
        let m: [_; 4] = std::array::from_fn(|i| vmaxq_s32(m[i], m[i + 4]));
        let m = vmaxq_s32(vmaxq_s32(m[0], m[1]), vmaxq_s32(m[2], m[3]));
        let (scale, inverse) = scale_of_bits(vmaxvq_s32(m));

        let i = v.map(|v| vcvtnq_s32_f32(vmulq_n_f32(v, inverse)));
        let mut total = 0;
        for (half, i) in i.as_chunks::<4>().0.iter().enumerate() {
            let words = [vqmovn_high_s32(vqmovn_s32(i[0]), i[1]), vqmovn_high_s32(vqmovn_s32(i[2]), i[3])];
            let bytes = vqmovn_high_s16(vqmovn_s16(words[0]), words[1]);
            vst1q_s8(q.as_mut_ptr().add(16 * half), bytes);
            total += i32::from(vaddlvq_s8(bytes));
        }
        (scale, total)
    }
}
