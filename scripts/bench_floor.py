"""Whether drafting costs any kind of text speed: drafted over plain decoding, pair by pair, by kind of prompt and device.

    python3 scripts/bench_floor.py PROMPTS.jsonl... [--devices cpu vulkan:0] [--processes 3] [--count 26 | --each 6] [--tokens 96]

Every process of `gemma bench --only text` answers each prompt both ways, one right after the other, with a drafter that knows nothing yet;
the odd ones begin with empty caches: kernels are compiled, costs measured anew. Texts that no draft can guess are among the kinds: lists of
random words continued at temperature 3 (hostile). With --each every kind has as many prompts, where the files have them: kinds of few
prompts need as many pairs as the others. Prints the median of all pairs of a kind with its quartiles, by wall time and
by this process's processor time, and fails where a median is below --least both ways. Only the standard library.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

WORDS = "amber basin cargo delta ember fable grain hinge ivory joint kayak lemon mango nylon ocean pearl quilt raven solar tulip umbra velvet".split()

LONGEST = 4000  # characters of a prompt


def hostile(file, count):
    dice = random.Random(7)
    lines = [{"category": "hostile", "prompt": "Go on: " + " ".join(dice.choices(WORDS, k=24))} for _ in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def evenly(file, sources, each, shortest):
    """As many prompts of each category, spread over those that a chat model's context takes in any case, or its shortest."""
    kinds = {}
    for line in (line for source in sources for line in source.read_text().splitlines() if line.strip()):
        record = json.loads(line)
        prompt = record["turns"][0] if "turns" in record else record["prompt"]
        if len(prompt) <= LONGEST:
            kinds.setdefault(record.get("category", "prompt"), []).append((len(prompt), line))
    kinds = {kind: [line for _, line in (sorted(lines)[:each] if shortest else lines)] for kind, lines in kinds.items()}
    chosen = [lines[i * len(lines) // min(each, len(lines))] for lines in kinds.values() for i in range(min(each, len(lines)))]
    file.write_text("".join(line + "\n" for line in chosen))
    return file, len(chosen)


def measured(a, device, cache, prompts, count, more):
    command = [a.gemma.resolve(), "bench", "-q", "-d", device, "--only", "text", "--json", "--text-tokens", a.tokens,
               "--repetitions", a.repetitions, "--prompt-count", count, *more, *a.args.split()]  # fmt: skip
    for file in prompts:
        command += ["--prompts", file]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=os.environ | {"XDG_CACHE_HOME": str(cache)})
    if done.returncode:
        sys.exit(f"gemma bench failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)["text"]["kinds"]


def spread(runs):
    quarters = statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else [runs[0]] * 3
    return quarters[1], f"{quarters[1]:.3f} ({quarters[0]:.2f}-{quarters[2]:.2f})"


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("prompts", nargs="+", type=pathlib.Path)
    ap.add_argument("--gemma", type=pathlib.Path, default="target/release/gemma")
    ap.add_argument("--devices", nargs="+", default=["cpu"])
    ap.add_argument("--processes", type=int, default=4)
    ap.add_argument("--repetitions", type=int, default=1)
    ap.add_argument("--count", type=int, default=26, help="prompts of the files, and half as many hostile ones")
    ap.add_argument("--each", type=int, help="prompts of each kind, instead of --count of all")
    ap.add_argument("--shortest", action="store_true", help="with --each: the shortest of each kind, where reading a long one takes minutes")
    ap.add_argument("--tokens", type=int, default=96)
    ap.add_argument("--least", type=float, default=0.97)
    ap.add_argument("--args", default="", help="more options for gemma bench, such as -m or -t")
    a = ap.parse_args()
    low = []
    with tempfile.TemporaryDirectory() as work:
        if a.each:
            file, a.count = evenly(pathlib.Path(work) / "prompts.jsonl", a.prompts, a.each, a.shortest)
            a.prompts = [file]
        odd = hostile(pathlib.Path(work) / "hostile.jsonl", a.each or max(1, a.count // 2))
        print("| device | kind | pairs | drafted / plain, median (quartiles) | by processor time | tokens a pass |")
        print("|---|---|---:|---:|---:|---:|")
        for device in a.devices:
            kinds = {}
            for process in range(a.processes):
                cache = pathlib.Path(work) / f"{device}-{process // 2 * 2}"
                for kind in measured(a, device, cache, a.prompts, a.count, []) + measured(a, device, cache, [odd], a.count, ["--temp", 3]):
                    kinds.setdefault(kind["kind"], []).append(kind)
                print(f"{device}: process {process + 1} of {a.processes}", file=sys.stderr)
            for name, found in sorted(kinds.items()):
                runs = lambda key: [r for kind in found for r in kind[key]["runs"]]
                (wall, shown), (busy, shown_busy) = spread(runs("ratio")), spread(runs("by_processor"))
                taus = statistics.mean(kind["tokens_per_pass"] for kind in found)
                print(f"| {device} | {name} | {len(runs('ratio'))} | {shown} | {shown_busy} | {taus:.2f} |", flush=True)
                if max(wall, busy) < a.least:
                    low.append(f"{name} on {device}")
    if low:
        sys.exit(f"below {a.least}: {', '.join(low)}")


if __name__ == "__main__":
    main()
