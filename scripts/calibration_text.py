"""Writes quant/calibration.txt, the built-in text of `gemma quantize --calibrate builtin`, from this repository's own writing.

    python scripts/calibration_text.py

Questions and answers of scripts/train/seeds become chats in Gemma's turns; between them stand pieces of documentation and code.
The result depends on the files alone, so that it can be made again.
"""
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PIECE = 2400  # characters of a piece of code or documentation
CODE = [
    "src/decode/mod.rs", "src/sampler/mod.rs", "src/kv.rs", "src/engine/timeline.rs", "src/draft/ngram.rs", "src/tensor/hadamard.rs",
    "src/compute/reference/attention.rs", "src/checkpoint/header.rs", "src/cli/input.rs", "src/models/rope.rs", "src/tensor/trellis.rs",
    "scripts/train/model.py", "scripts/train/data.py", "scripts/train/train_tokenizer.py", "scripts/golden.py",
]
TEXT = [
    "README.md", "draft/README.md", "draft/demo-target/README.md", "quant/README.md", "scripts/README.md", "scripts/train/README.md",
    "tests/README.md", "src/lib.rs",
]


def chats():
    """Each question with its answer, all spellings of a question in turn."""
    for path in sorted((ROOT / "scripts/train/seeds").glob("*.txt")):
        for block in path.read_text().split("\nQ: ")[1:]:
            questions, _, answer = block.partition("\n")
            for i, question in enumerate(questions.split(" || ")):
                if i < 2:
                    yield f"<start_of_turn>user\n{question.strip()}<end_of_turn>\n<start_of_turn>model\n{answer.strip()}<end_of_turn>\n"


def pieces(names):
    for name in names:
        text = (ROOT / name).read_text()
        for start in range(0, len(text) - PIECE // 2, PIECE):
            yield text[start:start + PIECE] + "\n"


def main():
    talk, rest = list(chats()), []
    code, text = list(pieces(CODE)), list(pieces(TEXT))
    for i in range(max(len(code), len(text))):
        rest += code[i:i + 1] + text[i:i + 1]
    out, step = [], max(1, len(talk) // len(rest))
    for i, piece in enumerate(rest):
        out += talk[i * step:(i + 1) * step] + [piece]
    out += talk[len(rest) * step:]
    (ROOT / "quant/calibration.txt").write_text("".join(out))


if __name__ == "__main__":
    main()
