"""Transcripts for draft.sh, and its table.

  draft.py convert HELDOUT_DIR OUT.jsonl [--prompts DIR]
  draft.py table WORK_DIR CONFIG...

The table has tokens per pass by kind of text. Below it is the difference of the first configuration
from each other one, with a paired bootstrap interval of 95 % over transcripts."""

import argparse
import json
import pathlib
import random
import re
import subprocess

TURN = re.compile(r"<start_of_turn>(user|model)\n(.*?)(?:<end_of_turn>\n?|\Z)", re.S)


def documents(path):
    if path.suffix == ".zst":
        text = subprocess.run(
            ["zstd", "-dcq", "--long=27", path], check=True, capture_output=True
        ).stdout.decode()
    else:
        text = path.read_text()
    return [doc for doc in re.split(r"^<\|doc\|>\n?", text, flags=re.M) if doc.strip()]


def convert(args):
    records = []
    for path in sorted(pathlib.Path(args.heldout).glob("*.txt*")):
        kind = path.name.split("-")[0].split(".")[0]
        for i, doc in enumerate(documents(path)):
            record = {"id": f"{path.name}/{i}", "category": kind}
            if "<start_of_turn>" in doc:
                roles = {"user": "user", "model": "assistant"}
                record["messages"] = [
                    {"role": roles[role], "content": said} for role, said in TURN.findall(doc)
                ]
            else:
                record["text"] = doc
            records.append(record)
    for path in sorted(pathlib.Path(args.prompts).glob("*.jsonl")) if args.prompts else []:
        for line in path.read_text().splitlines():
            prompt = json.loads(line)
            answer = prompt.get("reference")
            answer = answer[0] if isinstance(answer, list) and answer else answer
            if isinstance(answer, str) and len(prompt["turns"]) == 1:
                record = {
                    "id": prompt["id"], "category": prompt["category"], "prompt": prompt["turns"][0]
                }
                records.append(record | {"answer": answer})
    with open(args.out, "w") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)
    print(f"{len(records)} transcripts in {args.out}")


def rate(runs):
    return sum(r[0] for r in runs) / max(1, sum(r[1] for r in runs))


def table(args):
    results = {
        name: json.loads((pathlib.Path(args.work) / f"{name}.json").read_text())
        for name in args.configs
    }
    kinds = [c["name"] for c in results[args.configs[0]]["categories"]]
    print("| configuration | " + " | ".join(kinds) + " | ms/pass |")
    print("|---|" + "--:|" * (len(kinds) + 1))
    for name, result in results.items():
        cells = [f"{c['tau']:.2f} ({c['low']:.2f}-{c['high']:.2f})" for c in result["categories"]]
        print(f"| {name} | " + " | ".join(cells) + f" | {result['draft_ms_per_pass']:.2f} |")
    first = args.configs[0]
    print(f"\n| {first} minus | " + " | ".join(kinds) + " |\n|---|" + "--:|" * len(kinds))
    for name in args.configs[1:]:
        cells = []
        for kind in kinds:
            wanted = [
                i for i, r in enumerate(results[first]["records"]) if kind in (r["category"], "all")
            ]
            a, b = (
                [(r["tokens"], r["passes"]) for r in results[n]["records"]] for n in (first, name)
            )
            rng = random.Random(1)
            draws = []
            for _ in range(1000):
                chosen = rng.choices(wanted, k=len(wanted))
                draws.append(rate([a[i] for i in chosen]) - rate([b[i] for i in chosen]))
            draws.sort()
            gain = rate([a[i] for i in wanted]) - rate([b[i] for i in wanted])
            cells.append(f"{gain:+.2f} ({draws[25]:+.2f} to {draws[974]:+.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
commands = parser.add_subparsers(required=True)
one = commands.add_parser("convert")
one.add_argument("heldout")
one.add_argument("out")
one.add_argument("--prompts")
one.set_defaults(run=convert)
one = commands.add_parser("table")
one.add_argument("work")
one.add_argument("configs", nargs="+")
one.set_defaults(run=table)
arguments = parser.parse_args()
arguments.run(arguments)
