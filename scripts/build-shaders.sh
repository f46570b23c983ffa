#!/usr/bin/env bash
# Compiles shaders/*.comp to shaders/spirv/ and writes the manifest that tests/source/shaders.rs
# compares the sources with.
#
#   scripts/build-shaders.sh [GLSLANG]
#
# GLSLANG is the compiler, or a command that runs it: "chroot /trixie glslang". The committed files
# come from glslang 15.2.0 (Debian 13); another version may give other bytes of the same meaning.
set -euo pipefail
cd "$(dirname "$0")/../shaders"
read -r -a glslang <<<"${1:-glslang}"
version=$("${glslang[@]}" --version | sed -n 's/^Glslang Version: *//p')
[ "$version" = "11:15.2.0" ] || echo "note: glslang $version, the committed files come from 11:15.2.0" >&2
mkdir -p spirv
for source in *.comp; do
  "${glslang[@]}" -V --target-env vulkan1.3 --quiet -Iinclude "$source" -o "spirv/${source%.comp}.spv"
done
# name, SHA-256 of the source with all includes, SHA-256 of the SPIR-V
for source in *.comp; do
  name=${source%.comp}
  printf '%s %s %s\n' "$name" "$(cat include/*.glsl "$source" | sha256sum | cut -c1-64)" "$(sha256sum <"spirv/$name.spv" | cut -c1-64)"
done >manifest.txt
