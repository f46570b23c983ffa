"""Plain and speculative decoding of a trained small model in 27B's shape, end to end, by this
program and by llama.cpp.

    python3 scripts/bench/standin.py [--llama LLAMA_DIR] [--prompts FILE.jsonl...] [--shape 27b]

Builds nothing; needs numpy, 16 GB of disk and 20 GB of device memory. standin/make.py makes the
model, once, of one that the project ships; LLAMA_DIR holds llama-bench and
llama-speculative-simple, which get the same file, prompts and draft model. The pair is the bundled
one unless other options name another:

    --model draft/gemma3-draft/medium --draft-model draft/gemma3-draft/small
    --tokenizer GEMMA/tokenizer.json

The speed is real. Tokens a pass are the stand-in's, and a Gemma's may differ. Our side checks that
drafts change no text. If a part fails or no time is left, the script names it, measures the rest,
and exits with 1. The table comes last.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import markdown_table

ROOT = pathlib.Path(__file__).resolve().parents[2]
TURN = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"


class Failed(Exception):
    """A part that failed. It is named and left out."""


def run(a, *command, **more):
    """Runs a program. Returns its standard output and standard error."""
    command, left = [str(c) for c in command], a.end - time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, left), **more)
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} had no time left: give more with --limit") from None
    except OSError as e:
        raise Failed(f"{command[0]} cannot be run: {e.strerror}") from None
    if done.returncode:
        raise Failed(f"{command[0]} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout, done.stderr


def chosen(files, count):
    """Returns prompts that are spread evenly over the lines of each file."""
    out = []
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        n = min(-(-count // len(files)), len(lines))
        out += [lines[i * len(lines) // n] for i in range(n)]
    return out[:count]


def found(pattern, text):
    """Returns the figures in the output of a program."""
    match = re.search(pattern, text)
    if not match:
        raise Failed(f"the output has no {pattern!r}:\n{text[-2000:]}")
    return match.groups()


def made(a, model, shape):
    """Returns the GGUF file of a model. Makes it if it does not exist."""
    file = a.work / f"{model.name}-{shape}.gguf"
    if not file.exists():
        options = ["--model", model, "--tokenizer", a.tokenizer, "--shape", shape]
        said, _ = run(a, sys.executable, ROOT / "scripts/bench/standin/make.py", file, *options)
        print(said.strip(), file=sys.stderr)
    return file


def draft_directory(a):
    """Returns a directory for `--draft`: the draft model with the vocabulary of its rows."""
    model, folder = a.draft_model, a.work / a.draft_model.name
    folder.mkdir(exist_ok=True)
    vocabulary = [p / "draft_vocabulary.json" for p in (model, model.parent)]
    reads = [v for v in vocabulary if v.exists()][:1] or [a.tokenizer]
    for file in [model / "config.json", model / "model.safetensors", *reads]:
        shutil.copyfile(file, folder / file.name)
    return folder


def ours(a, temperature, prompts, target):
    """Measures this program. Returns a row of the table."""
    file = a.work / "prompts.jsonl"
    file.write_text("".join(json.dumps(p) + "\n" for p in prompts))
    command = [a.gemma, "bench", "-m", target, "-d", a.device, "--draft", draft_directory(a)]
    command += [
        *a.args.split(),
        "--only",
        "text",
        "--prompts",
        file,
        "--prompt-count",
        len(prompts),
    ]
    command += ["--text-tokens", a.tokens, "--repetitions", a.repetitions, "--temp", temperature]
    out, _ = run(a, *command, "--json", "-q")
    (a.work / f"gemma-{temperature:g}.json").write_text(out)
    text = json.loads(out)["text"]
    f = text["all"] or text["kinds"][0]
    name = f"gemma, temperature {temperature:g}"
    yield [name, f["plain"], f["drafted"], f["tokens_per_pass"], f["ratio"]["median"]]


def theirs(a, prompts, target):
    """Measures llama.cpp. Returns a row for each number of drafts per pass."""
    draft = made(a, a.draft_model, "own")
    libraries = {"env": os.environ | {"LD_LIBRARY_PATH": f"{a.llama}:{a.llama}/fallback"}}
    common = ["-m", target, "-ngl", a.layers, "-n", a.tokens]
    command = [
        a.llama / "llama-bench",
        *common,
        "-fa",
        1,
        "-p",
        0,
        "-d",
        128,
        "-r",
        3,
        "-o",
        "json",
    ]
    plain = json.loads(run(a, *command, **libraries)[0])[0]["avg_ts"]
    for most in a.n_max:
        command = [a.llama / "llama-speculative-simple", *common, "-fa", "on", "-c", 2048]
        command += ["-md", draft, "-ngld", a.layers, "--spec-type", "draft-simple"]
        command += ["--spec-draft-n-max", most, "--temp", 0, "-p"]
        tokens = seconds = accepted = 0
        for p in prompts:
            text = p["turns"][0] if "turns" in p else p["prompt"]
            out = "".join(run(a, *command, TURN.format(text), **libraries))
            n, s = found(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", out)
            tokens, seconds = tokens + int(n), seconds + float(s)
            accepted += int(found(r"n_accept\s*=\s*(\d+)", out)[0])
        speed, each = tokens / seconds, tokens / max(1, tokens - accepted)
        yield [f"llama.cpp, {most} drafts a pass", plain, speed, each, speed / plain]


def options():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name, default=None, help=None, **more):
        ap.add_argument(f"--{name}", default=default, help=help, **more)

    path = {"type": pathlib.Path}
    add("llama", None, "measure llama.cpp too: where its programs are", **path)
    add("gemma", ROOT / "target/release/gemma", **path)
    add("model", ROOT / "draft/demo-target", **path)
    add("draft-model", ROOT / "draft/demo-draft", **path)
    add("tokenizer", None, "a tokenizer.json [default: the model's]", **path)
    add("prompts", [ROOT / "tests/newcomer.jsonl"], nargs="+", **path)
    add("count", 8, "prompts", type=int)
    add("tokens", 96, "most tokens of an answer", type=int)
    add("repetitions", 2, type=int)
    add("temp", [0.0], "temperatures of ours; llama.cpp's is 0", type=float, nargs="+")
    add("n-max", [2, 4], "drafts a pass of llama.cpp", type=int, nargs="+")
    add("device", "vulkan", "of ours")
    add("layers", 99, "layers of llama.cpp on the GPU", type=int)
    add("args", "", "more options for ours")
    add("shape", "27b", "27b, or test for a small one")
    add("limit", 540, "seconds for everything", type=int)
    add("work", pathlib.Path("standin"), "where models and JSON results are kept", **path)
    a = ap.parse_args()
    a.end = time.monotonic() + a.limit
    a.tokenizer = a.tokenizer or a.model / "tokenizer.json"
    return a


def main():
    a = options()
    try:
        a.work.mkdir(parents=True, exist_ok=True)
        prompts = chosen(a.prompts, a.count)
        target = made(a, a.model, a.shape)
    except (Failed, OSError) as e:
        sys.exit(f"error: {e}")
    parts = [ours(a, temperature, prompts, target) for temperature in a.temp]
    if a.llama:
        parts.append(theirs(a, prompts, target))
    rows, failed = [], False
    for part in parts:
        try:
            for name, plain, drafted, each, ratio in part:
                cells = [f"{plain:.1f}", f"{drafted:.1f}", f"{each:.2f}", f"{ratio:.2f}"]
                rows.append([name, *cells])
        except (Failed, OSError) as e:
            print(f"error: {e}", file=sys.stderr)
            failed = True
    if rows:
        print(f"{len(prompts)} prompts, answers of at most {a.tokens} tokens;")
        print(f"{a.model} in the shape {a.shape}, drafts by {a.draft_model}\n")
        head = ["plain, tok/s", "with drafts, tok/s", "tokens a pass", "times as fast as plain"]
        markdown_table.show([["", *head], *rows])
    sys.exit(failed)


if __name__ == "__main__":
    main()
