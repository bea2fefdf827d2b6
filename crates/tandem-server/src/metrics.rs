//! Counters and histograms, as Prometheus reads them.

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tandem_runtime::{EngineState, Status, Usage};

/// Upper bounds of the histograms' buckets, in seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// What the server has seen.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    outcomes: [AtomicU64; Outcome::ALL.len()],
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    /// From the arrival of a request to the first token of a choice.
    pub ttft: Histogram,
    /// From one token of a choice to the next, as they could be sent.
    pub inter_token: Histogram,
}

/// How a request to generate ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Answered to the end.
    Completed,
    /// The client went away.
    Cancelled,
    /// Not allowed, or no room.
    Refused,
    /// The engine or the server failed.
    Failed,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Completed, Self::Cancelled, Self::Refused, Self::Failed];

    fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Cancelled => "cancelled",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// A request under way. Whoever drops it without an outcome has lost its client.
#[derive(Debug)]
pub(crate) struct Ongoing {
    pub metrics: Arc<Metrics>,
    outcome: Outcome,
}

impl Ongoing {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, outcome: Outcome::Cancelled }
    }

    pub fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        self.metrics.outcomes[self.outcome as usize].fetch_add(1, Ordering::Relaxed);
    }
}

impl Metrics {
    /// Counts the tokens of an answered request.
    pub fn tokens(&self, usage: &Usage) {
        for (counter, tokens) in [
            (&self.prompt_tokens, usage.prompt),
            (&self.cached_tokens, usage.cached),
            (&self.generated_tokens, usage.generated),
        ] {
            counter.fetch_add(tokens as u64, Ordering::Relaxed);
        }
    }

    /// The page that Prometheus scrapes. Figures of an engine that does not answer are left out.
    pub fn render(&self, model: &str, status: Option<&Status>) -> String {
        let mut page = Page(String::new());
        page.head("tandem_requests_total", "counter", "Requests to generate, by how they ended.");
        for outcome in Outcome::ALL {
            let value = self.outcomes[outcome as usize].load(Ordering::Relaxed);
            page.line(&format!("tandem_requests_total{{outcome=\"{}\"}}", outcome.name()), value);
        }
        for (name, counter, help) in [
            ("tandem_prompt_tokens_total", &self.prompt_tokens, "Tokens of prompts."),
            ("tandem_cached_tokens_total", &self.cached_tokens, "Tokens of prompts not computed again."),
            ("tandem_generated_tokens_total", &self.generated_tokens, "Tokens generated."),
        ] {
            page.one(name, "counter", help, counter.load(Ordering::Relaxed));
        }
        let help = "From a request's arrival to its first token.";
        self.ttft.render("tandem_time_to_first_token_seconds", help, &mut page);
        self.inter_token.render("tandem_inter_token_seconds", "Between two tokens of an answer.", &mut page);

        let up = matches!(status, Some(Status { engine: EngineState::Ready { .. }, .. }));
        let label = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        page.head("tandem_engine_up", "gauge", "Whether the model's engine answers.");
        page.line(&format!("tandem_engine_up{{model=\"{label}\"}}"), u64::from(up));
        if let Some(status) = status {
            page.one("tandem_requests_running", "gauge", "Sequences in the batch.", status.running);
            page.one("tandem_requests_waiting", "gauge", "Sequences that wait to join it.", status.waiting);
            page.one(
                "tandem_engine_restarts_total",
                "counter",
                "Times the engine was rebuilt.",
                status.restarts,
            );
            if let EngineState::Ready { memory, .. } = &status.engine {
                let used = memory.kv_exclusive + memory.kv_shared;
                page.one("tandem_kv_used_bytes", "gauge", "KV that sequences hold.", used);
                page.one("tandem_kv_limit_bytes", "gauge", "Most KV the engine will hold.", memory.kv_limit);
                page.one(
                    "tandem_weights_bytes",
                    "gauge",
                    "Weights as the engine holds them.",
                    memory.weights,
                );
            }
        }
        page.0
    }
}

/// How many observations fell into each bucket.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    /// One more than bounds, for what exceeds the last.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Histogram {
    pub fn observe(&self, duration: std::time::Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn render(&self, name: &str, help: &str, page: &mut Page) {
        page.head(name, "histogram", help);
        let mut count = 0;
        let bounds = BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bucket, bound) in self.buckets.iter().zip(bounds) {
            count += bucket.load(Ordering::Relaxed);
            page.line(&format!("{name}_bucket{{le=\"{bound}\"}}"), count);
        }
        page.line(&format!("{name}_sum"), self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9);
        page.line(&format!("{name}_count"), count);
    }
}

struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, value: impl Display) {
        let _ = writeln!(self.0, "{name} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.line(name, value);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn buckets_are_cumulative_and_end_with_the_count() {
        let metrics = Metrics::default();
        for milliseconds in [1, 3, 3, 999_000] {
            metrics.ttft.observe(Duration::from_millis(milliseconds));
        }
        let page = metrics.render("a\"b", None);
        let name = "tandem_time_to_first_token_seconds";
        for line in [
            &format!("{name}_bucket{{le=\"0.001\"}} 1"),
            &format!("{name}_bucket{{le=\"0.005\"}} 3"),
            &format!("{name}_bucket{{le=\"60\"}} 3"),
            &format!("{name}_bucket{{le=\"+Inf\"}} 4"),
            &format!("{name}_sum 999.007"),
            &format!("{name}_count 4"),
            "tandem_engine_up{model=\"a\\\"b\"} 0",
        ] {
            assert!(page.lines().any(|l| l == line), "{line} is not in\n{page}");
        }
    }

    #[test]
    fn a_request_that_nobody_ended_was_cancelled() {
        let metrics = Arc::new(Metrics::default());
        drop(Ongoing::new(Arc::clone(&metrics)));
        Ongoing::new(Arc::clone(&metrics)).end(Outcome::Completed);
        let page = metrics.render("m", None);
        for line in ["{outcome=\"completed\"} 1", "{outcome=\"cancelled\"} 1", "{outcome=\"failed\"} 0"] {
            assert!(page.contains(line), "{line}");
        }
    }
}
