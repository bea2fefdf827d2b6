//! The library's front.

mod answer;
pub mod engines;
mod error;
mod model;
mod sampling;

pub use answer::{Answer, Ask};
pub use error::Error;
pub use model::Model;
pub use sampling::{SEED, sampling};

/// Tokens of context where nobody says: enough to work with, and small enough for any machine.
const DEFAULT_CONTEXT: usize = 4096;

/// Tokens of context for a model that handles `handles`: what was asked for, where 0 is all, else 4096 or less.
///
/// # Errors
/// [`Error::Context`] for more than it handles.
pub fn context(asked: Option<usize>, handles: usize) -> Result<usize, Error> {
    match asked {
        None => Ok(handles.min(DEFAULT_CONTEXT)),
        Some(0) => Ok(handles),
        Some(asked) if asked > handles => Err(Error::Context { asked, handles }),
        Some(asked) => Ok(asked),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_context_never_exceeds_what_the_model_handles() {
        assert_eq!(context(None, 8192).unwrap(), 4096);
        assert_eq!(context(None, 2048).unwrap(), 2048);
        assert_eq!(context(Some(0), 8192).unwrap(), 8192);
        assert_eq!(context(Some(5000), 8192).unwrap(), 5000);
        let text = context(Some(9000), 8192).unwrap_err().to_string();
        assert!(text.contains("9000") && text.contains("8192"), "{text}");
    }
}
