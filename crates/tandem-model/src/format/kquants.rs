//! ggml's K-quants: super-blocks of 256 values, whose small blocks have integer scales under one f16.
//!
//! | format | bytes of a super-block | value |
//! | --- | --- | --- |
//! | `Q4_K` | `d: f16`, `dmin: f16`, 12 of scales and minima, 128 of nibbles | `d * s * q - dmin * m` |
//! | `Q5_K` | `d: f16`, `dmin: f16`, 12 of scales and minima, 32 of fifth bits, 128 of nibbles | the same |
//! | `Q6_K` | 128 of nibbles, 64 of upper bit pairs, 16 × `i8` scales, `d: f16` | `d * s * (q - 32)` |
//!
//! In `Q4_K` and `Q5_K` eight blocks of 32 have a scale `s` and a minimum `m` of 6 bits each. Bytes 0 to 3 of the twelve
//! hold the scales of blocks 0 to 3, bytes 4 to 7 their minima; bytes 8 to 11 the low nibbles of the scales and (high
//! nibble) minima of blocks 4 to 7, whose upper two bits are those of bytes 0 to 3 and 4 to 7. Nibbles come in runs of
//! 32 bytes: the low ones are block `2i`, the high ones block `2i + 1`. Bit `b` of fifth-bit byte `i` belongs to value
//! `i` of block `b`.
//!
//! In `Q6_K` sixteen blocks of 16 have a scale. Each half of 128 values has 64 bytes of nibbles and 32 of bit pairs:
//! value `32 r + i` takes its nibble from byte `32 (r % 2) + i`, low for `r < 2` and else high, and its upper bits from
//! pair `r` of byte `i`.

use super::BLOCK;

/// Values in a super-block.
pub(super) const SUPER_BLOCK: usize = 256;

/// `d`, `dmin` and the packed scales of `Q4_K` and `Q5_K`.
const HEAD: usize = 4 + 12;

pub(super) const Q4K_BYTES: usize = HEAD + SUPER_BLOCK / 2;
pub(super) const Q5K_BYTES: usize = HEAD + SUPER_BLOCK / 8 + SUPER_BLOCK / 2;
pub(super) const Q6K_BYTES: usize = SUPER_BLOCK / 2 + SUPER_BLOCK / 4 + SUPER_BLOCK / 16 + 2;

/// Where the upper bits of `Q6_K` start, and its scales.
const PAIRS: usize = SUPER_BLOCK / 2;
const SCALES: usize = PAIRS + SUPER_BLOCK / 4;

/// Scale and minimum of a block of `Q4_K` or `Q5_K`.
pub(super) fn small_scales(block: &[u8], part: usize) -> [u8; 2] {
    let bytes = &block[4..HEAD];
    if part < 4 {
        return [bytes[part] & 63, bytes[part + 4] & 63];
    }
    let low = bytes[part + 4];
    [low & 15 | bytes[part - 4] >> 6 << 4, low >> 4 | bytes[part] >> 6 << 4]
}

/// Scales of the two blocks of 16 that make up 32 values of `Q6_K`.
pub(super) fn q6k_small_scales(block: &[u8], part: usize) -> [u8; 2] {
    [block[SCALES + 2 * part], block[SCALES + 2 * part + 1]]
}

/// The nibbles of block `part`, from those of a super-block.
fn nibbles(bytes: &[u8], part: usize, out: &mut [u8; BLOCK]) {
    let run = &bytes[part / 2 * BLOCK..][..BLOCK];
    let shift = part % 2 * 4;
    for (q, byte) in out.iter_mut().zip(run) {
        *q = byte >> shift & 15;
    }
}

pub(super) fn q4k(block: &[u8], part: usize, out: &mut [u8; BLOCK]) {
    nibbles(&block[HEAD..], part, out);
}

pub(super) fn q5k(block: &[u8], part: usize, out: &mut [u8; BLOCK]) {
    let (fifth, values) = block[HEAD..].split_at(SUPER_BLOCK / 8);
    nibbles(values, part, out);
    for (q, byte) in out.iter_mut().zip(fifth) {
        *q |= (byte >> part & 1) << 4;
    }
}

/// From -32 to 31, as bytes of `i8`.
pub(super) fn q6k(block: &[u8], part: usize, out: &mut [u8; BLOCK]) {
    let (half, run) = (part / 4, part % 4);
    let low = &block[64 * half + 32 * (run % 2)..][..BLOCK];
    let pairs = &block[PAIRS + 32 * half..][..BLOCK];
    for ((q, low), pair) in out.iter_mut().zip(low).zip(pairs) {
        let value = low >> (run / 2 * 4) & 15 | (pair >> (2 * run) & 3) << 4;
        *q = value.wrapping_sub(32);
    }
}
