//! Ctrl-C: the first one ends the answer under way, the next the program. Without an answer the first ends the program.

use std::process::exit;
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use tandem_runtime::{Reason, StreamControl};

/// Exit code of a program that the user interrupted.
pub const EXIT_CODE: u8 = 130;

/// The answer under way, until it has been asked to end.
static ANSWER: Mutex<Option<StreamControl>> = Mutex::new(None);

/// Takes Ctrl-C over from the system.
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| match lock().take() {
        Some(answer) => answer.finish(Reason::Interrupted),
        None => exit(i32::from(EXIT_CODE)),
    })
    .context("cannot watch for Ctrl-C")
}

/// While it lives, Ctrl-C ends this answer.
pub struct Ends;

impl Ends {
    pub fn answer(control: StreamControl) -> Self {
        *lock() = Some(control);
        Self
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        *lock() = None;
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<StreamControl>> {
    ANSWER.lock().unwrap_or_else(PoisonError::into_inner)
}
