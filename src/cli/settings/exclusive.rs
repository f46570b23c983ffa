//! Options that exclude each other, from sources of different precedence.
//!
//! The source with the higher precedence wins. Two options from one source are an error of clap's.

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use std::collections::BTreeSet;

/// Returns the ids of the options and arguments that are not at their default.
pub fn given(matches: &ArgMatches) -> BTreeSet<String> {
    let is_given = |id: &&str| {
        matches.value_source(id).is_some_and(|source| source != ValueSource::DefaultValue)
    };
    matches.ids().map(|id| id.as_str()).filter(is_given).map(str::to_owned).collect()
}

/// Returns the [`given`] ids that can exclude others: all except switches that are off.
pub fn in_effect(matches: &ArgMatches) -> BTreeSet<String> {
    let mut ids = given(matches);
    ids.retain(|id| !matches!(matches.try_get_one::<bool>(id), Ok(Some(false))));
    ids
}

/// Returns the ids of the options that exclude or are excluded by one of `given`.
pub fn excluded(command: &Command, given: &BTreeSet<String>) -> BTreeSet<String> {
    let mut excluded = BTreeSet::new();
    for arg in command.get_arguments() {
        let id = arg.get_id().as_str();
        for other in command.get_arg_conflicts_with(arg) {
            let other = other.get_id().as_str();
            for (a, b) in [(id, other), (other, id)] {
                if given.contains(a) {
                    excluded.insert(b.to_owned());
                }
            }
        }
    }
    excluded.retain(|id| !given.contains(id));
    excluded
}

/// Returns the ids of the options that the command line excludes.
///
/// `root` is the definition without environment variables.
pub fn excluded_by_flags(root: Command, argv: &[std::ffi::OsString]) -> BTreeSet<String> {
    let matches = root.clone().ignore_errors(true).try_get_matches_from(argv);
    let matches = matches.as_ref().ok().and_then(ArgMatches::subcommand);
    let Some((name, matches)) = matches else { return BTreeSet::new() };
    let command = root.find_subcommand(name).expect("the command that was typed");
    excluded(command, &in_effect(matches))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::commands::definition;

    /// Every declared exclusion works in both directions, and in no other command.
    #[test]
    fn exclusions_are_symmetric() {
        let root = definition();
        let mut pairs = 0;
        for command in root.get_subcommands() {
            for arg in command.get_arguments() {
                let id = arg.get_id().as_str();
                for other in command.get_arg_conflicts_with(arg) {
                    let other = other.get_id().as_str();
                    for (a, b) in [(id, other), (other, id)] {
                        let excluded = excluded(command, &[a.to_owned()].into());
                        assert!(excluded.contains(b), "{}: {a} {b}", command.get_name());
                        pairs += 1;
                    }
                }
            }
        }
        assert!(pairs > 20, "{pairs}");
    }
}
