//! The limits of the machine: what no kernel can exceed, measured.
//!
//! A decode step reads all weights once, so it takes at least their bytes over the *read bandwidth*; prefill multiplies,
//! so it takes at least its operations over the *peak* of the instructions that multiply. Both are measured with loops
//! that do nothing else, on the team and the kernel path that the kernels themselves run on. A figure is the best of
//! several tries: for a limit, whatever made a try slower does not count.

#[cfg(target_arch = "aarch64")]
mod neon;

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::buffer::{HugeBuffer, OutOfMemory};
use crate::path::{Isa, Path};
use crate::team::{Team, TeamError};

/// How the system maps the memory that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// The base size, 4 KiB on x86-64.
    Small,
    /// Transparent huge pages, where weights lie.
    Huge,
}

/// Times that a limit is tried.
const TRIES: usize = 15;

/// Rounds of a chain of multiplications: some ten milliseconds.
const ROUNDS: u64 = 1 << 20;

/// Bytes per second that the team reads from a buffer of `bytes` bytes, each thread its share, as one stream or as
/// several side by side, whichever is faster: a core may have more reads under way if they are in different pages.
/// `None` where the system does not give such pages.
///
/// # Errors
/// If there is no memory for the buffer.
pub fn read_bandwidth(team: &Team, bytes: usize, pages: Pages) -> Result<Option<f64>, OutOfMemory> {
    let mut buffer = match pages {
        Pages::Small => HugeBuffer::zeroed_in_small_pages(bytes)?,
        Pages::Huge => HugeBuffer::zeroed(bytes)?,
    };
    if buffer.huge_pages() != (pages == Pages::Huge) {
        return Ok(None);
    }
    // Pages that nobody wrote to are one page of zeros.
    buffer.fill(1);
    let read = buffer.len() as f64;
    Ok(Some(read / best(|| read_all::<1>(team, &buffer).min(read_all::<4>(team, &buffer)))))
}

/// Seconds to read all of `buffer`, each thread its share as so many streams.
fn read_all<const STREAMS: usize>(team: &Team, buffer: &[u8]) -> f64 {
    let (lines, _) = buffer.as_chunks::<64>();
    let total = AtomicU64::new(0);
    let start = Instant::now();
    team.split(lines.len(), |range| {
        let mut sums = [0u64; 8];
        let mut add = |line: &[u8; 64]| {
            for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        };
        let length = range.len() / STREAMS;
        let (streams, rest) = lines[range].split_at(length * STREAMS);
        for i in 0..length {
            (0..STREAMS).for_each(|stream| add(&streams[stream * length + i]));
        }
        rest.iter().for_each(add);
        total.fetch_add(sums.iter().fold(0, |a, b| a.wrapping_add(*b)), Ordering::Relaxed);
    });
    let seconds = start.elapsed().as_secs_f64();
    black_box(total.into_inner());
    seconds
}

/// Operations per second (a multiplication and an addition are two) of 8-bit dot products on the team's kernel path.
pub fn int8_peak(team: &Team) -> f64 {
    let path = team.path();
    let per_round = match path.isa() {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => x86::INT8_AMX,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => x86::INT8_AVX512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => x86::INT8_AVX2,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => neon::INT8,
        _ => scalar::OPERATIONS,
    };
    let chain = |_| match path.isa() {
        // SAFETY: the path proves that the instructions exist.
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => unsafe { x86::int8_amx() },
        // SAFETY: the path proves that the instructions exist.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { x86::int8_avx512() },
        // SAFETY: the path proves that the instructions exist.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { x86::int8_avx2() },
        // SAFETY: the path proves that the instructions exist.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unsafe { neon::int8() },
        _ => scalar::int8(),
    };
    peak(team, per_round, chain)
}

/// [`int8_peak`] of the path below, where the team's has tiles: products of few rows run on vectors there too.
///
/// # Errors
/// If the system gives no threads.
pub fn int8_vector_peak(team: &Team) -> Result<Option<f64>, TeamError> {
    match Path::named(Isa::Avx512.name()) {
        Ok(path) if team.path().isa() == Isa::Amx => {
            Ok(Some(int8_peak(&Team::with_path(team.threads(), path)?)))
        }
        _ => Ok(None),
    }
}

/// Operations per second (a multiplication and an addition are two) in f32 on the team's kernel path.
pub fn f32_peak(team: &Team) -> f64 {
    let path = team.path();
    let per_round = match path.isa() {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => x86::F32_AVX512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => x86::F32_AVX2,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => neon::F32,
        _ => scalar::OPERATIONS,
    };
    let chain = |_| match path.isa() {
        // SAFETY: the path proves that the instructions exist.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { x86::f32_avx512() },
        // SAFETY: the path proves that the instructions exist.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { x86::f32_avx2() },
        // SAFETY: the path proves that the instructions exist.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unsafe { neon::f32() },
        _ => scalar::f32(),
    };
    peak(team, per_round, chain)
}

/// Operations per second of `chain`, which does [`ROUNDS`] times `per_round`, on every thread.
fn peak(team: &Team, per_round: u64, chain: impl Fn(usize) + Sync) -> f64 {
    let operations = (ROUNDS * per_round) as f64 * team.threads() as f64;
    let seconds = best(|| {
        let start = Instant::now();
        team.run(&chain);
        start.elapsed().as_secs_f64()
    });
    operations / seconds
}

fn best(mut seconds: impl FnMut() -> f64) -> f64 {
    (0..TRIES).map(|_| seconds()).fold(f64::INFINITY, f64::min)
}

/// What the compiler makes of plain loops.
mod scalar {
    use super::{ROUNDS, black_box};

    const WIDTH: usize = 32;

    /// Per round.
    pub(super) const OPERATIONS: u64 = 2 * WIDTH as u64;

    pub(super) fn int8() {
        let x: [i8; WIDTH] = black_box([3; WIDTH]);
        let mut sums = [0i32; WIDTH];
        for round in 0..ROUNDS {
            let w = i32::from(round as u8);
            sums.iter_mut().zip(&x).for_each(|(sum, x)| *sum = sum.wrapping_add(i32::from(*x) * w));
        }
        black_box(sums);
    }

    pub(super) fn f32() {
        let x: [f32; WIDTH] = black_box([0.5; WIDTH]);
        let mut sums = [1f32; WIDTH];
        for _ in 0..ROUNDS {
            sums.iter_mut().zip(&x).for_each(|(sum, x)| *sum = *sum * *x + *x);
        }
        black_box(sums);
    }
}

// Plain loops: a closure would not be compiled for the instructions of the function that it stands in.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{ROUNDS, black_box};
    use crate::matrix::amx::{configure, release};

    /// Products that one 16-bit sum takes before it is widened: those of a block of 4-bit weights.
    const PRODUCTS: usize = 8;

    /// Chains that hide the latency of an instruction.
    const CHAINS: usize = 12;

    pub(super) const INT8_AVX2: u64 = (PRODUCTS * 32 * 2) as u64;
    /// Four products of whole tiles.
    pub(super) const INT8_AMX: u64 = 4 * 16 * 16 * 64 * 2;
    pub(super) const INT8_AVX512: u64 = (CHAINS * 64 * 2) as u64;
    pub(super) const F32_AVX2: u64 = (CHAINS * 8 * 2) as u64;
    pub(super) const F32_AVX512: u64 = (CHAINS * 16 * 2) as u64;

    /// `vpmaddubsw`, summed in 16 bits, widened by `vpmaddwd` once for every [`PRODUCTS`].
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn int8_avx2() {
        let x: [__m256i; PRODUCTS] = black_box([_mm256_set1_epi8(3); PRODUCTS]);
        let ones = _mm256_set1_epi16(1);
        let mask = _mm256_set1_epi8(15);
        // Changes from round to round, so that no product is the same as the last.
        let mut w = _mm256_setzero_si256();
        let mut sum = _mm256_setzero_si256();
        for _ in 0..ROUNDS {
            w = _mm256_and_si256(_mm256_sub_epi8(w, mask), mask);
            let mut products = _mm256_maddubs_epi16(w, x[0]);
            for x in &x[1..] {
                products = _mm256_add_epi16(products, _mm256_maddubs_epi16(w, *x));
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, ones));
        }
        black_box(sum);
    }

    /// `tdpbssd`.
    ///
    /// # Safety
    /// The path must be that of AMX.
    pub(super) unsafe fn int8_amx() {
        // SAFETY: as promised; the tiles, zeros, are multiplied and forgotten.
        unsafe {
            configure(64);
            for _ in 0..ROUNDS {
                std::arch::asm!(
                    "tdpbssd tmm0, tmm4, tmm6",
                    "tdpbssd tmm1, tmm4, tmm7",
                    "tdpbssd tmm2, tmm4, tmm6",
                    "tdpbssd tmm3, tmm4, tmm7",
                    options(nostack, nomem),
                );
            }
            release();
        }
    }

    /// `vpdpbusd`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(super) fn int8_avx512() {
        let (w, x) = black_box((_mm512_set1_epi8(7), _mm512_set1_epi8(3)));
        let mut sums = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, w, x);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn f32_avx2() {
        let x = black_box(_mm256_set1_ps(0.5));
        let mut sums = [_mm256_set1_ps(1.0); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, x, x);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(super) fn f32_avx512() {
        let x = black_box(_mm512_set1_ps(0.5));
        let mut sums = [_mm512_set1_ps(1.0); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, x, x);
            }
        }
        black_box(sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_positive_finite_limits() {
        for path in Path::supported() {
            let team = Team::with_path(1, path).unwrap();
            for limit in [int8_peak(&team), f32_peak(&team)] {
                assert!(limit.is_finite() && limit > 1e8, "{path}: {limit}");
            }
        }
        let team = Team::new(1).unwrap();
        let small = read_bandwidth(&team, 1 << 20, Pages::Small).unwrap();
        assert!(small.is_some_and(|rate| rate.is_finite() && rate > 1e7), "{small:?}");
    }

    #[test]
    fn a_buffer_that_does_not_fit_is_an_error() {
        let team = Team::new(1).unwrap();
        assert!(read_bandwidth(&team, usize::MAX / 2, Pages::Huge).is_err());
    }
}
