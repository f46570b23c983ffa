"""Measures tokens a second of llama.cpp for several texts at once, for batch.sh and serve.sh."""

import json
import os
import pathlib
import subprocess


def batched_speeds(model, counts, tokens):
    """Returns the tokens a second of all texts together for each number of texts at once, from
    `llama-batched-bench`.

    LLAMA names the directory of that program, LLAMA_ARGS its options (-ngl 99 -fa on)."""
    llama = pathlib.Path(os.environ["LLAMA"])
    command = [llama / "llama-batched-bench", "-m", model,
               *os.environ.get("LLAMA_ARGS", "-ngl 99 -fa on").split(),
               "-c", str(max(counts) * (16 + tokens)), "-npp", "16", "-ntg", str(tokens),
               "-npl", ",".join(map(str, counts)), "--output-format", "jsonl"]
    # Libraries that the system may lack are next to the programs. The driver's are elsewhere.
    paths = [str(llama), os.environ.get("LD_LIBRARY_PATH"), str(llama / "fallback")]
    libraries = {"LD_LIBRARY_PATH": ":".join(filter(None, paths))}
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | libraries)
    if found.returncode:
        raise SystemExit(found.stderr[-2000:])
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return [(line["pl"], line["speed_tg"]) for line in lines]
