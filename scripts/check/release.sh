#!/usr/bin/env bash
# Installs the package in a bare Debian, runs the commands of README, removes the package, and looks
# for leftovers.
#
#     scripts/check/release.sh [PACKAGE.deb]
#
# The default is the package in target/dist; scripts/release.sh makes one if there is none. Needs
# root, debootstrap and python3. The bare system is kept in ~/.cache/gemma-test. If it cannot be made
# the test is skipped with a message; with GEMMA_REQUIRE_CHROOT=1 that is a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
export LC_ALL=C

skip() {
  echo "SKIPPED: $1; the package was not tested" >&2
  exit "${GEMMA_REQUIRE_CHROOT:-0}"
}
fail() { echo "FAILED: $1" >&2; exit 1; }
[ "$(id -u)" = 0 ] || skip "a bare system can be made by root alone"
command -v debootstrap >/dev/null || skip "debootstrap is missing (apt-get install debootstrap)"

deb=${1:-}
if [ -z "$deb" ]; then
  compgen -G 'target/dist/*_amd64.deb' >/dev/null || scripts/release.sh target/dist x86_64
  deb=$(ls -t target/dist/*_amd64.deb | head -1)
fi

base=${XDG_CACHE_HOME:-$HOME/.cache}/gemma-test/bookworm.tar
root=$(mktemp -d)
mounted=0
clean() {
  if [ "$mounted" = 1 ]; then umount "$root/proc"; fi
  rm -rf "$root"
}
trap clean EXIT
if [ ! -f "$base" ]; then
  echo "== a bare Debian" >&2
  mkdir -p "$(dirname "$base")"
  debootstrap --variant=minbase --include=man-db,bash-completion bookworm "$root" >"$root.log" 2>&1 ||
    { tail -5 "$root.log" >&2; rm -f "$root.log"; skip "debootstrap cannot run here"; }
  rm -f "$root.log"
  tar -C "$root" --one-file-system -cf "$base.new" .
  mv "$base.new" "$base"
else
  tar -C "$root" -xf "$base"
fi
# Parts of the system run as users of their own, which a directory of mktemp would keep out.
chmod 755 "$root"
mount -t proc proc "$root/proc" || skip "/proc cannot be mounted in the bare system"
mounted=1
mkdir -p "$root/home/user"
inside() { chroot "$root" env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/home/user TERM=xterm "$@"; }
# Files in the home directory are the user's own, and the databases of packages change by themselves.
files() { (cd "$root" && find . -path ./proc -prune -o -path ./home/user -prune -o -path ./var/lib/dpkg -prune -o -path ./var/log -prune \
  -o -path ./var/cache/man -prune -o -path ./tmp -prune -o -print | sort); }

step() { echo "== $1" >&2; }
step "install $(basename "$deb")"
before=$(files)
cp "$deb" "$root/tmp/gemma.deb"
inside dpkg -i /tmp/gemma.deb >/dev/null || fail "dpkg cannot install the package"
depends=$(inside dpkg-query -W -f '${Depends}' gemma)
[[ "$depends" =~ ^libc6\ \([^,]*$ ]] || fail "the package depends on more than libc6: $depends"

step "gemma --version"
inside gemma --version | grep -E '^gemma [0-9]+\.[0-9]+' || fail "no version"

step "gemma generate"
answer=$(inside gemma generate "What is photosynthesis?" </dev/null)
printf '%s\n' "$answer"
[ "${#answer}" -ge 40 ] || fail "the answer is too short to be one"

step "gemma chat"
python3 - "$root" <<'PY' || fail "chat does not answer at a terminal"
import os, pty, select, sys, time

inside = ["chroot", sys.argv[1], "env", "-i", "PATH=/usr/bin:/bin", "HOME=/home/user", "TERM=xterm", "gemma", "chat", "-n", "48"]
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(inside[0], inside)


def read(until, seconds=120):
    """What the terminal shows until `until` appears in it, or nothing more does."""
    shown, end = b"", time.monotonic() + seconds
    while time.monotonic() < end and not until(shown):
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            break
        shown += piece
    return shown


read(lambda shown: b"> " in shown)
question = b"What is the capital of France?"
os.write(terminal, question + b"\r")
answer = read(lambda shown: shown.count(b"> ") >= 1 and len(shown) > len(question) + 40)
os.write(terminal, b"\x04")
rest = read(lambda _: False, 30)
_, status = os.waitpid(pid, 0)
print((answer + rest).decode(errors="replace").replace("\r", ""))
sys.exit(status != 0 or len(answer) < len(question) + 20)
PY

step "gemma plan 27b"
plan=$(inside gemma plan 27b) || [ $? = 5 ] || fail "gemma plan 27b"
grep -E '^(model|fits|speed|prompt) ' <<<"$plan" || fail "the plan gives no verdict"

step "manual pages"
inside env MANPAGER=cat MANWIDTH=80 man gemma-generate >"$root/tmp/page"
grep -q '^SYNOPSIS' "$root/tmp/page" && grep -q -- '--max-tokens' "$root/tmp/page" || fail "man gemma-generate shows no page"
for command in $(inside gemma man | grep -o '^gemma\\-[a-z]*(1)' | sed 's/gemma\\-//; s/(1)//'); do
  [ -f "$root/usr/share/man/man1/gemma-$command.1.gz" ] || fail "gemma $command has no page"
done
head -12 "$root/tmp/page"

step "completion"
# shellcheck disable=SC2016
words=$(inside bash -c '
  source /usr/share/bash-completion/bash_completion
  __load_completion gemma
  COMP_WORDS=(gemma gen) COMP_CWORD=1 COMP_LINE="gemma gen" COMP_POINT=9
  "$(complete -p gemma | sed "s/.*-F \([^ ]*\).*/\1/")" gemma gen gemma
  echo "${COMPREPLY[@]}"')
[ "$words" = generate ] || fail "gemma gen<Tab> gives: $words"
echo "gemma gen<Tab> gives: $words"

step "SBOM"
doc=$root/usr/share/doc/gemma
python3 scripts/crates.py sbom | cmp - "$doc/sbom.cdx.json" || fail "the SBOM is not of this commit"
python3 scripts/crates.py binary "$root/usr/bin/gemma" || fail "the SBOM lacks libraries of the program"
python3 - "$doc" <<'PY' || fail "the SBOM and the licences name different libraries"
import json, pathlib, re, sys

doc = pathlib.Path(sys.argv[1])
parts = json.loads((doc / "sbom.cdx.json").read_text())["components"]
named = {(p["name"], p["version"]) for p in parts if p["scope"] == "required"}
licences = (doc / "THIRD-PARTY.txt").read_text().split("=" * 80)[0]
sys.exit(named != set(re.findall(r"^(\S+) (\S+): ", licences, re.M)))
PY

step "remove"
inside dpkg -P gemma >/dev/null
after=$(files)
diff <(printf '%s\n' "$before") <(printf '%s\n' "$after") || fail "the package leaves files behind"

archive=$(ls "$(dirname "$deb")"/gemma-*-x86_64-linux.tar.gz 2>/dev/null | tail -1)
if [ -n "$archive" ]; then
  step "$(basename "$archive")"
  (cd "$(dirname "$archive")" && sha256sum -c --quiet SHA256SUMS) || fail "the checksums are of other files"
  tar -C "$root/usr/local" --strip-components=1 -xzf "$archive"
  inside /usr/local/bin/gemma --version
fi
echo "passed"
