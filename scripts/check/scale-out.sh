#!/usr/bin/env bash
# Runs one batch with records of every kind, divided in every way. Each id must have the same text
# or error each time. Prints the ways that could not be tried here.
#
#   scripts/check/scale-out.sh [GEMMA] [RECORDS]
#
# Needs python3; GNU parallel and PySpark (with Java) for their parts.
set -euo pipefail
gemma=$(realpath "${1:-target/release/gemma}") records=${2:-500}
scripts=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 - "$records" >in.jsonl <<'PY'
import json, sys
schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"], "additionalProperties": False}
def record(n):
    ask = {"id": f"r{n}", "prompt": f"Name {n} things that are blue.", "max_tokens": 1 + n % 4}
    match n % 20:
        case 1: return ask | {"regex": "[a-z ]{1,9}", "max_tokens": 30}
        case 3: return ask | {"json_schema": schema, "max_tokens": 30}
        case 5: return ask | {"regex": "[a-z]{99}"}  # cut off before it is complete
        case 7: return ask | {"prompt": ["no", "text"]}
        case 9: return ask | {"temperature": "hot"}
        case 11: return ask | {"prompt": "long " * 5000}
        case 13 | 14: return ask | {"prompt": "  "}
        case 15 | 16: return {"id": f"r{n}", "messages": {"role": "user"}}
        case 17: return {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions",
                         "body": {"messages": [{"role": "user", "content": ask["prompt"]}], "max_tokens": 3}}
        case _: return ask
for n in range(int(sys.argv[1])):
    print('{"id": "cut in the mi' if n % 20 == 19 else json.dumps(record(n)))
PY
options=(--seed 4 -q)
share=(-t 1) # of processes that run at the same time
"$gemma" generate --batch in.jsonl "${options[@]}" >one.jsonl
ways=()

for i in 1 2 3; do "$gemma" generate --batch in.jsonl --shard "$i/3" "${options[@]}" "${share[@]}" & done >shards.jsonl
wait
ways+=(shards)

"$gemma" generate --batch in.jsonl --parallel 8 "${options[@]}" >at-once.jsonl
cmp one.jsonl at-once.jsonl
ways+=(at-once)

# Killed while several records are under way, and resumed.
"$gemma" generate --batch in.jsonl --parallel 8 --resume killed.jsonl "${options[@]}" &
until [ "$(cat killed.jsonl 2>/dev/null | wc -l)" -gt "$((records / 3))" ]; do sleep 0.01; done
kill -9 $! 2>/dev/null || true
wait $! 2>/dev/null || true
"$gemma" generate --batch in.jsonl --parallel 8 --resume killed.jsonl "${options[@]}"
cmp one.jsonl killed.jsonl
ways+=(killed)

if command -v parallel >/dev/null; then
  parallel --pipe -k -N "$(((records + 3) / 4))" -j 2 "$gemma" generate --batch - "${options[@]}" "${share[@]}" <in.jsonl >parallel.jsonl
  ways+=(parallel)
else
  echo "not tried: GNU parallel is not installed" >&2
fi

if [ "${SPARK-1}" != 1 ]; then
  echo "not tried: PySpark, which only scripts/check.sh --all tries" >&2
elif python3 -c 'import pyspark' 2>/dev/null && command -v java >/dev/null; then
  spark() { python3 "$scripts/spark_batch.py" "$@" --partitions 4 --gemma "$gemma" -- --seed 4 "${share[@]}"; } # -q is its own
  export SPARK_LOCAL_IP=127.0.0.1 PYSPARK_SUBMIT_ARGS='--master local[2] --conf spark.ui.enabled=false pyspark-shell'
  spark in.jsonl spark-out 2>spark.log || { tail -20 spark.log >&2; exit 1; }
  cat spark-out/part-* >spark.jsonl
  ways+=(spark)
  # A failing process is an error of the job, never an empty result.
  if python3 "$scripts/spark_batch.py" in.jsonl failed-out --gemma "$gemma" -- -m /nonexistent 2>failed.log; then
    echo "a failing process went unnoticed" >&2
    exit 1
  fi
  grep -q 'exit.* 3' failed.log
else
  echo "not tried: PySpark (python3 -m pip install pyspark) or Java is not installed" >&2
fi

python3 - one "${ways[@]}" <<'PY'
import json, sys
def read(name):
    answers = []
    for line in open(f"{name}.jsonl"):
        reply = json.loads(line)
        # An invalid JSON line has no id. Its id is its line number, which depends on how the batch
        # is divided.
        name = reply.get("custom_id") or reply["id"]
        answers.append((name if isinstance(name, str) else "", json.dumps([reply.get(k) for k in ("text", "error", "response")])))
    return answers
one = read("one")
for name in sys.argv[2:]:
    other = read(name)
    if name in ("shards", "spark"):  # in no order
        other, wanted = sorted(other), sorted(one)
    else:
        wanted = one
    assert len(other) == len(wanted), f"{name}: {len(other)} answers to {len(wanted)} records"
    for mine, theirs in zip(wanted, other):
        assert mine == theirs, f"{name}: {theirs}, alone {mine}"
    failed = sum('"code"' in answer for _, answer in other)
    print(f"{name}: {len(other)} records, {failed} of them failed, the same answer for each id")
PY
