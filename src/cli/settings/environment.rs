//! Options as `GEMMA_<NAME>` in the environment.

use super::files::Options;
use crate::cli::io::ui::nearest;
use clap::{Arg, ArgAction};
use std::collections::{BTreeMap, BTreeSet};

/// Prefixes of variables for this program's own tests.
const OF_TESTS: [&str; 5] =
    ["GEMMA_FAIL_", "GEMMA_FUZZ_", "GEMMA_REQUIRE_", "GEMMA_TEST_", "GEMMA_VULKAN_"];

/// Returns the variable of an option: `max-tokens` becomes `GEMMA_MAX_TOKENS`.
pub fn name(long: &str) -> String {
    format!("GEMMA_{}", long.replace('-', "_").to_uppercase())
}

/// Returns the variable that sets an option, under its name or an alias.
///
/// An empty variable counts as unset.
pub fn set(arg: &Arg) -> Option<String> {
    let names = arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default());
    names.map(name).find(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
}

/// Returns whether the environment sets a switch to false. clap would count the switch as given,
/// and then it would exclude other options.
pub fn is_off(arg: &Arg) -> bool {
    let off = ["n", "no", "f", "false", "off", "0"];
    let value = set(arg).and_then(|name| std::env::var(name).ok());
    matches!(arg.get_action(), ArgAction::SetTrue)
        && value.is_some_and(|value| off.contains(&&*value.to_lowercase()))
}

/// Returns notes about variables that look like settings but match no option.
pub fn unknown(all: &BTreeMap<String, Options>) -> Vec<String> {
    let known: BTreeSet<String> =
        all.values().flat_map(|options| options.keys()).map(|long| name(long)).collect();
    let is_set = |(_, value): &(_, std::ffi::OsString)| !value.is_empty();
    let names = std::env::vars_os().filter(is_set).filter_map(|(name, _)| name.into_string().ok());
    let is_ours = |name: &str| {
        name.starts_with("GEMMA_") && !OF_TESTS.iter().any(|begin| name.starts_with(begin))
    };
    let say = |name: String| {
        let meant = nearest(&name, known.iter().map(String::as_str))
            .map(|meant| format!("; did you mean {meant}?"));
        format!(
            "the environment variable {name} is ignored: no option has this name{}",
            meant.unwrap_or_default()
        )
    };
    names.filter(|name| is_ours(name) && !known.contains(name)).map(say).collect()
}
