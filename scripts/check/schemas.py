#!/usr/bin/env python3
"""Checks answers under JSON schemas: they fit, drafts do not change them, and they end where other
programs loop on white space.

    python3 scripts/check/schemas.py [PROMPTS] [-- options of gemma generate, such as -m MODEL or
    -d vulkan]
    python3 scripts/check/schemas.py --seeds SEEDS [-- options of gemma generate]
    python3 scripts/check/schemas.py --table > tests/golden/schemas.jsonl

Needs Python's jsonschema (pip install jsonschema). Every prompt is answered at temperature 1, once
without drafts and once for each way of drafting; all texts must be the same and fit their schemas.
With --seeds, every schema of schema_cases.py is answered with this number of seeds: the answer must
fit, or the refusal must name the keyword and its place. --table prints the values of
schema_cases.py that fit, for the unit test of the grammars.
"""
import json
import os
import subprocess
import sys

import jsonschema
from decimal import Decimal

import schema_cases as tried

HERE = os.path.dirname(os.path.abspath(__file__))
GEMMA = os.environ.get("GEMMA", os.path.join(HERE, "../../target/release/gemma"))

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
    # Nested definitions, three deep. A definition that contains itself has no bound, and a small
    # model may never end it.
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
# Schemas that make other programs loop on white space, or that have no bound.
LOOPS = [
    {"type": "array", "items": STRING},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    {
        "type": "object", "properties": {"items": {"type": "array", "items": STRING}},
        "required": ["items"],
    },
    # (Closed: if any other key may follow, a model can nest objects up to the token limit.)
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
    # JSON does not escape U+2028, and splitlines() would split there.
    return [json.loads(line) for line in run.stdout.split("\n") if line]


def spell(value):
    """Returns the text that a grammar allows for a value, without exponents and extra white
    space."""
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")
    if isinstance(value, list):
        return "[" + ", ".join(map(spell, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spell(k)}: {spell(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def exact(value):
    """Returns the value with decimal numbers, because binary ones have rounding errors."""
    return json.loads(json.dumps(value), parse_float=Decimal)


def fits(text, schema):
    # If a name occurs twice, it has two values; jsonschema sees the last one.
    value = json.loads(text, parse_float=Decimal)
    schema = exact(schema)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    if not isinstance(schema, dict) or "$schema" not in schema:
        validator = jsonschema.Draft202012Validator
    return validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(value)


def table():
    for schema, values in tried.SCHEMAS:
        texts = list(dict.fromkeys(spell(value) for value in values + tried.VALUES))
        good = [text for text in texts if fits(text, schema)]
        case = {"schema": schema, "fits": good, "unfit": [t for t in texts if t not in good]}
        case["fits"] = [text for text in good if (schema, text) not in tried.NARROWER]
        print(json.dumps(case, ensure_ascii=False))
    for schema, place, keyword in tried.REFUSED:
        print(json.dumps({"schema": schema, "refused": [place, keyword]}, ensure_ascii=False))


def seeds(count, options):
    """Checks answers to every schema: they fit, or are cut at the token limit, or are refused
    correctly."""
    wrong = ended = 0
    cases = [(schema, None) for schema, _ in tried.SCHEMAS]
    cases += [(schema, where) for schema, *where in tried.REFUSED]
    for seed in range(count):
        replies = answer([{"id": n, "prompt": f"Data {seed}, please.", "max_tokens": 200,
                           "seed": seed, "json_schema": schema}
                          for n, (schema, _) in enumerate(cases)], options)
        for reply, (schema, refused) in zip(replies, cases):
            error = (reply["error"] or {}).get("message", "")
            if refused:
                place, keyword = refused
                good = (f" at {place}: " if place else "used: ") in error and keyword in error
            elif "cut off" in error:
                good = True
            else:
                ended += 1
                good = not error and fits(reply["text"], schema)
            if not good:
                wrong += 1
                print(f"{json.dumps(schema)}: {error or reply['text'][:300]!r}")
    print(f"{len(cases)} schemas, {count} seeds: {ended} whole answers, {wrong} wrong results")
    sys.exit(wrong > 0)


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--table"]:
        return table()
    if arguments[:1] == ["--seeds"]:
        return seeds(int(arguments[1]), arguments[3:])
    options = arguments[arguments.index("--") + 1:] if "--" in arguments else []
    count = int(arguments[0]) if arguments and arguments[0] != "--" else 200
    # Schemas alternate, so that each gets every kind of prompt.
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
