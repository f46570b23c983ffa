#!/usr/bin/env python3
"""Trains a small mixture of experts of Gemma 4's form on the bytes of texts, to measure recipes of
`gemma quantize` with.

  scripts/train/mixture.py DIRECTORY IDS.json TEXT...

DIRECTORY becomes a Hugging Face checkpoint of 50 million parameters, IDS.json the ids of 16 kB of
held-out text for `gemma eval --ids`. A hundredth of each text is held out. Needs a GPU and the
packages torch and transformers; STEPS (2500) is the length of the training.

Like those of the 26B, the expert's width is no multiple of 128 and the stream's is."""

import json
import math
import os
import sys

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

STEPS, BATCH, WINDOW, RATE = int(os.environ.get("STEPS", 2500)), 64, 512, 1.5e-3
BOS = 2
CONFIG = dict(
    vocab_size=320, hidden_size=384, intermediate_size=576, num_hidden_layers=6,
    num_attention_heads=6, num_key_value_heads=2, head_dim=64, global_head_dim=128,
    num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=256,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, enable_moe_block=True,
    num_experts=32, top_k_experts=4, moe_intermediate_size=192, final_logit_softcapping=30.0,
    max_position_embeddings=4096, rms_norm_eps=1e-6, bos_token_id=BOS, eos_token_id=1,
    pad_token_id=0, tie_word_embeddings=True,
)  # fmt: skip


def tokens(path):
    """Bytes behind the special tokens."""
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long() + 16


def main(directory, ids, paths):
    texts = [tokens(path) for path in paths]
    held = [text[-(len(text) // 100) :] for text in texts]
    train = torch.cat([text[: -(len(text) // 100)] for text in texts])
    torch.manual_seed(1)
    config = Gemma4TextConfig(**CONFIG)
    model = Gemma4ForCausalLM(config).cuda()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.7 / math.sqrt(p.shape[-1]))
            else:
                p.fill_(1.0)
    print(sum(p.numel() for p in model.parameters()), "parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), weight_decay=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, step / 100) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        at = torch.randint(len(train) - WINDOW, (BATCH,))
        batch = torch.stack([train[i : i + WINDOW] for i in at])
        batch[:, 0] = BOS
        batch = batch.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=batch, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step}: {loss.item():.4f} nats a byte", flush=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    each = 16384 // len(held)
    sample = [BOS] + torch.cat([text[:each] for text in held]).tolist()
    with open(ids, "w") as file:
        json.dump({"ids": sample}, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
