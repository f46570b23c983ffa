#!/usr/bin/env bash
# Tokens a second of a batch by how many records are answered at once, loading included, with drafts and without; and whether the
# answers are the same. Medians of ROUNDS rounds, all settings in turn in each. CPU time is of all threads: where other work shares the
# machine it says more than the clock does. Each setting keeps what it measures and learns for itself, and no round asks what an earlier
# one did.
#
#   scripts/bench-batch.sh [GENERATE OPTIONS]        such as -m MODEL -d vulkan -t 8
#
# Environment: GEMMA (the binary), ROUNDS (3), RECORDS (96), TOKENS (96) of each, AT_ONCE ("1 2 4 8 16"), DRAFTS ("off auto").
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${GEMMA:-}" ] || cargo build --release -q
export GEMMA=${GEMMA:-$PWD/target/release/gemma}
exec python3 - "$@" <<'PYTHON'
import json, os, resource, statistics, subprocess, sys, tempfile, time

env = lambda name, default: os.environ.get(name, default)
rounds, records, tokens = (int(env(n, d)) for n, d in (("ROUNDS", "3"), ("RECORDS", "96"), ("TOKENS", "96")))
at_once, drafts = env("AT_ONCE", "1 2 4 8 16").split(), env("DRAFTS", "off auto").split()
questions = ["Why is the sky blue?", "Tell me a short story about a fox.", "Explain what a hash map is.", "List the days of the week.",
             "Write a polite email to a landlord.", "How do I boil an egg?", "What is the difference between TCP and UDP?",
             "Describe a sunset."]
# Half of them greedy; all of one length, so that settings differ in nothing but speed.
def lines(turn):
    record = lambda n: {"id": n, "prompt": f"{questions[n % 8]} ({n})", "max_tokens": tokens, "ignore_eos": True, "temperature": n // 8 % 2}
    return "\n".join(json.dumps(record(n)) for n in range(turn * records, (turn + 1) * records))

settings = [(draft, n) for draft in drafts for n in at_once]
seconds, busy, texts = {s: [] for s in settings}, {s: [] for s in settings}, {}

def spent():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

with tempfile.TemporaryDirectory() as home:
    # No settings from elsewhere.
    kept = {k: v for k, v in os.environ.items() if k == "PATH" or k.startswith(("GEMMA_VULKAN", "VK_", "LD_"))}
    for turn in range(rounds + 1):  # the first for warmth: what passes cost is measured and kept
        for draft, n in settings:
            command = [os.environ["GEMMA"], "generate", "--batch", "-q", "--seed", "1", "--draft", draft, "--parallel", n, *sys.argv[1:]]
            start, before = time.monotonic(), spent()
            run = subprocess.run(command, input=lines(turn), capture_output=True, text=True, env=kept | {"HOME": f"{home}/{draft}-{n}"})
            took = time.monotonic() - start
            if run.returncode:
                sys.exit(run.stderr)
            texts.setdefault(turn, set()).add(run.stdout)
            if turn:
                seconds[draft, n].append(took)
                busy[draft, n].append(spent() - before)
            print(f"round {turn} of {rounds}: --draft {draft} --parallel {n}: {took:.2f} s", file=sys.stderr)
total = sum(json.loads(line)["usage"]["completion_tokens"] for line in min(texts[0]).splitlines())
same = all(len(of_turn) == 1 for of_turn in texts.values())
print(f"{records} records, {total} tokens, {rounds} rounds; answers {'the same byte for byte' if same else 'DIFFER'}\n")
print("| --draft | --parallel | tok/s | of one by one | spread | CPU s | of one by one |\n|---|---:|---:|---:|---:|---:|---:|")
for draft, n in settings:
    middle, work = statistics.median(seconds[draft, n]), statistics.median(busy[draft, n])
    one, alone = (statistics.median(of.get((draft, "1"), of[draft, n])) for of in (seconds, busy))
    spread = (max(seconds[draft, n]) - min(seconds[draft, n])) / middle
    print(f"| {draft} | {n} | {total / middle:.1f} | {one / middle:.2f} | {100 * spread:.0f} % | {work:.2f} | {work / alone:.2f} |")
sys.exit(0 if same else 1)
PYTHON
