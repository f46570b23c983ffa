//! The log on standard error: one line per request, without its text and without keys.

use super::metrics::ServerMetrics;
use super::options::LogFormat;
use crate::cli::api::answer::RequestFigures;
use crate::cli::api::error::ApiError;
use crate::cli::api::ids::{new_id, now};
use crate::cli::api::notes::Notes;
use crate::cli::io::ui::clean;
use serde_json::json;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Limit of a reason in the log, in characters.
const LONGEST_REASON: usize = 200;
/// Limit of a method in the log, in characters.
const LONGEST_METHOD: usize = 20;

/// Status of a request if its client disconnected.
const GONE: u16 = 499;

/// Returns notes that are printed in this format.
pub fn notes(format: LogFormat) -> Notes {
    Notes::new(move |text| match format {
        LogFormat::Off => {}
        LogFormat::Text => write(&format!("note: {text}\n")),
        LogFormat::Json => write(&format!("{}\n", json!({"time": now(), "note": text}))),
    })
}

/// The log of events of models.
#[derive(Clone, Copy)]
pub struct EventLog(pub LogFormat);

impl EventLog {
    /// Writes a message about a model.
    pub fn say(self, text: &str) {
        let text = clean(text);
        match self.0 {
            LogFormat::Off => {}
            LogFormat::Text => write(&format!("{text}\n")),
            LogFormat::Json => write(&format!("{}\n", json!({"time": now(), "event": text}))),
        }
    }
}

/// Writes to standard error. A closed standard error is ignored.
fn write(line: &str) {
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
}

/// The log entry of a request. It is written and counted when it is dropped.
pub struct LogEntry {
    pub id: String,
    metrics: Arc<ServerMetrics>,
    format: LogFormat,
    method: String,
    path: String,
    begun: Instant,
    /// Status of the response.
    pub status: u16,
    /// Outcome of the request. The default is that the client disconnected.
    pub outcome: &'static str,
    pub figures: RequestFigures,
    /// Reason of the failure. It may contain names of fields and limits.
    pub reason: Option<String>,
    /// Set if the request is logged elsewhere.
    pub is_told: Arc<AtomicBool>,
}

impl LogEntry {
    pub fn new(
        metrics: &Arc<ServerMetrics>,
        format: LogFormat,
        method: &str,
        path: &str,
    ) -> LogEntry {
        LogEntry {
            id: new_id("req_"),
            metrics: metrics.clone(),
            format,
            method: clean(&method.chars().take(LONGEST_METHOD).collect::<String>()),
            path: clean(path),
            begun: Instant::now(),
            status: GONE,
            outcome: "cancelled",
            figures: RequestFigures::default(),
            reason: None,
            is_told: Arc::default(),
        }
    }

    /// Records a failure.
    pub fn fails(&mut self, error: &ApiError) {
        (self.status, self.outcome) = (error.status, "error");
        self.reason = Some(error.message.clone());
    }

    /// Returns the reason as a single line.
    fn reason(&self) -> Option<String> {
        let reason: String = self.reason.as_ref()?.chars().take(LONGEST_REASON).collect();
        Some(clean(&reason.replace('\n', " ")))
    }

    /// Returns whether the request is logged.
    ///
    /// Left out are successful requests of monitors, and requests that ask whether the model is
    /// loaded.
    fn is_news(&self) -> bool {
        let path = self.path.strip_prefix("/v1").unwrap_or(&self.path).trim_end_matches('/');
        match self.status {
            200 => !matches!(path, "/health" | "/metrics" | "" | "/version"),
            503 => path != "/health",
            _ => true,
        }
    }

    fn text(&self) -> String {
        let LogEntry { id, method, path, status, outcome, figures, begun, .. } = self;
        let mut line = format!("{id} {method} {path} {status} {outcome}");
        let seconds = begun.elapsed().as_secs_f64();
        if figures.prompt_tokens > 0 {
            let RequestFigures { prompt_tokens, cached_tokens, completion_tokens, .. } = figures;
            line += &format!(
                ": {prompt_tokens} + {completion_tokens} tokens, {cached_tokens} cached, \
                {:.2} a pass",
                each(figures.picked_tokens, figures.passes)
            );
            if let Some(first) = figures.first_token {
                line += &format!(", first after {:.0} ms", first.as_secs_f64() * 1e3);
            }
            line += &format!(", {:.1} tok/s", self.rate());
        }
        let reason = self.reason().map(|reason| format!(": {reason}")).unwrap_or_default();
        format!("{line}, {seconds:.2} s{reason}\n")
    }

    fn json(&self) -> String {
        let LogEntry { id, method, path, status, outcome, figures, begun, .. } = self;
        let line = json!({
            "time": now(),
            "id": id,
            "method": method,
            "path": path,
            "status": status,
            "outcome": outcome,
            "reason": self.reason(),
            "prompt_tokens": figures.prompt_tokens,
            "cached_tokens": figures.cached_tokens,
            "completion_tokens": figures.completion_tokens,
            "tokens_per_pass": each(figures.picked_tokens, figures.passes),
            "first_token_s": figures.first_token.map(|first| first.as_secs_f64()),
            "tokens_per_s": self.rate(),
            "seconds": begun.elapsed().as_secs_f64(),
        });
        format!("{line}\n")
    }

    fn rate(&self) -> f64 {
        let seconds = self.figures.decode_time.as_secs_f64();
        if seconds > 0.0 { self.figures.completion_tokens as f64 / seconds } else { 0.0 }
    }
}

fn each(count: u64, parts: u64) -> f64 {
    if parts == 0 { 0.0 } else { count as f64 / parts as f64 }
}

impl Drop for LogEntry {
    fn drop(&mut self) {
        if self.is_told.load(Ordering::Relaxed) {
            return;
        }
        self.metrics.ended(self.outcome);
        let line = match self.format {
            LogFormat::Off => return,
            _ if !self.is_news() => return,
            LogFormat::Text => self.text(),
            LogFormat::Json => self.json(),
        };
        write(&line);
    }
}
