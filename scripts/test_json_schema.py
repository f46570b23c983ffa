#!/usr/bin/env python3
"""Answers under JSON schemas: do they fit, do drafts leave them as they are, and do they end where
others loop on white space?

    python3 scripts/test_json_schema.py [PROMPTS] [-- options of gemma generate, such as -m MODEL or
    -d vulkan]

Needs Python's jsonschema (pip install jsonschema). Every prompt is answered at temperature 1, once
without drafts and once for each way of drafting; all texts must be the same and fit their schemas.
"""
import json
import os
import subprocess
import sys

import jsonschema

HERE = os.path.dirname(os.path.abspath(__file__))
GEMMA = os.environ.get("GEMMA", os.path.join(HERE, "../target/release/gemma"))

TOPICS = ["a river", "the moon", "bread", "a spider", "gravity", "a violin", "winter", "a bridge",
          "tea", "a whale", "glass", "a robot",
          "the sea", "a forest", "copper", "a library", "rain", "a clock", "salt", "a train"]
TASKS = ["Describe {} as data.", "Tell me about {}.", "Write JSON about {}.",
         "What do you know of {}?", "Make a record of {}.",
         "Name facts about {}.", "Invent something about {}.", "Why does {} matter?", "Rate {}.",
         "Compare {} with something else."]

STRING = {"type": "string"}
SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 30},
                                      "age": {"type": "integer", "minimum": 0, "maximum": 130},
     "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4}},
     "required": ["name", "age", "tags"],
     "additionalProperties": False},
    {"type": "object", "properties": {"kind": {"enum": ["animal", "plant", "thing"]},
                                      "score": {"type": "number", "minimum": 0, "maximum": 1},
     "ok": {"type": "boolean"}}, "required": ["kind", "score", "ok"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "object", "properties": {"title": {"type": "string",
        "minLength": 1, "maxLength": 40},
     "year": {"type": "integer", "minimum": 1000, "maximum": 2100}}, "required": ["title", "year"],
     "additionalProperties": False},
     "minItems": 1, "maxItems": 3},
    # Definitions that nest, three deep: one that nests itself sets no end, and a small model may
    # find none.
    {"$defs": {f"node{n}": {"type": "object", "properties": {"label": {"type": "string",
        "maxLength": 16}, "next": {"anyOf": [{"type": "null"},
     *([{"$ref": f"#/$defs/node{n + 1}"}] if n < 2 else [])]}}, "required": ["label", "next"],
     "additionalProperties": False} for n in range(3)},
     "$ref": "#/$defs/node0"},
    {"type": "object", "properties": {"date": {"type": "string", "format": "date"},
                                      "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
     "note": {"type": ["string", "null"], "maxLength": 40}}, "required": ["date", "code"],
     "additionalProperties": False},
    {"anyOf": [{"type": "object", "properties": {"type": {"const": "number"},
                                                 "value": {"type": "number"}},
                                                 "required": ["type", "value"],
     "additionalProperties": False}, {"type": "object", "properties": {"type": {"const": "text"},
         "value": {"type": "string", "maxLength": 60}},
     "required": ["type", "value"], "additionalProperties": False}]},
]
# Schemas that make other programs loop on blanks, or have no end.
LOOPS = [
    {"type": "array", "items": STRING},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    {
        "type": "object", "properties": {"items": {"type": "array", "items": STRING}},
        "required": ["items"],
    },
    # (Closed: where any other key may follow, a model can nest objects for as long as it likes, and
    # the token limit ends that.)
    {"type": "object", "properties": {"a": {"type": "object",
                                            "properties": {"b": {"type": "object",
                                                "properties": {"c": STRING},
     "required": ["c"], "additionalProperties": False}}, "required": ["b"],
     "additionalProperties": False}}, "required": ["a"],
     "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "number"}},
    {"type": "number"},
    STRING,
    {"type": "object"},
    {
        "type": "object",
        "properties": {"text": STRING, "lines": {"type": "array", "items": STRING, "minItems": 2}},
        "required": ["text", "lines"],
    },
    {
        "type": "array",
        "items": {
            "type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"],
        },
    },
]
DRAFTS = {
    "off": ["--draft", "off"], "auto": [], "tree of 12": ["--draft-tree", "12"],
    "text alone, chain": ["--draft", "ngram", "--draft-tree", "chain"],
}


def answer(records, options):
    command = [GEMMA, "generate", "--batch", "-q", "--temp", "1", "--seed", "7", *options]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    run = subprocess.run(command, input=lines, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {run.returncode}\n{run.stderr}")
    return [json.loads(line) for line in run.stdout.splitlines()]


def main():
    arguments = sys.argv[1:]
    options = arguments[arguments.index("--") + 1:] if "--" in arguments else []
    count = int(arguments[0]) if arguments and arguments[0] != "--" else 200
    # Schemas by turns, so that each meets every kind of prompt.
    prompts = [
        (
            TASKS[n // len(TOPICS) % len(TASKS)].format(TOPICS[n % len(TOPICS)]),
            SCHEMAS[n % len(SCHEMAS)],
        )
        for n in range(count)
    ]
    records = [{"id": n, "prompt": prompt, "max_tokens": 600,
                "response_format": {"type": "json_schema",
                                    "json_schema": {"name": "x", "schema": schema}}}
               for n, (prompt, schema) in enumerate(prompts)]
    loops = [{"id": f"loop {n}", "prompt": "Give me a long, pretty-printed, indented JSON "
                                           "document.", "max_tokens": 4000, "json_schema": schema}
             for n, schema in enumerate(LOOPS)]
    first, failures = None, 0
    for name, draft in DRAFTS.items():
        replies = answer(records, [*draft, *options])
        endings = answer(loops, [*draft, "--ctx-size", "4096", *options])
        texts = [reply["text"] for reply in replies + endings]
        valid = tokens = 0
        for reply, schema in zip(replies + endings, [s for _, s in prompts] + LOOPS):
            try:
                jsonschema.validate(json.loads(reply["text"]), schema)
                valid += reply["error"] is None and reply["finish_reason"] == "stop"
            except (ValueError, jsonschema.ValidationError) as why:
                print(f"{name}: record {reply['id']}: {reply['error'] or why}\n  "
                      f"{reply['text'][:200]!r}")
            tokens += reply["usage"]["completion_tokens"]
        first = first or texts
        same = sum(a == b for a, b in zip(first, texts))
        total = len(texts)
        failures += (total - valid) + (total - same)
        print(f"drafts {name}: {valid} of {total} valid, {same} of {total} the same text as "
              f"without drafts, {tokens} tokens "
              f"({len(endings)} schemas that loop elsewhere: "
              f"{sum(r['finish_reason'] == 'stop' for r in endings)} ended, "
              f"longest {max(r['usage']['completion_tokens'] for r in endings)} tokens)")
    sys.exit(failures > 0)


main()
