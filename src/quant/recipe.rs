//! Recipes: which format each tensor gets. TOML; the first line whose pattern matches a tensor
//! decides.
//!
//! ```toml
//! about = "one line for people"
//! target-size = "9GB"              # only where a line leaves a choice
//! [formats]
//! "norms" = "as-is"                # as the source stores them
//! "embed_tokens" = "i8-row"
//! "linears" = ["t2-row+h128", "t3-row+h128"]   # whichever serves the size best
//! ```
//! Patterns: see [`Pattern`]. Whatever cannot be meant is refused with its line: unknown keys and
//! formats, a line that decides nothing.

use super::pattern::Pattern;
use crate::error::Fault;
use crate::models::{Config, Role};
use crate::tensor::Format;
use crate::util::files::read_regular_text;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Recipes inside the binary: name and text.
pub const BUILT_IN: [(&str, &str); 5] = [
    ("seed", include_str!("../../quant/seed.toml")),
    ("int4", include_str!("../../quant/int4.toml")),
    ("9gb", include_str!("../../quant/9gb.toml")),
    ("10gb", include_str!("../../quant/10gb.toml")),
    ("12gb", include_str!("../../quant/12gb.toml")),
];

/// Bytes of a recipe at most: each line is held against each tensor.
const LONGEST: u64 = 64 << 10;

/// Which built-in recipe serves a size that is given without one.
pub const FOR_SIZES: &str = "10gb";

/// What a line says about its tensors.
#[derive(Clone, Debug, PartialEq)]
pub enum Choice {
    /// Copied in the source's own type.
    AsIs,
    One(Format),
    /// The allocator's choice; more than one.
    Any(Vec<Format>),
}

#[derive(Clone, Debug)]
struct Rule {
    line: usize,
    text: String,
    pattern: Pattern,
    choice: Choice,
}

/// The size that a choice of formats is to reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aim {
    /// Bytes of all that is written.
    Bytes(u64),
    /// Bits for each weight, scales and headers included, files beside the weights not.
    BitsPerWeight(f64),
}

impl From<u64> for Aim {
    fn from(bytes: u64) -> Aim {
        Aim::Bytes(bytes)
    }
}

impl Aim {
    /// Bytes of all that is written, for a model of these tensors with these files beside them.
    pub fn bytes(
        self,
        roles: &[(Role, usize)],
        config: &Config,
        side_files: &[(String, u64)],
    ) -> u64 {
        match self {
            Aim::Bytes(bytes) => bytes,
            Aim::BitsPerWeight(bits) => {
                let weights: usize =
                    roles.iter().map(|r| r.0.shape(config).iter().product::<usize>()).sum();
                (bits / 8.0 * weights as f64) as u64
                    + side_files.iter().map(|(_, bytes)| bytes).sum::<u64>()
            }
        }
    }
}

impl std::str::FromStr for Aim {
    type Err = anyhow::Error;

    /// `9.5GB` or `4.5bpw`.
    fn from_str(text: &str) -> Result<Aim> {
        let trimmed = text.trim().to_ascii_lowercase();
        match trimmed.strip_suffix("bpw").map(|number| number.trim().parse::<f64>()) {
            None => parse_size(text).map(Aim::Bytes),
            Some(Ok(bits)) if (1.0..=32.0).contains(&bits) => Ok(Aim::BitsPerWeight(bits)),
            Some(_) => anyhow::bail!(
                "`{text}` is not a number of bits per weight from 1 to 32: write it like 4.5bpw"
            ),
        }
    }
}

impl std::fmt::Display for Aim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Aim::Bytes(bytes) => f.write_str(&super::size(*bytes)),
            Aim::BitsPerWeight(bits) => write!(f, "{bits}bpw"),
        }
    }
}

/// A recipe that was read without fault; whether its lines fit a model shows in
/// [`Recipe::resolve`].
#[derive(Clone, Debug)]
pub struct Recipe {
    name: String,
    text: String,
    rules: Vec<Rule>,
    target: Option<Aim>,
    /// See [`Recipe::asked`].
    asked: String,
    about: String,
}

impl Recipe {
    /// A built-in recipe, or one in a file.
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

    /// One format for all linear layers, one for the embedding table and the head; norms as they
    /// are.
    pub fn inline(linear: Format, embedding: Format) -> Recipe {
        let tables = [Role::Embed, Role::Head].map(|r| r.short_name(0)).join(",");
        let text = format!(
            "[formats]\nnorms = \"as-is\"\n\"{{{tables}}}\" = \"{embedding}\"\nlinears = \
                \"{linear}\"\n"
        );
        let recipe =
            Recipe::parse(&format!("{linear}, {embedding}"), &text).expect("a text of our own");
        Recipe { asked: format!("--linear {linear} --embedding {embedding}"), ..recipe }
    }

    /// `name` is shown in errors and in the report.
    pub fn parse(name: &str, text: &str) -> Result<Recipe> {
        let line_at = |at: usize| 1 + text[..at.min(text.len())].matches('\n').count();
        let bad = |at: usize, what: String| -> anyhow::Error {
            let fault = Fault::model(format!("recipe {name}, line {}: {what}", line_at(at)));
            fault.help("quant/README.md describes recipes").into()
        };
        let table = DeTable::parse(text)
            .map_err(|e| bad(e.span().map_or(0, |s| s.start), e.message().to_owned()))?;
        let asked = format!("--recipe {name}");
        let (name, text) = (name.to_owned(), text.to_owned());
        let mut recipe =
            Recipe { name, text, rules: Vec::new(), target: None, asked, about: String::new() };
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
                        recipe.rules.push(Rule { line, text, pattern: pattern_of, choice });
                    }
                }
                (key @ ("about" | "target-size" | "formats"), other) => {
                    return Err(bad(at, format!("`{key}` cannot be a {}", other.type_str())));
                }
                (other, _) => return Err(bad(key.span().start, format!("unknown key `{other}`"))),
            }
        }
        // The table comes sorted by name; what counts is the order in the file.
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

    /// The same with another size to reach; refused where no line leaves a choice.
    pub fn with_target(mut self, aim: impl Into<Aim>) -> Result<Recipe> {
        let aim = aim.into();
        if !self.leaves_a_choice() {
            let what = format!(
                "recipe {} leaves nothing to choose, so that it has one size only",
                self.name
            );
            return Err(Fault::usage(what)
                .help("give --target-size alone, or with 9gb, 10gb or 12gb")
                .into());
        }
        self.target = Some(aim);
        let size = format!("--target-size {}", aim.to_string().replace(' ', ""));
        self.asked = if self.name == FOR_SIZES { size } else { format!("{} {size}", self.asked) };
        Ok(self)
    }

    fn leaves_a_choice(&self) -> bool {
        self.rules.iter().any(|r| matches!(r.choice, Choice::Any(_)))
    }

    /// The options of `gemma quantize` that ask for it.
    pub fn asked(&self) -> String {
        self.asked.clone()
    }

    /// Its line for people; empty where it has none.
    pub fn about(&self) -> &str {
        &self.about
    }

    /// What it is called: built-in name, or the file's name without the way to it.
    pub fn name(&self) -> &str {
        Path::new(&self.name).file_name().and_then(|n| n.to_str()).unwrap_or(&self.name)
    }

    /// Largest size of the whole artifact.
    pub fn target(&self) -> Option<Aim> {
        self.target
    }

    /// SHA-256 of the text.
    pub fn sha256(&self) -> String {
        crate::util::hex(Sha256::digest(self.text.as_bytes()))
    }

    /// What each tensor gets. Refuses tensors that no line matches, and lines that decide nothing.
    pub fn resolve(&self, tensors: &[(Role, usize)]) -> Result<Vec<&Choice>> {
        let help = "quant/README.md describes recipes";
        let (mut out, mut used) =
            (Vec::with_capacity(tensors.len()), vec![false; self.rules.len()]);
        for &(role, layer) in tensors {
            let Some(at) = self.rules.iter().position(|r| r.pattern.matches(role, layer)) else {
                let what =
                    format!("recipe {}: no line matches `{}`", self.name, role.short_name(layer));
                return Err(Fault::model(what).help(help).into());
            };
            used[at] = true;
            out.push(&self.rules[at].choice);
        }
        if let Some((rule, _)) = self.rules.iter().zip(used).find(|(_, used)| !used) {
            let hit = tensors.iter().any(|t| rule.pattern.matches(t.0, t.1));
            let why = if hit {
                "decides nothing: lines above match all its tensors"
            } else {
                "matches no tensor of this model"
            };
            let what = format!("recipe {}, line {}: `{}` {why}", self.name, rule.line, rule.text);
            return Err(Fault::model(what).help("remove or correct the line").into());
        }
        if self.target.is_none() && out.iter().any(|c| matches!(c, Choice::Any(_))) {
            let what =
                format!("recipe {} leaves formats open, and there is no size to reach", self.name);
            return Err(Fault::usage(what).help("give --target-size, e.g. 9.5GB").into());
        }
        Ok(out)
    }
}

fn parse_rule(pattern: &str, choice: &Spanned<DeValue<'_>>) -> Result<(Pattern, Choice)> {
    let parsed = Pattern::parse(pattern).with_context(|| format!("`{pattern}`"))?;
    let choice = match choice.get_ref() {
        DeValue::String(text) if text == "as-is" => Choice::AsIs,
        DeValue::String(text) => Choice::One(text.parse()?),
        DeValue::Array(list) => {
            let mut formats = Vec::new();
            for item in list.iter() {
                let text = item
                    .get_ref()
                    .as_str()
                    .with_context(|| format!("`{pattern}`: a list of formats holds texts only"))?;
                let format = text.parse()?;
                anyhow::ensure!(!formats.contains(&format), "`{pattern}` lists {format} twice");
                formats.push(format);
            }
            match formats[..] {
                [] => anyhow::bail!("`{pattern}` has no format to choose from"),
                [one] => Choice::One(one),
                _ => Choice::Any(formats),
            }
        }
        other => anyhow::bail!(
            "`{pattern}` cannot be a {}: give a format, or a list to choose from",
            other.type_str()
        ),
    };
    Ok((parsed, choice))
}

/// What comes nearest to a type of llama.cpp's, such as `Q4_K_M`; `None` for other names.
pub fn nearest_to(name: &str) -> Option<&'static str> {
    let upper = name.to_ascii_uppercase();
    let bits = upper.trim_start_matches('I').strip_prefix(['Q', 'T'])?.trim_start_matches('Q');
    let rest = bits.get(1..)?;
    if !(rest.starts_with('_') && rest.len() > 1) {
        return None;
    }
    match bits.as_bytes()[0] {
        b'1' | b'2' => Some("--target-size 2.6bpw"),
        b'3' => Some("--target-size 3.5bpw"),
        b'4' => Some("int4, or --target-size 4.8bpw"),
        b'5' => Some("--target-size 5.7bpw"),
        b'6' => Some("--target-size 6.6bpw"),
        b'8' => Some("--linear i8-row"),
        _ => None,
    }
}

/// `9.5GB`, `900 MB`, `8GiB` or `512 B`. A number alone is refused: nobody means bytes.
pub fn parse_size(text: &str) -> Result<u64> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let unit: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" if number.parse::<f64>().is_ok() => {
            anyhow::bail!(
                "`{text}` has no unit: write {}GB, or {}bpw for bits per weight",
                trimmed,
                trimmed
            )
        }
        "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        _ => anyhow::bail!("`{text}` is not a size: write it like 9.5GB"),
    };
    match number.parse::<f64>() {
        Ok(n) if n > 0.0 && n * unit < 1e18 => Ok((n * unit) as u64),
        _ => anyhow::bail!("`{text}` is not a size: write it like 9.5GB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::fault_of;

    fn tensors(layers: usize) -> Vec<(Role, usize)> {
        let mut out = vec![(Role::Embed, 0), (Role::FinalNorm, 0)];
        out.extend((0..layers).flat_map(|l| Role::LAYER.map(|r| (r, l))));
        out
    }

    fn refusal(text: &str) -> String {
        let error =
            Recipe::parse("r", text).and_then(|r| r.resolve(&tensors(4)).map(|_| ())).unwrap_err();
        assert!(fault_of(&error).is_some_and(|f| f.help.is_some()), "{error:#}");
        format!("{error:#}")
    }

    #[test]
    fn the_first_match_in_the_file_wins() {
        // Sorted by name, `layers` would come before `norms` and the wider pattern before the
        // narrower one.
        let text = "about = 'x'\n[formats]\nnorms = 'as-is'\nembed_tokens = \
            'bf16'\n'layers.{0,3}.mlp.*' = 'i8-row'\n'layers.**' = 'i4-row'\n";
        let recipe = Recipe::parse("r", text).unwrap();
        let tensors = tensors(4);
        let of = |role, layer| {
            recipe.resolve(&tensors).unwrap()
                [tensors.iter().position(|t| *t == (role, layer)).unwrap()]
            .clone()
        };
        assert_eq!(of(Role::QNorm, 2), Choice::AsIs);
        assert_eq!(of(Role::Embed, 0), Choice::One(Format::BF16));
        assert_eq!(of(Role::Up, 0), Choice::One(Format::I8_ROW));
        assert_eq!(of(Role::Up, 1), Choice::One("i4-row".parse().unwrap()));
        assert_eq!(of(Role::Q, 0), Choice::One("i4-row".parse().unwrap()));
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
            ("[formats]\n'**' = ['bf16', 'f32']", "no size to reach"),
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
            recipe.resolve(&tensors(1)).unwrap();
            recipe.resolve(&tensors(62)).unwrap();
        }
        assert!(Recipe::load(FOR_SIZES).unwrap().with_target(9_500_000_000).is_ok());
        assert!(Recipe::load("int4").unwrap().with_target(9_500_000_000).is_err());
        assert!(format!("{:#}", Recipe::load("8gb").unwrap_err()).contains("8gb"));
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("9.5GB", 9_500_000_000),
            ("900 MB", 900_000_000),
            ("1GiB", 1 << 30),
            ("123 B", 123),
            ("2g", 2_000_000_000),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for bad in ["", "GB", "-1GB", "9.5.1GB", "1e400GB", "0GB", "9 bananas", "9"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert!(format!("{:#}", parse_size("2").unwrap_err()).contains("2GB"));
        assert_eq!("4.5 bpw".parse::<Aim>().unwrap(), Aim::BitsPerWeight(4.5));
        assert_eq!("1MB".parse::<Aim>().unwrap(), Aim::Bytes(1_000_000));
        for bad in ["4.5", "bpw", "0.5bpw", "64bpw", "nanbpw"] {
            assert!(bad.parse::<Aim>().is_err(), "{bad}");
        }
    }

    #[test]
    fn names_of_llama_cpp_lead_to_what_is_nearest() {
        for (name, nearest) in [
            ("Q4_K_M", "int4"),
            ("q4_0", "int4"),
            ("IQ3_XXS", "3.5bpw"),
            ("TQ1_0", "2.6bpw"),
            ("Q6_K", "6.6bpw"),
            ("Q8_0", "i8-row"),
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
