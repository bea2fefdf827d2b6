//! The CPU engine: the dynamic engine that runs everywhere.
//!
//! Loading *lowers* a [`Decoder`](tandem_model::Decoder) into packed matrices (`lower`); a sequence's keys and values
//! live in reference-counted blocks (`blocks`), so that a fork shares them and writes copy; a step runs a ragged batch
//! through the layers (`forward`), each sequence with the rope that its length fixed (`turns`); [`CpuEngine`] keeps the
//! contract's promises around that.
//!
//! Results are exact by construction: every kernel gives a row the same bits whatever rows are beside it, however the
//! prompt was chunked and however many threads run. See `tandem-kernels` for how.

mod blocks;
mod engine;
mod forward;
mod lower;
mod memory;
mod turns;

pub use engine::{CpuEngine, CpuFactory, CpuOptions, LoadProgress, Quant};
pub use memory::available_memory;
