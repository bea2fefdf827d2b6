//! Where models live on this machine, and how they get there.
//!
//! One question is answered here: *given what a person typed after `tandem run`, which file or folder do I open?*
//! [`Store::resolve`] answers it, and fetches what is missing. What was typed is, in this order,
//!
//! 1. a folder or `.gguf` file that exists: it is used as it is, and the store does nothing to it;
//! 2. an [alias](aliases): a short name for a model that Python's package index carries, kept in the store itself;
//! 3. a Hugging Face id, `owner/name`, `owner/name@revision` or `owner/name:file.gguf`, kept in the hub's *own*
//!    cache, so that a model which transformers already downloaded is not downloaded again, and the other way round.
//!
//! Three rules hold everywhere. A file appears under its final name only after it is whole, hashed and synced
//! ([`atomic`]), so a killed download leaves nothing that looks like a model. Every byte from the network is checked
//! against a hash that came from somewhere else than the download itself. And what a user can mend, an error says
//! how: each [`StoreError`] ends with a hint.
//!
//! The interface is blocking, because its one caller is a command line that waits for the answer anyway. Network and
//! TLS crates stay in this room: no other crate of Tandem depends on it but the binary.

pub mod aliases;
pub mod atomic;
mod digest;
mod error;
mod hub;
mod package;
mod progress;
mod reference;
mod settings;
mod shelf;
mod store;

pub use aliases::{Alias, Part};
pub use error::StoreError;
pub use progress::{Progress, Silent};
pub use settings::{HubSettings, Settings};
pub use store::{Entry, Format, Resolved, Source, Store};

/// What the operations of this crate return.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;
