"""Prints the time of each kernel in a pass, and the resource that limits it.

    gemma bench --synthetic 27b --recipe seed -d vulkan --only kernels --kernel-rows 1,8,16,128 \\
      --json >seed.json
    python3 scripts/bench/kernels.py seed.json... [--rows 1 8] [--peak T]

scripts/bench/gpu.sh writes these files for each recipe. Three lower bounds of a kernel's time are
compared: reading its weights at the measured speed of the memory; its multiply-adds of int8 at the
fastest rate of any kernel in these files (or --peak); and its launches, at the shortest time of any
launch. The largest of them limits the kernel if it is at least half of its time. Otherwise the
limit is something else: decoding codes, floating point, waiting.
"""

import argparse
import json
import pathlib

import markdown_table

HEAD = ["kernel", "launches", "ms", "%", "GB/s", "% of memory", "int8 Top/s", "% of peak"]


def of_rows(rows):
    return f"{rows} row{'s' * (rows > 1)}"


def digits(x):
    """Formats a number with three significant digits and no exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}" if x >= 1e-3 else "0"


def percent(x):
    return f"{100 * x:.0f}"


def table(kernels, roof, peak, launch):
    """Returns rows for one size of pass, longest first. Times and launches are of one pass."""
    passes = kernels[0]["passes"] or 1
    total = sum(k["seconds"] for k in kernels)
    rows = [[*HEAD, "bound by"]]
    for k in kernels:
        seconds = k["seconds"] or 1e-12
        memory, rate = k["bytes"] / seconds / 1e9, 2 * k["macs"] / seconds
        shares = {"memory": memory / roof, "int8": rate / peak if peak else 0}
        cells = [digits(memory), percent(shares["memory"])] if k["bytes"] else ["", ""]
        cells += [digits(rate / 1e12), percent(shares["int8"])] if k["macs"] else ["", ""]
        shares["launches"] = k["calls"] * launch / seconds
        most = max(shares, key=shares.get)
        bound = most if shares[most] >= 0.5 else "something else"
        calls, ms = f"{k['calls'] / passes:.0f}", f"{1e3 * seconds / passes:.3f}"
        rows.append([k["label"], calls, ms, percent(seconds / total), *cells, bound])
    calls = sum(k["calls"] for k in kernels) / passes
    return [*rows, ["all", f"{calls:.0f}", f"{1e3 * total / passes:.3f}", "100", *[""] * 5]]


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("files", type=pathlib.Path, nargs="+")
    ap.add_argument("--rows", type=int, nargs="+", help="sizes of passes to show [default: all]")
    ap.add_argument("--peak", type=float, help="int8 operations a second of the device, in 1e12")
    a = ap.parse_args()
    reports = {p.stem.removeprefix("ours-"): json.loads(p.read_text()) for p in a.files}
    timed = []
    for name, report in reports.items():
        for k in report["kernels"]:
            if k["seconds"] > 0:
                timed.append((k, f"{k['label']} of {name}, {of_rows(k['rows'])}"))
    if not timed:
        remedy = "run gemma bench with kernels among --only"
        raise SystemExit(f"error: these files have no times of kernels\nhelp: {remedy}")
    roof = max(report["machine"]["read_gb_per_s"] for report in reports.values())
    fastest, peak_at = max((2 * k["macs"] / k["seconds"], where) for k, where in timed)
    launch, launch_at = min((k["seconds"] / k["calls"], where) for k, where in timed)
    peak = 1e12 * a.peak if a.peak else fastest
    peak_at = "as given" if a.peak else f"that of {peak_at}"
    print(f"On {next(iter(reports.values()))['machine']['device']}:\n")
    print(f"- Memory gives {digits(roof)} GB/s.")
    print(f"- The peak of int8 is {digits(peak / 1e12)} Top/s, {peak_at}.")
    print(f"- The shortest launch takes {1e6 * launch:.1f} us ({launch_at}).")
    print("- Multiply and add are two operations. Times and launches are of one pass.")
    for name, report in reports.items():
        weights = digits(report["model"]["weights"] / 1e9)
        for rows in dict.fromkeys(k["rows"] for k in report["kernels"]):
            if not a.rows or rows in a.rows:
                print(f"\n`{name}`, {weights} GB, pass of {of_rows(rows)}:\n")
                kernels = [k for k in report["kernels"] if k["rows"] == rows]
                markdown_table.show(table(kernels, roof, peak, launch), left=(0, 8))


if __name__ == "__main__":
    main()
