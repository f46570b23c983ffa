"""Prints tokens a second of llama.cpp in the Python package xllamacpp, in the form of `llama-bench
-o json`.

    scripts/bench/llama_wheel.py MODEL THREADS PROMPT GENERATED REPETITIONS

The package has one build for all x86-64 processors, which uses AVX2 at most."""

import json
import os
import sys


def main():
    model, (threads, prompt, generated, repetitions) = sys.argv[1], map(int, sys.argv[2:6])
    # The server writes to standard output.
    out = os.dup(1)
    os.dup2(2, 1)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_ctx, params.n_parallel, params.n_gpu_layers = prompt + generated + 64, 1, 0
    params.warmup = True
    server = xllamacpp.Server(params)
    speeds = {"prompt": [], "predicted": []}
    for i in range(repetitions + 1):
        body = {"prompt": [(7 * n + i) % 5000 + 100 for n in range(prompt)], "n_predict": generated,
                "ignore_eos": True, "cache_prompt": False, "temperature": 0}
        answer = server.handle_completions(body)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        # The first run warms up.
        if i:
            for name, values in speeds.items():
                values.append(answer["timings"][f"{name}_per_second"])
    mean = {name: sum(values) / len(values) for name, values in speeds.items()}
    os.write(out, json.dumps([
        {"n_prompt": prompt, "n_gen": 0, "avg_ts": mean["prompt"]},
        {"n_prompt": 0, "n_gen": generated, "avg_ts": mean["predicted"]},
    ]).encode() + b"\n")


main()
