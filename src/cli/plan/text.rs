//! A plan for people and for programs.

use super::Report;
use crate::cli::args::AutoOr;
use crate::cli::bench::report::markdown;
use crate::cli::placement::Placement;
use crate::cli::placement::measure::Share;
use crate::cli::ui::{bytes, digits3, paragraph, thousands};
use crate::compute::KvFormat;
use crate::vulkan::blocks;
use serde_json::{Value, json};

/// Column at which the text behind a label begins.
const INDENT: usize = 11;

/// Bytes of everything that a placement takes, whoever has them.
fn total(placement: &Placement) -> u64 {
    let layout = &placement.layout;
    [layout.gpu.need.total(), layout.cpu.need.total(), layout.npu].into_iter().fold(0, u64::saturating_add)
}

impl Report<'_> {
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
        (0..config.n_layers).filter(|layer| config.is_global(*layer)).count()
    }

    /// Tokens a second with drafts, at least and at most: as if a pass that checks drafts cost what a plain one does.
    fn drafted_per_s(&self) -> [f64; 2] {
        let [full, empty] = self.predicted.passes_per_s;
        [full * self.drafted[0], empty * self.drafted[1]]
    }

    pub(super) fn json(&self) -> Value {
        let config = self.task.weights.config();
        let side = |share: &Share, free: Option<u64>| {
            json!({
                "layers": share.layers, "bytes": share.need, "kv": share.kv, "total": share.need.total(), "free": free,
                "read_by_a_pass": share.reads,
            })
        };
        let (gpu, cpu) = (&self.placement.layout.gpu, &self.placement.layout.cpu);
        let device = self.placement.device.as_ref();
        let allocations = device.map(|d| blocks(&self.placement.layout.pieces, d).concat());
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
                "name": self.name, "layers": config.n_layers, "global_layers": self.globals(), "window": config.window,
                "bytes": self.size.bytes, "bits_per_weight": self.size.bits_per_weight(),
            },
            "context": self.task.context,
            "sequences": self.task.sequences,
            "kv": self.kv(),
            "device": self.device(),
            "device_name": device.map(|d| &d.name),
            "gpu": device.map(|d| side(gpu, Some(d.free()))),
            "cpu": side(cpu, self.available),
            "npu": self.task.npu.then(|| json!({"bytes": self.placement.layout.npu, "without": self.no_npu})),
            "allocations": allocations.map(|a| json!({"count": a.len(), "largest": a.iter().max()})),
            "fits": self.misfit.is_none(),
            "misfit": self.misfit,
            "largest_context": self.largest_context,
            "contexts": self.others.iter().map(other).collect::<Vec<_>>(),
            "predicted": {
                "ms_per_pass": self.predicted.ms_per_pass,
                "ms_per_pass_when_full": self.predicted.ms_per_pass_when_full,
                "passes_per_s": self.predicted.passes_per_s,
                "tokens_per_s_plain": self.predicted.passes_per_s,
                "tokens_per_pass_drafted": self.drafted,
                "tokens_per_s_drafted": self.drafted_per_s(),
            },
            "memory_speed": self.speeds,
        })
    }

    pub(super) fn text(&self, asked: AutoOr) -> String {
        let config = self.task.weights.config();
        let (all, global) = (config.n_layers, self.globals());
        let count = |n: usize| thousands(n as u64);
        let say = |label: &str, text: String| paragraph(label, INDENT, &text);
        let chosen = if asked == AutoOr::Auto { " (--ctx-size sets others)" } else { "" };
        let each = match self.task.sequences {
            1 => String::new(),
            n => format!(" for each of {n} texts"),
        };
        let largest = self.largest_context.map_or("none".to_owned(), count);
        let (size, bits) = (bytes(self.size.bytes), self.size.bits_per_weight());
        let mut text = say("model", format!("{}: {all} layers, {size} at {bits:.2} bits per weight", self.name));
        text += &say(
            "context",
            format!(
                "{} positions{each}{chosen}, keys and values in {}: {global} layers keep all, {} the last {} and room for a pass",
                count(self.task.context),
                self.kv(),
                all - global,
                count(config.window)
            ),
        );
        text += &format!("\n{}\n", self.table());
        text += &say("placement", self.placement.describe());
        if let Some(device) = &self.placement.device {
            let sizes = blocks(&self.placement.layout.pieces, device).concat();
            let (n, most) = (sizes.len(), bytes(sizes.iter().copied().max().unwrap_or(0)));
            let limit = bytes(device.max_allocation);
            text += &say("", format!("in {n} allocations of at most {most}, where the driver gives up to {limit} at a time"));
        }
        text += &match &self.misfit {
            None => say("fits", format!("yes; with the layers placed like this up to a context of {largest}")),
            Some(why) => say("fits", format!("no: {why}; largest context: {largest}")),
        };
        text += &match (&self.no_npu, self.placement.layout.npu) {
            (Some(why), _) => say("npu", format!("takes no part: {why}")),
            (None, 0) => String::new(),
            (None, n) => say(
                "npu",
                format!(
                    "{} of the processor's memory for its own copy of the global layers' pages, queries and results",
                    bytes(n)
                ),
            ),
        };
        text += &format!("\n{}\n", self.by_context());
        text + &say("predicted", self.prediction())
    }

    fn prediction(&self) -> String {
        let ([full, empty], [low, high]) = (self.predicted.passes_per_s, self.drafted_per_s());
        let [least, most] = self.drafted;
        let of_each = if self.task.sequences > 1 { " for each text" } else { "" };
        format!(
            "{} to {} passes a second (full and empty context) at the full speed of memory: {}. Without drafts as many tokens a second\
             {of_each}; with drafts that bring {least} to {most} tokens a pass, {} to {}, less what checking them costs. No measurement: gemma \
             bench measures.",
            digits3(full),
            digits3(empty),
            self.speeds.basis(&self.predicted),
            digits3(low),
            digits3(high),
        )
    }

    /// Bytes by part and side.
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
            std::iter::once(name.to_owned()).chain(sides.iter().map(|(_, share, _)| cell(share))).collect()
        };
        let mut table = vec![std::iter::once(String::new()).chain(sides.iter().map(|s| s.0.clone())).collect()];
        table.push(row("layers", &|s| s.layers.to_string()));
        table.push(row("weights", &|s| bytes(s.need.weights)));
        table.push(row("keys and values", &|s| bytes(s.need.kv)));
        table.push(row("  the context, global layers", &|s| bytes(s.kv.global)));
        table.push(row("  the window, other layers", &|s| bytes(s.kv.window)));
        table.push(row("  whole pages, room for a pass", &|s| bytes(s.kv.slack + s.kv.scratch)));
        table.push(row("activations", &|s| bytes(s.need.activations)));
        table.push(row("while loading", &|s| bytes(s.need.staging)));
        table.push(row("in all", &|s| bytes(s.need.total())));
        table.push(std::iter::once("free".to_owned()).chain(sides.iter().map(|s| free(s.2))).collect());
        markdown(&table)
    }

    /// Other contexts, each with the layers where they would be then, and the passes a second once it is full.
    fn by_context(&self) -> String {
        let head = ["context", "keys and values", "in all", "GPU layers", "fits", "passes/s"];
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
                cell(other.placement.as_ref().map(|p| digits3(self.speeds.predict(p).passes_per_s[0]))),
            ]);
        }
        markdown(&table)
    }
}
