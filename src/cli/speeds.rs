//! How fast a model's formats are on the devices of `quant/costs.toml`, in words and as JSON.

use crate::gemma::Weights;
use crate::quant::speed::Times;
use crate::quant::{DeviceKind, Plan};
use crate::util::units::digits3;
use anyhow::Result;
use serde_json::{Value, json};

/// Times on each device, in the order of [`DeviceKind::ALL`].
pub type Speeds = [Times; DeviceKind::ALL.len()];

/// Of what would be written.
pub fn of_plan(plan: &Plan) -> Speeds {
    DeviceKind::ALL.map(|device| device.costs().of_layout(&plan.layout))
}

/// Of a model that is there.
pub fn of_weights(weights: &Weights) -> Result<Speeds> {
    let mut times = Speeds::default();
    for (times, device) in times.iter_mut().zip(DeviceKind::ALL) {
        *times = device.costs().of_weights(weights)?;
    }
    Ok(times)
}

fn by_device(speeds: &Speeds) -> impl Iterator<Item = (DeviceKind, &Times)> {
    DeviceKind::ALL.into_iter().zip(speeds)
}

/// What the figures rest on: `modelled`, `measured`, how much of it, or the bytes alone.
fn basis(device: DeviceKind, times: &Times) -> String {
    let how = &device.costs().how;
    match times.known() {
        known if known >= 1.0 => how.clone(),
        known if known > 0.0 => {
            format!("{how} for {:.0} % of the weights, the rest by bytes only", 100.0 * known)
        }
        _ => "by bytes only".into(),
    }
}

/// A line for each device.
pub fn lines(speeds: &Speeds) -> Vec<String> {
    let line = |(device, times): (DeviceKind, &Times)| {
        let most = if times.known() < 1.0 { "at most " } else { "" };
        format!(
            "{} ({}): {most}{} tok/s, c(16) {:.2}, prompt {most}{} tok/s; {}",
            device.name(),
            device.costs().about,
            digits3(times.decode()),
            times.c16(),
            digits3(times.prefill()),
            basis(device, times)
        )
    };
    by_device(speeds).map(line).collect()
}

/// Heads of the columns of [`cells`].
pub fn heads() -> Vec<String> {
    DeviceKind::ALL
        .iter()
        .flat_map(|device| [device.name().to_owned(), "c(16)".into(), "prompt".into()])
        .collect()
}

/// Three columns for each device; figures that rest on bytes are upper bounds.
pub fn cells(speeds: &Speeds) -> Vec<String> {
    let of = |times: &Times| {
        let most = if times.known() < 1.0 { "<" } else { "" };
        let speed = |tokens: f64| format!("{most}{}", digits3(tokens));
        [speed(times.decode()), format!("{:.2}", times.c16()), speed(times.prefill())]
    };
    speeds.iter().flat_map(of).collect()
}

pub fn json(speeds: &Speeds) -> Value {
    let of = |(device, times): (DeviceKind, &Times)| {
        json!({
            "device": device.name(),
            "about": device.costs().about,
            "basis": device.costs().how,
            "known_weights": times.known(),
            "tokens_per_s": times.decode(),
            "c16": times.c16(),
            "prompt_tokens_per_s": times.prefill(),
        })
    };
    by_device(speeds).map(of).collect()
}
