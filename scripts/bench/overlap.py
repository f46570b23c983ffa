"""Measures how much drafting on a CPU thread slows a target that decodes on the GPU.

    python3 scripts/bench/overlap.py TARGET... --draft DRAFT_DIR [-d vulkan] [--rounds 12] [--args
    "--format-weights i4-g32"]

TARGET is a model for `gemma bench -m`, or the name of a shape for `--synthetic` such as 27b. Plain
decoding is timed in random order alone, while a draft decodes on one thread, and while a loop keeps
a core busy. The draft's processor time shows that it ran. Prints the tokens a second of every run
and, for pairs of one round, the change by the other process. Uses only the standard library."""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

ARMS = ("alone", "with the draft", "with a busy loop")


def decoded(a, target):
    model = ["-m", target] if pathlib.Path(target).exists() else [
        "--synthetic", target, *a.args.split()
    ]
    command = [
        a.gemma.resolve(), "bench", "-q", *model, "-d", a.device, "--only", "decode", "--tg",
        a.tokens, "--repetitions", 9, "--json",
    ]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"gemma bench failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return next(
        row["figure"]["median"]
        for row in json.loads(done.stdout)["results"]
        if row["name"].startswith("tg")
    )


def company(a, arm):
    draft = [
        a.gemma.resolve(), "bench", "-q", "-m", a.draft, "-d", "cpu", "-t", "1", "--only", "decode",
        "--tg", "400", "--repetitions", "1000000",
    ]
    command = {ARMS[1]: draft, ARMS[2]: [sys.executable, "-c", "while True: pass"]}.get(arm)
    return command and subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def busy(process):
    """Returns the seconds of processor time so far. The process must still run."""
    if process.poll() is not None:
        sys.exit("the other process ended by itself")
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(a, target, arm):
    process = company(a, arm)
    try:
        if not process:
            return decoded(a, target), None
        time.sleep(a.settle)
        start, before = time.monotonic(), busy(process)
        speed = decoded(a, target)
        return speed, (busy(process) - before) / (time.monotonic() - start)
    finally:
        if process:
            process.kill()
            process.wait()


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("targets", nargs="+")
    ap.add_argument("--draft", required=True)
    ap.add_argument("--gemma", type=pathlib.Path, default="target/release/gemma")
    ap.add_argument("-d", "--device", default="vulkan")
    ap.add_argument("--tokens", type=int, default=256)
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument(
        "--settle", type=float, default=0.5, help="seconds for the other process to start"
    )
    ap.add_argument(
        "--args", default="--format-weights i4-g32", help="more options for --synthetic"
    )
    a = ap.parse_args()
    dice = random.Random(1)
    for target in a.targets:
        speeds, cores = {arm: [] for arm in ARMS}, {arm: [] for arm in ARMS}
        for _ in range(a.rounds):
            for arm in dice.sample(ARMS, len(ARMS)):
                speed, core = measured(a, target, arm)
                speeds[arm].append(speed)
                cores[arm] += [core] if core is not None else []
        print(
            f"{target}: tok/s, median of {a.rounds} (least to most); against alone, mean of pairs"
        )
        for arm in ARMS:
            found = speeds[arm]
            line = f"  {arm}: {statistics.median(found):.0f} ({min(found):.0f}-{max(found):.0f})"
            if arm != ARMS[0]:
                changes = [100 * (b / s - 1) for s, b in zip(speeds[ARMS[0]], found)]
                error = float("nan")
                if len(changes) > 1:
                    error = statistics.stdev(changes) / len(changes) ** 0.5
                line += f"; {statistics.mean(changes):+.1f} % +- {error:.1f} (standard error); "
                line += f"{statistics.median(cores[arm]):.2f} of a core"
            print(line, flush=True)


if __name__ == "__main__":
    main()
