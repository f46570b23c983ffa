"""One process a GPU, started by torchrun or alone; gradients are averaged over the processes."""
import os
import time

import torch
import torch.distributed as dist

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def start():
    """The device of this process."""
    if not torch.cuda.is_available():
        return "cpu"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    return "cuda"


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.2)


def finish():
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


def say(*text):
    if RANK == 0:
        print(*text, flush=True)


def share(batch, most=32):
    """Rows of a step's batch that this process takes at a time, and how many times."""
    rows = batch // WORLD
    turns = -(-rows // most)
    return rows // turns, turns


def average(params):
    """Replaces the gradients of `params` by their mean over the processes; sent as bf16."""
    if WORLD == 1:
        return
    flat = torch.cat([p.grad.flatten().bfloat16() for p in params])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad = g.view_as(p).float()


class Clock:
    """How many steps a stage takes: as many as asked for, or as fit into a number of seconds.

    In the second case the number is settled at step `LOOK`, by the steps from `WARM` on, and is the
    same in all processes."""

    WARM, LOOK = 15, 40

    def __init__(self, steps, seconds):
        assert (steps is None) != (seconds is None), "--steps or --seconds, one of them"
        self.steps, self.seconds, self.began, self.mark = steps, seconds, time.time(), None

    def more(self, step):
        if self.steps is None and step in (self.WARM, self.LOOK):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if step == self.WARM:
                self.mark = time.time()
            else:
                rate = (time.time() - self.mark) / (self.LOOK - self.WARM)
                left = int((self.seconds - (time.time() - self.began)) / rate)
                left = torch.tensor([left], device="cuda" if torch.cuda.is_available() else "cpu")
                if WORLD > 1:
                    dist.broadcast(left, 0)
                self.steps = step + max(1, int(left))
                say(f"{rate * 1e3:.0f} ms a step: {self.steps} steps")
        return self.steps is None or step < self.steps

    def done(self, step):
        """Which share of the stage is over, 0 to 1."""
        return step / self.steps if self.steps else 0.0
