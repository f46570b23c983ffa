//! Text to tokens and back, compared with the `tokenizers` crate: the bundled tokenizer, and
//! Gemma's if `GEMMA_TEST_TOKENIZER` names its `tokenizer.json`, which is Google's file and not in
//! this repository.

use gemma::models::{ChatTemplate, Detokenizer, Message, Special, Tokenizer, gemma3::bundled};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Returns this program's tokenizers, each with the crate's.
fn pairs() -> Vec<(Tokenizer, tokenizers::Tokenizer)> {
    let checkpoint = bundled::target().unwrap();
    let mut files = vec![checkpoint.side_file("tokenizer.json").unwrap().unwrap().into_owned()];
    if let Some(path) = std::env::var_os("GEMMA_TEST_TOKENIZER") {
        files.push(std::fs::read(path).unwrap());
    }
    files
        .iter()
        .map(|f| (Tokenizer::from_bytes(f).unwrap(), tokenizers::Tokenizer::from_bytes(f).unwrap()))
        .collect()
}

fn whole(theirs: &tokenizers::Tokenizer, text: &str) -> Vec<u32> {
    theirs.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// Returns random text of difficult parts: runs of line ends and spaces, tags, bytes without a
/// piece.
fn random_text(rng: &mut SmallRng) -> String {
    const PARTS: [&str; 16] = [
        "\n",
        "\n\n",
        " ",
        "   ",
        "\t",
        "a",
        "The quick",
        " fox",
        "é",
        "😀",
        "<b>",
        "</h1>",
        "\u{200b}\u{fffd}",
        "ﷺ",
        "0123",
        "<end_of",
    ];
    (0..rng.random_range(0..12)).map(|_| PARTS[rng.random_range(0..PARTS.len())]).collect()
}

#[test]
fn every_token_means_what_the_crate_says() {
    for (ours, theirs) in pairs() {
        for id in 0..ours.vocab() as u32 {
            let want = theirs.decode(&[id], true).unwrap();
            let bytes = ours.token_bytes(id);
            match String::from_utf8(bytes) {
                Ok(text) => assert_eq!(text, want, "token {id}"),
                Err(e) => {
                    assert_eq!((e.as_bytes().len(), want.as_str()), (1, "\u{fffd}"), "token {id}")
                }
            }
        }
    }
}

#[test]
fn spans_encode_as_the_whole_prompt_does() {
    let mut rng = SmallRng::seed_from_u64(1);
    let message = |role: &str, content: String| Message::new(role, content);
    for (ours, theirs) in pairs() {
        for template in [
            ChatTemplate::built_in(&gemma::models::gemma3::DIALECT),
            ChatTemplate::from_checkpoint(
                &bundled::target().unwrap(),
                &gemma::models::gemma3::DIALECT,
            )
            .unwrap(),
        ] {
            for _ in 0..300 {
                let mut text = || random_text(&mut rng);
                let messages = [
                    message("system", text()),
                    message("user", text()),
                    message("assistant", text()),
                    message("user", text()),
                ];
                let prefill = text();
                let want = whole(&theirs, &(template.render(&messages, true).unwrap() + &prefill));
                for special in [Special::AsText, Special::Parse] {
                    let tokens =
                        template.encode(&ours, &messages, None, special, Some(&prefill)).unwrap();
                    assert_eq!(tokens, want, "{special:?} {messages:?} {prefill:?}");
                }
            }
        }
    }
}

#[test]
fn streamed_text_is_the_decoded_whole() {
    let mut rng = SmallRng::seed_from_u64(2);
    for (ours, theirs) in pairs() {
        let bytes: Vec<u32> =
            (0..=255u8).map(|b| ours.id(&format!("<0x{b:02X}>")).unwrap()).collect();
        for round in 0..600 {
            let mut tokens: Vec<u32> = match round % 2 {
                0 => ours.encode(&random_text(&mut rng), Special::AsText).unwrap(),
                _ => (0..rng.random_range(0..20))
                    .map(|_| rng.random_range(0..ours.vocab() as u32))
                    .collect(),
            };
            // Characters in byte tokens. Some have lost their first or last bytes.
            for _ in 0..rng.random_range(0..4) {
                let c = ['é', '€', '😀', '\u{7ff}', 'x'][rng.random_range(0..5)];
                let at = rng.random_range(0..=tokens.len());
                let spelled: Vec<u32> = c.to_string().bytes().map(|b| bytes[b as usize]).collect();
                let cut = if rng.random_bool(0.3) { rng.random_range(0..spelled.len()) } else { 0 };
                tokens.splice(at..at, spelled[cut..].iter().copied());
            }
            let all: Vec<u8> = tokens.iter().flat_map(|t| ours.token_bytes(*t)).collect();
            let mut stream = Detokenizer::new(&ours);
            let mut text = String::new();
            for (i, token) in tokens.iter().enumerate() {
                text.push_str(&stream.push(*token));
                // All certain text is out: the held part is shorter than a character.
                let so_far: usize = tokens[..=i].iter().map(|t| ours.token_bytes(*t).len()).sum();
                let certain = String::from_utf8_lossy(&all[..so_far]);
                assert!(
                    certain.starts_with(&text)
                        && certain.chars().count() <= text.chars().count() + 1,
                    "{tokens:?}"
                );
            }
            text.push_str(&stream.finish());
            assert_eq!(text, String::from_utf8_lossy(&all), "{tokens:?}");
            assert_eq!(text, ours.decode(&tokens));
            if std::str::from_utf8(&all).is_ok() {
                assert_eq!(text, theirs.decode(&tokens, true).unwrap(), "{tokens:?}");
            }
        }
    }
}

/// A damaged file is refused with a remedy, or is still a tokenizer. It never panics.
#[test]
fn damaged_files_are_refused_in_order() {
    let good =
        bundled::target().unwrap().side_file("tokenizer.json").unwrap().unwrap().into_owned();
    let mut rng = SmallRng::seed_from_u64(3);
    let (mut refused, rounds) = (0, 60);
    for round in 0..rounds {
        let mut bytes = good.clone();
        match round % 3 {
            0 => bytes.truncate(rng.random_range(0..good.len())),
            // Most of the file is vocabulary and merges. Its start says how they are used.
            1 => {
                let at = rng.random_range(0..3000);
                bytes.drain(at..at + rng.random_range(1..40));
            }
            _ => (0..20).for_each(|_| {
                let at = rng.random_range(0..bytes.len());
                bytes[at] = b" 0{}[]\",\\x"[rng.random_range(0..10)];
            }),
        }
        match Tokenizer::from_bytes(&bytes) {
            Ok(tokenizer) => drop(tokenizer.encode("a <b>\n", Special::AsText)),
            Err(error) => {
                let fault = gemma::error::fault_of(&error).expect("a fault");
                assert_eq!(fault.kind.exit_code(), 3);
                assert!(fault.help.is_some());
                refused += 1;
            }
        }
    }
    assert!(refused > rounds / 2, "{refused} of {rounds}");
}

/// If a grammar does not fix the text, every tokenisation stays possible. Fixed text is tokenised
/// in the grammar's way.
#[test]
fn a_grammar_speaks_the_tokenizers_language() {
    use gemma::grammar::{GrammarSource, Grammars};
    use gemma::sampler::TokenRule;
    for (tokenizer, _) in pairs() {
        let tokenizer = std::sync::Arc::new(tokenizer);
        let stop = tokenizer.id("<end_of_turn>").or(tokenizer.id("<eos>")).unwrap();
        let begun = std::time::Instant::now();
        let grammars = Grammars::new(tokenizer.clone(), &[stop], 1).unwrap();
        let made = begun.elapsed();
        let schema = serde_json::json!({"type": "object",
            "properties": {"title": {"type": "string"}, "pages": {"type": "integer"}},
            "required": ["title", "pages"], "additionalProperties": false});
        let grammar = grammars.compile(&GrammarSource::JsonSchema(schema), &|| true).unwrap();
        let rule = grammar.follow(0);
        let (mut history, mut forced) = (Vec::new(), 0);
        let text = "{\"title\": \"Naïve 😀 stories\\n of \\\"foxes\\\"\", \"pages\": 120}";
        let begun = std::time::Instant::now();
        for token in tokenizer.encode(text, Special::AsText).unwrap() {
            let mask = rule.mask(&history).unwrap().unwrap();
            assert!(
                mask.allows(token),
                "{:?} after {:?}",
                tokenizer.piece(token),
                tokenizer.decode(&history)
            );
            forced += mask.only().is_some() as usize;
            history.push(token);
            rule.settle(&history);
        }
        assert!(
            rule.mask(&history).unwrap().unwrap().ends()
                && rule.is_complete(&history)
                && forced > 3,
            "{forced} forced"
        );
        println!(
            "{} tokens: prepared in {made:?}, {:?} a mask",
            tokenizer.vocab(),
            begun.elapsed() / history.len() as u32
        );
    }
}
