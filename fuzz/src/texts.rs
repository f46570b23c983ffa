//! Texts in languages of their own, and requests.

use super::{DIRECTORY, file};
use gemma::grammar::{GrammarSource, Grammars, parse_schema};
use gemma::models::{ChatTemplate, Config, Message, Special, Tokenizer};
use std::sync::{Arc, LazyLock};

/// The bundled target's.
static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let bytes = include_bytes!("../../draft/demo-target/tokenizer.json");
    Arc::new(Tokenizer::from_bytes(bytes).expect("it is good"))
});

pub fn tokenizer(data: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_bytes(data) else { return };
    for special in [Special::AsText, Special::Parse] {
        if let Ok(tokens) = tokenizer.encode("ab <bos> \u{1f600}\nba  <b", special) {
            let _ = tokenizer.decode(&tokens);
        }
    }
    let messages = [Message::new("user", "a <bos> b")];
    let _ =
        ChatTemplate::built_in(false).encode(&tokenizer, &messages, None, Special::AsText, None);
}

/// Ways to ask for more memory than there is, which ends a process: `tests/cli/foreign.rs` tries those.
const AMPLIFIERS: [&str; 12] = [
    "*", "~", "+", "indent", "replace", "format", "batch", "slice", "center", "just", "join", "ns",
];

pub fn template(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if AMPLIFIERS.iter().any(|word| text.contains(word)) {
        return;
    }
    let message = |role: &str, content: &str| Message::new(role, content);
    let messages = [message("user", "a <end_of_turn>"), message("assistant", "b\n")];
    let template = ChatTemplate::of(text.into());
    let _ = template.render(&messages, true);
}

/// The first byte says which notation the rest is in.
pub fn grammar(data: &[u8]) {
    static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| {
        Grammars::new(TOKENIZER.clone(), &[1], 1).expect("the tokenizer has an end")
    });
    let Some((how, rest)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(rest) else { return };
    let source = match how % 3 {
        0 => match parse_schema(text, "a schema") {
            Ok(schema) => GrammarSource::JsonSchema(schema),
            Err(_) => return,
        },
        1 => GrammarSource::Lark(text.into()),
        _ => GrammarSource::Regex(text.into()),
    };
    let _ = GRAMMARS.compile(&source, &|| true);
}

/// `gemma.toml` in the working directory.
pub fn settings(data: &[u8]) {
    file("gemma.toml", data);
    std::env::set_current_dir(&*DIRECTORY).expect("the directory is there");
    for command in ["generate", "bench", "serve", "quantize"] {
        let _ =
            gemma::cli::commands::parse(&["gemma".into(), command.into(), "x".into(), "y".into()]);
    }
}

pub fn recipe(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = gemma::quant::Recipe::parse("fuzzed", text);
    }
}

/// A line of a batch.
pub fn batch(data: &[u8]) {
    let line = gemma::cli::commands::generate::batch::job::RecordLine::parse(data, 1);
    let _ = line.seed(7);
}

/// The first byte says which of the server's forms the rest is a body of.
pub fn server(data: &[u8]) {
    static SERVED: LazyLock<gemma::cli::commands::serve::testing::RequestBodies> =
        LazyLock::new(|| {
            let config = include_str!("../../draft/demo-target/config.json");
            let config = serde_json::from_str(config).expect("it is JSON");
            let config = Config::from_json(&config).expect("it is good");
            gemma::cli::commands::serve::testing::RequestBodies::new(config, TOKENIZER.clone())
        });
    if let Some((form, body)) = data.split_first() {
        SERVED.read(*form, body);
    }
}
