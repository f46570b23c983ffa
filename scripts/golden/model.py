#!/usr/bin/env python3
"""Makes tests/golden: tiny random Gemma 3 and Gemma 4 checkpoints, and results of Hugging Face
transformers for them.

    python -m venv V && V/bin/pip install torch transformers
    V/bin/python scripts/golden/model.py [OUT] [--greedy] [--only=NAME]

Weights are rounded to the dtype of their file and used in f32 with eager attention. Transformers
itself saves every checkpoint. `config-v4.json` has the same configuration in the spelling of
transformers 4, or of the first files of Gemma 4; the script checks that transformers reads the same
model from it. The same versions give the same bytes again. `--greedy` keeps the checkpoints and
only writes `greedy` of the Gemma 4 cases again. `--only` makes one case of Gemma 4. assistant.py
makes assistants for the Gemma 4 targets."""

import json
import math
import shutil
import sys
from pathlib import Path

import torch
import transformers
from transformers import (Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration,
                          Gemma3TextConfig, Gemma4Config, Gemma4ForConditionalGeneration,
                          Gemma4TextConfig, Gemma4UnifiedConfig,
                          Gemma4UnifiedForConditionalGeneration, Gemma4UnifiedTextConfig)

ONLY = [a.removeprefix("--only=") for a in sys.argv[1:] if a.startswith("--only=")]
PATHS = [a for a in sys.argv[1:] if not a.startswith("--")]
OUT = Path(PATHS[0] if PATHS else Path(__file__).resolve().parents[2] / "tests/golden")
VOCAB = 256


def text_values(**changes):
    """Returns values that all cases share. The query scale does not follow from the head width, as
    in the 27B model."""
    values = dict(
        vocab_size=VOCAB,
        head_dim=32,
        query_pre_attn_scalar=21,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        bos_token_id=2,
        eos_token_id=[1, 106],
        pad_token_id=0,
    )
    return values | changes


def rope(factor):
    full = {
        "rope_type": "linear", "factor": factor, "rope_theta": 1e6
    } if factor else {"rope_type": "default", "rope_theta": 1e6}
    return {
        "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
    }


def kinds(n_layers, pattern):
    return [
        "full_attention"
        if i % pattern == 0
        else "sliding_attention"
        for i in range(1, n_layers + 1)
    ]


# name, tokens, pattern, rope factor, dtype, multimodal, values
CASES = [
    # Pattern of the real models. The text crosses pages and rings of 256 positions, and the window.
    ("text", 700, 6, 8.0, torch.bfloat16, False, text_values(
        hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=300)),
    ("multimodal", 220, 3, 8.0, torch.bfloat16, True, text_values(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=40)),
    # A separate output head, no scaling of positions, f16.
    ("untied", 300, 2, None, torch.float16, False, text_values(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=33, tie_word_embeddings=False)),
]  # fmt: skip


def text_values_4(**changes):
    """Returns values of the Gemma 4 cases. In global layers the keys are also the values."""
    values = text_values(attention_k_eq_v=True, final_logit_softcapping=30.0) | changes
    values.pop("query_pre_attn_scalar")
    values.pop("attn_logit_softcapping")
    return values


# name, tokens, class of the configuration and of its text section, class of the model, values
CASES_4 = [
    # Heads of 256 and 512 channels, and an odd number of heads for keys and values.
    ("gemma4-wide", 300, Gemma4Config, Gemma4TextConfig,
     Gemma4ForConditionalGeneration, text_values_4(
         hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=3,
         num_key_value_heads=3, head_dim=256, global_head_dim=512, num_global_key_value_heads=1,
         layer_types=kinds(4, 2), sliding_window=40, hidden_size_per_layer_input=0,
         vocab_size_per_layer_input=0)),
    # Pattern of the real models. The text crosses pages and rings of 256 positions.
    ("gemma4-unified", 700, Gemma4UnifiedConfig, Gemma4UnifiedTextConfig,
     Gemma4UnifiedForConditionalGeneration, text_values_4(
         hidden_size=32, intermediate_size=64, num_hidden_layers=12, num_attention_heads=6,
         num_key_value_heads=3, head_dim=32, global_head_dim=64, num_global_key_value_heads=2,
         layer_types=kinds(12, 6), sliding_window=300)),
    # A mixture of experts. Two of them are equal, so that their scores are tied.
    ("gemma4-mixture", 300, Gemma4Config, Gemma4TextConfig,
     Gemma4ForConditionalGeneration, text_values_4(
         hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
         num_key_value_heads=2, head_dim=32, global_head_dim=64, num_global_key_value_heads=1,
         layer_types=kinds(4, 2), sliding_window=40, hidden_size_per_layer_input=0,
         vocab_size_per_layer_input=0, enable_moe_block=True, num_experts=8, top_k_experts=3,
         moe_intermediate_size=32)),
]  # fmt: skip


# Tokens of a greedy text, and of the prompt before it. Among the prompts with clear argmaxes, these
# give the most varied text that crosses the window of 40 (wide) or a page of 256 (unified).
GREEDY = 40
PROMPTS_4 = {"gemma4-wide": 38, "gemma4-unified": 251, "gemma4-mixture": 38}


def randomize(model, dtype, seed):
    """Sets weights for which every part matters: peaked attention, uneven norms, spread logits."""
    is_gemma4 = "Gemma4" in type(model).__name__
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("layer_scalar"):
            values = torch.rand(buffer.shape, generator=generator) * 0.5 + 0.7
            buffer.data.copy_(values.to(dtype).float())
    for name, p in sorted(model.named_parameters()):
        noise = torch.rand(p.shape, generator=generator) * 2 - 1
        if p.dim() == 1:
            is_head = "q_norm" in name or "k_norm" in name
            if is_gemma4:  # its norms add nothing to the weights, and its scores have no scale
                values = noise * 0.25 + 0.6 if is_head else noise * 0.5 + 1.0
            else:
                values = noise * 0.5 + (0.4 if is_head else 0.0)
        else:
            gain = 2.0 if "embed_tokens" in name or "lm_head" in name else 1.0
            # Choices and weights that differ from token to token.
            gain = 8.0 if "router.proj" in name else gain
            values = noise * gain * math.sqrt(3 / p.shape[-1])
        p.data.copy_(values.to(dtype).float())
    for name, p in model.named_parameters():
        if "router.proj" in name or "per_expert_scale" in name or ".experts." in name:
            p.data[5] = p.data[2]


def v4_text(values, pattern, factor):
    """Returns the text section in the spelling of transformers 4: separate theta, local theta,
    scaling and pattern."""
    old = values | {
        "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "sliding_window_pattern": pattern,
    }
    old["rope_scaling"] = {"factor": factor, "rope_type": "linear"} if factor else None
    return old


def build(name, pattern, factor, multimodal, values):
    new = values | {
        "rope_parameters": rope(factor), "layer_types": kinds(values["num_hidden_layers"], pattern)
    }
    old = v4_text(values, pattern, factor)
    if not multimodal:
        old |= {"architectures": ["Gemma3ForCausalLM"], "torch_dtype": "bfloat16"}
        config = Gemma3TextConfig(**new)
        return Gemma3ForCausalLM._from_config(config, attn_implementation="eager"), old
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                  image_size=8, patch_size=4,
                  vision_use_head=False)  # fmt: skip
    outside = dict(
        mm_tokens_per_image=4, boi_token_index=250, eoi_token_index=251, image_token_index=252,
        eos_token_id=[1, 106],
    )
    config = Gemma3Config(text_config=Gemma3TextConfig(**new), vision_config=vision, **outside)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        old.pop(key)
    old = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
           "torch_dtype": "bfloat16",
           "text_config": old,
           "vision_config": vision | {"model_type": "siglip_vision_model"}} | outside
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager"), old


def build_4(config, text, kind, values):
    """Returns the model, and its configuration in the spelling of the first files."""
    model = kind._from_config(config(text_config=text(**values)), attn_implementation="eager")
    old = {"architectures": [kind.__name__], "model_type": config.model_type, "dtype": "bfloat16",
           "text_config": values | {"model_type": text.model_type}}
    return model, old


def logits_of(model, ids):
    with torch.no_grad():
        out = model.float().eval()(input_ids=torch.tensor([ids]), use_cache=False).logits
    return out[0].float()


def logits_with_f16_cache(model, ids):
    """Returns logits with every rotated key and value rounded to f16, as in an f16 cache."""
    module = sys.modules[type(model).__module__]
    plain = module.eager_attention_forward

    def rounded(layer, query, key, value, *rest, **options):
        return plain(layer, query, key.half().float(), value.half().float(), *rest, **options)

    module.eager_attention_forward = rounded
    try:
        return logits_of(model, ids)
    finally:
        module.eager_attention_forward = plain


def nll_of(logits, ids):
    log_probs = logits.double().log_softmax(-1)
    return [-log_probs[i, ids[i + 1]].item() for i in range(len(ids) - 1)]


def check(model, folder, ids, want):
    """Checks that the model read from the files with this configuration gives the same results."""
    again = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    worst = (logits_of(again, ids) - want).abs().max().item()
    assert worst == 0, f"{folder}: read back, logits differ by {worst}"


def write_golden(folder, golden):
    lines = ",\n".join(
        f"  {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in golden.items()
    )
    (folder / "golden.json").write_text("{\n" + lines + "\n}\n")


def add_greedy(name, kind, prompt):
    """Adds to golden.json transformers' continuation of the first `prompt` ids at temperature 0,
    with its own cache."""
    folder = OUT / name
    golden = json.loads((folder / "golden.json").read_text())
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([golden["ids"][:prompt]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY,
        eos_token_id=None, output_logits=True, return_dict_in_generate=True)  # fmt: skip
    best = torch.stack(out.logits).double().sort(-1, descending=True).values
    margin = (best[..., 0] - best[..., 1]).min().item()
    assert margin > 0.02, f"{name}: a margin of {margin}, choose another prompt"
    continuation = out.sequences[0, prompt:].tolist()
    assert len(continuation) == GREEDY
    golden["greedy"] = {"prompt": prompt, "ids": continuation}
    write_golden(folder, golden)
    print(f"{name}: greedy text with {len(set(continuation))} different ids, least margin "
          f"{margin:.4g}")  # fmt: skip


def case(seed, name, n, dtype, values, model, old):
    model = model.float()
    randomize(model, dtype, seed)
    generator = torch.Generator().manual_seed(100 + seed)
    ids = [2] + torch.randint(0, 250, (n - 1,), generator=generator).tolist()
    # Before `to(dtype)` below, which would round the frequencies of the rotation.
    logits, logits_f16 = logits_of(model, ids), logits_with_f16_cache(model, ids)
    assert logits.shape == (n, VOCAB)

    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder)
    model.float()
    (folder / "generation_config.json").unlink(missing_ok=True)
    check(model, folder, ids, logits)
    new_form = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(old))
    check(model, folder, ids, logits)
    (folder / "config.json").write_text(new_form)
    (folder / "config-v4.json").write_text(json.dumps(old, indent=2) + "\n")

    nll, nll_f16 = nll_of(logits, ids), nll_of(logits_f16, ids)
    assert nll != nll_f16, "rounding the cache changed nothing"
    best = logits.double().sort(-1, descending=True).values
    shown = sorted({0, n // 3, min(n - 1, values["sliding_window"] + 1), n - 1})
    golden = {
        "made_by": f"scripts/golden/model.py, transformers {transformers.__version__}, torch "
                   f"{torch.__version__}",
        "ids": ids,
        "nll": [float(f"{v:.8g}") for v in nll],
        "nll_f16_cache": [float(f"{v:.8g}") for v in nll_f16],
        "top1": logits.argmax(-1).tolist(),
        # Smallest distance of the best logit from the second over all positions. Differences below
        # it do not change top1.
        "least_margin": float(f"{(best[:, 0] - best[:, 1]).min().item():.4g}"),
        "rows": {str(i): [float(f"{v:.7g}") for v in logits[i].tolist()] for i in shown},
    }
    write_golden(folder, golden)
    size = (folder / "model.safetensors").stat().st_size
    moved = max(abs(a - b) for a, b in zip(nll, nll_f16))
    print(f"{name}: an f16 cache moves an NLL by up to {moved:.1e}")
    print(f"{name}: {size} bytes, mean nll {sum(nll) / len(nll):.4f}, {min(nll):.3f} to "
          f"{max(nll):.3f}, "
          f"{len(set(golden['top1']))} different top-1, least margin "
          f"{golden['least_margin']}")  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    if "--greedy" not in sys.argv:
        for i, (name, n, pattern, factor, dtype, multimodal, values) in enumerate(CASES):
            if ONLY:
                break
            model = build(name, pattern, factor, multimodal, values)
            case(i + 1, name, n, dtype, values, *model)
        for i, (name, n, *classes, values) in enumerate(CASES_4):
            if ONLY and name not in ONLY:
                continue
            case(i + 1, name, n, torch.bfloat16, values, *build_4(*classes, values))
    for name, _, _, _, kind, _ in CASES_4:
        if ONLY and name not in ONLY:
            continue
        add_greedy(name, kind, PROMPTS_4[name])
