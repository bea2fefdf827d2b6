//! CPU kernels: a scalar twin beside each SIMD one, and the thread team that runs them.
//!
//! Every operation takes a [`Team`](team::Team) and plain slices, runs on all threads of the team and has joined
//! before it returns, so that code above needs no `unsafe`. Which instructions it uses is a property of the team
//! (its [`Path`](path::Path)), chosen once at run time.
//!
//! Exactness is by construction: an output element is one f32 accumulator, walked over its inputs in one fixed order.
//! SIMD lanes are *output rows*, never pieces of one sum. So the bits of an output depend neither on the batch size,
//! nor on the place in the batch, nor on the number of threads. Integer parts are exact and every float step is a
//! plain or fused operation that the scalar twin repeats, so that the paths agree bit for bit as well.

pub mod activations;
pub mod attention;
pub mod buffer;
pub mod elementwise;
pub mod kv;
mod lanes;
pub mod logits;
pub mod math;
pub mod matrix;
pub mod norm;
pub mod path;
pub mod roofline;
pub mod rope;
pub mod rows;
pub mod team;
