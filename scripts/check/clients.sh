#!/usr/bin/env bash
# Runs real clients of `gemma serve`, from their registries, with default settings and the address
# of a server of the bundled model. The table CLIENTS in clients/clients.py lists them. The entry
# "types" validates answers against the types of three packages (clients/answers.py).
#
#   scripts/check/clients.sh [GEMMA [CLIENT...]]    GEMMA is target/release/gemma by default
#
#   CLIENTS=DIR      installations of the clients; they are made where missing, which needs the
#                    network, and used again. Without it they go when the script ends. A client that
#                    cannot be installed is skipped, and the script says so.
#
# Agents send prompts of up to 25,000 tokens. The bundled model was trained for 2,048 positions, and
# gets 32,768 for them. This tests requests and answers, not the agents' work. Its answers to these
# prompts often do not end, so they get at most 500 tokens.
set -euo pipefail
gemma=$(realpath "${1:-target/release/gemma}")
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d)
# shellcheck source=scripts/check/server.sh
. scripts/check/server.sh
demo=
trap 'stop_server; server=$demo; stop_server; rm -rf "$scratch"' EXIT

mkdir "$scratch/demo" "$scratch/long"
work=$scratch/demo
HOME=$scratch start_server
demo=$server demo_address=$address
work=$scratch/long
HOME=$scratch start_server --ctx-size 32768 --max-tokens 500

python3 scripts/check/clients/clients.py \
  "$gemma" "http://$demo_address" "http://$address" "$scratch" "${CLIENTS:-$scratch/clients}" "${@:2}"
