//! Drives a server of the bundled model with the crate async-openai.
//!
//!     client-rust http://ADDRESS EXPECTED
//!
//! EXPECTED is what the model answers to QUESTION. Requests and answers go through the crate's own
//! types: what it cannot read is an error.

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::{ChatCompletionMessageToolCalls, CreateChatCompletionRequest};
use async_openai::types::chat::{CreateChatCompletionResponse, FinishReason};
use async_openai::types::responses::{CreateResponse, ResponseStreamEvent};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::error::Error;

const QUESTION: &str = "What is the capital of France?";

/// A request in the crate's type.
fn request<T: DeserializeOwned>(mut body: Value, more: Value) -> Result<T, serde_json::Error> {
    let more = more.as_object().cloned().unwrap_or_default();
    body.as_object_mut().expect("an object").extend(more);
    serde_json::from_value(body)
}

fn message(answer: &CreateChatCompletionResponse) -> &str {
    answer.choices[0].message.content.as_deref().unwrap_or_default()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (address, expected) =
        (arguments.next().expect("ADDRESS"), arguments.next().expect("EXPECTED"));
    let config = OpenAIConfig::new().with_api_base(format!("{address}/v1")).with_api_key("none");
    let client = Client::with_config(config);
    let model = client.models().list().await?.data[0].id.clone();
    let chat = |more: Value| -> Result<CreateChatCompletionRequest, serde_json::Error> {
        let messages = json!([{"role": "user", "content": QUESTION}]);
        let body = json!({"model": model, "messages": messages, "temperature": 0.0,
            "max_completion_tokens": 20});
        request(body, more)
    };

    let whole = client.chat().create(chat(json!({}))?).await?;
    assert_eq!(message(&whole), expected);
    let usage = whole.usage.expect("usage");
    assert_eq!(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);

    let more = json!({"stream_options": {"include_usage": true}});
    let mut stream = client.chat().create_stream(chat(more)?).await?;
    let (mut text, mut told) = (String::new(), None);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk?;
        text.extend(chunk.choices.iter().filter_map(|choice| choice.delta.content.as_deref()));
        told = chunk.usage.or(told);
    }
    assert_eq!(text, expected);
    assert_eq!(told.expect("usage").completion_tokens, usage.completion_tokens);

    let schema = json!({"type": "object", "properties": {"city": {"type": "string",
        "maxLength": 12}}, "required": ["city"], "additionalProperties": false});
    let function = json!({"name": "weather", "parameters": schema});
    let more = json!({"tools": [{"type": "function", "function": function}],
        "tool_choice": "required", "parallel_tool_calls": false, "max_completion_tokens": 200});
    let answer = client.chat().create(chat(more)?).await?;
    assert_eq!(answer.choices[0].finish_reason, Some(FinishReason::ToolCalls));
    let calls = answer.choices[0].message.tool_calls.clone().expect("a call");
    let [ChatCompletionMessageToolCalls::Function(call)] = &calls[..] else {
        panic!("one call of a function: {calls:?}")
    };
    let arguments: Value = serde_json::from_str(&call.function.arguments)?;
    assert!(call.function.name == "weather" && arguments["city"].is_string(), "{call:?}");

    let form = json!({"type": "json_schema", "json_schema": {"name": "city", "schema": schema}});
    let more = json!({"response_format": form, "max_completion_tokens": 200});
    let shaped: Value = serde_json::from_str(message(&client.chat().create(chat(more)?).await?))?;
    assert!(shaped["city"].is_string(), "{shaped}");

    let body = json!({"model": model, "input": QUESTION, "temperature": 0.0,
        "max_output_tokens": 20});
    let response =
        client.responses().create(request::<CreateResponse>(body.clone(), json!({}))?).await?;
    assert_eq!(response.output_text().as_deref(), Some(&expected[..]));
    let mut events =
        client.responses().create_stream(request(body, json!({"stream": true}))?).await?;
    let mut text = String::new();
    while let Some(event) = events.next().await {
        if let ResponseStreamEvent::ResponseOutputTextDelta(delta) = event? {
            text += &delta.delta;
        }
    }
    assert_eq!(text, expected);

    match client.chat().create(chat(json!({"n": 65}))?).await {
        Err(OpenAIError::ApiError(error)) => println!("refused as it should be: {error}"),
        other => panic!("more answers than the server gives: {other:?}"),
    }
    Ok(())
}
