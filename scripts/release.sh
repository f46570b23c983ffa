#!/usr/bin/env bash
# Makes the packages of one commit:
#
#     scripts/release.sh [DIRECTORY]          # default: target/dist
#     GEMMA_BINARY=FILE scripts/release.sh    # packages an existing program, for tests
#
#   gemma-VERSION-x86_64-linux.tar.gz   program, man pages, completions, licences, SBOM
#   gemma_VERSION-1_amd64.deb           the same as a package for Debian and Ubuntu
#   SHA256SUMS
#
# The same commit, Rust, binutils and libc give the same bytes in any directory. Needs cargo-deb
# (cargo install --locked cargo-deb), dpkg-dev and python3. Changes nothing outside target/ and
# DIRECTORY.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
export LC_ALL=C TZ=UTC

for tool in cargo-deb:"cargo install --locked cargo-deb" \
    dpkg-shlibdeps:"apt-get install dpkg-dev" python3:"apt-get install python3"; do
  command -v "${tool%%:*}" >/dev/null || { echo "error: ${tool%%:*} is missing: ${tool#*:}" >&2; exit 1; }
done
if [ -n "$(git status --porcelain)" ]; then
  echo "warning: files here differ from the commit, so nobody can make the same bytes again" >&2
fi

out=$(realpath -m "${1:-target/dist}")
stage=$PWD/target/dist/root
version=$(cargo metadata --no-deps --format-version 1 | python3 -c 'import json, sys; print(json.load(sys.stdin)["packages"][0]["version"])')
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

# Paths of this machine stay out of the program. In this variable the options may hold blanks.
cargo_home=${CARGO_HOME:-$HOME/.cargo}
export CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=$PWD=/gemma"$'\x1f'"--remap-path-prefix=$cargo_home=/cargo"
export CARGO_PROFILE_RELEASE_DEBUG=0 CARGO_PROFILE_RELEASE_STRIP=symbols
unset RUSTFLAGS CARGO_BUILD_TARGET
export CARGO_TARGET_DIR=$PWD/target/dist/build
gemma=${GEMMA_BINARY:-$CARGO_TARGET_DIR/release/gemma}
if [ -z "${GEMMA_BINARY:-}" ]; then
  cargo build --release --locked --bin gemma
  if grep -aqF -e "$PWD/" -e "$cargo_home/" "$gemma"; then
    echo "error: the program names paths of this machine" >&2
    exit 1
  fi
fi

rm -rf "$stage"
share=$stage/share
mkdir -p "$out" "$share"/{man/man1,bash-completion/completions,zsh/site-functions,fish/vendor_completions.d,doc/gemma/docs}
install -D -m 755 "$gemma" "$stage/bin/gemma"
run() { env -i HOME=/nonexistent "$gemma" "$@"; }
run man | gzip -9n >"$share/man/man1/gemma.1.gz"
for command in $(run man | grep -o '^gemma\\-[a-z]*(1)' | sed 's/gemma\\-//; s/(1)//'); do
  run man "$command" | gzip -9n >"$share/man/man1/gemma-$command.1.gz"
done
run completions bash >"$share/bash-completion/completions/gemma"
run completions zsh >"$share/zsh/site-functions/_gemma"
run completions fish >"$share/fish/vendor_completions.d/gemma.fish"
install -m 644 README.md LICENSE LICENSE-MIT LICENSE-APACHE "$share/doc/gemma/"
install -m 644 docs/*.md "$share/doc/gemma/docs/"
python3 scripts/third_party.py >"$share/doc/gemma/THIRD-PARTY.txt"
python3 scripts/crates.py sbom >"$share/doc/gemma/sbom.cdx.json"

name=gemma-$version-x86_64-linux
tar --sort=name --format=gnu --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --transform="s,^\.,$name," \
  -C "$stage" -c . | gzip -9n >"$out/$name.tar.gz"
deb=gemma_$version-1_amd64.deb
# The weights hardly shrink: better compression would take minutes for 2 % less.
cargo deb -q --compress-system --compress-type gz --no-build --no-strip --locked --output "$out/$deb"
(cd "$out" && sha256sum "$name.tar.gz" "$deb" | tee SHA256SUMS)
