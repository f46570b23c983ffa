//! Output of `gemma quantize`: the plan of a dry run, the recipes, the last line.

use super::QuantizeArgs;
use crate::cli::io::table::markdown;
use crate::models::{Config, Weights};
use crate::quant::prior;
use crate::quant::recipe::BUILT_IN;
use crate::quant::{Importance, Nearest, QuantPlan, QuantReport, QuantizeOptions, Recipe};
use crate::runtime::Size;
use crate::runtime::model::shapes::{MadeUpFormats, Shape};
use crate::tensor::Format;
use crate::util::units::{bytes, digits3, duration, thousands};
use anyhow::{Context, Result};
use std::time::Instant;

/// Models with sizes in the list of recipes.
const SHAPES: [Shape; 5] = [Shape::B27, Shape::B12, Shape::B4, Shape::B1, Shape::Mixture26];

/// Formats in the list.
const FORMATS: [&str; 13] = [
    "i8-row+h128",
    "i8a-row",
    "i8-g32",
    "i4-row+h128",
    "i4-g32",
    "i4-g128",
    "i2-row+h128",
    "i2-g32+h128",
    "i2-g128+h128",
    "t4-row+h128",
    "t3-row+h128",
    "t2.5-row+h128",
    "t2-row+h128",
];

/// Returns every built-in recipe with its purpose and its size for each model that it is for.
///
/// Sizes are those of a directory without the tokenizer's files, which add 0.04 GB.
pub fn list() -> Result<String> {
    let sizes = SHAPES.map(|shape| format!("{}, GB", shape.size().to_uppercase()));
    let mut table = vec![vec!["recipe".to_owned(), "bits".to_owned()]];
    table[0].extend(sizes.into_iter().chain(["error".to_owned()]));
    let mut about = String::new();
    let int4 = Recipe::load("int4")?;
    for (name, _) in BUILT_IN {
        let recipe = Recipe::load(name)?;
        let is_for = |shape: Shape| (shape == Shape::Mixture26) == recipe.is_for_mixtures();
        let plan = |shape| is_for(shape).then(|| plan_of(shape, &recipe)).transpose();
        let plans = SHAPES.into_iter().map(plan).collect::<Result<Vec<_>>>()?;
        let first = plans.iter().flatten().next().context("a recipe is for some model")?;
        let of_int4 = plan_of(SHAPES.into_iter().find(|s| is_for(*s)).unwrap_or(SHAPES[0]), &int4)?;
        let mut row = vec![name.to_owned(), format!("{:.2}", bits(first))];
        row.extend(plans.iter().map(|plan| {
            plan.as_ref().map_or("-".to_owned(), |p| digits3(p.total_bytes as f64 / 1e9))
        }));
        row.push(digits3(first.error / of_int4.error));
        table.push(row);
        about += &format!("{name:<8}{}\n", recipe.about());
    }
    let mut formats = vec![["format", "bits (27B)", "error"].map(str::to_owned).to_vec()];
    for name in FORMATS {
        let format: Format = name.parse()?;
        let whole = MadeUpFormats { weights: Some(format), ..MadeUpFormats::default() };
        let bits = Size::of(&Shape::B27.weights(&whole)?)?.bits_per_weight();
        formats.push(vec![name.to_owned(), format!("{bits:.2}"), figure(format.distortion())]);
    }
    let note = "bits: bits per weight, scales included, of the largest model that it is for.\n\
                error: expected for that model, as a multiple of int4's, which is like Q4_0.\n\
                Any other size: --target-size 9.5GB or --target-size 4.5bpw. \
                Any other choice: a TOML file, see quant/README.md.\n";
    let formats_note = "formats of the linear layers, for --linear or a TOML file; \
                        the embedding table is in i8-row+h128.\n\
                        error: relative squared error of the weights.\n";
    Ok(format!("{about}\n{}\n{note}\n{}\n{formats_note}", markdown(&table), markdown(&formats)))
}

fn plan_of(shape: Shape, recipe: &Recipe) -> Result<QuantPlan> {
    let config = Config::from_json(&shape.config())?;
    let n_layers = config.layers.len();
    let source = Weights::synthetic(config, |_| Format::BF16, 1);
    let importance = |role, layer| prior(role, layer, n_layers);
    QuantPlan::new(
        &source,
        recipe,
        &QuantizeOptions::default(),
        &Nearest::new(1),
        Importance::Relative(&importance),
    )
}

fn bits(plan: &QuantPlan) -> f64 {
    8.0 * plan.layout.bytes() as f64 / plan.layout.parameters() as f64
}

/// Returns the last line: size and quality of the result.
pub fn summary(
    report: &QuantReport,
    plan: &QuantPlan,
    options: &QuantizeArgs,
    start: Instant,
    measured: Option<f64>,
) -> String {
    let kld =
        measured.map_or(String::new(), |m| format!(", KLD {} on the calibration text", figure(m)));
    format!(
        "{} parameters at {:.2} bits: {} in {}, {}{kld}",
        thousands(report.parameters),
        report.bits_per_weight,
        bytes(plan.total_bytes),
        options.destination().display(),
        duration(start.elapsed().as_secs_f64())
    )
}

/// Formats a number with three digits, however small it is.
pub fn figure(x: f64) -> String {
    if x >= 0.01 || x == 0.0 { format!("{x:.3}") } else { format!("{x:.2e}") }
}

/// Returns the bytes by class of tensor, and the needs and expected quality of the artifact.
///
/// `int4` is the error that recipe int4 would have.
pub fn describe(
    plan: &QuantPlan,
    seconds: f64,
    threads: usize,
    calibrated: bool,
    int4: Option<f64>,
) -> String {
    let row = |cells: [String; 6]| cells.to_vec();
    let mut table =
        vec![row(["tensors", "format", "count", "codes", "scales", "bytes"].map(str::to_owned))];
    let (mut codes, mut scales) = (0, 0);
    for class in plan.layout.classes() {
        let name = class.role.map_or("norms", |r| r.name()).to_owned();
        let cells = [class.codes, class.scales, class.codes + class.scales].map(thousands);
        let [c, s, sum] = cells;
        table.push(row([name, class.target.to_string(), class.tensors.to_string(), c, s, sum]));
        (codes, scales) = (codes + class.codes, scales + class.scales);
    }
    let count = plan.layout.entries.len().to_string();
    let all = format!("{:.3} bits", bits(plan));
    table.push(row([
        "all".to_owned(),
        all,
        count,
        thousands(codes),
        thousands(scales),
        thousands(codes + scales),
    ]));
    let mut out = markdown(&table) + "\n";
    let mut line = |label: &str, value: String| out += &format!("{label:<14}{value}\n");
    let aim = plan
        .target
        .map_or(String::new(), |target| format!(", at most {} bytes", thousands(target)));
    match plan.spelling.strip_prefix("--target-size ") {
        Some(size) => line("target", size.to_owned() + &aim),
        None => line("recipe", plan.recipe.clone() + &aim),
    }
    line("codes", format!("{}; with scales {}", bytes(codes), bytes(codes + scales)));
    line(
        "directory",
        format!(
            "{} bytes ({}), headers and side files included",
            thousands(plan.total_bytes),
            bytes(plan.total_bytes)
        ),
    );
    line("disk", format!("{} while it is made", bytes(plan.total_bytes)));
    line("memory", bytes(plan.memory));
    let besides = if calibrated { "; calibration is not included" } else { "" };
    let time = duration(seconds);
    line(
        "time",
        format!("about {time} on {threads} threads, from a small sample of each format{besides}"),
    );
    if let Some(int4) = int4.filter(|int4| *int4 > 0.0) {
        let times = digits3(plan.error / int4);
        line("error", format!("{times} times that of int4, which is like Q4_0 (expected)"));
    }
    line("speed", "gemma plan -m DST predicts it once DST is made".to_owned());
    out
}
