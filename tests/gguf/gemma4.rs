//! Gemma 4's tokenizer and template, compared with transformers: `tokenizer.json`, a GGUF file as
//! written by llama.cpp's converter, and one written by the quantiser. `scripts/golden/gemma4.py`
//! makes the golden files. `GEMMA_TEST_CONVERSATIONS` names another file of conversations, such as
//! those of Google's own template.

use crate::common::gguf::{self, File, Val, directory};
use crate::common::{Dims, TinyModel};
use gemma::checkpoint::{Checkpoint, Dtype};
use gemma::models::{ChatTemplate, Generation, Message, Special, Tokenizer, ToolCall, Weights};
use gemma::quant::{QuantizeOptions, Recipe, quantize};
use serde::Deserialize;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const VOCAB: usize = 262_144;

/// Tokens that llama.cpp's converter marks as text.
const VISIBLE: [&str; 7] = [
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gemma4").join(name)
}

fn json<T: for<'a> Deserialize<'a>>(path: &Path) -> T {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<Coded>,
}

#[derive(Deserialize)]
struct Coded {
    text: String,
    ids: Vec<u32>,
}

/// Returns the keys of the tokenizer as llama.cpp's converter writes them.
fn tokenizer_keys(json: &Value) -> Vec<(String, Val)> {
    let mut keys = gguf::tokenizer_keys(json, VOCAB);
    keys.retain(|(key, _)| !key.ends_with(".pre") && !key.ends_with(".scores"));
    let pair =
        |pair: &Value| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap());
    let merges = json["model"]["merges"].as_array().unwrap().iter().map(pair).collect();
    keys.push(("tokenizer.ggml.merges".into(), Val::Strs(merges)));
    keys.push(("tokenizer.ggml.scores".into(), Val::F32s(vec![-1000.0; VOCAB])));
    for (key, value) in &mut keys {
        match value {
            Val::Str(kind) if key.ends_with(".model") => *kind = "gemma4".into(),
            Val::I32s(types) => {
                for (piece, id) in json["model"]["vocab"].as_object().unwrap() {
                    if VISIBLE.contains(&piece.as_str()) {
                        types[id.as_u64().unwrap() as usize] = 4;
                    }
                }
            }
            _ => {}
        }
    }
    keys
}

fn file(json: &Value) -> File {
    let model = TinyModel::tiny(41);
    let mut file = gguf::float_file(&model, gguf::F32);
    file.keys.extend(tokenizer_keys(json));
    file
}

fn open(path: &Path) -> Weights {
    Weights::open(Checkpoint::open(path).unwrap()).unwrap()
}

fn tokenizer(checkpoint: &Checkpoint) -> Tokenizer {
    Tokenizer::from_bytes(&checkpoint.side_file("tokenizer.json").unwrap().unwrap()).unwrap()
}

#[test]
fn both_kinds_of_files_give_the_tokens_of_transformers() {
    let hf = Tokenizer::from_bytes(&fs::read(golden("tokenizer.json")).unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    file(&json(&golden("tokenizer.json"))).write(&path);
    let weights = open(&path);
    let checkpoint = weights.checkpoint().unwrap();
    let gguf = tokenizer(checkpoint);
    assert!(gguf.notes().is_empty() && hf.notes().is_empty(), "{:?}", gguf.notes());
    assert_eq!(gguf.dialect(), &gemma::models::gemma4::DIALECT);
    assert_eq!(gguf.channel(), Some((100, 101)));
    assert!(gguf.agrees_with(&hf) && gguf.control() == hf.control());
    let Tokens { tokens: texts } = json(&golden("tokens.json"));
    assert!(texts.len() > 200);
    for Coded { text, ids } in &texts {
        for tokenizer in [&hf, &gguf] {
            assert_eq!(tokenizer.encode(text, Special::Parse).unwrap(), *ids, "{text:?}");
            let as_text = tokenizer.encode(text, Special::AsText).unwrap();
            assert_eq!(as_text, hf.encode(text, Special::AsText).unwrap(), "{text:?}");
            // The placeholder for a space is decoded to a space.
            assert_eq!(tokenizer.decode(&as_text), text.replace('▁', " "));
        }
    }
    for n in 1..32u32 {
        let run = "\n".repeat(n as usize);
        assert_eq!(gguf.encode(&format!("a{run}b"), Special::AsText).unwrap()[1], 106 + n);
    }
    // Results of calls follow token 50, so an answer ends there too.
    assert_eq!(Generation::of(checkpoint).unwrap().eos, [1, 50, 106]);
    let template = ChatTemplate::from_checkpoint(checkpoint, gguf.dialect()).unwrap();
    assert!(template.is_built_in() && template.source().contains("<|turn>"));
}

#[test]
fn damaged_keys_are_refused() {
    let json = json(&golden("tokenizer.json"));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    for (key, value) in [
        ("tokenizer.ggml.merges", None),
        ("tokenizer.ggml.merges", Some(Val::Strs(vec!["ab".into()]))),
        ("tokenizer.ggml.merges", Some(Val::Strs(vec!["a nothing".into()]))),
        ("tokenizer.ggml.model", Some(Val::Str("gemma5".into()))),
        ("tokenizer.ggml.token_type", None),
    ] {
        let mut file = file(&json);
        match value {
            Some(value) => file.set(key, value),
            None => file.remove(key),
        }
        file.write(&path);
        let weights = open(&path);
        let bytes = weights.checkpoint().unwrap().side_file("tokenizer.json");
        let read = bytes.and_then(|bytes| Tokenizer::from_bytes(&bytes.unwrap()));
        let error = read.err().expect(key);
        assert_eq!(gemma::error::fault_of(&error).unwrap().kind.exit_code(), 3, "{error:#}");
    }
}

/// The architecture is Gemma 3's here, because a file's tokenizer does not depend on it.
#[test]
fn the_quantiser_writes_the_tokenizer_back() {
    let dir = tempfile::tempdir().unwrap();
    // Pieces beyond the table of embeddings are left out. They are those of images.
    let dims = Dims { vocab: 2048, n_layers: 6, pattern: 6, dim: 32, ..Dims::default() };
    let path = directory(&TinyModel::new(dims, 42), dir.path(), Dtype::BF16);
    fs::copy(golden("tokenizer.json"), path.join("tokenizer.json")).unwrap();
    let weights = open(&path);
    let out = dir.path().join("out.gguf");
    let recipe = Recipe::inline("bf16".parse().unwrap(), "bf16".parse().unwrap());
    let options = QuantizeOptions { gguf: true, threads: 2, ..QuantizeOptions::default() };
    quantize(&weights, &out, &recipe, &options, &mut |_| Ok(())).unwrap();
    let weights = open(&out);
    let checkpoint = weights.checkpoint().unwrap();
    let metadata = fs::read(&out).unwrap();
    let has = |text: &str| metadata.windows(text.len()).any(|w| w == text.as_bytes());
    assert!(has("gemma4") && has("tokenizer.ggml.merges") && !has("tokenizer.ggml.pre"));
    let written = tokenizer(checkpoint);
    for Coded { text, ids } in json::<Tokens>(&golden("tokens.json")).tokens {
        if ids.iter().all(|id| *id < 2048) {
            assert_eq!(written.encode(&text, Special::Parse).unwrap(), ids, "{text:?}");
        }
    }
    let template =
        ChatTemplate::from_checkpoint(checkpoint, &gemma::models::gemma3::DIALECT).unwrap();
    assert_eq!(template.source(), ChatTemplate::built_in(&gemma::models::gemma4::DIALECT).source());
    assert_eq!(Generation::of(checkpoint).unwrap().eos, [1, 50, 106]);
}

#[derive(Deserialize)]
struct Conversations {
    template: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    thinks: bool,
    text: String,
}

fn message(value: &Value) -> Message {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let call = |call: &Value| ToolCall {
        id: text(&call["id"]),
        name: text(&call["function"]["name"]),
        arguments: call["function"]["arguments"].to_string(),
    };
    Message {
        role: text(&value["role"]),
        content: text(&value["content"]),
        thought: text(&value["reasoning_content"]),
        calls: value["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
        images: Vec::new(),
        result_of: value["tool_call_id"].as_str().map(|id| (id.to_owned(), text(&value["name"]))),
    }
}

#[test]
fn templates_give_the_text_of_jinja2() {
    let own = golden("conversations.json");
    let own_template = json::<Conversations>(&own).template;
    assert_eq!(
        own_template,
        ChatTemplate::built_in(&gemma::models::gemma4::DIALECT).source(),
        "run the script again"
    );
    let others = std::env::var_os("GEMMA_TEST_CONVERSATIONS").map(PathBuf::from);
    let hf = Tokenizer::from_bytes(&fs::read(golden("tokenizer.json")).unwrap()).unwrap();
    for path in [golden("features.json"), own].into_iter().chain(others) {
        let Conversations { template, cases } = json(&path);
        assert!(cases.len() >= 20);
        for Case { messages, tools, thinks, text } in cases {
            let template = ChatTemplate::of(template.clone())
                .with_tools(tools.unwrap_or_default())
                .thinking(thinks);
            let messages: Vec<Message> = messages.iter().map(message).collect();
            assert_eq!(template.render(&messages, true).unwrap(), text);
            // Control tokens in messages stay text; other texts are encoded as a whole.
            let tokens = template.encode(&hf, &messages, None, Special::AsText, None).unwrap();
            if !messages.iter().any(|m| m.content.contains("<|") || m.content.contains("|>")) {
                assert_eq!(tokens, hf.encode(&text, Special::Parse).unwrap());
            }
        }
    }
}
