//! Progress on standard error: a bar on a terminal, few plain lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tandem_cpu::LoadProgress;
use tandem_store::Progress;

use crate::measure::size;

/// What takes less needs no bar.
const PATIENCE: Duration = Duration::from_millis(300);

/// Between two plain lines.
const INTERVAL: Duration = Duration::from_secs(5);

/// A download.
#[derive(Default)]
pub struct Download {
    bar: Option<ProgressBar>,
    what: String,
    total: Option<u64>,
    told: Option<Instant>,
}

impl Progress for Download {
    fn start(&mut self, what: &str, total: Option<u64>) {
        self.finish();
        (self.what, self.total, self.told) = (what.to_owned(), total, Some(Instant::now()));
        let of = total.map(|t| format!(" ({})", size(t))).unwrap_or_default();
        if !std::io::stderr().is_terminal() {
            eprintln!("fetching {what}{of}");
            return;
        }
        let style = match total {
            Some(_) => "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}",
            None => "{msg} {spinner} {decimal_bytes} {decimal_bytes_per_sec}",
        };
        self.bar = Some(bar(total, style).with_message(what.to_owned()));
    }

    fn advance(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if self.told.is_some_and(|t| t.elapsed() > INTERVAL) {
            self.told = Some(Instant::now());
            let of = self.total.map(|t| format!(" of {}", size(t))).unwrap_or_default();
            eprintln!("fetching {}: {}{of}", self.what, size(done));
        }
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn note(&mut self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("note: {line}")),
            None => eprintln!("note: {line}"),
        }
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Loading, called on the engine's thread. `what` says what is done: loading or quantizing.
pub fn load(what: &'static str) -> LoadProgress {
    let mut begun: Option<Instant> = None;
    let mut told = Duration::ZERO;
    let mut shown: Option<ProgressBar> = None;
    let terminal = std::io::stderr().is_terminal();
    Box::new(move |share| {
        let taken = begun.get_or_insert_with(Instant::now).elapsed();
        let percent = (share * 100.0) as u64;
        if share >= 1.0 {
            if let Some(bar) = shown.take() {
                bar.finish_and_clear();
            }
        } else if terminal && taken > PATIENCE {
            let bar = shown.get_or_insert_with(|| {
                bar(Some(100), "{msg} {wide_bar} {percent}% {eta}").with_message(what)
            });
            bar.set_position(percent);
        } else if !terminal && taken > told + INTERVAL {
            told = taken;
            eprintln!("{what}: {percent}%");
        }
    })
}

fn bar(total: Option<u64>, template: &str) -> ProgressBar {
    let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style);
    bar
}
