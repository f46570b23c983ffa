"""One table from what scripts/bench-gpu.sh left in a directory."""
import json
import pathlib
import re
import sys

work = pathlib.Path(sys.argv[1])
ours = {p.stem[5:]: json.loads(p.read_text()) for p in sorted(work.glob("ours-*.json"))}
runs = json.loads((work / "bench.json").read_text())
speed = {("pp" if r["n_prompt"] else "tg"): r["avg_ts"] for r in runs}
text = (work / "verify.txt").read_text()
# Rows of figures: depth, rows, milliseconds, in whatever frame.
cells = [[float(c) for c in re.findall(r"\d+\.?\d*", line)] for line in text.splitlines()]
theirs = {int(c[1]): c[2] for c in cells if len(c) >= 3 and c[1] in (1, 2, 4, 8, 16, 32)}


def figure(report, start):
    return next((r["figure"]["median"] for r in report["results"] if r["name"].startswith(start)), None)


names = list(ours)
print("| | llama.cpp Q4_0 | " + " | ".join(f"{n}: {ours[n]['model']['weights'] / 1e9:.1f} GB" for n in names) + " |")
print("|---|---:|" + "---:|" * len(names))
for label, key in (("prefill 512, tok/s", "pp"), ("decode, tok/s", "tg")):
    row = [f"{figure(ours[n], key):.0f} ({figure(ours[n], key) / speed[key]:.2f})" for n in names]
    print(f"| {label} | {speed[key]:.1f} | " + " | ".join(row) + " |")
for m in (1, 2, 4, 8, 16, 32):
    start = f"verify {m} row"
    row = [f"{figure(ours[n], start):.1f} (" + (f"{theirs[m] / figure(ours[n], start):.2f}" if m in theirs else "?") + ")" for n in names]
    print(f"| pass of {m}, ms | {theirs.get(m, float('nan')):.1f} | " + " | ".join(row) + " |")
for n in names:
    roof = ours[n]["machine"]["read_gb_per_s"]
    parts = [f"{k['label']} {1e3 * k['seconds'] / 64:.2f} ms" + (f" {100 * k['bytes'] / k['seconds'] / 1e9 / roof:.0f} %" if k["bytes"] else "") for k in ours[n]["kernels"]]
    print(f"\n{n}: roof {roof:.0f} GB/s; a decoding pass by kernel, share of the roof: " + ", ".join(parts))
load = next(r for r in json.loads((work / "load.json").read_text())["results"] if r["name"] == "load")
print(f"\nloading the GGUF: {load['figure']['median'] / 1e3:.2f} s; {load['note']}")
print("\n(in brackets: how many times as fast as llama.cpp)\n\n" + text)
