#!/usr/bin/env bash
# Measures a batch's tokens a second by the number of records at once, with and without drafts, and
# compares the answers.
#
#   scripts/bench/batch.sh [GENERATE OPTIONS]        such as -m MODEL -d vulkan -t 8
#
# Prints medians of ROUNDS rounds; all settings run in turn in each round. "Ready" leaves out
# loading, which is measured by a record of one token. CPU time is the sum over all threads; it is
# the better figure on a shared machine. Each setting has its own cache, and no round repeats the
# prompts of an earlier one. Environment:
#
#   GEMMA (the binary), ROUNDS (3), RECORDS (96), TOKENS (96) of each
#   AT_ONCE ("1 2 4 8 16")
#   DRAFTS ("off auto", or "auto:1,8 off:8,32" to name the numbers of each)
#   LLAMA    a directory with llama-batched-bench, to measure that too: needs -m FILE.gguf
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${GEMMA:-}" ] || cargo build --release -q
export GEMMA=${GEMMA:-$PWD/target/release/gemma}
PYTHONPATH=scripts/bench exec python3 - "$@" <<'PYTHON'
import json, os, resource, statistics, subprocess, sys, tempfile, time

from llama_batched import batched_speeds

env = lambda name, default: os.environ.get(name, default)
rounds, records, tokens = (int(env(n, d)) for n, d in (("ROUNDS", "3"), ("RECORDS", "96"), ("TOKENS", "96")))
at_once, drafts = env("AT_ONCE", "1 2 4 8 16").split(), env("DRAFTS", "off auto").split()
questions = ["Why is the sky blue?", "Tell me a short story about a fox.", "Explain what a hash map is.", "List the days of the week.",
             "Write a polite email to a landlord.", "How do I boil an egg?", "What is the difference between TCP and UDP?",
             "Describe a sunset."]
# Half of them are greedy. All have one length, so that settings differ only in speed.
def lines(turn):
    record = lambda n: {"id": n, "prompt": f"{questions[n % 8]} ({n})", "max_tokens": tokens, "ignore_eos": True, "temperature": n // 8 % 2}
    return "\n".join(json.dumps(record(n)) for n in range(turn * records, (turn + 1) * records))

settings = []
for draft in drafts:
    name, _, numbers = draft.partition(":")
    settings += [(name, n) for n in (numbers.split(",") if numbers else at_once)]
seconds, busy, ready, texts = *({s: [] for s in settings} for _ in range(3)), {}

def spent():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

with tempfile.TemporaryDirectory() as home:
    # No settings of this machine.
    kept = {k: v for k, v in os.environ.items() if k == "PATH" or k.startswith(("GEMMA_VULKAN", "VK_", "LD_"))}
    for turn in range(rounds + 1):  # the first for warmth: what passes cost is measured and kept
        for draft, n in settings:
            command = [os.environ["GEMMA"], "generate", "--batch", "-q", "--seed", "1", "--draft", draft, "--parallel", n, *sys.argv[1:]]
            environment = kept | {"HOME": f"{home}/{draft}-{n}"}
            one = json.dumps({"id": 0, "prompt": "Hello", "max_tokens": 1})
            start = time.monotonic()
            if turn:
                subprocess.run(command, input=one, capture_output=True, text=True, env=environment)
            loading, start, before = time.monotonic() - start, time.monotonic(), spent()
            run = subprocess.run(command, input=lines(turn), capture_output=True, text=True, env=environment)
            took = time.monotonic() - start
            if run.returncode:
                sys.exit(run.stderr)
            texts.setdefault(turn, set()).add(run.stdout)
            if turn:
                seconds[draft, n].append(took)
                busy[draft, n].append(spent() - before)
                ready[draft, n].append(took - loading)
            print(f"round {turn} of {rounds}: --draft {draft} --parallel {n}: {took:.2f} s", file=sys.stderr)
total = sum(json.loads(line)["usage"]["completion_tokens"] for line in min(texts[0]).splitlines())
same = all(len(of_turn) == 1 for of_turn in texts.values())
print(f"{records} records, {total} tokens, {rounds} rounds; answers {'the same byte for byte' if same else 'DIFFER'}\n")
print("| --draft | --parallel | tok/s | of one by one | spread | ready, tok/s | CPU s | of one by one |")
print("|---|---:|---:|---:|---:|---:|---:|---:|")
for draft, n in settings:
    middle, work, loaded = (statistics.median(of[draft, n]) for of in (seconds, busy, ready))
    one, alone = (statistics.median(of.get((draft, "1"), of[draft, n])) for of in (seconds, busy))
    spread = (max(seconds[draft, n]) - min(seconds[draft, n])) / middle
    print(f"| {draft} | {n} | {total / middle:.1f} | {one / middle:.2f} | {100 * spread:.0f} % "
          f"| {total / loaded:.1f} | {work:.2f} | {work / alone:.2f} |")
if "LLAMA" in os.environ:
    model = sys.argv[sys.argv.index("-m") + 1]
    for n, speed in batched_speeds(model, sorted({int(n) for _, n in settings}), tokens):
        print(f"| llama.cpp | {n} | | | | {speed:.1f} | | |")
sys.exit(0 if same else 1)
PYTHON
