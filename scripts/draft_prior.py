"""The mixer's weights of a draft memory, as src/draft/prior.rs.

  gemma bench --replay TRAIN.jsonl --tokenizer GEMMA --draft MEDIUM --draft-memory DIR/       (weights for temperature 0)
  gemma bench --only text --temp 1 --draft-tree 15 --prompts TRAIN.jsonl --tokenizer GEMMA --model MEDIUM --draft SMALL \
    --draft-memory OTHER/       (for others)
  draft_prior.py DIR/*.table OTHER/*.table > src/draft/prior.rs

TRAIN.jsonl is text that the drafts were trained on, GEMMA a directory with Gemma 3's tokenizer.json, MEDIUM and SMALL directories with the
files of draft/gemma3-draft. Those in the project are of 160 texts (20,699 tokens, 40 of each kind) and of what the medium draft wrote as an
answer to 60 prompts, each begun with the weights before.
"""

import struct
import sys

FEATURES = 7
HEADER = 8 + 32 + 32
NAMES = ["everywhere"]
NAMES += [f"match of {n}" for n in ("none", "1", "2", "3", "4-7", "8-15", "16 and more")]
NAMES += ["no model"] + [f"model {n}" for n in ("below .25", "below .5", "below .75", "below .92", "surer")]
NAMES += ["no record", "last token known", "pair seen once", "2-4 times", "more often"]


def weights(path, warm):
    data = open(path, "rb").read()
    count, _ = struct.unpack_from("<II", data, HEADER)
    floats = struct.unpack_from(f"<{count}f", data, HEADER + 8)
    half = floats[count // 2 :] if warm else floats[: count // 2]
    return [half[i : i + FEATURES] for i in range(0, len(half), FEATURES)]


def block(name, rows):
    lines = [f"const {name}: Sets = ["]
    for row, label in zip(rows, NAMES, strict=True):
        lines.append(f"    [{', '.join(f'{w:.3f}' for w in row)}], // {label}")
    return "\n".join(lines + ["];"])


cold, warm = sys.argv[1:]
print(
    f"""//! The mixer's weights before it has seen anything of the text at hand: what it learnt from the drafts' training text.
//!
//! Written by `scripts/draft_prior.py`, which says how. Columns: longest match, shorter match, pair, last token, model, noise, none.

use super::mix::Sets;

/// `warm` for a temperature above 0.
pub fn weights(warm: bool) -> Sets {{
    if warm {{ WARM }} else {{ COLD }}
}}

#[rustfmt::skip]
#[allow(clippy::approx_constant)] // learnt, whatever it looks like
{block("COLD", weights(cold, False))}

#[rustfmt::skip]
{block("WARM", weights(warm, True))}"""
)
