//! Metrics of the server in Prometheus's text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter or gauge.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }

    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds of a histogram's buckets, in seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// A histogram of times.
#[derive(Default)]
pub struct Histogram(Mutex<Buckets>);

#[derive(Default)]
struct Buckets {
    counts: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    pub fn observe(&self, seconds: f64) {
        self.observe_many(seconds, 1);
    }

    pub fn observe_many(&self, seconds: f64, times: u64) {
        let mut buckets = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(at) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            buckets.counts[at] += times;
        }
        buckets.count += times;
        buckets.sum += seconds * times as f64;
    }

    fn write(&self, name: &str, model: &Label, out: &mut String) {
        let buckets = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let mut sum = 0;
        for (bound, count) in BOUNDS.iter().zip(buckets.counts) {
            sum += count;
            let _ = writeln!(out, "{name}_bucket{{{}le=\"{bound}\"}} {sum}", model.first());
        }
        let Buckets { count, sum, .. } = &*buckets;
        let _ = writeln!(out, "{name}_bucket{{{}le=\"+Inf\"}} {count}", model.first());
        let alone = model.alone();
        let _ = writeln!(out, "{name}_sum{alone} {sum}\n{name}_count{alone} {count}");
    }
}

/// The label of a model; empty if the server has one model.
pub struct Label(Option<String>);

impl Label {
    /// Makes the label for a model's name.
    pub fn of(name: &str) -> Label {
        let name = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        Label(Some(format!("model=\"{name}\"")))
    }

    pub fn none() -> Label {
        Label(None)
    }

    /// Returns the label in front of another one.
    fn first(&self) -> String {
        self.0.as_ref().map_or(String::new(), |label| format!("{label},"))
    }

    fn alone(&self) -> String {
        self.0.as_ref().map_or(String::new(), |label| format!("{{{label}}}"))
    }
}

/// Metrics of the server that do not belong to one model.
#[derive(Default)]
pub struct ServerMetrics {
    requests: Mutex<BTreeMap<&'static str, u64>>,
    pub connections: Counter,
}

/// Metrics of one model. They stay when the model is unloaded.
#[derive(Default)]
pub struct Metrics {
    /// 1 while the model is loaded.
    pub loaded: Counter,
    pub loads: Counter,
    pub waiting: Counter,
    pub running: Counter,
    pub prompt_tokens: Counter,
    pub cached_tokens: Counter,
    pub tokens: Counter,
    pub passes: Counter,
    pub rounds: Counter,
    pub device_losses: Counter,
    pub slow_clients: Counter,
    pub pauses: Counter,
    pub images: Counter,
    pub computed_images: Counter,
    pub first_token: Histogram,
    pub between_tokens: Histogram,
}

/// A counter's name, type and meaning, and the counter of a model.
type CounterRow = (&'static str, &'static str, &'static str, fn(&Metrics) -> &Counter);

const ROWS: [CounterRow; 14] = [
    ("gemma_model_loaded", "gauge", "Whether the model is loaded.", |m| &m.loaded),
    ("gemma_model_loads_total", "counter", "Loads of the model.", |m| &m.loads),
    ("gemma_queue_length", "gauge", "Texts that wait for a context.", |m| &m.waiting),
    ("gemma_running_texts", "gauge", "Texts that are read or generated.", |m| &m.running),
    ("gemma_prompt_tokens_total", "counter", "Tokens of prompts.", |m| &m.prompt_tokens),
    ("gemma_cached_prompt_tokens_total", "counter", "Tokens of prompts that were cached.", |m| {
        &m.cached_tokens
    }),
    ("gemma_tokens_total", "counter", "Tokens generated.", |m| &m.tokens),
    ("gemma_passes_total", "counter", "Passes that scored tokens.", |m| &m.passes),
    ("gemma_rounds_total", "counter", "Passes, including those for prompts.", |m| &m.rounds),
    ("gemma_device_losses_total", "counter", "Losses of the device.", |m| &m.device_losses),
    (
        "gemma_slow_clients_total",
        "counter",
        "Clients disconnected because they did not read.",
        |m| &m.slow_clients,
    ),
    ("gemma_pauses_total", "counter", "Texts paused for other clients.", |m| &m.pauses),
    ("gemma_images_total", "counter", "Images of prompts.", |m| &m.images),
    ("gemma_images_computed_total", "counter", "Images that were not cached.", |m| {
        &m.computed_images
    }),
];

/// A histogram's name and meaning, and the histogram of a model.
type HistogramRow = (&'static str, &'static str, fn(&Metrics) -> &Histogram);

const HISTOGRAMS: [HistogramRow; 2] = [
    ("gemma_time_to_first_token_seconds", "From a request to its first token.", |m| &m.first_token),
    ("gemma_time_between_tokens_seconds", "Between the tokens of a text.", |m| &m.between_tokens),
];

impl ServerMetrics {
    /// Counts a request with this outcome.
    pub fn ended(&self, outcome: &'static str) {
        *self.requests.lock().unwrap_or_else(|e| e.into_inner()).entry(outcome).or_default() += 1;
    }

    /// Returns the page of metrics. Each metric of models has a line for each model.
    pub fn text(&self, models: &[(Label, &Metrics)]) -> String {
        let mut out = String::new();
        let name = "gemma_requests_total";
        let _ = writeln!(out, "# HELP {name} Requests by outcome.\n# TYPE {name} counter");
        for (outcome, count) in self.requests.lock().unwrap_or_else(|e| e.into_inner()).iter() {
            let _ = writeln!(out, "{name}{{outcome=\"{outcome}\"}} {count}");
        }
        let (name, n) = ("gemma_connections", self.connections.get());
        let _ = writeln!(out, "# HELP {name} Open connections.\n# TYPE {name} gauge\n{name} {n}");
        for (name, kind, help, counter) in ROWS {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (label, metrics) in models {
                let _ = writeln!(out, "{name}{} {}", label.alone(), counter(metrics).get());
            }
        }
        for (name, help, histogram) in HISTOGRAMS {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
            models.iter().for_each(|(label, m)| histogram(m).write(name, label, &mut out));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let (server, metrics) = (ServerMetrics::default(), Metrics::default());
        server.ended("stop");
        metrics.first_token.observe(0.002);
        metrics.first_token.observe_many(0.2, 3);
        metrics.first_token.observe(1e9);
        let text = server.text(&[(Label::none(), &metrics)]);
        for line in [
            "gemma_requests_total{outcome=\"stop\"} 1",
            "gemma_time_to_first_token_seconds_bucket{le=\"0.001\"} 0",
            "gemma_time_to_first_token_seconds_bucket{le=\"0.0025\"} 1",
            "gemma_time_to_first_token_seconds_bucket{le=\"60\"} 4",
            "gemma_time_to_first_token_seconds_bucket{le=\"+Inf\"} 5",
            "gemma_time_to_first_token_seconds_count 5",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in {text}");
        }
    }

    #[test]
    fn each_model_has_its_lines_below_one_head() {
        let models = [Metrics::default(), Metrics::default()];
        models[1].tokens.add(3);
        let labels = [Label::of("a"), Label::of("b \"c\"")];
        let list: Vec<_> = labels.into_iter().zip(&models).collect();
        let text = ServerMetrics::default().text(&list);
        assert!(text.contains("\ngemma_tokens_total{model=\"a\"} 0\n"), "{text}");
        assert!(text.contains("\ngemma_tokens_total{model=\"b \\\"c\\\"\"} 3\n"), "{text}");
        assert!(text.contains("_bucket{model=\"a\",le=\"+Inf\"} 0\n"), "{text}");
        assert_eq!(text.matches("# TYPE gemma_tokens_total counter").count(), 1);
    }
}
