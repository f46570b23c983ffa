//! Settings from files and the environment: their permissions, and the errors about mistakes.

use crate::shell;
use shell::{BINARY, Run, bash, command, gemma_in, wait};
use std::fs;
use std::path::Path;

/// A run that ends at once if its settings have no mistake.
const TOKENIZE: [&str; 2] = ["tokenize", "Hi"];

fn with_env(dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Run {
    let mut command = command(BINARY, dir);
    command.args(args).envs(env.iter().copied());
    wait(command, b"")
}

/// A file in the working directory may not load code, write a file or open the server. The user's
/// own file may.
#[test]
fn a_file_in_the_working_directory_loads_no_code_writes_no_file_and_opens_no_server() {
    let dir = tempfile::tempdir().unwrap();
    let users = tempfile::tempdir().unwrap();
    fs::create_dir(users.path().join("gemma")).unwrap();
    let users_file = users.path().join("gemma/config.toml");
    let env = [("XDG_CONFIG_HOME", users.path().to_str().unwrap())];
    let short = ["generate", "Hi", "-n", "2", "-q"];
    for (key, value, section) in [
        ("output", "made", "generate"),
        ("stats-file", "made", "generate"),
        ("host", "0.0.0.0", "serve"),
        ("api-key", "open-sesame", "serve"),
        ("api-key-file", "keys", "serve"),
        ("cors-origin", "https://evil.example", "serve"),
        ("log", "off", "serve"),
        ("device-lock", "off", "serve"),
        ("device-lock", "off", "generate"),
    ] {
        for text in
            [format!("{key} = \"{value}\"\n"), format!("\n[{section}]\n{key} = \"{value}\"\n")]
        {
            let line =
                if text.starts_with('\n') { "gemma.toml, line 3" } else { "gemma.toml, line 1" };
            fs::write(dir.path().join("gemma.toml"), &text).unwrap();
            let own = format!("set it in {}", users_file.display());
            for args in [&short[..], &["doctor"], &["eval", "gemma.toml"], &["serve"]] {
                with_env(dir.path(), args, &env)
                    .fails(2, &[line, &format!("`{key}`"), &format!("--{key}"), &own]);
            }
        }
    }
    assert!(!dir.path().join("made").exists());

    // Options that are only read, and write no file, are allowed.
    fs::write(dir.path().join("gemma.toml"), "npu = \"off\"\ndraft = \"ngram\"\n").unwrap();
    with_env(dir.path(), &short, &env).ok();
    fs::remove_file(dir.path().join("gemma.toml")).unwrap();
    fs::write(&users_file, "output = \"made\"\n").unwrap();
    with_env(dir.path(), &short, &env).ok();
    assert!(dir.path().join("made").exists());

    // In the section of the server, options with numbers and lists are refused too. The user's own
    // file may have them.
    let edge = "[serve]\nport = 80\nmax-body = 999\nclient-timeout = 9\n\
        cors-origin = [\"http://localhost:1\"]\n\
        host = \"::1\"\ndevice-lock = \"off\"\n";
    for line in edge.lines().skip(1) {
        fs::write(dir.path().join("gemma.toml"), format!("[serve]\n{line}\n")).unwrap();
        let key = line.split(' ').next().unwrap();
        with_env(dir.path(), &["serve", "--print-config"], &env)
            .fails(2, &["gemma.toml, line 2", &format!("`{key}`")]);
    }
    fs::remove_file(dir.path().join("gemma.toml")).unwrap();
    fs::write(&users_file, edge).unwrap();
    let shown = with_env(dir.path(), &["serve", "--print-config"], &env).ok();
    for line in edge.lines().skip(1) {
        // A file in the working directory could not contain the line.
        assert!(shown.text().contains(&format!("# {line} ")), "{line}: {}", shown.text());
    }
    fs::remove_file(&users_file).unwrap();

    // A relative directory of settings is below the working directory, so the same rules apply.
    fs::create_dir(dir.path().join("gemma")).unwrap();
    fs::write(dir.path().join("gemma/config.toml"), "output = \"again\"\n").unwrap();
    with_env(dir.path(), &short, &[("XDG_CONFIG_HOME", ".")]).ok();
    assert!(!dir.path().join("again").exists());
}

#[test]
fn what_one_run_works_on_is_in_no_file() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join(".config/gemma")).unwrap();
    for file in ["gemma.toml", ".config/gemma/config.toml"] {
        for text in
            ["batch = \"x\"", "resume = \"x\"", "[quantize]\nrestart = true", "print-config = true"]
        {
            fs::write(dir.path().join(file), text).unwrap();
            gemma_in(dir.path(), &TOKENIZE, b"")
                .fails(2, &[file.rsplit('/').next().unwrap(), "as a flag"]);
        }
        fs::remove_file(dir.path().join(file)).unwrap();
    }
}

#[test]
fn misspelt_keys_have_a_line_and_a_likely_meaning() {
    let dir = tempfile::tempdir().unwrap();
    for (text, words) in [
        (
            "temp = 1\nmax-tokns = 4\n",
            &["gemma.toml, line 2", "`max-tokns`", "help: did you mean max-tokens?"][..],
        ),
        ("[generate]\n\nmax_tokens = 4\n", &["gemma.toml, line 3", "did you mean max-tokens?"]),
        (
            "[genrate]\nmax-tokens = 4\n",
            &["gemma.toml, line 1", "[genrate]", "did you mean [generate]?"],
        ),
        ("quux = 4\n", &["line 1", "`quux`", "long options"]),
    ] {
        fs::write(dir.path().join("gemma.toml"), text).unwrap();
        gemma_in(dir.path(), &TOKENIZE, b"").fails(2, words);
    }
    // Aliases of an option are accepted.
    fs::write(dir.path().join("gemma.toml"), "temperature = 0.25\n").unwrap();
    let shown = gemma_in(dir.path(), &["generate", "--print-config"], b"").ok();
    assert!(
        shown.text().lines().any(|l| l.starts_with("temp = 0.25 ") && l.ends_with("# gemma.toml")),
        "{}",
        shown.text()
    );
}

#[test]
fn keys_are_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let serve = ["serve", "--print-config", "--api-key", "open-sesame"];
    let shown = gemma_in(dir.path(), &serve, b"").ok();
    assert!(shown.text().contains("# api-key is set, and not shown"), "{}", shown.text());
    let env = [("GEMMA_API_KEY", "open-sesame")];
    let from_env = with_env(dir.path(), &["serve", "--print-config"], &env).ok();
    assert!(from_env.text().contains("api-key is set"), "{}", from_env.text());
    for text in [shown.text(), from_env.text()] {
        assert!(!text.contains("sesame"), "{text}");
    }
}

#[cfg(unix)]
#[test]
fn a_file_of_settings_is_a_file_of_some_length() {
    let dir = tempfile::tempdir().unwrap();
    bash(dir.path(), "mkfifo gemma.toml").ok();
    gemma_in(dir.path(), &TOKENIZE, b"").fails(2, &["gemma.toml", "not a regular file"]);
    bash(dir.path(), "rm gemma.toml; ln -s /dev/zero gemma.toml").ok();
    gemma_in(dir.path(), &TOKENIZE, b"").fails(2, &["gemma.toml", "not a regular file"]);
    bash(dir.path(), "rm gemma.toml; yes '#' | head -c 2000000 >gemma.toml").ok();
    gemma_in(dir.path(), &TOKENIZE, b"").fails(2, &["gemma.toml", "longer than"]);
}

/// The superuser may read everything, so the test switches to another user.
#[cfg(unix)]
#[test]
fn a_home_that_may_not_be_searched_is_no_reason_to_fail() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    fs::create_dir(&home).unwrap();
    let script = r#"chmod 755 .; chmod 000 home; export HOME="$PWD/home"; cp "$G" gemma
as=; [ "$(id -u)" != 0 ] || as="setpriv --reuid 65534 --regid 65534 --clear-groups"
$as ./gemma tokenize Hi
code=$?; chmod 755 home; exit $code"#;
    assert_eq!(bash(dir.path(), script).ok().text().lines().count(), 1);
}

#[test]
fn variables_are_named_where_they_are_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let short = ["generate", "Hi", "-n", "2"];
    let wrong = |args: &[&str], env: &[(&str, &str)], words: &[&str]| {
        let run = with_env(dir.path(), args, env).fails(2, words);
        assert!(!run.err.contains("Usage:"), "{}", run.err);
    };
    wrong(
        &["generate", "Hi"],
        &[("GEMMA_MAX_TOKENS", "abc")],
        &["'abc'", "--max-tokens", "GEMMA_MAX_TOKENS", "unset GEMMA_MAX_TOKENS"],
    );
    wrong(&short, &[("GEMMA_TEMPERATURE", "hot")], &["'hot'", "GEMMA_TEMPERATURE"]);
    // An error in the arguments is not blamed on the environment.
    let typed =
        with_env(dir.path(), &["generate", "Hi", "--top-k", "abc"], &[("GEMMA_TEMP", "0.5")])
            .fails(2, &["--top-k"]);
    assert!(!typed.err.contains("GEMMA_"), "{}", typed.err);

    let shown =
        with_env(dir.path(), &["generate", "--print-config"], &[("GEMMA_TEMPERATURE", "0.25")])
            .ok();
    let line = shown.text().lines().find(|l| l.starts_with("temp = ")).unwrap().to_owned();
    assert!(line.contains("0.25") && line.ends_with("# environment GEMMA_TEMPERATURE"), "{line}");

    let said = with_env(
        dir.path(),
        &TOKENIZE,
        &[("GEMMA_MAXTOKENS", "3"), ("GEMMA_VULKAN_CPU", "1"), ("GEMMA_SEED", "")],
    )
    .ok();
    assert!(
        said.err.contains("GEMMA_MAXTOKENS") && said.err.contains("did you mean GEMMA_MAX_TOKENS?"),
        "{}",
        said.err
    );
    assert!(!said.err.contains("GEMMA_VULKAN"), "{}", said.err);
    assert_eq!(
        with_env(dir.path(), &[&TOKENIZE[..], &["-q"]].concat(), &[("GEMMA_MAXTOKENS", "3")])
            .ok()
            .err,
        ""
    );
}

/// The output of `--print-config` is a valid configuration. In it, values from the model are
/// comments.
#[test]
fn a_shown_configuration_can_be_saved() {
    let dir = tempfile::tempdir().unwrap();
    let show = |dir: &Path| {
        gemma_in(dir, &["generate", "--print-config", "-n", "7", "--stats-file", "x"], b"").ok()
    };
    let text = show(dir.path()).text().to_owned();
    for line in ["# temp = ", "# top-k = ", "# stats-file = \"x\"", "max-tokens = 7 "] {
        assert!(text.lines().any(|l| l.starts_with(line)), "{line}: {text}");
    }
    assert!(!text.contains("isa"), "{text}");
    fs::write(dir.path().join("gemma.toml"), &text).unwrap();
    let again = gemma_in(dir.path(), &["generate", "--print-config"], b"").ok();
    assert!(
        again
            .text()
            .lines()
            .any(|l| l.starts_with("max-tokens = 7 ") && l.ends_with("# gemma.toml")),
        "{}",
        again.text()
    );
}

/// If options exclude each other, the source with higher precedence wins: a flag, then the
/// environment, then the file's own section, then the top of the file.
#[test]
fn the_stronger_source_wins_among_options_that_exclude_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let shown = |file: &str, env: &[(&str, &str)], flags: &[&str]| {
        fs::write(dir.path().join("gemma.toml"), file).unwrap();
        let args = [&["generate", "--print-config"], flags].concat();
        with_env(dir.path(), &args, env).ok().text().to_owned()
    };
    let has = |text: &str, start: &str, end: &str| {
        assert!(text.lines().any(|l| l.starts_with(start) && l.ends_with(end)), "{start}: {text}");
    };
    let text = shown("greedy = true\nregex = \"a\"\n", &[], &["--temp", "0.5"]);
    has(&text, "temp = 0.5 ", "");
    has(&text, "greedy = false", "");
    has(&text, "regex = \"a\"", "# gemma.toml");
    let text = shown("regex = \"a\"\nsystem = \"s\"\n", &[], &["--json-schema", "{}"]);
    has(&text, "json-schema = ", "");
    has(&text, "# regex is not set", "");
    has(&text, "system = \"s\"", "# gemma.toml");
    let env = [("GEMMA_GREEDY", "1"), ("GEMMA_REGEX", "a")];
    let text = shown("temp = 0.5\njson-schema = \"{}\"\n", &env, &[]);
    has(&text, "greedy = true", "");
    has(&text, "regex = \"a\"", "");
    has(&text, "# json-schema is not set", "");
    let text = shown("", &env, &["--temp", "0.5", "--json-schema", "{}"]);
    has(&text, "temp = 0.5 ", "");
    has(&text, "# regex is not set", "");
    let text = shown("temp = 0.5\n", &[("GEMMA_GREEDY", "0")], &[]);
    has(&text, "temp = 0.5 ", "# gemma.toml");
    let text = shown("greedy = true\n", &[("GEMMA_GREEDY", "0")], &[]);
    has(&text, "greedy = false", "");
    let text = shown("greedy = true\n[generate]\ntemp = 0.5\n", &[], &[]);
    has(&text, "temp = 0.5 ", "# gemma.toml");

    // Two options of one source are an error.
    for (file, env, flags) in [
        ("", &[][..], &["--temp", "0.5", "--greedy"][..]),
        ("", &[("GEMMA_REGEX", "a"), ("GEMMA_JSON_SCHEMA", "{}")], &[]),
        ("temp = 0.5\ngreedy = true\n", &[], &[]),
    ] {
        fs::write(dir.path().join("gemma.toml"), file).unwrap();
        let args = [&["generate", "--print-config"], flags].concat();
        with_env(dir.path(), &args, env).fails(2, &["cannot be used with"]);
    }
    fs::write(dir.path().join("gemma.toml"), "temp = 0.5\ntemperature = 0.6\n").unwrap();
    gemma_in(dir.path(), &TOKENIZE, b"").ok();
    gemma_in(dir.path(), &["generate", "--print-config"], b"")
        .fails(2, &["`temp` and `temperature` are one option"]);
}
