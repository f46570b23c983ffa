#!/usr/bin/env bash
# Measures the server: its overhead over the engine, throughput by clients, the first token during a
# long prompt, the tokens that an agent's turns read again, and a question about a report that an
# earlier process has read (--cache-dir).
#
#   scripts/bench/serve.sh [GEMMA] [SERVE OPTIONS...]
#
# GEMMA is the binary, target/release/gemma by default. The model is the bundled pair on the CPU
# unless the options name another. Needs python3.
#
#   PAIRS=10         pairs of answers, served and not, for what the server adds
#   TOKENS=200       tokens of each answer
#   CLIENTS="1 8 32" clients at once
#   ROUNDS=3         rounds of each number of clients
#   LONG=5600        words of the long prompt and of the report
#   CONTEXT=16384    --ctx-size
#   TURNS=20         turns of each agent, and RULES=350 sentences of what it begins with
#   CACHE_RAM=1GB    --cache-ram of the agents' server, which answers two texts at once
#   LLAMA=DIR        of llama-batched-bench: measures that after the clients, needs -m FILE.gguf
#   PARTS="overhead engine agents report"
set -euo pipefail
gemma=$(realpath "${1:-target/release/gemma}")
shift || true
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
# shellcheck source=scripts/check/server.sh
. scripts/check/server.sh
trap 'stop_server; rm -rf "$work"' EXIT

# Starts a server with these options and measures a part against it. "$@" are the options that the
# engine alone has too.
part() {
  local name=$1 own=$2
  shift 2
  # shellcheck disable=SC2086
  start_server --log off --ctx-size "${CONTEXT:-16384}" $own "$@"
  GEMMA=$gemma SERVER=$server python3 scripts/bench/serve.py "$name" "$address" "$@"
  stop_server
}

mkdir "$work/demo"
ln -s "$PWD"/draft/demo-target/{{config,generation_config,tokenizer}.json,model.safetensors} \
  "$work/demo"
for name in ${PARTS:-overhead engine agents report}; do
  case $name in
    # The engine alone runs while the server waits, on the same device.
    overhead) part overhead "--device-lock off" "$@" --draft off ;;
    agents)
      # The demo's template shows only the last message. Gemma's own, used without it, shows all of
      # them.
      model=(-m "$work/demo")
      case " $* " in *" -m "* | *" --model"*) model=() ;; esac
      part agents "--parallel 2 --cache-ram ${CACHE_RAM:-1GB}" "${model[@]}" "$@"
      ;;
    report)
      export FOUND=$work/found QUESTION
      cache="--parallel 1 --cache-dir $work/cache"
      QUESTION="first run: What does item 7 cost?" part report "$cache" "$@"
      QUESTION="second run: What does item 9 cost?" part report "$cache" "$@"
      QUESTION="without the cache: What does item 9 cost?" part report "--parallel 1" "$@"
      ;;
    *) part "$name" "--parallel 32 --max-queue 1000" "$@" ;;
  esac
  # This runs after the server has ended, because the server's cache takes the device's memory.
  if [ "$name" = engine ] && [ -n "${LLAMA:-}" ]; then python3 scripts/bench/serve.py peer - "$@"; fi
done
