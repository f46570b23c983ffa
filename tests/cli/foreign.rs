//! Foreign input and missing resources end a run with a documented exit code, a reason and a
//! remedy: chat templates, files that shrink, pipes instead of files, no threads, no memory.
#![cfg(target_os = "linux")]

use crate::shell;
use serde_json::Value;
use shell::{BINARY, Run, bash, code, command, gemma_in, with_model};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("draft")
}

const SHORT: [&str; 6] = ["generate", "Hi", "-n", "2", "-q", "--draft=off"];

fn short(dir: &Path) -> Run {
    gemma_in(dir, &[&SHORT[..], &["-m", "m"]].concat(), b"")
}

/// Each template needs more memory, stack or time than allowed, or causes a panic of the library.
#[test]
fn a_chat_template_takes_no_more_than_its_part() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[]);
    let long = format!("{{{{ a{} }}}}", ".a".repeat(100_000));
    for (template, says) in [
        ("{% for i in range(2) %}{{ loop.cycle() }}{% endfor %}", "cannot be rendered"),
        (
            concat!(
                "{% set n = namespace(a='xxxxxxxx') %}",
                "{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
            ),
            "memory",
        ),
        ("{{ 'a\nb'|indent(10000000000) }}", "indent"),
        ("{{ '%10000000000d'|format(1) }}", "memory"),
        ("{{ [1]|batch(1000000000000, 0) }}", "memory"),
        ("{{ [1]|slice(1000000000000) }}", "memory"),
        ("{% set n = namespace(a=1) %}{% set n.a = n %}{{ n }}", "nests too deeply"),
        (
            "{% for i in range(99999) %}{% set x = range(99999)|sort %}{% endfor %}",
            "does not end in time",
        ),
        (&long, "more than the limit"),
        ("{% include '/etc/passwd' %}", ""),
    ] {
        fs::write(dir.path().join("m/chat_template.jinja"), template).unwrap();
        short(dir.path()).fails(3, &["template", says, "--raw"]);
    }
    // A small template that nests deeply is still rendered.
    for deep in ["-".repeat(50_000), "not ".repeat(15_000)] {
        let template = format!("{{{{ {deep} 1 }}}}");
        fs::write(dir.path().join("m/chat_template.jinja"), template).unwrap();
        short(dir.path()).ok();
    }
}

/// Without /proc the program can neither start nor limit its child processes. Grammars and foreign
/// templates are refused then, and everything else works.
#[test]
fn nothing_foreign_runs_without_limits() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[("chat_template.jinja", b"{{ bos_token }}{{ messages[0].content }}")]);
    let hide = "unshare -rm sh -c 'mount -t tmpfs none /proc && exec \"$@\"' sh";
    if bash(dir.path(), &format!("{hide} true")).code != 0 {
        eprintln!("not tried: this system lets nobody hide /proc");
        return;
    }
    let run = |args: &str| bash(dir.path(), &format!("{hide} \"$G\" {args}"));
    let words = ["no process can be started", "/proc"];
    run("generate Hi -n 2 -q --draft=off --regex '[a-z]+'").fails(5, &words);
    run("generate Hi -n 2 -q --draft=off -m m").fails(5, &words);
    run("generate Hi -n 2 -q --draft=off").ok();
    for role in [gemma::grammar::ROLE, gemma::models::chat::ROLE] {
        assert_eq!(run(role).code, 71, "{role}");
    }
}

/// The model file is truncated to nothing while a run reads it for seconds.
#[test]
fn a_model_that_shrinks_while_it_is_read_is_an_invalid_model() {
    let dir = tempfile::tempdir().unwrap();
    for args in [&["inspect", "m", "--verify"][..], &["eval", "-m", "m", "text"]] {
        let _ = fs::remove_dir_all(dir.path().join("m"));
        let weights = fs::read(bundled().join("demo-target/model.safetensors")).unwrap();
        with_model(dir.path(), &[("model.safetensors", &weights)]);
        fs::write(dir.path().join("text"), "A text of some words. ".repeat(300)).unwrap();
        let file = dir.path().join("m/model.safetensors");
        let mut command = command(BINARY, dir.path());
        command.args(args).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let maps = format!("/proc/{}/maps", child.id());
        let is_mapped =
            || fs::read_to_string(&maps).is_ok_and(|maps| maps.contains("model.safetensors"));
        while !is_mapped() {
            assert!(child.try_wait().unwrap().is_none(), "{args:?} ended before it read anything");
            std::thread::yield_now();
        }
        fs::File::options().write(true).open(&file).unwrap().set_len(4096).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(code(output.status), 3, "{args:?}: {said}");
        assert!(said.contains("model.safetensors") && said.contains("help: "), "{said}");
    }
}

/// The superuser has no limit of threads, so the test switches to another user.
#[test]
fn without_threads_the_work_is_done_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[]);
    fs::write(dir.path().join("in"), "{\"prompt\": \"Hi\", \"max_tokens\": 2}\n").unwrap();
    let alone = r#"chmod 755 .; cp "$G" gemma; chmod -R a+rX .; mkdir w; chmod 777 w; cd w
as='env HOME=/nonexistent'
[ "$(id -u)" != 0 ] || as="setpriv --reuid 64999 --regid 64999 --clear-groups $as"
$as prlimit --nproc=1 ../gemma "#;
    for (args, good) in [
        ("generate Hi -n 2 -q --threads 1", true),
        ("generate Hi -n 2 -q --threads 2", false),
        ("generate --batch ../in -q --threads 1", true),
        ("generate --batch ../in -q --threads 1 --parallel 2", false),
        ("generate Hi -n 2 -q --threads 1 --json-schema '{}'", false),
        ("tokenize Hi", true),
        ("inspect ../m --verify", true),
        ("eval --threads 1 ../in -m ../m", true),
        ("serve --port 0 --threads 1", false),
        ("doctor --json", false),
    ] {
        let dir = dir.path().join(args.replace(['/', ' ', '\''], "_"));
        fs::create_dir(&dir).unwrap();
        symlink("../m", dir.join("m")).unwrap();
        fs::copy(dir.join("../in"), dir.join("in")).unwrap();
        let run = bash(&dir, &format!("{alone}{args}"));
        assert!(!run.err.contains("panicked"), "{args}: {}", run.err);
        if good {
            run.ok();
        } else if !args.starts_with("doctor") {
            assert!([1, 5].contains(&run.code), "{args}: {run:?}");
            assert!(run.err.contains("error: ") && run.err.contains("help: "), "{}", run.err);
        }
    }
}

/// Under any limit, a run succeeds or reports missing memory or threads. It never ends by a signal.
#[test]
fn a_limit_on_memory_is_told_apart_from_a_crash() {
    let dir = tempfile::tempdir().unwrap();
    let (mut refused, mut done) = (0, 0);
    for megabytes in (100..500).step_by(20) {
        let script = format!(
            "ulimit -v {}; \"$G\" --version >/dev/null 2>&1 || exit 127; \
             \"$G\" generate Hi -n 2 -q -t 1",
            megabytes * 1000
        );
        let run = bash(dir.path(), &script);
        match run.code {
            0 => done += 1,
            5 => {
                assert!(run.err.contains("error: ") && run.err.contains("help: "), "{run:?}");
                refused += 1;
            }
            1 => assert!(run.err.contains("error: "), "{run:?}"),
            // The system's loader had no memory for the program itself.
            127 => {}
            _ => panic!("{megabytes} MB: {run:?}"),
        }
    }
    assert!(refused > 0 && done > 0, "{refused} refused, {done} done");
}

#[test]
fn pipes_in_the_place_of_files_are_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[]);
    bash(dir.path(), "\"$G\" generate Hi -n 2 -q").ok();
    let script = r#"set -e
for f in .cache/gemma/*.json; do rm "$f"; mkfifo "$f"; done
timeout 60 "$G" generate Hi -n 2 -q
mkdir g p; mkfifo g/x.gguf p/model.safetensors; cp m/config.json p
refuse() { code=0; timeout 60 "$G" "$@" >/dev/null 2>&1 || code=$?; [ $code = 3 ]; }
for model in g g/x.gguf p; do refuse inspect $model; done
mkfifo recipe; refuse quantize m q --recipe ./recipe
mkdir -p hub/models--a--b/refs hub/models--a--b/snapshots; mkfifo hub/models--a--b/refs/main
export HF_HUB_CACHE=$PWD/hub; refuse inspect a/b"#;
    bash(dir.path(), script).ok();
}

#[test]
fn numbers_that_no_machine_holds_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[]);
    for shift in [30, 40, 56, 57, 60, 63] {
        for more in [0u64, 1] {
            let positions = ((1u64 << shift) + more).to_string();
            for args in [
                &["generate", "Hi", "-d", "cpu", "-c"][..],
                &["plan", "m", "-d", "cpu", "-c"],
                &["serve", "--port", "0", "-d", "cpu", "--parallel", "64", "-c"],
            ] {
                let run = gemma_in(dir.path(), &[args, &[&positions]].concat(), b"");
                // A plan is made even if the model does not fit.
                let good: &[i32] = if args[0] == "plan" { &[0, 2, 5] } else { &[2, 5] };
                assert!(good.contains(&run.code), "{args:?} {positions}: {run:?}");
                assert!(!run.err.contains("panicked"), "{run:?}");
            }
        }
    }
    gemma_in(dir.path(), &["generate", "Hi", "-c", "18446744073709551615"], b"")
        .fails(2, &["--ctx-size", "1073741824"]);
}

/// A draft may cost time, but never change a text. Its norms are as large as a file may have them,
/// so that products overflow.
#[test]
fn a_draft_whose_numbers_overflow_changes_no_text() {
    let dir = tempfile::tempdir().unwrap();
    let from = bundled().join("demo-draft");
    fs::create_dir(dir.path().join("own")).unwrap();
    for (from, name) in [(&from, "config.json"), (&bundled().join("demo-target"), "tokenizer.json")]
    {
        fs::copy(from.join(name), dir.path().join("own").join(name)).unwrap();
    }
    let mut weights = fs::read(from.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&weights[8..8 + length]).unwrap();
    let tensors = header.as_object().unwrap().iter();
    for (_, norm) in tensors.filter(|(name, _)| name.contains("norm")) {
        let huge: &[u8] = match norm["dtype"].as_str().unwrap() {
            "F32" => &9e8f32.to_le_bytes(),
            "BF16" => &9e8f32.to_le_bytes()[2..],
            other => panic!("{other}"),
        };
        let at = |i: usize| 8 + length + norm["data_offsets"][i].as_u64().unwrap() as usize;
        weights[at(0)..at(1)].chunks_mut(huge.len()).for_each(|value| value.copy_from_slice(huge));
    }
    fs::write(dir.path().join("own/model.safetensors"), weights).unwrap();
    let run = |draft: &str| {
        let args = ["generate", "Hi.", "-n", "12", "--seed", "3", "-q", "--draft", draft];
        gemma_in(dir.path(), &args, b"").ok().out
    };
    assert_eq!(run("own"), run("off"));
}

/// In /tmp another user may have created the directory next to DST first.
#[test]
fn quantize_writes_through_no_link_and_into_nobody_elses_directory() {
    let dir = tempfile::tempdir().unwrap();
    with_model(dir.path(), &[]);
    let quantize = ["quantize", "m", "q", "--linear", "i8-row", "--allow-requantize", "-q"];
    let partial = dir.path().join(".q.partial");
    fs::create_dir(dir.path().join("theirs")).unwrap();
    symlink("theirs", &partial).unwrap();
    gemma_in(dir.path(), &quantize, b"").fails(2, &[".q.partial", "not a directory of this user"]);
    fs::remove_file(&partial).unwrap();
    fs::write(dir.path().join("precious"), "kept").unwrap();
    for name in ["lock", "journal"] {
        fs::create_dir(&partial).unwrap();
        symlink("../precious", partial.join(name)).unwrap();
        let run = gemma_in(dir.path(), &quantize, b"");
        assert!(run.code == 1 && run.err.contains(".q.partial"), "{run:?}");
        fs::remove_dir_all(&partial).unwrap();
    }
    assert_eq!(fs::read(dir.path().join("precious")).unwrap(), b"kept");
    // A directory of another user, which only the superuser can create.
    let script = r#"[ "$(id -u)" = 0 ] || exit 77; mkdir .q.partial; chown 64999 .q.partial"#;
    if bash(dir.path(), script).code == 0 {
        gemma_in(dir.path(), &quantize, b"").fails(2, &["not a directory of this user"]);
    }
}
