//! Schemas and texts with the verdicts of Python's jsonschema, written by
//! `scripts/check/schemas.py --table`.

use super::*;
use crate::grammar::machine::{GrammarMachine, StateQuery};
use crate::grammar::{GrammarSource, Grammars};
use gemma_base::error::fault_of;
use gemma_model::models::Special;
use gemma_model::models::tokenizer::samples::letters;
use std::sync::Arc;

#[test]
fn schemas_allow_what_jsonschema_allows_or_are_refused_with_their_place() {
    let tokenizer = Arc::new(letters());
    let grammars = Grammars::new(tokenizer.clone(), &[1], 1).unwrap();
    let (mut wrong, mut texts) = (Vec::new(), 0);
    for line in include_str!("../../../../../tests/golden/schemas.jsonl").lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let schema = &case["schema"];
        let source = GrammarSource::JsonSchema(schema.clone());
        let machine = GrammarMachine::compile(&source, &grammars.0.vocabulary);
        if let Some(refused) = case["refused"].as_array() {
            let [place, keyword] = [0, 1].map(|i| refused[i].as_str().unwrap());
            let place = if place.is_empty() { String::new() } else { format!(" at {place}") };
            let begins = format!("the JSON schema cannot be used{place}: ");
            let says = machine.err().map(|error| fault_of(&error).unwrap().what.clone());
            let fits = says.as_ref().and_then(|says| says.strip_prefix(&begins));
            if !fits.is_some_and(|why| why.contains(keyword)) {
                wrong.push(format!("{schema}: {says:?}"));
            }
            continue;
        }
        let mut machine = match machine {
            Ok(machine) => machine,
            Err(error) => {
                wrong.push(format!("{schema}: {error:#}"));
                continue;
            }
        };
        for (key, fits) in [("fits", true), ("unfit", false)] {
            for text in case[key].as_array().unwrap().iter().filter_map(Value::as_str) {
                let tokens = tokenizer.encode(text, Special::AsText).unwrap();
                let state = machine.answer(&StateQuery::Walk(tokens));
                texts += 1;
                if state.is_complete != fits {
                    wrong.push(format!("{schema}: {key} {text}"));
                }
                state.number.into_iter().for_each(|number| machine.forget(&[number]));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {texts}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(texts > 1000, "{texts}");
}
