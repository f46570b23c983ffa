"""Writes a checkpoint as a Hugging Face directory (bf16, not quantised) and compares it with transformers.

    python export.py --name demo-target --checkpoint RUN/target.pt --tokenizer tokenizer.json --out DIR [--verify]
"""
import argparse
import os

import torch
import torch.nn.functional as F

from hf_files import HEAD_DIM, WINDOW, shapes, to_bf16, write_configs, write_safetensors
from model import Net, layer, rope_tables


def dense_logits(net, e, tokens):
    """Logits of one unpacked sequence, with plain attention in net.dtype."""
    n = tokens.shape[1]
    pos = torch.arange(n, device=tokens.device)
    causal = pos[:, None] >= pos[None]
    near = causal & (pos[:, None] - pos[None] < WINDOW)
    attend = lambda i: lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=causal if net.is_global(i) else near, scale=HEAD_DIM**-0.5, enable_gqa=True)
    x = net.embed(e, tokens)
    for i in range(net.layers):
        cos, sin = rope_tables(1e6 if net.is_global(i) else 1e4, n)
        x = layer(x, net.weights_of(e, i), cos, sin, attend(i))
    return net.logits(e, x).float()


@torch.no_grad()
def verify(name, folder):
    from transformers import AutoTokenizer, Gemma3ForCausalLM

    net = Net(name)
    net.dtype = torch.float32
    ref = Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").cuda()
    w = {n: t.float().cuda() for n, t in ref.state_dict().items() if n in shapes(name)}
    assert set(w) == set(shapes(name)), set(shapes(name)) ^ set(w)
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(107, 16384, (1, 1400), generator=g).cuda()
    tokens[0, 0] = 2
    a, b = dense_logits(net, net.effective(w, False), tokens), ref(tokens).logits.float()
    print(f"{name} against transformers, 1,400 tokens, f32: largest logit difference {(a - b).abs().max().item():.2e} "
          f"(logits up to {b.abs().max().item():.1f}), same top-1 {(a.argmax(-1) == b.argmax(-1)).float().mean().item():.4f}")
    tok = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi "}]
    print(repr(tok.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)), flush=True)


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
    w = torch.load(a.checkpoint, map_location="cpu")["weights"] if a.checkpoint else Net(a.name).init(1)
    tensors = {n: to_bf16(w[n].detach().float().cpu().numpy()) for n in shapes(a.name)}
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    if a.verify:
        verify(a.name, folder)


if __name__ == "__main__":
    main()
