"""A 27B-shaped stand-in (make_standin.py) end to end on one GPU: both programs, one file, the same prompts and draft model.

    python3 scripts/bench_standin.py --llama LLAMA_DIR --small TARGET.gguf --draft-gguf DRAFT.gguf --draft DRAFT_DIR --prompts FILE.jsonl

Builds nothing; needs 20 GB of disk and of device memory. TARGET.gguf and DRAFT.gguf are `make_standin.py native` files of two sizes,
DRAFT_DIR the artifact of the draft with draft_vocabulary.json in it. Temperature 0. Speed is real; tokens per pass are the
stand-in's and say nothing of a Gemma. Ours checks that drafts change no text and fails if they do.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

TURN = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"


def run(*command, **more):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **more)
    if done.returncode:
        sys.exit(f"{command[0]} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def chosen(files, count):
    """Prompts spread evenly over the lines of each file."""
    out = []
    for file in files:
        lines = [json.loads(line) for line in pathlib.Path(file).read_text().splitlines() if line.strip()]
        n = min(-(-count // len(files)), len(lines))
        out += [line for i, line in enumerate(lines) if (i + 1) * n // len(lines) > i * n // len(lines)]
    return out[:count]


def ours(a, prompts, target):
    file = a.work / "prompts.jsonl"
    file.write_text("".join(json.dumps(p) + "\n" for p in prompts))
    for temperature in a.temp:
        out = run(a.gemma.resolve(), "bench", "-m", target, "-d", a.device, "--draft", a.draft, *a.args.split(), "--only", "text", "--prompts", file,
                  "--prompt-count", len(prompts), "--text-tokens", a.tokens, "--repetitions", a.repetitions, "--temp", temperature,
                  "--format", "json", "-q")  # fmt: skip
        for row in json.loads(out[out.index("{") :])["results"]:
            f = row["figure"]
            print(f"ours, temperature {temperature}: {row['name']}: {f['median']:.2f} x ({f.get('low', f['median']):.2f}-{f.get('high', f['median']):.2f}); {row['note']}", flush=True)


def theirs(a, prompts, target):
    environment = os.environ | {"LD_LIBRARY_PATH": f"{a.llama}:{a.llama}/fallback"}
    plain = run(a.llama / "llama-bench", "-m", target, "-ngl", 99, "-fa", 1, "-p", 0, "-n", a.tokens, "-d", 128, "-r", 3, "-o", "json", env=environment)
    print(f"llama.cpp plain: {json.loads(plain[plain.index('[') : plain.rindex(']') + 1])[0]['avg_ts']:.1f} tok/s", flush=True)
    for most in a.n_max:
        tokens = seconds = drafted = accepted = 0
        for p in prompts:
            out = run(a.llama / "llama-speculative-simple", "-m", target, "-md", a.draft_gguf, "-ngl", 99, "-ngld", 99, "-fa", "on", "--spec-type",
                      "draft-simple", "--spec-draft-n-max", most, "-c", 2048, "-n", a.tokens, "--temp", 0,
                      "-p", TURN.format(p["turns"][0]), env=environment)  # fmt: skip
            n, s = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", out).groups()
            tokens, seconds = tokens + int(n), seconds + float(s)
            drafted += int(re.search(r"n_drafted\s*=\s*(\d+)", out)[1])
            accepted += int(re.search(r"n_accept\s*=\s*(\d+)", out)[1])
        print(f"llama.cpp, {most} drafts a pass: {tokens / seconds:.1f} tok/s, {tokens / max(1, tokens - accepted):.2f} tokens a pass, "
              f"{accepted} of {drafted} drafts taken, {tokens} tokens", flush=True)  # fmt: skip


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--llama", type=pathlib.Path)
    ap.add_argument("--gemma", type=pathlib.Path, default="target/release/gemma")
    for name in ("small", "draft-gguf", "draft"):
        ap.add_argument("--" + name, type=pathlib.Path, required=True)
    ap.add_argument("--prompts", nargs="+", required=True)
    ap.add_argument("--count", type=int, default=8)
    ap.add_argument("--tokens", type=int, default=96)
    ap.add_argument("--repetitions", type=int, default=2)
    ap.add_argument("--temp", type=float, nargs="+", default=[0.0])
    ap.add_argument("--n-max", type=int, nargs="+", default=[2, 4])
    ap.add_argument("--device", default="vulkan", help="of ours")
    ap.add_argument("--args", default="", help="more options for ours")
    ap.add_argument("--shape", default="27b")
    ap.add_argument("--work", type=pathlib.Path, default="standin")
    a = ap.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    target = a.work / f"{a.shape}.gguf"
    if not target.exists():
        print(run(sys.executable, pathlib.Path(__file__).with_name("make_standin.py"), "pad", a.small, target, "--shape", a.shape).strip())
    prompts = chosen(a.prompts, a.count)
    ours(a, prompts, target)
    if a.llama:
        theirs(a, prompts, target)


if __name__ == "__main__":
    main()
