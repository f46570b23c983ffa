"""Writes a checkpoint as a Hugging Face directory (bf16, not quantised) and compares it with
transformers.

    python export.py --name demo-target --checkpoint RUN/target.pt --tokenizer tokenizer.json --out
    DIR [--verify]
"""
import argparse
import os

import torch

from generate import dense_hidden
from hf_files import shapes, to_bf16, write_configs, write_safetensors
from model import Net


@torch.no_grad()
def verify(name, folder):
    from transformers import AutoTokenizer, Gemma3ForCausalLM

    net = Net(name)
    net.dtype = torch.float32
    ref = Gemma3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).cuda()
    w = {n: t.float().cuda() for n, t in ref.state_dict().items() if n in shapes(name)}
    assert set(w) == set(shapes(name)), set(shapes(name)) ^ set(w)
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(107, 16384, (1, 1400), generator=g).cuda()
    tokens[0, 0] = 2
    e = net.effective(w, False)
    a, b = net.logits(e, dense_hidden(net, e, tokens)), ref(tokens).logits.float()
    print(f"{name} against transformers, 1,400 tokens, f32: largest logit difference "
          f"{(a - b).abs().max().item():.2e} "
          f"(logits up to {b.abs().max().item():.1f}), same top-1 "
          f"{(a.argmax(-1) == b.argmax(-1)).float().mean().item():.4f}")
    tok = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi "}]
    print(
        repr(tok.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)), flush=True
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--name", required=True)
    ap.add_argument("--checkpoint", help="default: random weights")
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--verify", action="store_true")
    a = ap.parse_args()
    folder = os.path.join(a.out, a.name)
    write_configs(a.name, a.tokenizer, folder)
    w = torch.load(
        a.checkpoint, map_location="cpu"
    )["weights"] if a.checkpoint else Net(a.name).init(1)
    tensors = {n: to_bf16(w[n].detach().float().cpu().numpy()) for n in shapes(a.name)}
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    if a.verify:
        verify(a.name, folder)


if __name__ == "__main__":
    main()
