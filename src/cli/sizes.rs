//! Sizes of the known models that fit, in each available format, with predicted speeds.

use crate::cli::io::table::markdown;
use crate::cli::io::ui::paragraph_in;
use crate::compute::cpu::Isa;
use crate::models::Weights;
use crate::runtime::devices::memory_speed::BUSY;
use crate::runtime::load;
use crate::runtime::model::Size;
use crate::runtime::model::shapes::{MadeUpFormats, Shape};
use crate::runtime::options::{AutoOr, RunOptions};
use crate::runtime::placement::Placement;
use crate::runtime::placement::host::Host;
use crate::runtime::placement::measure::Task;
use crate::runtime::placement::predict::Speeds;
use crate::util::units::{bytes, digits3, thousands};
use anyhow::Result;
use serde_json::{Value, json};

/// Context size for which each model is planned, in tokens.
const CONTEXT: usize = 4096;

/// Tokens a second, without drafts, at which an answer appears about as fast as people read.
const READING: f64 = 4.0;

/// Available formats, the largest first: `bf16` and `q4_0` from Google, the others from `gemma
/// quantize`.
const RECIPES: [(Shape, &[&str]); 8] = [
    (Shape::Dense31, &["bf16", "q4_0", "12gb", "10gb"]),
    (Shape::B27, &["bf16", "q4_0", "12gb", "10gb", "9gb"]),
    (Shape::Mixture26, &["bf16", "q4_0", "26b-9gb"]),
    (Shape::Dense12, &["bf16", "q4_0", "int4"]),
    (Shape::B12, &["bf16", "q4_0", "int4"]),
    (Shape::B4, &["bf16", "q4_0", "int4"]),
    (Shape::B1, &["bf16", "q4_0"]),
    (Shape::M270, &["bf16"]),
];

/// One model in one format.
#[derive(Clone, Debug)]
pub struct SizeRow {
    pub shape: Shape,
    pub recipe: &'static str,
    /// Bytes of the weights.
    pub bytes: u64,
    /// Predicted tokens a second without drafts, with a full context; `None` if the model does not
    /// fit.
    pub tokens_per_s: Option<f64>,
}

impl SizeRow {
    pub fn fits(&self) -> bool {
        self.tokens_per_s.is_some()
    }
}

/// All models in all formats, planned for one machine.
pub struct Sizes {
    pub rows: Vec<SizeRow>,
    available: Option<u64>,
    elsewhere: Option<u64>,
    speeds: Speeds,
    /// Instruction set of the processor's kernels.
    isa: Isa,
}

impl Sizes {
    /// Plans each model on `host`, with the given speeds of its memories.
    pub fn of(host: &Host<'_>, run: &RunOptions, speeds: Speeds) -> Result<Sizes> {
        let mut rows = Vec::new();
        for (shape, recipes) in RECIPES {
            for recipe in recipes {
                let weights = shape.weights(&MadeUpFormats::of_recipe(recipe))?;
                let task = task(&weights, run)?;
                let speed =
                    |p: Placement| speeds.beside(p.device.as_ref()).predict(&p).passes_per_s[0];
                let tokens_per_s = host.fitting(&task).map(speed);
                rows.push(SizeRow {
                    shape,
                    recipe,
                    bytes: Size::of(&weights)?.bytes,
                    tokens_per_s,
                });
            }
        }
        let isa = run.isa.unwrap_or_else(Isa::detect);
        Ok(Sizes { rows, available: host.available, elsewhere: host.elsewhere, speeds, isa })
    }

    /// Returns Google's files that fit, the largest model first.
    ///
    /// If a model has two formats, this is the smaller one: it is faster, and the model's name
    /// stands for it.
    fn of_google(&self) -> Vec<&SizeRow> {
        let is_smallest = |row: &&SizeRow| row.recipe == row.shape.smallest();
        self.rows.iter().filter(|row| row.fits()).filter(is_smallest).collect()
    }

    /// Returns the recommended model: the largest one that writes at least as fast as people read,
    /// or the fastest if all are slower.
    pub fn best(&self) -> Option<&SizeRow> {
        let found = self.of_google();
        let is_fast = |row: &&SizeRow| row.tokens_per_s >= Some(READING);
        found.iter().copied().find(is_fast).or(found.last().copied())
    }

    /// Describes the largest model that fits, if it is too slow to be the best.
    pub fn larger(&self) -> Option<String> {
        let row = self.of_google().into_iter().next()?;
        let is_other = self.best().is_some_and(|best| best.shape != row.shape);
        is_other.then(|| {
            let speed = digits3(row.tokens_per_s.unwrap_or_default());
            let (title, name) = (row.shape.title(), row.shape.name());
            format!("{title} fits too, but at {speed} tok/s: gemma pull {name}")
        })
    }

    /// Returns a reason to distrust the speeds, if there is one.
    pub fn doubt(&self) -> Option<&'static str> {
        (self.speeds.cpu.how == BUSY).then_some(
            "Other programs slowed the memory down while its speed was measured. \
             Repeat the command when they have ended.",
        )
    }

    pub fn json(&self) -> Value {
        let row = |row: &SizeRow| {
            json!({
                "model": row.shape.name(), "recipe": row.recipe,
                "page": row.shape.page(row.recipe), "bytes": row.bytes,
                "fits": row.fits(), "tokens_per_s_plain": row.tokens_per_s,
            })
        };
        json!({
            "context": CONTEXT, "memory": self.elsewhere, "free": self.available,
            "memory_speed": self.speeds, "isa": self.isa.to_string(),
            "best": self.best().map(|row| row.shape.name()),
            "sizes": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }

    pub fn text(&self, columns: usize) -> String {
        let mut table =
            vec![["model", "recipe", "size", "fits", "tok/s"].map(str::to_owned).to_vec()];
        for row in &self.rows {
            let speed = row.tokens_per_s.map_or("-".to_owned(), digits3);
            let fits = if row.fits() { "yes" } else { "no" };
            table.push(
                [&row.shape.title(), row.recipe, &bytes(row.bytes), fits, &speed]
                    .map(str::to_owned)
                    .to_vec(),
            );
        }
        let free = self.available.map_or("an unknown amount".to_owned(), bytes);
        let machine = self.elsewhere.map_or(String::new(), |all| {
            format!(" of {} (a part is assumed to be in use)", bytes(all))
        });
        let say = |label: &str, text: &str| paragraph_in(label, 8, text, columns);
        let plain = |text: &str| paragraph_in("", 0, text, columns);
        let mut out = plain(&format!("Which Gemma fits into {free} of free memory{machine}:"));
        out += &format!("\n{}\n", markdown(&table));
        let speed = self.speeds.cpu;
        let about = format!(
            "predicted, not measured: without drafts, with {} tokens of context, \
             at the full speed of memory (the processor's {} GB/s, {}), with {}",
            thousands(CONTEXT as u64),
            digits3(speed.gb_per_s),
            speed.origin(),
            self.isa
        );
        out += &say("tok/s", &about);
        out += &say("bf16", "Google's original checkpoint, such as google/gemma-3-27b-it");
        out += &say(
            "q4_0",
            "Google's 4-bit file, trained for it, such as google/gemma-3-27b-it-qat-q4_0-gguf",
        );
        out += &say("others", "made by gemma quantize --recipe NAME from the original checkpoint");
        out.push('\n');
        out + &match self.best() {
            Some(row) => {
                let larger = self.larger().map_or(String::new(), |text| format!(" {text}."));
                let (title, name) = (row.shape.title(), row.shape.name());
                plain(&format!("Best here: {title}. gemma plan {name} has details.{larger}"))
                    + &format!("\n  gemma pull {name}\n  gemma chat -m {name}\n")
            }
            None => plain("None of them fits: close other programs, or lower --ctx-size."),
        }
    }
}

/// Returns the task of loading a model without further options.
fn task<'a>(weights: &'a Weights, run: &RunOptions) -> Result<Task<'a>> {
    let context = match run.context {
        AutoOr::N(n) => n,
        AutoOr::Auto => CONTEXT,
    };
    let kv = load::kv_format(weights, run.kv)?;
    Ok(Task { weights, context, kv, sequences: 1, prefixes: 0, npu: false })
}
