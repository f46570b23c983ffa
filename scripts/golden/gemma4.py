#!/usr/bin/env python3
"""Makes tests/golden/gemma4: token ids and rendered conversations of Gemma 4's form.

  python -m venv V && V/bin/pip install transformers jinja2
  V/bin/python scripts/golden/gemma4.py [OUT]
  V/bin/python scripts/golden/gemma4.py --template FILE.jinja OUT.json

The tokenizer is a small one: pieces trained on README.md, and all control tokens at their ids. The
token ids come from transformers (`GemmaTokenizer`). The conversations are rendered by jinja2 with
transformers' settings: with our template, and with features.jinja, which uses the language features
of Google's template. --template renders them with another template. Google's of 2026-07-09 (SHA-256
ae53464b...) renders the same texts as ours."""

import itertools
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GemmaTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "crates/model/src/models/gemma4/template.jinja"
NAMES = {
    "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49, "<|tool_response>": 50,
    "<tool_response|>": 51, '<|"|>': 52, "<|think|>": 98, "<|channel>": 100, "<channel|>": 101,
    "<|turn>": 105, "<turn|>": 106, "<|image>": 255999, "<|audio>": 256000, "<|image|>": 258880,
    "<|audio|>": 258881, "<image|>": 258882, "<audio|>": 258883, "<|video|>": 258884,
}  # fmt: skip


def trained():
    """Returns pieces of more than one character, and their merges in order."""
    text = (ROOT / "README.md").read_text().replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.train_from_iterator(text.split("\n"), trainer)
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def runs(character, longest):
    """Returns merges for runs of a character, in the order of transformers' `generate_merges`."""
    pairs = [(a, n - a) for n in range(2, longest + 1) for a in range(1, n)]
    pairs.sort(key=lambda pair: (-pair[0], -pair[1]))
    return [(character * a, character * b) for a, b in pairs]


def tokenizer():
    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4} | NAMES
    merges = runs("\n", 31) + runs("\u2581", 31) + trained()
    vocab |= {f"<unused{i}>": 6 + i for i in range(40)}
    vocab |= {"\n" * n: 106 + n for n in range(1, 32)}
    vocab |= {"\u2581" * n: 136 + n for n in range(2, 32)}
    vocab |= {f"<0x{byte:02X}>": 238 + byte for byte in range(256)}
    letters = sorted(set("".join(a + b for a, b in merges)) | {chr(c) for c in range(33, 127)})
    next_id = itertools.count(494)
    for piece in [a + b for a, b in merges] + letters:
        if piece not in vocab:
            vocab[piece] = next(next_id)
    extra = {f"name_{i}_token": name for i, name in enumerate(NAMES)}
    return GemmaTokenizer(vocab, merges, extra_special_tokens=extra)


def texts():
    rng = random.Random(4)
    parts = [
        "\n", "\n\n", "\n" * 5, "\n" * 31, "\n" * 40, " ", "  ", "   ", " " * 33, "\t", "\r\n",
        "a", "The model", " answer", "GPU", "0123", "1234567", "\u00e9", "na\u00efve",
        "\U0001f600", "\U0001f1e8\U0001f1ed", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\u6f22\u5b57", "\u200b", "\ufffd", "\ufdfa", "\u0000", "\u0007", "\u00a0", "\u2581",
        "\u2581\u2581a", "<0x41>", "<unused7>", "<mask>", "<b>", "</h1>", "<|tur", "n>", "<|", "|>",
        '"', "`x = 1`", "Ω", "e\u0301", *NAMES, "<bos>", "<eos>", "<pad>", "<unk>",
    ]  # fmt: skip
    drawn = ["".join(rng.choices(parts, k=rng.randint(1, 9))) for _ in range(140)]
    return parts + ["", (ROOT / "README.md").read_text()[:600]] + drawn


def function(name, description, **properties):
    required = [key for key, value in properties.items() if not value.pop("optional", False)]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {
        "name": name, "description": description, "parameters": parameters}}  # fmt: skip


WEATHER = function(
    "weather", "Weather of a city.", city={"type": "string", "description": "Its name"},
    unit={"type": "string", "enum": ["C", "F"], "optional": True},
)  # fmt: skip
PLAN = function(
    "plan", "Plans a trip.", days={"type": "integer"}, stops={"type": "array", "items": {
        "type": "object", "properties": {"where": {"type": "string"}, "nights": {"type": "number"}},
        "required": ["where"]}}, hotel={"type": "boolean", "nullable": True},
)  # fmt: skip

SCHEMAS = function(
    "schemas", "Keywords of JSON Schema.",
    choice={"type": "string", "enum": ["x", 'y "z"'], "description": "Quoted"},
    size={"type": "integer", "minimum": 1, "default": 3, "nullable": True},
    union={"type": ["string", "null"], "description": "Two types"},
    either={"anyOf": [{"type": "string"}]},
    lists={"type": "array", "items": {"type": "string", "enum": ["p"], "default": {"k": 1}}},
    unions={"type": "array", "items": {"type": ["string", "null"], "title": None}},
    bare={"type": "array"}, empty={"type": "array", "items": {}}, free={"type": "object"},
    open={"type": "object", "additionalProperties": {"type": "string"}},
    shut={"type": "object", "additionalProperties": False},
    nested={"type": "object", "description": "Deep", "required": ["z"], "properties": {
        "z": {"type": "boolean"}, "y": {"type": "object", "properties": {
            "q": {"type": "string"}}, "required": ["q"]}}},
)  # fmt: skip
NOTHING = function("nothing", "Takes nothing.")


def call(name, number=0, **arguments):
    return {"id": f"call_{number}", "type": "function", "function": {
        "name": name, "arguments": arguments}}  # fmt: skip


def calls(*list_, text="", thought=None):
    message = {"role": "assistant", "content": text, "tool_calls": list(list_)}
    return message | ({"reasoning_content": thought} if thought else {})


def result(name, content, number=0):
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": content}


def said(*contents, system=None):
    roles = itertools.cycle(["user", "assistant"])
    head = [{"role": "system", "content": system}] if system is not None else []
    return head + [{"role": role, "content": text} for role, text in zip(roles, contents)]


def conversations():
    ask = said("How is the weather in Rome?")
    rome = call("weather", city="Rome")
    bern = call("weather", 1, city='Bern "old town"', unit="C")
    both = [calls(rome, bern), result("weather", "21 degrees"),
            result("weather", '{"sky": "clear"}', 1)]  # fmt: skip
    stops = [{"where": "Ulm", "nights": 1.5}, {"where": ""}]
    trip = call("plan", days=3, hotel=True, note=None, stops=stops)
    plain = [
        said("Hi"),
        said(" Hi \n", " Hello. ", "And?"),
        said("Hi", system=" Be brief. \n"),
        said("a", "b", "c", "d", "e\n\nf", system=""),
        said("Hi", "<|channel>thought\nHm.\n<channel|>Hello.", "And?"),
        said("Hi", "one<|channel>thought\nHm.\n<channel|>two<channel|>", "And?"),
        said("\U0001f600 <b> {{ x }}", system="{% x %}"),
        said("a", "b") + said("c", "d")[1:] + said("e"),
        said("a") + said("b", "c"),
        said("a", "<|channel>b", "c", "d<channel|>e", "f"),
    ]
    tools = [
        ask,
        ask + both,
        ask + both + said("x", "It is warm.", "Thanks!")[1:],
        ask + [calls(rome), result("weather", "21")],
        ask + [calls(rome), result("weather", ""), calls(bern), result("weather", "a\n<b>", 1)],
        said("Plan", system="Be kind.") + [calls(trip), result("plan", "ok")],
        said("x", "y", "z"),
        ask + [calls(rome, thought="Old."), result("weather", "21")] + said("x", "y", "z")[1:]
        + [calls(bern, thought="New:\n- Bern"), result("weather", "17", 1)],
        ask + [calls(rome, text=" I look. ", thought="Rome."), result("weather", "21")]
        + said("x", "It is warm.", "Thanks!")[1:],
        ask + [calls(rome, text="I look."), result("weather", "21")],
        ask + [calls(rome)],
        ask + [calls(rome)] + said("Well?"),
        ask + [result("weather", "21")] + said("Well?"),
        ask + [calls(rome), result("weather", "21"), calls(bern, text="And Bern.")],
    ]
    cases = [(messages, None, thinks) for messages in plain for thinks in (False, True)]
    cases += [(messages, [WEATHER, PLAN], thinks) for messages in tools for thinks in (False, True)]
    return cases + [(ask, [tool], False) for tool in (PLAN, SCHEMAS, NOTHING)]


def rendered(source, path):
    template, out = source.read_text(), []
    for messages, tools, thinks in conversations():
        text, _ = render_jinja_template(
            [messages], tools=tools, chat_template=template, add_generation_prompt=True,
            bos_token="<bos>", eos_token="<eos>", enable_thinking=thinks,
        )  # fmt: skip
        out.append({"messages": messages, "tools": tools, "thinks": thinks, "text": text[0]})
    write(path, {"template": template, "cases": []}, out)


def write(path, value, cases):
    """Writes a value that ends with a list, with each item of the list on a line."""
    lines = ",\n".join(json.dumps(case) for case in cases)
    path.write_text(json.dumps(value)[:-2] + "\n" + lines + "\n" + json.dumps(value)[-2:] + "\n")


def main():
    if sys.argv[1:2] == ["--template"]:
        return rendered(Path(sys.argv[2]), Path(sys.argv[3]))
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "tests/golden/gemma4")
    out.mkdir(parents=True, exist_ok=True)
    coder = tokenizer()
    assert all(coder.convert_tokens_to_ids(name) == id_ for name, id_ in NAMES.items())
    model = json.loads(coder.backend_tokenizer.to_str())
    (out / "tokenizer.json").write_text(json.dumps(model, ensure_ascii=True) + "\n")
    encode = lambda text: coder.encode(text, add_special_tokens=False)
    tokens = [{"text": text, "ids": encode(text)} for text in texts()]
    write(out / "tokens.json", {"tokens": []}, tokens)
    rendered(OWN, out / "conversations.json")
    rendered(out / "features.jinja", out / "features.json")


if __name__ == "__main__":
    main()
