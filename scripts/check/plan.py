"""Compares `gemma plan` with the engine's allocations: 27B's shape with random weights, on a device
with enough memory.

    python3 scripts/check/plan.py [--gemma PATH] [--device vulkan] [--recipe int4 ...] [--context
    2048 8192 32768 131072]

Prints a row for each plan, and fails if a kind of bytes differs by more than 1 %. A row takes 20 s
and 16 GB (at 128k: 27 GB)."""
import argparse
import json
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--gemma", default="target/release/gemma")
parser.add_argument("--device", default="vulkan")
parser.add_argument("--recipe", nargs="+", default=["int4"])
parser.add_argument("--context", nargs="+", type=int, default=[2048, 8192, 32768, 131072])
parser.add_argument("--shape", default="27b")
options = parser.parse_args()


def run(*arguments):
    done = subprocess.run([options.gemma, *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"gemma {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


KINDS = ("weights", "kv", "activations")
print("| recipe | context | " + " | ".join(f"{k}, planned / allocated, "
                                           f"MB" for k in KINDS) + " | largest difference |")
print("|---|---:|" + "---:|" * len(KINDS) + "---:|")
worst = 0.0
for recipe in options.recipe:
    for context in options.context:
        common = [
            "--synthetic", options.shape, "--recipe", recipe, "-d", options.device, "--ctx-size",
            str(context),
        ]
        planned = run("plan", *common, "--bandwidth", "100", "--json")
        place = planned["gpu" if options.device.startswith("vulkan") else "cpu"]["bytes"]
        model = run(
            "bench", *common, "--only", "decode", "--tg", "1", "--repetitions", "1", "--json", "-q"
        )["model"]
        off = max(abs(place[k] - model[k]) / model[k] for k in KINDS)
        worst = max(worst, off)
        cells = " | ".join(f"{place[k] / 1e6:.1f} / {model[k] / 1e6:.1f}" for k in KINDS)
        print(f"| {recipe} | {context} | {cells} | {100 * off:.3f} % |", flush=True)
sys.exit(worst > 0.01)
