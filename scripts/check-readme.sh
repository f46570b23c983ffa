#!/usr/bin/env bash
# Checks README.md and docs/: the length of README, the output of its commands, the options that the
# pages name, the paths and links in them, and the Rust version.
#
#   scripts/check-readme.sh [GEMMA]      GEMMA is the binary, target/release/gemma by default
#
# The language of a block decides how its commands are checked:
#   ```console   "$ COMMAND" and its output. The command runs in an empty directory with an empty
#                home. The output is compared word by word, because lines may break elsewhere.
#   ```sh        a command that needs a download, a model or a build. It does not run, but each call
#                of gemma must parse: --help is appended to its options, and a wrong option or value
#                is refused before it.
set -euo pipefail
gemma=$(realpath "${1:-target/release/gemma}")
cd "$(dirname "$0")/.."
max_lines=80 max_words=900
pages=(README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs/*.md)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin" "$work/home" "$work/here"
ln -s "$gemma" "$work/bin/gemma"

failures=0
fail() {
  printf 'check-readme: %s\n' "$*" >&2
  failures=$((failures + 1))
}

# Prints the lines of a page's blocks in one language.
blocks() { # language, page
  awk -v fence='```'"$1" '/^```/ { inside = ($0 == fence); next } inside' "$2"
}

# Runs bash on standard input like a new user who has only the binary.
as_a_new_user() {
  (cd "$work/here" && env -i PATH="$work/bin:$PATH" HOME="$work/home" timeout 300 bash -o pipefail)
}

# Prints a page's text outside of blocks, as one line.
prose() { # page
  awk '/^```/ { inside = !inside; next } !inside' "$1" | tr '\n' ' '
}

# Prints the anchors of a page's headings, as GitHub makes them.
anchors() { # page
  sed -n 's/^##* //p' "$1" | tr '[:upper:]' '[:lower:]' | sed 's/[^a-z0-9 _-]//g; s/ /-/g'
}

lines=$(wc -l <README.md) words=$(wc -w <README.md)
[ "$lines" -le "$max_lines" ] || fail "README.md has $lines lines, more than $max_lines"
[ "$words" -le "$max_words" ] || fail "README.md has $words words, more than $max_words"

rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
grep -qF "Rust $rust " README.md || fail "README.md does not name Rust $rust, which Cargo.toml asks for"

# Splits standard input into words with one space between two.
words_of() {
  tr -s '[:space:]' ' ' | sed 's/^ //; s/ $//'
}

# Compares the output that a page shows with the output of the command.
run=0
compare() { # page, command, what the page shows
  [ -n "$2" ] || return 0
  run=$((run + 1))
  local printed
  if ! printed=$(as_a_new_user <<<"$2" 2>"$work/stderr"); then
    fail "$1: this command failed: $2"
    cat "$work/stderr" >&2
  elif [ "$(words_of <<<"$printed")" != "$(words_of <<<"$3")" ]; then
    fail "$1: what the page shows (-) is not what this command prints (+): $2"
    diff -u <(fmt -w 100 <<<"$3") <(fmt -w 100 <<<"$printed") | tail -n +4 >&2 || true
  fi
}
for page in "${pages[@]}"; do
  command="" shown=""
  while IFS= read -r line; do
    case $line in
      '$ '*)
        compare "$page" "$command" "$shown"
        command=${line#'$ '} shown=""
        ;;
      *) shown+=$line$'\n' ;;
    esac
  done < <(blocks console "$page")
  compare "$page" "$command" "$shown"
done
[ "$run" -ge 2 ] || fail "README.md shows fewer than two commands with what they print"

# README's predicted speeds are those of `gemma plan`, which exits with 5 if the model does not fit
# here.
predicted() { # size, recipe
  { "$gemma" plan "$1" --recipe "$2" --bandwidth 75 -d cpu --json 2>"$work/stderr" || [ $? = 5 ]; } | python3 -c '
import json, sys
plan = json.load(sys.stdin)
print("{:.1f} GB | {:.2g} |".format(plan["cpu"]["total"] / 1e9, plan["predicted"]["tokens_per_s_plain"][0]))'
}
while read -r memory size recipe name; do
  end=$(predicted "$size" "$recipe") || fail "gemma plan $size --recipe $recipe: $(cat "$work/stderr")"
  grep -F "| $memory GB | $name" README.md | grep -qF -- "$end" || fail "README.md: $size, $recipe: gemma plan says $end"
done <<<"8 4b q4_0 Gemma 3 4B
16 gemma4-12b q4_0 Gemma 4 12B
16 27b 9gb Gemma 3 27B
32 27b q4_0 Gemma 3 27B
24 gemma4-26b-a4b q4_0 Gemma 4 26B-A4B"

# Calls that cannot run here must parse. Other programs do nothing, except for a gemma in their
# arguments.
cat >"$work/parse" <<'BASH'
gemma() {
  local why
  why=$("$GEMMA" "$@" --help 2>&1 >/dev/null </dev/null) || printf '%s\n' "gemma $*: ${why%%$'\n'*}" >>"$WORK/refused"
}
command_not_found_handle() {
  while [ $# -gt 0 ] && [ "$1" != gemma ]; do shift; done
  [ $# = 0 ] || "$@"
}
SLURM_ARRAY_TASK_ID=1 PATH=/nonexistent
BASH
for page in "${pages[@]}"; do
  blocks sh "$page" >"$work/block"
  # Files that the calls read.
  for input in $(grep -oE ' <[a-z][a-z./-]*' "$work/block" | tr -d ' <'); do echo '{}' >"$work/here/$input"; done
  (cd "$work/here" && GEMMA=$gemma WORK=$work bash <(cat ../parse ../block)) >/dev/null
  [ ! -s "$work/refused" ] || fail "$page: refused: $(cat "$work/refused")"
  rm -f "$work/refused"
done

# Options that the text names must exist. The help of a command begins with its usage.
help=$("$gemma" --help)
for command in $(sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p' <<<"$help"); do
  [ "$command" = help ] || help+=$("$gemma" help "$command")
done
for page in "${pages[@]}"; do
  while IFS= read -r option; do
    grep -qE -- "(^|[^a-z-])$option([^a-z-]|\$)" <<<"$help" || fail "$page: no command has the option $option"
  done < <(prose "$page" | grep -oE '`(--|gemma )[^`]*`' | grep -oE -- '--[a-z][a-z0-9-]*' | sort -u)
done

# Paths of the project that the text names must exist. NAME is a placeholder.
for page in "${pages[@]}" ./*/README.md draft/*/README.md scripts/train/README.md; do
  while IFS= read -r path; do
    [ -e "$path" ] || fail "$page: there is no $path"
  done < <(prose "$page" | grep -oE '`(src|crates|tests|scripts|shaders|examples|quant|draft|docs|fuzz)/[^`]*`' |
    tr -d '`' | sed 's/ .*//' | grep -v NAME | sort -u)
done

# Links inside the project must lead somewhere.
for page in "${pages[@]}" ./*/README.md draft/*/README.md; do
  while IFS= read -r link; do
    file=${link%%#*} anchor=""
    [ "$file" = "$link" ] || anchor=${link#*#}
    target=$(dirname "$page")/$file
    [ -n "$file" ] || target=$page
    if [ ! -e "$target" ]; then
      fail "$page: the link $link leads nowhere"
    elif [ -n "$anchor" ] && ! anchors "$target" | grep -qxF -- "$anchor"; then
      fail "$page: $target has no heading for #$anchor"
    fi
  done < <(prose "$page" | grep -oE '\]\([^)]*\)' | sed 's/^](//; s/)$//' | grep -vE '^[a-z]+:')
done

[ "$failures" = 0 ] || exit 1
echo "README.md: $lines lines, $words words; $run commands print what the pages show"
