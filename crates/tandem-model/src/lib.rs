//! What a model *is*, before anything is computed: checkpoint formats, the [`decoder::Decoder`], tokenizer and chat
//! template.
//!
//! [`Checkpoint::open`] is the front door. The readers behind it trust no file: they check every length, offset and
//! shape against the bytes that are there, and refuse by name whatever would change the mathematics and is not
//! understood.

pub mod arch;
pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod decoder;
pub mod error;
pub mod format;
pub mod generation;
pub mod gguf;
pub mod rope;
pub mod safetensors;
pub mod tokenizer;
pub mod tools;
pub mod weights;

pub use chat::{ChatTemplate, Message, RenderOptions};
pub use checkpoint::Checkpoint;
pub use decoder::Decoder;
pub use error::ModelError;
pub use generation::GenerationConfig;
pub use tokenizer::{Detokenizer, Tokenizer};
pub use tools::{CallFormat, CallParser, CallPiece, ToolCall};
pub use weights::Weights;
