//! Help texts around the options: first steps, examples, exit codes, and which options `-h` leaves
//! to `--help`.

use clap::Command;

/// What `gemma --version` prints behind the name: version, commit where it is known, and features.
pub const VERSION: &str = env!("DESCRIPTION_OF_BUILD");

/// Columns of help at most.
const WIDTH: usize = 110;

/// What the exit code says.
pub const EXIT_CODES: [(&str, &str); 12] = [
    ("0", "done"),
    ("1", "a failure at run time"),
    ("2", "wrong usage of the command line"),
    ("3", "a model, weight format, tokenizer or input file is missing or invalid"),
    ("4", "the device is absent or was lost"),
    ("5", "the model does not fit in memory"),
    ("6", "some records of a batch failed (with --strict)"),
    ("7", "the prompt exceeds the context"),
    ("8", "the text ended before its grammar was complete"),
    ("130", "interrupted (Ctrl-C)"),
    ("141", "the reader closed the pipe (SIGPIPE)"),
    ("143", "terminated (SIGTERM)"),
];

/// Where values come from.
pub const SETTINGS: &str = "\
Every option can also be set as GEMMA_<NAME> in the environment (GEMMA_MAX_TOKENS=100) or in \
gemma.toml (max-tokens = 100, or under [generate] for one command), in the working directory or as \
$XDG_CONFIG_HOME/gemma/config.toml. First found wins: flag, environment, gemma.toml, the model's \
generation_config.json, built in. A gemma.toml in the working directory may not load code, \
name a file to write, or say who reaches the server. --print-config shows each value and where it came from.";

/// Ends the help of `gemma` itself, which is also shown where nothing was typed.
const FIRST_STEPS: &str = "\
First steps:
  gemma generate 'What is photosynthesis?'   ask the small bundled demo model
  gemma chat                                 talk to it
  gemma doctor                               check this machine
  gemma plan 27b                             would Gemma 3 27B fit here?";

/// Examples of each command. Prompts are ones that the bundled model was taught; words in capitals
/// stand for what the user has.
const EXAMPLES: [(&str, &str); 15] = [
    (
        "generate",
        "\
Examples:
  gemma generate 'What is the capital of France?'
  gemma generate --json 'Who are you?' | jq -r .text
  gemma generate --regex '[A-Z][a-z]+' 'What is the capital of France?'
With a real model:
  git diff | gemma generate -m MODEL 'Write a commit message for this change.'
  gemma generate -m MODEL -f REPORT.txt 'Summarise in five sentences.' -o SUMMARY.txt
  gemma generate -m MODEL --batch PROMPTS.jsonl --resume ANSWERS.jsonl
In a shell loop, add </dev/null: standard input is part of the prompt.",
    ),
    (
        "chat",
        "\
Examples:
  gemma chat
  gemma chat -m google/gemma-3-27b-it-qat-q4_0-gguf
  gemma chat -m MODEL --system 'Answer in one sentence.' --temp 0.7",
    ),
    (
        "serve",
        "\
Examples:
  gemma serve                                  then open http://127.0.0.1:8080
  gemma serve -m MODEL --parallel 8 --ctx-size 16384
  gemma serve -m MODEL --host 0.0.0.0 --api-key-file KEYS
Ask it as OpenAI's server:
  curl localhost:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \
\"content\": \"Who are you?\"}]}'",
    ),
    (
        "quantize",
        "\
Examples:
  gemma quantize google/gemma-3-27b-it gemma-27b-int4 --dry-run
  gemma quantize google/gemma-3-27b-it gemma-27b-int4
  gemma quantize MODEL SMALLER --target-size 9.5GB --calibrate builtin --verify
The second is made in the working directory, and run with: gemma chat -m ./gemma-27b-int4",
    ),
    (
        "eval",
        "\
Examples:
  gemma eval TEXT.txt
  gemma eval -m SMALLER --reference MODEL prose=A.txt code=B.txt
  gemma tokenize --json -f TEXT.txt >IDS.json && gemma eval --ids IDS.json --json",
    ),
    (
        "bench",
        "\
Examples:
  gemma bench
  gemma bench --only decode,verify --rows 1,4,8
  gemma bench -m MODEL --json >NOW.json && gemma bench -m MODEL --compare NOW.json",
    ),
    (
        "plan",
        "\
Examples:
  gemma plan
  gemma plan 27b
  gemma plan 12b --recipe int4 --ctx-size 32768
  gemma plan google/gemma-3-27b-it --memory 32GB --bandwidth 75
  gemma plan MODEL --json | jq .fits",
    ),
    (
        "list",
        "\
Examples:
  gemma list
  gemma list ~/models
  gemma list --json | jq -r '.models[] | select(.fits).model'",
    ),
    (
        "inspect",
        "\
Examples:
  gemma inspect
  gemma inspect MODEL --tensors
  gemma inspect MODEL --verify --json | jq .bits_per_weight",
    ),
    (
        "tokenize",
        "\
Examples:
  gemma tokenize 'Why is the sky blue?'
  gemma tokenize --template 'Why is the sky blue?'
  gemma tokenize -m MODEL --json -f TEXT.txt | jq '.ids | length'",
    ),
    (
        "devices",
        "\
Examples:
  gemma devices
  gemma devices --json | jq -r .chosen",
    ),
    (
        "doctor",
        "\
Examples:
  gemma doctor
  gemma doctor -m MODEL --device vulkan
  gemma doctor --json | jq '.checks[] | select(.status != \"PASS\")'",
    ),
    (
        "schema",
        "\
Examples:
  gemma schema >result.schema.json
  gemma schema | jq '.properties | keys'",
    ),
    (
        "completions",
        "\
To install:
  mkdir -p ~/.local/share/bash-completion/completions
  gemma completions bash >~/.local/share/bash-completion/completions/gemma

  mkdir -p ~/.zfunc            (and in ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit)
  gemma completions zsh >~/.zfunc/_gemma

  gemma completions fish >~/.config/fish/completions/gemma.fish
A new shell then completes commands, options and their values.",
    ),
    (
        "man",
        "\
Examples:
  gemma man | man -l -
  gemma man generate | man -l -
  mkdir -p ~/.local/share/man/man1 && gemma man generate >~/.local/share/man/man1/gemma-generate.1",
    ),
];

/// What fits where clap would list every kind of argument.
const USAGES: [(&str, &str); 3] = [
    ("generate", "gemma generate [OPTIONS] [PROMPT]"),
    ("tokenize", "gemma tokenize [OPTIONS] [TEXT]"),
    ("eval", "gemma eval [OPTIONS] <FILE...|--ids FILE>"),
];

/// Options that `-h` leaves to `--help`: those that few people ever type.
const SELDOM: [&str; 39] = [
    "allow_requantize",
    "check",
    "color",
    "device_lock",
    "draft_ahead",
    "draft_device",
    "draft_tokens",
    "draft_tree",
    "embedding",
    "format_embedding",
    "format_weights",
    "gpu_layers",
    "grammar",
    "ignore_eos",
    "kernel_rows",
    "kv",
    "linear",
    "measure",
    "mem_limit",
    "min_p",
    "newline",
    "npu",
    "prefill",
    "print_config",
    "progress",
    "prompt",
    "prompt_count",
    "regex",
    "repeat_penalty",
    "restart",
    "shard",
    "skip",
    "special_in_prompt",
    "stats_file",
    "strict",
    "system_file",
    "tokenizer",
    "text_tokens",
    "tokens_per_pass",
];

/// Adds what is the same for every command, and each command's examples.
pub fn complete(root: Command) -> Command {
    let names: Vec<String> = root.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    let root = root
        .max_term_width(WIDTH)
        .after_help(FIRST_STEPS)
        .after_long_help(format!("{FIRST_STEPS}\n\n{}", epilogue()));
    names.iter().fold(root, |root, name| {
        root.mut_subcommand(name, |mut command| {
            let own = examples(name).map_or(String::new(), |text| format!("{text}\n\n"));
            if let Some((_, usage)) = USAGES.iter().find(|(command, _)| command == name) {
                command = command.override_usage(*usage);
            }
            command
                .after_help(format!("All options: gemma {name} --help"))
                .after_long_help(format!(
                    "{own}Exit codes, environment variables and gemma.toml: gemma --help"
                ))
                .mut_args(|arg| match SELDOM.contains(&arg.get_id().as_str()) {
                    true => arg.hide_short_help(true),
                    false => arg,
                })
                // "-5" after an option is its value, be it wrong, and not an option called 5.
                .mut_args(|arg| match arg.get_long() {
                    Some(_)
                        if arg.get_action().takes_values() && !arg.is_allow_hyphen_values_set() =>
                    {
                        arg.allow_negative_numbers(true)
                    }
                    _ => arg,
                })
        })
    })
}

/// The examples of a command, a heading first.
pub fn examples(command: &str) -> Option<&'static str> {
    EXAMPLES.iter().find(|(name, _)| *name == command).map(|(_, text)| *text)
}

/// Exit codes and the sources of settings.
fn epilogue() -> String {
    let codes: String =
        EXIT_CODES.iter().map(|(code, meaning)| format!("  {code:<5}{meaning}\n")).collect();
    format!("Exit codes:\n{codes}\n{SETTINGS}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::commands::definition;

    /// Prompts that the bundled model was taught.
    fn taught() -> Vec<String> {
        let lines = include_str!("../../tests/newcomer.jsonl")
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        let taught = lines.filter(|record: &serde_json::Value| record["taught"] == true);
        taught.map(|record| record["prompt"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn every_command_has_examples_and_every_seldom_option_exists() {
        let root = definition();
        for command in root.get_subcommands() {
            let name = command.get_name();
            assert!(
                examples(name).is_some_and(|text| text.lines().count() > 2),
                "{name} has no examples"
            );
        }
        for (name, _) in EXAMPLES {
            assert!(
                root.find_subcommand(name).is_some(),
                "examples of a command that does not exist: {name}"
            );
        }
        let known = |id: &str| {
            root.get_subcommands().any(|c| c.get_arguments().any(|arg| arg.get_id() == id))
        };
        for id in SELDOM {
            assert!(known(id), "there is no option {id}");
        }
    }

    #[test]
    fn examples_ask_the_bundled_model_what_it_was_taught() {
        let taught = taught();
        let mut asked = 0;
        let lines = EXAMPLES.iter().flat_map(|(_, text)| text.lines()).chain(FIRST_STEPS.lines());
        for line in lines.filter(|line| {
            line.contains("gemma generate") && !line.contains("-m MODEL") && line.contains('\'')
        }) {
            assert!(taught.iter().any(|prompt| line.contains(&format!("'{prompt}'"))), "{line}");
            asked += 1;
        }
        assert!(asked >= 4, "only {asked} examples were found");
    }
}
