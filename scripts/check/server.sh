# Sourced by scripts that talk to a server; they set gemma, the binary, and work, a directory.
# shellcheck shell=bash
server=

# Starts a server with these options on any free port, and waits until it answers. Sets `server` to
# its process and `address` to its HOST:PORT.
start_server() { # options of gemma serve
  : >"$work/said"
  "$gemma" serve --port 0 "$@" 2>"$work/said" &
  server=$!
  until grep -q 'answers at' "$work/said"; do
    kill -0 "$server" 2>/dev/null || { cat "$work/said" >&2; exit 1; }
    sleep 0.1
  done
  address=$(sed -n 's|.*answers at http://\([^ ]*\).*|\1|p' "$work/said")
}

# Ends the server, if one runs. It completes its running answers.
stop_server() {
  [ -n "$server" ] || return 0
  kill "$server" 2>/dev/null || true
  wait "$server" || true
  server=
}
