//! Output files: regular files appear complete, devices, pipes and descriptors are written
//! directly, links are followed, and a failed write is an error.
#![cfg(target_os = "linux")]

use crate::shell;
use serde_json::Value;
use shell::{Run, bash, gemma_in};
use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::Path;

/// A run that takes no time and always prints the same.
const SHORT: &str = "generate Hello -n 4 --seed 1 --temp 0 -q";

/// Runs `script` in `dir`. `$R` is a short run.
fn shell(dir: &Path, script: &str) -> Run {
    bash(dir, &format!("R=\"$G {SHORT}\"\n{script}"))
}

fn said(dir: &Path) -> String {
    shell(dir, "$R").ok().text().to_owned()
}

/// Returns commands that write to `to`, each with another option.
fn every_writer(to: &str) -> Vec<String> {
    let batch = "printf '{\"prompt\": \"Hi\", \"max_tokens\": 2}\\n' | \"$G\" generate --batch -q";
    vec![format!("$R --stats-file {to}"), format!("$R -o {to}"), format!("{batch} -o {to}")]
}

#[test]
fn links_are_followed_to_the_file_that_they_name() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("kept")).unwrap();
    symlink("kept/file", dir.path().join("link")).unwrap();
    for command in every_writer("link") {
        // In the first round the link points to a file that does not exist yet.
        for _ in 0..2 {
            shell(dir.path(), &command).ok();
            assert!(dir.path().join("link").is_symlink(), "{command}");
            assert!(fs::metadata(dir.path().join("kept/file")).unwrap().len() > 0, "{command}");
        }
        fs::remove_file(dir.path().join("kept/file")).unwrap();
    }
}

/// Pipes, by name and by descriptor, get the bytes and stay pipes.
#[test]
fn pipes_are_written_to() {
    let dir = tempfile::tempdir().unwrap();
    bash(dir.path(), "mkfifo pipe").ok();
    for command in every_writer("pipe") {
        let run =
            shell(dir.path(), &format!("cat pipe >got & {command}; code=$?; wait; exit $code"))
                .ok();
        assert_eq!(run.err, "", "{command}");
        assert!(fs::metadata(dir.path().join("pipe")).unwrap().file_type().is_fifo(), "{command}");
        assert!(fs::metadata(dir.path().join("got")).unwrap().len() > 0, "{command}");
    }
    for command in every_writer(">(cat >got; touch end)") {
        shell(dir.path(), &format!("{command}; until [ -e end ]; do sleep .01; done; rm end")).ok();
        assert!(fs::metadata(dir.path().join("got")).unwrap().len() > 0, "{command}");
    }
}

/// Devices stay devices. The test uses a link to a device, because only the superuser may create a
/// device, and the link could be replaced.
#[test]
fn devices_are_written_to() {
    let dir = tempfile::tempdir().unwrap();
    symlink("/dev/null", dir.path().join("null")).unwrap();
    for command in every_writer("/dev/null").into_iter().chain(every_writer("null")) {
        shell(dir.path(), &command).ok();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device(), "{command}");
        assert!(dir.path().join("null").is_symlink(), "{command}");
    }
    for command in every_writer("/dev/full") {
        let run = shell(dir.path(), &command);
        assert!(run.code == 1 && run.err.contains("/dev/full"), "{command}: {run:?}");
    }
    // If this user may create a device, the test uses its own.
    if bash(dir.path(), "mknod node c 1 3").code == 0 {
        for command in every_writer("node") {
            shell(dir.path(), &command);
            assert!(
                fs::symlink_metadata(dir.path().join("node")).unwrap().file_type().is_char_device(),
                "{command}"
            );
        }
    }
}

#[test]
fn standard_output_by_another_name_is_standard_output() {
    let dir = tempfile::tempdir().unwrap();
    let text = said(dir.path());
    symlink("/dev/stdout", dir.path().join("out")).unwrap();
    for name in ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "out"] {
        let run =
            shell(dir.path(), &format!("(echo header; $R -o {name}; echo; echo footer) >f; cat f"))
                .ok();
        assert_eq!(run.text(), format!("header\n{text}\nfooter\n"), "{name}");
        let run = shell(dir.path(), &format!("echo old >log; $R -o {name} >>log; cat log")).ok();
        assert_eq!(run.text(), format!("old\n{text}"), "{name}");
    }
    // A file that was removed and has no name any more.
    let run = shell(dir.path(), "exec 3<>gone; rm gone; $R -o /dev/fd/3; cat /proc/self/fd/3").ok();
    assert_eq!(run.text(), text);
    assert!(!dir.path().join("gone").exists());
    let run = shell(dir.path(), "$R --stats-file /dev/stderr -o text; cat text").ok();
    assert_eq!(run.text(), text);
    assert_eq!(serde_json::from_str::<Value>(&run.err).unwrap()["usage"]["completion_tokens"], 4);
    shell(dir.path(), "$R -o /dev/fd/77").fails(2, &["/dev/fd/77"]);
}

#[test]
fn a_place_that_cannot_be_written_is_said_before_the_model_is_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("in.jsonl"), "{\"prompt\": \"Hi\"}\n").unwrap();
    let batch = "generate --batch in.jsonl";
    for (command, options) in
        [("generate Hi", "-o no/x"), ("generate Hi", "--stats-file 'no dir/x'"), (batch, "-o no/x")]
    {
        let run = bash(dir.path(), &format!("\"$G\" {command} -m /nonexistent {options}"));
        let help =
            if options.contains('\'') { "help: mkdir -p 'no dir'" } else { "help: mkdir -p no" };
        run.fails(2, &["there is no directory no", help]);
    }
    for place in ["/", ".", "in.jsonl/x", "new/"] {
        gemma_in(dir.path(), &["generate", "Hi", "-m", "/nonexistent", "-o", place], b"")
            .fails(2, &["cannot write"]);
    }
}

/// A limit on file sizes makes writes fail as a full disk does.
#[test]
fn a_limit_on_file_sizes_loses_no_text() {
    let dir = tempfile::tempdir().unwrap();
    let text = said(dir.path());
    // The files of the cache exceed the limit too, and that is not an error.
    let run = shell(dir.path(), "ulimit -f 1; $R -o out; code=$?; cat out; exit $code");
    assert_eq!(run.ok().text(), text);
    let script = r#"
for n in 1 2 3 4 5 6 7 8 9; do echo '{"prompt": "Hi", "max_tokens": 2}'; done >in
(ulimit -f 1; "$G" generate --batch in -q OUT)"#;
    for out in ["-o all", "--resume some", ">pipe"] {
        let run = bash(dir.path(), &script.replace("OUT", out));
        assert!(run.code == 1 && run.err.contains("cannot write"), "{out}: {run:?}");
    }
    assert!(!dir.path().join("all").exists());
    let left =
        fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert_eq!(
        left.filter(|name| name.starts_with(".gemma") || name.starts_with(".tmp")).count(),
        0
    );
}

#[test]
fn output_that_goes_nowhere_is_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    for script in [
        "$R >&-",
        "$R 1</dev/null",
        "$R >/dev/full",
        "$R --format json >&-",
        "$G --version >/dev/full",
        "$G --version >&-",
        "$G --help >/dev/full",
        "$G generate --help >&-",
        "$G schema >&-",
        "echo '{\"prompt\": \"Hi\"}' | $G generate --batch -q >&-",
    ] {
        let run = shell(dir.path(), script);
        assert!(
            run.code == 1 && run.err.contains("cannot write to standard output"),
            "{script}: {run:?}"
        );
    }
    // Nothing is written to the file.
    assert_eq!(
        shell(dir.path(), "$R -o out >&-; code=$?; cat out; exit $code").ok().text(),
        said(dir.path())
    );
}
