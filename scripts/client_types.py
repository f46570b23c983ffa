"""Validates answers of a server against the types of the openai, anthropic and ollama packages.

client_types.py ADDRESS

Each object and each event of a stream must have all fields that its type requires, with the right
types. Fields that the types lack are listed.
"""

import json
import sys
import urllib.request
from typing import get_args

from anthropic.types import Message, RawMessageStreamEvent
from ollama import ChatResponse, GenerateResponse
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.completion_choice import CompletionChoice
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
LOG_PROBS = {"logprobs": True, "top_logprobs": 2}
USAGE = {"stream_options": {"include_usage": True}}
ECHOED = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9}
CHAT = {"messages": MESSAGES, "max_tokens": 60}


class ChunkChoice(CompletionChoice):
    """A choice within a stream: OpenAI's server has no reason before the end."""
    finish_reason: str | None


class CompletionChunk(Completion):
    choices: list[ChunkChoice]


# Path, type of a whole answer, type of an event, body, fields of each case.
CASES = [
    ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk, {"model": "m", **CHAT},
     [USAGE, LOG_PROBS, CHAT_TOOLS, {"n": 2, "max_tokens": 3}]),
    ("/v1/completions", Completion, CompletionChunk,
     {"model": "m", "prompt": "The sky is", "max_tokens": 5}, [USAGE, {"logprobs": 2}, {"n": 2}]),
    ("/v1/responses", Response, ResponseStreamEvent,
     {"model": "m", "input": "Who are you?", "max_output_tokens": 60},
     [ECHOED, FLAT_TOOLS, {"max_output_tokens": 3}]),
    ("/v1/messages", Message, RawMessageStreamEvent, {"model": "m", **CHAT},
     [{}, CLAUDE_TOOLS, {"max_tokens": 2}]),
    ("/api/chat", ChatResponse, ChatResponse, {"model": "m", "messages": MESSAGES},
     [{"options": {"num_predict": 5}}, {"tools": CHAT_TOOLS["tools"]}]),
    ("/api/generate", GenerateResponse, GenerateResponse, {"model": "m", "prompt": "Hi"},
     [{"options": {"num_predict": 5}}]),
]
unknown, faults, counts = set(), [], {}


def send(path, body=None):
    """Returns the text of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        sys.argv[1] + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return response.read().decode()


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
    """Validates JSON as the type says."""
    counts[place] = counts.get(place, 0) + 1
    members = {member.model_fields["type"].default or get_args(
        member.model_fields["type"].annotation)[0]: member for member in union(kind)}
    kind = members.get(json.loads(text).get("type"), kind)
    try:
        value = TypeAdapter(kind).validate_json(text, strict=True)
    except ValueError as error:
        faults.append(f"{place}: {error}\n  {text[:300]}")
    else:
        extras(value, f"{place} {type(value).__name__}")


def events(text):
    """Returns the JSON of the events of a stream."""
    lines = text.splitlines()
    if any(line.startswith("data: ") for line in lines):
        lines = [line[len("data: "):] for line in lines if line.startswith("data: ")]
    return [line for line in lines if line and line != "[DONE]"]


for path, whole, event, body, cases in CASES:
    for case in cases:
        validate(whole, send(path, {**body, **case, "stream": False}), path)
        stream = events(send(path, {**body, **case, "stream": True}))
        for line in stream:
            validate(event, line, f"{path} (stream)")
        if path == "/v1/responses":
            kinds = [json.loads(line)["type"] for line in stream]
            ends = ("response.completed", "response.incomplete")
            if kinds[0] != "response.created" or kinds[-1] not in ends:
                faults.append(f"{path}: a stream of {kinds}")
answer = json.loads(send("/v1/responses", {"model": "m", "input": "Hi", **ECHOED}))
faults += [f"/v1/responses does not echo {name}: {answer.get(name)}"
           for name, value in ECHOED.items() if answer.get(name) != value]
for item in json.loads(send("/v1/models"))["data"]:
    validate(Model, json.dumps(item), "/v1/models")
for place, count in counts.items():
    print(f"{place}: {count} objects")
print("fields that the types lack:", ", ".join(sorted(unknown)) or "none")
print("\n".join(faults) or "no faults")
sys.exit(bool(faults))
