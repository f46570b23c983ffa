"""Makes one table of the results that scripts/bench/gpu.sh wrote to a directory.

python3 scripts/bench/gpu_table.py WORK
"""

import json
import pathlib
import sys

import markdown_table


def ours(path):
    """Returns GB of weights, GB/s of the memory, prefill and decode in tok/s, and ms by rows."""
    report = json.loads(path.read_text())
    out = dict(gb=report["model"]["weights"] / 1e9, roof=report["machine"]["read_gb_per_s"])
    out |= dict(pp=None, tg=None, passes={})
    for row in report["results"]:
        if "pass" in row:
            out["passes"][row["pass"]["rows"]] = row["figure"]["median"]
        elif row["name"][:2] in out:
            out[row["name"][:2]] = row["figure"]["median"]
    return out


def theirs(work):
    """Returns the same figures of llama.cpp, as far as it was measured."""
    out = dict(gb=None, pp=None, tg=None, passes={})
    speed, passes = work / "theirs-speed.json", work / "theirs-passes.txt"
    if speed.exists():
        for run in json.loads(speed.read_text()):
            out["pp" if run["n_prompt"] else "tg"] = run["avg_ts"]
            out["gb"] = run["model_size"] / 1e9
    for line in passes.read_text().splitlines() if passes.exists() else []:
        # Depth, rows, least and median milliseconds.
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if len(cells) >= 4 and cells[1].isdigit():
            out["passes"][int(cells[1])] = float(cells[3])
    return out


def over(a, b):
    return a / b if a and b else None


def cell(value, digits=1, bracket=None):
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + (f" ({bracket:.2f})" if bracket else "")


def line(name, f, sizes, roof, peer=None):
    """Returns a row. Brackets have the speed relative to `peer`, which is llama.cpp. Without it
    they have the share of a pass that reading the weights at the memory's speed takes."""
    reading = over(f["gb"], roof)
    share = over(reading, over(1, f["tg"]))

    def speed(key, digits):
        return cell(f[key], digits, peer and over(f[key], peer[key]))

    def of_pass(rows):
        ms = f["passes"].get(rows)
        reference = peer["passes"].get(rows) if peer else reading and 1e3 * reading
        return cell(ms, bracket=over(reference, ms))

    def cost(rows):
        return cell(over(f["passes"].get(rows), f["passes"].get(1)), 2)

    size = f"{f['gb']:.3g}" if f["gb"] else "-"
    cells = [name, size, speed("tg", 1), cell(share and 100 * share, 0)]
    return [*cells, *map(of_pass, sizes), cost(8), cost(16), speed("pp", 0)]


def bumps(name, passes):
    """Lists passes that take over 2 % longer than a pass over more rows."""
    sizes = sorted(passes)
    for fewer, more in zip(sizes, sizes[1:]):
        if passes[fewer] > 1.02 * passes[more]:
            yield f"{name}: {fewer} rows take {passes[fewer]:.1f} ms, {more} {passes[more]:.1f} ms"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    work = pathlib.Path(sys.argv[1])
    files = sorted(work.glob("ours-*.json"), key=lambda p: p.stat().st_mtime)
    found = {p.stem.removeprefix("ours-"): ours(p) for p in files}
    if not found:
        sys.exit(f"error: nothing was measured: {work} has no ours-*.json")
    llama = theirs(work)
    peer = llama if llama["passes"] or llama["tg"] else None
    # The fastest measurement was disturbed least.
    roof = max(f["roof"] for f in found.values())
    sizes = sorted({m for f in [llama, *found.values()] for m in f["passes"]})
    passes = [f"{m} row{'s' * (m > 1)}, ms" for m in sizes]
    head = ["", "GB", "decode, tok/s", "% of memory", *passes, "c(8)", "c(16)", "prefill, tok/s"]
    table = [head]
    if peer:
        table.append(line("llama.cpp", llama, sizes, roof, dict(pp=None, tg=None, passes={})))
    table += [line(name, f, sizes, roof, peer) for name, f in found.items()]
    failed = work / "failed.txt"
    if failed.exists() and (names := failed.read_text()):
        print(f"Not measured:\n{names}")
    # The table stays the last thing.
    if found_bumps := [bump for name, f in found.items() for bump in bumps(name, f["passes"])]:
        print("Passes that more rows would make faster:", *found_bumps, sep="\n- ", end="\n\n")
    share = "share of a pass that reading the weights at that speed takes"
    print(f"Memory gives {roof:.0f} GB/s. In brackets: ", end="")
    print("times as fast as llama.cpp.\n" if peer else f"{share}.\n")
    markdown_table.show(table)


if __name__ == "__main__":
    main()
