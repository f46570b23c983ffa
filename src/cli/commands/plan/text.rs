//! The plan as text and as JSON.

use super::{DRAFTED, PlanArgs, PlanReport};
use crate::cli::io::table::markdown;
use crate::cli::io::ui::paragraph_in;
use crate::compute::KvFormat;
use crate::runtime::devices::backends::allocations;
use crate::runtime::options::AutoOr;
use crate::runtime::placement::Placement;
use crate::runtime::placement::measure::Share;
use crate::runtime::placement::process::ProcessMemory;
use crate::runtime::placement::prompt::VERIFIED;
use crate::util::units::{bytes, digits3, thousands};
use serde_json::{Value, json};

/// Column at which the text after a label begins.
const INDENT: usize = 11;

/// Returns the bytes of a placement on all devices together.
fn total(placement: &Placement) -> u64 {
    let layout = &placement.layout;
    [layout.gpu.need.total(), layout.cpu.need.total(), layout.npu]
        .into_iter()
        .fold(0, u64::saturating_add)
}

impl PlanReport<'_> {
    fn kv(&self) -> &'static str {
        match self.task.kv {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::Q8 => "q8",
        }
    }

    fn device(&self) -> String {
        self.placement.device.as_ref().map_or("cpu".into(), |d| format!("vulkan:{}", d.index))
    }

    fn globals(&self) -> usize {
        let config = self.task.weights.config();
        config.global_layers().len()
    }

    /// Returns the times of passes of [`VERIFIED`] rows in passes of one row; `None` if they would
    /// have to be timed on a GPU.
    fn cost_of_rows(&self) -> Option<[f64; VERIFIED.len()]> {
        self.reading.map(|reading| reading.cost_of_rows)
    }

    /// Returns tokens a second with drafts and a full context, low and high.
    fn drafted_per_s(&self) -> [f64; 2] {
        let costs = self.cost_of_rows().unwrap_or([1.0; VERIFIED.len()]);
        self.drafted.map(|tokens| self.predicted.passes_per_s[0] * gain(tokens, &costs))
    }

    pub(super) fn json(&self) -> Value {
        let config = self.task.weights.config();
        let side = |share: &Share, free: Option<u64>| {
            json!({
                "layers": share.layers, "bytes": share.need, "kv": share.kv,
                "total": share.need.total(), "free": free, "read_by_a_pass": share.reads,
            })
        };
        let (gpu, cpu) = (&self.placement.layout.gpu, &self.placement.layout.cpu);
        let device = self.placement.device.as_ref();
        let allocations = device.map(|d| allocations(&self.placement.layout.pieces, d));
        let other = |o: &super::Other| {
            let layout = o.placement.as_ref().map(|p| &p.layout);
            json!({
                "context": o.context,
                "fits": o.fits,
                "kv_bytes": layout.map(|l| l.gpu.need.kv + l.cpu.need.kv),
                "npu_bytes": layout.map(|l| l.npu),
                "total": o.placement.as_ref().map(total),
                "gpu_layers": layout.map(|l| l.gpu.layers),
                "passes_per_s": o.placement.as_ref().map(|p| self.speeds.predict(p).passes_per_s),
            })
        };
        json!({
            "v": 1,
            "model": {
                "name": self.name, "layers": config.layers.len(),
                "global_layers": self.globals(), "window": config.window(),
                "bytes": self.size.bytes, "bits_per_weight": self.size.bits_per_weight(),
            },
            "context": self.task.context,
            "sequences": self.task.sequences,
            "kv": self.kv(),
            "device": self.device(),
            "device_name": device.map(|d| &d.name),
            "gpu": device.map(|d| side(gpu, Some(d.free()))),
            "cpu": side(cpu, self.available),
            "process": {
                "tokenizer": self.process_memory.tokenizer, "drafts": self.process_memory.drafts,
                "program": self.process_memory.program, "peak": self.peak(),
            },
            "images": self.tower.as_ref().map(|tower| json!({
                "file": tower.name(), "bytes": tower.weight_bytes(),
                "while_reading": tower.scratch_bytes(),
            })),
            "npu": self.task.npu.then(
                || json!({"bytes": self.placement.layout.npu, "without": self.no_npu})
            ),
            "allocations": allocations.map(
                |a| json!({"count": a.len(), "largest": a.iter().max()})
            ),
            "machine_memory": self.elsewhere,
            "fits": self.misfit.is_none(),
            "next": self.commands,
            "misfit": self.misfit,
            "largest_context": self.largest_context,
            "contexts": self.others.iter().map(other).collect::<Vec<_>>(),
            "predicted": {
                "ms_per_pass": self.predicted.ms_per_pass,
                "ms_per_pass_when_full": self.predicted.ms_per_pass_when_full,
                "passes_per_s": self.predicted.passes_per_s,
                "tokens_per_s_plain": self.predicted.passes_per_s,
                "tokens_per_pass_drafted": self.has_drafts.then_some(self.drafted),
                "tokens_per_s_drafted": self.has_drafts.then(|| self.drafted_per_s()),
                "isa": self.isa.to_string(),
                "cost_of_rows": self.cost_of_rows().map(
                    |costs| VERIFIED.into_iter().zip(costs).collect::<Vec<_>>()
                ),
                "prompt": self.reading,
            },
            "memory_speed": self.speeds,
        })
    }

    pub(super) fn text(&self, options: &PlanArgs, columns: usize) -> String {
        let config = self.task.weights.config();
        let (all, global) = (config.layers.len(), self.globals());
        let count = |n: usize| thousands(n as u64);
        let say = |label: &str, text: &str| paragraph_in(label, INDENT, text, columns);
        let (size, bits) = (bytes(self.size.bytes), self.size.bits_per_weight());
        let mut text = say(
            "model",
            &format!("{}: {all} layers, {size} at {bits:.2} bits per weight", self.name),
        );
        text += &say("fits", &self.verdict());
        if self.misfit.is_none() {
            text += &say("speed", &self.speed(options));
            text += &say(
                "",
                &format!(
                    "predicted, not measured: memory read at full speed, {}",
                    self.speeds.basis(&self.predicted)
                ),
            );
            text += &say("prompt", &self.prompt());
        }
        text += &say("placement", &self.placement.describe());
        if let Some(device) = &self.placement.device {
            let sizes = allocations(&self.placement.layout.pieces, device);
            let (n, most) = (sizes.len(), bytes(sizes.iter().copied().max().unwrap_or(0)));
            let limit = bytes(device.max_allocation);
            text += &say(
                "",
                &format!(
                    "in {n} allocations of at most {most}, where the driver gives up to {limit} \
                     at a time"
                ),
            );
        }
        let chosen = if options.model.run.ctx_size == AutoOr::Auto {
            " (--ctx-size sets others)"
        } else {
            ""
        };
        let each = match self.task.sequences {
            1 => String::new(),
            n => format!(" for each of {n} texts"),
        };
        text += &say(
            "context",
            &format!(
                "{} tokens{each}{chosen}, keys and values in {}: {global} layers keep all of them, \
                 {} layers the last {} and room for a pass",
                count(self.task.context),
                self.kv(),
                all - global,
                count(config.window().unwrap_or(0))
            ),
        );
        text += &match (&self.no_npu, self.placement.layout.npu) {
            (Some(why), _) => say("npu", &format!("not used: {why}")),
            (None, 0) => String::new(),
            (None, n) => say(
                "npu",
                &format!(
                    "{} of the processor's memory for its own copy of the global layers' pages, \
                        queries and results",
                    bytes(n)
                ),
            ),
        };
        text += &say("process", &self.process());
        text += &self.images().map_or(String::new(), |what| say("images", &what));
        text += &format!("\n{}", self.table());
        if self.others.iter().any(|other| other.fits) {
            text += &format!("\n{}", self.by_context());
        }
        if self.misfit.is_none() && !self.commands.is_empty() {
            text += &format!("\n  {}\n", self.commands.join("\n  "));
        }
        text
    }

    /// Returns the memory for images, which the other figures do not include.
    fn images(&self) -> Option<String> {
        let tower = self.tower.as_ref()?;
        let (own, more) = (bytes(tower.weight_bytes()), bytes(tower.scratch_bytes()));
        let name = tower.name();
        Some(format!(
            "{own} for the tower of {name}, and up to {more} more while an image is read; \
             the figures above do not include them"
        ))
    }

    /// Returns the private memory of the process in bytes: the placement's share of the processor's
    /// memory, the tokenizer, drafts and the program.
    fn peak(&self) -> u64 {
        self.placement.layout.cpu.need.total()
            + self.placement.layout.npu
            + self.process_memory.total()
    }

    fn process(&self) -> String {
        let ProcessMemory { tokenizer, drafts, program } = self.process_memory;
        format!(
            "{} of the processor's memory in all, including {} for the tokenizer, {} for drafts, \
             {} for the program",
            bytes(self.peak()),
            bytes(tokenizer),
            bytes(drafts),
            bytes(program)
        )
    }

    /// Says whether the model fits, and with what margin.
    fn verdict(&self) -> String {
        let largest = self.largest_context.map(|n| thousands(n as u64));
        let Some(why) = &self.misfit else {
            let up_to = largest.map_or(String::new(), |n| format!(", up to {n} tokens of context"));
            return format!("yes: {}{up_to}", self.taken().join(", "));
        };
        let less = largest
            .map_or(String::new(), |n| format!("; it fits with at most {n} tokens of context"));
        format!("no: {why}{less}")
    }

    /// Returns `11.3 GB of 24.6 GB free` for each memory that the model uses.
    fn taken(&self) -> Vec<String> {
        let (gpu, cpu) = (&self.placement.layout.gpu.need, &self.placement.layout.cpu.need);
        let portion = |need: u64, free: Option<u64>| {
            format!("{} of {} free", bytes(need), free.map_or("an unknown amount".into(), bytes))
        };
        let machine = match self.elsewhere {
            Some(all) => format!(" in a machine of {}", bytes(all)),
            None => String::new(),
        };
        match &self.placement.device {
            None => vec![portion(total(&self.placement), self.available) + &machine],
            // Processor and device share one memory.
            Some(d) if d.is_integrated || d.is_cpu => {
                let free = self
                    .available
                    .map(|available| available.min(d.free().saturating_add(cpu.total())));
                vec![portion(total(&self.placement), free)]
            }
            Some(d) => {
                let host = cpu.total().saturating_add(self.placement.layout.npu);
                let on_host = (host > 0)
                    .then(|| format!("{} for the processor", portion(host, self.available)));
                std::iter::once(format!("{} on {}", portion(gpu.total(), Some(d.free())), d.name))
                    .chain(on_host)
                    .collect()
            }
        }
    }

    fn speed(&self, options: &PlanArgs) -> String {
        let (full, [low, high]) = (self.predicted.passes_per_s[0], self.drafted_per_s());
        let plain = about(full);
        let of_each = if self.task.sequences > 1 { " for each text" } else { "" };
        if !self.has_drafts {
            return format!(
                "about {plain} tok/s plain{of_each}; more with its assistant as a draft model, \
                 but its gain was never measured (--tokens-per-pass computes with your figures)"
            );
        }
        let [least, most] = self.drafted;
        let cost = match self.cost_of_rows() {
            Some(costs) => format!(
                "since a pass of 4 rows takes {} times as long as one of 1 row here ({})",
                digits3(costs[2]),
                self.isa
            ),
            None => "less the cost of verifying them".to_owned(),
        };
        let drafts = match options.tokens_per_pass == DRAFTED {
            true => "if yours are like our test texts".to_owned(),
            false if least == most => format!("if a pass yields {least} tokens"),
            false => format!("if a pass yields {least} to {most} tokens"),
        };
        let with_drafts = match about(low) == about(high) {
            true => about(low),
            false => format!("{} to {}", about(low), about(high)),
        };
        format!(
            "about {plain} tok/s plain{of_each}; {with_drafts} with drafts, {drafts}, {cost}; \
             all with a full context"
        )
    }

    fn prompt(&self) -> String {
        let Some(reading) = self.reading else {
            return "not predicted for a GPU unless it is timed: add --measure".into();
        };
        let here = match self.elsewhere {
            Some(_) => format!("from the speed of this machine's processor, {}", self.isa),
            None => format!("from the speed of multiplications here with {}", self.isa),
        };
        format!(
            "about {} tok/s: a document of {} tokens takes about {} to read (predicted {here})",
            about(reading.tokens_per_s),
            thousands(reading.tokens as u64),
            duration(reading.seconds)
        )
    }

    /// Returns a table of bytes by part and device.
    fn table(&self) -> String {
        let (gpu, cpu) = (&self.placement.layout.gpu, &self.placement.layout.cpu);
        let free = |bytes_free: Option<u64>| bytes_free.map_or("unknown".to_owned(), bytes);
        let mut sides = Vec::new();
        if let Some(device) = &self.placement.device {
            sides.push((self.device(), gpu, Some(device.free())));
        }
        if cpu.layers > 0 {
            sides.push(("cpu".to_owned(), cpu, self.available));
        }
        let row = |name: &str, cell: &dyn Fn(&Share) -> String| -> Vec<String> {
            std::iter::once(name.to_owned())
                .chain(sides.iter().map(|(_, share, _)| cell(share)))
                .collect()
        };
        let mut table =
            vec![std::iter::once(String::new()).chain(sides.iter().map(|s| s.0.clone())).collect()];
        table.push(row("layers", &|s| s.layers.to_string()));
        table.push(row("weights", &|s| bytes(s.need.weights)));
        table.push(row("keys and values", &|s| bytes(s.need.kv)));
        table.push(row("  the context, global layers", &|s| bytes(s.kv.global)));
        table.push(row("  the window, other layers", &|s| bytes(s.kv.window)));
        if self.task.prefixes > 0 {
            table.push(row("  prefix cache", &|s| bytes(s.kv.prefixes)));
        }
        table.push(row("  whole pages, room for a pass", &|s| bytes(s.kv.slack + s.kv.scratch)));
        table.push(row("activations", &|s| bytes(s.need.activations)));
        table.push(row("while loading", &|s| bytes(s.need.staging)));
        table.push(row("in all", &|s| bytes(s.need.total())));
        table.push(
            std::iter::once("free".to_owned()).chain(sides.iter().map(|s| free(s.2))).collect(),
        );
        markdown(&table)
    }

    /// Returns a table of other contexts: where the layers would be, and the tokens a second
    /// without drafts when the context is full.
    fn by_context(&self) -> String {
        let head = ["context", "keys and values", "in all", "GPU layers", "fits", "tok/s"];
        let mut table = vec![head.map(str::to_owned).to_vec()];
        for other in &self.others {
            let layout = other.placement.as_ref().map(|p| &p.layout);
            let cell = |text: Option<String>| text.unwrap_or_else(|| "-".into());
            table.push(vec![
                thousands(other.context as u64),
                cell(layout.map(|l| bytes(l.gpu.need.kv + l.cpu.need.kv))),
                cell(other.placement.as_ref().map(|p| bytes(total(p)))),
                cell(layout.map(|l| l.gpu.layers.to_string())),
                if other.fits { "yes" } else { "no" }.into(),
                cell(
                    other
                        .placement
                        .as_ref()
                        .filter(|_| other.fits)
                        .map(|p| digits3(self.speeds.predict(p).passes_per_s[0])),
                ),
            ]);
        }
        markdown(&table)
    }
}

/// Rounds a prediction to two digits.
fn about(x: f64) -> String {
    match x {
        x if x < 10.0 => format!("{x:.1}"),
        x if x < 100.0 => format!("{x:.0}"),
        x => format!("{:.0}", (x / 10.0).round() * 10.0),
    }
}

/// Formats a duration: `40 seconds`, `3 minutes`, `2.5 hours`.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => "1 second".into(),
        s if s < 90.0 => format!("{s:.0} seconds"),
        s if s < 90.0 * 60.0 => format!("{:.0} minutes", s / 60.0),
        s => format!("{:.1} hours", s / 3600.0),
    }
}

/// Rows of the passes that measured tokens per pass: a tree of 15 nodes and the last token.
const KNOWN_ROWS: i32 = super::MOST_TOKENS as i32;

/// Returns how many times as fast a text becomes by drafts.
///
/// `tokens` is the measured number of tokens per pass of [`KNOWN_ROWS`] rows, and `costs` are the
/// times of passes of [`VERIFIED`] rows in plain passes. All drafts are assumed to be accepted with
/// the same probability. The number of rows is the best one, as the policy would choose it.
fn gain(tokens: f64, costs: &[f64; VERIFIED.len()]) -> f64 {
    // Tokens of `rows` rows: 1 + p + p^2 + ...
    let length = |p: f64, rows: i32| (0..rows).map(|row| p.powi(row)).sum::<f64>();
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        if length(middle, KNOWN_ROWS) < tokens {
            low = middle;
        } else {
            high = middle;
        }
    }
    let speed = |(rows, cost): (usize, &f64)| length(low, rows as i32) / cost;
    VERIFIED.into_iter().zip(costs).map(speed).fold(1.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_are_rounded_as_people_say_them() {
        assert_eq!([3.87, 15.6, 137.4, 2204.0].map(about), ["3.9", "16", "140", "2200"]);
        assert_eq!(
            [0.2, 45.4, 200.0, 9000.0].map(duration),
            ["1 second", "45 seconds", "3 minutes", "2.5 hours"]
        );
    }

    #[test]
    fn drafts_gain_what_their_rows_leave() {
        for tokens in [1.0, 1.8, 3.9] {
            assert!((gain(tokens, &[1.0; 5]) - tokens).abs() < 1e-6, "free rows gain all tokens");
            let dear = [1.0, 2.0, 4.0, 8.0, 16.0];
            assert!(gain(tokens, &dear) == 1.0, "rows that cost as much as passes gain nothing");
        }
        // The probabilities are 0.444 and 0.745: 2 rows yield 1.444 tokens, and 4 yield 2.713.
        let [low, high] = [1.8, 3.9].map(|tokens| gain(tokens, &[1.0, 1.25, 1.75, 2.75, 4.75]));
        assert!(
            (low - 1.444 / 1.25).abs() < 1e-3 && (high - 2.713 / 1.75).abs() < 2e-2,
            "{low} {high}"
        );
    }
}
