//! How long a model takes to load, against what its files and its device allow.

use super::measure::Figure;
use super::report::Row;
use crate::compute::Loading;
use crate::engine::Engine;
use crate::models::Weights;
use crate::util::units::digits3;
use anyhow::{Context, Result};
use std::time::Instant;

/// A load that took `seconds`, beside its bound: the longer of reading the files as the system has
/// them now, by all threads into memory, and of sending the weights to the device.
pub fn row(weights: &Weights, engine: &mut dyn Engine, seconds: f64) -> Result<Row> {
    let checkpoint = weights.checkpoint().context("a made-up model is not loaded from anywhere")?;
    let start = Instant::now();
    let bytes = checkpoint.read_through()?;
    let reading = start.elapsed().as_secs_f64();
    let on_device = engine.report().memory.weights;
    let sending = engine
        .device()
        .and_then(|e| e.upload_bandwidth())
        .map_or(0.0, |speed| on_device as f64 / speed);
    let loading = engine.report().executor.and_then(|executor| executor.loading);
    Ok(Row {
        name: "load".into(),
        unit: "ms".into(),
        figure: Figure::of(vec![1e3 * seconds]),
        note: note(seconds, bytes, reading, sending)
            + &loading.map_or_else(String::new, |l| parts(&l)),
        pass: None,
    })
}

fn note(seconds: f64, bytes: u64, reading: f64, sending: f64) -> String {
    let bound = reading.max(sending);
    let files = format!(
        "reading the {} GB of files {} ms",
        digits3(bytes as f64 / 1e9),
        digits3(1e3 * reading)
    );
    let device = if sending > 0.0 {
        format!(", sending to the device {} ms", digits3(1e3 * sending))
    } else {
        String::new()
    };
    format!("{} times the bound: {files}{device}", digits3(seconds / bound))
}

/// Where the time went.
fn parts(l: &Loading) -> String {
    let [opening, moving, preparing, reading, waiting] =
        [l.opening, l.moving, l.preparing, l.reading, l.waiting].map(|s| digits3(1e3 * s));
    format!(
        "; opening the device {opening} ms, moving {moving} ms: preparing meanwhile {preparing} \
            ms, each thread reading {reading} ms and waiting for the device {waiting} ms"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_reading_and_sending_bounds_a_load() {
        let told = note(3.0, 2_000_000_000, 2.0, 0.5);
        assert!(
            told.starts_with("1.50 times the bound: reading the 2.00 GB of files 2000 ms, sending"),
            "{told}"
        );
        assert!(note(3.0, 2_000_000_000, 0.5, 2.0).starts_with("1.50 times"));
        assert!(!note(3.0, 2_000_000_000, 2.0, 0.0).contains("device"));
    }
}
