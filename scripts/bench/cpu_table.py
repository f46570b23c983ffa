#!/usr/bin/env python3
"""Table of scripts/bench/cpu.sh: medians over rounds, and the ratio round by round (the machine's
speed drifts)."""

import json
import os
import re
import statistics
import sys


def ours(path):
    """Returns the figures of one `gemma bench --json`: decode tok/s, ms by rows, bytes of all
    weights and of the weights that a token reads, bandwidth, prefill tok/s."""
    report = json.load(open(path))
    rows = {r["name"]: r["figure"]["median"] for r in report["results"]}
    decode = next(v for k, v in rows.items() if k.startswith("tg"))
    verify = {int(m[1]): v for k, v in rows.items() if (m := re.match(r"verify (\d+) row", k))}
    prefill = next(v for k, v in rows.items() if k.startswith("pp"))
    model, machine = report["model"], report["machine"]
    sizes = model["weights"], model["read"]
    return decode, verify, sizes, machine["read_gb_per_s"], prefill


def theirs(decode_path, verify_path):
    """Returns the figures of llama-bench (JSON) and verify-bench (a table; its second and fourth
    columns are rows and median ms)."""
    runs = json.load(open(decode_path))
    prefill, decode = (next(r["avg_ts"] for r in runs if r[n] > 0) for n in ("n_prompt", "n_gen"))
    verify = {}
    for line in open(verify_path):
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if len(cells) >= 4 and cells[1].isdigit():
            verify[int(cells[1])] = float(cells[3])
    return decode, verify, prefill


def main():
    work, rounds, gguf = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    median = statistics.median
    a = [ours(f"{work}/ours-{i}.json") for i in range(1, rounds + 1)]
    b = [theirs(f"{work}/decode-{i}.json", f"{work}/verify-{i}.txt") for i in range(1, rounds + 1)]
    (weights, read), theirs_gb = a[0][2], os.path.getsize(gguf) / 1e9
    ours_gb, share = weights / 1e9, read / weights  # a token of a mixture reads a part
    roof = median(x[3] for x in a)
    print(f"medians of {rounds} rounds in turn; weights ours {ours_gb:.3f} GB, llama.cpp "
          f"{theirs_gb:.3f} GB; memory reads {roof:.1f} GB/s")
    print("| test | ours | llama.cpp | ratio (median of rounds, min - max) |")
    print("|---|---|---|---|")
    for name, i, j in (("prefill", 4, 2), ("decode", 0, 0)):
        ratios = [x[i] / y[j] for x, y in zip(a, b)]
        da, db = median(x[i] for x in a), median(y[j] for y in b)
        print(f"| {name}, tok/s | {da:.1f} | {db:.1f} | {median(ratios):.2f} ({min(ratios):.2f} - "
              f"{max(ratios):.2f}) |")
    print(f"| share of the roof | {da * ours_gb * share / roof:.0%} | "
          f"{db * theirs_gb * share / roof:.0%} | |")
    for m in sorted(set(a[0][1]) & set(b[0][1])):
        if m == 1:
            continue
        ca, cb = median(x[1][m] / x[1][1] for x in a), median(y[1][m] / y[1][1] for y in b)
        ratios = [y[1][m] / x[1][m] for x, y in zip(a, b)]
        print(f"| c({m}); pass of {m} rows | {ca:.2f} | {cb:.2f} | {median(ratios):.2f} times "
              f"faster ({min(ratios):.2f} - {max(ratios):.2f}) |")


if __name__ == "__main__":
    main()
