//! Hints for wrong command lines: commands and options of other programs, a prompt without a
//! command or without quotes, options before the command.

use crate::cli::io::ui::Ui;
use crate::cli::settings;
use crate::cli::settings::Early;
use crate::error::{Fault, fault_of};
use crate::util::shell::quoted;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;
use std::process::ExitCode;

/// Other programs' commands, and what to type here.
const COMMANDS: [(&[&str], &str); 15] = [
    (&["server", "api"], "gemma serve answers over HTTP, in the forms of OpenAI and Anthropic"),
    (
        &["download", "get", "fetch"],
        "gemma pull ID downloads a model: gemma pull google/gemma-3-27b-it-qat-q4_0-gguf",
    ),
    (
        &["run", "ask", "complete", "completion", "infer"],
        "gemma chat -m MODEL, or gemma generate -m MODEL 'your prompt'",
    ),
    (&["models", "ls"], "gemma list shows the models that are found on this machine"),
    (&["show", "info"], "gemma inspect MODEL shows what a model consists of"),
    (
        &["config", "settings"],
        "gemma generate --print-config shows every setting and its source; \
         gemma.toml holds them",
    ),
    (&["version"], "gemma --version"),
    (
        &["rm", "remove", "delete"],
        "models are files of yours: `hf cache rm` deletes those in the Hugging Face cache",
    ),
    (&["convert"], "gemma quantize SRC DST makes a smaller model of one"),
    (
        &["create"],
        "a model needs no import: -m takes a directory, a GGUF file or an id; \
         gemma.toml holds presets of settings, such as the system text: --preset NAME",
    ),
    (
        &["cp", "copy", "push"],
        "models are files of yours: copy them as files; gemma.toml holds presets of settings",
    ),
    (
        &["templates", "template", "aliases"],
        "gemma.toml holds presets of settings: gemma generate --preset NAME",
    ),
    (
        &["embed", "embeddings"],
        "gemma makes no embeddings: Gemma 3 and 4 are trained to write text",
    ),
    (&["logs", "log"], "gemma serve writes its log to standard error; -v adds details"),
    (
        &["update", "upgrade"],
        "gemma updates nothing by itself: download a newer version, or build it again",
    ),
];

/// Other programs' options, and their names here.
const OPTIONS: [(&[&str], &str); 30] = [
    (
        &["-hf", "-hfr", "--hf-repo", "--hf-file", "-hff"],
        "-m takes the id of a model, once it is downloaded: gemma pull ID, \
         then gemma generate -m ID 'your prompt'",
    ),
    (
        &["-ngl", "--n-gpu-layers", "--ngl"],
        "--gpu-layers N|auto|all is the option for that; auto, the default, takes as many as fit",
    ),
    (
        &["--stream", "--no-stream"],
        "text always appears as it is generated; --format stream-json gives it as JSON lines, \
            --json all at once",
    ),
    (
        &["-cnv", "--conversation", "-i", "--interactive"],
        "gemma chat is the command for a conversation",
    ),
    (
        &[
            "--n-predict",
            "--predict",
            "--num-predict",
            "--max-new-tokens",
            "--max_new_tokens",
            "--num_predict",
        ],
        "-n N (--max-tokens) is the option for that",
    ),
    (
        &["--num-ctx", "--num_ctx", "--n-ctx", "--context"],
        "-c N (--ctx-size) is the option for that",
    ),
    (
        &["--model-draft", "--draft-model", "--spec-draft-model"],
        "--draft MODEL is the option for that; by default a bundled model drafts",
    ),
    (
        &["--system-prompt", "--sys", "--system-prompt-file"],
        "-s TEXT (--system) or --system-file FILE is the option for that",
    ),
    (&["--audio"], "text and images are supported (--image FILE): the model reads no sound"),
    (
        &["--host", "--port"],
        "gemma serve is the server; `gemma generate --batch -` answers JSON records, one per line",
    ),
    (
        &["--gpu", "--cuda", "--metal"],
        "-d auto|cpu|vulkan:N (--device) is the option for that; see gemma devices",
    ),
    (
        &["-ctk", "-ctv", "--cache-type-k", "--cache-type-v"],
        "--kv f16|f32|q8 is the option for that",
    ),
    (&["-jf", "--schema", "-j"], "--json-schema SCHEMA|@FILE is the option for that"),
    (
        &["--grammar-file"],
        "--grammar FILE is the option for a Lark grammar, --json-schema @FILE for a schema",
    ),
    (
        &["--lora", "--lora-scaled", "--adapter"],
        "adapters are not applied: merge the adapter into the checkpoint, and give that as -m",
    ),
    (
        &["--jinja", "--no-jinja", "--chat-template-file", "--template"],
        "the model's own chat template is used; --chat-template FILE is another, and --raw none; \
         gemma tokenize --rendered prints what it makes of a prompt",
    ),
    (
        &["--context-shift", "--no-context-shift"],
        "a context is not shifted: a text ends where its context is full; -c N makes it larger",
    ),
    (
        &["--embeddings", "--embd-normalize", "--pooling"],
        "gemma makes no embeddings: Gemma 3 and 4 are trained to write text",
    ),
    (
        &["--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro", "--slot-save-path"],
        "--cache-dir DIR is the option for that: it keeps prompts that were read",
    ),
    (
        &["--keep-alive", "--keepalive"],
        "a model of gemma generate and gemma chat is unloaded at their end; \
         gemma serve --keep-alive TIME keeps one loaded",
    ),
    (
        &["--models-max", "--sleep-idle-seconds", "--no-models-autoload"],
        "gemma serve --keep-alive TIME unloads models that are idle, \
         and --models-memory SIZE limits those that are loaded",
    ),
    (
        &["-np", "--n-parallel", "-cb", "--cont-batching", "--no-cont-batching"],
        "--parallel N is the option for texts at once; they always share passes",
    ),
    (
        &["--flash-attn", "--mlock", "--no-mmap", "--numa", "--no-kv-offload", "-nkvo"],
        "leave it out: gemma chooses by itself how it computes, and where weights lie; \
         -d, --gpu-layers and -t are the options for devices",
    ),
    (
        &["-ub", "--ubatch-size", "-b", "--batch-size"],
        "leave it out: passes are sized by themselves",
    ),
    (
        &["--reasoning-budget", "--reasoning-format", "--reasoning"],
        "--think on lets a model think, and --think-budget N limits its thought",
    ),
    (
        &["-no-cnv", "--no-conversation", "--single-turn"],
        "gemma generate answers one prompt, and gemma chat is the conversation",
    ),
    (
        &["--mirostat", "--typical", "--xtc-probability", "--dry-multiplier", "--top-nsigma"],
        "leave it out: --top-k, --top-p and --min-p are the filters here, \
         --repeat-penalty, --presence-penalty and --frequency-penalty the penalties",
    ),
    (
        &["--slots", "--metrics", "--props", "--no-slots"],
        "leave it out: gemma serve has /metrics and /props without an option, and no /slots",
    ),
    (&["-a", "--alias"], "a model is called as its directory or file is: rename that"),
    (
        &["--no-display-prompt", "--log-disable", "--simple-io"],
        "nothing but the answer reaches standard output; -q silences notes",
    ),
];

/// Prints why no command can run, and returns the exit code.
///
/// Help and version go to standard output.
pub fn report(early: Early, argv: &[OsString]) -> ExitCode {
    let error = match early {
        Early::Clap(error) => error,
        Early::Fault(error) => return refuse(error),
    };
    if let Some(fault) = explain(&error, argv) {
        return refuse(fault.into());
    }
    Early::Clap(error).print()
}

fn refuse(error: anyhow::Error) -> ExitCode {
    Ui::plain().error(&error);
    ExitCode::from(fault_of(&error).map_or(1, |fault| fault.kind.exit_code()))
}

/// Returns a better answer than the parser's own, if there is one.
fn explain(error: &clap::Error, argv: &[OsString]) -> Option<Fault> {
    let words: Vec<String> =
        argv.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    if error.kind() == ErrorKind::InvalidUtf8 {
        let at = argv.iter().position(|word| word.to_str().is_none())?;
        let what = format!("argument {at}, `{}`, is not valid UTF-8", argv[at].to_string_lossy());
        let help = "convert the text: iconv -f LATIN1 -t UTF-8 FILE | gemma generate";
        return Some(Fault::usage(what).help(help));
    }
    let command = words.first()?;
    // The -c of the program `llm` continues the last conversation.
    if command == "chat" && words.last().is_some_and(|word| word == "-c") {
        let fault = Fault::usage("-c (--ctx-size) needs the size of the context in tokens");
        return Some(fault.help("gemma chat --continue continues the last conversation"));
    }
    if error.kind() == ErrorKind::ValueValidation
        && let Some(what) = settings::plain_number(error)
    {
        return Some(Fault::usage(what));
    }
    // Other errors also have the name of an option, for example one that exists but has a wrong
    // value.
    let is_unknown = error.kind() == ErrorKind::UnknownArgument;
    let typed = |name: &str| match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(wrong)) => {
            wrong == name || wrong.starts_with(&format!("{name} "))
        }
        _ => false,
    };
    // clap reads the letters after one dash as separate options, and an h among them as a request
    // for help. So this looks at the words that were typed.
    let options = words.iter().take_while(|word| *word != "--");
    for word in options {
        let name = word.split('=').next().unwrap_or(word);
        let Some((_, help)) = OPTIONS.iter().find(|(names, _)| names.contains(&name)) else {
            continue;
        };
        let clustered = name.starts_with('-') && !name.starts_with("--") && name.len() > 2;
        if clustered || is_unknown && typed(name) {
            return Some(Fault::usage(format!("there is no option `{name}`")).help(*help));
        }
    }
    match error.kind() {
        ErrorKind::InvalidSubcommand => unknown_command(command, &words, error),
        ErrorKind::UnknownArgument if command.starts_with('-') => {
            let help = "options come after the command: gemma generate OPTIONS 'your prompt'";
            Some(Fault::usage(format!("`{command}` comes before any command")).help(help))
        }
        _ => None,
    }
}

/// Explains an unknown command.
///
/// The first word is another program's command, a model, or the beginning of a prompt.
fn unknown_command(command: &str, words: &[String], error: &clap::Error) -> Option<Fault> {
    // `gemma help serve` asks about another command.
    let command = if command == "help" { words.get(1)? } else { command };
    let fault = Fault::usage(format!("there is no command `{command}`"));
    if let Some((_, help)) = COMMANDS.iter().find(|(names, _)| names.contains(&command)) {
        return Some(fault.help(*help));
    }
    if words[0] == "help" {
        return None;
    }
    let is_model =
        command.ends_with(".gguf") || std::path::Path::new(command).join("config.json").exists();
    if is_model {
        return Some(fault.help(format!("to talk to a model: gemma chat -m {}", quoted(command))));
    }
    let prompt: Vec<&str> =
        words.iter().take_while(|word| !word.starts_with('-')).map(String::as_str).collect();
    let similar = error.get(ContextKind::SuggestedSubcommand).is_some();
    if prompt.len() > 2 || prompt.len() == 2 && !similar || command.contains(char::is_whitespace) {
        let rest: String =
            words[prompt.len()..].iter().map(|word| format!(" {}", quoted(word))).collect();
        return Some(
            Fault::usage("a prompt needs a command in front of it")
                .help(format!("gemma generate {}{rest}", quoted(&prompt.join(" ")))),
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::commands::definition;

    /// Returns the hint for a command line, as `error` and `help`.
    fn hint(line: &[&str]) -> Option<(String, String)> {
        let argv: Vec<OsString> =
            std::iter::once("gemma").chain(line.iter().copied()).map(OsString::from).collect();
        let error = definition().try_get_matches_from(&argv).expect_err("the line is wrong");
        explain(&error, &argv).map(|fault| (fault.what, fault.help.unwrap_or_default()))
    }

    #[test]
    fn other_programs_commands_and_options_are_translated() {
        for (names, help) in COMMANDS {
            for name in names {
                assert_eq!(
                    hint(&[name]).unwrap(),
                    (format!("there is no command `{name}`"), help.to_owned())
                );
            }
        }
        for (names, help) in OPTIONS {
            for name in names {
                let (what, found) =
                    hint(&["generate", "hi", name, "3"]).unwrap_or_else(|| panic!("{name}"));
                assert_eq!(
                    (what.as_str(), found.as_str()),
                    (format!("there is no option `{name}`").as_str(), help)
                );
            }
        }
        assert_eq!(hint(&["generate", "-hf=x"]).unwrap().0, "there is no option `-hf`");
        assert!(hint(&["genrate", "hi"]).is_none(), "the parser knows better");
        assert!(hint(&["help", "server"]).unwrap().1.contains("gemma serve"));
        assert!(hint(&["help", "bogus"]).is_none());
    }

    /// Gives every foreign option that some command does have to that command, with wrong values.
    #[test]
    fn a_real_option_is_not_denied_for_its_value() {
        let mut found = Vec::new();
        for command in definition().get_subcommands() {
            let command = command.get_name().to_owned();
            for name in OPTIONS.iter().flat_map(|(names, _)| *names) {
                let root = definition();
                let options = root.find_subcommand(&command).unwrap().get_arguments();
                let is_name = |arg: &clap::Arg| {
                    // A flag takes no value.
                    if !arg.get_action().takes_values() {
                        return false;
                    }
                    let long = arg.get_long_and_visible_aliases().unwrap_or_default();
                    long.contains(&name.trim_start_matches('-'))
                        || arg.get_short().is_some_and(|short| *name == format!("-{short}"))
                };
                if !options.into_iter().any(is_name) {
                    continue;
                }
                found.push((command.clone(), *name));
                for wrong in [&["no such thing"][..], &["99999"], &[""], &[], &["0", name, "1"]] {
                    let line = [&[command.as_str(), name], wrong].concat();
                    let argv = [&["gemma"], &line[..]].concat();
                    if definition().try_get_matches_from(argv).is_ok() {
                        continue; // A time of --keep-alive is a number, too.
                    }
                    let found_hint = hint(&line).map_or(String::new(), |(what, _)| what);
                    assert!(!found_hint.contains("there is no option"), "{line:?}: {found_hint}");
                }
            }
        }
        let serve = ["--host", "--port", "--keep-alive"].map(|name| ("serve".to_owned(), name));
        assert_eq!(found, serve);
        assert_eq!(
            hint(&["serve", "--port", "99999"]).unwrap().0,
            "invalid value '99999' for '--port <PORT>': expected a whole number from 0 to 65535"
        );
    }

    #[test]
    fn what_is_no_number_is_said_in_the_words_of_the_other_options() {
        for (line, expected) in [
            (["serve", "--port", "abc"], "'--port <PORT>': expected a whole number"),
            (["generate", "--parallel", "abc"], "'--parallel <N>': expected a whole number"),
            (["bench", "--pp", "x"], "'--pp <N>': expected a whole number"),
            (["bench", "--temp", "x"], "'--temp <T>': expected a number"),
            (["plan", "-t", "0"], "'--threads <N>': expected a whole number from 1 to 1024"),
        ] {
            let what = hint(&line).unwrap_or_else(|| panic!("{line:?}")).0;
            assert!(what.ends_with(expected), "{what}");
        }
        assert!(hint(&["generate", "--top-p", "abc"]).is_none(), "says what it expects itself");
    }

    #[test]
    fn a_prompt_without_a_command_is_given_back_with_one() {
        assert_eq!(hint(&["What is it?"]).unwrap().1, "gemma generate 'What is it?'");
        assert_eq!(
            hint(&["What", "isn't", "it?", "-n", "5"]).unwrap().1,
            format!("gemma generate {} -n 5", quoted("What isn't it?"))
        );
        assert_eq!(
            hint(&["What", "is", "it?"]).unwrap().1,
            "gemma generate 'What is it?'",
            "although chat is spelled like what"
        );
        assert_eq!(
            hint(&["gemma.gguf"]).unwrap().1,
            "to talk to a model: gemma chat -m gemma.gguf"
        );
        assert!(hint(&["-m", "x", "generate"]).unwrap().1.contains("after the command"));
        assert!(hint(&["bogus"]).is_none());
    }
}
