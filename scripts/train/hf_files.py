"""The files of a Hugging Face directory: configs, chat template, safetensors; random-weight models.

    python hf_files.py --tokenizer tokenizer.json --out DIR [--random]

writes DIR/demo-target and DIR/demo-draft; with --random also a model.safetensors with random
weights (only to develop a loader on). Needs numpy alone.
"""
import argparse
import json
import os
import shutil

import numpy as np

MODELS = {
    "demo-target": dict(dim=768, layers=12, ffn=3072, heads=12, kv_heads=6, pattern=6),
    # No layer of the draft is global: it reads the end of a long prompt alone.
    "demo-draft": dict(dim=256, layers=3, ffn=1024, heads=4, kv_heads=2, pattern=6),
}
VOCAB, HEAD_DIM, WINDOW, CONTEXT = 16384, 64, 512, 2048

# The system message and the last message of the user: a model of this size answers each message
# by itself.
TEMPLATE = (
    "{{ bos_token }}"
    "{%- set lead = namespace(text='') -%}"
    "{%- set turns = namespace(list=messages) -%}"
    "{%- if messages and messages[0].role == 'system' -%}"
    "{%- set turns.list = messages[1:] -%}"
    "{%- if messages[0].content is string -%}{%- set lead.text = messages[0].content + '\n\n' -%}"
    "{%- else -%}{%- set lead.text = messages[0].content[0].text + '\n\n' -%}{%- endif -%}"
    "{%- endif -%}"
    "{%- set last = namespace(at=0) -%}"
    "{%- for turn in turns.list -%}"
    "{%- if turn.role == 'user' -%}{%- set last.at = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for turn in turns.list[last.at:] -%}"
    "{%- if turn.role != ['user', 'assistant'][loop.index0 % 2] -%}"
    "{{ raise_exception('turns must alternate: user, assistant, user, ...') }}"
    "{%- endif -%}"
    "{{ '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) + '\n' }}"
    "{%- if loop.first -%}{{ lead.text }}{%- endif -%}"
    "{%- if turn.content is string -%}{{ turn.content | trim }}"
    "{%- else -%}{%- for part in turn.content -%}"
    "{%- if part.type == 'text' -%}{{ part.text | trim }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)


def config(name):
    m = MODELS[name]
    return {
        "architectures": [
            "Gemma3ForCausalLM"
        ], "model_type": "gemma3_text", "attention_bias": False,
        "attention_dropout": 0.0, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "head_dim": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": m[
            "dim"
        ], "initializer_range": 0.02,
        "intermediate_size": m["ffn"], "max_position_embeddings": CONTEXT,
        "num_attention_heads": m["heads"], "num_hidden_layers": m["layers"],
        "num_key_value_heads": m[
            "kv_heads"
        ], "query_pre_attn_scalar": HEAD_DIM, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": WINDOW, "sliding_window_pattern": m[
            "pattern"
        ], "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB,
    }


def shapes(name):
    """Tensor name -> shape, in the order of the file."""
    m = MODELS[name]
    d, f, q, kv = m["dim"], m["ffn"], m["heads"] * HEAD_DIM, m["kv_heads"] * HEAD_DIM
    out = {"model.embed_tokens.weight": (VOCAB, d)}
    for i in range(m["layers"]):
        p = f"model.layers.{i}."
        out |= {p + "input_layernorm.weight": (d,), p + "self_attn.q_proj.weight": (q, d),
                p + "self_attn.k_proj.weight": (kv, d), p + "self_attn.v_proj.weight": (kv, d),
                p + "self_attn.o_proj.weight": (d, q), p + "self_attn.q_norm.weight": (HEAD_DIM,),
                p + "self_attn.k_norm.weight": (
                    HEAD_DIM,
                ), p + "post_attention_layernorm.weight": (d,),
                p + "pre_feedforward_layernorm.weight": (d,), p + "mlp.gate_proj.weight": (f, d),
                p + "mlp.up_proj.weight": (f, d), p + "mlp.down_proj.weight": (d, f),
                p + "post_feedforward_layernorm.weight": (d,)}
    out["model.norm.weight"] = (d,)
    return out


def to_bf16(x):
    """float32 -> bfloat16 bits, rounded to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path, tensors):
    """tensors: name -> uint16 array of bfloat16 bits."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, t in tensors.items():
        header[name] = {
            "dtype": "BF16", "shape": list(t.shape), "data_offsets": [offset, offset + 2 * t.size]
        }
        offset += 2 * t.size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for t in tensors.values():
            f.write(np.ascontiguousarray(t).tobytes())


def write_configs(name, tokenizer, out):
    os.makedirs(out, exist_ok=True)
    shutil.copyfile(tokenizer, os.path.join(out, "tokenizer.json"))
    files = {
        "config.json": config(name),
        # Greedy by default: a model of this size says what it was taught only where nothing is
        # drawn.
        "generation_config.json": {"bos_token_id": 2, "do_sample": False, "eos_token_id": [1, 106],
                                   "pad_token_id": 0, "temperature": 1.0, "top_k": 64,
                                   "top_p": 0.95},
        "tokenizer_config.json": {
            "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT, "tokenizer_class": "PreTrainedTokenizerFast",
            "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
            "chat_template": TEMPLATE},
    }
    for file, value in files.items():
        with open(os.path.join(out, file), "w", encoding="utf-8") as f:
            json.dump(value, f, indent=2)
            f.write("\n")


def random_weights(name, seed=0):
    rng = np.random.default_rng(seed)
    return {n: to_bf16(np.zeros(s) if len(s) == 1 else rng.standard_normal(s, np.float32) * 0.02)
            for n, s in shapes(name).items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--random", action="store_true")
    a = ap.parse_args()
    for name in MODELS:
        d = os.path.join(a.out, name)
        write_configs(name, a.tokenizer, d)
        if a.random:
            write_safetensors(os.path.join(d, "model.safetensors"), random_weights(name))
        n = sum(int(np.prod(s)) for s in shapes(name).values())
        print(name, f"{n / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
