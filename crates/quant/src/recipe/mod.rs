//! Recipes: TOML files with the format of each tensor. The first line with a pattern that matches a
//! tensor decides.
//!
//! ```toml
//! about = "one line for people"
//! target-size = "9GB"              # only where a line leaves a choice
//! [formats]
//! "norms" = "as-is"                # as the source stores them
//! "embed_tokens" = "i8-row+h128"
//! "linears" = ["t2-row+h128", "t3-row+h128"]   # whichever serves the size best
//! ```
//! [`Pattern`] explains patterns. Unknown keys and formats are refused with their line number, and
//! so are lines that decide nothing.

mod pattern;
mod size;

pub use size::{Aim, nearest_to, parse_size};

use anyhow::{Context, Result};
use gemma_base::error::Fault;
use gemma_base::tensor::Format;
use gemma_base::util::files::read_regular_text;
use gemma_model::models::{Role, TensorSpec};
use pattern::Pattern;
use sha2::{Digest, Sha256};
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Names and texts of the built-in recipes.
pub const BUILT_IN: [(&str, &str); 6] = [
    ("seed", include_str!("../../../../quant/seed.toml")),
    ("int4", include_str!("../../../../quant/int4.toml")),
    ("9gb", include_str!("../../../../quant/9gb.toml")),
    ("10gb", include_str!("../../../../quant/10gb.toml")),
    ("12gb", include_str!("../../../../quant/12gb.toml")),
    ("26b-9gb", include_str!("../../../../quant/26b-9gb.toml")),
];

/// Limit for the bytes of a recipe, because each line is compared with each tensor.
const LONGEST: u64 = 64 << 10;

/// The built-in recipe that is used if only a size is given.
pub const FOR_SIZES: &str = "10gb";

/// The formats that a line allows for a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum FormatChoice {
    /// A copy in the source's data type.
    AsIs,
    One(Format),
    /// Two or more formats, from which the allocator chooses.
    Any(Vec<Format>),
}

#[derive(Clone, Debug)]
struct RecipeRule {
    line: usize,
    text: String,
    pattern: Pattern,
    choice: FormatChoice,
}

/// A parsed recipe. [`Recipe::resolve`] checks its lines against a model.
#[derive(Clone, Debug)]
pub struct Recipe {
    name: String,
    text: String,
    rules: Vec<RecipeRule>,
    target: Option<Aim>,
    /// The options of the command line that choose it, see [`Recipe::spelling`].
    spelling: String,
    about: String,
}

impl Recipe {
    /// Loads a built-in recipe or a file.
    pub fn load(name: &str) -> Result<Recipe> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(n, _)| *n == name) {
            return Recipe::parse(name, text);
        }
        let text = read_regular_text(Path::new(name), LONGEST).with_context(|| {
            let known = BUILT_IN.map(|(n, _)| n).join(", ");
            let help = match nearest_to(name) {
                Some(nearest) => {
                    format!("{name} is a name of llama.cpp's; the nearest here is {nearest}")
                }
                None => format!(
                    "give one of {known} (gemma quantize --list), or the path of a TOML file"
                ),
            };
            Fault::model(format!("cannot read the recipe {name}")).help(help)
        })?;
        Recipe::parse(name, &text)
    }

    /// Returns a recipe with one format for all linear layers and one for the embedding table and
    /// the head. Norms are copied.
    pub fn inline(linear: Format, embedding: Format) -> Recipe {
        let tables = [Role::Embed, Role::Head].map(|r| r.short_name(0)).join(",");
        let lines = [
            "[formats]".to_owned(),
            "norms = \"as-is\"".to_owned(),
            format!("\"{{{tables}}}\" = \"{embedding}\""),
            format!("linears = \"{linear}\"\n"),
        ];
        let text = lines.join("\n");
        let recipe =
            Recipe::parse(&format!("{linear}, {embedding}"), &text).expect("a text of our own");
        Recipe { spelling: format!("--linear {linear} --embedding {embedding}"), ..recipe }
    }

    /// Parses a recipe. `name` appears in errors and in the report.
    pub fn parse(name: &str, text: &str) -> Result<Recipe> {
        let line_at = |at: usize| 1 + text[..at.min(text.len())].matches('\n').count();
        let bad = |at: usize, what: String| -> anyhow::Error {
            let fault = Fault::model(format!("recipe {name}, line {}: {what}", line_at(at)));
            fault.help("quant/README.md describes recipes").into()
        };
        let table = DeTable::parse(text)
            .map_err(|e| bad(e.span().map_or(0, |s| s.start), e.message().to_owned()))?;
        let spelling = format!("--recipe {name}");
        let (name, text) = (name.to_owned(), text.to_owned());
        let mut recipe =
            Recipe { name, text, rules: Vec::new(), target: None, spelling, about: String::new() };
        for (key, value) in table.get_ref() {
            let at = value.span().start;
            match (key.get_ref().as_ref(), value.get_ref()) {
                ("about", DeValue::String(about)) => recipe.about = about.to_string(),
                ("target-size", DeValue::String(size)) => {
                    recipe.target =
                        Some(size.parse().map_err(|e: anyhow::Error| bad(at, format!("{e:#}")))?);
                }
                ("formats", DeValue::Table(lines)) => {
                    for (pattern, choice) in lines {
                        let parsed = parse_rule(pattern.get_ref(), choice)
                            .map_err(|e| bad(pattern.span().start, format!("{e:#}")));
                        let (pattern_of, choice) = parsed?;
                        let (line, text) = (pattern.span().start, pattern.get_ref().to_string());
                        recipe.rules.push(RecipeRule { line, text, pattern: pattern_of, choice });
                    }
                }
                (key @ ("about" | "target-size" | "formats"), other) => {
                    return Err(bad(at, format!("`{key}` cannot be a {}", other.type_str())));
                }
                (other, _) => return Err(bad(key.span().start, format!("unknown key `{other}`"))),
            }
        }
        // The parser sorts the table by name, but the order in the file decides.
        recipe.rules.sort_by_key(|r| r.line);
        recipe.rules.iter_mut().for_each(|r| r.line = line_at(r.line));
        if recipe.rules.is_empty() {
            return Err(bad(0, "no [formats]".into()));
        }
        if recipe.target.is_some() && !recipe.leaves_a_choice() {
            let what = "`target-size` needs a line with several formats to choose from";
            return Err(bad(0, what.into()));
        }
        Ok(recipe)
    }

    /// Returns the recipe with another target size. Refuses a recipe in which no line has several
    /// formats.
    pub fn with_target(mut self, aim: impl Into<Aim>) -> Result<Recipe> {
        let aim = aim.into();
        if !self.leaves_a_choice() {
            let what = format!(
                "recipe {} has no line with several formats, so it has only one size",
                self.name
            );
            return Err(Fault::usage(what)
                .help("give --target-size alone, or with 9gb, 10gb or 12gb")
                .into());
        }
        self.target = Some(aim);
        let size = format!("--target-size {}", aim.to_string().replace(' ', ""));
        self.spelling =
            if self.name == FOR_SIZES { size } else { format!("{} {size}", self.spelling) };
        Ok(self)
    }

    fn leaves_a_choice(&self) -> bool {
        self.rules.iter().any(|r| matches!(r.choice, FormatChoice::Any(_)))
    }

    /// Returns the options of `gemma quantize` that choose the recipe.
    pub fn spelling(&self) -> String {
        self.spelling.clone()
    }

    /// Returns the description of the recipe; empty if there is none.
    pub fn about(&self) -> &str {
        &self.about
    }

    /// Returns whether the recipe is for mixtures of experts: a line matches only tensors of
    /// experts in the first layer.
    pub fn is_for_mixtures(&self) -> bool {
        self.rules.iter().any(|rule| {
            let mut roles = Role::ALL.into_iter().filter(|role| rule.pattern.matches(*role, 0));
            roles.next().is_some_and(Role::is_of_experts) && roles.all(Role::is_of_experts)
        })
    }

    /// Returns the built-in name, or the file name without its directory.
    pub fn name(&self) -> &str {
        Path::new(&self.name).file_name().and_then(|n| n.to_str()).unwrap_or(&self.name)
    }

    /// Returns the target size of the whole artifact, if the recipe has one.
    pub fn target(&self) -> Option<Aim> {
        self.target
    }

    /// Returns the SHA-256 of the text.
    pub fn sha256(&self) -> String {
        gemma_base::util::hex(Sha256::digest(self.text.as_bytes()))
    }

    /// Returns the choice for each tensor. Refuses tensors that no line matches, and lines that
    /// decide nothing.
    pub fn resolve(&self, tensors: &[TensorSpec]) -> Result<Vec<&FormatChoice>> {
        if self.is_for_mixtures() && !tensors.iter().any(|tensor| tensor.role.is_of_experts()) {
            let what = format!(
                "recipe {} is for mixtures of experts, but the model is not one",
                self.name
            );
            return Err(Fault::model(what).help("gemma quantize --list shows the others").into());
        }
        let help = "quant/README.md describes recipes";
        let (mut out, mut used) =
            (Vec::with_capacity(tensors.len()), vec![false; self.rules.len()]);
        for &TensorSpec { role, layer, .. } in tensors {
            let Some(at) = self.rules.iter().position(|r| r.pattern.matches(role, layer)) else {
                let what =
                    format!("recipe {}: no line matches `{}`", self.name, role.short_name(layer));
                return Err(Fault::model(what).help(help).into());
            };
            used[at] = true;
            out.push(&self.rules[at].choice);
        }
        if let Some((rule, _)) = self.rules.iter().zip(used).find(|(_, used)| !used) {
            let hit = tensors.iter().any(|t| rule.pattern.matches(t.role, t.layer));
            let why = if hit {
                "decides nothing: lines above match all its tensors"
            } else {
                "matches no tensor of this model"
            };
            let what = format!("recipe {}, line {}: `{}` {why}", self.name, rule.line, rule.text);
            return Err(Fault::model(what).help("remove or correct the line").into());
        }
        if self.target.is_none() && out.iter().any(|c| matches!(c, FormatChoice::Any(_))) {
            let what =
                format!("recipe {} has lines with several formats, but no target size", self.name);
            return Err(Fault::usage(what).help("give --target-size, e.g. 9.5GB").into());
        }
        Ok(out)
    }
}

fn parse_rule(pattern: &str, choice: &Spanned<DeValue<'_>>) -> Result<(Pattern, FormatChoice)> {
    let parsed = Pattern::parse(pattern).with_context(|| format!("`{pattern}`"))?;
    let choice = match choice.get_ref() {
        DeValue::String(text) if text == "as-is" => FormatChoice::AsIs,
        DeValue::String(text) => FormatChoice::One(Format::parse_written(text)?),
        DeValue::Array(list) => {
            let mut formats = Vec::new();
            for item in list.iter() {
                let text = item.get_ref().as_str().with_context(|| {
                    format!("`{pattern}`: a list of formats must have only strings")
                })?;
                let format = Format::parse_written(text)?;
                anyhow::ensure!(!formats.contains(&format), "`{pattern}` lists {format} twice");
                formats.push(format);
            }
            match formats[..] {
                [] => anyhow::bail!("`{pattern}` has no format to choose from"),
                [one] => FormatChoice::One(one),
                _ => FormatChoice::Any(formats),
            }
        }
        other => anyhow::bail!(
            "`{pattern}` cannot be a {}: give a format, or a list to choose from",
            other.type_str()
        ),
    };
    Ok((parsed, choice))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma_base::error::fault_of;

    /// Tensors of a dense model, or of a mixture of experts.
    fn tensors_of(layers: usize, has_experts: bool) -> Vec<TensorSpec> {
        let layers = |role: Role| if role.is_layer() { layers } else { 1 };
        let roles = Role::ALL.into_iter().filter(|role| {
            use Role::*;
            let is_apart = matches!(role, ExpertGate | ExpertUp);
            let is_left = matches!(role, Head | PreProjection | PostProjection) || is_apart;
            let is_of_mixture = role.is_of_experts() || *role == Router;
            !is_left && (has_experts || !is_of_mixture)
        });
        roles
            .flat_map(|role| {
                let spec = TensorSpec { role, layer: 0, rows: 1, cols: 1, stack: 1 };
                (0..layers(role)).map(move |layer| TensorSpec { layer, ..spec })
            })
            .collect()
    }

    fn tensors(layers: usize) -> Vec<TensorSpec> {
        tensors_of(layers, false)
    }

    fn refusal(text: &str) -> String {
        let error =
            Recipe::parse("r", text).and_then(|r| r.resolve(&tensors(4)).map(|_| ())).unwrap_err();
        assert!(fault_of(&error).is_some_and(|f| f.help.is_some()), "{error:#}");
        format!("{error:#}")
    }

    #[test]
    fn the_first_match_in_the_file_wins() {
        // In alphabetical order, `layers` would come before `norms`, and the wider pattern before
        // the narrower one.
        let text = "about = 'x'\n[formats]\nnorms = 'as-is'\nembed_tokens = 'bf16'\n\
            'layers.{0,3}.mlp.*' = 'i8-row'\n'layers.**' = 'i4-row'\n";
        let recipe = Recipe::parse("r", text).unwrap();
        let tensors = tensors(4);
        let choice = |role, layer| {
            recipe.resolve(&tensors).unwrap()
                [tensors.iter().position(|t| (t.role, t.layer) == (role, layer)).unwrap()]
            .clone()
        };
        assert_eq!(choice(Role::QNorm, 2), FormatChoice::AsIs);
        assert_eq!(choice(Role::Embed, 0), FormatChoice::One(Format::BF16));
        assert_eq!(choice(Role::Up, 0), FormatChoice::One(Format::I8_ROW));
        assert_eq!(choice(Role::Up, 1), FormatChoice::One("i4-row".parse().unwrap()));
        assert_eq!(choice(Role::Q, 0), FormatChoice::One("i4-row".parse().unwrap()));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_its_line() {
        for (text, expected) in [
            (
                "[formats]\n'**' = 'i4-row'\n'layers.9.**' = 'bf16'",
                "line 3: `layers.9.**` matches no tensor",
            ),
            ("[formats]\n'**' = 'i4-row'\nnorms = 'as-is'", "line 3: `norms` decides nothing"),
            ("[formats]\nnorms = 'as-is'\n'layers.**' = 'bf16'", "no line matches `embed_tokens`"),
            ("colour = 'red'\n[formats]\n'**' = 'bf16'", "line 1: unknown key `colour`"),
            ("[formats]\n'**' = 'i5-row'", "line 2: unknown weight format `i5-row`"),
            ("[formats]\n'**' = 4", "line 2"),
            ("[formats]\n'**' = ['bf16', 'bf16']", "twice"),
            ("[formats]\n'a{' = 'bf16'", "line 2: `a{`"),
            ("[formats]\n'**' = 'bf16'\n'**' = 'bf16'", "line 3"),
            ("[formats]\n'**' = ['bf16', 'f32']", "no target size"),
            (
                "[formats]\n'layers.*.experts.down_proj' = 'bf16'\n'**' = 'f32'",
                "recipe r is for mixtures of experts, but the model is not one",
            ),
            ("target-size = '5GB'\n[formats]\n'**' = 'bf16'", "several formats"),
            (
                "target-size = 'big'\n[formats]\n'**' = ['f32', 'bf16']",
                "line 1: `big` is not a size",
            ),
            ("about = 'nothing else'", "no [formats]"),
            ("[formats", "line 1"),
        ] {
            let refusal = refusal(text);
            assert!(refusal.contains(expected), "{refusal} lacks {expected}");
        }
    }

    #[test]
    fn built_in_recipes_are_whole_and_fit_any_number_of_layers() {
        for (name, _) in BUILT_IN {
            let recipe = Recipe::load(name).unwrap();
            let has_experts = recipe.is_for_mixtures();
            recipe.resolve(&tensors_of(1, has_experts)).unwrap();
            recipe.resolve(&tensors_of(62, has_experts)).unwrap();
        }
        let for_mixtures = |text: &str| Recipe::parse("r", text).unwrap().is_for_mixtures();
        assert!(BUILT_IN.iter().any(|(_, text)| for_mixtures(text)));
        assert!(BUILT_IN.iter().any(|(_, text)| !for_mixtures(text)));
        assert!(for_mixtures("[formats]\n'layers.*.experts.*' = 'f32'\n'**' = 'bf16'"));
        assert!(!for_mixtures("[formats]\n'layers.*.{mlp,experts}.down_proj' = 'f32'"));
        assert!(Recipe::load(FOR_SIZES).unwrap().with_target(9_500_000_000).is_ok());
        assert!(Recipe::load("int4").unwrap().with_target(9_500_000_000).is_err());
        assert!(format!("{:#}", Recipe::load("8gb").unwrap_err()).contains("8gb"));
    }

    #[test]
    fn names_of_llama_cpp_lead_to_what_is_nearest() {
        for (name, nearest) in [
            ("Q4_K_M", "int4"),
            ("q4_0", "int4"),
            ("IQ3_XXS", "3.5bpw"),
            ("TQ1_0", "2.6bpw"),
            ("Q6_K", "6.6bpw"),
            ("Q8_0", "i8-g32"),
        ] {
            assert!(nearest_to(name).unwrap().contains(nearest), "{name}");
            let error = Recipe::load(name).unwrap_err();
            assert!(
                fault_of(&error).unwrap().help.as_ref().unwrap().contains(nearest),
                "{error:#}"
            );
        }
        for other in ["int4", "Q4", "quick_4", "Q9_K", "", "Q", "Qä_0", "8gb"] {
            assert_eq!(nearest_to(other), None, "{other}");
        }
    }
}
