//! Counters and histograms, as Prometheus reads them.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tandem_runtime::{Load, LoadState, Usage};

/// Upper bounds of the histograms' buckets, in seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// What the server has seen.
#[derive(Debug)]
pub(crate) struct Metrics {
    outcomes: [AtomicU64; Outcome::ALL.len()],
    engines: Vec<Arc<Series>>,
}

/// What one engine of one model has done.
#[derive(Debug)]
pub(crate) struct Series {
    model: String,
    engine: String,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    /// From the arrival of a request to the first token of a choice.
    pub ttft: Histogram,
    /// From one token of a choice to the next, as they could be sent.
    pub inter_token: Histogram,
    /// Requests that came here, by the kind of the reason.
    routes: Mutex<BTreeMap<&'static str, u64>>,
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
    metrics: Arc<Metrics>,
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
    /// For engines by the names of their models and their own.
    pub fn new<'a>(engines: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let series = |(model, engine)| Arc::new(Series::new(model, engine));
        Self { outcomes: Default::default(), engines: engines.into_iter().map(series).collect() }
    }

    /// Those of one engine. One that was not named in the beginning is counted, but not shown.
    pub fn engine(&self, model: &str, engine: &str) -> Arc<Series> {
        let found = self.engines.iter().find(|series| series.model == model && series.engine == engine);
        found.map_or_else(|| Arc::new(Series::new(model, engine)), Arc::clone)
    }

    /// The page that Prometheus scrapes; `load` says how an engine of a model is.
    pub fn render(&self, load: impl Fn(&str, &str) -> Option<Load>) -> String {
        let mut page = Page(String::new());
        page.head("tandem_requests_total", "counter", "Requests to generate, by how they ended.");
        for outcome in Outcome::ALL {
            let value = self.outcomes[outcome as usize].load(Ordering::Relaxed);
            page.line("tandem_requests_total", &format!("outcome=\"{}\"", outcome.name()), value);
        }
        page.head("tandem_routes_total", "counter", "Requests that an engine was given, by why.");
        for series in &self.engines {
            for (kind, count) in series.routes.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                page.line("tandem_routes_total", &format!("{},reason=\"{kind}\"", series.labels()), count);
            }
        }
        type Counter = fn(&Series) -> &AtomicU64;
        let counters: [(_, _, Counter); 3] = [
            ("tandem_prompt_tokens_total", "Tokens of prompts.", |s| &s.prompt_tokens),
            ("tandem_cached_tokens_total", "Tokens of prompts not computed again.", |s| &s.cached_tokens),
            ("tandem_generated_tokens_total", "Tokens generated.", |s| &s.generated_tokens),
        ];
        for (name, help, counter) in counters {
            page.head(name, "counter", help);
            for series in &self.engines {
                page.line(name, &series.labels(), counter(series).load(Ordering::Relaxed));
            }
        }
        type Which = fn(&Series) -> &Histogram;
        let histograms: [(_, _, Which); 2] = [
            ("tandem_time_to_first_token_seconds", "From a request's arrival to its first token.", |s| {
                &s.ttft
            }),
            ("tandem_inter_token_seconds", "Between two tokens of an answer.", |s| &s.inter_token),
        ];
        for (name, help, histogram) in histograms {
            page.head(name, "histogram", help);
            for series in &self.engines {
                histogram(series).render(name, &series.labels(), &mut page);
            }
        }
        let loads = self.engines.iter().filter_map(|s| Some((s.labels(), load(&s.model, &s.engine)?)));
        page.loads(&loads.collect::<Vec<_>>());
        page.0
    }
}

impl Series {
    fn new(model: &str, engine: &str) -> Self {
        Self {
            model: model.to_owned(),
            engine: engine.to_owned(),
            prompt_tokens: AtomicU64::default(),
            cached_tokens: AtomicU64::default(),
            generated_tokens: AtomicU64::default(),
            ttft: Histogram::default(),
            inter_token: Histogram::default(),
            routes: Mutex::default(),
        }
    }

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

    /// Counts a request that came here.
    pub fn routed(&self, kind: &'static str) {
        *self.routes.lock().unwrap_or_else(PoisonError::into_inner).entry(kind).or_default() += 1;
    }

    fn labels(&self) -> String {
        format!("model=\"{}\",engine=\"{}\"", escape(&self.model), escape(&self.engine))
    }
}

/// A label's value as the format wants it.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
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

    fn render(&self, name: &str, labels: &str, page: &mut Page) {
        let mut count = 0;
        let bounds = BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bucket, bound) in self.buckets.iter().zip(bounds) {
            count += bucket.load(Ordering::Relaxed);
            page.line(&format!("{name}_bucket"), &format!("{labels},le=\"{bound}\""), count);
        }
        page.line(&format!("{name}_sum"), labels, self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9);
        page.line(&format!("{name}_count"), labels, count);
    }
}

struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = writeln!(self.0, "{name}{{{labels}}} {value}");
    }

    /// How engines are. Those that are not ready hold nothing.
    fn loads(&mut self, loads: &[(String, Load)]) {
        type Figure = fn(&Load) -> u64;
        let figures: [(_, _, _, Figure); 10] = [
            ("tandem_engine_up", "gauge", "Whether the engine answers.", |load| {
                u64::from(matches!(load.state, LoadState::Ready(_)))
            }),
            ("tandem_requests_running", "gauge", "Sequences in the batch.", |load| load.running as u64),
            ("tandem_requests_waiting", "gauge", "Sequences that wait to join it.", |load| {
                load.waiting as u64
            }),
            ("tandem_engine_restarts_total", "counter", "Times the engine was rebuilt.", |load| {
                load.restarts
            }),
            (
                "tandem_preemptions_total",
                "counter",
                "Requests that gave up their KV and waited again.",
                |load| load.preempted,
            ),
            ("tandem_prefix_tokens", "gauge", "Tokens kept for prompts that begin alike.", |load| {
                load.prefix_tokens as u64
            }),
            ("tandem_kv_used_bytes", "gauge", "KV that sequences hold.", |load| {
                load.memory.kv_exclusive + load.memory.kv_shared
            }),
            ("tandem_kv_limit_bytes", "gauge", "Most KV the engine will hold.", |load| load.memory.kv_limit),
            ("tandem_weights_bytes", "gauge", "Weights as the engine holds them.", |load| {
                load.memory.weights
            }),
            ("tandem_scratch_bytes", "gauge", "Working memory of the engine.", |load| load.memory.scratch),
        ];
        for (name, kind, help, figure) in figures {
            self.head(name, kind, help);
            for (labels, load) in loads {
                self.line(name, labels, figure(load));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn buckets_are_cumulative_and_end_with_the_count() {
        let metrics = Metrics::new([("a\"b", "cpu"), ("c", "cpu")]);
        let series = metrics.engine("a\"b", "cpu");
        for milliseconds in [1, 3, 3, 999_000] {
            series.ttft.observe(Duration::from_millis(milliseconds));
        }
        series.routed("only");
        series.routed("only");
        let page = metrics.render(|_, _| None);
        let (name, labels) = ("tandem_time_to_first_token_seconds", "model=\"a\\\"b\",engine=\"cpu\"");
        for line in [
            &format!("{name}_bucket{{{labels},le=\"0.001\"}} 1"),
            &format!("{name}_bucket{{{labels},le=\"0.005\"}} 3"),
            &format!("{name}_bucket{{{labels},le=\"60\"}} 3"),
            &format!("{name}_bucket{{{labels},le=\"+Inf\"}} 4"),
            &format!("{name}_sum{{{labels}}} 999.007"),
            &format!("{name}_count{{{labels}}} 4"),
            &format!("{name}_count{{model=\"c\",engine=\"cpu\"}} 0"),
            &format!("tandem_routes_total{{{labels},reason=\"only\"}} 2"),
        ] {
            assert!(page.lines().any(|l| l == line), "{line} is not in\n{page}");
        }
    }

    #[test]
    fn a_request_that_nobody_ended_was_cancelled() {
        let metrics = Arc::new(Metrics::new([]));
        drop(Ongoing::new(Arc::clone(&metrics)));
        Ongoing::new(Arc::clone(&metrics)).end(Outcome::Completed);
        let page = metrics.render(|_, _| None);
        for line in ["{outcome=\"completed\"} 1", "{outcome=\"cancelled\"} 1", "{outcome=\"failed\"} 0"] {
            assert!(page.contains(line), "{line}");
        }
    }
}
