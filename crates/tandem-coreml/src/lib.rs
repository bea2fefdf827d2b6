//! Core ML packages without Core ML: reading and writing ML Programs and their weight files.
//!
//! * [`Package`] opens a package: the program as plain data ([`mil`]), weights mapped and read when asked for.
//! * [`PackageWriter`] writes one: weights stream to the disk while the program is built, and the same input gives the
//!   same bytes.
//! * [`audit`] predicts which operators will not run on the Neural Engine; [`inspect`] says what a package holds.

pub mod audit;
pub mod blob;
pub mod build;
pub mod dtype;
pub mod error;
pub mod export;
pub mod inspect;
pub mod mil;
mod package;
mod proto;
pub mod quantize;
pub mod trace;

pub use dtype::DType;
pub use error::CoremlError;
pub use package::{Package, PackageWriter};
