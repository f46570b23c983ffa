#!/usr/bin/env python3
"""Renders chat templates by jinja2 with transformers' settings (pip install jinja2).

  templates.py tests/golden/templates.txt tests/golden/templates.json

The first file has the templates, with a line `---` between two of them.

The environment is a sandbox that trims blocks, with loop controls, `tojson` by `json.dumps`,
`raise_exception`, `strftime_now` at a fixed time and the tag `generation`. `error` in place of
`text` means that jinja2 refuses the template or the messages.
"""
import datetime
import json
import sys

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2026, 3, 5, 7, 8, 9)

TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "Tells the weather <now> & \"here\"",
    "parameters": {"type": "object", "required": ["place"], "properties": {
        "place": {"type": "string"}, "days": {"type": "integer", "enum": [1, 3]},
        "zone": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}}}}}]
CALL = {"id": "c1", "type": "function", "function": {
    "name": "weather", "arguments": {"place": "Zürich", "days": 3, "exact": True, "low": -1.5}}}
MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": " \tIt's \"1 < 2\" & é\n "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "{\"rain\": 0.5}"},
    {"role": "user", "content": "and?"},
]

class Generation(Extension):
    """`{% generation %}`: renders its body in a new scope."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_support"), [], [], body).set_lineno(line)

    def _support(self, caller):
        return caller()


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def main():
    env = environment()
    variables = {"messages": MESSAGES, "tools": TOOLS, "documents": None, "bos_token": "<bos>",
                 "eos_token": "<eos>", "add_generation_prompt": True}
    cases = []
    with open(sys.argv[1], encoding="utf-8") as file:
        sources = file.read().removesuffix("\n").split("\n---\n")
    for source in sources:
        try:
            result = {"text": env.from_string(source).render(variables)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        cases.append({"template": source, **result})
    golden = {"now": NOW.isoformat(), "variables": variables, "cases": cases}
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(golden, file, ensure_ascii=False, indent=1)
        file.write("\n")


main()
