//! One line of a batch: a record in this program's own form, or a line of OpenAI's batches.

use super::call::BatchCall;
use super::held::HeldAnswer;
use crate::cli::api::error::ApiError;
use crate::cli::io::bias::LogitBias;
use crate::cli::io::format::{AnswerFormat, AnswerFormatFields};
use crate::cli::io::prompt::{MessageContent, PromptInput};
use crate::error::Fault;
use crate::models::Message;
use crate::sampler::SamplerConfig;
use crate::util::json;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Component, Path, PathBuf};

/// The request of a record.
#[derive(Clone, Debug, Default)]
pub struct RecordJob {
    pub input: PromptInput,
    /// Image files, relative to the batch's folder.
    pub files: Vec<PathBuf>,
    /// Whether to leave out the chat template; `None` takes `--raw`.
    pub raw: Option<bool>,
    pub max_tokens: Option<usize>,
    pub stop: Vec<String>,
    pub ignore_eos: Option<bool>,
    /// Form of the answer; `None` takes the options.
    pub format: Option<AnswerFormat>,
    sampling: RecordSampling,
}

/// Fields that replace sampling options.
#[derive(Clone, Debug, Default, Deserialize)]
struct RecordSampling {
    #[serde(alias = "temp")]
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    #[serde(alias = "repetition_penalty")]
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<LogitBias>,
    seed: Option<u64>,
    greedy: Option<bool>,
}

/// A line's request, or the reason why it cannot be answered.
#[derive(Clone, Debug)]
pub enum Asked {
    /// A record in this program's own form.
    Ours(Result<Box<RecordJob>, Failure>),
    /// A line of OpenAI's batches.
    OpenAi(Result<BatchCall, ApiError>),
}

/// A line of a batch.
#[derive(Clone, Debug)]
pub struct RecordLine {
    /// The id in the record, or the number of its line.
    pub id: Value,
    /// Unknown fields of a valid record.
    pub unknown: Vec<String>,
    /// Number of its line, starting at 1.
    pub number: usize,
    /// The failure that an earlier run wrote as its answer.
    pub failure: Option<HeldAnswer>,
}

/// Reason why a record has no text.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Failure {
    /// Exit code that a single prompt would have.
    pub code: u8,
    pub message: String,
    pub help: Option<String>,
}

impl Failure {
    pub fn of(error: &anyhow::Error) -> Failure {
        let fault = crate::error::fault_of(error);
        Failure {
            code: fault.map_or(1, |f| f.kind.exit_code()),
            message: format!("{error:#}"),
            help: fault.and_then(|f| f.help.clone()),
        }
    }
}

#[derive(Deserialize)]
struct RecordMessage {
    role: String,
    content: MessageContent,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

#[derive(Deserialize)]
struct RecordFields {
    prompt: Option<String>,
    messages: Option<Vec<RecordMessage>>,
    #[serde(alias = "images")]
    image: Option<OneOrMore>,
    system: Option<String>,
    prefill: Option<String>,
    raw: Option<bool>,
    #[serde(alias = "max_completion_tokens")]
    max_tokens: Option<usize>,
    stop: Option<OneOrMore>,
    ignore_eos: Option<bool>,
    #[serde(flatten)]
    formats: AnswerFormatFields,
    #[serde(flatten)]
    sampling: RecordSampling,
    /// All other fields.
    #[serde(flatten)]
    unknown: serde_json::Map<String, Value>,
}

/// Names of all fields, to suggest corrections.
const FIELDS: [&str; 25] = [
    "id",
    "prompt",
    "messages",
    "image",
    "system",
    "prefill",
    "raw",
    "max_tokens",
    "stop",
    "ignore_eos",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "greedy",
    "response_format",
    "json_schema",
    "grammar",
    "regex",
];

/// Returns the field that was probably meant.
pub fn meant(unknown: &str) -> Option<&'static str> {
    crate::cli::io::ui::nearest(unknown, FIELDS)
}

impl RecordLine {
    /// Parses the line with this number, which starts at 1.
    pub fn parse(bytes: &[u8], number: usize) -> (RecordLine, Asked) {
        let line = |id: Value, unknown| RecordLine { id, unknown, number, failure: None };
        let bad = |what: String| {
            let failure = Failure::of(&Fault::model(what).help(EXAMPLE).into());
            (line(number.into(), Vec::new()), Asked::Ours(Err(failure)))
        };
        let mut value: Value = match json::parse(bytes) {
            Ok(value @ Value::Object(_)) => value,
            Ok(_) => return bad("the line is not a JSON object".into()),
            Err(error) => return bad(format!("the line is not valid JSON: {error}")),
        };
        // A float could be written back as another number.
        if ["id", "custom_id"].iter().filter_map(|name| value.get(*name)).any(Value::is_f64) {
            return bad("the id is a number of more than 64 bits or with a fraction".into());
        }
        if let Some(id) = value.get("custom_id").cloned() {
            return (line(id, Vec::new()), Asked::OpenAi(BatchCall::read(&mut value)));
        }
        let id =
            value.get("id").filter(|id| !id.is_null()).cloned().unwrap_or_else(|| number.into());
        match job(value) {
            Ok((job, unknown)) => (line(id, unknown), Asked::Ours(Ok(Box::new(job)))),
            Err(error) => (line(id, Vec::new()), Asked::Ours(Err(Failure::of(&error)))),
        }
    }

    /// Returns the seed of a record without one.
    ///
    /// The seed depends only on the batch's seed and the record's id, so shards give the same
    /// answers. It has 53 bits, which every JSON reader represents exactly.
    pub fn seed(&self, base: u64) -> u64 {
        let mut hash = Sha256::new();
        hash.update(base.to_le_bytes());
        hash.update(self.id.to_string());
        let digest = hash.finalize();
        u64::from_le_bytes(digest[..8].try_into().expect("eight bytes")) >> 11
    }
}

const EXAMPLE: &str = r#"a record looks like {"id": 7, "prompt": "Why is the sky blue?"}"#;

/// Returns the request of a record, and its unknown fields.
fn job(value: Value) -> Result<(RecordJob, Vec<String>)> {
    let wrong = || Fault::model("a field of the record has the wrong type").help(EXAMPLE);
    let fields: RecordFields = serde_json::from_value(value).with_context(wrong)?;
    let messages = fields.messages.unwrap_or_default();
    let messages: Vec<Message> =
        messages.into_iter().map(|item| item.content.message(item.role)).collect();
    let empty = fields.prompt.as_ref().is_none_or(|p| p.trim().is_empty());
    if messages.is_empty() && empty && fields.raw != Some(true) {
        return Err(Fault::model("the record has neither a prompt nor messages")
            .help(EXAMPLE)
            .into());
    }
    let list = |given: Option<OneOrMore>| match given {
        None => Vec::new(),
        Some(OneOrMore::One(text)) => vec![text],
        Some(OneOrMore::More(texts)) => texts,
    };
    let (stop, files) = (list(fields.stop), list(fields.image));
    ensure!(
        files.is_empty() || !empty,
        Fault::model("image: images need a prompt, and the record has none")
    );
    ensure!(
        !stop.iter().any(String::is_empty),
        Fault::model("stop: an empty text would end the answer at once")
    );
    let unknown = fields.unknown.into_iter().map(|(name, _)| name);
    let unknown = unknown.filter(|name| name != "id").collect();
    let job = RecordJob {
        input: PromptInput {
            system: fields.system,
            messages,
            text: fields.prompt,
            prefill: fields.prefill,
            ..PromptInput::default()
        },
        files: inside(files)?,
        raw: fields.raw,
        max_tokens: fields.max_tokens,
        stop,
        ignore_eos: fields.ignore_eos,
        format: fields.formats.one()?,
        sampling: fields.sampling,
    };
    Ok((job, unknown))
}

/// Returns the paths of a record's images.
///
/// A stranger may have written the record, so only files below the batch's folder are allowed.
fn inside(files: Vec<String>) -> Result<Vec<PathBuf>> {
    let paths: Vec<PathBuf> = files.into_iter().map(PathBuf::from).collect();
    let is_inside = |path: &Path| {
        let is_plain = |part| matches!(part, Component::Normal(_) | Component::CurDir);
        path.components().all(is_plain) && path.file_name().is_some()
    };
    if let Some(path) = paths.iter().find(|path| !is_inside(path)) {
        let what = format!("image: {} is not below the folder of the batch", path.display());
        return Err(Fault::model(what).help("put the image into that folder").into());
    }
    Ok(paths)
}

impl RecordJob {
    /// Returns the sampling settings of the record, or else those of the batch.
    pub fn sampling(&self, base: &SamplerConfig, seed: u64) -> SamplerConfig {
        let own = &self.sampling;
        let mut config = SamplerConfig {
            temperature: own.temperature.unwrap_or(base.temperature),
            top_k: own.top_k.unwrap_or(base.top_k),
            top_p: own.top_p.unwrap_or(base.top_p),
            min_p: own.min_p.unwrap_or(base.min_p),
            repeat_penalty: own.repeat_penalty.unwrap_or(base.repeat_penalty),
            repeat_last_n: own.repeat_last_n.unwrap_or(base.repeat_last_n),
            presence_penalty: own.presence_penalty.unwrap_or(base.presence_penalty),
            frequency_penalty: own.frequency_penalty.unwrap_or(base.frequency_penalty),
            logit_bias: own.logit_bias.as_ref().map_or(&base.logit_bias, |own| &own.0).clone(),
            seed: own.seed.unwrap_or(seed),
        };
        if own.greedy == Some(true) {
            config.temperature = 0.0;
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> RecordLine {
        RecordLine::parse(text.as_bytes(), 7).0
    }

    fn job(text: &str) -> Result<Box<RecordJob>, Failure> {
        match RecordLine::parse(text.as_bytes(), 7).1 {
            Asked::Ours(job) => job,
            Asked::OpenAi(call) => panic!("{call:?}"),
        }
    }

    #[test]
    fn records_of_both_kinds_are_read() {
        let ours = r#"{"id": {"a": 1}, "prompt": "hi", "temp": 0.5, "stop": "x", "max_tokens": 3,
            "extra": []}"#;
        assert_eq!(line(ours).id.to_string(), r#"{"a":1}"#);
        let job = job(ours).unwrap();
        assert_eq!(
            (job.input.text.as_deref(), job.max_tokens, &job.stop[..]),
            (Some("hi"), Some(3), &["x".to_owned()][..])
        );
        let config = job.sampling(&SamplerConfig::default(), 9);
        assert_eq!((config.temperature, config.seed), (0.5, 9));

        let theirs = r#"{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": []}}"#;
        let (line, asked) = RecordLine::parse(theirs.as_bytes(), 7);
        assert_eq!(line.id, "a");
        assert!(matches!(asked, Asked::OpenAi(Ok(_))), "{asked:?}");
    }

    #[test]
    fn what_is_wrong_is_said_and_keeps_its_id() {
        for (text, id, says) in [
            ("nonsense", "7", "not valid JSON"),
            ("[1]", "7", "not a JSON object"),
            (r#"{"id": "k", "prompt": 3}"#, r#""k""#, "wrong type"),
            (r#"{"id": "k", "prompt": "a", "temperature": "hot"}"#, r#""k""#, "wrong type"),
            (r#"{"id": 0, "prompt": " "}"#, "0", "neither"),
            (r#"{"id": null}"#, "7", "neither"),
            (r#"{"id": 12345678901234567890123, "prompt": "a"}"#, "7", "64 bits"),
            (r#"{"custom_id": 1.10, "body": {}}"#, "7", "64 bits"),
            (r#"{"prompt": "a", "stop": ""}"#, "7", "stop"),
        ] {
            let failure = job(text).unwrap_err();
            assert_eq!(line(text).id.to_string(), id, "{text}");
            assert!(failure.message.contains(says) && failure.code == 3, "{text}: {failure:?}");
        }
    }

    #[test]
    fn images_are_below_the_folder_of_the_batch() {
        let of_image = |image: &str| job(&format!(r#"{{"prompt": "a", {image}}}"#));
        let files = of_image(r#""images": ["b.png", "./c/d.png"]"#).unwrap().files;
        assert_eq!(files, [PathBuf::from("b.png"), PathBuf::from("./c/d.png")]);
        for image in ["/etc/passwd", "../b.png", "b/../../c.png", "", "."] {
            let failure = of_image(&format!(r#""image": "{image}""#)).unwrap_err();
            assert!(failure.message.contains("not below"), "{image}: {failure:?}");
        }
        let lone = r#"{"messages": [{"role": "user", "content": "a"}], "image": "b.png"}"#;
        assert!(job(lone).unwrap_err().message.contains("images need a prompt"));
    }

    #[test]
    fn unknown_fields_are_named() {
        let with = |text: &str| line(text).unknown;
        assert_eq!(
            with(
                r#"{"id": 1, "prompt": "a", "temprature": 0.5, "temp": 1,
                    "max_completion_tokens": 3}"#
            ),
            ["temprature"]
        );
        assert_eq!(
            (meant("temprature"), meant("max_token"), meant("colour")),
            (Some("temperature"), Some("max_tokens"), None)
        );
        for field in FIELDS {
            let record = serde_json::json!({"prompt": "a", field: null}).to_string();
            assert_eq!(with(&record), [""; 0], "{field}");
        }
    }

    #[test]
    fn a_seed_comes_from_the_id_alone() {
        let [a, b, c] = [
            r#"{"id": 1, "prompt": "x"}"#,
            r#"{"prompt": "y", "id": 1}"#,
            r#"{"id": "1", "prompt": "x"}"#,
        ]
        .map(line);
        assert_eq!(a.seed(5), b.seed(5));
        assert!(a.seed(5) != c.seed(5) && a.seed(5) != a.seed(6));
        assert!(a.seed(5) < 1 << 53);
    }
}
