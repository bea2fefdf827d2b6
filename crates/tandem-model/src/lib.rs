//! What a model *is*, before anything is computed: checkpoint formats, the [`decoder::Decoder`], tokenizer and chat
//! template.

pub mod decoder;
pub mod error;
pub mod format;
pub mod weights;

pub use decoder::Decoder;
pub use error::ModelError;
pub use weights::Weights;
