"""The slots write what generate() writes, and keep the chances that a whole pass gives; a tiny f32
model on a CPU: python test_slots.py

With TRITON_INTERPRET=1 the attention kernel is compared with plain attention too.
"""

import collections
import os

import torch

import generate
import hf_files
import model
import slots

NEW, WINDOW, PROMPTS, PASSES = 20, 24, 37, 600


def tiny():
    hf_files.MODELS["demo-target"].update(
        dim=128, layers=3, ffn=128, heads=4, kv_heads=2, pattern=2
    )
    slots.WINDOW = generate.WINDOW = WINDOW
    net = model.Net("demo-target", "cpu")
    net.dtype = torch.float32
    weights = {n: t.detach() * (3 if t.dim() == 2 else 1) for n, t in net.init(3, "cpu").items()}
    return net, generate.effective(net, weights)


def documents(tokens):
    """(slot, begin, end) of each prompt and answer that ended within the passes."""
    for slot, row in enumerate(tokens):
        begins = (row == slots.BOS).nonzero()[:, 0].tolist()
        yield from ((slot, a, b) for a, b in zip(begins, begins[1:]))


def check_answers():
    net, e = tiny()
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 60, (PROMPTS,), generator=g)
    some = lambda n: [slots.BOS] + torch.randint(200, 16000, (n - 1,), generator=g).tolist()
    prompts = [some(n) for n in lengths.tolist()]
    # An id that is often written is made the end mark, so that answers end early too.
    often = collections.Counter(t for o in generate.generate(net, e, prompts, NEW) for t in o)
    slots.EOT = generate.EOT = often.most_common(8)[-1][0]
    want = generate.generate(net, e, prompts, NEW)
    assert len({len(o) for o in want}) > 1

    ids = torch.tensor(sum(prompts, []), dtype=torch.int16)
    s = slots.Slots(net, e, (ids, lengths.cumsum(0) - lengths, lengths), 8, NEW)
    tokens, kind, top, chance = s.run(PASSES)
    seen = set()
    for slot, a, b in documents(tokens):
        doc = tokens[slot, a:b].tolist()
        i, p = next((i, p) for i, p in enumerate(prompts) if doc[: len(p)] == p)
        assert top[slot, a + len(p) - 1 : b, 0].tolist() == want[i], i
        assert doc[len(p) :] == want[i][:-1], i
        kinds = [slots.READ] * (len(p) - 1) + [slots.WRITTEN] * len(want[i])
        assert kind[slot, a:b].tolist() == kinds, i
        whole = net.logits(e, generate.dense_hidden(net, e, torch.tensor([doc])))[0]
        best = whole.log_softmax(-1).topk(slots.TOP, -1).values
        assert (best - chance[slot, a:b].float()).abs().max() < 0.02, i
        seen.add(i)
    assert len(seen) == PROMPTS
    print(f"answers to {PROMPTS} prompts are those of generate()")


def check_kernel():
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=g)
    q, k, v = rand(5, 4, 64), rand(5, 2, 150, 64), rand(5, 2, 150, 64)
    position = torch.tensor([0, 3, 63, 64, 149])
    for window in (150, 40, 512):
        difference = slots.attend_kernel(q, k, v, position, window)
        difference -= slots.attend_plain(q, k, v, position, window)
        assert difference.abs().max() < 1e-5, window
    print("the kernel gives what plain attention gives")


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        check_kernel()
    else:
        check_answers()
