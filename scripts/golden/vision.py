#!/usr/bin/env python3
"""Makes tests/golden/vision: tiny random checkpoints that read images, and results of Hugging Face
transformers for images.

    python -m venv V && V/bin/pip install torch torchvision transformers pillow
    V/bin/python scripts/golden/vision.py [OUT]

`pixels.json` has hashes of the outputs of transformers' Pillow processors for images of many sizes.
`files.json` has small files of all kinds, with the pixels that Pillow reads from them. Each folder
has a checkpoint of one family, saved by transformers in bf16 and computed in f32, and golden.json:
soft tokens of two images, and texts with images. Images are made by a formula, `picture`, that the
Rust tests have too. The masks are passed as a dictionary from the model's own helper, because the
forward of Gemma4Unified builds others. The same versions give the same bytes."""

import hashlib
import io
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from model import OUT as GOLDEN
from model import kinds, randomize, rope, text_values, text_values_4, write_golden
from PIL import Image, ImageOps
from transformers import (Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig,
                          Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig,
                          Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration,
                          Gemma4UnifiedTextConfig)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4_unified.image_processing_gemma4_unified import patches_merge

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN / "vision"
BOI, EOI, SOFT = 250, 251, 252
GREEDY = 12

# Width and height: larger, smaller, odd, thin, and a size that fits as it is.
SIZES = [
    (1, 1), (2, 3), (13, 5), (48, 48), (96, 96), (100, 61), (61, 100), (640, 480), (333, 777),
    (5, 900), (900, 5), (1600, 3), (897, 895), (1344, 1008), (816, 768),
]  # fmt: skip
# The other sizes have the first and the third.
BUDGETS = [70, 140, 280, 560, 1120]
ALL_BUDGETS = [(2, 3), (640, 480), (900, 5)]


def picture(width, height, seed):
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    value = x * (7 + 5 * c) + y * (11 + 3 * seed) + ((x * y) >> (2 + c)) * (seed + 1)
    return ((value + 40 * c + ((x ^ y) & 31) * 3) & 255).astype(np.uint8)


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def processor(family, **changes):
    if family == "gemma3":
        return Gemma3ImageProcessorPil(**{"size": {"height": 896, "width": 896}} | changes)
    return Gemma4ImageProcessorPil(**changes)


def process(family, pixels, patch, processor):
    """The inputs of the model for one picture, and the f32 values of its patches, a row each."""
    out = processor(Image.fromarray(pixels), return_tensors="pt")
    if family == "gemma3":
        values = out["pixel_values"]
        n = values.shape[-1] // patch
        rows = values[0].reshape(3, n, patch, n, patch).permute(1, 3, 0, 2, 4).reshape(n * n, -1)
        return {"pixel_values": values}, rows.numpy()
    values, places = out["pixel_values"].float(), out["image_position_ids"]
    if family == "gemma4-unified":
        values, places = merged(values[0], places[0], processor.pooling_kernel_size)
    inside = (places[0] != -1).all(-1)
    return {"pixel_values": values, "image_position_ids": places}, values[0][inside].numpy()


def merged(values, places, kernel):
    """Merges patches like the image processor of Gemma4Unified, which has no Pillow version."""
    inside = (places != -1).all(-1)
    n = int(inside.sum()) // kernel**2
    values, places = patches_merge(values[inside][None], places[inside][None], n)
    return values, places


def write_pixels():
    cases = []
    for width, height in SIZES:
        pixels = picture(width, height, 1)
        _, rows = process("gemma3", pixels, 14, processor("gemma3"))
        cases.append({"family": "gemma3", "size": [width, height], "budget": 256,
                      "values": digest(rows)})  # fmt: skip
        for budget in BUDGETS if (width, height) in ALL_BUDGETS else BUDGETS[:3:2]:
            for family in ("gemma4", "gemma4-unified"):
                made = processor("gemma4", max_soft_tokens=budget)
                inputs, rows = process(family, pixels, 16, made)
                places = inputs["image_position_ids"][0]
                side = 3 if family == "gemma4" else 1
                grid = [int(v) // side for v in (places.max(0).values + 1)]
                cases.append({"family": family, "size": [width, height], "budget": budget,
                              "grid": grid, "values": digest(rows)})  # fmt: skip
    made_by = f"scripts/golden/vision.py, transformers {transformers.__version__}"
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "pixels.json").write_text(
        '{"made_by": ' + json.dumps(made_by) + ',\n"cases": [\n' + lines + "\n]}\n")


def on_white(rgba):
    """Blends transparent colours with white, rounded to nearest."""
    value, alpha = rgba[..., :3].astype(int), rgba[..., 3:].astype(int)
    return ((value * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def write_files():
    """Writes files of all kinds. JPEG decoders differ by a few levels; all others are exact."""
    rgb = Image.fromarray(picture(13, 9, 1))
    alpha = Image.fromarray(picture(13, 9, 3)[..., 0])
    rgba = rgb.copy()
    rgba.putalpha(alpha)
    palette = rgb.quantize(16)
    grey16 = np.asarray(rgb.convert("L")).astype(np.uint16) * 251 + 77
    cases = []

    def add(name, kind, image, **options):
        data = io.BytesIO()
        image.save(data, kind, **options)
        read = Image.open(io.BytesIO(data.getvalue()))
        read = ImageOps.exif_transpose(read)
        has_alpha = "A" in read.mode or "transparency" in read.info
        if read.mode == "I;16":
            pixels = np.repeat((np.asarray(read) >> 8).astype(np.uint8)[..., None], 3, -1)
        elif has_alpha:
            pixels = on_white(np.asarray(read.convert("RGBA")))
        else:
            pixels = np.asarray(read.convert("RGB"))
        height, width, _ = pixels.shape
        cases.append({"name": name, "size": [width, height], "has_alpha": has_alpha,
                      "file": data.getvalue().hex(), "rgb": pixels.tobytes().hex()})  # fmt: skip

    def turned(n):
        exif = Image.Exif()
        exif[0x0112] = n
        return exif

    add("rgb.png", "PNG", rgb)
    add("palette.png", "PNG", palette)
    add("palette-transparent.png", "PNG", palette, transparency=3)
    add("grey.png", "PNG", rgb.convert("L"))
    add("grey-alpha.png", "PNG", rgba.convert("LA"))
    add("grey-16.png", "PNG", Image.fromarray(grey16))
    add("bits.png", "PNG", rgb.convert("1"))
    add("rgba.png", "PNG", rgba)
    add("turned.png", "PNG", rgb, exif=turned(6))
    add("lossless.webp", "WEBP", rgb, lossless=True)
    add("lossless-alpha.webp", "WEBP", rgba, lossless=True)
    add("lossy.webp", "WEBP", rgb, quality=80)
    add("turned.webp", "WEBP", rgb, lossless=True, exif=turned(8))
    add("grey.jpg", "JPEG", rgb.convert("L"), quality=95)
    add("progressive.jpg", "JPEG", rgb, quality=95, subsampling=0, progressive=True)
    for n in range(1, 9):
        add(f"turned-{n}.jpg", "JPEG", rgb, quality=95, subsampling=0, exif=turned(n))
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    (OUT / "files.json").write_text("[\n" + lines + "\n]\n")


TOKENS = dict(boi_token_index=BOI, eoi_token_index=EOI, image_token_index=SOFT)
TOKENS_4 = dict(boi_token_id=BOI, eoi_token_id=EOI, image_token_id=SOFT, audio_token_id=253,
                video_token_id=254)  # fmt: skip
TEXT = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)
TEXT_4 = TEXT | dict(
    num_hidden_layers=4, layer_types=kinds(4, 2), global_head_dim=64,
    num_global_key_value_heads=1, sliding_window=160, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=0, use_bidirectional_attention="vision")  # fmt: skip


def gemma3():
    text = text_values(**TEXT, num_hidden_layers=3, layer_types=kinds(3, 3), sliding_window=100,
                       rope_parameters=rope(8.0))  # fmt: skip
    vision = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
                  image_size=96, patch_size=6, vision_use_head=False)  # fmt: skip
    config = Gemma3Config(text_config=Gemma3TextConfig(**text), vision_config=vision,
                          mm_tokens_per_image=16, **TOKENS)  # fmt: skip
    return Gemma3ForConditionalGeneration, config


def gemma4():
    vision = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=2, head_dim=16, patch_size=4, position_embedding_size=220,
                  use_clipped_linears=True, standardize=True)  # fmt: skip
    config = Gemma4Config(text_config=Gemma4TextConfig(**text_values_4(**TEXT_4)),
                          vision_config=vision, **TOKENS_4)  # fmt: skip
    return Gemma4ForConditionalGeneration, config


def unified():
    vision = dict(patch_size=4, mm_embed_dim=32, mm_posemb_size=80, output_proj_dims=32)
    config = Gemma4UnifiedConfig(text_config=Gemma4UnifiedTextConfig(**text_values_4(**TEXT_4)),
                                 vision_config=vision, **TOKENS_4)  # fmt: skip
    return Gemma4UnifiedForConditionalGeneration, config


def randomize_tower(model, seed):
    """Sets weights of the tower for which every part matters, and limits that clamp."""
    generator = torch.Generator().manual_seed(seed)

    def noise(shape):
        return torch.rand(shape, generator=generator) * 2 - 1

    def is_tower(name):
        return any(part in name for part in ("vision", "multi_modal"))

    for name, p in sorted(model.named_parameters()):
        if not is_tower(name):
            continue
        if p.dim() == 1:
            is_weight = name.endswith(("weight", "norm.weight")) and "soft_emb" not in name
            values = noise(p.shape) * 0.4 + (1.0 if is_weight else 0.0)
        elif "position" in name or "pos_embedding" in name:
            values = noise(p.shape) * 0.7
        else:
            inputs = p.shape[0] if "mm_input_projection" in name else p.numel() // p.shape[0]
            values = noise(p.shape) * math.sqrt(3 / inputs)
        p.data.copy_(values.bfloat16().float())
    for name, buffer in sorted(model.named_buffers()):
        if not is_tower(name):
            continue
        if name.endswith(("_min", "_max")):
            values = 0.8 + 0.4 * noise(buffer.shape)
            values = -values if name.endswith("_min") else values
        elif name.endswith("std_scale"):
            values = 0.3 + 0.1 * noise(buffer.shape)
        elif name.endswith("std_bias"):
            values = noise(buffer.shape) * 2
        else:
            continue
        buffer.data.copy_(values.bfloat16().float())


def soft_tokens(model, family, inputs):
    with torch.no_grad():
        out = model.get_image_features(**inputs, return_dict=True).pooler_output
    out = torch.cat(list(out)) if isinstance(out, (list, tuple)) else out
    return out.reshape(-1, out.shape[-1])


def logits_of(model, ids, tokens, features):
    """Returns the logits of all positions. `tokens` are 1 at places of images."""
    config = model.config
    ids, kinds_ = torch.tensor([ids]), torch.tensor([tokens])
    embeds = model.get_input_embeddings()(torch.where(ids == SOFT, 0, ids))
    embeds = embeds.masked_scatter((ids == SOFT)[..., None], features)
    key = "token_type_ids" if "Gemma3" in type(model).__name__ else "mm_token_type_ids"
    masks = type(model).create_masks_for_generate(
        config=config, inputs_embeds=embeds, attention_mask=torch.ones_like(ids), cache=None,
        position_ids=torch.arange(ids.shape[1])[None], is_first_iteration=True,
        **{key: kinds_})  # fmt: skip
    with torch.no_grad():
        out = model(inputs_embeds=embeds, attention_mask=masks, use_cache=False)
    return out.logits[0].float()


def texts(model, soft, windows):
    """Makes texts with images, each with its window: one image, two, one in the second turn, one
    that is longer than the window, and a greedy text."""
    generator = torch.Generator().manual_seed(7)

    def words(n):
        return torch.randint(3, 106, (n,), generator=generator).tolist()

    def image(i):
        return [BOI] + [SOFT] * len(soft[i]) + [EOI]

    wide, narrow = windows
    plans = [
        ("one image", wide, [2] + words(5) + image(0) + words(9), [0]),
        ("no image", wide, [2] + words(30), []),
        ("two images", wide, [2] + words(3) + image(0) + words(2) + image(1) + words(6), [0, 1]),
        ("two images, swapped", wide, None, [1, 0]),
        ("second turn", wide, [2] + words(20) + [106] + words(4) + image(1) + words(7), [1]),
        ("longer than the window", narrow, [2] + words(8) + image(0) + words(12), [0]),
    ]
    # The swapped text has the words of the one before it.
    two = plans[2][2]
    parts = (two[1:4], two[4 + len(image(0)):][:2], two[-6:])
    swapped = [2] + parts[0] + image(1) + parts[1] + image(0) + parts[2]
    plans[3] = plans[3][:2] + (swapped,) + plans[3][3:]
    done = []
    for name, window, ids, images in plans:
        model.config.text_config.sliding_window = window
        for layer in model.modules():
            if getattr(layer, "sliding_window", None):
                layer.sliding_window = window
        features = torch.cat([soft[i] for i in images]) if images else torch.zeros(0)
        tokens = [int(token == SOFT) for token in ids]
        logits = logits_of(model, ids, tokens, features)
        log_probs = logits.double().log_softmax(-1)
        nll = [-log_probs[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
        text = list(ids)
        margin = math.inf
        for _ in range(GREEDY):
            tokens = [int(token == SOFT) for token in text]
            last = logits_of(model, text, tokens, features)[-1].double()
            last[BOI:] = -math.inf
            best = last.sort(descending=True)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            text.append(best.indices[0].item())
        done.append({
            "name": name, "window": window, "ids": ids, "images": images,
            "nll": [float(f"{v:.8g}") for v in nll], "top1": logits.argmax(-1).tolist(),
            "last": [float(f"{v:.7g}") for v in logits[-1].tolist()],
            # Ids of images and marks are left out of a greedy text.
            "greedy": text[len(ids):], "greedy_margin": float(f"{margin:.4g}"),
        })  # fmt: skip
        print(f"  {name}: {len(ids)} ids, mean nll {np.mean(nll):.3f}, greedy margin {margin:.3g}")
    return done


def family(name, make, patch, sizes, windows, seed, **changes):
    torch.manual_seed(seed)
    kind, config = make()
    model = kind._from_config(config, attn_implementation="eager").float().eval()
    randomize(model, torch.bfloat16, seed)
    randomize_tower(model, seed)
    made = processor("gemma3" if name == "gemma3" else "gemma4", **changes)
    images, soft = [], []
    # The last picture is faint: the variance of its pixels is near the epsilon of LayerNorm.
    sizes = [(size, False) for size in sizes] + [((40, 60), True)]
    for i, ((width, height), is_faint) in enumerate(sizes):
        pixels = picture(width, height, i + 2)
        pixels = (pixels >> 6) + 100 if is_faint else pixels
        inputs, rows = process(name, pixels, patch, made)
        tokens = soft_tokens(model, name, inputs)
        soft.append(tokens)
        images.append({
            "size": [width, height], "seed": i + 2, "is_faint": is_faint, "tokens": len(tokens),
            "values": digest(rows),
            "soft": [[float(f"{v:.7g}") for v in row] for row in tokens.tolist()],
        })  # fmt: skip
        print(f"{name}: {width} x {height} gives {len(tokens)} tokens, spread "
              f"{tokens.std():.3f}")  # fmt: skip
    golden = {
        "made_by": f"scripts/golden/vision.py, transformers {transformers.__version__}, torch "
                   f"{torch.__version__}",
        "images": images,
    }  # fmt: skip
    golden["texts"] = texts(model, soft, windows)
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    model.config.text_config.sliding_window = windows[0]
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    made.save_pretrained(folder)
    write_golden(folder, golden)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_pixels()
    write_files()
    family("gemma3", gemma3, 6, [(150, 97), (64, 201)], (100, 12), 11,
           size={"height": 96, "width": 96})  # fmt: skip
    small = dict(patch_size=4, max_soft_tokens=70)
    family("gemma4", gemma4, 4, [(100, 61), (30, 210)], (160, 24), 12, **small)
    family("gemma4-unified", unified, 4, [(100, 61), (30, 210)], (160, 24), 16, **small)
