//! Tandem as a library: load a model, ask it, read the answer as it comes, stop when you have enough.
//!
//! ```no_run
#![doc = include_str!("../examples/embed.rs")]
//! ```
//!
//! That is `examples/embed.rs`. A [`Model`] may be shared between threads: what they ask runs in one
//! batch, and each gets the answer it would get alone. Build with `default-features = false` to leave out what only the
//! command line needs (the terminal, the server, downloads).
//!
//! Below this front lie the rooms that `ARCHITECTURE.md` describes. [`engines::start`] is where engines are wired up.

mod embed;

/// What the README shows is compiled too.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub use embed::engines::{self, ENGINES, Options};
pub use embed::{Answer, Ask, Error, Model, SEED, context, sampling};
pub use tandem_cpu::CpuOptions;
pub use tandem_engine::SampleSpec;
pub use tandem_model::{Checkpoint, Message};
pub use tandem_runtime::{Done, Reason, Route, StreamControl};
