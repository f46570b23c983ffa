"""What each weight format costs a processor: the part [cpu.ps] of quant/costs.toml.

    python3 scripts/bench_costs.py [GEMMA] [--rounds 8] [--cores 2]

Runs `gemma bench --only kernels` on made-up weights of each format in turn, several times over, on
one thread, and takes the fastest time of each kernel, since other programs only add to it. Prints,
for each format, picoseconds for each weight of the linear layers on so many cores: of a pass of 1
row, of a pass of 16 rows, and of a token of a prompt (a pass of 128 rows / 128). The shape is so
small that the last cache may hold it: what reading takes is counted apart.
"""

import argparse
import json
import subprocess
import sys

FORMATS = [
    *["i8-row", "i8-g32", "i8a-row", "i4-row+h128", "i4-g32", "i4-g128"],
    *["i2-row+h128", "i2-g32+h128", "i2-g128+h128"],
    *["t2-row+h128", "t2.5-row+h128", "t3-row+h128", "t4-row+h128"],
]
# Rows of a pass, and the tokens that its time is divided by.
PASSES = {1: 1, 16: 1, 128: 128}
LAYERS = ["qkv", "q", "k", "v", "o", "gate_up", "gate", "up", "down"]


def kernels(options, name):
    """{(rows, label): (seconds, weights)} of the linear layers of a pass."""
    command = [options.gemma, "bench", "--synthetic", options.shape, "--format-weights", name]
    command += ["-d", "cpu", "-t", "1", "--only", "kernels", "--json"]
    command += ["--kernel-rows", ",".join(map(str, PASSES)), "--tg", "4", "--repetitions", "1"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    layers = [k for k in found["kernels"] if k["label"] in LAYERS]
    each = lambda k: (k["seconds"] / k["passes"], k["macs"] / k["passes"] / k["rows"])
    return {(k["rows"], k["label"]): each(k) for k in layers}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gemma", nargs="?", default="target/release/gemma")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--shape", default="270m")
    options = parser.parse_args()
    best = {name: {} for name in FORMATS}
    for turn in range(options.rounds):
        for name in FORMATS:
            for key, timed in kernels(options, name).items():
                best[name][key] = min(timed, best[name].get(key, timed))
        print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
    for name in FORMATS:
        costs = []
        for rows, tokens in PASSES.items():
            timed = [v for key, v in best[name].items() if key[0] == rows]
            seconds, weights = map(sum, zip(*timed))
            costs.append(seconds / options.cores / weights / tokens * 1e12)
        short = name.removesuffix("+h128")
        print(f'"{short}" = [' + ", ".join(f"{cost:.3g}" for cost in costs) + "]")


if __name__ == "__main__":
    main()
