//! How a download tells the person who waits for it that it moves.

/// Receives the progress of one operation. Every method does nothing unless it is overridden.
pub trait Progress {
    /// A transfer of `what` begins; `total` is its size in bytes, where known. Transfers never overlap: a new start
    /// ends the one before it.
    fn start(&mut self, what: &str, total: Option<u64>) {
        let _ = (what, total);
    }

    /// `done` bytes of the current transfer are here: a running sum, which steps back when a transfer starts over.
    fn advance(&mut self, done: u64) {
        let _ = done;
    }

    /// The current transfer is complete.
    fn finish(&mut self) {}

    /// One line that the user should see, such as that a damaged file is downloaded again.
    fn note(&mut self, line: &str) {
        let _ = line;
    }
}

/// Progress that nobody watches.
pub struct Silent;

impl Progress for Silent {}
