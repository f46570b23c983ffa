"""Writes a checkpoint with the shape of Gemma 3 27B, few layers and the whole table, of random bf16
weights.

    python scripts/bench/shape_27b.py DIR [LAYERS]

Two layers are 4.5 GB. The checkpoint is for measuring memory and time, not quality."""
import json
import pathlib
import random
import struct
import sys

DIM, FFN, VOCAB, HEADS, KV, HEAD = 5376, 21504, 262208, 32, 16, 128


def shapes(layers):
    yield "embed_tokens", [VOCAB, DIM]
    for i in range(layers):
        for name, shape in {
            "input_layernorm": [DIM], "self_attn.q_proj": [
                HEADS * HEAD, DIM
            ], "self_attn.k_proj": [KV * HEAD, DIM],
            "self_attn.v_proj": [
                KV * HEAD, DIM
            ], "self_attn.q_norm": [HEAD], "self_attn.k_norm": [HEAD],
            "self_attn.o_proj": [
                DIM, HEADS * HEAD
            ], "post_attention_layernorm": [DIM], "pre_feedforward_layernorm": [DIM],
            "mlp.gate_proj": [FFN, DIM], "mlp.up_proj": [
                FFN, DIM
            ], "mlp.down_proj": [DIM, FFN], "post_feedforward_layernorm": [DIM],
        }.items():
            yield f"layers.{i}.{name}", shape
    yield "norm", [DIM]


def chunks(count):
    """Returns random bf16 values of magnitudes around 1/100: a random low byte, and a high byte
    with sign and one of two exponents. They are the same on every machine."""
    source = random.Random(1)
    high = bytes((0x80 if b & 128 else 0) | (0x3C if b & 3 == 0 else 0x3B) for b in range(256))
    while count:
        n = min(count, 8 << 20)
        values = bytearray(source.randbytes(2 * n))
        values[1::2] = bytes(values[1::2]).translate(high)
        yield values
        count -= n


def main():
    out, layers = pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2
    out.mkdir(parents=True)
    config = {
        "architectures": [
            "Gemma3ForCausalLM"
        ], "model_type": "gemma3_text", "hidden_size": DIM, "intermediate_size": FFN,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "head_dim": HEAD,
        "query_pre_attn_scalar": 168, "rope_scaling": {
            "factor": 8.0, "rope_type": "linear"
        }, "sliding_window": 1024,
        "vocab_size": VOCAB, "bos_token_id": 2, "eos_token_id": [
            1, 106
        ], "max_position_embeddings": 131072,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    header, at = {}, 0
    for name, shape in shapes(layers):
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"model.{name}.weight"] = {
            "dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(out / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in chunks(at // 2):
            file.write(values)


if __name__ == "__main__":
    main()
