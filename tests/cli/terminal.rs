//! Output on a terminal: colours if wanted, a final line break, figures. Only a chat asks
//! questions.
#![cfg(target_os = "linux")]

use crate::shell;
use crate::terminals::Terminal;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

/// Runs to the end. Returns the exit code and the terminal's output.
fn on_terminal(args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String) {
    Terminal::open(args, env, tempfile::tempdir().unwrap().path()).end()
}

#[test]
fn a_terminal_gets_colour_a_final_line_break_and_figures() {
    let args = ["generate", "Hi.", "-n", "4", "--seed", "3", "--ignore-eos"];
    let (code, text) = on_terminal(&args, &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("\x1b[1;33mnote:\x1b[0m") && text.contains("seed 3"), "{text:?}");
    for env in [("NO_COLOR", "1"), ("CLICOLOR", "0"), ("TERM", "dumb")] {
        let (_, text) = on_terminal(&args, &[env]);
        assert!(!text.contains("\x1b[1;33m") && !text.contains("\x1b[2m"), "{env:?}: {text:?}");
        assert!(
            text.contains("\r\n(cut off by --max-tokens)\r\n4 tokens, "),
            "the text ends in a line break: {text:?}"
        );
    }
    let (_, full) = on_terminal(
        &["generate", "Hi.", "-n", "99", "-c", "14", "--ignore-eos", "--color", "never"],
        &[],
    );
    assert!(full.contains("(cut off: the context of 14 tokens is full)\r\n"), "{full:?}");
    let stats = full.lines().last().unwrap_or_default();
    assert!(
        stats.contains(" tokens, ") && stats.chars().count() <= 80 && !stats.contains("tok/pass"),
        "{stats:?}"
    );
    let (_, verbose) = on_terminal(&[&args[..], &["-v", "--color", "never"]].concat(), &[]);
    let figures = verbose.split_once("4 tokens, ").unwrap_or_default().1;
    assert!(
        figures.contains("tok/pass") && figures.lines().all(|line| line.chars().count() <= 80),
        "{verbose:?}"
    );
    let (_, never) =
        on_terminal(&[&args[..], &["--color", "never", "--progress", "off"]].concat(), &[]);
    assert!(!never.contains('\x1b'), "{never:?}");
    let (_, dumb) = on_terminal(&args, &[("TERM", "dumb")]);
    assert!(!dumb.contains('\x1b'), "a dumb terminal gets no bars either: {dumb:?}");
    let (_, quiet) = on_terminal(&[&args[..], &["-q"]].concat(), &[]);
    assert!(
        !quiet.contains('\x1b') && !quiet.contains("note") && quiet.ends_with("\r\n"),
        "{quiet:?}"
    );
}

/// Control characters in model output and file names do not reach the terminal.
#[test]
fn a_terminal_obeys_no_text_of_others() {
    let args = ["generate", "Hi.", "-q", "--regex", "\\x1b\\[31mx\\x07"];
    let (code, text) = on_terminal(&args, &[]);
    assert_eq!((code, text.contains("[31mx")), (Some(0), true), "{text:?}");
    assert!(!text.contains(['\x1b', '\x07']), "{text:?}");
    let piped = shell::gemma(&args, b"").ok();
    assert!(piped.text().contains("\x1b[31mx\x07"), "{:?}", piped.text());

    let dir = tempfile::tempdir().unwrap();
    let name = "m\x1b]0;owned\x07";
    std::os::unix::fs::symlink(
        concat!(env!("CARGO_MANIFEST_DIR"), "/draft/demo-target"),
        dir.path().join(name),
    )
    .unwrap();
    for args in
        [&["inspect", name][..], &["plan", name, "-d", "cpu"], &["inspect", name, "--x\x1bx"]]
    {
        let terminal = Terminal::open(args, &[("NO_COLOR", "1")], dir.path());
        let (_, text) = terminal.end();
        assert!(
            !text.contains(['\x07']) && !text.contains("\x1b]") && !text.contains("\x1bx"),
            "{text:?}"
        );
    }
}

#[test]
fn a_terminal_is_never_asked_for_input() {
    for args in [&["generate"][..], &["generate", "-"], &["tokenize"]] {
        let (code, text) = on_terminal(args, &[]);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains("help:"), "{text}");
    }
}

#[test]
fn a_chat_goes_on_from_what_was_said_and_outlives_its_answers() {
    let dir = tempfile::tempdir().unwrap();
    shell::with_model(dir.path(), &[]);
    let args = ["chat", "-m", "m", "--seed", "2", "-n", "12", "-s", "Be brief."];
    let mut chat = Terminal::open(&args, &[], dir.path());
    chat.until("/help lists the commands");
    chat.prompt();
    assert!(chat.ask("/stats\r").contains("there is no answer yet"));
    let answer = chat.ask("What is photosynthesis?\r");
    assert!(answer.trim().len() > 20, "{answer:?}");
    let first = read_anew(&chat.ask("/stats\r"));
    // Corrects a typing error with Backspace, and continues the message on the next line. Only the
    // new message is read.
    chat.ask("Why thx\x7fat?\\\r");
    chat.ask("Tell me.\r");
    let second = read_anew(&chat.ask("/stats\r"));
    assert!(second < first + 10, "{first} tokens were read first, {second} then");
    assert!(chat.ask("/nonsense\r").contains("there is no command /nonsense"));
    assert!(chat.ask("/save talk.json\r").contains("saved as talk.json"));
    let talk: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("talk.json")).unwrap()).unwrap();
    let roles: Vec<_> =
        talk.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(talk[3]["content"], "Why that?\nTell me.");
    assert!(
        answer.replace("\r\n", "\n").contains(talk[2]["content"].as_str().unwrap().trim()),
        "{answer:?}: {talk}"
    );
    // The file that a link points to is written, and the link stays a link.
    std::os::unix::fs::symlink("talk.json", dir.path().join("link")).unwrap();
    std::fs::remove_file(dir.path().join("talk.json")).unwrap();
    assert!(chat.ask("/save link\r").contains("saved as link"));
    assert!(dir.path().join("link").is_symlink() && dir.path().join("talk.json").exists());
    assert!(chat.ask("/reset\r").contains("is forgotten"));
    assert!(chat.ask("/save talk.json\r").contains("nothing was said yet"));
    chat.keys("/quit\r");
    let (code, text) = chat.end();
    assert_eq!(code, Some(0), "{text}");
}

/// Returns the number of tokens of the last prompt that were not in the cache.
fn read_anew(stats: &str) -> usize {
    let (before, _) = stats
        .split_once(" tokens of the last prompt were read")
        .unwrap_or_else(|| panic!("{stats:?}"));
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Lines that arrive at once without bracketed paste are separate messages and commands, also
/// before the first prompt and during an answer.
#[test]
fn lines_that_arrive_at_once_are_all_read() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["chat", "-n", "12", "--seed", "2", "--ignore-eos"];
    // Longer than the editor reads at once.
    let long = "very ".repeat(260) + "long";
    let block = "\"\"\"\rone\r/two\r\"\"\"";
    let lines =
        format!("What is photosynthesis?\r{block}\r/system {long}\r/save talk.json\r/quit\r");
    for how in ["at the prompt", "before it", "during an answer"] {
        let mut chat = Terminal::open(&args, &[], dir.path());
        if how != "before it" {
            chat.until("Ctrl-D leaves");
            chat.prompt();
        }
        match how {
            "during an answer" => {
                let (first, rest) = lines.split_at(lines.find('\r').unwrap() + 1);
                chat.line(first);
                chat.until(" ");
                chat.keys(rest);
            }
            _ => chat.keys(&lines),
        }
        let (code, text) = chat.end();
        assert_eq!(code, Some(0), "{how}: {text}");
        let talk = std::fs::read(dir.path().join("talk.json")).unwrap_or_else(|_| panic!("{text}"));
        let talk: serde_json::Value = serde_json::from_slice(&talk).unwrap();
        let contents: Vec<_> = talk.as_array().unwrap().iter().map(|m| &m["content"]).collect();
        assert_eq!(contents.len(), 5, "{how}: {talk}");
        assert_eq!(contents[0], &long, "{how}");
        assert_eq!(contents[1], "What is photosynthesis?", "{how}");
        assert_eq!(contents[3], "one\n/two", "{how}");
        std::fs::remove_file(dir.path().join("talk.json")).unwrap();
    }
}

/// Notes and answers break between words. A pipe gets the text unchanged.
#[test]
fn lines_on_a_terminal_break_between_words() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["generate", "What is photosynthesis?", "-n", "60", "--seed", "2"];
    let env = [("NO_COLOR", "1")];
    let options = [&args[..], &["--progress", "off", "--stats", "off"]].concat();
    let (code, shown) = Terminal::of_columns(30, &options, &env, dir.path()).end();
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.lines().count() > 6, "{shown}");
    assert!(shown.lines().all(|line| line.trim_end().chars().count() <= 30), "{shown}");
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let piped = shell::gemma_in(dir.path(), &options, b"").ok();
    assert!(!piped.text().contains('\n') && !piped.err.trim_end().contains('\n'), "{piped:?}");
    let (note, answer) = shown.split_once("Gemma\r\n").unwrap();
    assert_eq!(words(answer), words(piped.text()));
    assert_eq!(words(&format!("{note} Gemma")), words(&piped.err));
}

#[test]
fn an_interrupt_stops_an_answer_and_keys_pressed_meanwhile_are_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let mut chat = Terminal::open(&["chat", "--seed", "2", "--ignore-eos"], &[], dir.path());
    chat.until("Ctrl-D leaves");
    chat.prompt();
    for _ in 0..2 {
        chat.line("Count from one to a thousand.\r");
        // Waits for the start of an answer that would continue until the context is full.
        chat.until(" ");
        chat.keys("QJQJ");
        chat.until(" ");
        chat.keys("\x15\x03");
        let answer = chat.until("(stopped)");
        assert!(!answer.contains("QJ") && !answer.contains("^C"), "{answer:?}");
        chat.prompt();
    }
    chat.keys("\x04");
    chat.until("\x1b[?2004l");
    let modes = chat.becomes_as_it_was();
    let (code, text) = chat.end();
    assert_eq!((code, modes), (Some(0), true), "{text}");
}

#[test]
fn an_interrupt_at_the_prompt_drops_the_line_and_leaves_at_the_second_on_an_empty_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut chat = Terminal::open(&["chat", "-n", "4", "--seed", "2"], &[], dir.path());
    chat.until("Ctrl-D leaves");
    chat.prompt();
    // A single line, and a message of two lines that is not complete.
    assert!(!chat.ask("What is dropped?\x03").contains("leaves"));
    chat.ask("A first line\\\r");
    assert!(!chat.ask("a second\x03").contains("leaves"));
    // The up arrow key brings the dropped line back.
    chat.ask("\x1b[A\r");
    chat.ask("/save talk.json\r");
    let talk: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("talk.json")).unwrap()).unwrap();
    assert_eq!(talk[0]["content"], "a second");
    // On an empty line, Ctrl-C prints how to leave. If the next one comes more than a second later,
    // it prints that again. Keys are pressed only at the prompt: between prompts, the terminal
    // handles Ctrl-C itself and drops its input.
    assert!(chat.ask("\x03").contains("(Ctrl-D or /quit leaves; Ctrl-C again leaves too)"));
    for _ in 0..20 {
        chat.line("\x03");
        match chat.find("\x1b[?2004h") {
            Some(hint) => assert!(hint.contains("Ctrl-C again leaves too"), "{hint:?}"),
            None => break,
        }
    }
    let (code, text) = chat.end();
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn a_signal_at_the_prompt_or_in_an_answer_leaves_the_terminal_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        for answering in [false, true] {
            let mut chat = Terminal::open(&["chat", "--ignore-eos"], &[], dir.path());
            chat.until("Ctrl-D leaves");
            chat.prompt();
            if answering {
                chat.line("Count from one to a thousand.\r");
                chat.until(" ");
            }
            assert!(
                !chat.is_as_it_was(),
                "the editor reads key by key, and an answer is not echoed into"
            );
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::kill(chat.child.id() as i32, signal) }, 0);
            let status = chat.child.wait().unwrap();
            assert_eq!(status.signal(), Some(signal), "{status}");
            assert!(chat.is_as_it_was(), "signal {signal}, answering: {answering}");
        }
    }
}

#[test]
fn a_conversation_is_undone_answered_again_saved_and_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let saved = |chat: &mut Terminal| -> serde_json::Value {
        assert!(chat.ask("/save talk.json\r").contains("saved as talk.json"));
        serde_json::from_slice(&std::fs::read(dir.path().join("talk.json")).unwrap()).unwrap()
    };
    // At this temperature, two seeds never give the same answer.
    let sampling =
        ["chat", "--seed", "2", "--temp", "3", "--top-k", "0", "--top-p", "1", "-n", "8"];
    let mut chat =
        Terminal::open(&[&sampling[..], &["What is", "photosynthesis?"]].concat(), &[], dir.path());
    chat.until("> What is photosynthesis?");
    chat.prompt();
    let first = saved(&mut chat);
    assert_eq!(first[0]["content"], "What is photosynthesis?");
    // Another seed gives another answer to the same message.
    chat.ask("/retry\r");
    let again = saved(&mut chat);
    assert_eq!((again.as_array().unwrap().len(), &again[0]), (2, &first[0]));
    assert_ne!(again[1], first[1]);
    chat.line("\"\"\"\r");
    chat.prompt();
    chat.line("two\r");
    chat.prompt();
    chat.ask("/lines\"\"\"\r");
    assert_eq!(saved(&mut chat)[2]["content"], "two\n/lines");
    assert!(chat.ask("/undo\r").contains("forgotten"));
    assert_eq!(saved(&mut chat), again);
    assert!(chat.ask("/system Be brief.\r").contains("from now on"));
    assert!(chat.ask("/system\r").contains("Be brief."));
    let with = saved(&mut chat);
    assert_eq!(with[0]["content"], "Be brief.");
    assert!(chat.ask("/clear\r").contains("is forgotten"));
    assert!(chat.ask("/undo\r").contains("nothing to undo"));
    assert!(chat.ask("/load nowhere.json\r").contains("error:"));
    std::fs::write(dir.path().join("kept.json"), with.to_string()).unwrap();
    assert!(chat.ask("/load kept.json\r").contains("(1 message with its answer from kept.json)"));
    // A missing directory is not created. generate -o has the same error.
    let refused = chat.ask("/save no/where.json\r");
    assert!(refused.contains("there is no directory no") && refused.contains("mkdir -p no"));
    assert!(!dir.path().join("no").exists());
    assert_eq!(saved(&mut chat), with);
    assert!(chat.ask("And now?\r").trim().len() > 2);
    let help = chat.ask("/help\r");
    for word in ["  /help", "/bye, /exit", "/clear", "only by /save"] {
        assert!(help.contains(word), "{help}");
    }
    chat.keys("/bye\r");
    assert_eq!(chat.end().0, Some(0));
}

#[test]
fn a_full_context_leaves_out_the_oldest_messages_and_the_window_has_the_width_it_has_now() {
    let dir = tempfile::tempdir().unwrap();
    shell::with_model(dir.path(), &[]);
    let args = ["chat", "-m", "m", "--seed", "2", "-c", "128", "-n", "24", "--ignore-eos"];
    let mut chat = Terminal::open(&args, &[], dir.path());
    chat.until("Ctrl-D leaves");
    chat.prompt();
    chat.resize(40);
    let mut left_out = false;
    for i in 0..8 {
        let answer = chat.ask(&format!("Message {i}: what is a hash map?\r"));
        assert!(!answer.contains("error:"), "{answer}");
        left_out |= answer.contains("no longer sees the oldest");
    }
    assert!(left_out);
    // A message that cannot fit is refused, and no older message is dropped for it.
    let refused = chat.ask(&format!("{}\r", "far too many words ".repeat(60)));
    assert!(
        refused.contains("the context has room for 128") && !refused.contains("no longer sees"),
        "{refused}"
    );
    let stats = chat.ask("/stats\r");
    let lines: Vec<&str> = stats.split("\r\n").filter(|line| !line.starts_with('\x1b')).collect();
    assert!(
        lines.len() > 2
            && lines.iter().all(|line| line.chars().count() <= 40 + "\x1b[2m\x1b[0m".len()),
        "{stats:?}"
    );
    chat.ask("/save talk.json\r");
    let talk: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("talk.json")).unwrap()).unwrap();
    assert_eq!(talk.as_array().unwrap().len(), 16, "the file has all of it");
    chat.keys("/quit\r");
    assert_eq!(chat.end().0, Some(0));
}

#[test]
fn a_chat_is_never_entered_from_a_pipe() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gemma"));
    let output = command.args(["chat"]).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    assert!(text.contains("terminal") && text.contains("gemma generate"), "{text}");
}

/// A command without a file prints that it waits for input.
#[test]
fn a_batch_on_a_terminal_says_that_it_reads_from_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::open(&["generate", "--batch"], &[], dir.path());
    terminal.until("reading records from the terminal");
    terminal.until("Ctrl-D");
    terminal.keys("{\"id\": 5, \"prompt\": \"Hi\", \"max_tokens\": 2}\r");
    terminal.until("\"v\":1,\"id\":5,");
    terminal.keys("\x04");
    let (code, text) = terminal.end();
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("1 record, 0 failed"), "{text}");
}
