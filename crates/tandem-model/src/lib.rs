//! What a model *is*, before anything is computed.

pub mod format;
