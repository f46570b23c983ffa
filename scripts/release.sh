#!/usr/bin/env bash
# Makes the packages of one commit:
#
#     scripts/release.sh [DIRECTORY] [SYSTEM...]      # target/dist; x86_64 arm64 windows
#     GEMMA_BINARY=FILE scripts/release.sh DIRECTORY  # packages a program for x86_64, for tests
#
#   gemma-VERSION-SYSTEM-linux.tar.gz   program, man pages, completions, licences, SBOM
#   gemma_VERSION-1_ARCH.deb            the same as a package for Debian and Ubuntu
#   gemma-VERSION-windows.zip           the same for Windows on x86-64, with install.ps1
#   SHA256SUMS
#
# The same commit, compilers, binutils and libc give the same bytes in any directory. Needs dpkg,
# binutils, zip and python3; scripts/cross.sh installs what the other systems need. Else it changes
# nothing outside target/ and DIRECTORY.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
export LC_ALL=C TZ=UTC

for tool in dpkg-deb:dpkg readelf:binutils zip:zip python3:python3; do
  command -v "${tool%%:*}" >/dev/null ||
    { echo "error: ${tool%%:*} is missing: apt-get install ${tool#*:}" >&2; exit 1; }
done
if [ -z "${GEMMA_BINARY:-}" ] && [ "$(cat target/checked 2>/dev/null)" != "$(git rev-parse HEAD)" ]; then
  echo "error: this commit did not pass all checks here: run scripts/check.sh --all" >&2
  exit 1
fi
if [ -n "$(git status --porcelain)" ]; then
  echo "warning: files here differ from the commit, so nobody can make the same bytes again" >&2
fi

out=$(realpath -m "${1:-target/dist}")
shift || true
systems=("$@")
if [ "$#" = 0 ]; then systems=(x86_64 arm64 windows); fi
if [ -n "${GEMMA_BINARY:-}" ]; then systems=(x86_64); fi
work=$PWD/target/dist/work
rm -rf "$work"
mkdir -p "$out" "$work"
version=$(cargo metadata --no-deps --format-version 1 |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["packages"][0]["version"])')
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

# Paths of this machine stay out of the program. In this variable the options may hold blanks.
cargo_home=${CARGO_HOME:-$HOME/.cargo}
export CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=$PWD=/gemma"$'\x1f'"--remap-path-prefix=$cargo_home=/cargo"
export CARGO_PROFILE_RELEASE_DEBUG=0 CARGO_PROFILE_RELEASE_STRIP=symbols
unset RUSTFLAGS CARGO_BUILD_TARGET

# Builds the program of a system, and names its file.
program() { # SYSTEM
  local built
  if [ "$1" != x86_64 ]; then
    built=$(scripts/cross.sh "$1" release | tail -1)
  elif [ -n "${GEMMA_BINARY:-}" ]; then
    built=$GEMMA_BINARY
  else
    built=$PWD/target/dist/build/release/gemma
    CARGO_TARGET_DIR=$PWD/target/dist/build cargo build -q --release --locked --bin gemma >&2
  fi
  if [ -z "${GEMMA_BINARY:-}" ] && grep -aqF -e "$PWD/" -e "$cargo_home/" "$built"; then
    echo "error: the program for $1 names paths of this machine" >&2
    exit 1
  fi
  echo "$built"
}

# The program of this machine writes the texts of all packages.
native=$(program x86_64)
run() { env -i HOME=/nonexistent "$native" "$@"; }

documents() { # DIRECTORY TARGET
  mkdir -p "$1/docs"
  install -m 644 README.md LICENSE LICENSE-MIT LICENSE-APACHE "$1/"
  install -m 644 docs/*.md "$1/docs/"
  CRATES_TARGET=$2 python3 scripts/crates.py licences >"$1/THIRD-PARTY.txt"
  CRATES_TARGET=$2 python3 scripts/crates.py sbom >"$1/sbom.cdx.json"
}

# All files have the time of the commit.
settle() { find "$1" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +; }

linux() { # SYSTEM ARCH PROGRAM
  local root=$work/$1/root package=$work/$1/package command
  local share=$root/share name=gemma-$version-$1-linux
  mkdir -p "$share"/{man/man1,bash-completion/completions,zsh/site-functions,fish/vendor_completions.d}
  install -D -m 755 "$3" "$root/bin/gemma"
  run man | gzip -9n >"$share/man/man1/gemma.1.gz"
  for command in $(run man | grep -o '^gemma\\-[a-z]*(1)' | sed 's/gemma\\-//; s/(1)//'); do
    run man "$command" | gzip -9n >"$share/man/man1/gemma-$command.1.gz"
  done
  run completions bash >"$share/bash-completion/completions/gemma"
  run completions zsh >"$share/zsh/site-functions/_gemma"
  run completions fish >"$share/fish/vendor_completions.d/gemma.fish"
  documents "$share/doc/gemma" "$(target_of "$1")"
  tar --sort=name --format=gnu --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
    --transform="s,^\.,$name," -C "$root" -c . | gzip -9n >"$out/$name.tar.gz"

  # Debian's C library depends on libgcc_s.
  local needed newest
  needed=$(readelf -d "$3" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
    grep -vE '^(libc|libm|libgcc_s|ld-linux.*)\.so' || true)
  if [ -n "$needed" ]; then
    echo "error: the program for $1 needs more than the C library: $needed" >&2
    exit 1
  fi
  newest=$(readelf -V "$3" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -1)
  mkdir -p "$package/DEBIAN" "$package/usr"
  cp -r "$root/." "$package/usr/"
  # Debian's place for functions of zsh.
  mv "$package/usr/share/zsh/site-functions" "$package/usr/share/zsh/vendor-completions"
  cp LICENSE "$package/usr/share/doc/gemma/copyright"
  cat >"$package/DEBIAN/control" <<CONTROL
Package: gemma
Version: $version-1
Architecture: $2
Maintainer: The gemma authors <gemma@localhost>
Section: science
Priority: optional
Installed-Size: $(du -sk --apparent-size "$package/usr" | cut -f1)
Depends: libc6 (>= ${newest#GLIBC_})
Recommends: libvulkan1
Suggests: mesa-vulkan-drivers, bash-completion
Description: Runs Google's Gemma 3 and Gemma 4 models with speculative decoding
 gemma answers prompts and chats with Google's Gemma models, which it reads as
 they are published or after its own quantisation to 2 to 8 bits per weight. A
 small bundled draft model guesses ahead, and the large model checks the guesses
 in one pass, so that the same text comes sooner. A bundled demo model answers
 without any download.
CONTROL
  settle "$package"
  # The weights hardly shrink: better compression would take minutes for 2 % less.
  dpkg-deb --root-owner-group -Zgzip --build "$package" "$out/gemma_$version-1_$2.deb" >/dev/null
}

windows() { # PROGRAM
  local name=gemma-$version-windows
  local root=$work/windows/$name
  mkdir -p "$root"
  install -m 755 "$1" "$root/gemma.exe"
  install -m 644 scripts/install.ps1 "$root/"
  run completions powershell >"$root/completions.ps1"
  documents "$root" "$(target_of windows)"
  settle "$root"
  rm -f "$out/$name.zip"
  (cd "$work/windows" && find "$name" | sort | zip -q -X -9 "$out/$name.zip" -@)
}

target_of() { # SYSTEM
  case $1 in
    x86_64) echo x86_64-unknown-linux-gnu ;;
    arm64) echo aarch64-unknown-linux-gnu ;;
    windows) echo x86_64-pc-windows-gnu ;;
  esac
}

files=()
for system in "${systems[@]}"; do
  case $system in
    x86_64) linux x86_64 amd64 "$native" ;;
    arm64) linux arm64 arm64 "$(program arm64)" ;;
    windows) windows "$(program windows)" ;;
    *) echo "error: there is no system '$system'" >&2 && exit 1 ;;
  esac
  case $system in
    windows) files+=("gemma-$version-windows.zip") ;;
    x86_64) files+=("gemma-$version-x86_64-linux.tar.gz" "gemma_$version-1_amd64.deb") ;;
    arm64) files+=("gemma-$version-arm64-linux.tar.gz" "gemma_$version-1_arm64.deb") ;;
  esac
done
(cd "$out" && sha256sum "${files[@]}" | tee SHA256SUMS)
