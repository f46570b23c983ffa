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

    fn write(&self, name: &str, help: &str, out: &mut String) {
        let buckets = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut sum = 0;
        for (bound, count) in BOUNDS.iter().zip(buckets.counts) {
            sum += count;
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {sum}");
        }
        let Buckets { count, sum, .. } = &*buckets;
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}");
        let _ = writeln!(out, "{name}_sum {sum}\n{name}_count {count}");
    }
}

/// All metrics.
#[derive(Default)]
pub struct Metrics {
    requests: Mutex<BTreeMap<&'static str, u64>>,
    pub connections: Counter,
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

impl Metrics {
    /// Counts a request with this outcome.
    pub fn ended(&self, outcome: &'static str) {
        *self.requests.lock().unwrap_or_else(|e| e.into_inner()).entry(outcome).or_default() += 1;
    }

    /// Returns the page.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let name = "gemma_requests_total";
        let _ = writeln!(out, "# HELP {name} Requests by how they ended.\n# TYPE {name} counter");
        for (outcome, count) in self.requests.lock().unwrap_or_else(|e| e.into_inner()).iter() {
            let _ = writeln!(out, "{name}{{outcome=\"{outcome}\"}} {count}");
        }
        for (name, kind, help, counter) in [
            ("gemma_connections", "gauge", "Open connections.", &self.connections),
            ("gemma_queue_length", "gauge", "Texts that wait for a place.", &self.waiting),
            ("gemma_running_texts", "gauge", "Texts that are read or grow.", &self.running),
            ("gemma_prompt_tokens_total", "counter", "Tokens of prompts.", &self.prompt_tokens),
            (
                "gemma_cached_prompt_tokens_total",
                "counter",
                "Tokens of prompts that were cached.",
                &self.cached_tokens,
            ),
            ("gemma_tokens_total", "counter", "Tokens generated.", &self.tokens),
            ("gemma_passes_total", "counter", "Passes that scored tokens.", &self.passes),
            ("gemma_rounds_total", "counter", "Passes, with those for prompts.", &self.rounds),
            ("gemma_device_losses_total", "counter", "Losses of the device.", &self.device_losses),
            (
                "gemma_slow_clients_total",
                "counter",
                "Clients cut off because they did not read.",
                &self.slow_clients,
            ),
            ("gemma_pauses_total", "counter", "Texts paused for other clients.", &self.pauses),
            ("gemma_images_total", "counter", "Images of prompts.", &self.images),
            (
                "gemma_images_computed_total",
                "counter",
                "Images that were not known.",
                &self.computed_images,
            ),
        ] {
            let n = counter.get();
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {n}");
        }
        let first = "gemma_time_to_first_token_seconds";
        self.first_token.write(first, "From a request to its first token.", &mut out);
        let between = "gemma_time_between_tokens_seconds";
        self.between_tokens.write(between, "Between the tokens of a text.", &mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let metrics = Metrics::default();
        metrics.ended("stop");
        metrics.first_token.observe(0.002);
        metrics.first_token.observe_many(0.2, 3);
        metrics.first_token.observe(1e9);
        let text = metrics.text();
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
}
