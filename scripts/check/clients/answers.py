"""Validates answers of a server against the types of the openai, anthropic and ollama packages.

answers.py ADDRESS

Each object, each error and each event of a stream must have all fields that its type requires, with
the right types. Fields that the types lack are listed. The types of ollama require few fields.
Needs pydantic 2.12 or later.
"""

import json
import sys
import urllib.error
import urllib.request
from typing import Literal, get_args

from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from ollama import ChatResponse, GenerateResponse, ListResponse, ProcessResponse, ShowResponse
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.completion_choice import CompletionChoice
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
CHAT_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
FLAT_TOOLS = {"tools": [{"type": "function", "strict": False, **FUNCTION}],
              "tool_choice": "required"}
CLAUDE_TOOLS = {"tools": [{"name": "weather", "input_schema": PARAMETERS}],
                "tool_choice": {"type": "any"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                       {"role": "tool", "tool_call_id": "a", "content": "sunny"}]}
JSON_TEXT = {"text": {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS}}}
LOG_PROBS = {"logprobs": True, "top_logprobs": 2}
USAGE = {"stream_options": {"include_usage": True}}
ECHOED = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9}
CHAT = {"messages": MESSAGES, "max_tokens": 60}


class ChunkChoice(CompletionChoice):
    """A choice in a stream. OpenAI's server sends a finish reason only at the end."""
    finish_reason: str | None


class CompletionChunk(Completion):
    choices: list[ChunkChoice]


class OpenAIError(BaseModel):
    error: ErrorObject


class OpenAIModels(BaseModel):
    object: Literal["list"]
    data: list[Model]


class OllamaError(BaseModel):
    error: str


# Path, type of a whole answer, type of an event, body, fields of each case.
CASES = [
    ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk, {"model": "m", **CHAT},
     [USAGE, LOG_PROBS, CHAT_TOOLS, {"n": 2, "max_tokens": 3}, {"stop": ["a"]}, RESULT,
      {**CHAT_TOOLS, "max_tokens": 15}, {**CHAT_TOOLS, "tool_choice": NAMED, **USAGE}]),
    ("/v1/completions", Completion, CompletionChunk,
     {"model": "m", "prompt": "The sky is", "max_tokens": 5},
     [USAGE, {"logprobs": 2}, {"n": 2, "prompt": ["a", "b"]}, {"stop": "a"}]),
    ("/v1/responses", Response, ResponseStreamEvent,
     {"model": "m", "input": "Who are you?", "max_output_tokens": 60},
     [ECHOED, FLAT_TOOLS, {"max_output_tokens": 3}, {**FLAT_TOOLS, "max_output_tokens": 12},
      JSON_TEXT]),
    ("/v1/messages", Message, RawMessageStreamEvent, {"model": "m", **CHAT},
     [{}, CLAUDE_TOOLS, {"max_tokens": 2}, {"stop_sequences": ["a"]},
      {**CLAUDE_TOOLS, "max_tokens": 12}]),
    ("/api/chat", ChatResponse, ChatResponse, {"model": "m", "messages": MESSAGES},
     [{"options": {"num_predict": 5}}, {"tools": CHAT_TOOLS["tools"]}, {"format": PARAMETERS}]),
    ("/api/generate", GenerateResponse, GenerateResponse, {"model": "m", "prompt": "Hi"},
     [{"options": {"num_predict": 5}}]),
]
# Path, type, body and status of objects that are not streamed.
OTHERS = [
    ("/v1/models", OpenAIModels, None, 200), ("/v1/models/m", Model, None, 200),
    ("/v1/messages/count_tokens", MessageTokensCount, {"model": "m", "messages": MESSAGES}, 200),
    ("/api/tags", ListResponse, None, 200), ("/api/ps", ProcessResponse, None, 200),
    ("/api/show", ShowResponse, {"model": "m"}, 200),
    ("/v1/chat/completions", OpenAIError, {"messages": 5}, 400),
    ("/v1/completions", OpenAIError, {"prompt": {}}, 400),
    ("/v1/responses", OpenAIError, {"input": 5}, 400), ("/v1/nothing", OpenAIError, None, 404),
    ("/v1/messages", ErrorResponse, {"messages": 5}, 400),
    ("/v1/messages/nothing", ErrorResponse, None, 404),
    ("/v1/messages", ErrorResponse, None, 405), ("/api/chat", OllamaError, {"messages": 5}, 400),
]
unknown, faults, counts = set(), [], {}


def send(path, body=None, status=200):
    """Returns the text of a response. It must have this status."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        sys.argv[1] + path, data, {"Content-Type": "application/json"})
    try:
        response = urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        text = response.read().decode()
    if response.status != status:
        faults.append(f"{path}: status {response.status} instead of {status}\n  {text[:300]}")
    return text


def extras(value, place):
    """Lists fields that the types lack."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            unknown.add(f"{place}.{name}")
        for name in type(value).model_fields:
            extras(getattr(value, name, None), f"{place}.{name}")
    elif isinstance(value, list):
        for item in value:
            extras(item, place)


def union(kind):
    """Returns the members of a union of events."""
    return [member for member in get_args(get_args(kind)[0])] if get_args(kind) else []


def validate(kind, text, place):
    """Validates JSON against the type."""
    counts[place] = counts.get(place, 0) + 1
    members = {member.model_fields["type"].default or get_args(
        member.model_fields["type"].annotation)[0]: member for member in union(kind)}
    kind = members.get(json.loads(text).get("type"), kind)
    try:
        value = TypeAdapter(kind).validate_json(text, strict=True, extra="allow")
    except ValueError as error:
        faults.append(f"{place}: {error}\n  {text[:300]}")
    else:
        extras(value, f"{place} {type(value).__name__}")


def events(text):
    """Returns the JSON of the events of a stream."""
    # JSON does not escape U+2028, and splitlines() would split there.
    lines = text.split("\n")
    if any(line.startswith("data: ") for line in lines):
        lines = [line[len("data: "):] for line in lines if line.startswith("data: ")]
    return [line for line in lines if line and line != "[DONE]"]


for path, whole, event, body, cases in CASES:
    for case in cases:
        validate(whole, send(path, {**body, **case, "stream": False}), path)
        stream = events(send(path, {**body, **case, "stream": True}))
        for line in stream:
            validate(event, line, f"{path} (stream)")
        if not stream:
            faults.append(f"{path}: a stream without events")
        if path == "/v1/responses":
            kinds = [json.loads(line).get("type") for line in stream]
            numbers = [json.loads(line).get("sequence_number") for line in stream]
            ends = ("response.completed", "response.incomplete")
            if kinds[:1] != ["response.created"] or kinds[-1] not in ends:
                faults.append(f"{path}: a stream of {kinds}")
            if numbers != list(range(len(stream))):
                faults.append(f"{path}: a stream with the sequence numbers {numbers}")
answer = json.loads(send("/v1/responses", {"model": "m", "input": "Hi", **ECHOED}))
faults += [f"/v1/responses does not echo {name}: {answer.get(name)}"
           for name, value in ECHOED.items() if answer.get(name) != value]
for path, kind, body, status in OTHERS:
    validate(kind, send(path, body, status), f"{path} {status}")
for place, count in counts.items():
    print(f"{place}: {count} objects")
print("fields that the types lack:", ", ".join(sorted(unknown)) or "none")
print("\n".join(faults) or "no faults")
sys.exit(bool(faults))
