#!/usr/bin/env bash
# Compiles the program's kernels for AMD GPUs that are not present, with the compiler of AMD's
# Vulkan driver (Mesa's RADV), and compares registers, code and instructions with the budgets in
# scripts/check/amd/budgets.txt. Exits with 1 if one is exceeded.
#
#   scripts/check/amd.sh [LISTER]           LISTER is the built examples/kernels, which it
#                                           otherwise builds
#   scripts/check/amd.sh --model [LISTER]   prints the modelled passes on a Radeon 780M alone: the
#                                           tables of docs/LAPTOP.md
#   scripts/check/amd.sh --update [LISTER]  lowers budgets to what the kernels cost now, and writes
#                                           those tables
#   scripts/check/amd.sh --fetch            fetches the driver into the cache, where the system has
#                                           another version; Debian 12 and 13, 12 MB, nothing is
#                                           installed
#
# The figures are those of one Mesa series, 25.0, which has a null winsys that needs no device.
# Without this driver the script prints a message and passes, unless GEMMA_REQUIRE_RADV=1. RADV
# names a libvulkan_radeon.so at another place.
set -euo pipefail
cd "$(dirname "$0")/../.."
series=25.0
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gemma-radv/$series

version() { # driver
  grep -aom1 'Mesa [0-9][0-9.]*[0-9]' "$1" | cut -d' ' -f2
}

# Prints the first driver of the series: the requested one, a fetched one, or the system's.
find_driver() {
  local path
  for path in "${RADV:-}" {"$cache",}/usr/lib{/*,64}/libvulkan_radeon.so; do
    if [ -f "$path" ] && [[ "$(version "$path")" = "$series".* ]]; then
      echo "$path"
      return
    fi
  done
}

fetch() ( # a subshell, with an exit of its own
  sources=(-o APT::Sandbox::User=root)
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  case $codename in
    bookworm)
      # The mirror that the system itself uses.
      mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages')
      mirror=$(awk '!/security/ && !n++' <<<"$mirror")
      mirror=${mirror:-http://deb.debian.org/debian}
      echo "deb $mirror bookworm-backports main" >"$work/sources.list"
      mkdir -p "$work/lists/partial"
      sources+=(-o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=/dev/null)
      sources+=(-o "Dir::State::Lists=$work/lists")
      apt-get "${sources[@]}" update -qq
      ;;
    trixie) ;;
    *)
      echo "error: check/amd knows no Mesa $series for this system" >&2
      echo "help: set RADV to a libvulkan_radeon.so of Mesa $series" >&2
      exit 1
      ;;
  esac
  (cd "$work" && apt-get "${sources[@]}" download -qq mesa-vulkan-drivers libdrm2 libdrm-amdgpu1)
  mkdir -p "$work/root"
  for package in "$work"/*.deb; do dpkg -x "$package" "$work/root"; done
  rm -rf "$cache"
  mkdir -p "$cache/usr"
  cp -r "$work/root/usr/lib" "$cache/usr/"
  if [ -z "$(find_driver)" ]; then
    echo "error: the package archive has another Mesa than $series" >&2
    exit 1
  fi
  # It needs libraries that come with the system's own driver.
  load="import ctypes; ctypes.CDLL('$(find_driver)')"
  if ! LD_LIBRARY_PATH=$(dirname "$(find_driver)") python3 -c "$load"; then
    rm -rf "$cache"
    echo "error: the driver lacks libraries" >&2
    echo "help: apt-get install mesa-vulkan-drivers" >&2
    exit 1
  fi
)

mode=()
case ${1:-} in
  --fetch)
    [ -n "$(find_driver)" ] || fetch
    echo "$(find_driver): Mesa $(version "$(find_driver)")"
    exit
    ;;
  --model | --update) mode=("$1") && shift ;;
  -*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

driver=$(find_driver)
if [ -z "$driver" ]; then
  echo "SKIPPED: no AMD GPU's code is looked at, since there is no RADV of Mesa $series here" >&2
  echo "help: scripts/check/amd.sh --fetch (Debian 12 or 13; 12 MB into the cache)" >&2
  [ "${GEMMA_REQUIRE_RADV:-}" != 1 ]
  exit
fi
lister=${1:-}
if [ -z "$lister" ]; then
  cargo build -q --release --example kernels
  lister=${CARGO_TARGET_DIR:-target}/release/examples/kernels
fi
echo "check/amd: Mesa $(version "$driver"), $driver" >&2
export PYTHONDONTWRITEBYTECODE=1
exec python3 scripts/check/amd/gate.py "${mode[@]}" --driver "$driver" --spirv shaders/spirv "$lister"
