"""Writes a checkpoint of draft_train.py as a Hugging Face directory (bf16), ready for `gemma
quantize`.

    python draft_export.py --checkpoint RUN/small.pt --vocab draft_vocabulary.json --out DIR
    [--verify]
    python draft_export.py --random tiny --vocab draft_vocabulary.json --out DIR     # random
    weights, to develop on

--verify compares the logits with transformers (float32, CPU).
"""
import argparse
import json
import os
import shutil

import torch

from draft_net import SHAPES, DraftNet, Mask, Shape
from hf_files import HEAD_DIM, to_bf16, write_safetensors


def config(shape):
    return {
        "architectures": [
            "Gemma3ForCausalLM"
        ], "model_type": "gemma3_text", "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "bos_token_id": 2,
        "eos_token_id": 1, "pad_token_id": 0,
        "head_dim": HEAD_DIM, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": shape.dim,
        "initializer_range": 0.02,
        "intermediate_size": shape.ffn, "layer_types": [
            "sliding_attention"
        ] * shape.layers, "max_position_embeddings": 131072,
        "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "query_pre_attn_scalar": HEAD_DIM, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": shape.window, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": shape.vocab,
    }


@torch.no_grad()
def verify(folder, shape, w):
    from transformers import Gemma3ForCausalLM

    net, n = DraftNet(shape, "cpu", 1400), 1400
    ref = Gemma3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(400, shape.vocab, (1, n), generator=torch.Generator().manual_seed(3))
    tokens[0, 0] = 2
    a = net.logits(w, net.hidden(w, tokens, Mask(shape, 1, n, 2, "cpu")(tokens)))
    b = ref(tokens).logits.float()
    print(f"against transformers, {n} tokens, f32: largest logit difference "
          f"{(a - b).abs().max().item():.2e} "
          f"(logits up to {b.abs().max().item():.1f}), same top-1 "
          f"{(a.argmax(-1) == b.argmax(-1)).float().mean().item():.4f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--checkpoint")
    ap.add_argument("--random", help="a name of draft_net.SHAPES")
    ap.add_argument("--vocab", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--verify", action="store_true")
    a = ap.parse_args()
    if a.random:
        shape = SHAPES[a.random]
        w = DraftNet(shape, "cpu").init(1)
    else:
        state = torch.load(a.checkpoint, map_location="cpu")
        shape, w = Shape(**state["shape"]), state["weights"]
    w = {n: w[n].detach().float() for n in shape.shapes()}
    os.makedirs(a.out, exist_ok=True)
    write_safetensors(
        os.path.join(a.out, "model.safetensors"), {n: to_bf16(t.numpy()) for n, t in w.items()}
    )
    shutil.copyfile(a.vocab, os.path.join(a.out, "draft_vocabulary.json"))
    with open(os.path.join(a.out, "config.json"), "w") as f:
        json.dump(config(shape), f, indent=2)
        f.write("\n")
    print(f"{a.out}: {shape.parameters() / 1e6:.2f} M parameters")
    if a.verify:
        verify(a.out, shape, w)


if __name__ == "__main__":
    main()
