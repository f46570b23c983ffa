//! The figures of a generation, as parts of the JSON result and as one line.

use crate::cli::io::record::{
    DraftDepth, DraftRecord, DraftSource, ImagesRecord, MemoryRecord, PassCost, Record,
    SamplingRecord, Timings,
};
use crate::compute::cpu::pool::Pool;
use crate::decode::Stats;
use crate::draft::{CostCurve, DraftFigures};
use crate::engine::EngineReport;
use crate::runtime::devices::memory_speed::memory_speed;
use crate::runtime::devices::processor::default_threads;
use crate::runtime::model::viewer::ImageFigures;
use crate::sampler::SamplerConfig;
use crate::util::units::{bytes, decimal, digits3};
use anyhow::Result;

pub fn timings(stats: &Stats, load_s: f64) -> Timings {
    let rate = |count: u64, rate: f64| (count > 0 && rate > 0.0).then_some(rate);
    Timings {
        load_s,
        prefill_s: stats.prefill_time.as_secs_f64(),
        decode_s: stats.decode_time.as_secs_f64(),
        ttft_s: stats.first_token.map(|t| t.as_secs_f64()),
        prefill_tps: rate(stats.prefilled, stats.prefill_rate()),
        decode_tps: rate(stats.tokens, stats.decode_rate()),
        cached_tokens: stats.cached_tokens(),
    }
}

/// Returns the figures of a prompt's images; `None` if it has none.
pub fn images(figures: ImageFigures) -> Option<ImagesRecord> {
    let ImageFigures { images, tokens, preparing, encoding, .. } = figures;
    let (prepare_s, encode_s) = (preparing.as_secs_f64(), encoding.as_secs_f64());
    (images > 0).then_some(ImagesRecord { images, tokens, prepare_s, encode_s })
}

pub fn draft(
    stats: &Stats,
    figures: &DraftFigures,
    position: usize,
    disabled_reason: Option<String>,
) -> DraftRecord {
    let source = |(name, tally): &(&'static str, crate::decode::Tally)| DraftSource {
        name: (*name).to_owned(),
        drafted: tally.drafted,
        accepted: tally.accepted,
    };
    let per_round = |tokens: f64| (figures.rounds > 0).then(|| tokens / figures.rounds as f64);
    let curve = figures.costs.clone().map(|mut costs| costs.at(position).clone());
    let sizes = |curve: CostCurve| {
        let sizes = (0..).map(|i| 1 << i).take_while(|rows| *rows <= curve.max_rows());
        sizes.map(|rows| PassCost { rows, ms: 1e3 * curve.cost(rows) as f64 }).collect()
    };
    DraftRecord {
        sources: stats.by_source.iter().map(source).collect(),
        drafted: stats.total.drafted,
        accepted: stats.total.accepted,
        passes: stats.passes,
        accepted_length: (stats.passes > 0).then(|| stats.accepted_length()),
        histogram: stats.lengths.clone(),
        depths: stats
            .by_depth
            .iter()
            .map(|t| DraftDepth { drafted: t.drafted, accepted: t.accepted })
            .collect(),
        exposed_s: stats.draft_time.as_secs_f64(),
        hidden_s: stats.hidden_time.as_secs_f64(),
        ahead: figures.ahead,
        ahead_hits: figures.hits,
        predicted_length: per_round(figures.predicted),
        realised_length: per_round(figures.realised),
        trust: per_round(1.0).map(|_| figures.trust as f64),
        // Without drafts no pass is timed, so the time of a plain pass is unknown.
        plain_tps: (figures.costs.is_some() && figures.plain_seconds > 0.0)
            .then(|| figures.plain_tokens as f64 / figures.plain_seconds),
        costs: curve.map_or(Vec::new(), sizes),
        disabled_reason,
    }
}

/// Returns the figures of drafting as a second line; `None` if nothing was drafted.
pub fn draft_line(draft: &DraftRecord, decode_tps: Option<f64>) -> Option<String> {
    let (predicted, realised) = (draft.predicted_length?, draft.realised_length?);
    let mut parts = vec![format!("drafts: {realised:.2} tok/pass, {predicted:.2} expected")];
    let percent =
        |part: u64, whole: u64| format!("{:.0}%", 100.0 * part as f64 / whole.max(1) as f64);
    let depths: Vec<String> =
        draft.depths.iter().take(8).map(|d| percent(d.accepted, d.drafted)).collect();
    if !depths.is_empty() {
        parts.push(format!("accepted by depth {}", depths.join(" ")));
    }
    parts.push(format!(
        "drafting {} ms exposed, {} hidden",
        digits3(1e3 * draft.exposed_s),
        digits3(1e3 * draft.hidden_s)
    ));
    if draft.ahead > 0 {
        parts.push(format!(
            "ahead {} of {} right",
            percent(draft.ahead_hits, draft.ahead),
            draft.ahead
        ));
    }
    if let [one, rest @ ..] = &draft.costs[..] {
        let costs: Vec<String> =
            rest.iter().map(|c| format!("c({}) {:.2}", c.rows, c.ms / one.ms)).collect();
        parts.push(format!("pass {} ms, {}", digits3(one.ms), costs.join(" ")));
    }
    if let Some((plain, gain)) = draft.plain_tps.zip(gain(draft, decode_tps)) {
        parts.push(format!("without drafts about {} tok/s: {gain:.2} x", digits3(plain)));
    }
    Some(parts.join(" · "))
}

pub fn sampling(config: &SamplerConfig, max_tokens: usize) -> SamplingRecord {
    SamplingRecord {
        temperature: decimal(config.temperature),
        top_k: config.top_k,
        top_p: decimal(config.top_p),
        min_p: decimal(config.min_p),
        repeat_penalty: decimal(config.repeat_penalty),
        repeat_last_n: config.repeat_last_n,
        presence_penalty: decimal(config.presence_penalty),
        frequency_penalty: decimal(config.frequency_penalty),
        logit_bias: config.logit_bias.iter().map(|(token, b)| (*token, decimal(*b))).collect(),
        max_tokens,
        seed: config.seed,
    }
}

/// Returns the memory of an engine.
pub fn memory(report: &EngineReport) -> MemoryRecord {
    let memory = &report.memory;
    MemoryRecord { weights: memory.weights, kv: memory.kv, activations: memory.activations }
}

/// Returns the record without its text, for `--stats json` and `--stats-file`.
pub fn json(record: &Record) -> Result<String> {
    let mut value = serde_json::to_value(record)?;
    if let Some(object) = value.as_object_mut() {
        object.shift_remove("text");
    }
    Ok(value.to_string())
}

/// Number of passes above which the gain is more than noise.
const MEASURABLE: u64 = 20;

/// Returns the speed divided by that of plain decoding, computed from the measured time of a pass
/// over one row. `None` if that time is unknown or there were too few passes.
fn gain(draft: &DraftRecord, decode_tps: Option<f64>) -> Option<f64> {
    let (now, plain) = decode_tps.zip(draft.plain_tps)?;
    (draft.passes >= MEASURABLE).then_some(now / plain)
}

/// Returns the main figures on one line of at most 80 columns.
pub fn brief(record: &Record) -> String {
    let tokens = record.usage.completion_tokens;
    let mut text = format!("{tokens} token{}", if tokens == 1 { "" } else { "s" });
    if let Some(tps) = record.timings.decode_tps {
        text += &format!(", {} tok/s", digits3(tps));
        let gain = gain(&record.draft, Some(tps));
        text += &gain.map_or(String::new(), |gain| format!(" (x {gain:.1} by drafts)"));
    }
    if let Some(ttft) = record.timings.ttft_s {
        text += &format!(" · first after {} s", digits3(ttft));
    }
    text + &format!(" · seed {}", record.sampling.seed)
}

/// Returns all figures, for `-v`, `--stats text` and chat.
pub fn line(record: &Record, stats: &Stats, threads: Option<usize>) -> Result<String> {
    let t = &record.timings;
    let mut parts = Vec::new();
    let rate =
        |tps: Option<f64>| tps.map_or(String::new(), |tps| format!(" at {} tok/s", digits3(tps)));
    let cached = Some(t.cached_tokens).filter(|n| *n > 0);
    let cached = cached.map_or(String::new(), |n| format!(" ({n} cached)"));
    parts.push(format!("prompt {}{cached}{}", record.usage.prompt_tokens, rate(t.prefill_tps)));
    if let Some(ImagesRecord { images, tokens, prepare_s, encode_s }) = &record.images {
        let plural = if *images == 1 { "" } else { "s" };
        let seconds = digits3(prepare_s + encode_s);
        parts.push(format!("{images} image{plural} of {tokens} tokens in {seconds} s"));
    }
    parts.push(format!("text {}{}", record.usage.completion_tokens, rate(t.decode_tps)));
    if let Some(length) = record.draft.accepted_length {
        let percent = |s: &DraftSource| {
            format!(
                "{} {:.0}% of {}",
                s.name,
                100.0 * s.accepted as f64 / s.drafted.max(1) as f64,
                s.drafted
            )
        };
        let sources: Vec<String> = record.draft.sources.iter().map(percent).collect();
        let sources =
            if sources.is_empty() { String::new() } else { format!(" ({})", sources.join(", ")) };
        // Share of the passes that accepted at least one token, two, three.
        let share = |d: &DraftDepth| {
            format!("{:.0}", 100.0 * d.accepted as f64 / record.draft.passes.max(1) as f64)
        };
        let depths: Vec<String> = record.draft.depths.iter().take(3).map(share).collect();
        let depths = if depths.is_empty() {
            String::new()
        } else {
            format!(", {}% that deep", depths.join("/"))
        };
        parts.push(format!("{length:.2} tok/pass{sources}{depths}"));
    }
    if let Some(ttft) = t.ttft_s {
        parts.push(format!("first after {} s", digits3(ttft)));
    }
    let m = &record.memory;
    parts.push(format!("{} + {} kv", bytes(m.weights), bytes(m.kv)));
    if stats.passes > 0 {
        let threads = threads.unwrap_or_else(default_threads);
        let roof = memory_speed(&Pool::new(threads)?).gb_per_s;
        let read = m.weights as f64 * stats.passes as f64 / stats.pass_time.as_secs_f64() / 1e9;
        parts.extend(memory_share(read, roof));
    }
    parts.push(record.device.clone());
    parts.push(record.finish_reason.name().to_owned());
    parts.push(format!("seed {}", record.sampling.seed));
    Ok(parts.join(" · "))
}

/// Returns the speed of reading weights as a share of the memory's speed.
///
/// `None` if it is above 1: then a cache held the weights and the memory was not the limit.
fn memory_share(read: f64, roof: f64) -> Option<String> {
    (read <= roof).then(|| format!("{:.0}% of memory speed", 100.0 * read / roof))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::io::record::Usage;
    use crate::draft::{Costs, Policy};
    use std::time::Duration;

    fn record(tokens: usize, decode: f64, plain: Option<f64>, seed: u64) -> Record {
        let timings =
            Timings { decode_tps: Some(decode), ttft_s: Some(0.0123), ..Timings::default() };
        let sampling = SamplingRecord { seed, ..SamplingRecord::default() };
        let draft =
            DraftRecord { plain_tps: plain, passes: tokens as u64 / 2, ..DraftRecord::default() };
        Record {
            usage: Usage { prompt_tokens: 9, completion_tokens: tokens },
            timings,
            sampling,
            draft,
            ..Record::default()
        }
    }

    #[test]
    fn what_plain_decoding_takes_is_not_known_where_nothing_is_drafted() {
        let stats = Stats {
            tokens: 40,
            passes: 40,
            decode_time: Duration::from_secs(2),
            ..Stats::default()
        };
        let mut figures = DraftFigures::default();
        figures.plain(40, 40.0);
        Policy::off().figures(&mut figures);
        assert_eq!(draft(&stats, &figures, 0, None).plain_tps, None);
        let costs = Some(Costs::default());
        assert_eq!(draft(&stats, &DraftFigures { costs, ..figures }, 0, None).plain_tps, Some(1.0));
    }

    #[test]
    fn nothing_is_read_faster_than_memory_allows() {
        assert_eq!(memory_share(10.0, 20.0).unwrap(), "50% of memory speed");
        assert_eq!(memory_share(20.1, 18.0), None);
    }

    #[test]
    fn the_brief_line_fits_a_terminal_and_claims_no_gain_that_was_not_measured() {
        let line = brief(&record(41, 667.0, Some(392.0), 9490));
        assert_eq!(line, "41 tokens, 667 tok/s (x 1.7 by drafts) · first after 0.01 s · seed 9490");
        assert_eq!(
            brief(&record(31, 667.0, None, 1)),
            "31 tokens, 667 tok/s · first after 0.01 s · seed 1"
        );
        assert!(!brief(&record(39, 667.0, Some(300.0), 1)).contains("drafts"), "too few passes");
        let few = DraftRecord {
            predicted_length: Some(2.0),
            realised_length: Some(2.0),
            ..record(39, 5.0, Some(7.3), 1).draft
        };
        assert!(!draft_line(&few, Some(5.0)).unwrap().contains("without drafts"));
        let many = DraftRecord { passes: 20, ..few };
        assert!(draft_line(&many, Some(5.0)).unwrap().contains("about 7.30 tok/s: 0.68 x"));
        assert!(
            brief(&record(41, 667.0, Some(700.0), 1)).contains("(x 1.0 by drafts)"),
            "what drafts cost is not hidden"
        );
        let longest = brief(&record(9999, 9999.4, Some(6000.0), u32::MAX as u64));
        assert!(longest.chars().count() <= 80, "{longest}");
        assert_eq!(
            brief(&Record { usage: Usage::default(), ..Record::default() }),
            "0 tokens · seed 0"
        );
    }
}
