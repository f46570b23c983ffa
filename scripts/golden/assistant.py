#!/usr/bin/env python3
"""Makes tests/golden/assistant-*: random Gemma 4 assistants, and transformers' drafts with them.

    V/bin/python scripts/golden/assistant.py [OUT]

The targets are those of model.py, read from OUT. An assistant has queries only: its layers attend
to the keys and values of the target's last local and last global layer. A prompt of n tokens is
committed, and `last` is the token that follows. All drafted positions use the K/V of the n prompt
tokens and position n. The first input is the embedding of `last` concatenated with the target's
final-norm hidden state of position n - 1. Each later input is the embedding of the drafted token
concatenated with the projected state of its parent. The logits are not soft-capped, although
`assistant-long` names a cap. `tree` has the logits of other children of the root `last`. Computed
in f32 with eager attention. The same versions give the same bytes again."""

import json
import shutil

import torch
import transformers
from transformers import (Gemma4AssistantConfig, Gemma4AssistantForCausalLM,
                          Gemma4ForConditionalGeneration, Gemma4TextConfig,
                          Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM,
                          Gemma4UnifiedForConditionalGeneration, Gemma4UnifiedTextConfig)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from model import OUT, VOCAB, kinds, randomize

STEPS = 4
CHILDREN = [5, 77, 200]
WIDE = (Gemma4ForConditionalGeneration, Gemma4AssistantConfig, Gemma4TextConfig,
        Gemma4AssistantForCausalLM)
UNIFIED = (Gemma4UnifiedForConditionalGeneration, Gemma4UnifiedAssistantConfig,
           Gemma4UnifiedTextConfig, Gemma4UnifiedAssistantForCausalLM)

# name, target, seed, tokens of the prompt, classes, values of the text section
CASES = [
    ("assistant-wide", "gemma4-wide", 1, 36, WIDE, dict(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        layer_types=kinds(2, 2))),
    ("assistant-unified", "gemma4-unified", 2, 200, UNIFIED, dict(
        hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6,
        layer_types=kinds(4, 4))),
    # Longer than the window, with another number of heads than the target's.
    ("assistant-long", "gemma4-unified", 3, 400, UNIFIED, dict(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=12,
        layer_types=kinds(2, 2), final_logit_softcapping=30.0)),
]  # fmt: skip


def text_values(target, values):
    """Returns the assistant's text section. Its kv heads, window and tokens are the target's."""
    local, global_ = (target.per_layer_config[target.layer_types.index(kind)]
                      for kind in ("sliding_attention", "full_attention"))
    return dict(
        vocab_size=VOCAB, head_dim=local.head_dim, global_head_dim=global_.head_dim,
        num_key_value_heads=local.num_key_value_heads,
        num_global_key_value_heads=global_.num_key_value_heads,
        attention_k_eq_v=target.attention_k_eq_v, sliding_window=target.sliding_window,
        rms_norm_eps=target.rms_norm_eps, max_position_embeddings=target.max_position_embeddings,
        bos_token_id=2, eos_token_id=[1, 106], pad_token_id=0, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    ) | values  # fmt: skip


def step(assistant, embed, tokens, hidden, shared, position):
    """Returns logits and projected states of n tokens. hidden [n, dim] has their parents'
    states."""
    n = len(tokens)
    inputs = torch.cat([embed(torch.tensor(tokens)), hidden], -1)[:, None]
    out = assistant(
        inputs_embeds=inputs, position_ids=torch.full((n, 1), position),
        shared_kv_states={k: tuple(t.expand(n, -1, -1, -1) for t in kv)
                          for k, kv in shared.items()},
    )  # fmt: skip
    return out.logits[:, 0], out.last_hidden_state[:, 0]


def drafted_by_generate(target, assistant, ids):
    """Returns tokens and logits of the first round of transformers' own assisted generation.

    Transformers lets a query see `sliding_window + 1` keys of the prompt, so the window is
    narrowed by 2."""
    rounds = []
    kind = SinglePositionMultiTokenCandidateGenerator
    plain = kind.get_candidates

    def recorded(self, *arguments, **options):
        candidates, logits = plain(self, *arguments, **options)
        if logits is not None:
            rounds.append((candidates[0, len(ids):].tolist(), logits[0]))
        return candidates, logits

    text = assistant.config.get_text_config()
    assistant.generation_config.num_assistant_tokens = STEPS
    kind.get_candidates = recorded
    text.sliding_window -= 2
    try:
        prompt = torch.tensor([ids])
        # Without a mask, generate hides the positions of padding tokens.
        target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=assistant,
                        do_sample=False, max_new_tokens=8, eos_token_id=None)  # fmt: skip
    finally:
        kind.get_candidates = plain
        text.sliding_window += 2
    return rounds[0]


def read(kind, folder):
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def numbers(rows):
    return [[float(f"{v:.7g}") for v in row.tolist()] for row in rows]


@torch.no_grad()
def case(name, target_name, seed, n, classes, values):
    kind_of_target, config, text, kind = classes
    target = read(kind_of_target, OUT / target_name)
    target_text = target.config.get_text_config()
    assistant = kind._from_config(config(
        text_config=text(**text_values(target_text, values)),
        backbone_hidden_size=target_text.hidden_size, use_ordered_embeddings=False,
    ), attn_implementation="eager").float()  # fmt: skip
    randomize(assistant, torch.bfloat16, seed)
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    assistant.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assistant = read(kind, folder)

    generator = torch.Generator().manual_seed(200 + seed)
    ids = [2] + torch.randint(0, 250, (n - 1,), generator=generator).tolist()
    out = target(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True,
                 return_shared_kv_states=True)  # fmt: skip
    embed = target.get_input_embeddings()
    shared = dict(out.shared_kv_states)
    # After a step, the target's cache has `sliding_window - 1` positions of a local layer, so a
    # drafted position sees at most that many.
    seen = target_text.sliding_window - 1
    shared["sliding_attention"] = tuple(t[:, :, -seen:] for t in shared["sliding_attention"])
    last = out.logits[0, -1].argmax().item()
    root = out.hidden_states[-1][0, -1:]

    token, hidden, logits, tokens, states = last, root, [], [], []
    for _ in range(STEPS):
        row, hidden = step(assistant, embed, [token], hidden, shared, n)
        token = row[0].argmax().item()
        logits.append(row[0])
        tokens.append(token)
        states.append(hidden)
    logits = torch.stack(logits)
    children = [tokens[0], *CHILDREN]
    tree, _ = step(assistant, embed, children, states[0].expand(4, -1), shared, n)

    best = logits.sort(-1, descending=True).values
    margin = (best[:, 0] - best[:, 1]).min().item()
    assert margin > 0.05, f"{name}: the drafted tokens are not firm ({margin})"
    assert (tree[0] - logits[1]).abs().max() < 1e-4, "a child in a batch is not the chain's"
    drafted, own = drafted_by_generate(target, assistant, ids)
    worst = (own - logits).abs().max().item()
    assert drafted == [last, *tokens] and worst < 1e-4, f"{name}: generate differs by {worst}"

    golden = {
        "made_by": f"scripts/golden/assistant.py, transformers {transformers.__version__}, torch "
                   f"{torch.__version__}",
        "target": target_name, "ids": ids, "last": last, "logits": numbers(logits),
        "tokens": tokens, "tree": {"children": CHILDREN, "logits": numbers(tree[1:])},
    }  # fmt: skip
    lines = ",\n".join(
        f"  {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in golden.items()
    )
    (folder / "golden.json").write_text("{\n" + lines + "\n}\n")
    size = (folder / "model.safetensors").stat().st_size
    print(f"{name}: {size} bytes, last {last}, drafts {tokens}, least margin {margin:.3f}, logits "
          f"{logits.min().item():.1f} to {logits.max().item():.1f}, generate differs by "
          f"{worst:.1e}")  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for values in CASES:
        case(*values)
