"""Lets the target answer prompts, and keeps what it thought likeliest at each place: all that the
draft's training needs of it.

    torchrun --nproc-per-node GPUS own.py --prompts prompts.npz --target RUN/target.pt \\
        --out DATA --seconds 300

Each process takes its share of the prompts. Every 2,048 passes it writes
own.RANK.NUMBER.safetensors: rows of 2,048 tokens, what the next token of each place is (`kind`, see
slots.py), and the 16 likeliest ones with the logarithms of their probabilities.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import ddp
from generate import effective
from hf_files import CONTEXT
from model import Net
from slots import WRITTEN, Slots


def weights(path, device="cuda"):
    """Weights of a checkpoint or an exported model, in f32: the fake quantisation is to round
    what the program rounds."""
    exported = path.endswith(".safetensors")
    found = load_file(path, device=device) if exported else None
    found = found or torch.load(path, map_location=device)["weights"]
    return {n: t.float() for n, t in found.items()}


def load_prompts(path, device):
    """ids, starts and lengths of this process's prompts."""
    z = np.load(path)
    lengths = z["lengths"].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    to = lambda x: torch.from_numpy(x).to(device)
    return to(z["ids"]), to(starts[ddp.RANK :: ddp.WORLD]), to(lengths[ddp.RANK :: ddp.WORLD])


def write(path, tensors):
    save_file(tensors, path + ".part")
    os.replace(path + ".part", path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--prompts", required=True)
    ap.add_argument("--target", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--slots", type=int, default=4096)
    ap.add_argument("--new", type=int, default=160)
    ap.add_argument(
        "--sampled", type=float, default=0.15, help="share of the slots that draw at temperature 1"
    )
    ap.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begins no row that would not be written in this time",
    )
    ap.add_argument(
        "--until",
        type=float,
        default=float("inf"),
        help="the same as a time of the clock, in seconds since 1970",
    )
    ap.add_argument("--rows", type=int, default=1 << 30, help="at most so many rows a slot")
    ap.add_argument("--row", type=int, default=CONTEXT, help=argparse.SUPPRESS)
    ap.add_argument(
        "--wait", action="store_true", help="gets ready on random weights, then waits for --target"
    )
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    device = ddp.start()
    if a.wait:
        ddp.wait_for(a.prompts)
    net = Net("demo-target", device)
    e = effective(net, net.init(1, device) if a.wait else weights(a.target, device))
    slots = Slots(net, e, load_prompts(a.prompts, device), a.slots, a.new, a.sampled)
    torch.manual_seed(5 + ddp.RANK)
    slots.hasten(ddp.say, least=0.0 if a.wait else 0.8)
    if a.wait:
        ddp.wait_for(a.target)
        for name, t in effective(net, weights(a.target, device)).items():
            e[name].copy_(t)
        slots.hasten(ddp.say)
    began, written, number, longest = time.time(), 0, 0, 0.0
    end = min(began + a.seconds, a.until)
    with ThreadPoolExecutor(1) as saver:
        saves = []
        while number < a.rows and time.time() + longest < end:
            start = time.time()
            tokens, kind, top, chance = (t.contiguous().cpu() for t in slots.run(a.row))
            path = os.path.join(a.out, f"own.{ddp.RANK}.{number:03}.safetensors")
            saves.append(
                saver.submit(
                    write, path, {"tokens": tokens, "kind": kind, "top": top, "chance": chance}
                )
            )
            number, written, longest = (
                number + 1,
                written + int((kind == WRITTEN).sum()),
                max(longest, time.time() - start),
            )
            if number < 3 or number % 5 == 0:
                ddp.say(
                    f"own row {number}: {tokens.numel() / (time.time() - start) / 1e3:.0f}k "
                    f"tokens/s, of them written {(kind == WRITTEN).float().mean():.2f}"
                )
        for s in saves:
            s.result()
    took = time.time() - began
    ddp.say(
        f"DONE own: {written / 1e6:.1f} M tokens written in {took:.0f} s "
        f"({written / took / 1e3:.0f}k a second), "
        f"{int(slots.count)} of {len(slots.starts)} prompts"
    )
    ddp.finish()


if __name__ == "__main__":
    main()
