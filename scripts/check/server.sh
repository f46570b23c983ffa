# Sourced by scripts that talk to a server; they set gemma, the binary, and work, a directory.
# shellcheck shell=bash
server=

# Starts a server of these options on any free port, and waits until it answers: `server` is its
# process then, `address` its HOST:PORT.
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

# Ends the server, if one runs; it answers what it has begun.
stop_server() {
  [ -n "$server" ] || return 0
  kill "$server" 2>/dev/null || true
  wait "$server" || true
  server=
}
